"""Verbs of recurrent states: drafts that are taken back, wrong places on the device, forwards that break off, and pages
that are filled from elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.errors import RocmAttnError
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.comparisons import compare_rows
from rocm_lab.soak.draft_forward import draft_id
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.model import HalfWay
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.setting import CHAIN
from rocm_lab.soak.shown_verbs import going_on
from rocm_lab.soak.step_verbs import a_run, by_hand, by_runner, finish_by_hand, judged_step, reserve_for
from tests.amd.random_calls.table_calls import export_pages


def wrong_state(scene: Scene) -> None:
    """Lengths on the device lead one row to where it may have no state: it is reported, or right, and others are."""
    rng = scene.rng
    rows = [row for row in scene.some(3) if scene.history.surely_goes_on(row) and scene.history.length(row) > 1]
    if not rows or scene.open is not None:
        return
    bad, seqs = rows[0], [Seq(row, scene.history.length(row), scene.ids(1)) for row in rows]
    # Within tokens that others share the device moves it: lengths_on_device() has that.
    shared = int(scene.runtime.table.tokens.first_writable[bad])
    places = [
        at for at in range(max(1, shared), scene.history.length(bad)) if not scene.history.going_on.surely(bad, at)
    ]
    reserve_for(scene, seqs)
    if not places or any(scene.room(seq.row) < seq.end for seq in seqs):
        return
    back = Seq(bad, rng.choice(places), seqs[0].ids)
    lengths = scene.ints([back.end, *(seq.end for seq in seqs[1:])])
    ids = [token_id for seq in seqs for token_id in seq.ids]
    bounds = [seq.end for seq in seqs]
    batch = StepBatch(rows, bounds, [1] * len(rows), ids, inputs=DeviceInputs(kv_len=lengths, ahead=0))
    slots = slice(2 * bad, 2 * bad + 2)
    scene.listen()
    before = scene.runtime.states.memory[slots].clone()
    scene.provoked, scene.last = True, None
    run = a_run(scene)
    given = scene.call("a step from a wrong state", lambda: run(scene, batch, None).clone())
    if given is REFUSED:
        return
    scene.history.stored(seqs[1:])
    scene.history.going_on.lose_track(rows)
    scene.history.unsure.update(rows)  # the bound counts as stored
    if scene.listen():
        width = sum(layer.out[0].numel() for layer in scene.model.recurrent)
        if given[0, -width:].any():
            raise Finding(f"row {bad} was refused at {back.begin}, and its outputs are not 0")
        if not torch.equal(scene.runtime.states.memory[slots], before):
            raise Finding(f"row {bad} was refused at {back.begin}, and its states have changed")
        scene.history.give_up([bad])
    else:
        scene.history.stored([back])
        compare_rows(scene, "a step that goes back on the device", [back], given[:1])
    compare_rows(scene, "a step next to one of a wrong state", seqs[1:], given[1:])


def forward_breaks_off(scene: Scene) -> None:
    """A forward raises half way, or its step ends before any layer; the same rows then go on."""
    if scene.open is not None:
        return
    seqs = [
        seq for seq in going_on(scene, most=scene.history.going_on.kept + 2) if scene.history.surely_goes_on(seq.row)
    ]
    if not seqs:
        return
    batch, scene.last, scene.verified = scene.batch(seqs), None, None
    scene.model.breaks_before = scene.rng.randrange(len(scene.model.recurrent))
    try:
        if scene.rng.random() < 0.2:
            with scene.runtime.step(batch):
                scene.say("a step ends before any layer")
        else:
            scene.runner.run_eagerly(batch)
    except HalfWay:
        scene.say("a forward has broken off")
    except RocmAttnError as refusal:
        scene.say(f"refused: {refusal}")
        return
    finally:
        scene.model.breaks_before = -1
    for seq in seqs:
        scene.history.going_on.broke_off(seq.row, seq.begin)
    if not judged_step(scene, by_runner, "the step that broke off, again", seqs, scene.batch(seqs)):
        raise Finding("a step that broke off cannot be repeated")


def recurrent_call(scene: Scene) -> None:
    """A call of a recurrent layer: of the open step, with wrong arguments, or of a step that is over."""
    step = scene.open.step if scene.open is not None else scene.over
    if step is None:
        return
    part, count = step.parts[0], len(scene.model.recurrent)
    number = scene.rng.randrange(count)
    layer = scene.model.recurrent[number]
    is_open = scene.open is not None
    entry = scene.model.entries(part)
    wrong = "" if is_open else "its step is over"

    def too_few() -> Tensor:
        return layer.recur(part, number, entry[1:], layer.x[entry[1:]])

    def recurs() -> Tensor:
        return layer.recur(part, number, entry, layer.x[entry])

    def convolves() -> Tensor:
        return layer.convolve(part, number, entry)

    ways: tuple[tuple[str, Callable[[], Any], str], ...] = (
        ("convolves", convolves, wrong if layer.weight.numel() else ""),
        ("recurs with a token too few", too_few, "a token is missing"),
        (
            "is called by a number that there is not",
            lambda: layer.recur(part, count, entry, layer.x[entry]),
            "no such",
        ),
    )
    if not is_open:
        ways = (*ways, ("recurs after it is over", recurs, wrong))
    name, call, why = scene.one_of("recurrent call", ways)
    given = scene.call(f"recurrent layer {number} {name}", call, wrong=why)
    if given is REFUSED or scene.open is None:
        return
    if layer.weight.numel():
        scene.history.stored_in_layer(scene.open, len(scene.model.outputs) + number)


def states_of_kept(scene: Scene) -> None:
    """States that are kept with pages go, and the pages stay; those of an id that is none do not."""
    table = scene.runtime.table.kept
    ids = list(scene.kept)
    scene.rng.shuffle(ids)
    ids = ids[: scene.rng.randint(0, 2)]
    if scene.dropped and scene.rng.random() < 0.2:
        gone = [scene.dropped[-1]]
        scene.call("have_states of a dropped page", lambda: table.have_states(gone), wrong="it was dropped")
        scene.call("drop_states of a dropped page", lambda: table.drop_states(gone), wrong="it was dropped")
    before = table.num_free_states
    if scene.call(f"drop_states of {ids}", lambda: table.drop_states(ids)) is REFUSED:
        return
    held = sum(scene.kept[id_].has_state for id_ in ids)
    if table.num_free_states != before + held or table.have_states(ids).any():
        raise Finding(f"{held} states were dropped, and {table.num_free_states - before} are free")
    for id_ in ids:
        scene.kept[id_].has_state = False


def masks_and_rounds(scene: Scene) -> None:
    """Trees and rounds of drafts are refused: a state goes on token after token."""
    seqs = going_on(scene)
    if not seqs:
        return
    parents = scene.ints([list(range(-1, len(seq.ids) - 1)) + [-1] * (3 - len(seq.ids)) for seq in seqs])
    masked = scene.batch(seqs, mask=TreeMask(parents))
    first = [int(draft_id(0, 0)) for _ in seqs]
    round_ = draft_batch([seq.row for seq in seqs], [seq.begin for seq in seqs], CHAIN, first)
    why = "states go on token after token"
    scene.call("a step with a mask", lambda: finish_by_hand(scene, scene.runtime.step(masked), masked), wrong=why)
    scene.call("a round of drafts", lambda: scene.runner.run(round_), wrong=why)


def filled_from_elsewhere(scene: Scene) -> None:
    """A row goes back, and its pages are filled with other tokens: it has no state until it begins at token 0."""
    sent = next((each for each in reversed(scene.sent) if not each.is_checked and not each.by_layers), None)
    rows = [row for row in scene.some() if scene.history.length(row)]
    if sent is None or not rows or scene.open is not None:
        return export_pages(scene)
    row, kv_len, table, importer = rows[0], sent.extent.kv_len, scene.runtime.table, scene.movers.importer
    if kv_len > scene.options.max_kv_len:
        return None
    scene.call(f"row {row} goes back to its beginning", lambda: table.truncate(row, 0), right=True)
    scene.history.changed(row)
    scene.history.cut(row, 0)
    scene.last = None

    def fill() -> None:
        table.reserve(row, kv_len)
        importer.import_pages(importer.pages_of(row, kv_len), sent.extent, sent.buffer)
        table.mark_stored([row], [kv_len])

    try:
        fill()
    except RocmAttnError as refusal:
        scene.say(f"refused: {refusal}")
        return None
    scene.say(f"row {row} was filled from elsewhere")
    scene.oracle.begin(row, list(sent.stored))
    scene.history.going_on.begin(row)
    seqs = [Seq(row, kv_len, scene.ids(1))]
    reserve_for(scene, seqs)
    if scene.room(row) > kv_len:
        why = "it has no state"
        scene.call("a filled row goes on", lambda: by_hand(scene, scene.batch(seqs), None), wrong=why)
    return None

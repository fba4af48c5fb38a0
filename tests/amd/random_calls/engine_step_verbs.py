"""Verbs of an engine's steps and graphs, right and wrong ones."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.external import Bounds
from rocm_attn.step.external_step import ONE_EACH, BoolCells, DeviceSpans, ExternalStep
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.oracle import UNKNOWN
from rocm_lab.soak.seq import Seq
from tests.amd.random_calls.engine_scene import MOST_SEQS, EngineScene, Graph
from tests.amd.random_calls.engine_tables import NUM_PAGES, PAGE, ROWS, WIDTH
from tests.amd.random_calls.step_calls import attend_turned, in_another_thread

# Whole steps


def run(
    scene: EngineScene, what: str, seqs: list[Seq], step: ExternalStep, slots: Tensor | None = None, layers: Any = None
) -> Any:
    """Begin, fill, all layers: their outputs, or REFUSED. The step stays the one that has begun."""
    layers = scene.attention.layers if layers is None else layers

    def body() -> list[Tensor]:
        scene.begun, scene.is_filled = None, False
        scene.attention.begin(step)
        if layers is scene.compiled:
            layers.fill(slots=slots)
        else:
            scene.attention.fill(slots)
        return scene.forward(seqs, step.padded_tokens, layers)

    given = scene.call(what, body)
    if given is not REFUSED:
        scene.begun, scene.is_filled, scene.stored_in = (step, seqs), True, {0, 1}
    return given


def right(scene: EngineScene, what: str, seqs: list[Seq], given: Any) -> None:
    """A step that was taken and must be right."""
    if given is not REFUSED:
        scene.stored(seqs)
        scene.compare(what, seqs, given)


def decode(scene: EngineScene) -> None:
    """One new token each."""
    if seqs := scene.seqs(count=1):
        right(scene, "a decode step", seqs, run(scene, "a decode step", seqs, scene.step(seqs)))


def extend(scene: EngineScene) -> None:
    """Some new tokens each, slots given or not."""
    if seqs := scene.seqs():
        step = scene.step(seqs)
        slots = None
        if scene.rng.random() < 0.5:
            listed = scene.tables.slots_of(seqs)
            slots = scene.ints([*listed, *[-1] * (step.padded_tokens - len(listed))], torch.int64)
        right(scene, "an extend step", seqs, run(scene, "an extend step", seqs, step, slots))


def compiled_step(scene: EngineScene) -> None:
    """The same by the calls that compiled forwards make."""
    if seqs := scene.seqs():
        what = "a step by compiled layers"
        right(scene, what, seqs, run(scene, what, seqs, scene.step(seqs), layers=scene.compiled))


def rows_worked(scene: EngineScene) -> None:
    """A step whose rows are turned, by 0, as they are stored or before."""
    seqs = scene.seqs()
    if not seqs:
        return
    step, calls = scene.step(seqs), scene.one_of("layers", (scene.attention.layers, scene.compiled))

    def body() -> list[Tensor]:
        scene.begun = None
        scene.attention.begin(step)
        scene.attention.fill()
        outs, entries = [], scene.entries_of(seqs, step.padded_tokens)
        for number, layer in enumerate(scene.model.layers):
            out, _ = attend_turned(calls, number, layer, entries, apart=scene.rng.random() < 0.5)
            outs.append(out)
        return outs

    right(scene, "a step whose rows are turned", seqs, scene.call("a step whose rows are turned", body))


def masked(scene: EngineScene) -> None:
    """New tokens that see what their cells say; or fewer cells than they have."""
    seqs = scene.seqs()
    if not seqs:
        return
    shown = []
    for seq in seqs:
        seq.shows = np.ones((len(seq.ids), seq.end), np.bool_)
        seq.shows[:, seq.begin :] = np.random.default_rng(scene.rng.randrange(2**31)).random((len(seq.ids),) * 2) < 0.6
        shown.append(torch.from_numpy(seq.shows.ravel()))
    cells = torch.cat(shown).to(scene.device)
    few = scene.rng.random() < 0.3 and len(cells) > 9
    step = scene.step(seqs)
    positions = [position for seq in seqs for position in seq.positions]
    positions += [0] * (step.padded_tokens - len(positions))
    step = replace(step, mask=BoolCells(cells[: len(cells) - 9] if few else cells, scene.ints(positions)))
    if few:
        wrong(scene, "a mask with too few cells", seqs, step, keeps=True)
    else:
        right(scene, "a masked step", seqs, run(scene, "a masked step", seqs, step))


def spanned(scene: EngineScene) -> None:
    """New tokens in blocks, whose tokens see each other."""
    seqs = scene.seqs()
    if not seqs:
        return
    spans, block = [], scene.rng.randrange(1, 5)
    for number, seq in enumerate(seqs):
        count = len(seq.ids)
        ends = np.minimum(seq.begin + (np.arange(count)[:, None] // block + 1) * block, seq.end)
        seq.shows = np.arange(seq.end) < ends
        spans += [[number, at, min(at + block, seq.end)] for at in range(seq.begin, seq.end, block)]
    mask = DeviceSpans(torch.tensor(spans, dtype=torch.int32, device=scene.device))
    step = scene.step(seqs, mask=mask)
    right(scene, "a step with spans", seqs, run(scene, "a step with spans", seqs, step))


# Wrong steps


def wrong(
    scene: EngineScene, what: str, seqs: list[Seq], step: ExternalStep, slots: Tensor | None = None, keeps: bool = False
) -> None:
    """A step that must be refused or reported, and touch no other request. keeps: its rows stay as they were, too"""
    scene.provoked = True
    given = run(scene, what, seqs, step, slots)
    scene.begun = None
    rows = {seq.row for seq in seqs}
    if given is not REFUSED and not scene.listen():
        raise Finding(f"{what} was not reported")
    scene.listen()
    for row in rows & {*scene.rows}:
        seq = next(seq for seq in seqs if seq.row == row)
        if given is not REFUSED and not keeps:
            kv = scene.oracle.kv[row]
            kv[seq.begin :] = []
    scene.compare_pool(what)
    scene.tables.write()


def spoiled(scene: EngineScene) -> None:
    """Rows twice, outside of the table, lengths beyond the bounds, holes and pages that are none."""
    seqs = scene.seqs(count=1)
    if not seqs:
        return
    names = ("row twice", "row outside", "negative row", "too long", "no page", "page beyond", "negative page")
    kind = scene.one_of("spoiled", names)
    rows, last = [seq.row for seq in seqs], seqs[-1]
    ends = [seq.end for seq in seqs]
    if kind == "row twice":
        if len(seqs) == MOST_SEQS:
            return
        seqs = [*seqs, Seq(last.row, last.begin, [3])]
        rows, ends = [*rows, last.row], [*ends, last.end]
    elif kind == "row outside":
        rows[-1] = scene.rng.choice((ROWS, ROWS + 3, 2**31 - 1))
    elif kind == "negative row":
        rows[-1] = -1
    elif kind == "too long":
        ends[-1] = WIDTH * PAGE + scene.rng.choice((1, 9, 1000))
    elif kind == "no page":
        scene.tables.write([(last.row, last.begin // PAGE, scene.tables.hole)])
    elif kind == "page beyond":
        scene.tables.write([(last.row, last.begin // PAGE, scene.rng.choice((NUM_PAGES, NUM_PAGES + 5)))])
    else:
        scene.tables.write([(last.row, last.begin // PAGE, -3)])
    count = len(seqs)
    step = ExternalStep(
        count, count, count, scene.ints(ends), ONE_EACH, scene.ints(rows), 1, 1, max(seq.end for seq in seqs)
    )
    wrong(scene, f"a step with {kind}", seqs, step)


def wrong_slots(scene: EngineScene) -> None:
    """Slots of another request, beyond the pool, or fewer than tokens."""
    seqs = scene.seqs()
    if not seqs:
        return
    step = scene.step(seqs)
    listed = scene.tables.slots_of(seqs)
    kind = scene.one_of("slots", ("another's", "beyond", "too few", "nowhere"))
    others = [row for row in scene.rows if scene.length(row) and row not in {seq.row for seq in seqs}]
    at = scene.rng.randrange(len(listed))
    if kind == "another's" and others:
        listed[at] = scene.tables.pages[others[0]][0] * PAGE
    elif kind == "beyond":
        listed[at] = NUM_PAGES * PAGE + 3
    elif kind == "too few" and len(listed) > 1:
        listed.pop()
    elif kind == "nowhere":
        listed[at] = -1
        given = run(scene, "a slot that is nowhere", seqs, step, scene.ints(listed, torch.int64))
        scene.begun = None
        if given is not REFUSED:
            scene.stored(seqs)
            places = [(seq.row, place) for seq in seqs for place in range(seq.begin, seq.end)]
            row, place = places[at]
            scene.oracle.kv[row][place] = UNKNOWN
            scene.oracle.truncate(row, place)
        return
    else:
        return
    wrong(scene, f"slots: {kind}", seqs, step, scene.ints(listed, torch.int64))


# Call by call


def begin(scene: EngineScene) -> None:
    """A step begins, and nothing else."""
    if seqs := scene.seqs():
        step = scene.step(seqs)
        if scene.call("begin", lambda: scene.attention.begin(step)) is not REFUSED:
            scene.begun, scene.is_filled, scene.stored_in = (step, seqs), False, set()


def fill(scene: EngineScene) -> None:
    """Fill what has begun, or nothing."""
    step_number = scene.attention.step_number
    scene.provoked = True  # tables that were written since it has begun may lack its pages
    given = scene.call("fill", scene.attention.fill, wrong="" if step_number else "no step has begun")
    scene.is_filled |= given is not REFUSED


def store(scene: EngineScene) -> None:
    """Layers store, of a step that was filled or not."""
    if scene.begun is None:
        return begin(scene)
    step, seqs = scene.begun
    number = scene.rng.randrange(2)
    _, k, v = scene.model.layers[number].of(scene.entries_of(seqs, step.padded_tokens))
    given = scene.call(
        f"layer {number} stores",
        lambda: scene.attention.layers.store(number, k, v),
        wrong="" if scene.is_filled else "it was not filled",
    )
    if given is not REFUSED and seqs:
        for seq in seqs:
            if seq.row not in scene.oracle.kv or scene.length(seq.row) < seq.begin:
                return None
        scene.stored_in.add(number)
        if scene.stored_in == {0, 1}:
            live = [seq for seq in seqs if scene.length(seq.row) <= seq.end]
            scene.stored(live)
    return None


def attend(scene: EngineScene) -> None:
    """A layer attends; so does one that is none."""
    if scene.begun is None:
        return begin(scene)
    step, seqs = scene.begun
    q, _, _ = scene.model.layers[0].of(scene.entries_of(seqs, step.padded_tokens))
    out, _ = scene.model.layers[0].room(q)
    number = scene.rng.choice((0, 0, 7))
    scene.call(
        f"layer {number} attends",
        lambda: scene.attention.layers.attend(number, q, out),
        wrong="" if scene.is_filled and number == 0 else "it was not filled, or is no layer",
    )
    return None


def of_a_thread(scene: EngineScene) -> None:
    """Another thread has a step in between, takes over and gives back; or is refused."""
    seqs = scene.seqs(count=1)
    if not seqs:
        return
    step, takes_over = scene.step(seqs), scene.rng.random() < 0.5
    had_begun = scene.attention.step_number > 0

    def body() -> list[Tensor]:
        if takes_over:
            scene.attention.take_over()
        scene.attention.begin(step)
        scene.attention.fill()
        return scene.forward(seqs, step.padded_tokens, scene.attention.layers)

    refused = "" if takes_over or not had_begun else "another thread has a step"
    outs = scene.call(
        f"a thread's step{', which takes over' * takes_over}", partial(in_another_thread, body), wrong=refused
    )
    right(scene, "a thread's step", seqs, outs)
    if outs is not REFUSED:
        scene.begun = None
        scene.call("take_over", scene.attention.take_over, right=True)


# Graphs


def seal(scene: EngineScene) -> None:
    """Addresses are fixed, once; for bounds that there are."""
    bounds = scene.rng.choice((None, None, Bounds(num_seqs=MOST_SEQS + 1, kv_len=8, num_pages=NUM_PAGES)))
    bad = "they are sealed" if scene.is_sealed else "" if bounds is None else "more sequences than it was built for"
    given = scene.call("seal", lambda: scene.attention.seal(bounds), wrong=bad)
    scene.is_sealed |= given is not REFUSED


def capture(scene: EngineScene) -> None:
    """A graph of decode steps, in buffers of its own; in a sealed attention alone. A capture takes as long as a seed's
    other calls, so a graph that is there mostly serves once more."""
    if scene.graph is not None and scene.rng.random() < 0.8:
        return replay(scene)
    kv_len, rows = scene.ints([0] * MOST_SEQS), scene.ints([0] * MOST_SEQS)
    entries = torch.zeros(MOST_SEQS, dtype=torch.int64, device=scene.device)
    step = _captured(scene, 0, kv_len, rows)

    def body() -> list[Tensor]:
        scene.attention.fill()
        return scene.forward_of(entries, scene.attention.layers)

    def make() -> Any:
        scene.begun = None
        scene.attention.begin(step)
        return scene.recorder.record(body)

    if not scene.is_sealed:
        scene.call("a capture", make, wrong="nothing is sealed")
        return seal(scene)
    scene.graph = Graph(step, kv_len, rows, entries, *scene.call("a capture", make))
    return None


def replay(scene: EngineScene) -> None:
    """The graph serves a step."""
    if scene.graph is None:
        return capture(scene)
    if seqs := scene.seqs(count=1):
        right(scene, "a replay", seqs, replayed(scene, "a replay", seqs))
    return None


def replayed(scene: EngineScene, what: str, seqs: list[Seq]) -> Any:
    """Returns what the graph gives for a step, or REFUSED."""
    graph = scene.graph
    assert graph is not None

    def body() -> list[Tensor]:
        scene.begun = None
        graph.kv_len.zero_()[: len(seqs)] = scene.ints([seq.end for seq in seqs])
        graph.rows.zero_()[: len(seqs)] = scene.ints([seq.row for seq in seqs])
        graph.entries.zero_()[: len(seqs)] = scene.entries_of(seqs, len(seqs))
        scene.attention.begin(_captured(scene, len(seqs), graph.kv_len, graph.rows))
        graph.recording.replay()
        return graph.outs

    return scene.call(what, body)


def _captured(scene: EngineScene, num_seqs: int, kv_len: Tensor, rows: Tensor) -> ExternalStep:
    return ExternalStep(num_seqs, MOST_SEQS, MOST_SEQS, kv_len, ONE_EACH, rows, 1, 1, 1, captured=True)


def recorded_fill(scene: EngineScene) -> None:
    """fill() as a graph: recorded of a captured step, replayed for others of its shape, refused for others."""
    seqs = scene.seqs(count=1)
    if not seqs:
        return
    count = len(seqs)
    both = [seq.end for seq in seqs], [seq.row for seq in seqs]
    kv_len, rows = (scene.ints([*values, *[0] * (MOST_SEQS - count)]) for values in both)
    captured = scene.is_sealed
    step = _captured(scene, count, kv_len, rows) if captured else scene.step(seqs)
    if scene.call("begin", lambda: scene.attention.begin(step)) is REFUSED:
        return
    scene.begun = None
    if not scene.fills or not captured:
        recorder = scene.recorder
        made = scene.call(
            "record_fill",
            lambda: scene.attention.record_fill(recorder),
            wrong="" if captured else "the step is not captured",
        )
        if made is REFUSED:
            if scene.fills:
                fills = scene.fills[0][1]
                scene.call("replay_fill", lambda: scene.attention.replay_fill(fills), wrong="it is of another shape")
            return
        scene.fills.append((step, made))
    given = scene.call("replay_fill", lambda: scene.attention.replay_fill(scene.fills[0][1]), right=True)
    if given is not REFUSED:
        outs = scene.call("its layers", lambda: scene.forward(seqs, MOST_SEQS, scene.attention.layers), right=True)
        right(scene, "a step with a recorded fill", seqs, outs)

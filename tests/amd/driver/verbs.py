"""Verbs: every public call of a runtime that reaches rows, pages or graphs, with values that are sometimes wrong."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.capture.split_forward import in_batch_order
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.paging.convert import convert_pages
from rocm_attn.paging.state_slots import require_state_slots
from rocm_attn.step.accepted import select_last_accepted
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.step import Step
from tests.amd.driver.calls import REFUSED
from tests.amd.driver.finding import Finding
from tests.amd.driver.model import looked_up, no_turn
from tests.amd.driver.oracle import UNKNOWN
from tests.amd.driver.scene import (
    CHAIN,
    MAX_KV_LEN,
    MAX_ROWS,
    TREE,
    Begun,
    Kept,
    Scene,
    Sent,
    Seq,
    draft_id,
)

Verb = Callable[[Scene], None]
PARENTS = [-1, 0, 0, 0, 2]  # of a verified tree; its path 0, 2, 4 is accepted
PATH = [0, 2, 4]


# Steps


def new_tokens(scene: Scene, rows: list[int], *, most: int = 3) -> tuple[list[Seq], str]:
    """A step over rows, mostly right; or why it must be refused."""
    rng, wrong = scene.rng, ""
    seqs = [Seq(row, scene.length(row), scene.ids(rng.randint(1, most))) for row in rows]
    chance = rng.random()
    if not seqs or chance < 0.75:
        pass
    elif chance < 0.8:
        back = rng.choice(seqs)
        back.begin = max(0, back.begin - rng.randint(1, 5))
        back.positions = list(range(back.begin, back.end))
        scene.unsure.add(back.row)  # perhaps before what its window, or another row, needs
    elif chance < 0.85:
        seqs.append(Seq(seqs[0].row, seqs[0].begin, scene.ids(1)))
        wrong = "a row is named twice"
    elif chance < 0.95:
        strange = rng.choice([*scene.freed, 0, -1, MAX_ROWS + 1])
        seqs[-1] = Seq(strange, rng.choice((0, 3)), scene.ids(1))
        wrong = f"row {strange} is no request's"
    else:
        gap = Seq(seqs[-1].row, seqs[-1].begin + rng.randint(1, 4), scene.ids(1))
        seqs[-1], wrong = gap, "" if gap.row in scene.unsure else "tokens before it were never stored"
    if rng.random() < 0.95:
        reserve_for(scene, seqs)
    return seqs, wrong


def reserve_for(scene: Scene, seqs: list[Seq]) -> None:
    """Room for a step, as far as there is some."""
    for seq in seqs:
        if seq.row in scene.oracle.kv and scene.room(seq.row) < seq.end:
            try:
                scene.runtime.table.reserve(seq.row, seq.end)
            except RocmAttnError:
                return


def plain_step(scene: Scene, run: Callable[[Scene, StepBatch], Tensor], what: str) -> None:
    """A whole step in some way."""
    seqs, wrong = new_tokens(scene, scene.some())
    try:
        batch = scene.batch(seqs)
    except RocmAttnError:
        return
    given = scene.call(what, lambda: run(scene, batch), wrong=wrong)
    if scene.open is None and given is not REFUSED:
        scene.staged(batch, seqs)
        scene.stored(seqs)
        scene.compare_rows(what, seqs, given)
    elif scene.open is None:
        scene.last = None


def finish_by_hand(scene: Scene, step: Step, batch: StepBatch) -> Tensor:
    """Run the parts of a step that was begun, and end it."""
    try:
        rows = [scene.model.forward(part) for part in step.parts]
    finally:
        scene.runtime.end_step()
    scene.over = step
    given = rows[0] if len(rows) == 1 else in_batch_order(step, (rows[0], rows[1]))
    return given[: batch.num_seqs]


def step_whole(scene: Scene) -> None:
    """AttentionRuntime.step(), the layers, end_step()."""
    plain_step(scene, lambda s, b: finish_by_hand(s, s.runtime.step(b), b), "a step")


def step_halves(scene: Scene) -> None:
    """The same in two halves."""
    plain_step(scene, lambda s, b: finish_by_hand(s, s.runtime.step(b, s.runtime.plan(b, halves=2)), b), "two halves")


def step_compiled(scene: Scene) -> None:
    """The same by the calls that compiled forwards make."""

    def run(scene: Scene, batch: StepBatch) -> Tensor:
        with scene.runtime.stage(batch) as step:
            calls = scene.compiled.of(step.parts[0])
            calls.fill()
            entry, rows = scene.model.entries(step.parts[0]), []
            for number, layer in enumerate(scene.model.layers):
                q, k, v = layer.of(entry)
                out, lse = layer.room(q)
                if scene.rng.random() < 0.5:
                    calls.store_and_attend(number, q, k, v, out, lse)
                else:
                    calls.store(number, k, v)
                    calls.attend(number, q, out, lse)
                rows.append(layer.keep(step.parts[0], out, lse))
        return torch.cat(rows, 1)[: batch.num_seqs]

    plain_step(scene, run, "a step by compiled layers")


def step_with_rows_worked(scene: Scene) -> None:
    """A step whose rows are turned, by 0, as they are stored or before, by its layers or by those of compiled code."""

    def run(scene: Scene, batch: StepBatch) -> Tensor:
        with scene.runtime.step(batch) as step:
            part = step.parts[0]
            calls = scene.one_of("layers", (part.layers, scene.compiled.of(part)))
            entry, rows = scene.model.entries(part), []
            for number, layer in enumerate(scene.model.layers):
                q, k, v = layer.of(entry)
                out, lse = layer.room(q)
                work, turned = no_turn(layer.problem.head_dim, 64, scene.device), torch.zeros_like(q)
                if scene.is_latent or scene.rng.random() < 0.5:
                    calls.rope_queries(number, q, turned, work)
                    calls.store(number, k, v)
                else:
                    calls.rope_and_store(number, q, k, v, turned, work)
                calls.attend(number, turned, out, lse)
                calls.finish(number, out, undo=no_turn(layer.problem.v_head_dim, 64, scene.device).rope)
                rows.append(layer.keep(part, out, lse))
        return torch.cat(rows, 1)[: batch.num_seqs]

    plain_step(scene, run, "a step whose rows are turned")


def run_graphed(scene: Scene) -> None:
    """StepRunner.run()."""
    plain_step(scene, lambda s, b: s.runner.run(b), "runner.run")


def run_graphed_halves(scene: Scene) -> None:
    """StepRunner.run() in halves."""
    plain_step(scene, lambda s, b: s.runner.run(b, halves=2), "runner.run in halves")


def run_eagerly(scene: Scene) -> None:
    """StepRunner.run_eagerly()."""
    plain_step(scene, lambda s, b: s.runner.run_eagerly(b), "runner.run_eagerly")


def step_of_a_thread(scene: Scene) -> None:
    """A step by another thread: refused while this one has one."""

    def run(scene: Scene, batch: StepBatch) -> Tensor:
        given: list[Any] = []

        def body() -> None:
            try:
                given.append(finish_by_hand(scene, scene.runtime.step(batch), batch))
            except BaseException as error:
                given.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if isinstance(given[0], BaseException):
            raise given[0]
        rows: Tensor = given[0]
        return rows

    plain_step(scene, run, "a step of another thread")


def lengths_on_device(scene: Scene) -> None:
    """Lengths that the device alone knows: right ones, or some that leave a gap or go beyond the bounds."""
    rows = [row for row in scene.some(2) if row not in scene.unsure]
    seqs = [Seq(row, scene.length(row), scene.ids(1)) for row in rows]
    if not seqs:
        return
    reserve_for(scene, [Seq(seq.row, seq.end, [1, 1]) for seq in seqs])
    bad = scene.rng.random() < 0.3
    told = [seq.end + (scene.rng.choice((1, 9)) if bad else 0) for seq in seqs]
    bounds = [seq.end + 2 if scene.room(seq.row) >= seq.end + 2 else seq.end for seq in seqs]
    ids = [token_id for seq in seqs for token_id in seq.ids]
    batch = StepBatch(
        [seq.row for seq in seqs], bounds, [1] * len(seqs), ids, inputs=DeviceInputs(kv_len=scene.ints(told))
    )
    scene.provoked |= bad
    given = scene.call("lengths on the device", lambda: finish_by_hand(scene, scene.runtime.step(batch), batch))
    if scene.open is not None or given is REFUSED:
        return
    scene.last = None
    if bad:
        if not scene.listen():
            raise Finding(f"device lengths {told} over {[seq.begin for seq in seqs]} stored tokens were not reported")
        scene.give_up(rows)
    else:
        scene.stored(seqs)
        scene.compare_rows("lengths on the device", seqs, given)
        for row in rows:
            scene.unsure.add(row)  # the bound counts as stored


def verify(scene: Scene) -> None:
    """A step of trees, by hand or by the runner; its path may be moved afterwards."""
    rows = [row for row in scene.some(2) if scene.length(row)]
    seqs = []
    for row in rows:
        begin = scene.length(row)
        seq = Seq(row, begin, scene.ids(len(PARENTS)))
        depths = [0, 1, 1, 1, 2]
        seq.positions = [begin + depth for depth in depths]
        seq.shows = np.zeros((len(PARENTS), begin + len(PARENTS)), np.bool_)
        seq.shows[:, :begin] = True
        for node, parent in enumerate(PARENTS):
            seq.shows[node, begin + node] = True
            if parent >= 0:
                seq.shows[node, begin:] |= seq.shows[parent, begin:]
        seqs.append(seq)
    if not seqs:
        return
    reserve_for(scene, seqs)
    batch = scene.batch(seqs, mask=TreeMask(scene.ints([PARENTS] * len(seqs))))
    by_hand = scene.rng.random() < 0.5
    run = (
        (lambda: finish_by_hand(scene, scene.runtime.step(batch), batch))
        if by_hand
        else lambda: scene.runner.run(batch)
    )
    given = scene.call("a verify step", run)
    if scene.open is not None:
        return
    if given is REFUSED:
        scene.last = scene.verified = None
        return
    scene.staged(batch, seqs)
    scene.stored(seqs)
    scene.compare_rows("a verify step", seqs, given)
    scene.verified = list(seqs), {seq.row: scene.changes[seq.row] for seq in seqs}, False


def move(scene: Scene) -> None:
    """move_accepted() of the last verify step: once; or again, late, of changed rows, by a path that leads too far."""
    if scene.verified is None:
        verify(scene)
    if scene.verified is None:
        accepted = Accepted(*(scene.ints([[0] * 5] if wide else [0]) for wide in (0, 1, 1, 0, 0)))
        scene.call("a move without a verify step", lambda: scene.runtime.move_accepted(accepted, scene.ints([1])))
        return
    seqs, changes, was_moved = scene.verified
    is_last = scene.last is not None and scene.last[1] == seqs
    far = scene.rng.random() < 0.2
    path = [*PATH, 30, -1] if far else [*PATH, -1, -1]
    count = 3 if far else 2
    accepted = Accepted(
        scene.ints([count] * len(seqs)),
        scene.ints([path] * len(seqs)),
        scene.ints([[1, 2, 3, -1, -1]] * len(seqs)),
        scene.ints([3] * len(seqs)),
        scene.ints([seq.begin + 1 + count for seq in seqs]),
    )
    wrong = "they were moved already" if was_moved else ""
    if any(changes[seq.row] != scene.changes[seq.row] for seq in seqs):
        wrong = "a row has changed"
    elif not is_last:
        wrong = wrong or "another step was staged since"
    rows = scene.ints([seq.row for seq in seqs])
    given = scene.call("a move", lambda: scene.runtime.move_accepted(accepted, rows), wrong=wrong)
    if given is REFUSED:
        return
    scene.verified = seqs, changes, True
    scene.last = None
    for seq in seqs:
        kept = [seq.stored[node] for node in PATH]
        kv = list(scene.oracle.kv[seq.row])
        scene.cut(seq.row, seq.begin)
        # A node without a page moves nothing: what was there stays.
        extra = [kv[seq.begin + 3]] if far and seq.begin + 30 >= -(-scene.room(seq.row) // 4) * 4 else []
        scene.oracle.store(seq.row, seq.begin, kept + extra)


def again_by_hand(scene: Scene) -> None:
    """The last step once more, call by call, with its batch or another."""
    if scene.last is None:
        scene.call("AGAIN of nothing", lambda: scene.runtime.step(scene.batch([]), AGAIN), wrong="no step may repeat")
        return
    _again(scene, lambda batch: finish_by_hand(scene, scene.runtime.step(batch, AGAIN), batch), "AGAIN")


def again_by_runner(scene: Scene) -> None:
    """run_again(): by the graph, or by launches."""
    if scene.last is not None:
        _again(scene, scene.runner.run_again, "runner.run_again")


def _again(scene: Scene, run: Callable[[StepBatch], Tensor], what: str) -> None:
    assert scene.last is not None
    batch, seqs, changes = scene.last
    wrong = ""
    if any(changes[seq.row] != scene.changes[seq.row] for seq in seqs):
        wrong = "a row has changed"
    if scene.rng.random() < 0.15 and what == "AGAIN":
        batch, wrong = (
            scene.batch(seqs) if batch.is_plain else batch,
            wrong or ("another batch" if batch.is_plain else ""),
        )
    given = scene.call(what, lambda: run(batch), wrong=wrong)
    if given is not REFUSED and scene.open is None:
        counted = {seq.row: scene.length(seq.row) for seq in seqs}
        scene.stored(seqs)
        scene.compare_rows(what, seqs, given)
        for row in {seq.row for seq in seqs if counted[seq.row] < seq.end}:
            scene.cut(row, counted[row])  # what was taken back may count again, or not
            scene.unsure.add(row)


# A step call by call


def begin(scene: Scene) -> None:
    """A step that stays open: whatever comes next comes in its middle."""
    _open(scene, lambda batch: scene.runtime.step(batch), "a step is begun")


def stage(scene: Scene) -> None:
    """A step that is staged and not filled."""
    _open(scene, lambda batch: scene.runtime.stage(batch), "a step is staged")


def _open(scene: Scene, run: Callable[[StepBatch], Step], what: str) -> None:
    seqs, wrong = new_tokens(scene, scene.some(2))
    try:
        batch = scene.batch(seqs)
    except RocmAttnError:
        return
    given = scene.call(what, lambda: run(batch), wrong=wrong or ("a step is open" if scene.open else ""))
    if given is not REFUSED:
        scene.open = Begun(given, seqs, dict(scene.lives), dict(scene.changes))
        scene.staged(batch, seqs)
        scene.verified = None


def fill(scene: Scene) -> None:
    """Fill the step that was staged; one that is over has nothing to fill."""
    if scene.open is not None:
        scene.call("fill", scene.open.step.fill)
    elif scene.over is not None:
        scene.call("fill of a step that is over", scene.over.fill, wrong="it is over")
    else:
        scene.call("compiled fill without a step", scene.compiled.fill, wrong="no step runs")


def store_one(scene: Scene) -> None:
    """A part of the open step stores in a layer."""
    if scene.open is None:
        return old_layers(scene)
    for number, layer in enumerate(scene.model.layers):
        if (0, number) in scene.open.done:
            continue
        part = scene.open.step.parts[0]
        _, k, v = layer.of(scene.model.entries(part))
        calls = scene.compiled.of(part) if scene.rng.random() < 0.3 else part.layers
        if scene.call(f"layer {number} stores", lambda c=calls, n=number, k=k, v=v: c.store(n, k, v)) is not REFUSED:
            scene.open.done.add((0, number))
        return None
    return None


def attend_one(scene: Scene) -> None:
    """The open step attends in a layer."""
    if scene.open is None:
        return old_layers(scene)
    part, layer = scene.open.step.parts[0], scene.model.layers[0]
    q, _, _ = layer.of(scene.model.entries(part))
    out, lse = layer.room(q)
    scene.call("layer 0 attends", lambda: part.layers.attend(0, q, out, lse))
    return None


def old_layers(scene: Scene) -> None:
    """The layers of a step that is over are called."""
    if scene.over is None:
        return
    part, layer = scene.over.parts[0], scene.model.layers[0]
    q, k, v = layer.of(scene.model.entries(part))
    is_open = scene.open is not None and scene.open.step.parts[0].layers is part.layers
    if scene.rng.random() < 0.5:
        given = scene.call(
            "old layers store", lambda: part.layers.store(0, k, v), wrong="" if is_open else "it is over"
        )
        if given is not REFUSED and scene.open is not None:
            scene.open.done.add((0, 0))
        return
    out, lse = layer.room(q)
    scene.call("old layers attend", lambda: part.layers.attend(0, q, out, lse), wrong="" if is_open else "it is over")


def end(scene: Scene) -> None:
    """end_step(), also where none was begun."""
    ends = scene.open.step.end if scene.open is not None and scene.rng.random() < 0.5 else scene.runtime.end_step
    scene.call("end_step", ends, right=True)
    if scene.open is not None:
        close_of(scene)


def close_of(scene: Scene) -> None:
    """What has come of the open step, which has ended."""
    begun = scene.open
    assert begun is not None
    scene.open, scene.over = None, begun.step
    every = {(0, number) for number in range(len(scene.model.layers))}
    if begun.done == every:
        scene.stored(begun.seqs, begun.changes, begun.lives)
    elif begun.done:
        for seq in begun.seqs:
            if begun.lives[seq.row] == scene.lives[seq.row] and seq.row in scene.oracle.kv:
                scene.cut(seq.row, seq.begin)
                scene.unsure.add(seq.row)


def close(scene: Scene) -> None:
    """The open step stores what it has not, and ends."""
    if scene.open is not None:
        fill(scene)
        for _ in scene.model.layers:
            store_one(scene)
        end(scene)


# Rounds of drafts


def draft_chain(scene: Scene) -> None:
    """A round of chains, draft step by draft step: in order, or in another one."""
    _round(scene, CHAIN)


def draft_tree(scene: Scene) -> None:
    """A round of trees."""
    _round(scene, TREE)


def draft_runner(scene: Scene) -> None:
    """A round by a DraftRunner, as a graph where there are some; or a batch without drafts, which it refuses."""
    if scene.rng.random() < 0.2:
        seqs = [Seq(row, scene.length(row), scene.ids(1)) for row in scene.some(2)]
        reserve_for(scene, seqs)
        scene.call("no round", lambda: scene.drafter.run(scene.batch(seqs)), wrong="it has no drafts")
        return
    drafts = scene.rng.choice((CHAIN, TREE))
    seqs, batch = _round_of(scene, drafts)
    halves = scene.rng.choice((1, 1, 2))
    given = scene.call(f"drafter.run of {drafts}", lambda: scene.drafter.run(batch, halves=halves))
    if given is not REFUSED and scene.open is None:
        _drafted(scene, drafts, seqs)
        for step in range(drafts.steps):
            width = given.shape[1] // drafts.steps
            scene.compare_draft(seqs, drafts, step, given[:, step * width : (step + 1) * width])


def _round_of(scene: Scene, drafts: Drafts) -> tuple[list[Seq], StepBatch]:
    rows = scene.some(3)
    seqs = [Seq(row, scene.length(row), [draft_id(0, 0)]) for row in rows]
    reserve_for(scene, [Seq(seq.row, seq.begin, [1] * drafts.tokens) for seq in seqs])
    ids = [int(draft_id(0, branch)) for _ in seqs for branch in range(drafts.branches)]
    scene.last = scene.verified = None
    return seqs, draft_batch([seq.row for seq in seqs], [seq.begin for seq in seqs], drafts, ids)


def _drafted(scene: Scene, drafts: Drafts, seqs: list[Seq]) -> None:
    """What a round has stored: of chains tokens that later steps may go on from."""
    for seq in seqs:
        scene.cut(seq.row, seq.begin)
        if drafts.branches == 1:
            entries = [looked_up(draft_id(step, 0), seq.begin + step) for step in range(drafts.steps)]
            scene.oracle.store(seq.row, seq.begin, entries)


def _round(scene: Scene, drafts: Drafts) -> None:
    rng = scene.rng
    seqs, batch = _round_of(scene, drafts)
    order = list(range(drafts.steps))
    if rng.random() < 0.4:
        order = rng.choice((order[::-1], order[1:], [order[0], order[-1]], [order[0], order[0], *order[1:]]))
    bad_parents = drafts.branches > 1 and rng.random() < 0.25
    compiled, halves = rng.random() < 0.4, rng.choice((1, 1, 2))
    step = scene.call(
        f"a round of {drafts}", lambda: scene.runtime.step(batch, scene.runtime.plan(batch, halves=halves))
    )
    if step is REFUSED:
        return
    done: list[int] = []
    try:
        for number in order:
            if not _draft_step(scene, step, number, bad_parents, compiled):
                break
            if halves == 1 and seqs and not bad_parents and done == list(range(number)):
                scene.compare_draft(seqs, drafts, number, scene.last_draft)
            elif number != 0 and number - 1 not in done and number not in done:
                raise Finding(f"draft step {number} of {drafts} was taken after {done}")
            done.append(number)
    finally:
        scene.runtime.end_step()
    if bad_parents and seqs and 1 in done:
        if not scene.listen():
            raise Finding(f"parents out of range were not reported, in draft steps {done}")
        scene.give_up([seq.row for seq in seqs])
    elif set(done) == set(range(drafts.steps)):
        _drafted(scene, drafts, seqs)
    else:
        for seq in seqs:
            scene.cut(seq.row, seq.begin)


def _draft_step(scene: Scene, step: Step, number: int, bad_parents: bool, compiled: bool) -> bool:
    """One draft step in every half; whether it was taken."""
    for half in step.halves:
        part = half[number]

        def run(part: Any = part) -> Tensor:
            if number and part.branches > 1:
                if bad_parents:
                    scene.provoked = True
                    part.set_parents(torch.full_like(part.token_ids, scene.rng.choice((5, -7))))
                elif scene.rng.random() < 0.5:
                    places = torch.arange(len(part.token_ids), dtype=torch.int32, device=scene.device)
                    part.set_parents(places % part.branches)
                else:
                    part.keep_branches()
            return scene.draft_step(part, number, scene.compiled.of(part) if compiled else None)

        given = scene.call(f"draft step {number}", run)
        if given is REFUSED:
            return False
        scene.last_draft = given
    return True


# Rows and kept pages


def admit(scene: Scene) -> None:
    """A row."""
    given = scene.call("admit", scene.runtime.table.admit)
    if given is not REFUSED:
        scene.admitted(given)


def reserve(scene: Scene) -> None:
    """Room in a row."""
    row = scene.a_row()
    kv_len = scene.rng.choice((scene.length(row) + 2, 12, -3, MAX_KV_LEN + 1, 2**32 + 4))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= MAX_KV_LEN
    scene.call(
        f"reserve {kv_len} in row {row}", lambda: scene.runtime.table.reserve(row, kv_len), wrong="it is bad" * bad
    )


def reserve_all(scene: Scene) -> None:
    """Room in some rows, or in none of them."""
    rows = [scene.a_row() for _ in range(scene.rng.randint(1, 3))]
    lengths = [scene.length(row) + scene.rng.randint(0, 5) for row in rows]
    bad = len(set(rows)) < len(rows) or not {*rows} <= {*scene.rows} or max(lengths) > MAX_KV_LEN
    scene.call(
        f"reserve_all of {rows}", lambda: scene.runtime.table.reserve_all(rows, lengths), wrong="a row is bad" * bad
    )


def truncate(scene: Scene) -> None:
    """A row goes back, or is to go on."""
    row = scene.a_row()
    kv_len = scene.rng.choice((scene.length(row), max(0, scene.length(row) - 3), 0, scene.room(row) + 1))
    bad = row not in scene.oracle.kv or kv_len > scene.room(row)
    given = scene.call(
        f"truncate row {row} to {kv_len}", lambda: scene.runtime.table.truncate(row, kv_len), wrong="it is bad" * bad
    )
    if given is not REFUSED:
        scene.changed(row)
        if kv_len < scene.length(row):
            scene.unsure.add(row)
        scene.cut(row, kv_len)


def free(scene: Scene) -> None:
    """A row goes, or has gone."""
    row = scene.a_row()
    bad = row not in scene.oracle.kv
    given = scene.call(f"free row {row}", lambda: scene.runtime.table.free(row), wrong="it is no request's" * bad)
    if given is not REFUSED:
        scene.gone(row)


def given_to_another(scene: Scene) -> None:
    """A row goes, and another request comes to it whose tokens were sent from elsewhere."""
    if not scene.sent or not scene.rows:
        return export_row(scene)
    free(scene)
    return import_row(scene)


def fork(scene: Scene) -> None:
    """A row over another's tokens; also over room that has none yet."""
    row = scene.a_row()
    length, room = scene.length(row), scene.room(row)
    kv_len = scene.rng.choice((length, length, max(0, length - 3), room, room + 1))
    bad = row not in scene.oracle.kv or kv_len > room
    child = scene.call(f"fork row {row} at {kv_len}", lambda: scene.runtime.table.fork(row, kv_len), wrong="bad" * bad)
    if child is REFUSED:
        return
    kept = scene.oracle.kv[row][:kv_len]
    scene.changed(row)
    scene.admitted(child, kept)
    if kv_len > length or row in scene.unsure:
        scene.unsure |= {row, child}


def evict(scene: Scene) -> None:
    """Pages before the window go."""
    rows = [scene.a_row() for _ in range(2)]
    lengths = [scene.length(row) for row in rows]
    scene.call(f"evict of {rows}", lambda: scene.runtime.table.evict(rows, lengths))


def mark_stored(scene: Scene) -> None:
    """Tokens count as stored: as many as are, or fewer; of wrong rows, twice, or more than there is room for."""
    row = scene.a_row()
    length = scene.length(row)
    kv_len = scene.rng.choice((length, max(0, length - 2), scene.room(row) + 1, -1, 2**32))
    rows = [row] * scene.rng.choice((1, 1, 1, 2))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= scene.room(row) or len(rows) > 1
    given = scene.call(
        f"mark_stored({rows}, {kv_len})",
        lambda: scene.runtime.table.mark_stored(rows, [kv_len] * len(rows)),
        wrong="it is bad" * bad,
    )
    if given is not REFUSED:
        if kv_len < length:
            scene.unsure.add(row)  # perhaps below what others share
        scene.cut(row, kv_len)


def keep(scene: Scene) -> None:
    """Full pages of a row stay."""
    row, rng = scene.a_row(), scene.rng
    full = scene.length(row) // scene.page_size
    first, last = (0, full) if rng.random() < 0.7 else (rng.randint(0, 1), full + 1)
    bad = row not in scene.oracle.kv or last > full
    bad = bad and row not in scene.unsure and first < last
    table = scene.runtime.table.kept
    if rng.random() < 0.5:
        ids = scene.call(f"keep {first}:{last} of row {row}", lambda: table.keep(row, first, last), wrong="bad" * bad)
    else:
        pages = list(range(first, last))
        ids = scene.call(
            f"keep_all {first}:{last} of row {row}",
            lambda: table.keep_all([row] * len(pages), pages),
            wrong="bad" * bad,
        )
    if ids is REFUSED or row not in scene.oracle.kv:
        return
    if len(ids):
        scene.changed(row)
    for page_no, id_ in enumerate(ids.tolist(), first):
        stored = scene.oracle.page(row, page_no, scene.page_size)
        scene.kept[id_] = Kept(page_no, stored)


def admit_over(scene: Scene) -> None:
    """A row over kept pages, or over such as were dropped, or in another order."""
    ids: list[int] = []
    while found := [id_ for id_, kept in scene.kept.items() if kept.page_no == len(ids)]:
        ids.append(scene.rng.choice(found))
    wrong = ""
    if scene.rng.random() < 0.2 and len(ids) > 1:
        ids, wrong = ids[::-1], "the pages are in another order"
    if scene.dropped and scene.rng.random() < 0.3:
        ids, wrong = [scene.dropped[-1]], "it was dropped"
    if not ids:
        return keep(scene)
    kv_len = len(ids) * scene.page_size - scene.rng.choice((0, 0, 1))
    row = scene.call(
        f"admit_over {kv_len} kept tokens", lambda: scene.runtime.table.kept.admit_over(ids, kv_len), wrong=wrong
    )
    if row is not REFUSED:
        scene.admitted(row, [entry for id_ in ids for entry in scene.kept[id_].stored][:kv_len])
    return None


def drop(scene: Scene) -> None:
    """Kept pages go, or have gone."""
    if not scene.kept:
        keep(scene)
    ids, wrong = list(scene.kept)[: scene.rng.randint(1, 3)], ""
    if scene.dropped and scene.rng.random() < 0.3:
        ids, wrong = [scene.rng.choice(scene.dropped)], "it was dropped"
    if not ids:
        return
    if scene.rng.random() < 0.15:
        scene.call("drop_all", scene.runtime.table.kept.drop_all)
        ids = list(scene.kept)
    elif scene.call(f"drop {ids}", lambda: scene.runtime.table.kept.drop(ids), wrong=wrong) is REFUSED:
        return
    for id_ in ids:
        scene.kept.pop(id_, None)
        scene.dropped.append(id_)


def look(scene: Scene) -> None:
    """What tables say of rows and pages, which changes nothing."""
    table, row = scene.runtime.table, scene.a_row()
    ids = list(scene.kept)[:2]
    calls: list[Callable[[], object]] = [
        lambda: table.pages_of(row),
        lambda: table.num_held(row),
        lambda: table.room([row]),
        lambda: table.is_reserved([row], [scene.length(row)]),
        lambda: table.missing_pages(row, 12),
        lambda: table.is_admitted(row),
        lambda: (table.is_empty, table.most_new_seqs, table.next_row, table.fewest_free_pages, table.num_free_rows),
        lambda: table.space(table.full.space),
        lambda: (table.kept.ids(), table.kept.pages(ids), table.kept.num_holders_of(ids)),
        lambda: table.kept.num_holders(1),
        lambda: scene.runtime.seals.tensors(),
        lambda: (scene.runner.counters, scene.runner.may_run_again, scene.runner.replays_again),
        lambda: (scene.runner.graph_again, scene.runner.graph_of_last, scene.runner.capture_report()),
        lambda: (scene.runtime.padding, scene.runtime.deterministic, scene.runtime.selections, scene.runtime.target),
        lambda: (scene.runtime.kinds, scene.runtime.max_kv_len, scene.runtime.head_weights.of(0)),
        scene.runtime.head_weights.tensors,
        lambda: require_state_slots(table, state=torch.zeros(MAX_ROWS + 1, device=scene.device)),
        scene.runner.check_addresses,
    ]
    for number, each in enumerate(calls):
        if number < 6 and row not in scene.rows:
            if number in (0, 1, 4):
                scene.call(f"a look at row {row}", each, wrong="it is no request's")
        else:
            before = scene.state()
            scene.call(f"look {number}", each)
            if scene.state() != before:
                raise Finding(f"look {number} has changed something")


# Tokens that come and go


def export_row(scene: Scene) -> None:
    """A row's tokens into a buffer: those that it has, or more."""
    _export(scene, "row")


def export_pages(scene: Scene) -> None:
    """The same by pages, all layers or each for itself."""
    _export(scene, scene.one_of("export", ("pages", "layers")))


def _export(scene: Scene, way: str) -> None:
    exporter, row = scene.exporter, scene.a_row()
    length = scene.length(row)
    kv_len = scene.rng.choice((length, length, max(1, length - 2), length + 1))
    wrong = "it has no such tokens" if row not in scene.oracle.kv or kv_len > length else ""
    if row in scene.unsure:
        wrong = ""

    def run() -> tuple[Any, Tensor]:
        pages = exporter.pages_of(row, kv_len)
        extent = exporter.extent(pages, kv_len)
        buffer = torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=scene.device)
        if way == "row":
            return exporter.export_row(row, kv_len, buffer), buffer
        if way == "pages":
            exporter.export(pages, extent, buffer)
            return extent, buffer
        first = 0
        for layer in range(len(scene.model.layers)):
            end = first + exporter.num_layer_bytes(extent, layer)
            exporter.export_layer(layer, pages, extent, buffer[first:end])
            first = end
        return extent, buffer

    given = scene.call(f"export {kv_len} of row {row} by {way}", run, wrong=wrong)
    if given is not REFUSED and kv_len <= length:
        stored = scene.oracle.kv[row][:kv_len]
        scene.sent.append(Sent(*given, stored, by_layers=way == "layers"))


def import_row(scene: Scene) -> None:
    """What was sent comes into a row of its own; or into one that is another's, or none's."""
    if not scene.sent:
        return export_row(scene)
    sent = scene.rng.choice(scene.sent[-3:])
    if sent.by_layers and scene.kind == "windows":
        return None
    if sent.by_layers:
        return _import_layers(scene, sent)
    row = scene.call("importer.admit", lambda: scene.importer.admit(sent.extent))
    if row is REFUSED:
        return None
    scene.admitted(row)
    scene.unsure.add(row)  # what its window needs is not there yet
    target = row if scene.kind == "windows" or scene.rng.random() < 0.8 else scene.a_row()
    given = scene.call(
        f"import into row {target}",
        lambda: scene.importer.import_row(target, sent.extent, sent.buffer),
        wrong="it is no request's" if target not in scene.oracle.kv else "",
    )
    if given is not REFUSED:
        scene.oracle.begin(target, list(sent.stored))
        if target == row:
            scene.unsure.discard(row)
        else:
            scene.unsure.add(target)  # what it shares may reach further
    return None


def import_pages(scene: Scene) -> None:
    """The same by pages."""
    sent = next((each for each in reversed(scene.sent) if not each.by_layers), None)
    if sent is None:
        return export_row(scene)
    if scene.kind == "windows":  # pages of tokens that were not sent become 0 there; import_row() refuses them
        return import_row(scene)
    row = scene.call("importer.admit", lambda: scene.importer.admit(sent.extent))
    if row is REFUSED:
        return None
    scene.admitted(row)

    def run() -> None:
        pages = scene.importer.pages_of(row, sent.extent.kv_len)
        scene.importer.import_pages(pages, sent.extent, sent.buffer)
        scene.runtime.table.mark_stored([row], [sent.extent.kv_len])

    if scene.call(f"import the pages of row {row}", run) is not REFUSED:
        scene.oracle.begin(row, list(sent.stored))
    return None


def _import_layers(scene: Scene, sent: Sent) -> None:
    row = scene.call("importer.admit", lambda: scene.importer.admit(sent.extent))
    if row is REFUSED:
        return
    scene.admitted(row)

    def run() -> None:
        pages, first = scene.importer.pages_of(row, sent.extent.kv_len), 0
        for layer in range(len(scene.model.layers)):
            end = first + scene.exporter.num_layer_bytes(sent.extent, layer)
            scene.importer.import_layer(layer, pages, sent.extent, sent.buffer[first:end])
            first = end
        scene.runtime.table.mark_stored([row], [sent.extent.kv_len])

    if scene.call(f"import the layers of row {row}", run) is not REFUSED:
        scene.oracle.begin(row, list(sent.stored))


# What is the same for all rows


def weights(scene: Scene) -> None:
    """Other sinks; or such as no layer has."""
    if scene.rng.random() < 0.5:
        scene.set_weights()
        return
    wrong = HeadWeights(sinks=torch.zeros(7), alibi_slopes=torch.zeros(7))
    scene.call("weights of another layer", lambda: scene.runtime.head_weights.set(0, wrong), wrong="they are bad")


def kv_scales(scene: Scene) -> None:
    """Factors: refused while anything is stored, and for layers that have none."""
    scales = KVScales(0.5, 2.0)
    has_rows = bool(scene.rows or scene.kept)
    bad = scene.kind != "eight bits" or has_rows or scene.open is not None
    scene.call("set_kv_scales", lambda: scene.runtime.set_kv_scales(0, scales), wrong="it is bad" * bad)


def scales_from_scratch(scene: Scene) -> None:
    """All requests go, factors change, and others come."""
    if scene.kind != "eight bits" or scene.open is not None:
        return kv_scales(scene)
    for row in scene.rows:
        scene.call(f"free row {row}", lambda row=row: scene.runtime.table.free(row), right=True)
        scene.gone(row)
    scene.call("drop_all", scene.runtime.table.kept.drop_all)
    scene.kept.clear()
    step = scene.rng.choice((0.5, 1.0, 2.0))
    given = scene.call("set_kv_scales", lambda: scene.runtime.set_kv_scales(0, KVScales(step, 1 / step)))
    if given is not REFUSED:
        scene.sent.clear()  # a passport of other factors
        scene.renew_movers()
    return prefill(scene)


def convert(scene: Scene) -> None:
    """The pages of a row become those of another, of eight bits; or none may."""
    row = scene.a_row()
    length = scene.length(row)
    if row not in scene.oracle.kv or not length:
        return
    child = scene.call("admit", scene.runtime.table.admit)
    if child is REFUSED:
        return
    scene.admitted(child)
    bad = scene.kind != "eight bits"

    def run() -> None:
        table = scene.runtime.table
        table.reserve(child, length)
        count = -(-length // scene.page_size)
        at = [torch.tensor(table.pages_of(each)[:count].tolist(), device=scene.device) for each in (row, child)]
        copies = table.full.pending.copies
        at[0] = torch.tensor([copies.get(page, page) for page in at[0].tolist()], device=scene.device)
        pages = scene.runtime.pool.layer(0)
        convert_pages(pages, pages, at[0], at[1])
        table.mark_stored([child], [length])

    try:
        given = REFUSED if bad else scene.call(f"convert row {row} for row {child}", run)
    finally:
        pages = torch.zeros(1, dtype=torch.int64, device=scene.device)
        layer = scene.runtime.pool.layer(0)
        scene.call("convert to page 0", lambda: convert_pages(layer, layer, pages, pages), wrong="page 0 stays 0")
    if given is not REFUSED:
        scene.oracle.begin(child, list(scene.oracle.kv[row][:length]))


def expanded(scene: Scene) -> None:
    """Expanded prefill of a latent layer, in the step that runs or in none."""
    layers = scene.model.layers
    if not scene.is_latent:
        scene.call("expanded prefill", lambda: scene.runtime.expanded_prefill(0), wrong="no layer is latent")
        return
    prefill_of = scene.runtime.expanded_prefill(0)
    layer, heads = layers[0], layers[0].problem.num_q_heads

    def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
        k = latents[:, None].expand(-1, heads, -1)
        return k, k[..., : layer.problem.v_head_dim]

    if scene.open is None:
        q = torch.zeros(2, heads, layer.problem.head_dim, device=scene.device)
        scene.call("expanded without a step", lambda: prefill_of.attend(q, q[:, 0], expand), wrong="no step runs")
        begin(scene)
    begun = scene.open
    if begun is None:
        return
    lives = all(begun.changes[seq.row] == scene.changes[seq.row] for seq in begun.seqs)
    entries = torch.tensor([entry for seq in begun.seqs for entry in seq.stored], device=scene.device)
    if not len(entries):
        return
    q, k, _ = layer.of(entries)
    given = scene.call("expanded prefill", lambda: prefill_of.attend(q, k[:, 0].contiguous(), expand, chunk_tokens=3))
    if given is REFUSED or not lives:
        return
    out, at = given[0].double().cpu().numpy(), 0
    for seq in begun.seqs:
        kv = scene.oracle.kv[seq.row]
        scene.oracle.kv[seq.row] = kv[: seq.begin] + seq.stored
        answer = scene.oracle.attend(scene.oracle.layers[0], seq.row, seq.tokens())
        scene.oracle.kv[seq.row] = kv
        off = np.abs(out[at : at + len(seq.ids)] - answer.out)
        if not (off[answer.known] <= 4 * answer.out_bound[answer.known] + 1e-6).all():
            raise Finding(f"expanded prefill of row {seq.row} is off by {off[answer.known].max():.2g}")
        at += len(seq.ids)


def captures(scene: Scene) -> None:
    """Every graph is made."""
    scene.call("capture_all", scene.one_of("captures", (scene.runner, scene.drafter)).capture_all)


def reopen(scene: Scene) -> None:
    """Other capture sizes, or such as are none."""
    sizes = scene.rng.choice(((4,), (4,), (3,), (), (2, 2)))
    given = scene.call(
        f"reopen for {sizes}", lambda: scene.runner.reopen(sizes, (16,)), wrong="bad" * (sizes in ((), (2, 2)))
    )
    if given is not REFUSED:
        scene.last = None


def unseal(scene: Scene) -> None:
    """Addresses are given up, and perhaps fixed again."""
    seals = scene.runtime.seals
    given = scene.call("unseal", lambda: seals.unseal((4,), (16,)))
    if given is not REFUSED:
        scene.last = None
    if scene.rng.random() < 0.3:
        scene.call("give_up", seals.give_up)
    if scene.rng.random() < 0.5:
        scene.call("seal", seals.seal)
    else:
        scene.call("reseal", lambda: seals.reseal((4,), (16,)))
        scene.last = None


def ask(scene: Scene) -> None:
    """check_device(), of the runtime or of a runner."""
    scene.call("check_device", scene.one_of("ask", (scene.runtime, scene.runner)).check_device)


def copied(scene: Scene) -> None:
    """Copies are refused."""
    what = scene.rng.choice((scene.runtime, scene.runner))
    scene.call("deepcopy", lambda: copy.deepcopy(what), wrong="it owns a device's memory")


def accepted_rows(scene: Scene) -> None:
    """select_last_accepted() over a step that is over."""
    if scene.over is None:
        return
    part = scene.over.parts[0]
    if part.parents.numel():
        raise Finding("a step that is no round has parents")
    rows = torch.zeros(part.token_ids.shape[0] + scene.rng.choice((0, 0, 1)), 2, device=scene.device)
    counts = torch.ones(part.row_of_seq.shape[0], dtype=torch.int32, device=scene.device)
    scene.call("select_last_accepted", lambda: select_last_accepted(rows, part, counts))


VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        step_whole, step_halves, step_compiled, step_with_rows_worked, run_graphed, run_graphed_halves, run_eagerly,
        step_of_a_thread, lengths_on_device, verify, move, again_by_hand, again_by_runner, begin, stage, fill,
        store_one, attend_one, old_layers, end, draft_chain, draft_tree, draft_runner, admit, reserve, reserve_all,
        truncate, free, given_to_another, fork, evict, mark_stored, keep, admit_over, drop, look, export_row,
        export_pages, import_row, import_pages, weights, kv_scales, scales_from_scratch, convert, expanded, captures,
        reopen, unseal, ask, copied, accepted_rows,
    )
}  # fmt: skip


# Before and after a few verbs


def prefill(scene: Scene) -> None:
    """Rows that have tokens: three for whom it is new, and a fork."""
    while len(scene.rows) < 3:
        admit(scene)
    seqs = [Seq(row, 0, scene.ids(scene.rng.randint(3, 9))) for row in scene.rows if not scene.length(row)][:4]
    if seqs:
        reserve_for(scene, seqs)
        batch = scene.batch(seqs)
        rows = scene.call("prompts", lambda: scene.runner.run(batch), right=not scene.unsure & {s.row for s in seqs})
        if rows is not REFUSED:
            scene.staged(batch, seqs)
            scene.stored(seqs)


def settle(scene: Scene) -> None:
    """Close what is open; then each request goes on by a token, and gives what the oracle says."""
    close(scene)
    scene.compare_pool("closing")
    if scene.listen():
        scene.say("reported at the end")
    scene.provoked = False
    sure = [row for row in scene.rows if row not in scene.unsure and scene.length(row) < MAX_KV_LEN]
    for first in range(0, len(sure), 4):
        _go_on(scene, sure[first : first + 4], right=True)
    for row in [row for row in scene.rows if row in scene.unsure and scene.length(row) < MAX_KV_LEN]:
        _go_on(scene, [row], right=False)
    scene.compare_pool("going on")


def _go_on(scene: Scene, rows: list[int], *, right: bool) -> None:
    seqs = [Seq(row, scene.length(row), scene.ids(1)) for row in rows]
    ends = [seq.end for seq in seqs]
    if scene.call(f"room for {rows}", lambda: scene.runtime.table.reserve_all(rows, ends), right=right) is REFUSED:
        return
    batch = scene.batch(seqs)
    given = scene.call(f"rows {rows} go on", lambda: scene.runner.run(batch), right=right)
    if given is REFUSED:
        scene.last = None
        return
    scene.staged(batch, seqs)
    scene.stored(seqs)
    scene.compare_rows(f"rows {rows} going on", seqs, given)


def clear(scene: Scene) -> None:
    """Fewer requests and kept pages, so that the next verbs find room."""
    rng = scene.rng
    while len(scene.rows) > 4 or any(scene.length(row) > MAX_KV_LEN - 12 for row in scene.rows):
        row = max(scene.rows, key=scene.length) if rng.random() < 0.5 else rng.choice(scene.rows)
        scene.call(f"free row {row}", lambda row=row: scene.runtime.table.free(row), right=True)
        scene.gone(row)
    for row in [row for row in scene.rows if row in scene.unsure or UNKNOWN in scene.oracle.kv[row]]:
        scene.call(f"free row {row}", lambda row=row: scene.runtime.table.free(row), right=True)
        scene.gone(row)
    if len(scene.kept) > 6:
        scene.call("drop_all", scene.runtime.table.kept.drop_all)
        scene.dropped += list(scene.kept)
        scene.kept.clear()
    scene.sent = scene.sent[-4:]
    scene.log = scene.log[-12:]

"""Verbs of steps that the soak does not draw: call by call, in other threads, again, and draft step by draft step."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.step import Step
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.comparisons import compare_draft, compare_rows
from rocm_lab.soak.draft_forward import draft_parent
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.model import LayerTables
from rocm_lab.soak.row_history import Begun
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.setting import CHAIN, TREE
from rocm_lab.soak.step_verbs import (
    a_run,
    after_round,
    by_hand,
    by_hand_in_halves,
    by_runner_in_halves,
    drafted,
    finish_by_hand,
    move_paths,
    new_tokens,
    padded_step,
    reserve_for,
    round_by_runner,
    round_of,
    tree_over,
    verify_trees,
)

T = TypeVar("T")
TURNED_PLACES = 64  # positions of rows that are turned


def in_another_thread(body: Callable[[], T]) -> T:
    """Returns what a function gives in a thread of its own. Raises what it does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


def no_turn(dim: int, positions: int, device: torch.device) -> QkvWork:
    """Rope by an angle of 0, so that rows stay what they are."""
    table = torch.cat([torch.ones(positions, dim // 2), torch.zeros(positions, dim // 2)], 1)
    return QkvWork(RopeTable(table.to(device)))


def attend_turned(calls: Any, number: int, layer: LayerTables, entry: Tensor, *, apart: bool) -> tuple[Tensor, Any]:
    """A layer of a step whose rows are turned, by 0: before they are stored, or as they are. Returns out and lse."""
    q, k, v = layer.of(entry)
    out, lse = layer.room(q)
    work, turned = no_turn(layer.problem.head_dim, TURNED_PLACES, q.device), torch.zeros_like(q)
    if apart:
        calls.rope_queries(number, q, turned, work)
        calls.store(number, k, v)
    else:
        calls.rope_and_store(number, q, k, v, turned, work)
    calls.attend(number, turned, out, lse)
    calls.finish(number, out, undo=no_turn(layer.problem.v_head_dim, TURNED_PLACES, q.device).rope)
    return out, lse


def same_branch(step: int, branch: int, branches: int) -> int:
    """The same of a round whose branches go on side by side."""
    return branch


def step_whole(scene: Scene) -> None:
    """AttentionRuntime.step(), the layers, end_step()."""
    padded_step(scene, by_hand, "a step")


def step_halves(scene: Scene) -> None:
    """The same in two halves."""
    padded_step(scene, by_hand_in_halves, "two halves")


def step_compiled(scene: Scene) -> None:
    """The same by the calls that compiled forwards make."""

    def run(scene: Scene, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
        with scene.runtime.stage(batch, scene.runtime.plan(batch, pad_to)) as step:
            calls = scene.compiled.of(step.parts[0])
            calls.fill()
            entry, rows = scene.model.begin(step.parts[0]), []
            for number, layer in enumerate(scene.model.layers):
                q, k, v = layer.of(entry)
                out, lse = layer.room(q)
                if scene.rng.random() < 0.5:
                    calls.store_and_attend(number, q, k, v, out, lse)
                else:
                    calls.store(number, k, v)
                    calls.attend(number, q, out, lse)
                rows.append(layer.keep(step.parts[0], out, lse))
            rows += scene.model.recur(step.parts[0], entry)
        return torch.cat(rows, 1)[: batch.num_seqs]

    padded_step(scene, run, "a step by compiled layers")


def step_with_rows_worked(scene: Scene) -> None:
    """A step whose rows are turned, by 0, as they are stored or before, by its layers or by those of compiled code."""

    def run(scene: Scene, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
        with scene.runtime.step(batch, scene.runtime.plan(batch, pad_to)) as step:
            part = step.parts[0]
            compiled = scene.compiled.of(part)
            ways = ((part.layers, True), (compiled, True), (part.layers, False), (compiled, False))
            calls, apart = scene.one_of("layers", ways)
            entry, rows = scene.model.begin(part), []
            for number, layer in enumerate(scene.model.layers):
                out, lse = attend_turned(calls, number, layer, entry, apart=apart or scene.is_latent)
                rows.append(layer.keep(part, out, lse))
        return torch.cat(rows, 1)[: batch.num_seqs]

    padded_step(scene, run, "a step whose rows are turned")


def run_graphed_halves(scene: Scene) -> None:
    """StepRunner.run() in halves."""
    padded_step(scene, by_runner_in_halves, "runner.run in halves")


def run_eagerly(scene: Scene) -> None:
    """StepRunner.run_eagerly()."""
    padded_step(scene, lambda s, b, pad_to: s.runner.run_eagerly(b, pad_to), "runner.run_eagerly")


def step_of_a_thread(scene: Scene) -> None:
    """A step by another thread: refused while this one has one."""

    def run(scene: Scene, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
        return in_another_thread(lambda: by_hand(scene, batch, pad_to))

    padded_step(scene, run, "a step of another thread")


def lengths_on_device(scene: Scene) -> None:
    """Lengths that the device alone knows: right ones, or some that leave a gap or go beyond the bounds."""
    rows = [row for row in scene.some(2) if scene.history.surely_goes_on(row)]
    seqs = [Seq(row, scene.history.length(row), scene.ids(1)) for row in rows]
    if not seqs:
        return
    reserve_for(scene, [Seq(seq.row, seq.end, [1, 1]) for seq in seqs])
    bad = scene.rng.random() < 0.3
    reported = [seq.end + (scene.rng.choice((1, 9)) if bad else 0) for seq in seqs]
    bounds = [seq.end + 2 if scene.room(seq.row) >= seq.end + 2 else seq.end for seq in seqs]
    ids = [token_id for seq in seqs for token_id in seq.ids]
    batch = StepBatch(
        [seq.row for seq in seqs], bounds, [1] * len(seqs), ids, inputs=DeviceInputs(kv_len=scene.ints(reported))
    )
    scene.provoked |= bad
    given = scene.call("lengths on the device", lambda: finish_by_hand(scene, scene.runtime.step(batch), batch))
    if scene.open is not None or given is REFUSED:
        return
    scene.last = None
    if bad:
        if not scene.listen():
            raise Finding(
                f"device lengths {reported} over {[seq.begin for seq in seqs]} stored tokens were not reported"
            )
        scene.history.give_up(rows)
    else:
        scene.history.stored(seqs)
        compare_rows(scene, "lengths on the device", seqs, given)
    scene.history.going_on.lose_track(rows)
    if not bad:
        for row in rows:
            scene.history.unsure.add(row)  # the bound counts as stored


def verify(scene: Scene) -> None:
    """A step of trees, by hand or by the runner; their paths may be moved afterwards."""
    rows, run = [row for row in scene.some(2) if scene.history.length(row)], a_run(scene)
    trees = [tree_over(scene, row) for row in rows]
    if trees:
        reserve_for(scene, [seq for seq, _, _ in trees])
        verify_trees(scene, trees, run)


def move(scene: Scene) -> None:
    """move_accepted() of the last verify step: once; or again, late, of changed rows, by a path that leads too far."""
    if scene.verified is None:
        verify(scene)
    verified = scene.verified
    if verified is None:
        accepted = Accepted(*(scene.ints([[0] * 5] if wide else [0]) for wide in (0, 1, 1, 0, 0)))
        scene.call("a move without a verify step", lambda: scene.runtime.move_accepted(accepted))
        return
    far = [30] * (scene.rng.random() < 0.2)
    wrong = "they were moved already" if verified.is_moved else ""
    if any(count != scene.history.changes[row] for row, count in verified.changes.items()):
        wrong = "a row has changed"
    elif scene.last is None or scene.last[1] != verified.seqs:
        wrong = wrong or "another step was staged since"
    move_paths(scene, verified, far, wrong)


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
    if any(changes[seq.row] != scene.history.changes[seq.row] for seq in seqs):
        wrong = "a row has changed"
    if scene.rng.random() < 0.15 and what == "AGAIN":
        batch, wrong = (
            scene.batch(seqs) if batch.is_plain else batch,
            wrong or ("another batch" if batch.is_plain else ""),
        )
    given = scene.call(what, lambda: run(batch), wrong=wrong)
    if given is not REFUSED and scene.open is None:
        counted = {seq.row: scene.history.length(seq.row) for seq in seqs}
        scene.history.stored(seqs)
        compare_rows(scene, what, seqs, given)
        scene.history.going_on.lose_track(seq.row for seq in seqs)
        for row in {seq.row for seq in seqs if counted[seq.row] < seq.end}:
            scene.history.cut(row, counted[row])  # what was taken back may count again, or not
            scene.history.unsure.add(row)


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
        scene.open = Begun(given, seqs, dict(scene.history.lives), dict(scene.history.changes))
        scene.staged(batch, seqs)
        scene.verified = None
        for seq in seqs:  # until it has come to its end
            scene.history.going_on.broke_off(seq.row, seq.begin)


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
    number = next((each for each in range(len(scene.model.outputs)) if each not in scene.open.done), None)
    if number is None:
        return None
    part, layer = scene.open.step.parts[0], scene.model.outputs[number]
    entry = scene.model.entries(part)
    if isinstance(layer, LayerTables):
        _, k, v = layer.of(entry)
        calls = scene.compiled.of(part) if scene.rng.random() < 0.3 else part.layers
        run: Callable[[], object] = partial(calls.store, number, k, v)
    else:
        run = partial(layer.run, part, number - len(scene.model.layers), entry)
    if scene.call(f"layer {number} stores", run) is not REFUSED:
        scene.history.stored_in_layer(scene.open, number)
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
            scene.history.stored_in_layer(scene.open, 0)
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
    """Notes the result of the open step, which has ended."""
    begun = scene.open
    assert begun is not None
    scene.open, scene.over = None, begun.step
    if begun.done >= {*range(len(scene.model.outputs))}:
        scene.history.stored(begun.seqs, begun.changes, begun.lives)
    elif begun.done or scene.model.recurrent:
        for seq in begun.seqs:
            if seq.ids and begun.lives[seq.row] == scene.history.lives[seq.row] and seq.row in scene.oracle.kv:
                scene.history.broke_off(seq)


def close(scene: Scene) -> None:
    """The open step stores what it has not, and ends."""
    if scene.open is not None:
        fill(scene)
        for _ in scene.model.outputs:
            store_one(scene)
        end(scene)


def draft_chain(scene: Scene) -> None:
    """A round of chains, draft step by draft step: in order, or in another one."""
    _round(scene, CHAIN)


def draft_tree(scene: Scene) -> None:
    """A round of trees."""
    _round(scene, TREE)


def draft_runner(scene: Scene) -> None:
    """A round by a runner, as a graph where there are some; or by one without a draft model, which refuses it."""
    drafts = scene.rng.choice(scene.options.drafts)
    rows = scene.some(3)
    reserve_for(scene, after_round(scene, rows, drafts))
    round_by_runner(scene, rows, drafts)


def _round(scene: Scene, drafts: Drafts) -> None:
    rng, rows = scene.rng, scene.some(3)
    reserve_for(scene, after_round(scene, rows, drafts))
    seqs, batch = round_of(scene, rows, drafts)
    order = list(range(drafts.steps))
    if rng.random() < 0.4:
        order = rng.choice((order[::-1], order[1:], [order[0], order[-1]], [order[0], order[0], *order[1:]]))
    bad_parents = drafts.branches > 1 and rng.random() < 0.25
    compiled, halves, keeps = rng.random() < 0.4, rng.choice((1, 1, 2)), rng.random() < 0.5
    step = scene.call(
        f"a round of {drafts}", lambda: scene.runtime.step(batch, scene.runtime.plan(batch, halves=halves))
    )
    if step is REFUSED:
        return
    done: list[int] = []
    try:
        for number in order:
            if not _draft_step(scene, step, number, bad_parents, compiled, keeps):
                break
            if halves == 1 and seqs and not bad_parents and done == list(range(number)):
                compare_draft(scene, seqs, drafts, number, scene.last_draft, same_branch if keeps else draft_parent)
            elif number != 0 and number - 1 not in done and number not in done:
                raise Finding(f"draft step {number} of {drafts} was taken after {done}")
            done.append(number)
    finally:
        scene.runtime.end_step()
    if bad_parents and seqs and 1 in done:
        if not scene.listen():
            raise Finding(f"parents out of range were not reported, in draft steps {done}")
        scene.history.give_up([seq.row for seq in seqs])
    elif set(done) == set(range(drafts.steps)):
        drafted(scene, drafts, seqs)
    else:
        for seq in seqs:
            scene.history.cut(seq.row, seq.begin)


def _draft_step(scene: Scene, step: Step, number: int, bad_parents: bool, compiled: bool, keeps: bool) -> bool:
    """One draft step in every half; whether it was taken."""
    for half in step.halves:
        part = half[number]

        def run(part: Any = part) -> Tensor:
            if number and part.branches > 1:
                if bad_parents:
                    scene.provoked = True
                    part.set_parents(torch.full_like(part.token_ids, scene.rng.choice((5, -7))))
                elif keeps:
                    part.keep_branches()
                else:
                    part.set_parents(scene.drafts.parents(part, number))
            return scene.drafts.step(part, number, scene.compiled.of(part) if compiled else None)

        given = scene.call(f"draft step {number}", run)
        if given is REFUSED:
            return False
        scene.last_draft = given
    return True

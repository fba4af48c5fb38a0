"""Verbs of steps: whole, in halves, call by call, again, in rounds of drafts, and moves of what was accepted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.capture.split_forward import in_batch_order
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.step import Step
from rocm_lab.soak.calls import LAST_CALLS, REFUSED, in_another_thread
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.judge import Played
from rocm_lab.soak.model import LayerTables, attend_turned, looked_up
from rocm_lab.soak.scene import Begun, Scene, Verified, draft_id, draft_parent, same_branch
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.setting import CHAIN, TREE

Run = Callable[[Scene, StepBatch, PadTo | None], Tensor]


# Steps


def new_tokens(scene: Scene, rows: list[int], *, most: int = 3) -> tuple[list[Seq], str]:
    """A step over rows, mostly right; or why it must be refused."""
    rng, wrong = scene.rng, ""
    seqs = [Seq(row, scene.length(row), scene.ids(rng.randint(1, most))) for row in rows]
    chance = rng.random()
    if not seqs or chance < 0.75:
        pass
    elif chance < 0.8:
        # Before a state that only the device misses, it begins anew.
        back = rng.choice(seqs)
        back.begin = max(0, back.begin - rng.randint(1, 5))
        back.begin *= not scene.going_on.only_device_knows(back.row, back.begin)
        back.positions = list(range(back.begin, back.end))
        scene.unsure.add(back.row)  # perhaps before what its window, or another row, needs
    elif chance < 0.85:
        seqs.append(Seq(seqs[0].row, seqs[0].begin, scene.ids(1)))
        wrong = "a row is named twice"
    elif chance < 0.95:
        strange = rng.choice([*scene.freed, 0, -1, scene.options.max_num_rows + 1])
        seqs[-1] = Seq(strange, rng.choice((0, 3)), scene.ids(1))
        wrong = f"row {strange} is no request's"
    elif seqs[-1].row not in scene.going_on.untracked:
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


def padded_step(scene: Scene, run: Run, what: str) -> None:
    """A whole step, sometimes padded beyond what the ladder pads it to."""
    seqs, wrong = new_tokens(scene, scene.some())
    try:
        batch = scene.batch(seqs)
    except RocmAttnError:
        return
    beyond = scene.rng.random() < 0.15
    judged_step(scene, run, what, seqs, batch, wrong, PadTo(2 * len(seqs) + 4) if beyond else None)


def judged_step(
    scene: Scene,
    run: Run,
    what: str,
    seqs: list[Seq],
    batch: StepBatch,
    wrong: str = "",
    pad_to: PadTo | None = None,
    *,
    right: bool = False,
) -> bool:
    """Runs a step whose forward notes all that it is given; each of its tokens, and each pad, is judged.

    Returns whether it was taken.
    """
    scene.model.forget()
    given = scene.call(what, lambda: run(scene, batch, pad_to), wrong=wrong, right=right)
    if scene.open is not None:
        return False
    if given is REFUSED:
        scene.last = scene.verified = None  # it may have been staged, or not
        return False
    scene.staged(batch, seqs)
    scene.stored(seqs)
    padding = scene.runtime.padding
    shape = padding.split_shape(batch, pad_to) if run in _IN_HALVES else padding.shape(batch, pad_to)
    scene.played(Played.of(scene.turn, scene.log[-LAST_CALLS:], scene.model, scene.oracle, what, seqs, given, shape))
    return True


def finish_by_hand(scene: Scene, step: Step, batch: StepBatch) -> Tensor:
    """Run the parts of a step that was begun, and end it."""
    try:
        if len(step.parts) == 2 and scene.rng.random() < 0.5:
            later, earlier = scene.model.forward_apart([step.parts[1], step.parts[0]])
            rows = [earlier, later]
        else:
            rows = [scene.model.forward(part) for part in step.parts]
    finally:
        scene.runtime.end_step()
    scene.over = step
    given = rows[0] if len(rows) == 1 else in_batch_order(step, (rows[0], rows[1]))
    return given[: batch.num_seqs]


def step_whole(scene: Scene) -> None:
    """AttentionRuntime.step(), the layers, end_step()."""
    padded_step(scene, by_hand, "a step")


def by_hand(scene: Scene, batch: StepBatch, pad_to: PadTo | None, *, halves: int = 1) -> Tensor:
    """Run a step call by call."""
    return finish_by_hand(scene, scene.runtime.step(batch, scene.runtime.plan(batch, pad_to, halves=halves)), batch)


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


def run_graphed(scene: Scene) -> None:
    """StepRunner.run()."""
    padded_step(scene, by_runner, "runner.run")


def by_runner(scene: Scene, batch: StepBatch, pad_to: PadTo | None, *, halves: int = 1) -> Tensor:
    """Run a step by the runner, as a graph where there are some."""
    return scene.runner.run(batch, pad_to, halves=halves)


def run_graphed_halves(scene: Scene) -> None:
    """StepRunner.run() in halves."""
    padded_step(scene, by_runner_in_halves, "runner.run in halves")


by_hand_in_halves, by_runner_in_halves = _IN_HALVES = partial(by_hand, halves=2), partial(by_runner, halves=2)


def a_run(scene: Scene) -> Run:
    """A way to run a step."""
    return scene.rng.choice((by_hand, by_runner, *_IN_HALVES))


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
    rows = [row for row in scene.some(2) if scene.surely_goes_on(row)]
    seqs = [Seq(row, scene.length(row), scene.ids(1)) for row in rows]
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
        scene.give_up(rows)
    else:
        scene.stored(seqs)
        scene.compare_rows("lengths on the device", seqs, given)
    scene.going_on.lose_track(rows)
    if not bad:
        for row in rows:
            scene.unsure.add(row)  # the bound counts as stored


def tree_over(scene: Scene, row: int) -> tuple[Seq, list[int], list[int]]:
    """Draws a tree of drafts of a row. Returns it, its nodes' parents, and the nodes that are accepted.

    Most nodes follow the one before; the others have any parent. Those of a path are accepted.
    """
    rng, begin = scene.rng, scene.length(row)
    parents = [-1]
    for node in range(1, rng.randint(1, scene.setting.most_nodes)):
        parents.append(node - 1 if rng.random() < 0.5 else rng.randint(-1, node - 1))
    path, after = [], [0]
    while after:
        path.append(rng.choice(after))
        after = [node for node, parent in enumerate(parents) if parent == path[-1]] if rng.random() < 0.8 else []
    seq = Seq(row, begin, scene.ids(len(parents)), is_tree=True)
    seq.shows = np.zeros((len(parents), seq.end), np.bool_)
    seq.shows[:, :begin] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            seq.shows[node] = seq.shows[parent]
        seq.shows[node, begin + node] = True
    seq.positions = [int(count) - 1 for count in seq.shows.sum(1)]
    return seq, parents, path


def verify(scene: Scene) -> None:
    """A step of trees, by hand or by the runner; their paths may be moved afterwards."""
    rows, run = [row for row in scene.some(2) if scene.length(row)], a_run(scene)
    trees = [tree_over(scene, row) for row in rows]
    if trees:
        reserve_for(scene, [seq for seq, _, _ in trees])
        verify_trees(scene, trees, run)


def verify_trees(scene: Scene, trees: Sequence[tuple[Seq, list[int], list[int]]], run: Run) -> None:
    """A step of these trees, at least one, for which there is room."""
    seqs = [seq for seq, _, _ in trees]
    most = max(len(parents) for _, parents, _ in trees)
    mask = TreeMask(scene.ints([parents + [-1] * (most - len(parents)) for _, parents, _ in trees]))
    is_taken = judged_step(scene, run, "a verify step", seqs, scene.batch(seqs, mask=mask))
    if scene.open is None:
        changes = {seq.row: scene.changes[seq.row] for seq in seqs}
        scene.verified = Verified(seqs, [path for _, _, path in trees], changes) if is_taken else None


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
    if any(count != scene.changes[row] for row, count in verified.changes.items()):
        wrong = "a row has changed"
    elif scene.last is None or scene.last[1] != verified.seqs:
        wrong = wrong or "another step was staged since"
    move_paths(scene, verified, far, wrong)


def move_paths(scene: Scene, verified: Verified, far: list[int], wrong: str) -> None:
    """Moves the accepted paths of a verify step. far: nodes after each path that no tree has"""
    paths = [[*path, *far] for path in verified.paths]
    wide = 1 + max(map(len, paths))
    accepted = Accepted(
        scene.ints([len(path) - 1 for path in paths]),
        scene.ints([path + [-1] * (wide - len(path)) for path in paths]),
        scene.ints([[1] * len(path) + [-1] * (wide - len(path)) for path in paths]),
        scene.ints([1] * len(paths)),
        scene.ints([seq.begin + len(path) for seq, path in zip(verified.seqs, paths, strict=True)]),
    )
    if scene.call("a move", lambda: scene.runtime.move_accepted(accepted), wrong=wrong) is REFUSED:
        return
    scene.verified, scene.last = replace(verified, is_moved=True), None
    for seq, path in zip(verified.seqs, verified.paths, strict=True):
        kept, after = [seq.stored[node] for node in path], seq.begin + len(path)
        stays = scene.oracle.kv[seq.row][after : after + len(far)]
        scene.cut(seq.row, seq.begin)
        # A node without a page moves nothing: what was there stays.
        has_page = seq.begin + max(far, default=0) < -(-scene.room(seq.row) // scene.page_size) * scene.page_size
        scene.oracle.store(seq.row, seq.begin, kept if has_page else kept + stays)
        scene.unsure.add(seq.row)  # the places of what was not accepted count as stored, too


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
        scene.going_on.lose_track(seq.row for seq in seqs)
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
        for seq in seqs:  # until it has come to its end
            scene.going_on.broke_off(seq.row, seq.begin)


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
        scene.stored_in_layer(scene.open, number)
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
            scene.stored_in_layer(scene.open, 0)
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
        scene.stored(begun.seqs, begun.changes, begun.lives)
    elif begun.done or scene.model.recurrent:
        for seq in begun.seqs:
            if seq.ids and begun.lives[seq.row] == scene.lives[seq.row] and seq.row in scene.oracle.kv:
                scene.broke_off(seq)


def close(scene: Scene) -> None:
    """The open step stores what it has not, and ends."""
    if scene.open is not None:
        fill(scene)
        for _ in scene.model.outputs:
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
    """A round by a runner, as a graph where there are some; or by one without a draft model, which refuses it."""
    drafts = scene.rng.choice(scene.options.drafts)
    rows = scene.some(3)
    reserve_for(scene, after_round(scene, rows, drafts))
    round_by_runner(scene, rows, drafts)


def after_round(scene: Scene, rows: list[int], drafts: Drafts) -> list[Seq]:
    """Sequences that need the room of a round."""
    return [Seq(row, scene.length(row), [1] * drafts.tokens) for row in rows]


def round_by_runner(scene: Scene, rows: list[int], drafts: Drafts) -> None:
    """Runs a round of rows that have room for it."""
    seqs, batch = _round_of(scene, rows, drafts)
    if scene.rng.random() < 0.2:
        scene.call("a round", lambda: scene.without_drafts.run(batch), wrong="the runner has no draft model")
        return
    halves = scene.rng.choice((1, 1, 2))
    given = scene.call(f"a round of {drafts} by the runner", lambda: scene.runner.run(batch, halves=halves))
    if given is not REFUSED and scene.open is None:
        _drafted(scene, drafts, seqs)
        for step in range(drafts.steps):
            width = given.shape[1] // drafts.steps
            scene.compare_draft(seqs, drafts, step, given[:, step * width : (step + 1) * width], draft_parent)


def _round_of(scene: Scene, rows: list[int], drafts: Drafts) -> tuple[list[Seq], StepBatch]:
    seqs = [Seq(row, scene.length(row), [draft_id(0, 0)]) for row in rows]
    ids = [int(draft_id(0, branch)) for _ in seqs for branch in range(drafts.branches)]
    scene.last = scene.verified = None
    return seqs, draft_batch([seq.row for seq in seqs], [seq.begin for seq in seqs], drafts, ids)


def _drafted(scene: Scene, drafts: Drafts, seqs: list[Seq]) -> None:
    """Notes the tokens that a round has stored. Later steps may continue from those of chains."""
    for seq in seqs:
        scene.cut(seq.row, seq.begin)
        if drafts.branches == 1:
            entries = [looked_up(draft_id(step, 0), seq.begin + step) for step in range(drafts.steps)]
            scene.oracle.store(seq.row, seq.begin, entries)


def _round(scene: Scene, drafts: Drafts) -> None:
    rng, rows = scene.rng, scene.some(3)
    reserve_for(scene, after_round(scene, rows, drafts))
    seqs, batch = _round_of(scene, rows, drafts)
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
                scene.compare_draft(seqs, drafts, number, scene.last_draft, same_branch if keeps else draft_parent)
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
                    part.set_parents(scene.draft_parents(part, number))
            return scene.draft_step(part, number, scene.compiled.of(part) if compiled else None)

        given = scene.call(f"draft step {number}", run)
        if given is REFUSED:
            return False
        scene.last_draft = given
    return True

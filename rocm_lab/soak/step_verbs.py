"""Verbs of steps: whole or in halves, trees and rounds of drafts, and moves of what was accepted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.capture.split_forward import in_batch_order
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.step.step import Step
from rocm_lab.soak.calls import LAST_CALLS, REFUSED
from rocm_lab.soak.comparisons import compare_draft
from rocm_lab.soak.draft_forward import draft_id, draft_parent
from rocm_lab.soak.judge import Played
from rocm_lab.soak.model import looked_up
from rocm_lab.soak.scene import Scene, Verified
from rocm_lab.soak.seq import Seq

Run = Callable[[Scene, StepBatch, PadTo | None], Tensor]


def new_tokens(scene: Scene, rows: list[int], *, most: int = 3) -> tuple[list[Seq], str]:
    """A step over rows, mostly right; or why it must be refused."""
    rng, wrong = scene.rng, ""
    seqs = [Seq(row, scene.history.length(row), scene.ids(rng.randint(1, most))) for row in rows]
    chance = rng.random()
    if not seqs or chance < 0.75:
        pass
    elif chance < 0.8:
        # Before a state that only the device misses, it begins anew.
        back = rng.choice(seqs)
        back.begin = max(0, back.begin - rng.randint(1, 5))
        back.begin *= not scene.history.going_on.only_device_knows(back.row, back.begin)
        back.positions = list(range(back.begin, back.end))
        scene.history.unsure.add(back.row)  # perhaps before what its window, or another row, needs
    elif chance < 0.85:
        seqs.append(Seq(seqs[0].row, seqs[0].begin, scene.ids(1)))
        wrong = "a row is named twice"
    elif chance < 0.95:
        strange = rng.choice([*scene.history.freed, 0, -1, scene.options.max_num_rows + 1])
        seqs[-1] = Seq(strange, rng.choice((0, 3)), scene.ids(1))
        wrong = f"row {strange} is no request's"
    elif seqs[-1].row not in scene.history.going_on.untracked:
        gap = Seq(seqs[-1].row, seqs[-1].begin + rng.randint(1, 4), scene.ids(1))
        seqs[-1], wrong = gap, "" if gap.row in scene.history.unsure else "tokens before it were never stored"
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
    scene.history.stored(seqs)
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


def by_hand(scene: Scene, batch: StepBatch, pad_to: PadTo | None, *, halves: int = 1) -> Tensor:
    """Run a step call by call."""
    return finish_by_hand(scene, scene.runtime.step(batch, scene.runtime.plan(batch, pad_to, halves=halves)), batch)


def run_graphed(scene: Scene) -> None:
    """StepRunner.run()."""
    padded_step(scene, by_runner, "runner.run")


def by_runner(scene: Scene, batch: StepBatch, pad_to: PadTo | None, *, halves: int = 1) -> Tensor:
    """Run a step by the runner, as a graph where there are some."""
    return scene.runner.run(batch, pad_to, halves=halves)


by_hand_in_halves, by_runner_in_halves = _IN_HALVES = partial(by_hand, halves=2), partial(by_runner, halves=2)


def a_run(scene: Scene) -> Run:
    """A way to run a step."""
    return scene.rng.choice((by_hand, by_runner, *_IN_HALVES))


def tree_over(scene: Scene, row: int) -> tuple[Seq, list[int], list[int]]:
    """Draws a tree of drafts of a row. Returns it, its nodes' parents, and the nodes that are accepted.

    Most nodes follow the one before; the others have any parent. Those of a path are accepted.
    """
    rng, begin = scene.rng, scene.history.length(row)
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


def verify_trees(scene: Scene, trees: Sequence[tuple[Seq, list[int], list[int]]], run: Run) -> None:
    """A step of these trees, at least one, for which there is room."""
    seqs = [seq for seq, _, _ in trees]
    most = max(len(parents) for _, parents, _ in trees)
    mask = TreeMask(scene.ints([parents + [-1] * (most - len(parents)) for _, parents, _ in trees]))
    is_taken = judged_step(scene, run, "a verify step", seqs, scene.batch(seqs, mask=mask))
    if scene.open is None:
        changes = {seq.row: scene.history.changes[seq.row] for seq in seqs}
        scene.verified = Verified(seqs, [path for _, _, path in trees], changes) if is_taken else None


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
        scene.history.cut(seq.row, seq.begin)
        # A node without a page moves nothing: what was there stays.
        has_page = seq.begin + max(far, default=0) < -(-scene.room(seq.row) // scene.page_size) * scene.page_size
        scene.oracle.store(seq.row, seq.begin, kept if has_page else kept + stays)
        scene.history.unsure.add(seq.row)  # the places of what was not accepted count as stored, too


def after_round(scene: Scene, rows: list[int], drafts: Drafts) -> list[Seq]:
    """Sequences that need the room of a round."""
    return [Seq(row, scene.history.length(row), [1] * drafts.tokens) for row in rows]


def round_by_runner(scene: Scene, rows: list[int], drafts: Drafts) -> None:
    """Runs a round of rows that have room for it."""
    seqs, batch = round_of(scene, rows, drafts)
    if scene.rng.random() < 0.2:
        scene.call("a round", lambda: scene.without_drafts.run(batch), wrong="the runner has no draft model")
        return
    halves = scene.rng.choice((1, 1, 2))
    given = scene.call(f"a round of {drafts} by the runner", lambda: scene.runner.run(batch, halves=halves))
    if given is not REFUSED and scene.open is None:
        drafted(scene, drafts, seqs)
        for step in range(drafts.steps):
            width = given.shape[1] // drafts.steps
            compare_draft(scene, seqs, drafts, step, given[:, step * width : (step + 1) * width], draft_parent)


def round_of(scene: Scene, rows: list[int], drafts: Drafts) -> tuple[list[Seq], StepBatch]:
    """The sequences of a round of drafts of rows, and its batch."""
    seqs = [Seq(row, scene.history.length(row), [draft_id(0, 0)]) for row in rows]
    ids = [int(draft_id(0, branch)) for _ in seqs for branch in range(drafts.branches)]
    scene.last = scene.verified = None
    return seqs, draft_batch([seq.row for seq in seqs], [seq.begin for seq in seqs], drafts, ids)


def drafted(scene: Scene, drafts: Drafts, seqs: list[Seq]) -> None:
    """Notes the tokens that a round has stored. Later steps may continue from those of chains."""
    for seq in seqs:
        scene.history.cut(seq.row, seq.begin)
        if drafts.branches == 1:
            entries = [looked_up(draft_id(step, 0), seq.begin + step) for step in range(drafts.steps)]
            scene.oracle.store(seq.row, seq.begin, entries)

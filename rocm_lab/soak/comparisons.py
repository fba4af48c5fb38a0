"""Comparisons of a step's rows with the oracle's."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_lab.soak.draft_forward import draft_id
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq


def compare_rows(scene: Scene, what: str, seqs: Sequence[Seq], rows: Tensor) -> None:
    """The rows that a step returned are those of each sequence's last token."""
    given, at = rows.double().cpu().numpy(), 0
    for number, layer in enumerate(scene.oracle.layers):
        width = layer.shape[0] * layer.shape[1]
        for place, seq in enumerate(seqs):
            if not seq.ids:
                continue
            answer = scene.oracle.answer(layer, seq.row, seq.tokens())
            out = given[place, at : at + width].reshape(answer.out.shape[1:])
            off = np.abs(out - answer.out[-1])
            if answer.known[-1] and not (off <= answer.out_bound[-1]).all():
                raise Finding(f"{what}: layer {number} of row {seq.row} is off by {off.max():.2g}")
            scene.counts["compared"] += 1
        at += width


def compare_draft(
    scene: Scene,
    seqs: Sequence[Seq],
    drafts: Drafts,
    step: int,
    rows: Tensor,
    parent: Callable[[int, int, int], int],
) -> None:
    """A draft step gave what each branch sees: the prefix, its ancestors and itself."""
    if drafts.branches > 1 and any(layer.slopes.any() for layer in scene.oracle.layers):
        return  # ALiBi counts places, and the drafts of other branches lie between those of this one
    if bool((rows[len(seqs) :] != 0).any()):
        raise Finding(f"draft step {step} of {drafts} gives pads something else than 0")
    width, kv = sum(layer.shape[0] * layer.shape[1] for layer in scene.oracle.layers), scene.oracle.kv
    for branch in range(drafts.branches):
        at, ids = branch, list[int]()
        for number in range(step, -1, -1):
            ids.insert(0, draft_id(number, at))
            at = parent(number, at, drafts.branches)
        lines = [Seq(seq.row, seq.begin, ids) for seq in seqs]
        ends = [Seq(seq.row, seq.begin + step, ids[-1:]) for seq in seqs]
        try:
            scene.oracle.kv = {line.row: kv[line.row][: line.begin] + line.stored for line in lines}
            of_branch = rows[: len(seqs), branch * width : (branch + 1) * width]
            compare_rows(scene, f"branch {branch} of draft step {step} of {drafts}", ends, of_branch)
        finally:
            scene.oracle.kv = kv

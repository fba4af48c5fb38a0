"""Converts a problem's scale, soft cap and window, and a step's mask, to arguments of this project's kernels."""

from torch import Tensor

from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.visible_keys import PackedMask, VisibleKeys
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem


def scores_of(problem: Problem) -> Scores:
    """The computation of the problem's scores."""
    return Scores(problem.scale, problem.visibility, problem.logits_soft_cap)


def visible_keys(step: StepTensors, first: Tensor, end: Tensor, *, reads_cells: bool) -> VisibleKeys:
    """The keys that tokens of a step see, with its cells if it has a mask that counts. first, end: of their ranges"""
    if not reads_cells or not step.mask_start.numel():
        return VisibleKeys(first, end)
    return PackedMask(first, end, step.mask_words, step.mask_indptr, step.mask_start)

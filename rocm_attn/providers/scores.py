"""The scores of a problem and the mask of a step in the form that the project's own kernels take."""

from __future__ import annotations

from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem


def scores_of(problem: Problem) -> Scores:
    """The computation of the problem's scores."""
    return Scores(
        scale=problem.scale,
        window_left=problem.window_left,
        soft_cap=problem.logits_soft_cap,
        causal=problem.causal,
    )


def packed_mask(step: StepTensors) -> PackedMask:
    """The mask of a step, packed."""
    return PackedMask(step.mask_words, step.mask_indptr, step.mask_start, step.window_start)

"""The scores of a problem and the mask of a step, as the project's own kernels want them."""

from __future__ import annotations

from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem


def scores_of(problem: Problem) -> Scores:
    """How the problem's scores are made."""
    return Scores(
        scale=problem.scale,
        window_left=problem.window_left,
        soft_cap=problem.logits_soft_cap,
        causal=problem.causal,
    )


def packed_mask(step: StepTensors) -> PackedMask:
    """What the tokens of a masked step see."""
    return PackedMask(step.mask_words, step.mask_indptr, step.mask_start, step.window_start)

"""The scores of a problem in the terms of AITER's functions, and combinations that they do not support.

Every function takes sinks and ALiBi slopes as float32 [q_heads], a soft cap as a number that is 0 for none, and applies
scale, cap, bias and sink in the order of rocm_attn.oracle.reference.
"""

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, Problem

# Dims of queries and keys, and of values, for which flash_attn_varlen_func uses assembly kernels in bfloat16.
_ASSEMBLED_DIMS = ((128, 128), (192, 128))


def window_size(problem: Problem) -> tuple[int, int]:
    """Keys before and after a query's own that it sees, its own not counted; -1: all of them.

    Composable Kernel takes both numbers unchanged. unified_attention uses the first and adds the query's own key.
    """
    return (problem.window_left, -1 if problem.window_left == UNLIMITED_WINDOW else 0)


def refuse_unified(problem: Problem) -> None:
    """Raises LookupError for scores that unified_attention would compute wrong."""
    # Its bias is slope * (key - cached tokens): off by a constant per query, which a sink does not share.
    if problem.has_alibi_slopes and problem.has_sinks:
        raise LookupError("its ALiBi slopes are wrong together with attention sinks")


def refuse_composable(problem: Problem) -> None:
    """Raises LookupError for scores that Composable Kernel has no variant for, or computes wrong."""
    if problem.logits_soft_cap and problem.has_alibi_slopes:
        raise LookupError("it has no variant with both a logits soft cap and ALiBi slopes")
    # A sink is divided by the scale to start the running maximum, which is of capped logits if there is a cap.
    if problem.has_sinks and (problem.logits_soft_cap or problem.has_alibi_slopes):
        raise LookupError("its attention sinks need plain logits, without a soft cap or ALiBi slopes")
    if problem.has_alibi_slopes and not problem.causal:
        raise LookupError("its ALiBi slopes also penalise keys after the query")


def refuse_assembled(problem: Problem) -> None:
    """Raises LookupError for scores that flash_attn_varlen_func's assembly kernels drop.

    The function uses them if it sees no window; it sees no window that is 0 or longer than the longest prompt.
    """
    is_assembled = (problem.head_dim, problem.v_head_dim) in _ASSEMBLED_DIMS and problem.dtype == torch.bfloat16
    if is_assembled and problem.has_sinks:
        raise LookupError("its assembly kernels for bfloat16 at this head_dim ignore attention sinks")
    if is_assembled and problem.window_left == 0:
        raise LookupError("it treats a window of the query's own key alone as no window")

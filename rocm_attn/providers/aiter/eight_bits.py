"""Queries in eight bits, for functions that multiply codes of q with codes of K; and scales in the form of tokens'.

q is rounded with a scale of 1: an element of any size down to 2**-6 keeps three bits after its first one. Elements
above the encoding's largest value saturate; NaN stays in its own row. A scale from the largest element would cost
launches in each layer, and an outlier in one request would cost the others precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.scratch import ScratchTensor


@dataclass(frozen=True, slots=True)
class ScaleOfOne:
    """A float32 1 in the device's memory, for functions that need the address of a scale where there is none."""

    def words(self, shape: PaddedShape) -> int:
        return 1

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        words.view(torch.float32).fill_(1.0)


def query_parts(problem: Problem, num_tokens: int, num_heads: int) -> tuple[ScratchTensor, ScratchTensor]:
    """Room for saturated queries, and for the codes of num_heads heads."""
    return (
        ScratchTensor((num_tokens, problem.num_q_heads, problem.head_dim), problem.dtype),
        ScratchTensor((num_tokens, num_heads, problem.head_dim), problem.page_format.encoding.dtype),
    )


def query_codes(q: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Encodes q [T, heads, dim] in eight bits. parts: of query_parts(); heads that only the codes have are zero"""
    saturated, codes = parts
    largest = torch.finfo(codes.dtype).max
    torch.clamp(q, -largest, largest, out=saturated)
    num_heads = q.shape[1]
    codes[:, :num_heads].copy_(saturated)
    if num_heads < codes.shape[1]:
        codes[:, num_heads:].zero_()
    return codes


def scale_rows(problem: Problem) -> ScratchTensor:
    """Room for the scales of one page's tokens, to show a function the scale of a layer or a head as that of tokens."""
    num_rows = problem.num_kv_heads if problem.kv_scales is Scales.HEAD else 1
    return ScratchTensor((num_rows, problem.page_size), torch.float32)


def scales_of_tokens(scale: Tensor, problem: Problem, rows: Tensor, num_pages: int) -> Tensor:
    """Scales [pages, kv_heads, page_size]: of tokens as they are, others by strides of 0. rows: room of scale_rows()"""
    if problem.kv_scales is Scales.TOKEN:
        return scale
    rows.copy_(scale[:, None])
    return rows.expand(num_pages, problem.num_kv_heads, problem.page_size)

"""Scratch: cuts typed tensors out of the float32 workspace that a kernel is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rocm_attn.problem import Problem

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class ScratchTensor:
    """A tensor to be cut out."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        """float32 words that it takes, in whole aligned blocks."""
        blocks = -(-prod(self.shape) * self.dtype.itemsize // _ALIGNMENT_BYTES)
        return blocks * _ALIGNMENT_BYTES // torch.float32.itemsize


def rows_of_heads(problem: Problem, num_rows: int, num_heads: int) -> tuple[ScratchTensor, ScratchTensor]:
    """Room for rows of q or K, and for rows of V or out, of num_heads heads each."""
    rows = (num_rows, num_heads)
    return (
        ScratchTensor((*rows, problem.head_dim), problem.dtype),
        ScratchTensor((*rows, problem.v_head_dim), problem.dtype),
    )


def num_words(parts: Sequence[ScratchTensor]) -> int:
    """float32 words of workspace that hold all parts."""
    return sum(part.num_words for part in parts)


def cut(workspace: Tensor, parts: Sequence[ScratchTensor]) -> list[Tensor]:
    """The parts, in order, as views of the workspace; their content is undefined."""
    views, first = [], 0
    for part in parts:
        words = workspace[first : first + part.num_words]
        views.append(words.view(part.dtype)[: prod(part.shape)].view(part.shape))
        first += part.num_words
    return views


def whole_rows(rows: Tensor, scratch: Tensor) -> Tensor:
    """rows [T, heads, dim] itself if it is contiguous and has scratch's shape, else a copy in scratch.

    Heads that only scratch has are zero then.
    """
    if rows.is_contiguous() and rows.shape == scratch.shape:
        return rows
    num_heads = rows.shape[1]
    scratch[:, :num_heads].copy_(rows)
    if num_heads < scratch.shape[1]:
        scratch[:, num_heads:].zero_()
    return scratch


def room_for(rows: Tensor, scratch: Tensor) -> Tensor:
    """rows [T, heads, dim] itself if a function can write it whole, else scratch; then see keep_rows."""
    return rows if rows.is_contiguous() and rows.shape == scratch.shape else scratch


def keep_rows(rows: Tensor, written: Tensor) -> None:
    """Copies the heads of rows from written, unless that is rows itself."""
    if written is not rows:
        rows.copy_(written[:, : rows.shape[1]])

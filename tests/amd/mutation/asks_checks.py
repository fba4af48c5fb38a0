"""Checks of the masks of the kernels for rows that ask for more than a plain pick."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_attn.kernels.refs import sampling
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from tests.amd.kernels.asked_cases import asked_rows, finding, shaping
from tests.amd.mutation.memory import Memory, assert_same

VOCAB = 4099  # no block of it is full


def shape_rows(memory: Memory) -> None:
    """Checks rows with counts, with a mask, and with both."""
    logits = torch.randn(3, 2 * VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()[:, :VOCAB]
    *given, shaped = shaping(VOCAB)
    assert_same(memory, launch_shape_rows, sampling.shape_rows, [logits, *given], [shaped])


def cut_rows(memory: Memory) -> None:
    """Checks rows that keep a few tokens, the tokens near the best one, and all tokens."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).mul(4).round()
    assert_same(memory, launch_cut_rows, sampling.cut_rows, [asked_rows()], [logits])


def likeliest(memory: Memory) -> None:
    """Asks for the best token of one row, and for more tokens of another row than have different logits."""
    *given, found = finding(VOCAB)
    assert_same(memory, launch_likeliest, sampling.likeliest, given, [found])


ASKS_CHECKS: dict[str, Callable[[Memory], None]] = {
    "sampling/cut_rows.py": cut_rows,
    "sampling/likeliest.py": likeliest,
    "sampling/shape_rows.py": shape_rows,
}

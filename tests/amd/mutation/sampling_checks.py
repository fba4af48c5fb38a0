"""Checks of the masks of the kernels that shape, cut and pick from logits."""

from __future__ import annotations

from functools import partial

import torch

from rocm_attn.kernels.refs import sampling
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from tests.amd.kernels.parameter_cases import asked_rows, finding, shaping
from tests.amd.mutation.fresh_tensors import garbage
from tests.amd.mutation.memory import Memory, assert_same

VOCAB = 4099  # no block of it is full


def pick_rows(memory: Memory) -> None:
    """Checks rows that end in a block that is not full, one that draws among some of its tokens, and one of zeros."""
    logits = torch.randn(3, 2 * 4099, generator=torch.Generator().manual_seed(2))[:, :4099]
    logits[2] = 0.0
    logits[0, 4098] = 9.0
    terms = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.9, 0.41], [0.0, 0.0, 0.0]])
    kernel, twin = (partial(pick, num_drawing=1) for pick in (launch_pick_rows, sampling.pick_rows))
    outputs = [garbage(3), garbage(6).view(3, 2)]
    assert_same(memory, kernel, twin, [logits, terms], outputs)


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

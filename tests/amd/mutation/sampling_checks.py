"""Checks of the masks of the kernels that shape, cut and pick from logits."""

import torch
from torch import Tensor

from rocm_attn.kernels.refs import sampling
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.parameter_columns import IN_PROMPT
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from tests.amd.mutation.arguments import assert_same
from tests.amd.mutation.memory import Memory, garbage

UNWRITTEN = -0x7F7F7F7F


def asked_rows() -> Tensor:
    """Returns three rows, one with counts, one with a mask and one with both. Two of them keep only a few tokens."""
    requested = torch.tensor([[2, 0, -1], [0, -1, 0], [1, 1, 0]], dtype=torch.int32)
    penalties = torch.tensor([[2.0, 0.5, 0.25], [1.0, 0.0, 0.0], [0.5, -1.0, 1.0]]).view(torch.int32)
    cuts = torch.tensor([[7, 0], [0, 0], [0, 0]], dtype=torch.int32)
    cuts[:, 1] = torch.tensor([-1e30, -1.25, float("-inf")]).view(torch.int32)
    return torch.cat([requested, penalties, cuts], 1)


def requested_counts(vocab: int) -> Tensor:
    """Returns counts of two texts: some tokens are the prompt's, some were generated once or twice."""
    tokens = torch.arange(vocab)
    first = torch.where(tokens % 3 == 0, tokens % 4, 0)
    return torch.stack([first, torch.where(tokens % 5 == 0, IN_PROMPT, tokens % 2)]).int()


def shaping(vocab: int) -> list[Tensor]:
    """Returns the arguments of launch_shape_rows after three rows of logits: dyadic penalties, and room for rows."""
    num_words = -(-vocab // 32)
    masks = torch.arange(1, num_words + 1, dtype=torch.int32).mul_(0x01234567).view(1, num_words)
    return [asked_rows(), requested_counts(vocab), masks, torch.full((3, vocab), float("nan"))]


def finding(vocab: int) -> list[Tensor]:
    """Returns all arguments of launch_likeliest. One token has all of the mass, so that the sum and its logarithm are
    exact.

    The others' logits fall with their ids, and then are equal: the found ones come in the order of a sort.
    """
    tokens = torch.arange(vocab)
    logits = torch.stack([100 - 300.0 * (tokens > 0) - tokens.clamp(max=10), torch.full((vocab,), -64.0)])
    logits[1, vocab - 1] = 128.0
    requested = torch.tensor([[1, 1], [0, 14]], dtype=torch.int32)
    found = torch.full((2, 1 + 2 * 14), UNWRITTEN, dtype=torch.int32)
    return [logits, requested, torch.tensor([vocab - 1, vocab - 2], dtype=torch.int32), found]


VOCAB = 4099  # no block of it is full


def pick_rows(memory: Memory) -> None:
    """Checks rows that end in a block that is not full, one that draws among some of its tokens, and one of zeros."""
    logits = torch.randn(3, 2 * 4099, generator=torch.Generator().manual_seed(2))[:, :4099]
    logits[2] = 0.0
    logits[0, 4098] = 9.0
    terms = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.9, 0.41], [0.0, 0.0, 0.0]])
    picked = garbage(3), garbage(6).view(3, 2)
    assert_same(memory, launch_pick_rows, sampling.pick_rows, logits, terms, *picked, num_drawing=1)


def shape_rows(memory: Memory) -> None:
    """Checks rows with counts, with a mask, and with both."""
    logits = torch.randn(3, 2 * VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()[:, :VOCAB]
    assert_same(memory, launch_shape_rows, sampling.shape_rows, logits, *shaping(VOCAB))


def cut_rows(memory: Memory) -> None:
    """Checks rows that keep a few tokens, the tokens near the best one, and all tokens."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).mul(4).round()
    assert_same(memory, launch_cut_rows, sampling.cut_rows, asked_rows(), logits)


def likeliest(memory: Memory) -> None:
    """Asks for the best token of one row, and for more tokens of another row than have different logits."""
    assert_same(memory, launch_likeliest, sampling.likeliest, *finding(VOCAB))

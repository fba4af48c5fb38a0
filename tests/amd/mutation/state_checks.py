"""Checks of the masks of the kernels of recurrent states."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import states as state_twins
from rocm_attn.kernels.refs.state_places import state_places
from rocm_attn.kernels.states.arguments import (
    BEGINS,
    LEFT_OUT,
    ConvolutionSlots,
    ConvolutionWeights,
    RecurArgs,
    RecurrenceRule,
    RecurrentSlots,
    RecurrentTokens,
    StatePlaces,
)
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from tests.amd.mutation.arguments import assert_same
from tests.amd.mutation.memory import Memory, gapped, ints

_MOST_KEPT, _WIDTH, _SLOTS = 3, 4, 9
# The kernels and their twins add up in other orders.
_NEAR = 0.03


class _Sizes(NamedTuple):
    k_heads: int
    heads: int
    dk: int
    dv: int
    channels: bool


def convolution(memory: Memory) -> None:
    """Checks tiles that are not full, channels that are no whole block, pads and a sequence that is left out."""
    channels = 300
    for pads in (0, 2):
        places = _places([1, 0, 3, 20], pads)
        weights = ConvolutionWeights(torch.randn(channels, _WIDTH), torch.randn(channels), silu=True)
        inputs = ConvolutionSlots(gapped(_SLOTS, _WIDTH - 1 + _MOST_KEPT, channels))
        x, out = (gapped(places.num_tokens, channels) for _ in range(2))
        assert_same(memory, launch_convolve, state_twins.convolve, x, out, weights, inputs, places, near=_NEAR)


def token_steps(memory: Memory) -> None:
    """Checks tokens that are kept and those that are not, and columns and channels that are no whole block."""
    for pads in (0, 2):
        _recurs(memory, _Sizes(1, 2, 12, 70, channels=pads > 0), _places([2, 1, 3, 4], pads), deterministic=True)


def chunks(memory: Memory) -> None:
    """Checks a chunk that is left out, parts of channels and of v, and a chunk that is not full.

    That one lies at the end of the step, and at the last place that a chunk of such a step may have.
    """
    for channels in (True, False):
        _recurs(memory, _Sizes(1, 1, 40, 40, channels), _places([2, 18, 20, 80], 2), deterministic=False)


def places(memory: Memory) -> None:
    """Checks sequences that begin with a tag and without, go on, have no state and have no new token, and a pad."""
    # The last row's number is no sequence's.
    step = StepTensors.of(
        ints([]),
        row_of_seq=ints([1, 4, 2, 3, 5, 3]),
        kv_len=ints([9, 3, 7, 8, 4, 4]),
        q_len=ints([1, 3, 2, 0, 4, 1]),
        counts=ints([5, 0, 0, 0]),
    )
    tags = ints([0, 5, 6, 7, 8, 0]).view(6, 1)
    headers = ints([0] * 48).view(12, 4)
    headers[2], headers[3] = ints([5, 4, 4, 8]), ints([5, 6, 6, 8])
    headers[5], headers[11] = ints([3, 1, 2, 9]), ints([4, 1, 2, 9])
    to = StatePlaces(ints([77] * 6), ints([77] * 6), ints([77] * 6), ints([]), 1, 1)
    assert_same(memory, launch_state_places, state_places, step, tags, headers, to, kept=1)


def _places(q_len: list[int], pads: int) -> StatePlaces:
    """Sequences, of which one begins, one is left out and two have slots.

    The last sequence has tokens at the end of the step, and its slot, all of which it reads, is the last one.
    """
    boundaries = [sum(q_len[:at]) for at in range(len(q_len) + 1)]
    unused = 1 << 20
    source, target = ints([2, BEGINS, LEFT_OUT, _SLOTS - 1]), ints([3, 1, unused, 5])
    pending = ints([2, 0, unused, _MOST_KEPT])
    return StatePlaces(source, target, pending, ints(boundaries), boundaries[-1] + pads, max(q_len))


def _recurs(memory: Memory, sizes: _Sizes, places: StatePlaces, *, deterministic: bool) -> None:
    k_heads, heads, dk, dv, channels = sizes
    of_decay = (heads, dk) if channels else (heads,)

    def tokens(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v or changes, and decay."""
        return _unit(*lead, k_heads, dk), gapped(*lead, heads, dv), gapped(*lead, *of_decay).abs_().neg_()

    num_tokens = places.num_tokens
    slots = RecurrentSlots(gapped(_SLOTS, heads, dk, dv), *tokens(_SLOTS, _MOST_KEPT))
    beta, out = gapped(num_tokens, heads).sigmoid_(), gapped(num_tokens, heads, dv)
    given = RecurrentTokens(_unit(num_tokens, k_heads, dk), *tokens(num_tokens), beta, out)
    rule = RecurrenceRule(corrects=True, scale=0.5, normalises=False)
    # A twin needs no workspace.
    workspace = memory.put(torch.randn(slots.workspace_words(rule, num_tokens, len(places.source))))

    def with_workspace(recur: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: recur(RecurArgs._make((*arguments, workspace)), deterministic=deterministic)

    launch, twin = with_workspace(launch_recur), with_workspace(state_twins.recur)
    assert_same(memory, launch, twin, given, rule, slots, places, near=_NEAR)


def _unit(*shape: int) -> Tensor:
    """Random rows with norms around 1, and NaN between them."""
    return gapped(*shape).mul_(shape[-1] ** -0.5)

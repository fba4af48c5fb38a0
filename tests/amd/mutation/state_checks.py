"""Checks of the masks of the kernels of recurrent states."""

from collections.abc import Callable
from itertools import pairwise
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
    RecurrenceRule,
    RecurrentSlots,
    RecurrentTokens,
    StatePlaces,
)
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from tests.amd.mutation.memory import Memory, assert_same, gapped, ints

_MOST_KEPT, _WIDTH, _SLOTS = 3, 4, 9


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
        places, num_tokens = _places([1, 0, 3, 20], pads)
        weights = [torch.randn(channels, _WIDTH), torch.randn(channels)]
        inputs = [*places, gapped(num_tokens, channels), *weights]
        outputs = [gapped(num_tokens, channels), gapped(_SLOTS, _WIDTH - 1 + _MOST_KEPT, channels)]
        assert_same(memory, _of_convolution(launch_convolve), _of_convolution(state_twins.convolve), inputs, outputs)


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
    # row_of_seq, kv_len, q_len, counts; the last row's number is no sequence's.
    inputs = [ints([1, 4, 2, 3, 5, 3]), ints([9, 3, 7, 8, 4, 4]), ints([1, 3, 2, 0, 4, 1]), ints([5, 0, 0, 0])]
    tags = ints([0, 5, 6, 7, 8, 0]).view(6, 1)
    headers = ints([0] * 48).view(12, 4)
    headers[2], headers[3] = ints([5, 4, 4, 8]), ints([5, 6, 6, 8])
    headers[5], headers[11] = ints([3, 1, 2, 9]), ints([4, 1, 2, 9])
    outputs = [inputs.pop(), headers, *(ints([77] * 6) for _ in range(3))]
    launch, twin = (_of_state_places(each) for each in (launch_state_places, state_places))
    assert_same(memory, launch, twin, [*inputs, tags], outputs)


def _of_state_places(fill: Callable[..., None]) -> Callable[..., None]:
    """Places of states as a function of tensors: those of the step, tags, counts, headers, and the places."""

    def of_tensors(*tensors: Tensor) -> None:
        row_of_seq, kv_len, q_len, tags, counts, headers, source, target, pending = tensors
        step = StepTensors.of(counts[:0], row_of_seq=row_of_seq, kv_len=kv_len, q_len=q_len, counts=counts)
        fill(step, tags, headers, StatePlaces(source, target, pending, counts[:0], 1, 1), kept=1)

    return of_tensors


def _places(q_len: list[int], pads: int) -> tuple[list[Tensor], int]:
    """Sequences, of which one begins, one is left out and two have slots; and the step's tokens.

    The last sequence has tokens at the end of the step, and its slot, all of which it reads, is the last one.
    """
    boundaries = [sum(q_len[:at]) for at in range(len(q_len) + 1)]
    unused = 1 << 20
    source, target = ints([2, BEGINS, LEFT_OUT, _SLOTS - 1]), ints([3, 1, unused, 5])
    return [source, target, ints([2, 0, unused, _MOST_KEPT]), ints(boundaries)], boundaries[-1] + pads


def _recurs(memory: Memory, sizes: _Sizes, step: tuple[list[Tensor], int], *, deterministic: bool) -> None:
    places, num_tokens = step
    k_heads, heads, dk, dv, channels = sizes
    of_decay = (heads, dk) if channels else (heads,)

    def tokens(*lead: int) -> list[Tensor]:
        """k, v or changes, and decay."""
        return [_unit(*lead, k_heads, dk), gapped(*lead, heads, dv), gapped(*lead, *of_decay).abs_().neg_()]

    kept, beta = tokens(_SLOTS, _MOST_KEPT), gapped(num_tokens, heads).sigmoid_()
    words = RecurrentSlots(gapped(_SLOTS, heads, dk, dv), *kept).workspace_words(num_tokens, len(places[0]))
    inputs = [*places, _unit(num_tokens, k_heads, dk), *tokens(num_tokens), beta, torch.randn(words)]
    outputs = [gapped(num_tokens, heads, dv), gapped(_SLOTS, heads, dk, dv), *kept]
    launch, twin = (_of_recurrence(recur, deterministic=deterministic) for recur in (launch_recur, state_twins.recur))
    assert_same(memory, launch, twin, inputs, outputs)


def _unit(*shape: int) -> Tensor:
    """Random rows with norms around 1, and NaN between them."""
    return gapped(*shape).mul_(shape[-1] ** -0.5)


def _of_places(places: tuple[Tensor, ...], num_tokens: int) -> StatePlaces:
    source, target, pending, q_indptr = places
    longest = max(end - first for first, end in pairwise(q_indptr.tolist()))
    return StatePlaces(source, target, pending, q_indptr, num_tokens, longest)


def _round(*results: Tensor) -> None:
    """The kernel and its twin add up in other orders."""
    for each in results:
        each.copy_((each * 16).round())


def _of_convolution(convolve: Callable[..., None]) -> Callable[..., None]:
    """A convolution as a function of tensors: places, x, weight, bias, out, inputs of slots."""

    def of_tensors(*tensors: Tensor) -> None:
        x, weight, bias, out, inputs = tensors[4:]
        places = _of_places(tensors[:4], len(x))
        convolve(x, out, ConvolutionWeights(weight, bias, silu=True), ConvolutionSlots(inputs), places)
        _round(out)

    return of_tensors


def _of_recurrence(recur: Callable[..., None], *, deterministic: bool) -> Callable[..., None]:
    """A recurrence as a function of tensors: places, tokens, workspace, out, state and kept tokens of slots."""

    def of_tensors(*tensors: Tensor) -> None:
        q, k, v, decay, beta, workspace, out, state, *kept = tensors[4:]
        tokens, slots = RecurrentTokens(q, k, v, decay, beta, out), RecurrentSlots(state, *kept)
        form = RecurrenceRule(corrects=True, scale=0.5, normalises=False)
        recur(tokens, form, slots, _of_places(tensors[:4], len(q)), workspace, deterministic=deterministic)
        _round(out, state, slots.change)

    return of_tensors

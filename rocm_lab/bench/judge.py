"""Compares a kernel's output with the float64 reference, within the bounds that all checks share.

The first, middle and last new tokens of every sequence are compared, as many as a fixed number of scores allows. Small
steps are compared whole. No element of the output may be NaN, compared or not: it was NaN before the kernel ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.oracle.numerics import bounds_of, eight_bit_queries, error_parts
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_lab.bench.step_data import StepData

# The most scores of a sequence: query heads times tokens times keys, in float64.
MOST_SCORES = 1 << 24
# The largest scale of codes in random pages, which scores grow with.
_LARGEST_SCALE = 1.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    part:      the largest error, as a fraction of the allowed one; at most 1 is right
    error:     |out - reference| / |reference| over the compared tokens
    max_error: largest |out - reference|
    compared:  the number of tokens
    wrong:     the fault, in a clause; empty if there is none
    """

    part: float
    error: float
    max_error: float
    compared: int
    wrong: str = ""

    @property
    def is_right(self) -> bool:
        """True if the output may be timed."""
        return not self.wrong


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens that are compared.

    begin:  the first of them, among the step's
    wanted: float64 [tokens, q_heads, v_head_dim]
    lse:    float64 [tokens, q_heads]
    """

    begin: int
    seq: int
    wanted: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """The expected output of a step, for the tokens that are compared."""

    data: StepData
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, data: StepData, *, rounds_queries: bool = False) -> ExpectedOutput:
        """Computes the reference. rounds_queries: whether a kernel is given q in the pages' eight bits"""
        q = eight_bit_queries(data.q, data.problem.page_format.encoding.dtype) if rounds_queries else data.q
        return cls(data, tuple(_samples(data, q)))

    def judge(self, out: Tensor, *, rounds_products: bool = False) -> Comparison:
        """Checks a kernel's output, and the step's LSE if there is one. rounds_products: whether it multiplies in eight
        bits
        """
        bounds, lse = bounds_of(self.data.problem.dtype, eight_bit_products=rounds_products), self.data.lse
        if out.shape != self.data.out.shape:
            return _never(f"its output is {list(out.shape)} and must be {list(self.data.out.shape)}")
        part = squares = wanted_squares = largest = 0.0
        worst_seq = compared = 0
        for sample in self.samples:
            right = sample.wanted
            tokens = slice(sample.begin, sample.begin + len(right))
            mine = out[tokens].double()
            here = float(error_parts(mine, right, bounds.out, size=self._size(right)).max())
            if lse is not None:
                here = max(here, float(error_parts(lse[tokens], sample.lse, bounds.lse, size=_LARGEST_SCALE).max()))
            if here > part:
                part, worst_seq = here, sample.seq
            difference = (mine - right).abs()
            squares += float(difference.square().sum())
            wanted_squares += float(right.square().sum())
            largest = max(largest, float(difference.max()))
            compared += len(right)
        error = math.sqrt(squares / wanted_squares) if wanted_squares else math.sqrt(squares)
        wrong = f"sequence {worst_seq} is off by {part:.3g} times the tolerance" if part > 1 else ""
        if bool(out.isnan().any()):
            part, wrong = math.inf, "it left NaN in its output"
        return Comparison(part, error, largest, compared, wrong)

    def _size(self, wanted: Tensor) -> float | Tensor:
        """Returns what replaces a standard deviation of 1 in the bound: one value, or [tokens, q_heads, 1].

        The bounds are for outputs of size 1. Means over many keys are smaller, so a lost page would pass. Elements of
        two bytes are rounded in proportion to the sum, so their bound shrinks with the output of their token and head:
        a first token is a value of V, and a last one a small mean. Elements of four bytes lose as much as float32 sums,
        in proportion to V.
        """
        if self.data.problem.dtype.itemsize > 2:
            return 1.0
        return (2.0 * wanted.square().mean(-1, keepdim=True).sqrt()).clamp(max=1.0)


def failed(error: BaseException) -> Comparison:
    """Returns the verdict for a kernel that raised."""
    text = str(error).strip().splitlines()
    return _never(f"it raised {type(error).__name__}{f': {text[0]}' if text else ''}")


def _never(wrong: str) -> Comparison:
    return Comparison(math.inf, math.inf, math.inf, 0, wrong)


def _samples(data: StepData, q: Tensor) -> Iterator[Sample]:
    problem, first = data.problem, 0
    for seq, (kv_len, q_len) in enumerate(zip(data.batch.kv_len, data.batch.q_len, strict=True)):
        k, v = (side.flatten(0, 1)[:kv_len] for side in data.pages.read(data.pages_of_seq[seq]))
        for begin, end in _blocks(q_len, max(1, MOST_SCORES // (problem.num_q_heads * kv_len))):
            q_rows, place = q[first + begin : first + end], torch.arange(begin, end, device=k.device) + kv_len - q_len
            if problem.causal and not problem.custom_mask:
                keys = kv_len - q_len + end
                out, lse = attend_sequence(q_rows, k[:keys], v[:keys], problem, data.weights)
            else:
                visible = _visible(problem, place, kv_len, data.batch.spans[seq])
                out, lse = attend_sequence(q_rows, k, v, problem, data.weights, visible, place)
            yield Sample(first + begin, seq, out, lse)
        first += q_len


def _visible(problem: Problem, place: Tensor, kv_len: int, spans: Sequence[range]) -> Tensor:
    """Returns bool [len(place), kv_len]: whether a token's window or its image ends after a key."""
    key = torch.arange(kv_len, device=place.device)
    end = (
        torch.full_like(place, kv_len) if problem.window_right == UNLIMITED_WINDOW else place + problem.window_right + 1
    )
    for span in spans if problem.custom_mask else ():
        end = torch.where((span.start <= place) & (place < span.stop), end.clamp(min=span.stop), end)
    return key < end[:, None]


def _blocks(q_len: int, most: int) -> list[tuple[int, int]]:
    """Returns the first, middle and last new tokens of a sequence, `most` each, without overlap; all if few."""
    if q_len <= most:
        return [(0, q_len)]
    found: list[tuple[int, int]] = []
    for begin in (0, (q_len - most) // 2, q_len - most):
        end = begin + most
        begin = max(begin, found[-1][1]) if found else begin
        if begin < end:
            found.append((begin, end))
    return found

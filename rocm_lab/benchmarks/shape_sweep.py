"""Random shapes of attention, the least cost of each, its nearest tuned layout, and the worst of a sweep.

Nothing here needs a GPU.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.work import LayerWork, work_of

KV_HEADS = (1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 10, 12, 16)
GQA_RATIOS = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)
HEAD_DIMS = (16, 24, 32, 40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 144, 160, 192, 224, 256, 320, 384, 512)
PAGE_SIZES = (1, 2, 4, 8, 16, 16, 32, 64, 128)
WINDOWS = (127, 511, 1023, 4095)
MOST_Q_HEADS = 128
# Limits of one layer's K and V, and of its products: a case takes some milliseconds at most.
MOST_BYTES = 400 << 20
MOST_FLOPS = 4e11

# Layouts that tile choices were tuned on.
TUNED_DIMS = (64, 128, 256, 512)
TUNED_RATIOS = (1, 4, 8, 16)
# Decode's rows are keyed by the query heads that share a KV head, and those of 32 and of 64 were tuned too: 128 of them
# compared with 16 would have eight times the queries, results and parts of rows.
TUNED_RATIOS_OF_DECODE = (*TUNED_RATIOS, 32, 64)

# The time of a layer of one key on an H200, two launches in a graph: added to limits, or all small shapes would be far
# from theirs.
LAUNCHES_US = 4.0

# A shape is a cliff if it is this many times further from its limit than its neighbour, or slower than the best peer.
CLIFF = 1.5


class SweepStep(enum.Enum):
    """The work of a step."""

    DECODE = "decode"
    EXTEND = "extend"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class SweepShape:
    """A layer, and a step of it.

    window_left: keys before its own that a token sees; UNLIMITED_WINDOW: all
    kv_len, q_len: of each sequence, new tokens counted in both
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    work: SweepStep
    kv_len: tuple[int, ...]
    q_len: tuple[int, ...]

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def problem(self) -> Problem:
        """The layer, in bfloat16."""
        return Problem(
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            torch.bfloat16,
            self.page_size,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window_left=self.window_left,
        )

    @property
    def batch(self) -> BatchSpec:
        """The step."""
        return BatchSpec.of_lengths((new, kv_len - new) for kv_len, new in _rows(self))

    @property
    def needs(self) -> LayerWork:
        """The bytes and operations that the layer needs at least."""
        return work_of(self.problem, self.batch)

    @property
    def powers(self) -> int:
        """Powers of softmax: one per query head and pair of a token and a key that it sees, for any head dim."""
        return self.needs.flops // (4 * self.head_dim)

    @property
    def is_windowed(self) -> bool:
        """True if tokens do not see all keys before them."""
        return self.window_left != UNLIMITED_WINDOW

    def limit_us(self, *, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns microseconds of the slower one of memory and products, and of the launches."""
        return self.needs.lower_bound_us(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s) + LAUNCHES_US

    def powers_us(self, powers_per_s: float) -> float:
        """Returns microseconds of its powers alone, and of the launches."""
        return self.powers / powers_per_s * 1e6 + LAUNCHES_US

    def neighbour(self) -> SweepShape:
        """Returns the same step of the nearest tuned layout; the shape itself if that is one."""
        ratios = TUNED_RATIOS_OF_DECODE if self.work is SweepStep.DECODE else TUNED_RATIOS
        dim, ratio = nearest(self.head_dim, TUNED_DIMS), nearest(self.gqa_ratio, ratios)
        return replace(self, head_dim=dim, num_q_heads=self.num_kv_heads * ratio)

    def __str__(self) -> str:
        window = f", window {self.window_left + 1}" if self.is_windowed else ""
        new = f"{_span(self.q_len)} new of " if max(self.q_len) > 1 else ""
        heads = f"{self.num_q_heads}/{self.num_kv_heads} x {self.head_dim}, pages of {self.page_size}{window}"
        return f"{self.work.value}, {heads}: {len(self.kv_len)} x {new}{_span(self.kv_len)}"


def nearest(value: int, choices: Iterable[int]) -> int:
    """Returns the choice that the fewest doublings or halvings are away; the larger one of two."""
    return min(choices, key=lambda choice: (abs(math.log2(choice / value)), -choice))


def random_shapes(count: int, seed: int) -> list[SweepShape]:
    """Returns the same shapes for a seed: a larger count only adds shapes."""
    return [_random_shape(random.Random(f"{seed}/{number}")) for number in range(count)]


def _random_shape(chooser: random.Random) -> SweepShape:
    num_kv_heads = chooser.choice(KV_HEADS)
    ratio = chooser.choice([ratio for ratio in GQA_RATIOS if ratio * num_kv_heads <= MOST_Q_HEADS])
    work = chooser.choices(list(SweepStep), weights=(8, 5, 3, 4))[0]
    lengths = _LENGTHS[work](chooser)
    shape = SweepShape(
        num_q_heads=ratio * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=chooser.choice(HEAD_DIMS),
        page_size=chooser.choice(PAGE_SIZES),
        window_left=chooser.choice(WINDOWS) if chooser.random() < 0.25 else UNLIMITED_WINDOW,
        work=work,
        kv_len=tuple(kv_len for kv_len, _ in lengths),
        q_len=tuple(q_len for _, q_len in lengths),
    )
    return _cut_to_size(shape)


def _cut_to_size(shape: SweepShape) -> SweepShape:
    """Takes fewer sequences, then shorter ones, until neither the shape nor its neighbour exceeds the limits."""
    while any(_is_too_large(each) for each in (shape, shape.neighbour())):
        least = 3 if shape.work is SweepStep.MIXED else 1
        if len(shape.kv_len) > least:
            keep = max(least, len(shape.kv_len) // 2)
            # From the end: chunks of a mixed step come last, and one of its decodes stays.
            shape = replace(shape, kv_len=shape.kv_len[-keep:], q_len=shape.q_len[-keep:])
        else:
            halves = [(max(1, kv_len // 2), max(1, q_len // 2)) for kv_len, q_len in _rows(shape)]
            shape = replace(shape, kv_len=tuple(kv for kv, _ in halves), q_len=tuple(q for _, q in halves))
    return shape


def _is_too_large(shape: SweepShape) -> bool:
    pages = sum(-(-kv_len // shape.page_size) for kv_len in shape.kv_len)
    return pages * shape.problem.page_format.page_bytes > MOST_BYTES or shape.needs.flops > MOST_FLOPS


def _rows(shape: SweepShape) -> list[tuple[int, int]]:
    return list(zip(shape.kv_len, shape.q_len, strict=True))


def _decodes(chooser: random.Random) -> list[tuple[int, int]]:
    num_seqs = _between(chooser, 1, 256)
    return [(kv_len, 1) for kv_len in _ragged(chooser, num_seqs, _between(chooser, 256, 32768))]


def _extends(chooser: random.Random) -> list[tuple[int, int]]:
    num_seqs, new, prefix = chooser.randint(1, 8), _between(chooser, 16, 2048), _between(chooser, 1, 16384)
    if chooser.random() < 0.3:
        prefix = 0
    q_len = _ragged(chooser, num_seqs, new)
    before = _ragged(chooser, num_seqs, prefix) if prefix else [0] * num_seqs
    return [(old + q, q) for old, q in zip(before, q_len, strict=True)]


def _verifies(chooser: random.Random) -> list[tuple[int, int]]:
    q_len = chooser.randint(2, 8)
    lengths = _ragged(chooser, _between(chooser, 8, 128), _between(chooser, 256, 8192))
    return [(kv_len + q_len, q_len) for kv_len in lengths]


def _mixed(chooser: random.Random) -> list[tuple[int, int]]:
    decodes = _ragged(chooser, _between(chooser, 8, 96), _between(chooser, 256, 8192))
    chunks = _ragged(chooser, chooser.randint(1, 2), _between(chooser, 128, 1024))
    prefix = chooser.choice((0, 512, 4096))
    return [*((kv_len, 1) for kv_len in decodes), *((prefix + q_len, q_len) for q_len in chunks)]


_LENGTHS = {
    SweepStep.DECODE: _decodes,
    SweepStep.EXTEND: _extends,
    SweepStep.VERIFY: _verifies,
    SweepStep.MIXED: _mixed,
}


def _between(chooser: random.Random, low: int, high: int) -> int:
    """Draws a number with equal probability in each octave."""
    return round(math.exp(chooser.uniform(math.log(low), math.log(high))))


def _ragged(chooser: random.Random, count: int, mean: int) -> list[int]:
    """Returns lengths about a mean: alike, or up to ten times as short and twice as long."""
    spread = chooser.choice((0.0, 0.0, 0.5, 0.9))
    return [max(2, round(mean * (1 + spread * chooser.uniform(-1, 1)))) for _ in range(count)]


def _span(lengths: Sequence[int]) -> str:
    return f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)}..{max(lengths)}"


@dataclass(frozen=True, slots=True)
class SweepTimes:
    """The times of a shape.

    limit_us, neighbour_limit_us:   of bytes or of products, the slower one
    peer_us:                        of the best peer that serves it; 0 if there is none
    powers_us, neighbour_powers_us: of powers alone. Softmax takes one per query head, token and key, for any head dim:
                                    with heads of less than 48 elements they take longer than products, and no kernel
                                    could reach a limit without them
    """

    name: str
    us: float
    limit_us: float
    neighbour: str
    neighbour_us: float
    neighbour_limit_us: float
    peer: str = ""
    peer_us: float = 0.0
    powers_us: float = 0.0
    neighbour_powers_us: float = 0.0

    @property
    def x_limit(self) -> float:
        """Its time relative to that of bytes, products or powers, the slowest of them."""
        return self.us / max(self.limit_us, self.powers_us)

    @property
    def neighbour_x_limit(self) -> float:
        """The same for its neighbour."""
        return self.neighbour_us / max(self.neighbour_limit_us, self.neighbour_powers_us)

    @property
    def x_neighbour(self) -> float:
        """Its distance from its limit relative to its neighbour's."""
        return self.x_limit / self.neighbour_x_limit

    @property
    def without_powers(self) -> SweepTimes:
        """The same by bytes and products alone."""
        return replace(self, powers_us=0.0, neighbour_powers_us=0.0)

    @property
    def x_peer(self) -> float:
        """Its time relative to the best peer's; 0 without one."""
        return self.us / self.peer_us if self.peer_us else 0.0

    @property
    def is_cliff(self) -> bool:
        """True if it is too far from its neighbour, or from the best peer."""
        return max(self.x_neighbour, self.x_peer) > CLIFF


def timed_of(result: Mapping[str, Any]) -> list[SweepTimes]:
    """Returns the rows of the result file of random_shapes.py."""
    names = {field.name for field in fields(SweepTimes)}
    return [
        SweepTimes(**{name: value for name, value in row.items() if name in names}) for row in result["rows"].values()
    ]


def worst(rows: Iterable[SweepTimes], count: int) -> list[SweepTimes]:
    """Returns the rows that are furthest from their neighbour or from the best peer, worst first."""
    return sorted(rows, key=lambda row: (-max(row.x_neighbour, row.x_peer), row.name))[:count]

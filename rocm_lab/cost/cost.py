"""Predicts the time of one layer of decode on an MI300X or an MI355X: a range, and its middle.

    max(bytes / HBM, iterations * (own + latencies * L), units) + (2 + merge) L + launches

own, latencies (in series, of an iteration of the hot loop) and units are static figures of the compiled kernel
(static_figures.json): of the Triton kernel that would serve the layer, decode for CDNA or paged decode. merge counts
latencies too: its words, and each step that adds up parts of a row (kernels/attention/cuts.py, merge_shape). No AMD GPU
was at hand: the rest is published, or assumed if nothing is published.

HBM        bandwidth of streams of reads. MI300X 3.9 TB/s (ROCm/rocm-systems#2934) to 4.2 (ROCm/legacy-rocm-build#5070).
           MI355X 5 TB/s by AITER's decode in assembly, 80 to 85 % of a stream (ROCm/aiter#5190): 6 at most.
L          a load's latency while HBM is busy: assumed, 1.0 to 2.5 us. AITER's decode in Triton has 2.2 TB/s of fp8 on
           an MI355X (ROCm/aiter#5190), which by its static figures is about 2 us.
launches   3 to 8 us for the two kernels of a layer in a graph: assumed.

published.py compares other published speeds of decode with these predictions for the same kernel.

The model leaves out uneven work, clocks under load, and DRAM's pages, because nothing is known of them. `rocm-attn
cycles` counts the clocks of extend, whose time the matrix units bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.kernels.attention.cuts import merge_shape
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, KVEncoding, PoolKind, Problem
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import BoundKernel
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonDecode
from rocm_attn.providers.triton_cdna import CdnaDecode
from rocm_lab.bench.batch_spec import BatchSpec, Group
from rocm_lab.cost.static_figures import LoopFigures, StaticFigures


@dataclass(frozen=True, slots=True)
class Range:
    """A prediction: the least, the middle and the most."""

    low: float
    middle: float
    high: float

    @classmethod
    def between(cls, low: float, high: float) -> Range:
        """A range with the geometric mean of low and high as its middle."""
        return cls(low, math.sqrt(low * high), high)

    def per(self, amount: float) -> Range:
        """amount divided by each value, lowest first: work divided by times gives speeds."""
        return Range(amount / self.high, amount / self.middle, amount / self.low)

    def holds(self, value: float) -> bool:
        """True if the value is neither below the least nor above the most."""
        return self.low <= value <= self.high

    def text(self, unit: float, digits: int = 0) -> str:
        """The range in a unit: the middle, then the bounds."""
        low, middle, high = (f"{number / unit:.{digits}f}" for number in (self.low, self.middle, self.high))
        return f"{middle} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet, and figures that are published for it.

    clock: in Hz
    hbm:   bytes per second of streams of reads, least and most
    """

    name: str
    clock: float
    hbm: tuple[float, float]


GPUS = {
    "gfx942": Gpu("MI300X", 2.1e9, (3.9e12, 4.2e12)),
    "gfx950": Gpu("MI355X", 2.4e9, (5e12, 6e12)),
}
FIGURES = StaticFigures.read()
# Seconds; see above.
LATENCY = (1.0e-6, 2.5e-6)
LAUNCHES = (3e-6, 8e-6)
# A row starts with a page number and then its first keys.
_START_LATENCIES = 2
_CLOCKS_PER_CYCLE = 4


SHAPES = BatchSpec.parse("1d8k+1d64k+64d4k+256d2k").groups


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one layer at a shape.

    kernel:  the kernel that would serve it
    seconds: time of its kernels, replayed as a graph
    speed:   bytes of K and V per second
    """

    shape: Group
    kernel: str
    seconds: Range
    speed: Range

    def line(self) -> str:
        """The prediction as one line of text."""
        return f"{self.shape}: {self.seconds.text(1e-6)} us, {self.speed.text(1e9)} GB/s, {self.kernel}"

    def as_json(self) -> dict[str, Any]:
        """The prediction for --json."""
        numbers = {"seconds": self.seconds, "bytes_per_s": self.speed}
        return {
            "shape": str(self.shape),
            "kernel": self.kernel,
            **{name: [found.low, found.middle, found.high] for name, found in numbers.items()},
        }


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The parts of a decode's time that follow from machine code and shape.

    loaded: bytes of K and V
    own:    seconds of a program's iterations, if loads took no time
    waits:  latencies that these iterations wait for, one after another
    busy:   seconds of the busiest unit
    ends:   latencies of a row's start and of the merge
    """

    kernel: str
    tiles: DecodeTiles
    loaded: int
    own: float
    waits: float
    busy: float
    ends: int

    def seconds(self, hbm: float, latency: float, launches: float) -> float:
        """The time of a layer. hbm: bytes per second; latency, launches: seconds"""
        return max(self.loaded / hbm, self.own + self.waits * latency, self.busy) + self.ends * latency + launches

    def predicted(self, shape: Group, arch: str) -> Prediction:
        """The prediction with the constants that are published and assumed."""
        slow, fast = GPUS[arch].hbm
        least = self.seconds(fast, LATENCY[0], LAUNCHES[0])
        took = Range.between(least, self.seconds(slow, LATENCY[1], LAUNCHES[1]))
        return Prediction(shape, self.kernel, took, took.per(self.loaded))


def predictions(problem: Problem, target: Target, *, deterministic: bool = False) -> Iterator[Prediction]:
    """Predictions for the project's Triton kernels at each of SHAPES; none if there are no static figures."""
    for shape in SHAPES:
        found = predicted(problem, target, shape, deterministic=deterministic)
        if found is not None:
            yield found


def predicted(problem: Problem, target: Target, shape: Group, *, deterministic: bool = False) -> Prediction | None:
    """Predicts the Triton kernel that would serve a layer, with the target's Triton.

    None if there are no static figures for it, as in deterministic mode and for tiles that were measured.
    """
    work = work_of(problem, target, shape, deterministic=deterministic)
    return None if work is None else work.predicted(shape, target.arch)


def work_of(problem: Problem, target: Target, shape: Group, *, deterministic: bool = False) -> DecodeWork | None:
    """The work of the Triton kernel that would serve a decode; None if there are no static figures for it."""
    if (
        shape.new > 1
        or target.arch not in GPUS
        or problem.head_dim != problem.v_head_dim
        or problem.dtype.itemsize != 2
    ):
        return None
    is_plain = problem.kv_encoding is KVEncoding.LIKE_Q and problem.pool is PoolKind.SPLIT
    if not is_plain or not isinstance(problem.indexer, AllKeys):
        return None
    loop = _loop_of(_serving(problem, target, shape, deterministic), problem, target.arch)
    return None if loop is None else decode_work(problem, target, shape, loop)


# The cost of clusters takes thousands of predictions.
@lru_cache(maxsize=4096)
def _serving(problem: Problem, target: Target, shape: Group, deterministic: bool) -> BoundKernel | None:
    """The kernel of a decode's layer; None if there is none."""
    try:
        selection = select(problem, target, "triton", deterministic=deterministic)
    except Unsupported:
        return None
    bound = selection.kernel(StepKind.DECODE).bound
    padded = PaddedShape(StepKind.DECODE, shape.num_seqs, shape.num_seqs)
    return bound.of_shape(padded) if isinstance(bound, KernelByTokens) else bound


class Loop(NamedTuple):
    """A decode loop: the kernel's name, its tiles, and its figures."""

    kernel: str
    tiles: DecodeTiles
    figures: LoopFigures


def _loop_of(kernel: BoundKernel | None, problem: Problem, arch: str) -> Loop | None:
    """The figures of a kernel's tiles: for this kind of layer, else for the plain one; None if they have none."""
    if not isinstance(kernel, CdnaDecode | TritonDecode):
        return None
    kind = "cap" if problem.logits_soft_cap else "plain" if problem.window_left == UNLIMITED_WINDOW else "window"
    of_kind = {
        each.kind: each
        for each in FIGURES.decodes
        if (each.arch, each.head_dim, each.tiles) == (arch, problem.head_dim, kernel.tiles)
    }
    found = of_kind.get(kind, of_kind.get("plain"))
    if found is None:
        return None
    return Loop(found.kernel, found.tiles, found.figures)


def decode_work(problem: Problem, target: Target, shape: Group, loop: Loop) -> DecodeWork:
    """The work of a kernel whose programs share out all keys."""
    clock, units = GPUS[target.arch].clock, target.compute_units
    keys, tiles, figures = seen_keys(problem, shape.kv_len), loop.tiles, loop.figures
    blocks = shape.num_seqs * tiles.rows_per_seq(problem.num_kv_heads) * -(-keys // tiles.key_block)
    # Programs that a CU has no room for run after the others.
    of_program = -(-blocks // (units * tiles.programs_per_cu))
    iterations = of_program * tiles.programs_per_cu / figures.programs
    merge = _merge_latencies(problem, units, shape.num_seqs, -(-keys // tiles.key_block), tiles)
    return DecodeWork(
        kernel=loop.kernel,
        tiles=tiles,
        loaded=shape.num_seqs * keys * problem.num_kv_heads * 2 * problem.head_dim * problem.dtype.itemsize,
        own=iterations * _CLOCKS_PER_CYCLE * figures.own / clock,
        waits=iterations * figures.latencies,
        busy=shape.num_seqs * keys * problem.num_kv_heads * figures.units / units / clock,
        ends=_START_LATENCIES + merge,
    )


def _merge_latencies(problem: Problem, units: int, num_seqs: int, blocks: int, tiles: DecodeTiles) -> int:
    """The number of dependent loads in the merge. blocks: key blocks of a row; all rows are alike."""
    programs = units * tiles.programs_per_cu
    rows = num_seqs * tiles.rows_per_seq(problem.num_kv_heads)
    share = -(-rows * (blocks + tiles.row_cost + tiles.row_end) // programs)
    # Few rows begin at the start of a program.
    parts = -(-blocks // share) + 1
    shape = merge_shape(rows, programs, tiles.q_rows(problem.gqa_ratio), problem.v_head_dim)
    return 1 + -(-parts // shape.parts)


def seen_keys(problem: Problem, kv_len: int) -> int:
    """Keys that the last of kv_len tokens sees."""
    return kv_len if problem.window_left == UNLIMITED_WINDOW else min(kv_len, problem.window_left + 1)

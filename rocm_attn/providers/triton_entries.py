"""Shared code of the triton provider's entries, for kernels over any kind of pages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import Sequences
from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.cache.page_format import SCALES_BESIDE_ROWS
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.problem import KVEncoding, Problem
from rocm_attn.providers.contract import Bind, BoundKernel, Fault, KernelEntry, Limits, StepBounds
from rocm_attn.providers.cut_kernels import Maskable, MaskableExtend
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.schedules import RangeSchedule, Schedules
from rocm_attn.providers.scores import visible_keys
from rocm_attn.providers.shared_prefix import bind_shared, limits_of_shared_prefix
from rocm_attn.providers.triton_later import triton_launches

ARCHS = ("gfx942", "gfx950", "sm_*", "interpreter")
# The limits of kernels over K and V pages; those over other pages change some.
LIMITS = Limits(
    archs=ARCHS,
    dtypes=limits.DTYPES,
    head_dim=(1, limits.MAX_HEAD_DIM),
    v_head_dim=(1, limits.MAX_HEAD_DIM),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_GQA_RATIO,
    window=True,
    soft_cap=True,
    sinks=True,
    alibi=True,
    non_causal=True,
    page_strides=True,
    short_kv=True,
    encodings=tuple(KVEncoding),
    scales=SCALES_BESIDE_ROWS,
)

# tl.dot of Triton 3.6 to 3.9's interpreter, which keeps bfloat16 in NumPy's uint16.
INTERPRETED_BFLOAT16 = Fault(
    "Triton's interpreter multiplies the bits of bfloat16 as whole numbers",
    lambda problem, _: problem.dtype == torch.bfloat16,
    archs=("interpreter",),
)


@dataclass(frozen=True, slots=True)
class Ranged:
    """A kernel that attends over a range of keys of each token, less those that a mask's cells hide.

    visibility: of the problem
    """

    kernel: Maskable
    visibility: Visibility

    @property
    def schedule(self) -> Schedules:
        return Schedules((self.kernel.schedule, RangeSchedule(self.visibility)))

    def describe(self) -> str:
        return f"{self.kernel.describe()} by ranges"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.kernel.workspace_words(shape)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        own, words = self.schedule.split(bounds.shape, args.schedule)
        first, end = RangeSchedule(self.visibility).parts(words, bounds.shape)
        reads_cells = self.visibility.masked and self.kernel.reads_cells
        self.kernel.attend_by(args._replace(schedule=own), visible_keys(step, first, end, reads_cells=reads_cells))


def with_and_without_cells(problem: Problem, ranges: MaskableExtend[Any], masked: MaskableExtend[Any]) -> BoundKernel:
    """Gives sequences without cells of a mask to ranges, and the others to masked. A layer with chunks has no cells."""
    without = replace(ranges, cut=replace(ranges.cut, sequences=Sequences.WITHOUT_CELLS))
    if problem.chunk:
        return Ranged(without, problem.visibility)
    with_cells = replace(masked, cut=replace(masked.cut, sequences=Sequences.WITH_CELLS))
    return TritonMixed(Ranged(with_cells, problem.visibility), Ranged(without, problem.visibility))


def triton_entry(name: str, kind: StepKind, limits: Limits, bind: Bind, *needs: Need, **more: Any) -> KernelEntry:
    """The entry of a kernel that any context may capture, and that masks unused rows of V. more: other fields"""
    return KernelEntry(
        f"triton.{name}", kind, limits, bind, needs=frozenset(needs), faults=(INTERPRETED_BFLOAT16,), **more
    )


deterministic_entry = partial(triton_entry, batch_invariant=True)


_EVERY_LAYERS = (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)


def range_entries(
    name: str, bind: Bind, limits: Limits, kinds: Iterable[StepKind] = _EVERY_LAYERS, **more: Any
) -> Iterator[KernelEntry]:
    """Entries for layers with ranges of keys alone. kinds: of step, without another those that every layer needs"""
    for kind in kinds:
        yield triton_entry(name, kind, of_ranges_alone(limits), bind, **more)


def of_ranges_alone(limits: Limits) -> Limits:
    """Limits of kernels that serve layers with chunks, or with windows of later keys, and no other layers."""
    return replace(limits, ranges=True, others=False)


def shared_entry(name: str, limits: Limits, extend: Bind, decode: Bind) -> KernelEntry:
    """The entry of steps whose sequences share prefixes. extend, decode: bind the kernels that it is composed of"""
    bind = bind_shared(extend, decode, triton_ops)
    return triton_entry(name, StepKind.SHARED, limits_of_shared_prefix(limits), bind, Need.PREFIXES)


def triton_ops() -> StepOps:
    """The operations of a step, loaded at the first use."""
    return triton_launches.OPS

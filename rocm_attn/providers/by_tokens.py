"""Variants of a layer's kernel with other tiles; a step's padded shape selects one, by its likely query lengths.

Tiles of few rows waste less if sequences have few new tokens, and read K and V as fast as decode does. The choice is
part of a graph, so it depends on the padded shape alone: a step with a longer sequence is served correctly but slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, RangedSchedule, Schedule, StepBounds


def likely_q_len(shape: PaddedShape) -> int:
    """Likely new tokens of a sequence, estimated from a shape.

    This is the mean, rounded up, if all sequences may have the same number. If some have one token and one has all
    others, or if a group of sequences counts as one, it is the most that the longest sequence may have.
    """
    is_alike = shape.kind in (StepKind.EXTEND, StepKind.PREFILL, StepKind.MASKED, StepKind.VERIFY)
    return -(-shape.num_tokens // shape.num_seqs) if is_alike else shape.num_tokens


# More tokens than any step has.
ANY_TOKENS = (1 << 31) - 1


class ServedSteps(NamedTuple):
    """The steps that a kernel serves, by their shape.

    max_q_len:  likely new tokens of a sequence, at most
    min_seqs:   padded sequences, at least: fewer would have too few rows for the GPU
    max_tokens: new tokens of all, at most: more would have rows enough for larger tiles
    """

    max_q_len: int
    min_seqs: int = 1
    max_tokens: int = ANY_TOKENS

    def hold(self, shape: PaddedShape) -> bool:
        """True if the steps include this shape."""
        has_size = shape.num_seqs >= self.min_seqs and shape.num_tokens <= self.max_tokens
        return has_size and likely_q_len(shape) <= self.max_q_len


class SizedSchedule(NamedTuple):
    """The schedule of some steps."""

    steps: ServedSteps
    schedule: Schedule


class SizedKernel(NamedTuple):
    """The kernel of some steps."""

    steps: ServedSteps
    kernel: BoundKernel

    def most(self, shape: PaddedShape) -> PaddedShape:
        """A shape within this one that is no smaller than any shape that the kernel serves."""
        most = min(self.steps.max_q_len * shape.num_seqs, self.steps.max_tokens)
        return replace(shape, num_tokens=min(shape.num_tokens, most))


@dataclass(frozen=True, slots=True)
class SchedulesByTokens:
    """The schedules of the kernels of a KernelByTokens."""

    short: tuple[SizedSchedule, ...]
    other: Schedule

    def words(self, shape: PaddedShape) -> int:
        """The words of the schedule that needs most. A larger shape, which buffers are made for, needs no fewer."""
        return max(schedule.words(shape) for schedule in (*(sized.schedule for sized in self.short), self.other))

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        self.of_shape(bounds.shape).build(queries, step, bounds, words)

    def build_ranges(self, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        schedule = self.of_shape(bounds.shape)
        if isinstance(schedule, RangedSchedule):
            schedule.build_ranges(step, bounds, words)

    def of_shape(self, shape: PaddedShape) -> Schedule:
        """The schedule of steps of this shape."""
        return next((sized.schedule for sized in self.short if sized.steps.hold(shape)), self.other)


@dataclass(frozen=True, slots=True)
class KernelByTokens:
    """The first kernel of short whose steps hold a step's shape, else the other one.

    short: in order of preference
    """

    short: tuple[SizedKernel, ...]
    other: BoundKernel

    @classmethod
    def before(cls, short: Sequence[SizedKernel], kernel: BoundKernel) -> KernelByTokens:
        """These kernels for their steps, else the kernel, which may itself be one by tokens."""
        longer, other = (kernel.short, kernel.other) if isinstance(kernel, KernelByTokens) else ((), kernel)
        # All steps with up to this many new tokens of a sequence are served: nothing else bounds them.
        served = max((steps.max_q_len for steps, _ in short if steps == ServedSteps(steps.max_q_len)), default=0)
        return cls((*short, *(sized for sized in longer if sized.steps.max_q_len > served)), other)

    @property
    def schedule(self) -> SchedulesByTokens:
        short = tuple(SizedSchedule(sized.steps, sized.kernel.schedule) for sized in self.short)
        return SchedulesByTokens(short, self.other.schedule)

    def describe(self) -> str:
        short = "".join(f"{_said(sized.steps)} {sized.kernel.describe()}, " for sized in self.short)
        return f"{short}else {self.other.describe()}"

    def workspace_words(self, shape: PaddedShape) -> int:
        """The words of the kernel that needs most, each at its largest steps; see `SchedulesByTokens.words`."""
        short = (sized.kernel.workspace_words(sized.most(shape)) for sized in self.short)
        return max((*short, self.other.workspace_words(shape)))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.of_shape(bounds.shape).attend(args, step, bounds)

    def of_shape(self, shape: PaddedShape) -> BoundKernel:
        """The kernel that serves steps of this shape."""
        return next((sized.kernel for sized in self.short if sized.steps.hold(shape)), self.other)


def serving(bound: BoundKernel, shape: PaddedShape) -> BoundKernel:
    """The kernel that serves steps of a shape."""
    return bound.of_shape(shape) if isinstance(bound, KernelByTokens) else bound


def _said(steps: ServedSteps) -> str:
    """Steps in words."""
    of_seqs = f" of {steps.min_seqs} sequences or more" if steps.min_seqs > 1 else ""
    of_all = f", {steps.max_tokens} of all" if steps.max_tokens < ANY_TOKENS else ""
    return f"up to {steps.max_q_len} new tokens{of_seqs}{of_all}"

"""make_plan: values in, a frozen plan with its graph key out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.metadata.step_tensors import Pads
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.providers.contract import BoundKernel, LayerKernel, StepBounds
from rocm_attn.step.prepared import works_by_launches

# Plans of steps that no graph replays, of which the latest are kept, and with them views and prepared calls: chunks of
# prompts come in few sizes at a time, but in ever other ones.
MOST_RAGGED = 16
# Shortest length bucket: below it one graph serves all lengths, and a decode step costs the same anyway.
SMALLEST_KV_BUCKET = 64

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a capture freezes; two steps may share a graph only if their keys are equal.

    shape:      step kind, padded sequences and tokens, and into how many children they are split
    max_q_len:  bound on new tokens of a sequence
    max_kv_len: length bucket; the table's width for kernels that bake no length
    kernels:    per kind of layer, the kernel with its tiles
    """

    shape: PaddedShape
    max_q_len: int
    max_kv_len: int
    kernels: tuple[BoundKernel, ...]

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernels in words."""
        return tuple(kernel.describe() for kernel in self.kernels)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """How a step runs. Compared by identity; its key says whether two plans mean the same launches.

    key:             identifies the launches
    kernels:         per kind of layer
    bounds:          what the host knows of the step, or of each half of a split one
    pads:            what padded sequences hold
    replayable:      whether the step may run as a graph
    schedule_of_kind: per kind of layer, the first kind whose kernel builds the same schedule
    num_halves, draft_steps: of the shape; each step looks at them
    prepared_of_kind: per kind of layer, whether calls of its kernel may be made again by their launches (prepared.py)
    """

    key: GraphKey
    kernels: tuple[LayerKernel, ...]
    bounds: StepBounds
    pads: Pads
    replayable: bool
    schedule_of_kind: tuple[int, ...]
    prepared_of_kind: tuple[bool, ...]
    num_halves: int = field(init=False)
    draft_steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_halves", self.shape.num_halves)
        object.__setattr__(self, "draft_steps", self.shape.drafts.steps)

    @property
    def shape(self) -> PaddedShape:
        return self.key.shape


def kv_len_bucket(max_kv_len: int, limit: int) -> int:
    """The bucket of a longest length: a power of two from SMALLEST_KV_BUCKET up, at most limit."""
    return min(limit, max(SMALLEST_KV_BUCKET, next_power_of_2(max_kv_len)))


def q_len_bucket(max_q_len: int) -> int:
    """The bucket of a largest number of new tokens: a power of two."""
    return next_power_of_2(max_q_len)


def keep_latest(values: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep a value as the latest one of MOST_RAGGED; what was kept longest ago is forgotten."""
    values.pop(key, None)
    while len(values) >= MOST_RAGGED:
        del values[next(iter(values))]
    values[key] = value


def make_plan(
    shape: PaddedShape,
    kernels: Sequence[LayerKernel],
    *,
    max_q_len: int,
    max_kv_len: int,
    may_capture: bool,
) -> StepPlan:
    """The plan of a step.

    kernels:         per kind of layer, for the shape's kind of step
    max_q_len:       bound on new tokens of a sequence, at least 1; a bucket where a kernel bakes it
    max_kv_len:      length bucket where a kernel bakes it, else what a row of the table can hold
    may_capture:     whether the shape lies within the captured sizes
    """
    key = GraphKey(
        shape=shape,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        kernels=tuple(kernel.bound for kernel in kernels),
    )
    schedules = [kernel.bound.schedule for kernel in kernels]
    return StepPlan(
        key=key,
        kernels=tuple(kernels),
        bounds=StepBounds(shape.child, max_q_len, max_kv_len),
        pads=Pads(max(kernel.row.min_kv_len for kernel in kernels), shape.pad_q_len),
        replayable=may_capture and all(kernel.row.graph_safe for kernel in kernels),
        schedule_of_kind=tuple(schedules.index(schedule) for schedule in schedules),
        prepared_of_kind=tuple(works_by_launches(kernel.bound, "attend", shape.child) for kernel in kernels),
    )

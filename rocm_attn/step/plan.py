"""StepPlan: how a step runs (padded shape, kernels, lengths baked in), and the key of its graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.metadata.step_tensors import Pads
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.providers.contract import NO_SCHEDULE, BoundKernel, LayerKernel, StepBounds
from rocm_attn.step.prepared import works_by_launches

# The number of latest plans that are kept for steps that no graph replays, and with them views and prepared calls:
# chunks of prompts have few sizes at a time, but the sizes keep changing.
MOST_RAGGED = 16
# Shortest length bucket. Below it one graph serves all lengths, at the same cost of a decode step.
SMALLEST_KV_BUCKET = 64

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a capture bakes in: two steps may share a graph only if their keys are equal.

    shape:      step kind, padded sequences and tokens, and the number of parts
    max_q_len:  bound on the new tokens of a sequence
    max_kv_len: KV length bucket; for kernels that bake in no length, the tokens of a whole table row
    kernels:    per kind of layer, the kernel with its tiles
    """

    shape: PaddedShape
    max_q_len: int
    max_kv_len: int
    kernels: tuple[BoundKernel, ...]

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(kernel.describe() for kernel in self.kernels)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """How a step runs. Plans are compared by identity; two plans with equal keys make the same launches.

    key:             identifies the launches
    shape:           the key's shape, from which num_halves and draft_steps follow
    kernels:         the kernel of each kind of layer
    bounds:          the host's bounds on lengths in the step, or in each half of a split one
    pads:            the values of padded sequences
    replayable:      True if the step may run as a graph
    schedule_of_kind: per kind of layer, the first kind whose kernel builds the same schedule
    built_kinds:     the kinds whose schedules are built
    builds_by_launches: True if these are built by kernel launches alone
    prepared_of_kind: per kind of layer, True if calls of its kernel may be repeated by their launches (prepared.py)
    """

    key: GraphKey
    shape: PaddedShape
    num_halves: int
    draft_steps: int
    kernels: tuple[LayerKernel, ...]
    bounds: StepBounds
    pads: Pads
    replayable: bool
    schedule_of_kind: tuple[int, ...]
    built_kinds: tuple[int, ...]
    builds_by_launches: bool
    prepared_of_kind: tuple[bool, ...]


def kv_len_bucket(max_kv_len: int, limit: int) -> int:
    """The bucket of a step's longest KV length: a power of two from SMALLEST_KV_BUCKET up, at most limit."""
    return min(limit, max(SMALLEST_KV_BUCKET, next_power_of_2(max_kv_len)))


def keep_latest(values: dict[Key, Value], key: Key, value: Value) -> None:
    """Keeps a value as the latest one of MOST_RAGGED; the oldest one is dropped."""
    values.pop(key, None)
    while len(values) >= MOST_RAGGED:
        del values[next(iter(values))]
    values[key] = value


def make_plan(
    shape: PaddedShape, kernels: Sequence[LayerKernel], *, max_q_len: int, max_kv_len: int, may_capture: bool
) -> StepPlan:
    """The plan of a step.

    kernels:     per kind of layer, for the shape's kind of step
    max_q_len:   bound on new tokens of a sequence, at least 1; a bucket if a kernel bakes it in
    max_kv_len:  length bucket if a kernel bakes it in, else the tokens that a row of the table can hold
    may_capture: True if the shape lies within the captured sizes
    """
    child, bound = shape.child, tuple(kernel.bound for kernel in kernels)
    schedules = [each.schedule for each in bound]
    schedule_of_kind = tuple(schedules.index(schedule) for schedule in schedules)
    return StepPlan(
        key=GraphKey(shape, max_q_len, max_kv_len, bound),
        shape=shape,
        num_halves=shape.num_halves,
        draft_steps=shape.drafts.steps,
        kernels=tuple(kernels),
        bounds=StepBounds(child, max_q_len, max_kv_len),
        pads=Pads(max(kernel.entry.min_kv_len for kernel in kernels), shape.pad_q_len),
        replayable=may_capture and all(kernel.entry.graph_safe for kernel in kernels),
        schedule_of_kind=schedule_of_kind,
        built_kinds=tuple(kind for kind in sorted(set(schedule_of_kind)) if schedules[kind] is not NO_SCHEDULE),
        builds_by_launches=all(works_by_launches(schedule, "build", child) for schedule in schedules),
        prepared_of_kind=tuple(works_by_launches(each, "attend", child) for each in bound),
    )

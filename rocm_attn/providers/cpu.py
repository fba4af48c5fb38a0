"""The cpu provider: fast kernels for CPUs, beside the torch provider's, which are written to be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.cpu import attention, store
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import (
    NO_SCHEDULE,
    Baked,
    Bind,
    KernelEntry,
    Limits,
    PoolSize,
    Provider,
    Schedule,
    StepBounds,
    StepOps,
)
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.torch_ref import TORCH

# The fused attention of torch has neither a cap nor rows of V that are shorter than those of K.
_LIMITS = Limits(
    archs=("cpu", "interpreter"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dim=(1, 4096),
    v_head_dim=(1, 4096),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=4096,
    window=True,
    soft_cap=False,
    sinks=True,
    dims_alike=True,
    alibi=True,
    non_causal=True,
    short_kv=True,
)


@dataclass(frozen=True, slots=True)
class _CpuKernel:
    """Base of the kernels for CPUs. Their memory is torch's own."""

    problem: Problem
    scores: Scores = field(init=False, repr=False)
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", scores_of(self.problem))

    def workspace_words(self, shape: PaddedShape) -> int:
        """0: it needs no workspace."""
        return 0


@dataclass(frozen=True, slots=True)
class CpuDecode(_CpuKernel):
    """One new token in each sequence."""

    def describe(self) -> str:
        return f"cpu.decode({self.problem})"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_decode(args, scores=self.scores)


@dataclass(frozen=True, slots=True)
class CpuExtend(_CpuKernel):
    """Any number of new tokens in each sequence, one included."""

    def describe(self) -> str:
        return f"cpu.extend({self.problem})"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_extend(args, scores=self.scores)


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> CpuDecode:
    return CpuDecode(problem)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize) -> CpuExtend:
    return CpuExtend(problem)


def _entry(name: str, kind: StepKind, bind: Bind) -> KernelEntry:
    return KernelEntry(
        provider="cpu",
        name=name,
        kind=kind,
        limits=_LIMITS,
        min_kv_len=0,
        masks_v=True,
        graph_safe=True,
        batch_invariant=False,
        needs=frozenset(),
        bakes=frozenset[Baked](),
        needs_host_lengths=False,
        bind=bind,
    )


def _ops() -> StepOps:
    return replace(TORCH.ops(), store_kv=store.store_kv, rope_store=store.rope_store, rope_queries=store.rope_queries)


CPU = Provider(
    name="cpu",
    entries=(
        _entry("cpu.decode", StepKind.DECODE, _bind_decode),
        _entry("cpu.extend", StepKind.EXTEND, _bind_extend),
        _entry("cpu.extend", StepKind.MIXED, _bind_extend),
    ),
    ops=_ops,
)

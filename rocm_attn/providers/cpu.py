"""The cpu provider: fast kernels for CPUs. Those of the torch provider are written to be read instead."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.scores import Scores, Visibility
from rocm_attn.kernels.cpu import attention, store
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import Limits, PoolSize, Provider, StepBounds
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.torch_ref import TORCH, TorchKernel, torch_entry

# The fused attention of torch has neither a cap nor rows of V that are shorter than those of K.
_LIMITS = Limits(
    archs=("cpu", "interpreter"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dim=(1, 4096),
    v_head_dim=(1, 4096),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=4096,
    window=True,
    sinks=True,
    dims_alike=True,
    non_causal=True,
    ranges=True,
    short_kv=True,
)


@dataclass(frozen=True, slots=True)
class KeysOfDecode:
    """The keys of a decode step's sequences, found once for all layers.

    max_kv_len: of the pool
    """

    page_size: int
    visibility: Visibility
    max_kv_len: int

    def words(self, shape: PaddedShape) -> int:
        return attention.decode_words(shape.num_seqs, self.max_kv_len)

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        width = step.block_table.shape[1]
        attention.find_keys(queries, words, page_size=self.page_size, table_width=width, visibility=self.visibility)


@dataclass(frozen=True, slots=True)
class CpuDecode:
    """One new token in each sequence."""

    problem: Problem
    schedule: KeysOfDecode
    scores: Scores

    def describe(self) -> str:
        return f"cpu.decode({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_decode(args, step.block_table, scores=self.scores)


class CpuExtend(TorchKernel):
    """Any number of new tokens in each sequence, one included."""

    name = "cpu.extend"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_extend(args, scores=self.scores)


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> CpuDecode:
    keys = KeysOfDecode(problem.page_size, problem.visibility, pool.max_kv_len)
    return CpuDecode(problem, keys, scores_of(problem))


def _ops() -> StepOps:
    return replace(TORCH.ops(), store_kv=store.store_kv, rope_store=store.rope_store, rope_queries=store.rope_queries)


CPU = Provider(
    name="cpu",
    entries=(
        torch_entry("cpu.decode", StepKind.DECODE, _bind_decode, needs=[Need.BLOCK_TABLE], limits=_LIMITS),
        torch_entry("cpu.extend", StepKind.EXTEND, CpuExtend.bind, limits=_LIMITS),
        torch_entry("cpu.extend", StepKind.MIXED, CpuExtend.bind, limits=_LIMITS),
    ),
    ops=_ops,
)

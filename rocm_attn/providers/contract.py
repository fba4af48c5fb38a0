"""What a provider declares and what a kernel is given. A kernel sees no pool object, no batch and no graph."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.padding import PaddedShape, StepKind
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.table_view import TableView
from rocm_attn.target import Target


class Need(enum.Enum):
    """Forms of the step's metadata that a kernel reads besides lengths, q_indptr and the table itself."""

    PAGE_LIST = "CSR page list with page_indptr and last_page_len"
    BLOCK_TABLE = "dense block table, one row for each sequence"
    KV_LEN_INT64 = "int64 KV lengths"
    MASK_INDPTR = "int64 first mask cell of each sequence, for masks of [q_len, kv_len] cells"


class Baked(enum.Enum):
    """Host values that a kernel freezes when it is captured; they become part of the graph's key."""

    MAX_KV_LEN = "longest KV length, rounded up to a bucket"
    MAX_Q_LEN = "most new tokens of a sequence, rounded up to a bucket"


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step on the device, at padded sizes; S padded sequences, T padded tokens. Tensors are int32 unless said.

    shape:        the padded shape
    max_q_len:    bound on new tokens of a sequence
    max_kv_len:   bound on kv_len; the table is at least this wide
    counts:       [4]    num_seqs, num_tokens, step number, error word
    kv_len:       [S]    tokens, new ones included; pads hold the plan's pad_kv_len
    q_len:        [S]    new tokens
    q_indptr:     [S+1]  sequence -> first token
    table:        request rows -> pages
    page_indptr:  [S+1]  sequence -> first entry of page_list     (these six: empty unless a kernel needs them)
    page_list:    [L]    pages, sequence after sequence, then page 0
    last_page_len:[S]    tokens in the last page, 1 where kv_len is 0
    block_table:  [S, W] pages of each sequence, then page 0
    kv_len_int64: [S]    int64
    mask_indptr:  [S+1]  int64, sequence -> first cell of its mask
    """

    shape: PaddedShape
    max_q_len: int
    max_kv_len: int
    counts: Tensor
    kv_len: Tensor
    q_len: Tensor
    q_indptr: Tensor
    table: TableView
    page_indptr: Tensor
    page_list: Tensor
    last_page_len: Tensor
    block_table: Tensor
    kv_len_int64: Tensor
    mask_indptr: Tensor


@dataclass(frozen=True, slots=True)
class AttendArgs:
    """One layer's attention.

    step:             the step's metadata
    schedule:         int32 words that this kernel's build_schedule filled for this step
    workspace:        float32 words, at least workspace_words(shape); content is undefined
    q, out:           [T, q_heads, head_dim | v_head_dim]; padded tokens of out receive zeros
    k_pages, v_pages: [pages, page_size, kv_heads, head_dim | v_head_dim]
    lse:              float32 [T, q_heads], natural log, -inf where a token sees no key; None when nobody asked
    """

    step: StepMetadata
    schedule: Tensor
    workspace: Tensor
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    out: Tensor
    lse: Tensor | None


class BoundKernel(Protocol):
    """A kernel for one problem on one target: its tiles are chosen, its limits were checked."""

    def describe(self) -> str:
        """Name and tiles; equal descriptions mean equal launches."""
        ...

    def schedule_words(self, shape: PaddedShape) -> int:
        """int32 words of the schedule of a step of this shape."""
        ...

    def schedule_key(self) -> Hashable:
        """Kernels with equal keys build equal schedules of a step, so that one build serves them all."""
        ...

    def workspace_words(self, shape: PaddedShape) -> int:
        """float32 words of workspace of a step of this shape."""
        ...

    def build_schedule(self, step: StepMetadata, schedule: Tensor) -> None:
        """Fill the schedule on the device, once a step."""
        ...

    def attend(self, args: AttendArgs) -> None:
        """Run one layer's attention."""
        ...


# Chooses tiles for a problem on a target; raises LookupError with a sentence when the tuning table has no row.
Bind = Callable[[Problem, Target], BoundKernel]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a kernel serves. Ranges include both ends.

    archs: exact names, or prefixes that end with "*"
    """

    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dim: tuple[int, int]
    v_head_dim: tuple[int, int]
    page_size: tuple[int, int]
    max_gqa_ratio: int
    window: bool
    soft_cap: bool
    sinks: bool

    def refusals(self, problem: Problem, target: Target) -> tuple[str, ...]:
        """Every limit that the problem breaks, one clause each; empty when the kernel serves it."""
        reasons = []
        if not any(_arch_matches(target.arch, pattern) for pattern in self.archs):
            reasons.append(f"arch {target.arch} is not one of {', '.join(self.archs)}")
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {_name(problem.dtype)} is not one of {', '.join(map(_name, self.dtypes))}")
        for field in ("head_dim", "v_head_dim", "page_size"):
            value, (low, high) = getattr(problem, field), getattr(self, field)
            if not low <= value <= high:
                reasons.append(f"{field} {value} is outside {low}..{high}")
        if problem.gqa_ratio > self.max_gqa_ratio:
            reasons.append(f"{problem.gqa_ratio} query heads share a KV head, at most {self.max_gqa_ratio} may")
        if problem.window_left != UNLIMITED_WINDOW and not self.window:
            reasons.append(f"no sliding window (window_left {problem.window_left})")
        if problem.logits_soft_cap and not self.soft_cap:
            reasons.append(f"no logits soft cap ({problem.logits_soft_cap:g})")
        if problem.has_sinks and not self.sinks:
            reasons.append("no attention sinks")
        return tuple(reasons)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One row of the capability table.

    kind:               the steps it serves
    min_kv_len:         shortest KV length it may meet; padded sequences get this length
    masks_v:            whether it leaves V rows beyond the length unread (0 * NaN is NaN)
    graph_safe:         whether it may be captured
    batch_invariant:    whether a sequence's result is bitwise the same in any batch
    needs, bakes:       see Need and Baked
    needs_host_lengths: whether it must know the lengths on the host
    bind:               see Bind
    """

    provider: str
    name: str
    kind: StepKind
    limits: Limits
    min_kv_len: int
    masks_v: bool
    graph_safe: bool
    batch_invariant: bool
    needs: frozenset[Need]
    bakes: frozenset[Baked]
    needs_host_lengths: bool
    bind: Bind


@dataclass(frozen=True, slots=True)
class StepOps:
    """The launches around attention, by the signatures of rocm_attn.kernels.metadata and .cache.

    fill: (IndexTensors, page_size=...), everything that a step derives from its inputs, in one launch
    """

    publish: Callable[..., None]
    device_inputs: Callable[..., None]
    table_update: Callable[..., None]
    fill: Callable[..., None]
    store_kv: Callable[..., None]


@dataclass(frozen=True, slots=True)
class PrewarmJob:
    """Something that a provider compiles outside of Triton, which running a step would do in the middle of a request.

    name:    what is compiled, in words
    compile: compiles it, unless it is there; says whether it had to. Raises Unsupported where it cannot.
    """

    name: str
    compile: Callable[[], bool]


def nothing_to_prewarm(problem: Problem, target: Target, kernels: Sequence[KernelRow]) -> tuple[PrewarmJob, ...]:
    """Of a provider whose kernels are all compiled by Triton, when they are launched."""
    return ()


@dataclass(frozen=True, slots=True)
class Provider:
    """A set of kernels.

    rows:    in order of preference within a step kind
    ops:     loads the metadata and cache launches that go with the kernels
    prewarm: what the rows that were chosen for a problem on a target need compiled ahead, besides Triton's kernels
    """

    name: str
    rows: tuple[KernelRow, ...]
    ops: Callable[[], StepOps]
    prewarm: Callable[[Problem, Target, Sequence[KernelRow]], tuple[PrewarmJob, ...]] = nothing_to_prewarm


def _arch_matches(arch: str, pattern: str) -> bool:
    return arch.startswith(pattern[:-1]) if pattern.endswith("*") else arch == pattern


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

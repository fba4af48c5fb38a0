"""The interface of kernel providers: how they declare kernels and their limits, and the arguments of a kernel.

A kernel gets tensors and numbers; it sees no pool object, no batch and no graph.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows, Queries
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.machine.aiter_marks import NO_MARK, Mark
from rocm_attn.machine.releases import EVERY_RELEASE, Release, ReleaseRange
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem
from rocm_attn.providers.launches import StepOps


class Baked(enum.Enum):
    """Host values that a kernel freezes when it is captured; they become part of the graph's key."""

    MAX_KV_LEN = "longest KV length, rounded up to a bucket"
    MAX_Q_LEN = "most new tokens of a sequence, rounded up to a bucket"


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The host's knowledge of a step, or of one half of a split one.

    shape:      the padded shape
    max_q_len:  bound on new tokens of a sequence
    max_kv_len: bound on kv_len; the table is at least this wide
    """

    shape: PaddedShape
    max_q_len: int
    max_kv_len: int

    def queries(self, step: StepTensors) -> Queries:
        """The sequences of the step."""
        return Queries(
            step.row_of_seq, step.kv_len, step.q_indptr, self.shape.num_tokens, self.max_q_len, self.max_kv_len
        )


class Schedule(Protocol):
    """Data that a kernel computes on the device once per step, before its layers.

    A value: equal schedules build equal words, so one build serves every kind of layer that has the same schedule.
    """

    def words(self, shape: PaddedShape) -> int:
        """int32 words that a step of this shape needs, or one with fewer sequences or tokens: see workspace_words."""

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        """Fills the words. queries: the sequences that attend; step, bounds: the step that they belong to"""


@runtime_checkable
class RangedSchedule(Schedule, Protocol):
    """A schedule with ranges of keys, or with parts that may have some."""

    def build_ranges(self, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        """Fills the words that follow from the windows of a mask's cells, after build() and the mask; no others."""


@dataclass(frozen=True, slots=True)
class NoSchedule:
    """The schedule of a kernel that needs none."""

    def words(self, shape: PaddedShape) -> int:
        """0: it needs no words."""
        return 0

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        """Does nothing, since there are no words."""


NO_SCHEDULE = NoSchedule()


class BoundKernel(Protocol):
    """A kernel for one problem on one target: its tiles are chosen, its limits were checked.

    A frozen value: equal kernels make the same launches for equal steps, and the kernels are part of a graph's key.
    """

    @property
    def schedule(self) -> Schedule:
        """The schedule that is built before its layers run; NO_SCHEDULE if it needs none."""

    def describe(self) -> str:
        """Name and tiles as text."""

    def workspace_words(self, shape: PaddedShape) -> int:
        """float32 words of workspace that a step of this shape needs, or one with fewer sequences or tokens.

        Graphs of all sizes share memory that is made for the largest one.
        """

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        """Runs one layer's attention; padded tokens of out receive zeros if the row says so.

        args:         with the words of its schedule, and workspace_words(shape) or more
        step, bounds: the step in the layer's space, for values that a kernel reads in addition to its arguments
        """


@runtime_checkable
class StoringKernel(BoundKernel, Protocol):
    """A kernel that can also store the step's new K and V itself, which saves a launch.

    Its row clears pads and masks V, so neither needs another launch.
    """

    def store_and_attend(self, args: AttendArgs, new: NewRows, step: StepTensors, bounds: StepBounds) -> None:
        """Stores the new rows and attends. The results are bitwise those of a store followed by attend()."""


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """Requirements of a pool's owner on the kernels that read it.

    page_strides: True if pages may have any strides but the last, as when K and V are packed into one tensor
    even_slots:   True if such pages have slots at equal distances (layer_pages.has_even_slots)
    keeps_tails:  True if the slots of a page after a sequence's last token must not change: drafts may be there
    short_kv:     True if a sequence of a layer that is not causal may have fewer tokens in its KV than new ones
    unaligned_rows: True if K and V, and their rows, may begin anywhere (LayerPages.has_aligned_sides, has_aligned_rows)
    """

    page_strides: bool = False
    keeps_tails: bool = False
    short_kv: bool = False
    unaligned_rows: bool = False
    even_slots: bool = False


OWN_POOL = PoolTerms()


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The facts about a pool that are known before it is allocated or adopted.

    num_pages:    pages, page 0 included
    max_kv_len:   tokens of the longest sequence
    max_num_seqs: sequences of a decode step
    terms:        requirements of its owner on kernels
    """

    num_pages: int
    max_kv_len: int
    max_num_seqs: int
    terms: PoolTerms = OWN_POOL


# Used if no pool is known; no limit on a pool's size refuses it.
SMALLEST_POOL = PoolSize(num_pages=2, max_kv_len=1, max_num_seqs=1)


def side_bytes(problem: Problem, pool: PoolSize) -> int:
    """Bytes of one layer's K pages or of its V pages, whichever is larger."""
    form = problem.page_format
    page_elements = max(form.line, form.page_size * problem.num_kv_heads * problem.v_head_dim)
    return pool.num_pages * page_elements * form.encoding.dtype.itemsize


# Chooses tiles for a problem on a target; raises LookupError with a sentence when the tuning table has no row.
Bind = Callable[[Problem, Target, PoolSize], BoundKernel]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a kernel. Ranges include both ends; an empty tuple of exact values leaves the range alone.

    archs:         exact names, or prefixes that end with "*"
    exact_dims:    the only pairs of head_dim and v_head_dim
    page_sizes:    the only page sizes
    pools:         the kinds of pool it reads
    encodings:     the encodings of K and V that it reads
    scales:        what may share a scale of eight-bit K and V
    dims_alike:    True if head_dim and v_head_dim must be equal
    dim_step:      head dims are multiples of this
    coded_dim_step: head dims with eight-bit K and V are multiples of this
    coded_page_sizes: the only page sizes with them
    most_coded_dim: the largest head dim with them; 0: no other than without them
    lse:           True if it returns the log-sum-exp
    lse_of_slopes: True if it also returns that of layers with ALiBi slopes
    max_side_bytes: of one layer's K pages, and of its V pages; 0: no limit
    page_strides:  True if it reads pages of any strides but the last
    even_slots:    True if it reads pages whose slots lie at equal distances; if neither, pages must be contiguous
    short_kv:      True if a sequence of a layer that is not causal may have fewer tokens in its KV than new ones
    ranges:        True if it serves layers with chunks, or windows with later keys: it reads ranges of keys
    others:        False if it serves no other layers
    least_window:  the fewest keys of a window that it serves
    aligned_sides: True if it reads only K and V that begin at multiples of 16 bytes (LayerPages.has_aligned_sides)
    least_gqa_ratio: the fewest query heads that share a KV head
    aligned_rows:  True if it reads only rows of K and V that begin at multiples of 16 elements
                   (LayerPages.has_aligned_rows)
    tritons:       the only releases of Triton that it may run with; an unknown release is not one of them
    row_tokens:    tokens that a row stands for
    """

    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dim: tuple[int, int]
    v_head_dim: tuple[int, int]
    page_size: tuple[int, int]
    max_gqa_ratio: int
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    exact_dims: tuple[tuple[int, int], ...] = ()
    page_sizes: tuple[int, ...] = ()
    pools: tuple[PoolKind, ...] = (PoolKind.SPLIT,)
    encodings: tuple[KVEncoding, ...] = (KVEncoding.LIKE_Q,)
    scales: tuple[Scales, ...] = (Scales.NONE,)
    dims_alike: bool = False
    dim_step: int = 1
    coded_dim_step: int = 1
    coded_page_sizes: tuple[int, ...] = ()
    most_coded_dim: int = 0
    lse: bool = True
    lse_of_slopes: bool = True
    max_side_bytes: int = 0
    alibi: bool = False
    non_causal: bool = False
    page_strides: bool = False
    even_slots: bool = False
    short_kv: bool = False
    ranges: bool = False
    others: bool = True
    least_window: int = 0
    aligned_sides: bool = False
    least_gqa_ratio: int = 1
    aligned_rows: bool = False
    tritons: tuple[Release, ...] = ()
    row_tokens: tuple[int, int] = (1, 1)

    def refusals(self, problem: Problem, target: Target, pool: PoolSize = SMALLEST_POOL) -> tuple[str, ...]:
        """Every limit that the problem breaks, one clause each; empty if the kernel serves it.

        On another arch, in a pool of another kind, or with rows of more or fewer tokens, no other limit is checked.
        """
        if not any(arch_matches(target.arch, pattern) for pattern in self.archs):
            return (f"arch {target.arch} is not one of {', '.join(self.archs)}",)
        if problem.pool not in self.pools:
            return (f"it reads {_either(kind.value for kind in self.pools)}, not {problem.pool.value}",)
        least, most = self.row_tokens
        if not least <= problem.row.tokens <= most:
            return (f"it reads rows of {'several tokens' if least > 1 else 'one token'}, not of {problem.row.tokens}",)
        reasons = []
        if self.tritons and target.releases.triton not in self.tritons:
            reasons.append(f"it needs Triton {_either(self.tritons)}, and {target.releases.triton} is installed")
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {dtype_name(problem.dtype)} is not one of {', '.join(map(dtype_name, self.dtypes))}")
        reasons += self._encoding_refusals(problem)
        for field in self._ranges():
            value, (low, high) = getattr(problem, field), getattr(self, field)
            if not low <= value <= high:
                reasons.append(f"{field} {value} is outside {low}..{high}")
        reasons += self._exact_refusals(problem)
        if problem.gqa_ratio > self.max_gqa_ratio:
            reasons.append(f"{problem.gqa_ratio} query heads share a KV head; at most {self.max_gqa_ratio} may")
        if problem.gqa_ratio < self.least_gqa_ratio:
            reasons.append(f"{problem.gqa_ratio} query heads share a KV head; at least {self.least_gqa_ratio} must")
        if problem.window_left != UNLIMITED_WINDOW and not self.window:
            reasons.append(f"it has no sliding window (window_left {problem.window_left})")
        if problem.chunk and not self.ranges:
            reasons.append(f"it has no chunks of keys ({problem.chunk})")
        if problem.visibility.two_sided and not self.ranges:
            sides = f"window_left {problem.window_left}, window_right {problem.window_right}"
            reasons.append(f"it has no window with later keys ({sides})")
        if not problem.visibility.by_ranges and not self.others:
            reasons.append("it serves layers with chunks, or with windows of later keys, alone")
        if UNLIMITED_WINDOW != problem.window_left < self.least_window - 1:
            reasons.append(f"a window of {problem.window_left + 1} keys is shorter than its least, {self.least_window}")
        if problem.logits_soft_cap and not self.soft_cap:
            reasons.append(f"it has no logits soft cap ({problem.logits_soft_cap:g})")
        if problem.has_sinks and not self.sinks:
            reasons.append("it has no attention sinks")
        if problem.has_alibi_slopes and not self.alibi:
            reasons.append("it has no ALiBi slopes")
        if not problem.causal and not self.non_causal:
            reasons.append("it is causal only")
        if problem.wants_lse and not self.gives_lse(problem):
            reasons.append("it returns no log-sum-exp" + " for layers with ALiBi slopes" * self.lse)
        num_bytes = side_bytes(problem, pool)
        if self.max_side_bytes and num_bytes > self.max_side_bytes:
            reasons.append(f"K or V of a layer takes {num_bytes} bytes, and its offsets reach {self.max_side_bytes}")
        if pool.terms.page_strides and not (self.page_strides or (self.even_slots and pool.terms.even_slots)):
            needs = "pages whose slots lie at equal distances" if self.even_slots else "contiguous pages"
            reasons.append(f"it needs {needs}, and these may have other strides")
        if self.aligned_sides and pool.terms.unaligned_rows:
            reasons.append("it needs K and V at multiples of 16 bytes, and these may begin anywhere")
        if self.aligned_rows and pool.terms.unaligned_rows:
            reasons.append("it needs rows at multiples of 16 elements, and these may begin anywhere")
        if pool.terms.short_kv and problem.window_right > 0:
            reasons.append("sequences may have more new tokens than keys, and a window's later keys need a place")
        if pool.terms.short_kv and not problem.causal and not self.short_kv:
            reasons.append("it cannot serve sequences with more new tokens than keys")
        return tuple(reasons)

    def gives_lse(self, problem: Problem) -> bool:
        """True if it returns the log-sum-exp of a layer that it serves."""
        return self.lse and (self.lse_of_slopes or not problem.has_alibi_slopes)

    def _ranges(self) -> Iterator[str]:
        """The fields with a range that applies, because no exact values are given."""
        if not self.exact_dims:
            yield from ("head_dim", "v_head_dim")
        if not self.page_sizes:
            yield "page_size"

    def _encoding_refusals(self, problem: Problem) -> list[str]:
        if problem.kv_encoding not in self.encodings:
            allowed = _either(encoding.value for encoding in self.encodings)
            return [f"it reads K and V {allowed}, not {problem.kv_encoding.value}"]
        if problem.kv_scales not in self.scales:
            allowed = _either(scales.value for scales in self.scales)
            return [f"it reads {allowed}, not {problem.kv_scales.value}"]
        if problem.kv_encoding is KVEncoding.LIKE_Q:
            return []
        reasons = []
        dims = (problem.head_dim, problem.v_head_dim)
        found = f"head_dim/v_head_dim {dims[0]}/{dims[1]} of eight-bit pages are"
        if any(dim % self.coded_dim_step for dim in dims):
            reasons.append(f"{found} not multiples of {self.coded_dim_step}")
        if 0 < self.most_coded_dim < max(dims):
            reasons.append(f"{found} larger than {self.most_coded_dim}")
        if self.coded_page_sizes and problem.page_size not in self.coded_page_sizes:
            allowed = _either(self.coded_page_sizes)
            reasons.append(f"it reads eight-bit pages of {allowed} tokens, not {problem.page_size}")
        return reasons

    def _exact_refusals(self, problem: Problem) -> list[str]:
        reasons = []
        dims = (problem.head_dim, problem.v_head_dim)
        if self.exact_dims and dims not in self.exact_dims:
            allowed = _either(f"{qk}/{v}" for qk, v in self.exact_dims)
            reasons.append(f"head_dim/v_head_dim {dims[0]}/{dims[1]} is not {allowed}")
        if self.dims_alike and dims[0] != dims[1]:
            reasons.append(f"head_dim and v_head_dim must be equal, and are {dims[0]} and {dims[1]}")
        if any(dim % self.dim_step for dim in dims):
            reasons.append(f"head_dim/v_head_dim {dims[0]}/{dims[1]} are not multiples of {self.dim_step}")
        if self.page_sizes and problem.page_size not in self.page_sizes:
            reasons.append(f"page_size {problem.page_size} is not {_either(self.page_sizes)}")
        return reasons


@dataclass(frozen=True, slots=True)
class Fault:
    """A wrong result of a kernel, or a failure, in some releases, within its limits.

    what:        the clause that refuses, without the releases
    hits:        True for a problem and a pool that are affected
    archs:       exact names
    aiter, rocm: the releases that have it; an unknown release may be any of them
    mark:        of the fix, which tells whether a build between releases has it; none if there is no such mark
    only_with:   the switch of AITER's that makes the kernel wrong; "": it is wrong without one
    not_with:    the switch that avoids the kernel; "": there is none
    """

    what: str
    hits: Callable[[Problem, PoolSize], bool]
    archs: tuple[str, ...]
    aiter: ReleaseRange = EVERY_RELEASE
    rocm: ReleaseRange = EVERY_RELEASE
    mark: Mark = NO_MARK
    only_with: str = ""
    not_with: str = ""

    def refusal(self, problem: Problem, target: Target, pool: PoolSize) -> str:
        """The clause that refuses a problem on a target, with the releases; empty if it is not affected."""
        here = target.releases
        if target.arch not in self.archs or here.aiter not in self.aiter or here.rocm not in self.rocm:
            return ""
        is_fixed = self.mark in here.marks and here.aiter.bounds()[0] != here.aiter
        if is_fixed or here.is_on(self.not_with) or (self.only_with and not here.is_on(self.only_with)):
            return ""
        where = self.releases(f"; here {here.aiter}", f"; here {here.rocm}")
        return f"{self.what} ({where})" * self.hits(problem, pool)

    def releases(self, aiter_here: str = "", rocm_here: str = "") -> str:
        """The releases that have it, in words. aiter_here, rocm_here: follow those of each"""
        spans = (("AITER", self.aiter, aiter_here), ("ROCm", self.rocm, rocm_here))
        named = [f"{name} {span}{here}" for name, span, here in spans if span != EVERY_RELEASE]
        return ", ".join(named) or "every release"


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far a kernel reads past a sequence's last page; it meets page 0 there.

    list_entries: entries past the end of page_list
    table_tokens: a row of block_table is read in tiles of this number of tokens, the last one whole
    """

    list_entries: int = 0
    table_tokens: int = 1


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel's entry in the capability table; the defaults are those of most of the project's own kernels.

    name:               its provider's, a dot, and its own
    kind:               the steps it serves
    bind:               see Bind
    min_kv_len:         shortest KV length that it supports; padded sequences get this length
    masks_v:            True if it does not read V rows beyond the length (0 * NaN is NaN); if it does, the store zeroes
                        the slots after a sequence in its last page
    graph_safe:         True if it may be captured
    batch_invariant:    True if a sequence's result is bitwise the same in any batch
    needs, bakes:       see Need and Baked
    needs_host_lengths: True if it must know the lengths on the host
    clears_pads:        True if padded tokens of out receive zeros and those of lse -inf; if not, a launch after it
                        writes them
    reads_ahead:        see ReadAhead
    not_bound:          for a kernel that is known but not bound: its description; it is always refused
    faults:             its faults in some releases
    notes:              its oddities, and why it serves all the same, a sentence each
    rounds_products:    True if it rounds q in a way of its own, or the weights of values, to eight bits
    rounds_queries:     True if it is given q in the pages' eight bits, with a scale of 1
    is_probed:          True if it runs a layer's shape against the reference before it serves (selection/probe.py)
    """

    name: str
    kind: StepKind
    limits: Limits
    bind: Bind
    min_kv_len: int = 0
    masks_v: bool = True
    graph_safe: bool = True
    batch_invariant: bool = False
    needs: frozenset[Need] = frozenset()
    bakes: frozenset[Baked] = frozenset()
    needs_host_lengths: bool = False
    clears_pads: bool = True
    reads_ahead: ReadAhead = ReadAhead()
    not_bound: str = ""
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    rounds_products: bool = False
    rounds_queries: bool = False
    is_probed: bool = False

    @property
    def provider(self) -> str:
        """The name of its provider."""
        return self.name.partition(".")[0]

    def needs_zeroed_tails(self, problem: Problem) -> bool:
        """True if the store must zero the slots after a sequence in its last page; a page of one token has none."""
        return not self.masks_v and problem.page_size > 1

    def refusals(self, problem: Problem, target: Target, pool: PoolSize = SMALLEST_POOL) -> tuple[str, ...]:
        """Why it does not serve a problem, one clause each; empty if it does."""
        refused = self.limits.refusals(problem, target, pool)
        if self.not_bound:
            return refused[:1] or (f"not bound: {self.not_bound}",)
        if pool.terms.keeps_tails and self.needs_zeroed_tails(problem):
            refused += ("the tail of a sequence's last page must be zeroed for it, and these pages are left unchanged",)
        met = (fault.refusal(problem, target, pool) for fault in self.faults)
        return refused or tuple(filter(None, met))


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """The kernel of one kind of layer for one kind of step."""

    entry: KernelEntry
    bound: BoundKernel


@dataclass(frozen=True, slots=True)
class Provider:
    """A set of kernels.

    entries: in order of preference within a step kind
    ops:     loads the metadata and cache launches that go with the kernels
    """

    name: str
    entries: tuple[KernelEntry, ...]
    ops: Callable[[], StepOps]


def _either(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))


def arch_matches(arch: str, pattern: str) -> bool:
    """True if an arch matches a pattern: an exact name, or a prefix that ends with \"*\"."""
    return arch.startswith(pattern[:-1]) if pattern.endswith("*") else arch == pattern


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as users write it."""
    return str(dtype).removeprefix("torch.")

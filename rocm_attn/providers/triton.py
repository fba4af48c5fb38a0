"""The triton provider: binds the project's kernels. Reads the request table itself, so it needs no CSR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.cache.page_format import SCALES_BESIDE_ROWS
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.kernels.tuning.decode_tiles import alone_of
from rocm_attn.kernels.tuning.tiles import CodeKind, DecodeTiles, ExtendTileChoice, ExtendTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem
from rocm_attn.providers import (
    triton_cdna,
    triton_hopper,
    triton_latent,
    triton_prefill,
    triton_segments,
    triton_sparse,
)
from rocm_attn.providers.by_tokens import KernelByTokens, ServedSteps, SizedKernel
from rocm_attn.providers.contract import SMALLEST_POOL, BoundKernel, KernelEntry, Limits, PoolSize, Provider, StepBounds
from rocm_attn.providers.cut_kernels import CutDecode, MaskableExtend
from rocm_attn.providers.mixed import MixedAtOnce, TritonMixed
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.shared_prefix import SharedPrefixKernel, limits_of_shared_prefix, problem_of_prefixes
from rocm_attn.providers.tiles import (
    codes_of,
    decode_cut_of,
    decode_tiles_of,
    extend_choices_of,
    extend_choices_of_table,
    extend_cut,
)
from rocm_attn.providers.triton_entries import ARCHS, RANGE_KINDS, Ranged, triton_entry, triton_ops
from rocm_attn.providers.triton_later import triton_launches

_LIMITS = Limits(
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

# Kernels that read ranges of keys serve chunks and two-sided windows, too. Those of steps without a mask serve nothing
# else.
_RANGED_LIMITS = replace(_LIMITS, ranges=True)
_RANGES_ALONE = replace(_RANGED_LIMITS, others=False)

# Keys of windows whose rows are not shared out: sharing costs more than such short rows gain. Windows of 128, 64 x 8
# heads of 64, 2048 new of 8192: 37 us, shared 43; 12 x 4, 777 new of 5778: 8 and 12. Windows of 512, 64 x 8 of 96, 30 x
# 6 new of 2074: 31 and 35; but 4 x 1 of 128, 64 of 2000: 21 and 16. Windows of 1024, 12 x 4 of 64, 777 of 5778: 34 and
# 26 (H200).
_MOST_NOT_SHARED = 512
# Rows of a sequence whose query blocks take all query heads of a KV head.
_MOST_NOT_FILLED = 512


@dataclass(frozen=True, slots=True)
class TritonDecode(CutDecode[DecodeTiles]):
    """Split-KV decode of sequences with one new token; other sequences are skipped. scores: the problem's"""

    def describe(self) -> str:
        cut = self.cut
        by_rows = f" ({cut.least_alone} to {cut.alone.programs} rows: {self.tiles_of(cut.alone)})" if cut.alone else ""
        return f"triton.decode({self.problem}, {self.tiles}{by_rows}, programs={cut.programs_in_words})"

    def workspace_words(self, shape: PaddedShape) -> int:
        problem = self.problem
        cut = self.cut.roomiest_of_step(shape.num_seqs)
        return cut.partials_words(gqa_ratio=problem.gqa_ratio, v_head_dim=problem.v_head_dim, tiles=self.tiles)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        cut = self.cut.of_step(args.queries.num_seqs)
        triton_launches.launch_paged_decode(args, scores=self.scores, cut=cut, tiles=self.tiles_of(cut))

    def tiles_of(self, cut: DecodeCut) -> DecodeTiles:
        """The tiles of a step with this cut."""
        alone = alone_of(self.tiles) if cut is self.cut.alone else None
        return alone.tiles if alone else self.tiles


@dataclass(frozen=True, slots=True)
class TritonStoringDecode(TritonDecode):
    """Decode of steps in which each sequence has one new token, the last of its keys, over pages in q's dtype."""

    @only_launches
    def store_and_attend(self, args: AttendArgs, new: NewRows, step: StepTensors, bounds: StepBounds) -> None:
        """See `StoringKernel.store_and_attend`."""
        cut = self.cut.of_step(args.queries.num_seqs)
        triton_launches.launch_storing_decode(args, new, scores=self.scores, cut=cut, tiles=self.tiles_of(cut))


@dataclass(frozen=True, slots=True)
class TritonExtend(MaskableExtend[ExtendTiles]):
    """Ragged extend over a cached prefix, for sequences with cut.min_q_len new tokens or more."""

    def describe(self) -> str:
        programs = self.cut.sharing.programs
        return f"triton.extend({self.problem}, {self.tiles}, min_q_len={self.cut.min_q_len}, programs={programs})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.cut.partials_words(query_rows=self.tiles.query_rows, v_head_dim=self.problem.v_head_dim)

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        triton_launches.launch_paged_extend(args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask)


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> TritonDecode:
    tiles = decode_tiles_of(problem, target)
    cut = decode_cut_of(problem, target, tiles)
    # If no pool is known, sequences may be of any length.
    cut = cut if pool == SMALLEST_POOL else cut.of_lengths(pool.max_kv_len)
    return TritonDecode(problem, scores_of(problem), tiles, cut)


def _bind_decode_alone(problem: Problem, target: Target, pool: PoolSize) -> TritonDecode:
    """Binds decode for steps in which it serves every sequence."""
    kernel = _bind_decode(problem, target, pool)
    # A program that stores new K and V reads what its threads wrote.
    if not target.orders_by_barriers or problem.kv_encoding is not KVEncoding.LIKE_Q or not problem.causal:
        return kernel
    return TritonStoringDecode(problem, kernel.scores, kernel.tiles, kernel.cut)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    rows = extend_choices_of(problem, target)
    return _by_tokens(problem, rows, lambda tiles, is_short: _extend(problem, target, tiles))


def _by_tokens(
    problem: Problem, rows: Sequence[ExtendTileChoice], bind: Callable[[ExtendTiles, bool], BoundKernel]
) -> BoundKernel:
    """The kernel for any step of a problem. bind: tiles, and True for tiles of short sequences -> a kernel"""
    *short, last = rows
    kernels = tuple(SizedKernel(ServedSteps(row.max_rows // problem.gqa_ratio), bind(row.tiles, True)) for row in short)
    other = bind(last.tiles, False)
    return KernelByTokens(kernels, other) if kernels else other


def _extend(problem: Problem, target: Target, tiles: ExtendTiles, min_q_len: int = 1) -> TritonExtend:
    """Extend of sequences with min_q_len new tokens or more."""
    if not target.shares_short_windows and UNLIMITED_WINDOW != problem.window_left < _MOST_NOT_SHARED:
        tiles = _of_whole_rows(tiles)
    cut = extend_cut(problem, target, tiles, causal=problem.causal, min_q_len=min_q_len)
    return TritonExtend(problem, scores_of(problem), tiles, cut)


def _of_whole_rows(tiles: ExtendTiles) -> ExtendTiles:
    """The tiles of steps in which every row belongs to one program: one launch per layer, and no merge."""
    return replace(tiles, programs_per_cu=0, one_launch=False)


def _bind_mixed(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    rows = extend_choices_of(problem, target)
    extend = _by_tokens(problem, rows, lambda tiles, is_short: _extend(problem, target, tiles, min_q_len=2))
    return _in_turn_or_at_once(TritonMixed(_bind_decode(problem, target, pool), extend), target)


def _bind_mixed_cdna(problem: Problem, target: Target, pool: PoolSize) -> TritonMixed:
    rows = extend_choices_of(problem, target)
    extend = _by_tokens(problem, rows, lambda tiles, is_short: _extend(problem, target, tiles, min_q_len=2))
    return TritonMixed(triton_cdna.bind_decode(problem, target, pool), extend)


def _bind_extend_cdna(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return triton_cdna.bind_extend(problem, target, _bind_extend(problem, target, pool))


def _bind_mixed_both_cdna(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    mixed = _bind_mixed_cdna(problem, target, pool)
    return replace(mixed, extend=triton_cdna.bind_extend(problem, target, mixed.extend, min_q_len=2))


def _bind_mixed_extend_cdna(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    mixed = _bind_mixed(problem, target, pool)
    assert isinstance(mixed, TritonMixed), "no arch of CDNA runs both at once"
    return replace(mixed, extend=triton_cdna.bind_extend(problem, target, mixed.extend, min_q_len=2))


def _in_turn_or_at_once(mixed: TritonMixed, target: Target) -> BoundKernel:
    return MixedAtOnce(mixed) if target.runs_at_once else mixed


def _bind_masked(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return _bind_ranged(problem, target, by_cells=True)


def _bind_ranged(problem: Problem, target: Target, *, by_cells: bool) -> BoundKernel:
    """The kernel of steps with ranges of keys. by_cells: whether tokens may see more than causality says, by a mask"""
    codes = codes_of(problem)

    def bind(tiles: ExtendTiles, is_short: bool) -> Ranged:
        # 64 x 5 new tokens after 8k with scales of tokens, heads of 128: 514 us on an H200 with unchanged tiles, else
        # 1238.
        fits = is_short or (codes is CodeKind.BY_TOKEN and target.is_nvidia)
        tiles = tiles if fits and tiles.query_rows <= 64 else tiles.of_masked_steps(problem.gqa_ratio, codes)
        if problem.visibility.two_sided:
            # Rows are short, and there are many: every token of a text is new.
            tiles = _of_whole_rows(tiles)
        cut = extend_cut(problem, target, tiles, causal=problem.causal and not by_cells)
        return Ranged(TritonExtend(problem, scores_of(problem), tiles, cut), problem.visibility)

    return _by_tokens(problem, extend_choices_of_table(problem, target), bind)


def _bind_ranges(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return _bind_ranged(problem, target, by_cells=False)


def _bind_shared(problem: Problem, target: Target, pool: PoolSize) -> SharedPrefixKernel:
    prefix = _bind_extend(problem_of_prefixes(problem), target, pool)
    return SharedPrefixKernel(problem, prefix, _bind_decode(problem, target, pool), triton_ops)


def _bind_extend_hopper(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Gives sequences with few new tokens to the plain kernel, since most of 128 rows would have no token."""
    hopper = triton_hopper.bind_extend(problem, target, pool, min_q_len)
    kernel = _by_tokens(
        problem,
        extend_choices_of(problem, target),
        lambda tiles, is_short: _extend(problem, target, tiles, min_q_len) if is_short else hopper,
    )
    ratio = problem.gqa_ratio
    filled = triton_hopper.filled(hopper, target)
    if problem.kv_encoding is not KVEncoding.LIKE_Q or filled.tiles.extend.heads_per_block(ratio) == ratio:
        return kernel
    short = kernel.short if isinstance(kernel, KernelByTokens) else ()
    # For few tokens, blocks of fewer heads would read K and V several times and have no more rows.
    return KernelByTokens((*short, SizedKernel(ServedSteps(_MOST_NOT_FILLED // ratio), hopper)), filled)


def _bind_mixed_hopper(problem: Problem, target: Target, pool: PoolSize) -> MixedAtOnce:
    extend = _bind_extend_hopper(problem, target, pool, min_q_len=2)
    return MixedAtOnce(TritonMixed(_bind_decode(problem, target, pool), extend))


def _bind_prompts_hopper(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return _bind_prompts(problem, target, _bind_extend_hopper(problem, target, pool))


def _bind_prompts_plain(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return _bind_prompts(problem, target, _bind_extend(problem, target, pool))


def _bind_prompts(problem: Problem, target: Target, extend: BoundKernel) -> BoundKernel:
    """Binds the kernel of prompt steps. extend: the kernel of any extend step"""
    rows = extend_choices_of(problem, target)
    return triton_prefill.bind_prompts(
        problem, target, rows, lambda tiles: _extend(problem, target, _of_whole_rows(tiles)), extend
    )


def _bind_shared_hopper(problem: Problem, target: Target, pool: PoolSize) -> SharedPrefixKernel:
    prefix = _bind_extend_hopper(problem_of_prefixes(problem), target, pool)
    return SharedPrefixKernel(problem, prefix, _bind_decode(problem, target, pool), triton_ops)


def _bind_extend_hopper_segments(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Like `_bind_extend_hopper`, but deterministic."""
    hopper = triton_hopper.bind_segment_extend(problem, target, min_q_len)
    return triton_segments.extend_by_tokens(problem, target, min_q_len, hopper)


def _bind_mixed_hopper_segments(problem: Problem, target: Target, pool: PoolSize) -> MixedAtOnce:
    extend = _bind_extend_hopper_segments(problem, target, pool, min_q_len=2)
    return MixedAtOnce(TritonMixed(triton_segments.bind_decode(problem, target, pool), extend))


def _bind_mixed_segments(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    extend = triton_segments.extend_by_tokens(problem, target, 2, None)
    return _in_turn_or_at_once(TritonMixed(triton_segments.bind_decode(problem, target, pool), extend), target)


def _ranges_entry(kind: StepKind) -> KernelEntry:
    return triton_entry("triton.ranges", kind, _bind_ranges, limits=_RANGES_ALONE)


def _segment_ranges_entry(kind: StepKind) -> KernelEntry:
    bind = triton_segments.bind_masked
    return triton_entry("triton.segment_ranges", kind, bind, limits=_RANGES_ALONE, batch_invariant=True)


TRITON = Provider(
    name="triton",
    entries=(
        triton_entry(
            "triton.cdna_decode", StepKind.DECODE, triton_cdna.bind_decode, limits=triton_cdna.LIMITS, is_probed=True
        ),
        triton_entry(
            "triton.hopper_decode", StepKind.DECODE, triton_hopper.bind_extend, limits=triton_hopper.DECODE_LIMITS
        ),
        triton_entry("triton.decode", StepKind.DECODE, _bind_decode_alone, limits=_LIMITS),
        triton_entry("triton.hopper_extend", StepKind.EXTEND, _bind_extend_hopper, limits=triton_hopper.LIMITS),
        triton_entry(
            "triton.cdna_extend", StepKind.EXTEND, _bind_extend_cdna, limits=triton_cdna.EXTEND_LIMITS, is_probed=True
        ),
        triton_entry("triton.extend", StepKind.EXTEND, _bind_extend, limits=_LIMITS),
        triton_entry(
            "triton.hopper_prefill",
            StepKind.PREFILL,
            _bind_prompts_hopper,
            limits=triton_prefill.limits_of_prompts(triton_hopper.LIMITS),
        ),
        triton_entry(
            "triton.prefill",
            StepKind.PREFILL,
            _bind_prompts_plain,
            limits=triton_prefill.limits_of_prompts(_LIMITS),
        ),
        triton_entry("triton.hopper_extend+decode", StepKind.MIXED, _bind_mixed_hopper, limits=triton_hopper.LIMITS),
        triton_entry(
            "triton.cdna_extend+cdna_decode",
            StepKind.MIXED,
            _bind_mixed_both_cdna,
            limits=triton_cdna.MIXED_LIMITS,
            is_probed=True,
        ),
        triton_entry(
            "triton.cdna_extend+decode",
            StepKind.MIXED,
            _bind_mixed_extend_cdna,
            limits=triton_cdna.EXTEND_LIMITS,
            is_probed=True,
        ),
        triton_entry(
            "triton.extend+cdna_decode", StepKind.MIXED, _bind_mixed_cdna, limits=triton_cdna.LIMITS, is_probed=True
        ),
        triton_entry("triton.extend+decode", StepKind.MIXED, _bind_mixed, limits=_LIMITS),
        triton_entry("triton.masked", StepKind.MASKED, _bind_masked, Need.MASK, limits=_RANGED_LIMITS),
        triton_entry(
            "triton.hopper_shared_prefix",
            StepKind.SHARED,
            _bind_shared_hopper,
            Need.PREFIXES,
            limits=limits_of_shared_prefix(triton_hopper.LIMITS),
        ),
        triton_entry(
            "triton.shared_prefix",
            StepKind.SHARED,
            _bind_shared,
            Need.PREFIXES,
            limits=limits_of_shared_prefix(_LIMITS),
        ),
        triton_entry(
            "triton.segment_decode", StepKind.DECODE, triton_segments.bind_decode, limits=_LIMITS, batch_invariant=True
        ),
        triton_entry(
            "triton.hopper_segment_extend",
            StepKind.EXTEND,
            _bind_extend_hopper_segments,
            limits=triton_hopper.SEGMENT_LIMITS,
            batch_invariant=True,
        ),
        triton_entry(
            "triton.segment_extend", StepKind.EXTEND, triton_segments.bind_extend, limits=_LIMITS, batch_invariant=True
        ),
        triton_entry(
            "triton.hopper_segment_extend+decode",
            StepKind.MIXED,
            _bind_mixed_hopper_segments,
            limits=triton_hopper.SEGMENT_LIMITS,
            batch_invariant=True,
        ),
        triton_entry(
            "triton.segment_masked",
            StepKind.MASKED,
            triton_segments.bind_masked,
            Need.MASK,
            limits=_RANGED_LIMITS,
            batch_invariant=True,
        ),
        triton_entry(
            "triton.segment_extend+decode", StepKind.MIXED, _bind_mixed_segments, limits=_LIMITS, batch_invariant=True
        ),
        *triton_latent.ENTRIES,
        *triton_sparse.EVERY_ROW_ENTRIES,
        *map(_ranges_entry, RANGE_KINDS),
        *map(_segment_ranges_entry, RANGE_KINDS),
    ),
    ops=triton_ops,
)

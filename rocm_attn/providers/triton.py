"""The triton provider: binds this project's Triton kernels to problems. They read the block table without a copy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
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
from rocm_attn.providers.chunk_decode import of_chunks
from rocm_attn.providers.contract import (
    Bind,
    BoundKernel,
    KernelEntry,
    Limits,
    PoolSize,
    Provider,
    StepBounds,
)
from rocm_attn.providers.cut_kernels import CutDecode, MaskableExtend
from rocm_attn.providers.mixed import MixedAtOnce, TritonMixed
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import (
    codes_of,
    decode_cut_of,
    decode_tiles_of,
    extend_choices_of,
    extend_choices_of_table,
    extend_cut,
)
from rocm_attn.providers.triton_entries import (
    LIMITS,
    Ranged,
    deterministic_entry,
    of_ranges_alone,
    range_entries,
    shared_entry,
    triton_entry,
    triton_ops,
    with_and_without_cells,
)
from rocm_attn.providers.triton_later import triton_launches

# Kernels that read ranges of keys serve chunks and two-sided windows, too.
_RANGED_LIMITS = replace(LIMITS, ranges=True)

# Keys of windows whose rows are not shared out: sharing costs more than such short rows gain. Windows of 128, 64 x 8
# heads of 64, 2048 new of 8192: 37 us, shared 43; 12 x 4, 777 new of 5778: 8 and 12. Windows of 512, 64 x 8 of 96, 30 x
# 6 new of 2074: 31 and 35; but 4 x 1 of 128, 64 of 2000: 21 and 16. Windows of 1024, 12 x 4 of 64, 777 of 5778: 34 and
# 26. 16 x 8 of 256, 16 new of 4k, windows of 256: 14.8 and 13.6, of 512: 24.7 and 14.5; 8 x 5: 15 and 16, 24 and 22; 30
# x 6: 25 and 26, 40 and 41 (H200).
_MOST_NOT_SHARED, _MOST_OF_WIDE_HEADS = 512, 256
_WIDE_HEADS = 128
# New tokens of a sequence that may be a tree of drafts, where all steps have one choice of tiles: more are a prompt.
_MOST_NODES = 256
# Rows of a sequence whose query blocks take all query heads of a KV head.
_MOST_NOT_FILLED = 512
# Rows of a sequence up to which the plain kernel takes less time than Hopper's, for heads up to each dim; for wider
# ones none. Microseconds of an H200, plain and Hopper's: 32 x 8 heads of 64, 1 x 5 new of 8197: 13.4 and 13.9; of 96, 1
# x 3 of 8195: 16 and 18; 32 x 32 of 96, 64 x 5 of 2505: 511 and 564, 8 x 16 of 1040: 35 and 41. But 32 x 8 of 64, 8 x
# 16: 16 and 14; of 96: 19 and 17; of 128, 8 x 5 of 2053: 28 and 26, 1 x 8 of 4104: 16 and 14; 24 x 8 of 112, 64 x 5:
# 185 and 160; 16 x 8 of 256, 1 x 5: 33 and 29; 16 x 4 of 256, 1 x 8: 22 and 15.
_ROWS_BEFORE_HOPPER = {64: 32, 96: 16}
# The same in layers with windows. 32 x 8 heads of 128, 64 x 5 of 2505, windows of 512: 44 and 51; of 1024: 77 and 83;
# of 4096: 162 and 167; 16 x 8 of 1032: 15 and 19; 29 and 27; 29 and 28. 16 x 8 of 256, 64 x 5: 77 and 96; 138 and 158;
# but 8 x 16 of 2064: 24 and 22; 40 and 31.
_ROWS_IN_WINDOWS = {192: 64, 256: 16}
# Query blocks for each two compute units, from which on the plain kernel takes less time with all its tiles of few
# rows, if the head dim is a multiple of _FULL_COLUMNS. 64 x 5 of 2505, 32 x 8 heads of 64: 89 and 95; of 96: 148 and
# 154; of 128: 164 and 167; 16 x 8 of 192: 240 and 248; of 256: 312 and 331. But 15 x 3 of 72: 72 and 66.
_MANY_BLOCKS, _FULL_COLUMNS = 3, 32


@dataclass(frozen=True, slots=True)
class TritonDecode(CutDecode[DecodeTiles]):
    """Split-KV decode of sequences with one new token; other sequences are skipped. scores: the problem's"""

    def describe(self) -> str:
        by_rows = "".join(f" ({each.rows_in_words}: {each.tiles})" for each in self.cut.others)
        return f"triton.decode({self.problem}, {self.tiles}{by_rows}, programs={self.cut.programs_in_words})"

    def workspace_words(self, shape: PaddedShape) -> int:
        others = ((each.cut, each.tiles) for each in self.cut.others_up_to(shape.num_seqs))
        gqa_ratio, v_head_dim = self.problem.gqa_ratio, self.problem.v_head_dim
        return max(
            cut.own_of_step(shape.num_seqs).partials_words(gqa_ratio=gqa_ratio, v_head_dim=v_head_dim, tiles=tiles)
            for cut, tiles in ((self.cut, self.tiles), *others)
        )

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        num_seqs = args.queries.num_seqs
        cut, tiles = self.cut.of_step(num_seqs), self.tiles_of(num_seqs)
        triton_launches.launch_paged_decode(args, scores=self.scores, cut=cut, tiles=tiles)

    def tiles_of(self, num_seqs: int) -> DecodeTiles:
        """The tiles of steps of num_seqs padded sequences."""
        other = self.cut.other_of(num_seqs)
        return self.tiles if other is None else other.tiles


@dataclass(frozen=True, slots=True)
class TritonStoringDecode(TritonDecode):
    """Decode of steps in which each sequence has one new token, the last of its keys, over pages in q's dtype."""

    @only_launches
    def store_and_attend(self, args: AttendArgs, new: NewRows, step: StepTensors, bounds: StepBounds) -> None:
        num_seqs = args.queries.num_seqs
        cut, tiles = self.cut.of_step(num_seqs), self.tiles_of(num_seqs)
        triton_launches.launch_storing_decode(args, new, scores=self.scores, cut=cut, tiles=tiles)


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
    return TritonDecode(problem, scores_of(problem), tiles, decode_cut_of(problem, target, tiles))


def _bind_decode_alone(problem: Problem, target: Target, pool: PoolSize) -> TritonDecode:
    """Binds decode for steps in which it serves every sequence."""
    kernel = _bind_decode(problem, target, pool)
    # A program that stores new K and V reads what its threads wrote.
    if not target.orders_by_barriers or problem.kv_encoding is not KVEncoding.LIKE_Q or not problem.causal:
        return kernel
    return TritonStoringDecode(problem, kernel.scores, kernel.tiles, kernel.cut)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    rows = extend_choices_of(problem, target)
    return _by_tokens(problem, rows, lambda tiles, is_short: _extend(problem, target, tiles, min_q_len))


def _bind_extend_cdna(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    return triton_cdna.bind_extend(problem, target, _bind_extend(problem, target, pool, min_q_len), min_q_len)


class _BindExtend(Protocol):
    """Binds a kernel of sequences with min_q_len new tokens or more."""

    def __call__(self, problem: Problem, target: Target, pool: PoolSize, min_q_len: int) -> BoundKernel: ...


def _mixed_entry(name: str, limits: Limits, decode: Bind, extend: _BindExtend, **more: Any) -> KernelEntry:
    """Returns a row of what binds both for one step."""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
        kernels = decode(problem, target, pool), extend(problem, target, pool, min_q_len=2)
        return MixedAtOnce(*kernels) if target.runs_at_once else TritonMixed(*kernels)

    return triton_entry(name, StepKind.MIXED, limits, bind, **more)


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
    most = _MOST_OF_WIDE_HEADS if problem.head_dim > _WIDE_HEADS else _MOST_NOT_SHARED
    if not target.shares_short_windows and UNLIMITED_WINDOW != problem.window_left < most:
        tiles = _of_whole_rows(tiles)
    cut = extend_cut(problem, target, tiles, causal=problem.causal, min_q_len=min_q_len)
    return TritonExtend(problem, scores_of(problem), tiles, cut)


def _of_whole_rows(tiles: ExtendTiles) -> ExtendTiles:
    """The tiles of steps in which every row belongs to one program: one launch per layer, and no merge."""
    return replace(tiles, programs_per_cu=0, one_launch=False) if tiles.programs_per_cu else tiles


def _bind_ranges(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Binds the kernel of steps whose tokens each see a range of keys."""
    return _by_ranges(problem, target, lambda tiles: _ranged_extend(problem, target, tiles, min_q_len), min_q_len)


def _bind_ranges_hopper(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    hopper = triton_hopper.bind_extend(problem, target, pool, min_q_len)
    return _by_ranges(problem, target, lambda tiles: hopper, min_q_len)


def _by_ranges(
    problem: Problem, target: Target, bind: Callable[[ExtendTiles], MaskableExtend[Any]], min_q_len: int
) -> BoundKernel:
    """The kernel of steps with ranges of keys. bind: of many tokens"""

    def of_tiles(tiles: ExtendTiles, is_short: bool) -> BoundKernel:
        extend = _ranged_extend(problem, target, tiles, min_q_len) if is_short else bind(tiles)
        return Ranged(extend, problem.visibility)

    return _by_tokens(problem, extend_choices_of_table(problem, target), of_tiles)


def _bind_masked(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return _by_cells(problem, target, lambda tiles: _ranged_extend(problem, target, tiles))


def _bind_masked_hopper(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    hopper = triton_hopper.bind_extend(problem, target, pool)
    return _by_cells(problem, target, lambda tiles: hopper)


def _by_cells(problem: Problem, target: Target, bind: Callable[[ExtendTiles], MaskableExtend[Any]]) -> BoundKernel:
    """The kernel of steps with ranges of keys, of which a mask's cells may hide some.

    Cells take registers, so in steps of many tokens the sequences with cells and those without have a kernel each. One
    of them has nothing to do in most steps, so one kernel serves both in steps of few tokens. bind: of ranges alone
    """
    rows = extend_choices_of_table(problem, target)

    def of_tiles(tiles: ExtendTiles, is_short: bool) -> BoundKernel:
        masked = _masked_extend(problem, target, tiles, is_short=is_short)
        both = Ranged(masked, problem.visibility)
        if is_short:
            return both
        apart = with_and_without_cells(problem, bind(tiles), masked)
        return apart if len(rows) > 1 else KernelByTokens((SizedKernel(ServedSteps(_MOST_NODES), both),), apart)

    return _by_tokens(problem, rows, of_tiles)


def _ranged_extend(problem: Problem, target: Target, tiles: ExtendTiles, min_q_len: int = 1) -> TritonExtend:
    codes = codes_of(problem)
    if codes is CodeKind.BY_TOKEN and target.is_amd:
        # Heads of 256 would spill 11 registers on gfx942.
        tiles = tiles.of_masked_steps(problem.gqa_ratio, codes)
    return _extend_in(problem, target, tiles, causal=problem.causal, min_q_len=min_q_len)


def _masked_extend(problem: Problem, target: Target, tiles: ExtendTiles, *, is_short: bool) -> TritonExtend:
    # 64 x 5 new tokens after 8k with scales of tokens, heads of 128: 514 us on an H200 with unchanged tiles, else 1238.
    fits = is_short or (codes_of(problem) is CodeKind.BY_TOKEN and target.is_nvidia)
    if not (fits and tiles.query_rows <= 64):
        tiles = tiles.of_masked_steps(problem.gqa_ratio, codes_of(problem))
    return _extend_in(problem, target, tiles, causal=False)


def _extend_in(
    problem: Problem, target: Target, tiles: ExtendTiles, *, causal: bool, min_q_len: int = 1
) -> TritonExtend:
    if problem.visibility.two_sided:
        # Rows are short, and there are many: every token of a text is new.
        tiles = _of_whole_rows(tiles)
    cut = extend_cut(problem, target, tiles, causal=causal, min_q_len=min_q_len)
    return TritonExtend(problem, scores_of(problem), tiles, cut)


def _bind_extend_hopper(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Gives sequences with few rows to the plain kernel where that takes less time, but for codes."""
    hopper = triton_hopper.bind_extend(problem, target, pool, min_q_len)
    if problem.kv_encoding is not KVEncoding.LIKE_Q:
        # A scale for the layer, 32 x 8 heads of 128, 64 x 5 new of 2505: 129 us, the plain kernel 193; 1 x 5 of 8197:
        # 19 and 26. 64 x 8 of 64, 64 x 5: 94 and 146. 16 x 8 of 256, 4 x 16 of 316: 17 and 20 (H200).
        return hopper
    ratio = problem.gqa_ratio
    short = tuple(_before_hopper(problem, target, min_q_len))
    filled = triton_hopper.filled(hopper, target)
    if filled.tiles.extend.heads_per_block(ratio) == ratio:
        return KernelByTokens(short, hopper) if short else hopper
    # For few tokens, blocks of fewer heads would read K and V several times and have no more rows.
    return KernelByTokens((*short, SizedKernel(ServedSteps(_MOST_NOT_FILLED // ratio), hopper)), filled)


def _before_hopper(problem: Problem, target: Target, min_q_len: int) -> Iterator[SizedKernel]:
    """The plain kernels that serve steps in place of Hopper's."""
    rows_of_dims = _ROWS_BEFORE_HOPPER if problem.window_left == UNLIMITED_WINDOW else _ROWS_IN_WINDOWS
    most = next((rows for head_dim, rows in rows_of_dims.items() if problem.head_dim <= head_dim), 0)
    many_seqs = -(-_MANY_BLOCKS * target.compute_units // (2 * problem.num_kv_heads))
    ratio = served = problem.gqa_ratio
    for row in extend_choices_of(problem, target)[:-1]:
        kernel = _extend(problem, target, row.tiles, min_q_len)
        if served <= most:
            yield SizedKernel(ServedSteps(min(row.max_rows, most) // ratio), kernel)
        # Most sequences of a mixed step may be decode's.
        if row.max_rows > most and problem.head_dim % _FULL_COLUMNS == 0 and min_q_len == 1:
            yield SizedKernel(ServedSteps(row.max_rows // ratio, many_seqs), kernel)
        served = row.max_rows + 1


def _prompts(bind_extend: Bind) -> Bind:
    """Returns what binds the kernel of prompt steps. bind_extend: of any extend step"""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
        rows, extend = extend_choices_of(problem, target), bind_extend(problem, target, pool)
        return triton_prefill.bind_prompts(
            problem, target, rows, lambda tiles: _extend(problem, target, _of_whole_rows(tiles)), extend
        )

    return bind


def _bind_hopper_segments(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Like `_bind_extend_hopper`, but deterministic."""
    hopper = triton_hopper.bind_segment_extend(problem, target, min_q_len)
    return triton_segments.bind_extend(problem, target, pool, min_q_len, hopper)


def _bind_hopper_segment_prompts(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    return triton_segments.bind_prompts(problem, target, _bind_hopper_segments(problem, target, pool))


def _bind_hopper_segment_ranges(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> BoundKernel:
    """Like `_bind_ranges_hopper`, but deterministic."""
    few = triton_segments.masked_extend(problem, target, min_q_len)
    hopper = triton_hopper.bind_segment_extend(problem, target, min_q_len, ranged=True)
    return _of_few_segments(few, Ranged(hopper, problem.visibility))


def _bind_hopper_segment_masked(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    """Like `_bind_masked_hopper`, but deterministic."""
    few = triton_segments.masked_extend(problem, target)
    hopper = triton_hopper.bind_segment_extend(problem, target, ranged=True)
    return _of_few_segments(few, with_and_without_cells(problem, hopper, few))


def _of_few_segments(few: triton_segments.SegmentExtend, other: BoundKernel) -> BoundKernel:
    """Gives steps whose sequences have few new tokens to the plain kernel."""
    steps = ServedSteps(few.tiles.extend.query_rows // few.problem.gqa_ratio)
    return KernelByTokens((SizedKernel(steps, Ranged(few, few.problem.visibility)),), other)


def _chunk_entries() -> Iterator[KernelEntry]:
    """Decode in layers with chunks, and mixed steps with it; chunks that are no whole pages are extend's alone."""
    plain, cdna = of_ranges_alone(LIMITS), of_ranges_alone(triton_cdna.LIMITS)
    hopper, segments = of_ranges_alone(triton_hopper.LIMITS), of_ranges_alone(triton_hopper.RANGED_SEGMENT_LIMITS)
    decode, cdna_decode = of_chunks(_bind_decode), of_chunks(triton_cdna.bind_decode)
    alone = of_chunks(_bind_decode_alone)
    by_segments = triton_segments.bind_chunk_decode
    yield triton_entry("cdna_chunk_decode", StepKind.DECODE, cdna, cdna_decode, is_probed=True)
    yield triton_entry("chunk_decode", StepKind.DECODE, plain, alone)
    yield deterministic_entry("segment_chunk_decode", StepKind.DECODE, plain, by_segments)
    yield _mixed_entry("hopper_ranges+chunk_decode", hopper, decode, _bind_ranges_hopper)
    yield _mixed_entry("ranges+cdna_chunk_decode", cdna, cdna_decode, _bind_ranges, is_probed=True)
    yield _mixed_entry("ranges+chunk_decode", plain, decode, _bind_ranges)
    yield _mixed_entry(
        "hopper_segment_ranges+chunk_decode", segments, by_segments, _bind_hopper_segment_ranges, batch_invariant=True
    )
    yield _mixed_entry(
        "segment_ranges+chunk_decode", plain, by_segments, triton_segments.bind_masked, batch_invariant=True
    )


TRITON = Provider(
    name="triton",
    entries=(
        triton_entry("cdna_decode", StepKind.DECODE, triton_cdna.LIMITS, triton_cdna.bind_decode, is_probed=True),
        triton_entry("hopper_decode", StepKind.DECODE, triton_hopper.DECODE_LIMITS, triton_hopper.bind_extend),
        triton_entry("decode", StepKind.DECODE, LIMITS, _bind_decode_alone),
        triton_entry("hopper_extend", StepKind.EXTEND, triton_hopper.LIMITS, _bind_extend_hopper),
        triton_entry("cdna_extend", StepKind.EXTEND, triton_cdna.EXTEND_LIMITS, _bind_extend_cdna, is_probed=True),
        triton_entry("extend", StepKind.EXTEND, LIMITS, _bind_extend),
        triton_entry(
            "hopper_prefill",
            StepKind.PREFILL,
            triton_prefill.limits_of_prompts(triton_hopper.LIMITS),
            _prompts(_bind_extend_hopper),
        ),
        triton_entry("prefill", StepKind.PREFILL, triton_prefill.limits_of_prompts(LIMITS), _prompts(_bind_extend)),
        _mixed_entry("hopper_extend+decode", triton_hopper.LIMITS, _bind_decode, _bind_extend_hopper),
        _mixed_entry(
            "cdna_extend+cdna_decode",
            triton_cdna.MIXED_LIMITS,
            triton_cdna.bind_decode,
            _bind_extend_cdna,
            is_probed=True,
        ),
        _mixed_entry("cdna_extend+decode", triton_cdna.EXTEND_LIMITS, _bind_decode, _bind_extend_cdna, is_probed=True),
        _mixed_entry("extend+cdna_decode", triton_cdna.LIMITS, triton_cdna.bind_decode, _bind_extend, is_probed=True),
        _mixed_entry("extend+decode", LIMITS, _bind_decode, _bind_extend),
        triton_entry("hopper_masked", StepKind.MASKED, triton_hopper.RANGED_LIMITS, _bind_masked_hopper, Need.MASK),
        triton_entry("masked", StepKind.MASKED, _RANGED_LIMITS, _bind_masked, Need.MASK),
        shared_entry("hopper_shared_prefix", triton_hopper.LIMITS, _bind_extend_hopper, _bind_decode),
        shared_entry("shared_prefix", LIMITS, _bind_extend, _bind_decode),
        deterministic_entry("segment_decode", StepKind.DECODE, LIMITS, triton_segments.bind_decode),
        deterministic_entry(
            "hopper_segment_extend", StepKind.EXTEND, triton_hopper.SEGMENT_LIMITS, _bind_hopper_segments
        ),
        deterministic_entry("segment_extend", StepKind.EXTEND, LIMITS, triton_segments.bind_extend),
        deterministic_entry(
            "hopper_segment_prefill",
            StepKind.PREFILL,
            # No wider than those of hopper_prefill, or it would serve steps that need not be deterministic.
            triton_prefill.limits_of_prompts(triton_hopper.SEGMENT_LIMITS),
            _bind_hopper_segment_prompts,
        ),
        _mixed_entry(
            "hopper_segment_extend+decode",
            triton_hopper.SEGMENT_LIMITS,
            triton_segments.bind_decode,
            _bind_hopper_segments,
            batch_invariant=True,
        ),
        deterministic_entry(
            "hopper_segment_masked",
            StepKind.MASKED,
            triton_hopper.RANGED_SEGMENT_LIMITS,
            _bind_hopper_segment_masked,
            Need.MASK,
        ),
        deterministic_entry("segment_masked", StepKind.MASKED, _RANGED_LIMITS, triton_segments.bind_masked, Need.MASK),
        _mixed_entry(
            "segment_extend+decode",
            LIMITS,
            triton_segments.bind_decode,
            triton_segments.bind_extend,
            batch_invariant=True,
        ),
        *triton_latent.ENTRIES,
        *triton_sparse.EVERY_ROW_ENTRIES,
        *_chunk_entries(),
        *range_entries(
            "hopper_ranges",
            _bind_ranges_hopper,
            triton_hopper.RANGED_LIMITS,
            kinds=(StepKind.EXTEND, StepKind.MIXED),
        ),
        *range_entries("ranges", _bind_ranges, LIMITS),
        *range_entries(
            "hopper_segment_ranges",
            _bind_hopper_segment_ranges,
            triton_hopper.RANGED_SEGMENT_LIMITS,
            kinds=(StepKind.EXTEND, StepKind.MIXED),
            batch_invariant=True,
        ),
        *range_entries("segment_ranges", triton_segments.bind_masked, LIMITS, batch_invariant=True),
    ),
    ops=triton_ops,
)

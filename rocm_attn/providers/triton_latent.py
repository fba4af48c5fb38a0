"""The triton provider's kernels over latent pools (absorbed MLA): a token's one row is K, and its first part is V.

Sequences with few new tokens, as in speculative decoding, have their keys split over programs, as in decode; longer
ones have a program for each query block.
"""

from dataclasses import dataclass, replace

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.latent import limits
from rocm_attn.kernels.latent.cuts import latent_extend_cut
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.kernels.tuning.latent_tiles import LatentSegmentTiles, LatentTiles, latent_segment_tiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers import triton_cdna_latent, triton_hopper_latent
from rocm_attn.providers.contract import Bind, BoundKernel, PoolSize, StepBounds
from rocm_attn.providers.cut_kernels import CutSegmentDecode, Maskable, MaskableExtend
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.split_latents import SplitLatents, cut_of_latents
from rocm_attn.providers.tiles import (
    latent_decode_tiles_of,
    latent_decode_tiles_of_table,
    latent_extend_tiles_of,
    latent_extend_tiles_of_table,
)
from rocm_attn.providers.triton_entries import (
    LIMITS,
    Ranged,
    deterministic_entry,
    range_entries,
    shared_entry,
    triton_entry,
)
from rocm_attn.providers.triton_hopper_latent import HopperLatentDecode, bind_latent_decode
from rocm_attn.providers.triton_later import triton_launches

_LIMITS = replace(
    LIMITS,
    head_dim=(1, limits.MAX_HEAD_DIM),
    v_head_dim=(1, limits.MAX_V_HEAD_DIM),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_HEADS,
    alibi=False,
    pools=(PoolKind.LATENT,),
)
_RANGED_LIMITS = replace(_LIMITS, ranges=True)


@dataclass(frozen=True, slots=True)
class LatentDecode(SplitLatents[LatentTiles], Maskable):
    """Latent decode by the kernel that serves every arch."""

    def describe(self) -> str:
        tokens = self.cut.tokens
        return f"triton.latent_decode({self.problem}, {self.tiles}, q_len={tokens.FEWEST}..{tokens.MOST})"

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        triton_launches.launch_latent_decode(args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask)


@dataclass(frozen=True, slots=True)
class LatentExtend(MaskableExtend[LatentTiles]):
    """Ragged extend over a cached prefix, for sequences with cut.min_q_len new tokens or more."""

    def describe(self) -> str:
        return f"triton.latent_extend({self.problem}, {self.tiles}, min_q_len={self.cut.min_q_len})"

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        triton_launches.launch_latent_extend(args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask)


@dataclass(frozen=True, slots=True)
class LatentSegmentDecode(CutSegmentDecode[LatentSegmentTiles]):
    """Deterministic decode over latent pages."""

    @property
    def q_rows(self) -> int:
        return self.problem.num_q_heads

    def describe(self) -> str:
        return f"triton.latent_segment_decode({self.problem}, {self.tiles}, segments={self.most_segments})"

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        triton_launches.launch_latent_segment_decode(
            args, scores=self.scores, most_segments=self.most_segments, cut=self.cut, tiles=self.tiles
        )


@dataclass(frozen=True, slots=True)
class LatentSegmentExtend(MaskableExtend[LatentSegmentTiles]):
    """Deterministic extend, for sequences with cut.min_q_len new tokens or more."""

    def describe(self) -> str:
        return f"triton.latent_segment_extend({self.problem}, {self.tiles}, min_q_len={self.cut.min_q_len})"

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        triton_launches.launch_latent_segment_extend(
            args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask
        )


def _decode(tiles: LatentTiles, problem: Problem, target: Target, *, fewest: int, most: int) -> LatentDecode:
    cut = cut_of_latents(tiles, problem, target, fewest=fewest, most=most)
    return LatentDecode(problem, scores_of(problem), tiles, cut)


def _extend(tiles: LatentTiles, problem: Problem, *, min_q_len: int) -> LatentExtend:
    cut = latent_extend_cut(tiles, num_heads=problem.num_q_heads, min_q_len=min_q_len, causal=problem.causal)
    return LatentExtend(problem, scores_of(problem), tiles, cut)


def _dims(problem: Problem) -> tuple[int, int]:
    return problem.head_dim, problem.v_head_dim


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> LatentDecode:
    return _decode(latent_decode_tiles_of(problem, target), problem, target, fewest=1, most=1)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize, fewest: int = 1) -> TritonMixed:
    """Binds extend for sequences with fewest new tokens or more."""
    most = limits.MOST_SPLIT_TOKENS
    few = _decode(latent_decode_tiles_of_table(problem, target, most), problem, target, fewest=fewest, most=most)
    return TritonMixed(few, _extend(latent_extend_tiles_of(problem, target), problem, min_q_len=most + 1))


def _mixed(bind_decode: Bind) -> Bind:
    """Returns what binds decode with kernels for the sequences that have more new tokens."""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> TritonMixed:
        return TritonMixed(bind_decode(problem, target, pool), _bind_extend(problem, target, pool, fewest=2))

    return bind


def _bind_decode_hopper(problem: Problem, target: Target, pool: PoolSize) -> HopperLatentDecode:
    return bind_latent_decode(problem, target, fewest=1, most=1)


def _bind_extend_hopper(problem: Problem, target: Target, pool: PoolSize) -> HopperLatentDecode:
    return bind_latent_decode(problem, target, fewest=1, most=limits.ANY_TOKENS)


def _bind_mixed_hopper(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    if problem.gqa_ratio >= triton_hopper_latent.DECODE_LIMITS.least_gqa_ratio:
        return _bind_extend_hopper(problem, target, pool)
    several = bind_latent_decode(problem, target, fewest=2, most=limits.ANY_TOKENS)
    return TritonMixed(_bind_decode(problem, target, pool), several)


def _bind_masked(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    most, seen = limits.MOST_SPLIT_TOKENS, problem.visibility
    extend_tiles = latent_extend_tiles_of_table(problem, target).of_masked_steps()
    if seen.windowed:
        # Keys are split by the window of a sequence's last tokens, and the window of a draft may begin before it.
        return Ranged(_extend(extend_tiles, problem, min_q_len=1), seen)
    few_tiles = latent_decode_tiles_of_table(problem, target, most).of_few_masked_tokens(target.arch)
    few = _decode(few_tiles, problem, target, fewest=1, most=most)
    return TritonMixed(Ranged(few, seen), Ranged(_extend(extend_tiles, problem, min_q_len=most + 1), seen))


def _bind_segment_decode(problem: Problem, target: Target, pool: PoolSize) -> LatentSegmentDecode:
    tiles = latent_segment_tiles(target.arch, dims=_dims(problem), dtype=problem.dtype)
    cut = cut_of_latents(tiles.decode(problem.num_q_heads), problem, target)
    most_segments = tiles.most_segments(pool.max_kv_len, problem.window_left)
    return LatentSegmentDecode(problem, scores_of(problem), tiles, cut, most_segments)


def _bind_segment_extend(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> LatentSegmentExtend:
    tiles = latent_segment_tiles(target.arch, dims=_dims(problem), dtype=problem.dtype)
    cut = latent_extend_cut(tiles.block, num_heads=problem.num_q_heads, min_q_len=min_q_len, causal=problem.causal)
    return LatentSegmentExtend(problem, scores_of(problem), tiles, cut)


def _bind_masked_segments(problem: Problem, target: Target, pool: PoolSize) -> Ranged:
    return Ranged(_bind_segment_extend(problem, target, pool), problem.visibility)


def _bind_mixed_segments(problem: Problem, target: Target, pool: PoolSize) -> TritonMixed:
    extend = _bind_segment_extend(problem, target, pool, min_q_len=2)
    return TritonMixed(_bind_segment_decode(problem, target, pool), extend)


ENTRIES = (
    triton_entry(
        "cdna_latent_decode",
        StepKind.DECODE,
        triton_cdna_latent.LIMITS,
        triton_cdna_latent.bind_decode,
        is_probed=True,
    ),
    triton_entry("hopper_latent_decode", StepKind.DECODE, triton_hopper_latent.DECODE_LIMITS, _bind_decode_hopper),
    triton_entry("latent_decode", StepKind.DECODE, _LIMITS, _bind_decode),
    # Its programs know sequences, and none has the tokens after them.
    triton_entry(
        "hopper_latent_extend", StepKind.EXTEND, triton_hopper_latent.LIMITS, _bind_extend_hopper, clears_pads=False
    ),
    triton_entry("latent_extend", StepKind.EXTEND, _LIMITS, _bind_extend),
    triton_entry(
        "hopper_latent_extend+decode",
        StepKind.MIXED,
        triton_hopper_latent.LIMITS,
        _bind_mixed_hopper,
        clears_pads=False,
    ),
    triton_entry(
        "latent_extend+cdna_latent_decode",
        StepKind.MIXED,
        triton_cdna_latent.LIMITS,
        _mixed(triton_cdna_latent.bind_decode),
        is_probed=True,
    ),
    triton_entry("latent_extend+decode", StepKind.MIXED, _LIMITS, _mixed(_bind_decode)),
    triton_entry("latent_masked", StepKind.MASKED, _RANGED_LIMITS, _bind_masked, Need.MASK),
    shared_entry("latent_shared_prefix", _LIMITS, _bind_extend, _bind_decode),
    deterministic_entry("latent_segment_decode", StepKind.DECODE, _LIMITS, _bind_segment_decode),
    deterministic_entry("latent_segment_extend", StepKind.EXTEND, _LIMITS, _bind_segment_extend),
    deterministic_entry("latent_segment_masked", StepKind.MASKED, _RANGED_LIMITS, _bind_masked_segments, Need.MASK),
    deterministic_entry("latent_segment_extend+decode", StepKind.MIXED, _LIMITS, _bind_mixed_segments),
    *range_entries("latent_ranges", _bind_masked, _LIMITS),
    *range_entries("latent_segment_ranges", _bind_masked_segments, _LIMITS, batch_invariant=True),
)

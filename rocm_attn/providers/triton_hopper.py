"""Extend for Hopper of the triton provider: its limits, and the bound kernel."""

from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import NEVER_SPLIT, ExtendCut
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.hopper import releases
from rocm_attn.kernels.tuning.hopper_tiles import (
    CODED_SEGMENT_DIMS,
    HEAD_DIMS,
    HopperTiles,
    hopper_segment_tiles,
)
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.cut_kernels import MaskableExtend
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import extend_cut, hopper_tiles_of
from rocm_attn.providers.triton_entries import LIMITS as ANY_LIMITS
from rocm_attn.providers.triton_later import hopper_launches

# For smaller heads the columns of zeros cost more than the kernel gains. 48 x 4 heads of 24, 7 x 707..1299 new of as
# many: 137 us, the plain kernel 119. 120 x 12 of 40, 6 x 291..809: 164 and 175. 4 x 2 of 48, 8 x 179..480: 17 and 24.
MIN_HEAD_DIM = 40

TRITONS = tuple(map(Release.of, releases.TRITONS))

LIMITS = replace(
    ANY_LIMITS,
    archs=("sm_90",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dim=(MIN_HEAD_DIM, max(HEAD_DIMS)),
    v_head_dim=(MIN_HEAD_DIM, max(HEAD_DIMS)),
    # Rows of K and V begin at addresses that TMA and 16-byte copies support.
    dim_step=8,
    # A step of 128 keys is long for a short window. 4096 new, windows of 256 and 512: 64 x 8 heads of 64 take 102
    # and 138 us, the plain kernel 95 and 145; 32 x 8 of 96 67 and 85, 63 and 96; 40 x 8 of 128 98 and 121, 98 and 143;
    # 16 x 8 of 256 70 and 94, 76 and 118. Deterministic, of 512: 150 and 182, 108 and 113, 114 and 137 (32 x 16), 116
    # and 205 (H200).
    least_window=512,
    alibi=False,
    page_strides=False,
    # In dense pages all rows begin at such addresses if these do: see dim_step.
    aligned_sides=True,
    even_slots=True,
    encodings=(KVEncoding.LIKE_Q, KVEncoding.E4M3FN, KVEncoding.E5M2),
    # TMA steps from head to head by multiples of 16 bytes.
    coded_dim_step=16,
    # TMA swizzles eight rows at a time, and codes are not gathered.
    coded_page_sizes=(8, 16, 32, 64, 128),
    tritons=TRITONS,
)

# One new token of this number of query heads fills more than half of a query block: 128 heads of 256 on a KV head, 38 x
# 2900: 62 us, decode 79; of 192, 38 x 4k: 55 and 82; of 128, 64 x 4k: 52 and 64; of 112, 64 x 2k: 36 and 43; of 96: 34
# and 30. 80 heads of 256: 59 and 71; 64, 38 x 4k: 64 and 61 (H200).
DECODE_LIMITS = replace(
    LIMITS,
    head_dim=(112, max(HEAD_DIMS)),
    v_head_dim=(112, max(HEAD_DIMS)),
    dims_alike=True,
    least_gqa_ratio=65,
    encodings=(KVEncoding.LIKE_Q,),
    scales=(Scales.NONE,),
)

# The limits of steps whose tokens each see a range of keys.
RANGED_LIMITS = replace(LIMITS, ranges=True)

SEGMENT_LIMITS = replace(LIMITS, most_coded_dim=max(map(max, CODED_SEGMENT_DIMS)))

RANGED_SEGMENT_LIMITS = replace(SEGMENT_LIMITS, ranges=True)


@dataclass(frozen=True, slots=True)
class HopperExtend(MaskableExtend[HopperTiles]):
    """Ragged extend over a cached prefix, for sequences with cut.min_q_len new tokens or more."""

    def describe(self) -> str:
        programs = self.cut.sharing.programs
        name = "hopper_segment_extend" if self.tiles.segment_len else "hopper_extend"
        return f"triton.{name}({self.problem}, {self.tiles}, min_q_len={self.cut.min_q_len}, programs={programs})"

    def workspace_words(self, shape: PaddedShape) -> int:
        if self.tiles.segment_len:
            return self.tiles.segment_words(programs=self.cut.sharing.programs, v_head_dim=self.problem.v_head_dim)
        return self.cut.partials_words(query_rows=self.tiles.extend.query_rows, v_head_dim=self.problem.v_head_dim)

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        hopper_launches.launch_hopper_extend(args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask)


def bind_extend(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> HopperExtend:
    """Binds extend for a problem within RANGED_LIMITS, and sequences with min_q_len new tokens or more."""
    tiles = _launched_early(hopper_tiles_of(problem, target), min_q_len)
    return HopperExtend(problem, scores_of(problem), tiles, _cut(problem, target, tiles, min_q_len))


def _launched_early(tiles: HopperTiles, min_q_len: int) -> HopperTiles:
    """The tiles of steps in which nothing else runs; the decode of a mixed step would start late.

    16 x 1 heads of 128, 777 new of 5778: 62 us, 64 without. In a mixed step, 96 x 4 of 224, 31 x 1..150 new of
    150..337: 41.5 us launched early and 40.4 not, deterministic 48 and 44 (H200).
    """
    return replace(tiles, extend=replace(tiles.extend, early=min_q_len == 1))


def filled(extend: HopperExtend, target: Target) -> HopperExtend:
    """The same kernel with query blocks of fewer query heads per KV head, for sequences with many new tokens.

    96 query heads of 72 on 2 KV heads, 4 x 1310 new: 357 us, 454 without, of whose blocks a quarter is empty; 80 of 64
    on 8, 1 x 2048 new + 6144 cached: 668 and 729 (H200).
    """
    tiles = replace(extend.tiles, extend=replace(extend.tiles.extend, fills=True))
    return replace(extend, tiles=tiles, cut=_cut(extend.problem, target, tiles, extend.cut.min_q_len))


def bind_segment_extend(problem: Problem, target: Target, min_q_len: int = 1, *, ranged: bool = False) -> HopperExtend:
    """Binds deterministic extend for a problem within SEGMENT_LIMITS. Programs share rows by whole segments.

    ranged: whether tokens each see a range of keys, within RANGED_SEGMENT_LIMITS
    """
    # A span may reach any number of segments beyond the keys that shares are cut by, and each would take a part.
    split_keys = NEVER_SPLIT if ranged else 256
    coded = problem.kv_encoding is not KVEncoding.LIKE_Q
    tiles = hopper_segment_tiles(problem.head_dim, problem.v_head_dim, problem.page_size, coded=coded)
    tiles = _launched_early(tiles, min_q_len)
    cut = _cut(problem, target, tiles, min_q_len).by_segments(
        tiles.segment_len, most_segments=tiles.most_segments, split_keys=split_keys, shares_first=False
    )
    return HopperExtend(problem, scores_of(problem), tiles, cut)


def _cut(problem: Problem, target: Target, tiles: HopperTiles, min_q_len: int) -> ExtendCut:
    return extend_cut(problem, target, tiles.extend, causal=problem.causal, min_q_len=min_q_len)

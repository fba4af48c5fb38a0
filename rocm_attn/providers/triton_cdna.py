"""Decode and extend for CDNA of the triton provider: their limits, and the bound kernels."""

from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.cdna_tiles import (
    ARCHS,
    CHUNK,
    EXTEND_ARCHS,
    EXTEND_HEADS,
    EXTEND_TILES,
    HEAD_DIMS,
    ROWS,
    extend_heads,
)
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.tiles import CdnaTiles, ExtendTiles, NoTiles
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.by_tokens import ANY_TOKENS, KernelByTokens, ServedSteps, SizedKernel
from rocm_attn.providers.contract import BoundKernel, Limits, PoolSize, StepBounds
from rocm_attn.providers.cut_kernels import CutDecode, CutExtend
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import cdna_tiles_of, decode_cut_of, measured_choice
from rocm_attn.providers.triton_later import cdna_launches

# Releases of Gluon, in which the kernels are written, change. These have passed their tests, and the static figures
# show a gain with them. With 3.6.0 decode is right in the simulator too, but page numbers are vector loads, and a key
# takes 9.5 clocks to issue where paged decode takes 8.5 (gfx942, heads of 128).
TRITONS = (Release.of("3.9.0"),)

LIMITS = Limits(
    archs=ARCHS,
    dtypes=(torch.bfloat16, torch.float16),
    head_dim=(min(HEAD_DIMS), max(HEAD_DIMS)),
    v_head_dim=(min(HEAD_DIMS), max(HEAD_DIMS)),
    exact_dims=tuple((dim, dim) for dim in HEAD_DIMS),
    # A chunk of keys belongs to one page.
    page_size=(CHUNK, limits.MAX_PAGE_SIZE),
    page_sizes=(16, 32, 64, 128),
    encodings=(KVEncoding.LIKE_Q, KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ),
    scales=(Scales.NONE, Scales.LAYER, Scales.HEAD, Scales.TOKEN),
    max_gqa_ratio=ROWS,
    window=True,
    soft_cap=True,
    sinks=True,
    non_causal=True,
    short_kv=True,
    page_strides=True,
    aligned_rows=True,
    tritons=TRITONS,
)

# A block of keys lies in whole pages, or in one. Smaller pages than decode's were not tested.
EXTEND_LIMITS = replace(
    LIMITS,
    archs=EXTEND_ARCHS,
    head_dim=(64, 192),
    v_head_dim=(64, 128),
    exact_dims=tuple(EXTEND_HEADS),
    scales=(Scales.NONE, Scales.LAYER, Scales.HEAD),
    max_gqa_ratio=limits.MAX_GQA_RATIO,
    soft_cap=False,
    sinks=False,
    # By clocks (docs/cycles.md) whole blocks take 0.57 of the plain kernel's time. Those at a window's two edges, up to
    # four in 512 keys, take about as long as there.
    least_window=512,
)

# Decode for CDNA serves the other sequences of mixed steps.
MIXED_LIMITS = replace(
    EXTEND_LIMITS,
    head_dim=(64, 128),
    exact_dims=((64, 64), (128, 128)),
    max_gqa_ratio=LIMITS.max_gqa_ratio,
)

# A compute unit runs one program of extend at a time, and a program has one query block of one row of heads. From two
# programs per unit on, those with equally many keys keep the units busy for two thirds of the time or more: of n units,
# 2 n + 1 programs take as long as 3 n. Two thirds of its share of the matrix units' ceiling, about 90 %, are the share
# of the plain kernel, 60 %, which shares all keys out evenly (docs/cycles.md). With heads of 64 in 16 bits it takes
# three quarters of that kernel's clocks, so there are to be four programs per unit.
_PROGRAMS_PER_CU = 2
_PROGRAMS_PER_CU_OF_64 = 4


@dataclass(frozen=True, slots=True)
class CdnaDecode(CutDecode[CdnaTiles]):
    """Split-KV decode of sequences with one new token; other sequences are skipped."""

    arch: str

    def describe(self) -> str:
        return f"triton.cdna_decode({self.problem}, {self.arch}, {self.tiles}, programs={self.cut.programs})"

    def workspace_words(self, shape: PaddedShape) -> int:
        problem = self.problem
        return self.cut.partials_words(gqa_ratio=problem.gqa_ratio, v_head_dim=problem.v_head_dim, tiles=self.tiles)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        cdna_launches.launch_cdna_decode(args, arch=self.arch, scores=self.scores, cut=self.cut, tiles=self.tiles)


def bind_decode(problem: Problem, target: Target, pool: PoolSize) -> CdnaDecode:
    """Binds decode for a problem within LIMITS. Raises NoTiles, also if the layer has measured paged-decode tiles."""
    if measured_choice(TileTable.DECODE, problem, target) is not None:
        raise NoTiles(
            "tiles of triton.decode were measured for this layer on such a GPU; those of triton.cdna_decode were "
            "not measured, or were slower"
        )
    tiles = cdna_tiles_of(problem, target)
    cut = decode_cut_of(problem, target, tiles)
    return CdnaDecode(problem, scores_of(problem), tiles, cut, target.arch)


@dataclass(frozen=True, slots=True)
class CdnaExtend(CutExtend[ExtendTiles]):
    """Ragged extend of whole rows over a cached prefix, for sequences with cut.min_q_len new tokens or more."""

    arch: str

    def describe(self) -> str:
        return f"triton.cdna_extend({self.problem}, {self.arch}, {self.tiles}, min_q_len={self.cut.min_q_len})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        cdna_launches.launch_cdna_extend(args, arch=self.arch, scores=self.scores, cut=self.cut)


def bind_extend(problem: Problem, target: Target, plain: BoundKernel, min_q_len: int = 1) -> KernelByTokens:
    """Binds extend for a problem within EXTEND_LIMITS, and sequences with min_q_len new tokens or more. Raises NoTiles.

    plain: serves any step; steps of too few programs (_PROGRAMS_PER_CU), and those whose sequences are likely to fill
           less of a query block than such programs of the units' time, stay with it
    """
    encoding = problem.kv_encoding.over(problem.dtype)
    extend_heads(target.arch, head_dim=problem.head_dim, v_head_dim=problem.v_head_dim, encoding=encoding)
    cut = ExtendCut.of(EXTEND_TILES, gqa_ratio=problem.gqa_ratio, min_q_len=min_q_len, causal=problem.causal)
    programs_of_block = problem.num_kv_heads * EXTEND_TILES.head_blocks(problem.gqa_ratio)
    per_unit = _PROGRAMS_PER_CU_OF_64 if problem.head_dim == 64 and not encoding.is_fp8 else _PROGRAMS_PER_CU
    least_blocks = -(-per_unit * target.compute_units // programs_of_block)
    fewer, other = (plain.short, plain.other) if isinstance(plain, KernelByTokens) else ((), plain)
    left_to_it = (
        SizedKernel(ServedSteps(per_unit * cut.query_tokens // (per_unit + 1)), other),
        SizedKernel(ServedSteps(ANY_TOKENS, max_tokens=least_blocks * cut.query_tokens - 1), other),
    )
    return KernelByTokens(
        (*fewer, *left_to_it), CdnaExtend(problem, scores_of(problem), EXTEND_TILES, cut, target.arch)
    )

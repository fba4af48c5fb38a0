"""Decode for CDNA of the triton provider: its limits, and the bound kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.cdna_tiles import ARCHS, CHUNK, HEAD_DIMS, ROWS
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.tiles import CdnaTiles, NoTiles
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import Limits, PoolSize, StepBounds
from rocm_attn.providers.cut_kernels import CutDecode
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import cdna_tiles_of, decode_cut_of, measured_choice
from rocm_attn.providers.triton_later import cdna_launches

# Releases of Gluon, in which the kernel is written, change. These have passed its tests, and the static figures show a
# gain with them. With 3.6.0 it is right in the simulator too, but page numbers are vector loads, and a key takes 9.5
# clocks to issue where paged decode takes 8.5 (gfx942, heads of 128).
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

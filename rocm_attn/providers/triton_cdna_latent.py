"""Decode over latent pages for CDNA of the triton provider: its limits, and the bound kernel."""

from dataclasses import dataclass

import torch

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.latent import limits
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS, EXTEND_CODES
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles, cdna_latent_tiles
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import Limits, PoolSize, StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.split_latents import SplitLatents, cut_of_latents
from rocm_attn.providers.tiles import measured_choice
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_attn.providers.triton_later import cdna_launches

LIMITS = Limits(
    archs=EXTEND_ARCHS,
    dtypes=(torch.bfloat16, torch.float16),
    head_dim=(limits.MAX_HEAD_DIM, limits.MAX_HEAD_DIM),
    v_head_dim=(limits.MAX_V_HEAD_DIM, limits.MAX_V_HEAD_DIM),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_HEADS,
    pools=(PoolKind.LATENT,),
    encodings=(KVEncoding.LIKE_Q, KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ),
    scales=(Scales.NONE, Scales.LAYER),
    non_causal=True,
    short_kv=True,
    page_strides=True,
    aligned_rows=True,
    tritons=TRITONS,
)


@dataclass(frozen=True, slots=True)
class CdnaLatentDecode(SplitLatents[LatentTiles]):
    """Latent decode of one new token by CDNA's own kernel."""

    arch: str

    def describe(self) -> str:
        return f"triton.cdna_latent_decode({self.problem}, {self.arch}, programs={self.cut.programs})"

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        cdna_launches.launch_cdna_latent_decode(args, arch=self.arch, scores=self.scores, cut=self.cut)


def check_codes(problem: Problem, target: Target) -> None:
    """Raises NoTiles for codes that the arch's hardware does not read."""
    encoding = problem.kv_encoding.over(problem.dtype)
    if encoding.is_fp8 and encoding is not EXTEND_CODES[target.arch]:
        codes = EXTEND_CODES[target.arch].value
        raise NoTiles(f"it reads codes of {codes} on {target.arch}, not of {encoding.value}")


def bind_decode(problem: Problem, target: Target, pool: PoolSize) -> CdnaLatentDecode:
    """Binds decode for a problem within LIMITS.

    Raises NoTiles for codes that the arch's hardware does not read, for q in float16 over codes, or if the layer has
    measured tiles of latent decode.
    """
    check_codes(problem, target)
    encoding = problem.kv_encoding.over(problem.dtype)
    if encoding.is_fp8 and problem.dtype != torch.bfloat16:
        raise NoTiles(f"over codes it serves q in {torch.bfloat16}, not in {problem.dtype}")
    if measured_choice(TileTable.LATENT_DECODE, problem, target) is not None:
        raise NoTiles(
            "tiles of triton.latent_decode were measured for this layer on such a GPU; those of "
            "triton.cdna_latent_decode were not"
        )
    tiles = cdna_latent_tiles(problem.num_q_heads, problem.page_size, is_coded=encoding.is_fp8)
    cut = cut_of_latents(tiles, problem, target)
    return CdnaLatentDecode(problem, scores_of(problem), tiles, cut, target.arch)

"""Decode over latent pages for Hopper of the triton provider: its limits, and the bound kernel."""

from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.latent import limits
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.latent_tiles import HOPPER_LATENT_TILES, HopperLatentTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.contract import Limits, StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.split_latents import SplitLatents, cut_of_latents
from rocm_attn.providers.tiles import hopper_latent_tiles_of
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.providers.triton_later import hopper_launches

LIMITS = Limits(
    archs=("sm_90",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dim=(limits.MAX_HEAD_DIM, limits.MAX_HEAD_DIM),
    v_head_dim=(limits.MAX_V_HEAD_DIM, limits.MAX_V_HEAD_DIM),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_HEADS,
    pools=(PoolKind.LATENT,),
    non_causal=True,
    short_kv=True,
    # Rows are copied by 16 bytes.
    aligned_sides=True,
    tritons=TRITONS,
    # With 8 new tokens the plain kernel's blocks hold 32 rows if there are fewer heads.
    least_gqa_ratio=5,
)

# For one token. With 16 heads, 128 x 4k, the plain kernel reads at the speed of memory.
DECODE_LIMITS = replace(LIMITS, least_gqa_ratio=17)


@dataclass(frozen=True, slots=True)
class HopperLatentDecode(SplitLatents[HopperLatentTiles]):
    """Latent decode by Hopper's own kernel."""

    def describe(self) -> str:
        tokens = self.cut.tokens
        return f"triton.hopper_latent_decode({self.problem}, {self.tiles}, q_len={tokens.FEWEST}..{tokens.MOST})"

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        hopper_launches.launch_hopper_latent_decode(args, scores=self.scores, cut=self.cut, tiles=self.tiles)


def bind_latent_decode(problem: Problem, target: Target, *, fewest: int, most: int) -> HopperLatentDecode:
    """Binds decode for a problem within LIMITS, and sequences with fewest to most new tokens."""
    tiles = hopper_latent_tiles_of(problem, target) if most == 1 else HOPPER_LATENT_TILES
    cut = cut_of_latents(tiles.latent, problem, target, fewest=fewest, most=most)
    return HopperLatentDecode(problem, scores_of(problem), tiles, cut)

"""The base of kernels over latent pages that split a sequence's keys over programs, on any arch."""

from dataclasses import dataclass

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.latent.cuts import latent_decode_cut, latent_partials_words
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.cut_kernels import CutDecode, Tiles


@dataclass(frozen=True, slots=True)
class SplitLatents(CutDecode[Tiles]):
    """Attention of sequences with as many new tokens as the cut allows; other sequences are skipped."""

    def workspace_words(self, shape: PaddedShape) -> int:
        problem = self.problem
        return latent_partials_words(self.cut, num_heads=problem.num_q_heads, v_head_dim=problem.v_head_dim)


def cut_of_latents(
    tiles: LatentTiles, problem: Problem, target: Target, *, fewest: int = 1, most: int = 1
) -> DecodeCut:
    """The cut of sequences with fewest to most new tokens, over all of the target's compute units."""
    return latent_decode_cut(
        tiles,
        num_heads=problem.num_q_heads,
        compute_units=target.compute_units,
        window_left=problem.window_left,
        fewest=fewest,
        most=most,
    )

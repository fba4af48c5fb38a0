"""Decodes over latent pages for CDNA, for the simulator and for a GPU. Memory that no sequence sees is NaN."""

import math
from dataclasses import replace

import torch

from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.kernels.tuning.latent_tiles import cdna_latent_tiles
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_later import cdna_launches
from tests.amd.kernels.attention_cases import Case, Tensors, build
from tests.amd.kernels.latent_cases import latent_decode_args

# A row that several programs share, new tokens that decode does not serve, no new token, no key, one key, a whole block
# and one key more.
PLAIN = Case(
    [700, 20, 17, 0, 0, 65, 1, 64],
    [1, 9, 1, 0, 1, 1, 1, 1],
    heads=(16, 1),
    dims=(576, 512),
    dtype=torch.bfloat16,
    page_size=64,
    latent=True,
    tail=2,
    spread=True,
)
SMALL = replace(PLAIN, kv_len=[90, 33], q_len=[1, 1], tail=0)
CASES = {
    "plain": PLAIN,
    "tokens": replace(PLAIN, page_size=1, dtype=torch.float16),
    # Maxima that rise from block to block scale what was added before.
    "steep": replace(PLAIN, page_size=16, heads=(10, 1), steep=16.0, spread=False),
    "heads_of_4_tiles": replace(PLAIN, heads=(64, 1), tail=1),
    "heads_of_2_tiles": replace(PLAIN, heads=(20, 1), page_size=1, dtype=torch.float16, spread=False),
    "steep_heads": replace(PLAIN, page_size=16, heads=(37, 1), steep=16.0),
    # The programs of a token have 50 heads each.
    "blocks_of_heads": replace(PLAIN, page_size=24, heads=(100, 1)),
    "to_all": replace(PLAIN, page_size=48, heads=(1, 1), window_right=UNLIMITED_WINDOW),
}
_CODES = {
    "codes": replace(PLAIN, spread=False),
    "codes_of_4_tiles": replace(PLAIN, page_size=16, heads=(64, 1), steep=16.0, spread=False),
    "codes_of_tokens": replace(PLAIN, page_size=1, heads=(20, 1)),
}
# Pages next to each other, at the end of large pools.
LARGE = replace(SMALL, page_size=16, spread=False)


def cases_of(arch: str) -> dict[str, Case]:
    """The cases, and those over the codes that the arch's hardware reads."""
    return CASES | {name: coded(case, arch) for name, case in _CODES.items()}


def coded(case: Case, arch: str) -> Case:
    """A case over codes with a scale of the layer."""
    return replace(case, kv=EXTEND_CODES[arch], scales=Scales.LAYER)


def after_a_large_weight(arch: str, device: torch.device, heads: int = 16) -> Tensors:
    """A row over codes whose first key has nearly all weight, and a value of 0 like the other keys of its block.

    The others have 2^-19 of that weight each, and values of 224: E4M3 has no such small numbers next to 1. Columns of K
    that are not V's make the scores.
    """
    length, first_with_value, value, code = 300, 128, 224.0, 5.0
    tensors = build(coded(replace(PLAIN, kv_len=[length], q_len=[1], heads=(heads, 1), tail=0), arch), device)
    assert tensors.pages.k_scale is not None
    assert tensors.pages.v_scale is not None
    tensors.pages.k_scale.fill_(1.0)
    tensors.pages.v_scale.fill_(1.0)
    dim, v_dim = tensors.case.dims
    tensors.q[..., :v_dim], tensors.q[..., v_dim:] = 0.0, 1.0
    for key in range(length):
        place = int(tensors.table[tensors.row_of_seq[0], key // PLAIN.page_size]), key % PLAIN.page_size
        tensors.k_pages[place][..., :v_dim] = value if key >= first_with_value else 0.0
        tensors.k_pages[place][..., v_dim:] = code if key == 0 else 0.0
    total = math.exp((dim - v_dim) * code / dim**0.5) + length - 1
    tensors.reference.fill_((length - first_with_value) * value / total)
    tensors.reference_lse.fill_(math.log(total))
    return tensors


def launch_cdna_latent(arch: str, tensors: Tensors, compute_units: int = 3) -> None:
    """Runs schedule, decode and merge, with scratch memory of NaN or garbage."""
    case = tensors.case
    tiles = cdna_latent_tiles(tensors.q.shape[1], case.page_size, is_coded=case.kv is not None)
    args, cut = latent_decode_args(tensors, tiles, compute_units=compute_units)
    launch_decode_schedule(tensors.queries, args.schedule, cut)
    cdna_launches.launch_cdna_latent_decode(args, arch=arch, scores=tensors.scores, cut=cut)

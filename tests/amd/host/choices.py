"""Kernels of one layer, as they are chosen for a GPU that is not here."""

from dataclasses import replace

import torch

from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import Problem
from rocm_attn.providers.select import Selection
from rocm_attn.providers.triton_cdna import TRITONS

LAYER = Problem(32, 8, 128, torch.bfloat16, v_head_dim=128, page_size=16, scale=128**-0.5)


def with_triton(arch: str, triton: Release = TRITONS[-1]) -> Target:
    return replace(known_target(arch), releases=Releases(triton=triton))


def reasons(selection: Selection, name: str) -> set[str]:
    """Returns why a kernel does not serve."""
    return {refusal.reason for refusal in selection.refusals if refusal.kernel == name}


def adopting(target: Target, **options: bool) -> ExternalAttention:
    """Returns attention over an engine's pages of one layer, as in a plug-in."""
    return ExternalAttention(
        [LayerSource(replace(LAYER, num_q_heads=8, num_kv_heads=2))],
        TableSource(torch.zeros(4, 4, dtype=torch.int32), null_page=True),
        device=torch.device("cpu"),
        bounds=Bounds(num_seqs=4, num_tokens=8, kv_len=64, num_pages=5),
        options=ExternalOptions(provider="triton", **options),  # type: ignore[arg-type]
        target=target,
    )

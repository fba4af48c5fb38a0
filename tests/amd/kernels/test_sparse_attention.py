"""Attention over a selection: each token sees the listed tokens up to its own, and nothing else."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.sparse.cuts import selected_cut
from rocm_attn.kernels.tuning.sparse_tiles import selected_tiles
from tests.amd.kernels.sparse_cases import SelectedCase, SelectedProblem, Step, arch_of, build_selected

STEP = Step([50, 1, 33, 90], [3, 1, 1, 20], tail=2)
CASES = {
    "tokens": SelectedCase(STEP),
    "a_set_for_each_kv_head": SelectedCase(STEP, sets=2, sinks=True),
    "blocks": SelectedCase(STEP, unit_tokens=4, dims=(24, 40), heads=(6, 2)),
    "dense": SelectedCase(STEP, dense=True, width=90, sinks=True),
    "latent": SelectedCase(STEP, heads=(4, 1), dims=(48, 32), latent=True, sinks=True),
    "latent_without_a_rotated_part": SelectedCase(STEP, heads=(4, 1), dims=(32, 32), latent=True),
    "token_scales": SelectedCase(STEP, encoding=Encoding.E4M3FN, scales=Scales.TOKEN),
    "head_scales": SelectedCase(STEP, encoding=Encoding.E5M2, scales=Scales.HEAD, sets=2),
    "latent_scales": SelectedCase(
        STEP, heads=(4, 1), dims=(48, 32), latent=True, encoding=Encoding.E4M3FN, scales=Scales.LAYER
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_the_twin_is_right(case: SelectedCase, kernel_device: torch.device) -> None:
    problem = build_selected(case, kernel_device)
    selected_attention(problem.args, scale=problem.scale)
    problem.assert_served()


def attended(problem: SelectedProblem, programs: int) -> None:
    """launch_selected_attention with the device's tiles."""
    args, case = problem.args, problem.case
    tiles = selected_tiles(
        arch_of(args.q.device),
        gqa_ratio=args.heads[1],
        head_dim=case.dims[0],
        v_head_dim=case.dims[1],
        dtype=case.dtype,
    )
    cut = selected_cut(len(args.q), case.width * case.unit_tokens, heads=args.heads, tiles=tiles, programs=programs)
    workspace = torch.empty(cut.words(len(args.q), case.dims[1]), device=args.q.device)
    launch_selected_attention(args._replace(workspace=workspace), scale=problem.scale, tiles=tiles, programs=programs)
    problem.assert_served()


@every_case
def test_every_token_sees_its_selection(case: SelectedCase, kernel_device: torch.device) -> None:
    attended(build_selected(case, kernel_device), programs=1)
    attended(build_selected(case, kernel_device), programs=200)

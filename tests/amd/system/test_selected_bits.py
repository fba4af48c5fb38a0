"""A selection of all keys gives the bits of deterministic attention to all keys, on a GPU and by its own tiles.

Contexts are longer than a segment. Under the interpreter tests/amd/runtime/test_sparse_steps.py shows it in small.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.options import RuntimeOptions

pytestmark = pytest.mark.gpu

ALL_OF_THEM = Indexer(4, 64, Indexing(0.125, top=4096))
DENSE = Problem(16, 4, 128, torch.bfloat16, 64, v_head_dim=128, scale=128**-0.5, indexer=ALL_OF_THEM)
LATENT = Problem(
    16, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT, indexer=ALL_OF_THEM
)
# New tokens of two sequences: prompts, chunks, decode steps.
STEPS = ([2300, 500], [400, 77], [1, 1], [9, 1], [1, 1])


def coded(problem: Problem, scales: Scales) -> Problem:
    """The layer in eight bits."""
    return replace(problem, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales)


LAYERS = {
    "heads of 128": DENSE,
    "heads of 64": replace(DENSE, num_q_heads=64, num_kv_heads=8, head_dim=64, v_head_dim=64, has_sinks=True),
    "heads of 256": replace(DENSE, num_q_heads=8, num_kv_heads=2, head_dim=256, v_head_dim=256),
    "codes by layer": coded(DENSE, Scales.LAYER),
    "codes by token": coded(DENSE, Scales.TOKEN),
    "latents of DeepSeek-V3.2": LATENT,
    "latents, 128 heads": replace(LATENT, num_q_heads=128),
    "latents, 12 heads": replace(LATENT, num_q_heads=12),
    "latents of 512": replace(LATENT, head_dim=512),
    "latents in codes by layer": coded(LATENT, Scales.LAYER),
    "latents in codes by token": coded(LATENT, Scales.TOKEN),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_all_keys_selected_give_the_bits_of_all_keys(kind: str, device: torch.device) -> None:
    problem = LAYERS[kind]
    options = RuntimeOptions(
        num_pages=100, max_num_seqs=2, max_kv_len=3072, provider="triton", deterministic=True, capture_sizes=(2,)
    )
    runtime = build_runtime([problem], options, device=device)
    if problem.kv_scales is Scales.LAYER:
        runtime.set_kv_scales(0, KVScales(0.02, 0.02))
    runtime.head_weights.set(0, HeadWeights.random(problem, torch.Generator().manual_seed(1)).to(device))
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(problem.dtype)

    rows, lengths = [runtime.table.admit() for _ in range(2)], [0, 0]
    for q_len in STEPS:
        lengths = [length + new for length, new in zip(lengths, q_len, strict=True)]
        for row, length in zip(rows, lengths, strict=True):
            runtime.table.reserve(row, length)
        step = runtime.step(StepBatch(rows, lengths, q_len, NO_TOKEN_IDS)).parts[0]
        tokens, used = len(step.token_ids), sum(q_len)
        q, k = (
            random(tokens, problem.num_q_heads, problem.head_dim),
            random(tokens, problem.num_kv_heads, problem.head_dim),
        )
        is_latent = problem.pool is PoolKind.LATENT
        v = k[..., : problem.v_head_dim] if is_latent else random(tokens, problem.num_kv_heads, problem.v_head_dim)
        chosen, dense = (q.new_empty(tokens, problem.num_q_heads, problem.v_head_dim) for _ in range(2))
        step.layers.store(0, k, v)
        step.layers.store_index(0, random(tokens, 64))
        step.layers.select(0, random(tokens, 4, 64), torch.rand(tokens, 4, device=device))
        step.layers.attend_selected(0, q, chosen)
        step.layers.attend(0, q, dense)
        runtime.end_step()
        apart = (chosen[:used] != dense[:used]).flatten(1).any(1)
        assert dense[:used].isfinite().all()
        assert not apart.any(), f"{int(apart.sum())} of {used} tokens, the first one {int(apart.nonzero()[0])}"
    runtime.check_device()

"""A model of one layer, served with graphs and eagerly, on the stand-in or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.aiter.serving import CPU, GFX942
from tests.amd.graphs.small_models import VOCABULARY
from tests.amd.worlds.world import runtime_of

# Prompts, decode steps, chunks over a prefix, mixed steps, and lengths of several buckets.
STEPS = [[5, 2, 7], [1, 1, 1], [1, 1], [2, 9, 3], [1, 1, 1], [1, 4, 1], [70, 3, 2], [1, 1, 1], [1, 1]]


@dataclass
class OneLayer:
    """One layer of attention over random rows. `forward` returns the layer's output."""

    runtime: AttentionRuntime
    problem: Problem
    rows: Tensor

    @classmethod
    def build(
        cls,
        problem: Problem,
        device: torch.device = CPU,
        target: Target = GFX942,
        selections: Sequence[Selection] | None = None,
    ) -> OneLayer:
        options = RuntimeOptions(
            num_pages={1: 600, 1024: 12}.get(problem.page_size, 100),
            max_num_seqs=4,
            max_kv_len=256,
            provider="aiter",
            capture_sizes=(1, 2, 4),
            capture_tokens=(8, 16, 96),
            split_steps=True,
        )
        runtime = runtime_of([problem], options, device, target, selections)
        runtime.pool.layer(0).fill_nan(slice(1, None))
        runtime.head_weights.set(0, HeadWeights.random(problem, torch.Generator().manual_seed(2)).to(runtime.device))
        width = (problem.num_q_heads + 2 * problem.num_kv_heads) * problem.head_dim
        rows = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(1))
        return cls(runtime, problem, rows.to(runtime.device, problem.dtype))

    def forward(self, step: Part) -> Tensor:
        """Returns [S, q_heads * v_head_dim]."""
        problem = self.problem
        rows = (self.rows[step.token_ids] * (1 + step.positions[:, None] / 100)).to(problem.dtype)
        heads = rows.view(len(rows), -1, problem.head_dim)
        q, k, v = torch.split(heads, [problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads], dim=1)
        if problem.pool is PoolKind.LATENT:
            v = k[..., : problem.v_head_dim]
        out = rows.new_empty(len(rows), problem.num_q_heads, problem.v_head_dim)
        step.layers.store_and_attend(0, q, k, v, out)
        return out.flatten(1)[step.last_token_of_seq]

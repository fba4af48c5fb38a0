"""Setting: the runtime that a seed drives, as values drawn from its random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rocm_attn.problem import PoolKind, Problem
from rocm_attn.step.options import RuntimeOptions

Chance = random.Random


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments that a runtime is built from.

    calm: whether memory never runs out and no one interrupts, so that every fault needs an explanation
    """

    problems: list[Problem]
    options: RuntimeOptions
    has_graphs: bool
    checks_graphs: bool
    calm: bool

    @classmethod
    def random(cls, rng: Chance, device: torch.device) -> Setting:
        """Tiny on a CPU. On a GPU of few head sizes and page sizes, so that kernels are compiled for few of them."""
        on_gpu = device.type == "cuda"
        page_size = rng.choice((4, 16) if on_gpu else (1, 2, 3, 4, 4, 5, 8, 16, 32))
        dtype = rng.choice((torch.float32, torch.bfloat16)) if on_gpu else _cpu_dtype(rng)
        deterministic = rng.random() < 0.15
        latent = not on_gpu and not deterministic and rng.random() < 0.06
        kinds = [
            _problem(rng, dtype, page_size, on_gpu, latent, masks=not deterministic)
            for _ in range(rng.choice((1, 1, 2)))
        ]
        problems = [rng.choice(kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
        # Graphs of kernels that bake a length are made anew from 64 and 128 tokens on.
        is_long = page_size >= 4 and rng.random() < 0.2
        max_num_seqs, max_kv_len = rng.randint(2, 6), rng.randint(90, 180) if is_long else rng.randint(8, 56)
        width = -(-max_kv_len // page_size)
        has_window = any(problem.window_left >= 0 for problem in problems)
        swa_pages = 1 + rng.randint(width, width * max_num_seqs) if has_window and rng.random() < 0.7 else 0
        first_swa_page = 1
        num_pages = 1 + rng.randint(max(2, width), 1 + int(width * max_num_seqs * 1.1))
        if swa_pages and rng.random() < 0.5:
            first_swa_page, swa_pages = num_pages, num_pages + swa_pages
        has_graphs = rng.random() < 0.6
        options = RuntimeOptions(
            num_pages=num_pages,
            swa_pages=swa_pages,
            swa_kept=rng.choice((0, 0, 2, 5)),
            first_swa_page=first_swa_page,
            max_num_seqs=max_num_seqs,
            max_num_rows=rng.choice((0, 0, max_num_seqs + 1, max_num_seqs + 3)),
            max_kv_len=max_kv_len,
            provider=rng.choice(("triton", "auto")) if on_gpu else "torch",
            capture_sizes=random_ladder(rng, max_num_seqs + 3),
            capture_tokens=rng.choice(((1,), (1,), (8,), (4, 16))),
            split_steps=rng.random() < 0.4,
            shared_prefixes=rng.random() < 0.4,
            deterministic=deterministic,
        )
        return cls(problems, options, has_graphs, checks_graphs=rng.random() < 0.4, calm=rng.random() < 0.5)


def random_ladder(rng: Chance, largest: int) -> tuple[int, ...]:
    """One to three sizes."""
    return tuple(sorted(rng.sample(range(1, largest + 1), rng.choice((1, 2, 2, 3)))))


def _cpu_dtype(rng: Chance) -> torch.dtype:
    return rng.choice((torch.float32,) * 6 + (torch.float16, torch.bfloat16))


def _problem(rng: Chance, dtype: torch.dtype, page_size: int, on_gpu: bool, latent: bool, masks: bool) -> Problem:
    kv_heads = 1 if latent else rng.choice((1, 2))
    head_dim = rng.choice((32, 64)) if on_gpu else rng.choice((2, 4, 8))
    v_head_dim = head_dim if on_gpu or rng.random() < 0.7 else rng.choice((2, 4) if latent else (2, 4, 8))
    causal = rng.random() < 0.9
    return Problem(
        num_q_heads=kv_heads * (rng.choice((1, 4)) if on_gpu else rng.choice((1, 2, 3))),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=min(v_head_dim, head_dim) if latent else v_head_dim,
        dtype=dtype,
        page_size=page_size,
        scale=rng.choice((1.0, 0.5, head_dim**-0.5)),
        window_left=rng.choice((0, 1, 3, 4, 7, 12, 20)) if causal and not latent and rng.random() < 0.45 else -1,
        logits_soft_cap=rng.choice((0.0, 0.0, 3.0)),
        has_sinks=not latent and rng.random() < 0.3,
        has_alibi_slopes=not latent and rng.random() < 0.2,
        causal=causal,
        custom_mask=masks and not latent and rng.random() < 0.35,
        pool=PoolKind.LATENT if latent else PoolKind.SPLIT,
        wants_lse=not latent and rng.random() < 0.5,
    )

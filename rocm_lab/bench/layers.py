"""The layers that are measured: those of well-known models by name, of a config.json, or of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Heads and dims of a layer; a latent one has one KV head."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    pool: PoolKind = PoolKind.SPLIT
    scale: float = 0.0

    @classmethod
    def plain(cls, num_q_heads: int, num_kv_heads: int, head_dim: int) -> LayerSizes:
        """Makes sizes with values as long as keys."""
        return cls(num_q_heads, num_kv_heads, head_dim, head_dim)

    def problem(self, dtype: torch.dtype, page_size: int) -> Problem:
        """Returns the layer. Raises BadProblem."""
        return Problem(
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            page_size,
            v_head_dim=self.v_head_dim,
            scale=self.scale or self.head_dim**-0.5,
            pool=self.pool,
        )

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        return f"{self.num_q_heads}/{self.num_kv_heads} x {dims}"


# DeepSeek-V3 scales by the dims of a head before it is absorbed: 128, and 64 that are rotated.
NAMED: Mapping[str, LayerSizes] = {
    "llama-8b": LayerSizes.plain(32, 8, 128),
    "llama-70b": LayerSizes.plain(64, 8, 128),
    "llama-70b-tp8": LayerSizes.plain(8, 1, 128),
    "gpt-oss": LayerSizes.plain(64, 8, 64),
    "gemma-256": LayerSizes.plain(16, 8, 256),
    "deepseek-v3-tp8": LayerSizes(16, 1, 576, 512, PoolKind.LATENT, 192**-0.5),
}


def name_of(problem: Problem) -> str:
    """Returns a layer in a few words: heads, dims, and its unusual properties."""
    sizes = LayerSizes(problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.v_head_dim)
    words = [str(sizes)]
    if problem.pool is not PoolKind.SPLIT:
        words.append(problem.pool.value)
    if problem.page_size != _USUAL_PAGE:
        words.append(f"pages of {problem.page_size}")
    if problem.chunk:
        words.append(f"chunks of {problem.chunk}")
    if problem.window_left not in (UNLIMITED_WINDOW, problem.chunk - 1):
        words.append(f"window {problem.window_left + 1}")
    words += ["images"] * problem.custom_mask
    if problem.logits_soft_cap:
        words.append(f"cap {problem.logits_soft_cap:g}")
    words += ["sinks"] * problem.has_sinks + ["ALiBi"] * problem.has_alibi_slopes
    if problem.kv_encoding is not KVEncoding.LIKE_Q:
        words.append(f"K and V {problem.kv_encoding.value}, {problem.kv_scales.value}")
    return ", ".join(words)


_USUAL_PAGE = 16


def as_json(problem: Problem) -> dict[str, Any]:
    """Returns a result file's description of a layer."""
    return {
        "num_q_heads": problem.num_q_heads,
        "num_kv_heads": problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "v_head_dim": problem.v_head_dim,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "page_size": problem.page_size,
        "scale": problem.scale,
        "window_left": problem.window_left,
        **({"chunk": problem.chunk} if problem.chunk else {}),
        **({"custom_mask": True} if problem.custom_mask else {}),
        "logits_soft_cap": problem.logits_soft_cap,
        "has_sinks": problem.has_sinks,
        "pool": problem.pool.name.lower(),
        "kv_encoding": problem.kv_encoding.name.lower(),
        "kv_scales": problem.kv_scales.name.lower(),
    }

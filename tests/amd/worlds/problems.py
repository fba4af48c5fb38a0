"""The layers of small worlds, and the providers that can run them here."""

import os
from dataclasses import replace
from typing import Any

import torch

from rocm_attn.problem import (
    ALL_KEYS,
    AllKeys,
    EarlierSelection,
    Indexer,
    Indexing,
    KVEncoding,
    PoolKind,
    Problem,
    Scales,
)


def providers() -> list[str]:
    """The providers that can run in this process; under Triton's interpreter, only the one that needs it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ["triton"]
    return ["torch", "triton"] if torch.cuda.is_available() else ["torch"]


def deterministic_providers() -> list[str]:
    """Those of them that have deterministic kernels here: torch has none on a GPU."""
    return [provider for provider in providers() if provider != "torch" or not torch.cuda.is_available()]


def small_problem(page_size: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> Problem:
    """Six query heads over two KV heads, with rows of 16 and plain scores, unless specified otherwise.

    changes: fields of Problem
    """
    given = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "scale": 0.3, **changes}
    return Problem(dtype=dtype, page_size=page_size, **given)


def indexer(indexing: Indexing, heads: int = 4, dim: int = 16) -> Indexer:
    """Four heads of 16, unless specified otherwise."""
    return Indexer(heads, dim, indexing)


def layer(attends: AllKeys | Indexer | EarlierSelection = ALL_KEYS, *, page_size: int = 4) -> Problem:
    """Four query heads over two KV heads of 16."""
    return Problem(4, 2, 16, torch.float32, page_size, v_head_dim=16, scale=0.3, indexer=attends)


def latent_layer(attends: AllKeys | Indexer | EarlierSelection = ALL_KEYS, *, page_size: int = 4) -> Problem:
    """Four heads over latents of 16 in rows of 24."""
    return Problem(4, 1, 24, torch.float32, page_size, v_head_dim=16, scale=0.3, pool=PoolKind.LATENT, indexer=attends)


def record_layer(
    attends: AllKeys | Indexer | EarlierSelection = ALL_KEYS,
    *,
    page_size: int = 4,
    encoding: KVEncoding = KVEncoding.E4M3FN,
    scales: Scales = Scales.GROUP,
) -> Problem:
    """Four heads over records of codes in two groups, and 8 elements after them, or 64 with scales in the footer."""
    dims = {Scales.GROUP: (264, 256), Scales.FOOTER: (192, 192)}[scales]
    latent = replace(latent_layer(attends, page_size=page_size), head_dim=dims[0], v_head_dim=dims[1], scale=0.05)
    return replace(latent, kv_encoding=encoding, kv_scales=scales)

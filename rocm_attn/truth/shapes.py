"""Layers of well-known models, for a truth test without a config file: one layer of each kind, on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from rocm_attn.problem import (
    UNLIMITED_WINDOW,
    EarlierSelection,
    Indexer,
    Indexing,
    KVEncoding,
    LastUnit,
    PoolKind,
    Problem,
    Row,
    Scales,
)

# Any size that holds whole pools and blocks. The kernels are chosen later.
_PAGE_SIZE = 128


def _dense(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """Returns 64 query heads over 8 KV heads of 128; and the same with sinks and a window of 128, as in gpt-oss."""
    layer = Problem(64, 8, 128, dtype, _PAGE_SIZE, v_head_dim=128, scale=128**-0.5)
    return layer, replace(layer, window_left=127, has_sinks=True)


def _latent(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """DeepSeek-V3 on one of eight ranks: 16 heads over latents of 512 and 64 rotated elements."""
    return (Problem(16, 1, 576, dtype, _PAGE_SIZE, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT),)


def _tokens(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """DeepSeek-V3.2 on one of eight ranks: the same with 2,048 tokens of an indexer of 64 heads, and GLM-5's reuse."""
    indexing = Indexing(128**-0.5, top=2048)
    indexer = Indexer(64, 128, indexing, encoding, _scales(encoding))
    layer = replace(_latent(dtype, encoding)[0], indexer=indexer)
    return layer, replace(layer, indexer=EarlierSelection(indexing))


def _pools(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """GLM-5.3-Flash and Qwen3.8-Flash-Next: 512 pools of 4 tokens and the last ones; latents of 512, and 24 heads over
    2 KV heads of 256."""
    indexing = Indexing(128**-0.5, top=512, key_tokens=4, last_unit=LastUnit.ADDED)
    indexer = Indexer(4, 128, indexing, encoding, _scales(encoding))
    latent = Problem(
        16, 1, 512, dtype, _PAGE_SIZE, v_head_dim=512, scale=512**-0.5, pool=PoolKind.LATENT, indexer=indexer
    )
    return latent, Problem(24, 2, 256, dtype, _PAGE_SIZE, v_head_dim=256, scale=256**-0.5, indexer=indexer)


def _blocks(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """MiniMax-M3: 64 query heads over 4 KV heads of 128; each of these has 16 blocks of 128 tokens, with the last."""
    indexing = Indexing(128**-0.5, top=16, sets=4, rectified=False, unit_keys=128, last=1)
    indexer = Indexer(4, 128, indexing, encoding, _scales(encoding))
    return (Problem(64, 4, 128, dtype, _PAGE_SIZE, v_head_dim=128, scale=128**-0.5, indexer=indexer),)


def _compressed(dtype: torch.dtype, encoding: KVEncoding) -> tuple[Problem, ...]:
    """DeepSeek-V4-Flash on one of eight ranks: a window of latents of 512; 512 rows of 4 tokens, which an indexer
    chooses; and all rows of 128 tokens."""
    window = Problem(8, 1, 512, dtype, _PAGE_SIZE, window_left=127, has_sinks=True, pool=PoolKind.LATENT)
    rows = replace(window, window_left=UNLIMITED_WINDOW, has_sinks=False)
    indexing = Indexing(128**-0.5, top=512, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
    indexer = Indexer(64, 128, indexing, encoding, _scales(encoding))
    chosen = replace(rows, row=Row(4, overlaps=True, also=128), indexer=indexer)
    return window, chosen, replace(rows, row=Row(128))


def _scales(encoding: KVEncoding) -> Scales:
    """Returns the scales of index keys: one per key if they have eight bits, else none."""
    return Scales.NONE if encoding is KVEncoding.LIKE_Q else Scales.TOKEN


# Name -> makes the layers, from a dtype and the encoding of index keys.
SHAPES: Mapping[str, Callable[[torch.dtype, KVEncoding], tuple[Problem, ...]]] = {
    "dense": _dense,
    "latent": _latent,
    "tokens": _tokens,
    "pools": _pools,
    "blocks": _blocks,
    "compressed": _compressed,
}

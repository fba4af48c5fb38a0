"""The stand-in's unified_attention_sparse_mla: attention of a latent pool over selected places.

Its wrapper and its kernel are the same in v0.1.15 to v0.1.20, but for the form of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import HALF, Scores, attend, require, require_tensor, run, spans

_HEADS = 16


def unified_attention_sparse_mla(call: Mapping[str, Any]) -> None:
    q, kv, table, rank = call["q"], call["kv"], call["block_table"], call["kv_lora_rank"]
    require(q.dtype in HALF, f"q is {q.dtype}; products need q and keys of one dtype that matrix units take")
    # Last strides are not passed: the kernel adds the element's number.
    num_tokens, num_heads, dim = require_tensor("q", q, q.dtype, (None, None, None), contiguous=False).shape
    require(num_heads % _HEADS == 0, f"the grid has {num_heads // _HEADS} blocks of 16 heads for {num_heads} heads")
    for what, size in (("the rank", rank), ("the rest of a row", dim - rank)):
        require(size > 0 and size & (size - 1) == 0, f"{what} is {size}, which is no range of Triton's")
    require_tensor("kv", kv, q.dtype, (None, None, 1, dim), contiguous=False)
    tile = kv.shape[1]
    require(tile in (16, 32, 64), f"a tile has {tile} keys: no product of matrix units, or more than 64 KiB of LDS")
    require_tensor("out", call["out"], q.dtype, (num_tokens, num_heads, rank), contiguous=False)
    # The rows of topk_indices are as far apart as they are wide; it has no stride.
    require_tensor("topk_indices", call["topk_indices"], torch.int32, (num_tokens, None))
    num_seqs = len(call["seqused_k"])
    require_tensor("cu_seqlens_q", call["cu_seqlens_q"], torch.int32, (num_seqs + 1,))
    require(isinstance(table, Tensor) and table.dim() == 2, "block_table has no stride")
    require(isinstance(call["max_seqlen_q"], int), "it decides what is compiled")
    run(
        _run,
        q,
        kv,
        call["out"],
        call["cu_seqlens_q"],
        call["topk_indices"],
        scale=call["softmax_scale"],
        rank=rank,
    )


def _run(q: Tensor, kv: Tensor, out: Tensor, cu_seqlens: Tensor, topk: Tensor, *, scale: float, rank: int) -> None:
    tile = kv.shape[1]
    ((first, end), *others) = spans(cu_seqlens, len(q), "cu_seqlens_q")
    end = others[-1][1] if others else end
    # Programs of tokens past the last sequence return at once.
    for token in range(first, end):
        listed = topk[token] != -1
        places = topk[token][listed].long()
        require(bool((places >= 0).all()), f"token {token} names places {places.tolist()}")
        blocks = places // tile
        require(bool((blocks < len(kv)).all()), f"token {token} names blocks past the pool's {len(kv)}")
        if not len(places):
            out[token] = float("nan")  # 0 / 0
            continue
        rows = kv[blocks, places % tile]
        # A first tile without a key leaves 0 as the running maximum.
        floored = torch.tensor([not bool(listed[:tile].any())])
        scores = Scores(scale, torch.ones(1, len(rows), dtype=torch.bool), floored=floored)
        result, _ = attend(q[token : token + 1], rows, rows[..., :rank], scores)
        out[token] = result[0].to(out.dtype)

"""The stand-in's unified_attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import (
    HALF,
    Scores,
    attend,
    distances,
    linear,
    require,
    require_heads,
    require_scales,
    require_tensor,
    require_vectorised,
    rows_of,
    run,
    spans,
    times_zero,
    worth,
)
from tests.amd.aiter.signatures import Release

# The smallest number of segments that a split sequence is cut into.
FEWEST_SEGMENTS = 8

# The number on gfx942. It decides whether a sequence is split.
COMPUTE_UNITS = 304


def unified_attention(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    q, k, out = call["q"], call["k"], call["out"]
    dtype, dim = q.dtype, q.shape[2]
    num_seqs = len(call["seqused_k"])
    require(call["causal"] is True, "only causal attention")
    require(dtype in HALF, f"no variant for {dtype}")
    require_tensor("q", q, dtype, (None, None, dim), contiguous=False)
    require_tensor("out", out, dtype, q.shape, contiguous=False)
    # Releases that read only linear caches do not have the parameter.
    if call.get("shuffled_kv_cache", False):
        require_vectorised(k, call["v"], k.dtype)
        require(k.shape[2] * k.shape[4] == dim == call["v"].shape[3], f"rows of K and V are not {dim} long")
        require(dim & (dim - 1) == 0, f"rows of {dim} are padded beyond what a page holds")
        num_kv_heads, page_size = k.shape[1], k.shape[3]
    else:
        require_tensor("k", k, k.dtype, (None, None, None, dim), contiguous=False)
        require_tensor("v", call["v"], k.dtype, k.shape, contiguous=False)
        page_size, num_kv_heads = k.shape[1:3]
    require(page_size >= 16 and page_size & (page_size - 1) == 0, f"pages of {page_size} tokens")
    require_tensor("cu_seqlens_q", call["cu_seqlens_q"], torch.int32, (num_seqs + 1,))
    require_tensor("seqused_k", call["seqused_k"], torch.int64, (num_seqs,))
    require_tensor("block_table", call["block_table"], torch.int32, (num_seqs, None), contiguous=False)
    window = 1 + call["window_size"][0]
    require(window >= 0 and call["softcap"] >= 0.0, "no window and no soft cap are -1 and 0")
    for name in ("sinks", "alibi_slopes"):
        require_heads(name, call[name], q.shape[1])
    scale_values = {name: call[name] for name in ("k_descale", "v_descale")}
    require_scales(k, dtype, eight_bits, **scale_values)
    require(call["q_descale"] is None, "q is not quantised")
    blocks = num_seqs if call["max_seqlen_q"] == 1 else len(q) // max(1, 16 * num_kv_heads // q.shape[1]) + num_seqs
    splits = window == 0 and call["max_seqlen_k"] > 512 and blocks * num_kv_heads <= 4 * COMPUTE_UNITS
    tile = _tile(release, call, page_size, dim)
    _require_lds(release, call, tile, dim, splits=splits)
    run(_run_unified, call, window=window, tile=tile, splits=splits)


def _tile(release: Release, call: Mapping[str, Any], page_size: int, dim: int) -> int:
    """Returns the number of keys per tile on gfx942."""
    if call.get("shuffled_kv_cache", False):
        return page_size
    if call["max_seqlen_q"] == 1:
        return min(64, page_size)
    return 64 if dim < 256 or release.is_before(0, 1, 20) else 32 if dim < 512 else 16


def _require_lds(release: Release, call: Mapping[str, Any], tile: int, dim: int, *, splits: bool) -> None:
    """Checks the LDS: a tile of K takes 64 KiB if nothing is staged, and if the next tile is fetched next to it."""
    decodes = call["max_seqlen_q"] == 1
    fits = tile * dim * 2 < 64 << 10 or (splits and dim < 512) or (not decodes and call["max_seqlen_q"] < 256)
    require(fits or not release.is_before(0, 1, 20), f"out of resource: shared memory, for tiles of {tile} x {dim}")


def _floored(first_query: int, q_len: int, kv_len: int, *, block: int, tile: int, window: int, splits: bool) -> Tensor:
    """Returns bool [q_len]: queries for which some program first sees a tile without visible keys.

    The running maximum of such a query is 0 then. A program has `block` queries, and one segment of a split sequence.
    """
    query = torch.arange(q_len)
    place, block_place = first_query + query, first_query + query // block * block
    if window:
        return (place - window + 1).clamp(min=0) // tile > (block_place - window + 1).clamp(min=0) // tile
    if not splits:
        return torch.zeros(q_len, dtype=torch.bool)
    tiles_of_segment = -(-kv_len // (FEWEST_SEGMENTS * tile))
    starts = torch.arange(0, kv_len, tiles_of_segment * tile)
    return ((starts[None] > place[:, None]) & (starts[None] < block_place[:, None] + block)).any(1)


def _run_unified(call: Mapping[str, Any], *, window: int, tile: int, splits: bool) -> None:
    q, out, block_table, max_q_len = call["q"], call["out"], call["block_table"], call["max_seqlen_q"]
    sinks, alibi_slopes = call["sinks"], call["alibi_slopes"]
    ahead = call["k"].shape[3] if call["k"].dim() == 5 else max(64, call["k"].shape[1])
    k_cache, v_cache = linear(call["k"], call["v"])
    page_size = k_cache.shape[1]
    tokens = spans(call["cu_seqlens_q"], len(q), "cu_seqlens_q")
    if splits:  # the reduction writes every row of out, whether or not anything was computed for it
        out[tokens[-1][1] :] = float("nan")
    for seq, (first, end) in enumerate(tokens):
        q_len, kv_len = end - first, int(call["seqused_k"][seq].item())
        require(q_len <= max_q_len, f"sequence {seq} has {q_len} new tokens of at most {max_q_len}")
        require(max_q_len > 1 or q_len == 1, f"with max_seqlen_q 1, sequence {seq} has {q_len} new tokens")
        if q_len == 0:
            continue
        # The given length of a sequence decides whether it is split, and bounds nothing.
        require(q_len <= kv_len, f"sequence {seq} has {kv_len} keys, {q_len} new")
        pages_read = -(-kv_len // ahead) * ahead // page_size
        require(pages_read <= block_table.shape[1], f"{pages_read} entries are read of a row of {block_table.shape[1]}")
        k = worth(rows_of(k_cache, block_table[seq, :pages_read], "block_table"), call["k_descale"])
        v = worth(rows_of(v_cache, block_table[seq, :pages_read], "block_table"), call["v_descale"])
        before = distances(q_len, kv_len)
        visible = (before >= 0) & (before < window) if window else before >= 0
        bias = None
        if alibi_slopes is not None:  # distances are counted from the first new key, not from the query's own
            bias = alibi_slopes.double()[:, None, None] * (torch.arange(kv_len) - (kv_len - q_len))
        floored = _floored(
            kv_len - q_len, q_len, kv_len, block=_block(q, k, max_q_len), tile=tile, window=window, splits=splits
        )
        # A sink starts the maximum; in a split sequence, only that of the first segment.
        if sinks is not None and not splits:
            floored = torch.zeros_like(floored)
        scores = Scores(call["softmax_scale"], visible, call["softcap"], bias, sinks, floored=floored)
        result, _ = attend(q[first:end], k[:kv_len], v[:kv_len], scores)
        out[first:end] = (result + times_zero(v[kv_len:])).to(out.dtype)


def _block(q: Tensor, k: Tensor, max_q_len: int) -> int:
    """Returns the number of queries per program."""
    heads = q.shape[1] // k.shape[1]
    return max(1, (128 if max_q_len >= 256 else 16) // heads)

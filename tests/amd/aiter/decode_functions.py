"""The stand-in's paged_attention_ragged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.amd.aiter.checks import (
    HALF,
    Scores,
    attend,
    distances,
    require,
    require_heads,
    require_tensor,
    rows_of,
    run,
    spans,
    times_zero,
)


def paged_attention_ragged(call: Mapping[str, Any]) -> None:
    q, k_cache = call["query"], call["key_cache"]
    num_rows, num_heads, dim = q.shape
    dtype, block = q.dtype, call["block_size"]
    require(dtype in HALF and dim in (64, 128), f"no variant for {dtype} and head size {dim}")
    require(block in (1, 16, 32), f"no variant for block size {block}")
    require_tensor("query", q, dtype, (None, None, None), contiguous=False)
    require(q.stride(1) == dim, "only the stride between rows of query is read")
    require_tensor("out", call["out"], dtype, q.shape)
    require_tensor("key_cache", k_cache, dtype, (None, block, None, dim))
    require_tensor("value_cache", call["value_cache"], dtype, k_cache.shape)
    require(
        num_heads % k_cache.shape[2] == 0 and num_heads // k_cache.shape[2] <= 16, "at most 16 heads share a KV head"
    )
    require_tensor("kv_indptr", call["kv_indptr"], torch.int32, (num_rows + 1,))
    require_tensor("kv_page_indices", call["kv_page_indices"], torch.int32, (None,))
    require_tensor("kv_last_page_lens", call["kv_last_page_lens"], torch.int32, (num_rows,))
    for name in ("k_scale", "v_scale"):
        require_tensor(name, call[name], torch.float32, (1,))
    require(call["partition_size"] == 256 and call["mtp"] == 1, "partitions of 256 keys, one token a sequence")
    require(call["kv_cache_dtype"] == "auto" and call["kv_cache_layout"] == "NHD", "an unquantised NHD cache")
    require(call["fp8_out_scale"] is None, "no FP8 output")
    require_heads("alibi_slopes", call["alibi_slopes"], num_heads)
    require(call["logits_soft_cap"] >= 0.0, "a soft cap is positive, or 0 for none")
    needed = num_rows * num_heads * call["max_num_partitions"] * (8 + dim * dtype.itemsize)
    workspace = call["workspace_buffer"]
    require(
        workspace.is_contiguous() and workspace.nbytes >= needed, f"workspace of {workspace.nbytes} < {needed} bytes"
    )
    require(workspace.data_ptr() % 16 == 0, "workspace is not aligned")
    run(_run_ragged, call)


def _run_ragged(call: Mapping[str, Any]) -> None:
    q, k_cache, v_cache, out = call["query"], call["key_cache"], call["value_cache"], call["out"]
    page_list, alibi_slopes, max_keys = call["kv_page_indices"], call["alibi_slopes"], call["max_num_partitions"] * 256
    block = k_cache.shape[1]
    require(call["k_scale"].item() == 1 and call["v_scale"].item() == 1, "scales of an unquantised cache are 1")
    call["workspace_buffer"].view(torch.uint8).fill_(0xFF)
    for row, (first, end) in enumerate(spans(call["kv_indptr"], len(page_list), "kv_indptr")):
        require(end > first, f"sequence {row} has no page: a division by zero")
        last = int(call["kv_last_page_lens"][row].item())
        require(1 <= last <= block, f"last page of sequence {row} holds {last} of {block} tokens")
        kv_len = (end - first - 1) * block + last
        require(kv_len <= max_keys, f"{kv_len} keys, of which all past {max_keys} would be ignored in silence")
        k = rows_of(k_cache, page_list[first:end], "kv_page_indices")
        v = rows_of(v_cache, page_list[first:end], "kv_page_indices")
        before = distances(1, kv_len)
        # The bias comes before the cap.
        bias = None if alibi_slopes is None else -alibi_slopes.double()[:, None, None] * before
        scores = Scores(call["scale"], before >= 0, call["logits_soft_cap"], bias, caps_bias=True)
        result, _ = attend(q[row : row + 1], k[:kv_len], v[:kv_len], scores)
        out[row] = (result[0] + times_zero(v[kv_len:])).to(out.dtype)

"""The stand-in's paged_attention_ragged; and pa_decode_gluon, of up to four queries in a sequence."""

from collections.abc import Mapping, Sequence
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


PARTITION_KEYS = 256
# A window of more keys hides none.
LONGEST = 1 << 29


def pa_decode_gluon(eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    q, out = call["query"], call["output"]
    num_tokens, num_heads, dim = q.shape
    dtype, each = q.dtype, call["query_length"]
    # Every dim of the cache is a power of two of its own kernel; those of 64, 128 and 256 were run (aiter_source).
    require(dtype in HALF and dim in (64, 128, 256), f"not tried for {dtype} and head size {dim}")
    require(call["compute_type"] == dtype, f"it would compute in {call['compute_type']}")
    require(1 <= each <= 4 and num_tokens % each == 0, f"{num_tokens} queries are not {each} of each sequence")
    num_seqs = num_tokens // each
    require_tensor("query", q, dtype, (None, None, dim), contiguous=False)
    require_tensor("output", out, dtype, q.shape, contiguous=False)
    scale_values = _scales_of_gluon(call, dtype, eight_bits)
    require(call["query_scale"] is None, "q is not quantised")
    k_cache, _ = require_vectorised(call["key_cache"], call["value_cache"], call["key_cache"].dtype)
    num_kv_heads, block = k_cache.shape[1], k_cache.shape[3]
    require(block in (16, 64, 1024), f"no variant for blocks of {block}")
    require(num_heads % num_kv_heads == 0 and 3 <= num_heads // num_kv_heads <= 64, "3 to 64 heads share a KV head")
    tile_rows = each * num_heads // num_kv_heads
    require(tile_rows <= 64, f"{each} queries of a sequence take {tile_rows} rows of a tile, which has 64")
    require_tensor("context_lengths", call["context_lengths"], torch.int32, (num_seqs,))
    require_tensor("block_tables", call["block_tables"], torch.int32, (num_seqs, None), contiguous=False)
    require(call["alibi_slopes"] is None, "slopes are taken and left out")
    require_heads("sinks", call["sinks"], num_heads)
    parts, window = call["max_context_partition_num"], call["sliding_window"]
    require(call["context_partition_size"] == PARTITION_KEYS and call["ps"] is True, "parts of each sequence")
    require(window >= 0, "no window is 0")
    on_one_block = -(-block // PARTITION_KEYS)
    if window:
        require(block <= PARTITION_KEYS, "with larger blocks it counts partitions from the first key")
    else:
        # Part [a, b) serves query j of n with keys [a - (n - 1 - j), b - (n - 1 - j)), and loads keys from a // 256 on.
        require(each == 1 or parts == 1, "a part of a sequence loses keys of all queries but the last")
        require(1 <= parts <= 8 and parts % on_one_block == 0, f"{parts} programs for blocks of {block}")
    rows = (num_seqs, num_kv_heads, parts, tile_rows)
    scratch = [require_tensor(name, call[name], torch.float32, rows) for name in ("exp_sums", "max_logits")] + [
        require_tensor("temporary_output", call["temporary_output"], dtype, (*rows, dim))
    ]
    run(_run_gluon, call, q, out, scale_values, scratch, window=window, each=each)


def _scales_of_gluon(call: Mapping[str, Any], dtype: torch.dtype, eight_bits: torch.dtype) -> tuple[Any, Any]:
    """Checks and returns the scales of K and V: none, [1], or [blocks, heads, block, 1], found by K's strides."""
    k_scale, v_scale = call["key_scale"], call["value_scale"]
    if k_scale is None or k_scale.numel() == 1:
        # Without scales, 8-bit codes would be read in vectors of eight.
        require_scales(call["key_cache"], dtype, eight_bits, key_scale=k_scale, value_scale=v_scale)
        return k_scale, v_scale
    require(call["key_cache"].dtype == eight_bits, "scales of tokens are for eight bits")
    blocks, num_kv_heads, _, block, _ = call["key_cache"].shape
    for name in ("key_scale", "value_scale"):
        require_tensor(name, call[name], torch.float32, (blocks, num_kv_heads, block, 1), contiguous=False)
    require(k_scale.stride() == v_scale.stride(), "scales of V are found by the strides of those of K")
    require(k_scale.stride(2) == 1, "scales of a block's tokens are read next to each other")
    return k_scale, v_scale


def _run_gluon(
    call: Mapping[str, Any],
    q: Tensor,
    out: Tensor,
    scale_values: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    *,
    window: int,
    each: int,
) -> None:
    block_tables = call["block_tables"]
    for words in scratch:
        words.fill_(float("nan"))
    block = call["key_cache"].shape[3]
    keys, values = linear(call["key_cache"], call["value_cache"])
    for seq, kv_len in enumerate(call["context_lengths"].tolist()):
        require(kv_len >= 1, f"sequence {seq} has no key: its parts are a division by zero")
        blocks = -(-kv_len // block)
        require(blocks <= block_tables.shape[1], f"{blocks} entries are read of a row of {block_tables.shape[1]}")
        entries = block_tables[seq, :blocks]
        k, v = (
            worth(rows_of(side, entries, "block_tables"), scale if scale is None else _of_rows(scale, entries))
            for side, scale in zip((keys, values), scale_values, strict=True)
        )
        key = torch.arange(kv_len)[None]
        place = torch.arange(kv_len - each, kv_len)[:, None]
        visible = (key <= place) & ((key >= place + 1 + each - window) if window else True)
        # Partitions are loaded whole, except for blocks after the last one.
        first = (kv_len - window) // PARTITION_KEYS if 0 < window < kv_len else 0
        loaded = v[first * PARTITION_KEYS : -(-kv_len // PARTITION_KEYS) * PARTITION_KEYS]
        # A masked key has a logit of -3.4e38. If all keys are masked, all count the same.
        mean = loaded.mean(0).repeat_interleave(out.shape[1] // loaded.shape[1], 0)
        rows = slice(seq * each, (seq + 1) * each)
        result, _ = attend(
            q[rows], k[:kv_len], v[:kv_len].nan_to_num(), Scores(call["softmax_scale"], visible, sinks=call["sinks"])
        )
        sees_any = visible.any(-1)[:, None, None]
        out[rows] = torch.where(sees_any, result + times_zero(loaded), mean).to(out.dtype)


def _of_rows(scale: Tensor, entries: Tensor) -> Tensor:
    """Returns the scale of all rows, or [n, heads, 1] of the rows of these blocks."""
    return scale if scale.numel() == 1 else scale[entries.long()].transpose(1, 2).flatten(0, 1)

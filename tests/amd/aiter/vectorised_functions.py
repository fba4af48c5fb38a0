"""The stand-in's pa_decode_gluon and pa_fwd_asm: decode over vectorised caches."""

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
    times_zero,
    worth,
)
from tests.amd.aiter.signatures import Release

PARTITION_KEYS = 256


def pa_decode_gluon(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    q, out = call["query"], call["output"]
    num_seqs, num_heads, dim = q.shape
    dtype = q.dtype
    require(dtype in HALF and dim == 128, f"not tried for {dtype} and head size {dim}")
    require(call["compute_type"] == dtype, f"it would compute in {call['compute_type']}")
    require(call["query_length"] == 1, "one token a sequence")
    require_tensor("query", q, dtype, (None, None, dim), contiguous=False)
    require_tensor("output", out, dtype, q.shape, contiguous=False)
    # Without scales, 8-bit codes would be read in vectors of eight.
    scale_values = {name: call[name] for name in ("key_scale", "value_scale")}
    require_scales(call["key_cache"], dtype, eight_bits, **scale_values)
    require(call["query_scale"] is None, "q is not quantised")
    k_cache, v_cache = require_vectorised(call["key_cache"], call["value_cache"], call["key_cache"].dtype)
    num_kv_heads, block = k_cache.shape[1], k_cache.shape[3]
    require(block in (16, 64, 1024), f"no variant for blocks of {block}")
    require(num_heads % num_kv_heads == 0 and 3 <= num_heads // num_kv_heads <= 64, "3 to 64 heads share a KV head")
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
        require(parts == 1, "releases before July 2026 give a window to one program")
    else:
        require(1 <= parts <= 8 and parts % on_one_block == 0, f"{parts} programs for blocks of {block}")
    rows = (num_seqs, num_kv_heads, parts, num_heads // num_kv_heads)
    scratch = [require_tensor(name, call[name], torch.float32, rows) for name in ("exp_sums", "max_logits")] + [
        require_tensor("temporary_output", call["temporary_output"], dtype, (*rows, dim))
    ]
    run(
        _run_gluon,
        out,
        q,
        k_cache,
        v_cache,
        call["context_lengths"],
        call["block_tables"],
        call["sinks"],
        *scale_values.values(),
        *scratch,
        scale=call["softmax_scale"],
        window=window,
        # Pages larger than a partition were cut into partitions whatever ps said, and there are no more than `parts`.
        most_keys=parts * PARTITION_KEYS if block > PARTITION_KEYS and release.is_before(0, 1, 14) else 1 << 31,
    )


def _run_gluon(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *scratch: Tensor,
    scale: float,
    window: int,
    most_keys: int,
) -> None:
    for words in scratch:
        words.fill_(float("nan"))
    block = k_cache.shape[3]
    keys, values = linear(k_cache, v_cache)
    for seq, kv_len in enumerate(context_lengths.tolist()):
        require(kv_len >= 1, f"sequence {seq} has no key: its parts are a division by zero")
        blocks = -(-kv_len // block)
        require(blocks <= block_tables.shape[1], f"{blocks} entries are read of a row of {block_tables.shape[1]}")
        k = worth(rows_of(keys, block_tables[seq, :blocks], "block_tables"), key_scale)
        v = worth(rows_of(values, block_tables[seq, :blocks], "block_tables"), value_scale)
        key = torch.arange(kv_len)[None]
        visible = (key >= kv_len - window + 1) if window else key < most_keys
        # Partitions are loaded whole, except for blocks after the last one.
        first = (kv_len - window) // PARTITION_KEYS if 0 < window < kv_len else 0
        loaded = v[first * PARTITION_KEYS : -(-kv_len // PARTITION_KEYS) * PARTITION_KEYS]
        # A masked key has a logit of -3.4e38. If all keys are masked, all count the same.
        if not visible.any():
            out[seq] = loaded.mean(0).repeat_interleave(len(out[seq]) // loaded.shape[1], 0).to(out.dtype)
            continue
        result, _ = attend(q[seq : seq + 1], k[:kv_len], v[:kv_len].nan_to_num(), Scores(scale, visible, sinks=sinks))
        out[seq] = (result[0] + times_zero(loaded)).to(out.dtype)


def pa_fwd_asm(release: Release, call: Mapping[str, Any]) -> Tensor:
    q, out = call["Q"], call["out_"]
    num_seqs, num_heads, dim = q.shape
    dtype = q.dtype
    require(dtype in HALF and dim == 128, f"no kernel for {dtype} and head size {dim}")
    require_tensor("Q", q, dtype, (None, None, None), contiguous=False)
    require(q.stride(1) == dim, "only the stride between rows of Q is read")
    require(out is not None, "out_ would be allocated")
    require_tensor("out_", out, dtype, q.shape)
    k_cache, v_cache = require_vectorised(call["K"], call["V"], dtype)
    require(k_cache.shape[3] == 16, f"no kernel for blocks of {k_cache.shape[3]}")
    require(k_cache.nbytes == v_cache.nbytes, "V is read with the strides of K")
    # The size that its code objects give the hardware for K and for V. Everything after it is read as 0.
    reach = 2**31 if release.is_before(0, 1, 17) else 2**32
    require(k_cache.nbytes < reach, f"byte offsets reach {reach}, and a cache takes {k_cache.nbytes}")
    require(num_heads // k_cache.shape[1] in (8, 16), f"no kernel for {num_heads // k_cache.shape[1]} heads on one")
    require_tensor("context_lens", call["context_lens"], torch.int32, (num_seqs,))
    tables = require_tensor("block_tables", call["block_tables"], torch.int32, (num_seqs, None), contiguous=False)
    require(call["block_tables_stride0"] == tables.stride(0), "the stride of block_tables is told wrongly")
    require(call["max_qlen"] == 1 and call["qo_indptr"] is None, "one token a sequence")
    require(call["K_QScale"] is None and call["V_QScale"] is None, "nothing is quantised")
    require(call["high_precision"] == 1 and call["kernelName"] is None, "it finds its kernel by itself")
    run(_run_asm, out, q, k_cache, v_cache, call["context_lens"], tables)
    return out  # type: ignore[no-any-return]


def _run_asm(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens: Tensor, block_tables: Tensor
) -> None:
    keys, values = linear(k_cache, v_cache)
    for seq, kv_len in enumerate(context_lens.tolist()):
        require(kv_len >= 1, f"sequence {seq} has no key: a division by zero")
        entries = -(-kv_len // 256) * 16
        require(entries <= block_tables.shape[1], f"{entries} entries are read of a row of {block_tables.shape[1]}")
        k = rows_of(keys, block_tables[seq, :entries], "block_tables")
        v = rows_of(values, block_tables[seq, :entries], "block_tables")
        result, _ = attend(q[seq : seq + 1], k[:kv_len], v[:kv_len], Scores(128**-0.5, distances(1, kv_len) >= 0))
        out[seq] = (result[0] + times_zero(v[kv_len:])).to(out.dtype)

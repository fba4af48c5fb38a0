"""The stand-in's mha_batch_prefill_func, flash_attn_varlen_func and unified_attention."""

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
from tests.amd.aiter.signatures import Release

# Head dims of queries and keys, and of values, for which the assembly kernels take bfloat16.
ASSEMBLED = ((128, 128), (192, 128))


def mha_batch_prefill_func(eight_bits: torch.dtype, call: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    q, k, out = call["q"], call["k"], call["out"]
    dtype, dim, num_seqs = q.dtype, q.shape[2], len(call["cu_seqlens_q"]) - 1
    x = 16 // dtype.itemsize
    page_size = 1 if k.dim() == 3 else k.shape[-2] if k.dim() == 5 else k.shape[1]
    # The dims and pages that the tests of the releases run. Pages of one token exist in linear caches only.
    is_known = dtype in (*HALF, eight_bits)
    require(is_known and dim in (128, 256), f"no matching kernel found for {dtype} and head dim {dim}")
    scale_values = _batch_scales(call, dtype == eight_bits)
    require(
        page_size in ((16, 1024) if k.dim() == 5 else (1, 16, 1024)),
        f"no matching kernel found for pages of {page_size}",
    )
    require_tensor("q", q, dtype, (None, None, dim), contiguous=False)
    require(out is not None, "out would be allocated")
    # The output for 8-bit queries is always bfloat16.
    require_tensor("out", out, torch.bfloat16 if scale_values else dtype, q.shape, contiguous=False)
    if k.dim() == 5:
        require_vectorised(k, call["v"], dtype)
        require(k.shape[2] * x == dim and call["v"].shape[3] == dim, f"rows of K and V are not {dim} long")
    else:
        require_tensor("k", k, dtype, (None,) * (k.dim() - 1) + (dim,), contiguous=False)
        require_tensor("v", call["v"], dtype, k.shape, contiguous=False)
        for side in (k, call["v"]):
            nested = [*zip(side.shape, side.stride(), strict=True)]
            inner = [
                stride >= size * step for (size, step), (_, stride) in zip(nested[:0:-1], nested[-2::-1], strict=True)
            ]
            require(all(inner), "a page's stride is at least its tokens', and a token's at least its heads'")
    rows = (q, out, k, call["v"])
    require(all(stride % x == 0 for each in rows for stride in each.stride()[:-1]), "strides of 16 bytes")
    require_tensor("cu_seqlens_q", call["cu_seqlens_q"], torch.int32, (num_seqs + 1,))
    require_tensor("kv_indptr", call["kv_indptr"], torch.int32, (num_seqs + 1,))
    require_tensor("kv_page_indices", call["kv_page_indices"], torch.int32, (None,))
    require_tensor("kv_last_page_lens", call["kv_last_page_lens"], torch.int32, (num_seqs,))
    _require_scores(call)
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32) if call["return_lse"] else None
    run(_run_batch_prefill, call, lse, scale_values)
    return out if lse is None else (out, lse)


def _batch_scales(call: Mapping[str, Any], is_eight_bit: bool) -> tuple[Tensor, ...]:
    """Returns the scales of q, K and V after checking that all of them are float32 [1], or none is given."""
    names = ("q_descale", "k_descale", "v_descale")
    if not is_eight_bit:
        require(all(call[name] is None for name in names), "nothing is quantised")
        return ()
    require(not call["return_lse"], "AITER's tests take no lse of eight bits")
    require(call["sink_ptr"] is None and call["alibi_slopes"] is None, "no variant that AITER's tests run")
    return tuple(require_tensor(name, call[name], torch.float32, (1,)) for name in names)


def _require_scores(call: Mapping[str, Any]) -> None:
    """Checks the score arguments that both prefill functions need, and refuses combinations without a variant."""
    num_heads = call["q"].shape[1]
    for name in ("sink_ptr", "alibi_slopes"):
        require_heads(name, call[name], num_heads)
    require(len(call["window_size"]) == 2 or call["window_size"][2] == 0, "no first tokens that every query sees")
    is_plain = call["logits_soft_cap"] == 0.0 and call["alibi_slopes"] is None
    require(call["logits_soft_cap"] == 0.0 or call["alibi_slopes"] is None, "no variant for a cap with a bias")
    require(call["sink_ptr"] is None or is_plain, "sinks start the maximum of plain logits")
    require(call["softmax_scale"] is not None, "without a scale 1/sqrt(D) would be taken, whatever the model's is")
    require(call["dropout_p"] == 0.0, "no dropout")


def _window(call: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of keys before and after its own that a query sees; -1: all."""
    left, right = (-1 if size >= call["max_seqlen_k"] else size for size in call["window_size"][:2])
    return (left, 0) if call["causal"] else (left, right)


def _scores(
    call: Mapping[str, Any], q_len: int, kv_len: int, *, window: tuple[int, int], sinks: Tensor | None
) -> Scores:
    alibi_slopes = call["alibi_slopes"]
    before = distances(q_len, kv_len)
    left, right = window
    visible = torch.ones_like(before, dtype=torch.bool)
    if left >= 0:
        visible &= before <= left
    if right >= 0:
        visible &= before >= -right
    bias = None if alibi_slopes is None else -alibi_slopes.double()[:, None, None] * before.abs()
    return Scores(call["softmax_scale"], visible, call["logits_soft_cap"], bias, sinks)


def _run_batch_prefill(call: Mapping[str, Any], lse: Tensor | None, scale_values: Sequence[Tensor]) -> None:
    q, out, page_list, max_kv_len = call["q"], call["out"], call["kv_page_indices"], call["max_seqlen_k"]
    q_scale_value, k_scale_value, v_scale_value = scale_values or (None, None, None)
    k_cache, v_cache = (side[:, None] if side.dim() == 3 else side for side in (call["k"], call["v"]))
    k_cache, v_cache = linear(k_cache, v_cache)
    page_size = k_cache.shape[1]
    pages = spans(call["kv_indptr"], len(page_list), "kv_indptr")
    for seq, (first, end) in enumerate(spans(call["cu_seqlens_q"], len(q), "cu_seqlens_q")):
        q_len, (first_page, end_page) = end - first, pages[seq]
        most = call["max_seqlen_q"]
        require(q_len <= most, f"sequence {seq} has {q_len} new tokens of at most {most}")
        if q_len == 0:
            continue
        kv_len = (end_page - first_page - 1) * page_size + int(call["kv_last_page_lens"][seq].item())
        require(
            q_len <= kv_len <= max_kv_len, f"sequence {seq} has {kv_len} keys, {q_len} new, of at most {max_kv_len}"
        )
        read_end = first_page + -(-(end_page - first_page) // 128) * 128
        require(read_end <= len(page_list), f"{read_end} entries are read of a page list of {len(page_list)}")
        k = worth(rows_of(k_cache, page_list[first_page:end_page], "kv_page_indices"), k_scale_value)
        v = worth(rows_of(v_cache, page_list[first_page:end_page], "kv_page_indices"), v_scale_value)
        ahead = rows_of(v_cache, page_list[end_page:read_end], "kv_page_indices").double()
        if seq + 1 == len(pages) or pages[-1][1] == end_page:  # otherwise other sequences' pages follow
            require(bool((ahead == 0).all()), "what lies after the page list is not page 0")
        scores = _scores(call, q_len, kv_len, window=_window(call), sinks=call["sink_ptr"])
        result, result_lse = attend(worth(q[first:end], q_scale_value), k[:kv_len], v[:kv_len], scores)
        out[first:end] = (result + times_zero(v[kv_len:])).to(out.dtype)
        if lse is not None:
            lse[:, first:end] = result_lse.t() + _left_out_of_the_lse(call, kv_len, q_len)


def _left_out_of_the_lse(call: Mapping[str, Any], kv_len: int, q_len: int) -> Tensor:
    """Returns slope * query, which the causal bias slope * key lacks. It is equal for all keys and changes the lse."""
    position = torch.arange(kv_len - q_len, kv_len)
    slopes: Tensor | None = call["alibi_slopes"]
    return slopes[:, None] * position if call["causal"] and slopes is not None else torch.zeros(1, q_len)


def flash_attn_varlen_func(call: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    q, k, v, out = call["q"], call["k"], call["v"], call["out"]
    dtype, num_seqs = q.dtype, len(call["cu_seqlens_q"]) - 1
    require(dtype in HALF, f"no variant for {dtype}")
    require_tensor("q", q, dtype, (None, None, None), contiguous=False)
    require_tensor("k", k, dtype, (None, None, q.shape[2]))
    require_tensor("v", v, dtype, (len(k), k.shape[1], None))
    require(out is not None, "out would be allocated")
    require_tensor("out", out, dtype, (len(q), q.shape[1], v.shape[2]), contiguous=False)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    _require_scores(call)
    require(call["block_table"] is None and call["bias"] is None, "packed K and V, no bias")
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32) if call["return_lse"] else None
    window = _window(call)
    is_plain = call["logits_soft_cap"] == 0.0 and call["alibi_slopes"] is None and window[0] <= 0 and window[1] <= 0
    is_assembled = is_plain and dtype == torch.bfloat16 and (q.shape[2], v.shape[2]) in ASSEMBLED
    if is_assembled:  # they support no window
        window = (-1, window[1])
    run(_run_varlen, call, lse, window=window, sinks=None if is_assembled else call["sink_ptr"])
    return out if lse is None else (out, lse)


def _run_varlen(call: Mapping[str, Any], lse: Tensor | None, *, window: tuple[int, int], sinks: Tensor | None) -> None:
    q, k, v, out = call["q"], call["k"], call["v"], call["out"]
    max_q_len, max_kv_len = call["max_seqlen_q"], call["max_seqlen_k"]
    keys = spans(call["cu_seqlens_k"], len(k), "cu_seqlens_k")
    for seq, (first, end) in enumerate(spans(call["cu_seqlens_q"], len(q), "cu_seqlens_q")):
        (first_key, end_key), q_len = keys[seq], end - first
        require(q_len <= max_q_len and end_key - first_key <= max_kv_len, f"sequence {seq} is longer than was said")
        if q_len:
            scores = _scores(call, q_len, end_key - first_key, window=window, sinks=sinks)
            result, result_lse = attend(q[first:end], k[first_key:end_key], v[first_key:end_key], scores)
            out[first:end] = result.to(out.dtype)
            if lse is not None:
                lse[:, first:end] = result_lse.t() + _left_out_of_the_lse(call, end_key - first_key, q_len)


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

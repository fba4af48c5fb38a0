"""The stand-in's functions over a latent pool.

A share of a schedule is [sequence, row of its partial result or -1, first token, end, first key, end, keys after it,
nothing]. Its partial result has a row for each token.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import (
    EIGHT_BITS,
    HALF,
    Scores,
    attend,
    distances,
    require,
    require_tensor,
    rows_of,
    run,
    spans,
    times_zero,
    worth,
)
from tests.amd.aiter.signatures import Release

# The number on gfx942; AITER asks the device.
COMPUTE_UNITS = 304
# Compute units of an arch, which its 8-bit dtype identifies here.
UNITS_OF = {torch.float8_e4m3fnuz: COMPUTE_UNITS, torch.float8_e4m3fn: 256}
WORK_BUFFERS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def _groups(release: Release, eight_bits: torch.dtype, num_heads: int, *, is_eight_bit: bool) -> int:
    """Returns the number of groups of 16 heads that a sequence is cut into. A kernel sees each group as a sequence."""
    require(num_heads % 16 == 0 and num_heads <= 128, f"no kernel for {num_heads} heads")
    if not is_eight_bit:
        require(num_heads == 16, "a schedule for 16 heads")
    is_gfx950 = eight_bits == torch.float8_e4m3fn
    require(not is_gfx950 or num_heads == 16 or not release.is_before(0, 1, 18), "releases differ in their groups")
    newer = () if release.is_before(0, 1, 18) else (32, 64) if is_gfx950 else (64,)
    return 1 if num_heads in (16, 128, *newer) else num_heads // 16


def _require_buffers(buffers: Mapping[str, Tensor], units: int, num_seqs: int, num_heads: int) -> None:
    """Checks the shapes of get_mla_metadata_info_v1, or larger ones: groups are not always used.

    Four tokens of 16 heads are one tile, as one token is.
    """
    tiles = 1 if num_heads == 128 else num_heads // 16
    work = (num_seqs + units - 1) * tiles
    require_tensor("work_metadata_ptrs", buffers["work_meta_data"], torch.uint64, (2,))
    require_tensor("work_indptr", buffers["work_indptr"], torch.int32, (units + 1,))
    require_tensor("work_info_set", buffers["work_info_set"], torch.int32, (work, 8))
    require_tensor("reduce_indptr", buffers["reduce_indptr"], torch.int32, (num_seqs * tiles + 1,))
    require_tensor("reduce_final_map", buffers["reduce_final_map"], torch.int32, (num_seqs * tiles, 2))
    partials = min(work, 2 * (units - 1) * tiles)
    require_tensor("reduce_partial_map", buffers["reduce_partial_map"], torch.int32, (partials,))


def get_mla_metadata_v1(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    num_seqs = len(call["seqlens_qo_indptr"]) - 1
    for name in ("seqlens_qo_indptr", "seqlens_kv_indptr"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    require_tensor("kv_last_page_lens", call["kv_last_page_lens"], torch.int32, (num_seqs,))
    buffers = {name: call[name] for name in WORK_BUFFERS[1:]} | {"work_meta_data": call["work_metadata_ptrs"]}
    num_heads, is_eight_bit = call["num_heads_per_head_k"], call["dtype_q"] == eight_bits
    _require_buffers(buffers, UNITS_OF[eight_bits], num_seqs, num_heads)
    require(call["num_heads_k"] == 1, "one latent row a token")
    require((call["page_size"], call["kv_granularity"]) == (1, 16), "keys one by one, in shares of 16")
    each = call["max_seqlen_qo"]
    require(each == call["uni_seqlen_qo"], "as many new tokens in each sequence")
    require(each == 1 or (each == 4 and num_heads == 16 and is_eight_bit), f"{each} tokens of {num_heads} heads")
    require(call["fast_mode"] is True and call["intra_batch_mode"] is False, "shares of all keys")
    require(call["topk"] == -1 and call["max_split_per_batch"] == -1, "all keys, in any number of shares")
    require(call["dtype_q"] == call["dtype_kv"], "no kernel for two dtypes")
    require(call["dtype_q"] in (torch.bfloat16, eight_bits), f"{call['dtype_q']} is neither bfloat16 nor {eight_bits}")
    run(
        _run_schedule,
        call,
        buffers,
        groups=_groups(release, eight_bits, num_heads, is_eight_bit=is_eight_bit),
        # v1_2_device.cuh, tail_done_threshold.
        least=each,
    )


def _run_schedule(call: Mapping[str, Any], buffers: Mapping[str, Tensor], *, groups: int, least: int) -> None:
    qo_indptr, kv_indptr, each = call["seqlens_qo_indptr"], call["seqlens_kv_indptr"], call["max_seqlen_qo"]
    addresses, indptr, work, reduce_indptr, final_map, partial_map = (buffers[name] for name in WORK_BUFFERS)
    require(qo_indptr.diff().eq(each).all(), f"a sequence has not {each} new tokens")
    for buffer in (indptr, work, reduce_indptr, final_map, partial_map):
        buffer.fill_(-(2**31))
    addresses.view(torch.int64).copy_(torch.tensor([indptr.data_ptr(), work.data_ptr()]))
    lengths = kv_indptr.diff().tolist()
    units = len(indptr) - 1
    share = -(-max(1, sum(lengths) * groups) // units // 16) * 16 + 16
    shares: list[list[int]] = []
    num_partials, ends = 0, [0]
    for seq, (first, end) in enumerate(spans(kv_indptr, 2**31 - 1, "seqlens_kv_indptr")):
        cuts = [cut for cut in range(first, end, share) if cut == first or end - cut >= least] + [end]
        for group in range(groups):
            # A group of a token's heads is a row of its own.
            row = int(qo_indptr[seq].item()) * groups + group
            for begin, stop in pairwise(cuts):
                partial = -1 if len(cuts) == 2 else num_partials * each
                num_partials += partial != -1
                shares.append([seq * groups + group, partial, row, row + each, begin, stop, end - stop, 0])
            final_map[len(ends) - 1] = torch.tensor([row, row + each])
            ends.append(num_partials)
    require(len(shares) <= len(work) and num_partials <= len(partial_map), "more shares than there is room for")
    work[: len(shares)] = torch.tensor(shares, dtype=torch.int32)
    partial_map[:num_partials] = torch.arange(num_partials, dtype=torch.int32) * each
    reduce_indptr.fill_(ends[-1])
    reduce_indptr[: len(ends)] = torch.tensor(ends, dtype=torch.int32)
    # One share per compute unit; the last unit takes the rest.
    indptr.copy_(torch.arange(units + 1).clamp(max=len(shares)))
    indptr[-1] = len(shares)


def decode_by_schedule(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any], num_seqs: int) -> None:
    """Computes the part of mla_decode_fwd that is given a schedule."""
    num_heads, is_eight_bit, units = call["q"].shape[1], call["q"].dtype == eight_bits, UNITS_OF[eight_bits]
    groups = _groups(release, eight_bits, num_heads, is_eight_bit=is_eight_bit)
    require(call["num_kv_splits"] == units, "without num_kv_splits, the schedule may be left aside")
    require(call["num_kv_splits_indptr"] is None, "a schedule or splits")
    buffers = {name: call[name] for name in WORK_BUFFERS}
    _require_buffers(buffers, units, num_seqs, num_heads)
    scale_values = [call[name] if is_eight_bit else None for name in ("q_scale", "kv_scale")]
    run(_run_by_schedule, call, buffers, groups=groups, scales=scale_values)


def _run_by_schedule(
    call: Mapping[str, Any], buffers: Mapping[str, Tensor], *, groups: int, scales: Sequence[Tensor | None]
) -> None:
    q, out = (call[name].view(-1, call[name].shape[1] // groups, call[name].shape[2]) for name in ("q", "o"))
    kv, kv_indices, each = call["kv_buffer"], call["kv_indices"], call["max_seqlen_q"]
    addresses, indptr, work, reduce_indptr, final_map, partial_map = (buffers[name] for name in WORK_BUFFERS)
    require(call["qo_indptr"].diff().eq(each).all(), f"a sequence has not {each} new tokens")
    here = [indptr.data_ptr(), work.data_ptr()]
    require(addresses.view(torch.int64).tolist() == here, "the schedule has moved since it was made")
    keys = [span for span in spans(call["kv_indptr"], len(kv_indices), "kv_indptr") for _ in range(groups)]
    partials: dict[int, tuple[Tensor, Tensor]] = {}
    seen = [0] * len(keys)
    for seq, partial, token, token_end, first, end, after, _ in work[: int(indptr[-1].item())].tolist():
        tokens = slice(seq * each, (seq + 1) * each)
        require(slice(token, token_end) == tokens, f"sequence {seq} has tokens {token} to {token_end}")
        require(keys[seq][0] <= first < end == keys[seq][1] - after, "a schedule of other lengths")
        seen[seq] += end - first
        rows = worth(rows_of(kv, kv_indices[first:end], "kv_indices"), scales[1])
        # A token sees the keys of a share up to its own. One that sees none is 0 / 0.
        visible = distances(each, end - first + after)[:, : end - first] >= 0
        result, lse = attend(worth(q[tokens], scales[0]), rows, rows[..., :512], Scores(call["sm_scale"], visible))
        if partial == -1:
            out[tokens] = (result + times_zero(kv[0])).to(out.dtype)
        else:
            partials[partial] = (result, lse)
    require(seen == [end - first for first, end in keys], f"of {keys}, {seen} keys have a share")
    for seq, (first, end) in enumerate(spans(reduce_indptr, len(partial_map), "reduce_indptr")):
        if end > first:
            results, lses = zip(*(partials[row] for row in partial_map[first:end].tolist()), strict=True)
            shares = torch.stack(lses).softmax(0)
            merged = (shares[..., None] * torch.stack(results)).sum(0)
            out[slice(*final_map[seq].tolist())] = (merged + times_zero(kv[0])).to(out.dtype)


def _require_latent(call: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16, *, is_wide: bool = False) -> int:
    """Checks the arguments that both functions take, and returns the number of sequences.

    is_wide: True for a kernel whose offsets have 64 bits
    """
    q, num_seqs = call["q"], len(call["qo_indptr"]) - 1
    require(dtype != torch.bfloat16 or q.shape[1] in (16, 128), f"no kernel for {q.shape[1]} heads in every release")
    require_tensor("q", q, dtype, (None, None, 576))
    kv = require_tensor("kv_buffer", call["kv_buffer"], dtype, (None, 1, 1, 576))
    # v_mul_u32_u24 multiplies a page's id, and the product is the 32-bit offset of a buffer_load.
    in_reach = is_wide or (kv.nbytes < 2**32 and len(kv) <= 2**24)
    require(in_reach, f"byte offsets wrap at 4 GiB, and the cache takes {kv.nbytes}")
    require_tensor("o", call["o"], torch.bfloat16, (len(q), q.shape[1], 512))
    for name in ("qo_indptr", "kv_indptr"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    require_tensor("kv_indices", call["kv_indices"], torch.int32, (None,))
    require_tensor("kv_last_page_lens", call["kv_last_page_lens"], torch.int32, (num_seqs,))
    require(call["sm_scale"] is not None and call["logit_cap"] == 0.0, "a scale, no cap")
    return num_seqs


def mla_decode_fwd(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    q, splits = call["q"], call["num_kv_splits"]
    is_eight_bit = q.dtype == eight_bits
    # mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co of gfx950 has v_mul_hi_u32 for each v_mul_lo_u32 since v0.1.19.post1.
    is_wide = (
        is_eight_bit
        and eight_bits == EIGHT_BITS["gfx950"]
        and q.shape[1] not in (32, 64, 128)
        and call["max_seqlen_q"] == 1
        and not release.is_before(0, 1, 20)
    )
    num_seqs = _require_latent(call, eight_bits if is_eight_bit else torch.bfloat16, is_wide=is_wide)
    for name in ("q_scale", "kv_scale") if is_eight_bit else ():
        require_tensor(name, call[name], torch.float32, (1,))
    each = call["max_seqlen_q"]
    require(len(q) == num_seqs * each, f"{len(q)} tokens of {num_seqs} sequences of {each}")
    require(call.get("page_size", 1) == 1 and call.get("nhead_kv", 1) == 1, "plain decode")
    require(not call["return_lse"], "no lse")
    if call["work_meta_data"] is not None:
        # 2 and 3 tokens have kernels of their own in some releases.
        is_tried = each == 1 or (each == 4 and q.shape[1] == 16 and is_eight_bit)
        require(is_tried, f"not tried by a schedule: {each} tokens of {q.shape[1]} heads")
        decode_by_schedule(release, eight_bits, call, num_seqs)
        return
    require(not is_eight_bit, "AITER's callers give eight bits a schedule")
    require(
        isinstance(splits, int) and 1 <= splits <= 16, "without num_kv_splits, they are chosen by the list's length"
    )
    require_tensor("num_kv_splits_indptr", call["num_kv_splits_indptr"], torch.int32, (num_seqs + 1,))
    # Its kernel of 16 heads and 4 tokens, in every release. 2 and 3 tokens take it too, but their only split is written
    # in bfloat16 to memory of float32; 8 have another one, which is wrong on gfx942 (aiter#5679).
    require(each == 1 or (each == 4 and q.shape[1] == 16), f"not tried: {each} tokens of {q.shape[1]} heads")
    run(_run_latent, call)


def _run_latent(call: Mapping[str, Any]) -> None:
    q, kv, out, kv_indices = call["q"], call["kv_buffer"], call["o"], call["kv_indices"]
    splits, each = call["num_kv_splits"], call["max_seqlen_q"]
    num_seqs = len(q) // each
    require(
        call["num_kv_splits_indptr"].tolist() == [i * splits for i in range(num_seqs + 1)],
        "the splits' indptr says otherwise",
    )
    require(
        call["qo_indptr"].tolist() == [i * each for i in range(num_seqs + 1)], f"a sequence has not {each} new tokens"
    )
    require(bool((call["kv_last_page_lens"] == 1).all()), "a page holds one token")
    for seq, (first, end) in enumerate(spans(call["kv_indptr"], len(kv_indices), "kv_indptr")):
        require(end > first, f"sequence {seq} has no key: a division by zero")
        rows = rows_of(kv, kv_indices[first:end], "kv_indices")
        tokens = slice(seq * each, (seq + 1) * each)
        # A token that sees no key is 0 / 0.
        result, _ = attend(q[tokens], rows, rows[..., :512], Scores(call["sm_scale"], distances(each, len(rows)) >= 0))
        # Row 0 stands in for masked keys.
        out[tokens] = (result + times_zero(kv[0])).to(out.dtype)


def mla_prefill_fwd(call: Mapping[str, Any]) -> None:
    _require_latent(call)
    require(call["num_kv_splits"] is None, "it has one split, whatever is asked for")
    run(_run_latent_prefill, call)


def _run_latent_prefill(call: Mapping[str, Any]) -> None:
    q, kv, out, kv_indices, max_q_len = (call[name] for name in ("q", "kv_buffer", "o", "kv_indices", "max_seqlen_q"))
    require(bool((call["kv_last_page_lens"] == 1).all()), "a page holds one token")
    keys = spans(call["kv_indptr"], len(kv_indices), "kv_indptr")
    for seq, (first, end) in enumerate(spans(call["qo_indptr"], len(q), "qo_indptr")):
        q_len, (first_key, end_key) = end - first, keys[seq]
        require(q_len <= max_q_len, f"sequence {seq} has {q_len} new tokens of at most {max_q_len}")
        if q_len == 0:
            continue
        require(q_len <= end_key - first_key, f"sequence {seq} has {end_key - first_key} keys, {q_len} of them new")
        rows = rows_of(kv, kv_indices[first_key:end_key], "kv_indices")
        scores = Scores(call["sm_scale"], distances(q_len, len(rows)) >= 0)
        result, _ = attend(q[first:end], rows, rows[..., :512], scores)
        # Row 0 stands in for masked keys.
        out[first:end] = (result + times_zero(kv[0])).to(out.dtype)


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

"""The stand-in's get_mla_metadata_v1, and mla_decode_fwd by such a schedule.

A share is [sequence, row of its partial result or -1, first token, end, first key, end, keys after it, nothing].
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import Scores, attend, require, require_tensor, rows_of, run, spans, times_zero

# Of gfx942; AITER asks the device.
COMPUTE_UNITS = 304
WORK_BUFFERS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def _require_buffers(buffers: Mapping[str, Tensor], num_seqs: int) -> None:
    """The shapes that get_mla_metadata_info_v1 gives for 16 heads and one token a sequence."""
    work = num_seqs + COMPUTE_UNITS - 1
    require_tensor("work_metadata_ptrs", buffers["work_meta_data"], torch.uint64, (2,))
    require_tensor("work_indptr", buffers["work_indptr"], torch.int32, (COMPUTE_UNITS + 1,))
    require_tensor("work_info_set", buffers["work_info_set"], torch.int32, (work, 8))
    require_tensor("reduce_indptr", buffers["reduce_indptr"], torch.int32, (num_seqs + 1,))
    require_tensor("reduce_final_map", buffers["reduce_final_map"], torch.int32, (num_seqs, 2))
    partials = min(work, 2 * (COMPUTE_UNITS - 1))
    require_tensor("reduce_partial_map", buffers["reduce_partial_map"], torch.int32, (partials,))


def get_mla_metadata_v1(call: Mapping[str, Any]) -> None:
    num_seqs = len(call["seqlens_qo_indptr"]) - 1
    for name in ("seqlens_qo_indptr", "seqlens_kv_indptr"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    require_tensor("kv_last_page_lens", call["kv_last_page_lens"], torch.int32, (num_seqs,))
    buffers = {name: call[name] for name in WORK_BUFFERS[1:]} | {"work_meta_data": call["work_metadata_ptrs"]}
    _require_buffers(buffers, num_seqs)
    require((call["num_heads_per_head_k"], call["num_heads_k"]) == (16, 1), "a schedule for 16 heads")
    require((call["page_size"], call["kv_granularity"]) == (1, 16), "keys one by one, in shares of 16")
    require((call["max_seqlen_qo"], call["uni_seqlen_qo"]) == (1, 1), "one new token in each sequence")
    require(call["fast_mode"] is True and call["intra_batch_mode"] is False, "shares of all keys")
    require(call["topk"] == -1 and call["max_split_per_batch"] == -1, "all keys, in any number of shares")
    require(call["dtype_q"] == call["dtype_kv"] == torch.bfloat16, "what is not said is taken for bfloat16")
    run(_run_schedule, call["seqlens_qo_indptr"], call["seqlens_kv_indptr"], *(buffers[name] for name in WORK_BUFFERS))


def _run_schedule(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    addresses: Tensor,
    indptr: Tensor,
    work: Tensor,
    reduce_indptr: Tensor,
    final_map: Tensor,
    partial_map: Tensor,
) -> None:
    for buffer in (indptr, work, reduce_indptr, final_map, partial_map):
        buffer.fill_(-(2**31))
    addresses.view(torch.int64).copy_(torch.tensor([indptr.data_ptr(), work.data_ptr()]))
    lengths = kv_indptr.diff().tolist()
    share = -(-max(1, sum(lengths)) // COMPUTE_UNITS // 16) * 16 + 16
    shares: list[list[int]] = []
    num_partials, ends = 0, [0]
    for seq, (first, end) in enumerate(spans(kv_indptr, 2**31 - 1, "seqlens_kv_indptr")):
        token = int(qo_indptr[seq].item())
        cuts = [*range(first, end, share), end]
        for begin, stop in pairwise(cuts):
            partial = -1 if len(cuts) == 2 else num_partials
            num_partials += partial != -1
            shares.append([seq, partial, token, token + 1, begin, stop, end - stop, 0])
        final_map[seq] = torch.tensor([token, token + 1])
        ends.append(num_partials)
    require(len(shares) <= len(work) and num_partials <= len(partial_map), "more shares than there is room for")
    work[: len(shares)] = torch.tensor(shares, dtype=torch.int32)
    partial_map[:num_partials] = torch.arange(num_partials, dtype=torch.int32)
    reduce_indptr.copy_(torch.tensor(ends, dtype=torch.int32))
    # One share a compute unit; the last one takes what is over.
    indptr.copy_(torch.arange(COMPUTE_UNITS + 1).clamp(max=len(shares)))
    indptr[-1] = len(shares)


def decode_by_schedule(call: Mapping[str, Any], num_seqs: int) -> None:
    """The part of mla_decode_fwd that is given a schedule."""
    require(call["q"].shape[1] == 16, "a schedule for 16 heads")
    require(call["num_kv_splits"] == COMPUTE_UNITS, "without num_kv_splits, the schedule may be left aside")
    require(call["num_kv_splits_indptr"] is None, "a schedule or splits")
    buffers = {name: call[name] for name in WORK_BUFFERS}
    _require_buffers(buffers, num_seqs)
    run(
        _run_by_schedule,
        call["q"],
        call["kv_buffer"],
        call["o"],
        call["kv_indptr"],
        call["kv_indices"],
        *buffers.values(),
        scale=call["sm_scale"],
    )


def _run_by_schedule(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    addresses: Tensor,
    indptr: Tensor,
    work: Tensor,
    reduce_indptr: Tensor,
    final_map: Tensor,
    partial_map: Tensor,
    *,
    scale: float,
) -> None:
    here = [indptr.data_ptr(), work.data_ptr()]
    require(addresses.view(torch.int64).tolist() == here, "the schedule has moved since it was made")
    keys = spans(kv_indptr, len(kv_indices), "kv_indptr")
    partials: dict[int, tuple[Tensor, Tensor]] = {}
    seen = [0] * len(keys)
    for seq, partial, token, token_end, first, end, after, _ in work[: int(indptr[-1].item())].tolist():
        require((token, token_end) == (seq, seq + 1), f"sequence {seq} has tokens {token} to {token_end}")
        require(keys[seq][0] <= first < end == keys[seq][1] - after, "a schedule of other lengths")
        seen[seq] += end - first
        rows = rows_of(kv, kv_indices[first:end], "kv_indices")
        result, lse = attend(q[seq : seq + 1], rows, rows[..., :512], Scores(scale, torch.ones(1, len(rows)).bool()))
        if partial == -1:
            out[seq] = (result[0] + times_zero(kv[0])).to(out.dtype)
        else:
            partials[partial] = (result[0], lse[0])
    require(seen == [end - first for first, end in keys], f"of {keys}, {seen} keys have a share")
    for seq, (first, end) in enumerate(spans(reduce_indptr, len(partial_map), "reduce_indptr")):
        if end > first:
            results, lses = zip(*(partials[row] for row in partial_map[first:end].tolist()), strict=True)
            shares = torch.stack(lses).softmax(0)
            merged = (shares[..., None] * torch.stack(results)).sum(0)
            out[final_map[seq, 0]] = (merged + times_zero(kv[0])).to(out.dtype)

"""The stand-in's get_mla_metadata_v1, and mla_decode_fwd by such a schedule.

A share is [sequence, row of its partial result or -1, first token, end, first key, end, keys after it, nothing]. Its
partial result has a row for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import (
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

"""The stand-in's mla_decode_fwd and mla_prefill_fwd, over a latent pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.amd.aiter.checks import (
    EIGHT_BITS,
    Scores,
    attend,
    distances,
    require,
    require_tensor,
    rows_of,
    run,
    spans,
    times_zero,
)
from tests.amd.aiter.latent_schedule import decode_by_schedule
from tests.amd.aiter.signatures import Release


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

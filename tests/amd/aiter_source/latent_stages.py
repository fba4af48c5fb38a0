"""Stand-ins for the two assembly kernels of aiter.mla, in float64: stage 1 of mla_decode_fwd, and mla_prefill_fwd's.

They follow from the data that AITER's stage 2 reads, and from the shapes next to the kernels' declarations in
aiter/ops/attention.py. They are called by position, as AITER does; releases have added arguments at the end.
"""

from itertools import pairwise

import torch
from torch import Tensor


def mla_decode_stage1_asm_fwd(
    q: Tensor,
    kv: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    num_kv_splits_indptr: Tensor,
    work_meta_data: Tensor | None,
    work_indptr: Tensor | None,
    work_info_set: Tensor | None,
    max_seqlen_q: int,
    page_size: int,
    nhead_kv: int,
    scale: float,
    split_data: Tensor,
    split_lse: Tensor,
    *rest: object,
) -> None:
    """Writes output and log-sum-exp of each split of each sequence's keys. Splits without a key are left unchanged.

    q: [T, heads, 576], max_seqlen_q tokens of each sequence; kv: [pages, 1, 1, 576]
    split_data: [T, splits, heads, 512], float32 unless it is the output itself; split_lse likewise, 1 wide
    """
    assert work_meta_data is None, "this stands for the kernel without a schedule alone"
    assert (page_size, nhead_kv) == (1, 1), "plain decode"
    assert qo_indptr.tolist() == list(range(0, len(q) + 1, max_seqlen_q)), "as many tokens of each sequence"
    split_data.fill_(float("nan"))
    split_lse.fill_(float("nan"))
    # Stage 2 reads at most as many splits of a sequence as it has blocks of this many keys.
    keys_of_split = 64 if q.shape[1] == 16 and max_seqlen_q == 1 else 16
    splits_of = num_kv_splits_indptr.diff().tolist()
    for seq, (first, end) in enumerate(pairwise(kv_indptr.tolist())):
        num_splits = min(splits_of[seq], -(-(end - first) // keys_of_split))
        cuts = torch.linspace(first, end, num_splits + 1).round().long().tolist()
        for split, (start, stop) in enumerate(pairwise(cuts)):
            for token in range(max_seqlen_q):
                row, seen = seq * max_seqlen_q + token, end - (max_seqlen_q - 1 - token)
                rows = kv[kv_indices[start : max(start, min(stop, seen))].long(), 0, 0].double()
                logits = scale * q[row].double() @ rows.T
                split_data[row, split] = (logits.softmax(-1) @ rows[:, : split_data.shape[-1]]).to(split_data.dtype)
                split_lse[row, split, :, 0] = logits.logsumexp(-1)


def mla_prefill_asm_fwd(
    q: Tensor,
    kv: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    scale: float,
    split_data: Tensor,
    split_lse: Tensor,
) -> None:
    """Computes causal attention of all new tokens. split_data: [T, 1, heads, 512], in the dtype of the output"""
    spans = zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True)
    for (first, end), (first_key, end_key) in spans:
        rows = kv[kv_indices[first_key:end_key].long(), 0, 0].double()
        for token in range(first, end):
            seen = rows[: len(rows) - (end - 1 - token)]
            logits = scale * q[token].double() @ seen.T
            split_data[token, 0] = (logits.softmax(-1) @ seen[:, : split_data.shape[-1]]).to(split_data.dtype)
            split_lse[token, 0, :, 0] = logits.logsumexp(-1)

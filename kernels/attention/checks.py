"""What the launchers of paged attention check: cheap, on the host, and only what would corrupt memory silently."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.kernels.attention.limits import refusals


def check_paged_tensors(
    kernel: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """ValueError for a problem that no kernel serves; the rest was checked by the runtime and is asserted here."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, v_head_dim = v_pages.shape
    reasons = refusals(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        dtype=q.dtype,
    )
    if reasons:
        raise ValueError(f"{kernel} does not serve this: {'; '.join(reasons)}")
    num_seqs = kv_len.shape[0]
    assert k_pages.shape == (num_pages, page_size, num_kv_heads, head_dim), "k_pages and v_pages disagree"
    assert out.shape == (num_tokens, num_q_heads, v_head_dim), "out disagrees with q and v_pages"
    assert q.dtype == k_pages.dtype == v_pages.dtype == out.dtype
    assert q.stride(2) == k_pages.stride(3) == v_pages.stride(3) == out.stride(2) == 1, "the last stride must be 1"
    assert table.dtype == row_of_seq.dtype == kv_len.dtype == q_indptr.dtype == torch.int32
    assert table.stride(1) == 1
    assert table.shape[1] >= 1
    assert row_of_seq.shape == (num_seqs,)
    assert q_indptr.shape == (num_seqs + 1,)
    assert all(x.is_contiguous() for x in (row_of_seq, kv_len, q_indptr))
    assert lse is None or (lse.dtype == torch.float32 and lse.shape == (num_tokens, num_q_heads))

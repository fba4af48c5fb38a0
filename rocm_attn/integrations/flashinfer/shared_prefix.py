"""Attention over a prefix that all requests share, in separate tensors, and over each request's own KV, in pages.

Names and arguments are FlashInfer's. There, MultiLevelCascadeAttentionWrapper replaces both of these wrappers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.integrations.flashinfer.calls import PagedKV, Result
from rocm_attn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.merging import merge_state
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from rocm_attn.integrations.flashinfer.requests import check_layout
from rocm_attn.integrations.flashinfer.wrapped import Wrapper


def _over_both(prefix: Result, unique: Result) -> Tensor:
    """Returns the attention over the keys of both."""
    (out_a, lse_a), (out_b, lse_b) = prefix, unique
    return merge_state(out_a, lse_a, out_b, lse_b)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(Wrapper):
    """Decode over a shared prefix and lists of pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        self._kv_layout = check_layout(kv_layout)
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Plans a batch for later calls of forward(). Raises the same as BatchDecodeWithPagedKVCacheWrapper.plan."""
        lists = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._unique.plan(*lists, *sizes, q_data_type=data_type, kv_data_type=data_type)

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedKV) -> Tensor:
        """Returns the attention over both: [requests, q_heads, head_dim].

        k_shared, v_shared: [tokens, kv_heads, head_dim] in NHD, [kv_heads, tokens, head_dim] in HND
        Raises BadTensor, WrongState.
        """
        layout = self._kv_layout
        prefix = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=layout, return_lse=True)
        return _over_both(prefix, self._unique.run(q, unique_kv_cache, return_lse=True))


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(Wrapper):
    """Prefill over a shared prefix and lists of pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        self._kv_layout = check_layout(kv_layout)
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Plans a float16 batch for later forward(). Raises the same as BatchPrefillWithPagedKVCacheWrapper.plan."""
        lists = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._unique.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: PagedKV,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Returns the attention over both: [tokens, q_heads, head_dim]; causal only in the pages.

        k_shared, v_shared: as in BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward
        Raises BadTensor, WrongState.
        """
        prefix = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        unique = self._unique.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        return _over_both(prefix, unique)

"""Attention over a prefix that all requests share, in separate tensors, and over each request's own KV, in pages.

Names and arguments are FlashInfer's. There, MultiLevelCascadeAttentionWrapper replaces both of these wrappers.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from rocm_attn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.merging import merge_state
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from rocm_attn.integrations.flashinfer.requests import check_layout
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.wrapped import Wrapper


class _SharedPrefixWrapper(Wrapper):
    """The common part. PAGED: the wrapper of each request's own KV"""

    PAGED: ClassVar[Callable[..., Any]]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        self._kv_layout = check_layout(kv_layout)
        self._unique = type(self).PAGED(float_workspace_buffer, kv_layout)

    def _over_both(self, given: Given, unique: Any, sm_scale: float | None = None) -> Tensor:
        """Returns the attention over the keys of the prefix and those of the pages."""
        shared = given.q, given.k_shared, given.v_shared
        prefix: Any = single_prefill_with_kv_cache(
            *shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        (out_a, lse_a), (out_b, lse_b) = prefix, unique
        return merge_state(out_a, lse_a, out_b, lse_b)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode over a shared prefix and lists of pages."""

    PAGED = BatchDecodeWithPagedKVCacheWrapper

    @as_in_flashinfer
    def begin_forward(self, given: Given) -> None:
        """Plans a batch for later calls of forward(). Raises the same as BatchDecodeWithPagedKVCacheWrapper.plan."""
        lists = given.unique_kv_indptr, given.unique_kv_indices, given.unique_kv_last_page_len
        sizes = given.num_qo_heads, given.num_kv_heads, given.head_dim, given.page_size
        self._unique.plan(*lists, *sizes, q_data_type=given.data_type, kv_data_type=given.data_type)

    @as_in_flashinfer
    def forward(self, given: Given) -> Tensor:
        """Returns the attention over both: [requests, q_heads, head_dim].

        k_shared, v_shared: [tokens, kv_heads, head_dim] in NHD, [kv_heads, tokens, head_dim] in HND
        Raises BadTensor, WrongState.
        """
        return self._over_both(given, self._unique.run(given.q, given.unique_kv_cache, return_lse=True))


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill over a shared prefix and lists of pages."""

    PAGED = BatchPrefillWithPagedKVCacheWrapper

    @as_in_flashinfer
    def begin_forward(self, given: Given) -> None:
        """Plans a float16 batch for later forward(). Raises the same as BatchPrefillWithPagedKVCacheWrapper.plan."""
        values = vars(given)
        self._unique.plan(head_dim_qk=values.pop("head_dim"), **values)

    @as_in_flashinfer
    def forward(self, given: Given) -> Tensor:
        """Returns the attention over both: [tokens, q_heads, head_dim]; causal only in the pages.

        k_shared, v_shared: as in BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward
        Raises BadTensor, WrongState.
        """
        scores = {"causal": given.causal, "sm_scale": given.sm_scale}
        unique = self._unique.forward_return_lse(given.q, given.unique_kv_cache, **scores)
        return self._over_both(given, unique, given.sm_scale)

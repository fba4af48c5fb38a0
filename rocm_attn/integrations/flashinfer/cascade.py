"""Levels of shared KV, and merging over them. Names and arguments are FlashInfer's."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch
from rocm_attn.integrations.flashinfer.calls import PagedKV
from rocm_attn.integrations.flashinfer.merging import merge_state, merge_state_in_place, merge_states
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from rocm_attn.integrations.flashinfer.wrapped import Wrapper

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Attention over levels of KV, merged over all levels. More sequences share a level than the next one.

    num_levels:             of KV, from the one that most sequences share to the one that each has for itself
    float_workspace_buffer: sets the wrapper's device; nothing is written to it
    ..._buf_arr:            a list with the buffer of each level's BatchPrefillWithPagedKVCacheWrapper; with
    use_cuda_graph Raises BadBatch, BadSetting, BadTensor.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer)
        given = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers = [each if use_cuda_graph and each is not None else [None] * num_levels for each in given]
        _check_levels(num_levels, *buffers)
        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *of_level)
            for of_level in zip(*buffers, strict=True)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffers: Tensor | list[Tensor]
    ) -> None:
        """Does nothing: no workspace of the caller's is used."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Plans batches for later calls of run(), one per level; all have the same new tokens.

        causal: for the last level; tokens see all of the levels before it
        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan. Raises Unsupported, BadBatch,
        BadTensor, NeverFits.
        """
        lists = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        _check_levels(len(self._levels), *lists)
        for level, of_level in enumerate(zip(*lists, strict=True)):
            self._levels[level].plan(
                *of_level,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: PagedKV) -> Tensor:
        """Returns the attention over all levels: [tokens, q_heads, head_dim]. Raises BadTensor, WrongState."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


def _check_levels(num_levels: int, *lists: list[Tensor] | list[None]) -> None:
    if num_levels < 1 or any(len(each) != num_levels for each in lists):
        raise BadBatch(
            f"{[len(each) for each in lists]} tensors for {num_levels} levels; give one of each kind per level"
        )

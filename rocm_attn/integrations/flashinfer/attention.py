"""Attention whose softmax has sinks. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttentionWithAttentionSinkWrapper"]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill and decode over lists of pages, with a sink of each head in the denominator.

    The arguments after backend choose FlashInfer's kernel before a plan; here plan() fixes them, and they are ignored.
    Raises Unsupported, BadSetting, BadTensor.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, backend=backend)

    def run(self, q: Tensor, paged_kv_cache: PagedKV, *args: Any, **kwargs: Any) -> Result:
        """Returns attention as BatchPrefillWithPagedKVCacheWrapper.run does, with its keywords.

        args: the sinks, float [q_heads], in units of logits, and then the scale of logits in place of the plan's
        Raises BadBatch if they are missing, BadSetting, and what that run() raises.
        """
        if len(args) != 2 or not isinstance(args[0], Tensor):
            raise BadBatch(f"run() got {len(args)} arguments after the cache; give the sinks and the scale of logits")
        if kwargs.keys() & {"q_scale", "k_scale"}:
            raise BadSetting("run() got q_scale or k_scale with a scale of logits; multiply that scale by them")
        sinks, sm_scale = args
        return super().run(q, paged_kv_cache, q_scale=sm_scale / self._ready()[1].scale, sinks=sinks, **kwargs)

    run_return_lse = functools.partialmethod(run, return_lse=True)

"""Attention of batches of any lengths, and with sinks in its softmax. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.integrations.flashinfer.batch import listed_batch
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments, Scale, pages_of
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, on_host
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from rocm_attn.integrations.flashinfer.requests import NO_POSITIONS, Geometry, ScoreRules, as_dtype, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper
from rocm_attn.problem import UNLIMITED_WINDOW

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]


class BatchAttention(PlannedWrapper):
    """Prefill and decode over lists of pages in one step, with log-sum-exps. Raises BadSetting."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(torch.empty(0, dtype=torch.uint8, device=device), kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch for later calls of run().

        qo_indptr:  int [S + 1], the first new token of each sequence; new tokens are its last ones
        kv_indptr:  int [S + 1], the first entry of each sequence's pages in kv_indices; kv_len_arr: int [S], its tokens
        Raises Unsupported, BadBatch, BadTensor. Then nothing is planned.
        """
        refuse(use_profiler=use_profiler)
        geometry = Geometry(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            page_size,
            as_dtype(q_data_type),
            as_dtype(kv_data_type),
            causal=causal,
        )
        geometry = ScoreRules(NO_POSITIONS, UNLIMITED_WINDOW, logits_soft_cap, sm_scale).over(geometry)
        q, indptr, kv_len = on_host(qo_indptr, kv_indptr, kv_len_arr)
        if len(indptr) != len(kv_len) + 1 or (indptr[1:] - indptr[:-1] < -(-kv_len // page_size)).any():
            raise BadBatch(
                f"kv_len_arr is {kv_len.tolist()} with kv_indptr {indptr.tolist()}; give each sequence an entry, and "
                f"pages of {page_size} tokens for all of its tokens"
            )
        batch = listed_batch(BatchLengths(q, indptr[:-1], kv_len), kv_indices, indptr)
        self._plan(batch, geometry, geometry.dtype)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: kernels here read K and V at any strides. Raises BadSetting for a variant without a name."""
        if variant != "independent":
            raise BadSetting(f"variant is {variant!r}; it must be 'independent'")

    def run(
        self,
        q: Tensor,
        kv_cache: PagedKV,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Result:
        """Returns the planned batch's attention over a layer's pages, [tokens, q_heads, v_head_dim], and LSE to base 2.

        logits_soft_cap: the plan's; 0 means the same
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        planned = self._ready()[1].soft_cap
        if logits_soft_cap not in (0.0, planned):
            raise BadSetting(f"logits_soft_cap is {logits_soft_cap}, planned with {planned}; call plan() again")
        call = RunArguments(out, lse, True, k_scale=k_scale, v_scale=v_scale)
        return self._attend(q, pages_of(kv_cache, self._kv_layout), call)


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

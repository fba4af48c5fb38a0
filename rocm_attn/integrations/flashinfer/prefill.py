"""Prefill: any number of new tokens per sequence, over pages. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rocm_attn.integrations.flashinfer.batch import PagedKVLists
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments, Scale, pages_of
from rocm_attn.integrations.flashinfer.cells import Masks
from rocm_attn.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from rocm_attn.integrations.flashinfer.requests import Geometry, ScoreRules, as_dtype, is_deterministic, refuse
from rocm_attn.integrations.flashinfer.single import as_nhd, attend_alone
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Result:
    """Returns the attention of a sequence's last tokens: [tokens, q_heads, v_head_dim]; LSE [tokens, q_heads], base 2.

    q: [tokens, q_heads, head_dim]; k, v: [kv_len, kv_heads, dim] in NHD, [kv_heads, kv_len, dim] in HND
    custom_mask: [tokens, kv_len], not 0 where a key is seen; in place of causality
    Raises Unsupported, BadTensor.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    return attend_alone(
        q,
        as_nhd(k, v, kv_layout),
        ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        RunArguments(return_lse=return_lse, k_scale=k_scale, v_scale=v_scale),
        causal=causal,
        masks=Masks(custom_mask, packed_custom_mask),
        out_dtype="as q" if o_dtype is None else o_dtype,
        backend=backend,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PlannedWrapper):
    """Prefill over lists of pages.

    use_cuda_graph: whether run() is captured. Batches then have as many sequences as paged_kv_last_page_len_buf has
                    entries, and no more new tokens than the first batch; the buffers keep the arguments of plan()
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
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs or None, variant_owns_mask=variant_owns_mask)
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers, use_cuda_graph=use_cuda_graph)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plans a batch for later calls of run().

        qo_indptr:   int [S + 1], the first new token of each sequence; new tokens are its last ones
        custom_mask: [cells], not 0 where a key is seen, in place of causality; packed_custom_mask: eight cells per byte
        fixed_split_size, disable_split_kv: results are the same in any batch
        Raises Unsupported, BadBatch, BadTensor, NeverFits. Then nothing is planned.
        """
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        q_dtype = as_dtype(q_data_type)
        geometry = Geometry(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo or head_dim_qk,
            page_size,
            q_dtype,
            as_dtype(kv_data_type or q_dtype),
            causal=causal,
            deterministic=is_deterministic(fixed_split_size, disable_split_kv),
        )
        geometry = ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale).over(geometry)
        lists = PagedKVLists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        batch = lists.batch(qo_indptr, page_size, Masks(custom_mask, packed_custom_mask))
        self._plan(batch, geometry, as_dtype(o_data_type or q_dtype))
        self._keep([qo_indptr, paged_kv_indptr, paged_kv_indices[: batch.num_entries], paged_kv_last_page_len])

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedKV | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Returns the attention of the planned batch over a layer's pages: [tokens, q_heads, v_head_dim], and LSE.

        paged_kv_cache: as in BatchDecodeWithPagedKVCacheWrapper.run
        lse_base: log2 or ln; lse_layout: NH, [tokens, q_heads], or HN
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(
            args=args or None,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress,
        )
        self._check_window(window_left)
        call = RunArguments(out, lse, return_lse, lse_base, lse_layout, q_scale, k_scale, v_scale, sinks)
        return self._attend(q, pages_of(paged_kv_cache, self._kv_layout), call)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Deprecated in FlashInfer: run(), with scores that may differ from those of plan()."""
        self._rescore(ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale), causal=causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

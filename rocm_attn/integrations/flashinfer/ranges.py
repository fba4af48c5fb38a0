"""Prefill whose new tokens are causal, and see a span of keys besides. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.integrations.flashinfer.batch import PagedKVLists, PlannedBatch
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments, Scale, pages_of
from rocm_attn.integrations.flashinfer.cells import ranged_cells
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.requests import (
    NO_POSITIONS,
    Geometry,
    ScoreRules,
    as_dtype,
    is_deterministic,
    refuse,
)
from rocm_attn.problem import UNLIMITED_WINDOW

__all__ = ["BatchPrefillWithCausalBidirectionalRangesWrapper"]


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill over lists of pages, whose mask each run() gives as a span of keys for each new token.

    Each run() makes the cells of its mask and begins a step with them, so run() cannot be captured.
    q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo: of every plan
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
        pos_encoding_mode: str = "NONE",
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        if use_cuda_graph:
            raise Unsupported(
                "use_cuda_graph is not served with spans of each run(), because their mask is made on the way; leave "
                "it False"
            )
        if pos_encoding_mode != NO_POSITIONS:
            raise BadSetting(f"pos_encoding_mode is {pos_encoding_mode!r}; this wrapper takes NONE alone")
        super().__init__(float_workspace_buffer, kv_layout)
        self._made_with: dict[str, Any] = {
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": o_data_type if o_data_type is not None else q_data_type,
            "head_dim_qk": head_dim_qk,
            "head_dim_vo": head_dim_vo,
        }
        self._given: tuple[PlannedBatch, Geometry] | None = None

    def plan(  # type: ignore[override]  # FlashInfer's too takes less than its parent's
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
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Takes a batch for later calls of run(), which plan it with their spans.

        What run() determines is refused here, as in FlashInfer: causality, masks and windows.
        Raises Unsupported, BadSetting, BadBatch, BadTensor. Then nothing is planned.
        """
        self._given = None
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        for name, value, plain in (
            ("custom_mask", custom_mask, None),
            ("packed_custom_mask", packed_custom_mask, None),
            ("causal", causal, False),
            ("window_left", window_left, UNLIMITED_WINDOW),
            ("logits_soft_cap", logits_soft_cap or None, None),
            ("pos_encoding_mode", pos_encoding_mode, NO_POSITIONS),
            ("max_sequence_kv", max_sequence_kv, None),
            ("token_pos_in_items_len", token_pos_in_items_len, 0),
        ):
            if value is not plain and value != plain:
                raise BadSetting(f"plan() got {name}; run() takes the spans and their windows, so leave it out")
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}
        asked: dict[str, Any] = {name: as_dtype(each) for name, each in dtypes.items() if each is not None}
        for name, found in {**asked, "head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}.items():
            if found not in (None, self._made_with[name]):
                raise BadSetting(
                    f"{name} is {found}, and the wrapper was made with {self._made_with[name]}; make another"
                )
        made = self._made_with
        geometry = Geometry(
            num_qo_heads,
            num_kv_heads,
            made["head_dim_qk"],
            made["head_dim_vo"],
            page_size,
            made["q_data_type"],
            made["kv_data_type"],
            deterministic=is_deterministic(fixed_split_size, disable_split_kv),
        )
        geometry = ScoreRules(NO_POSITIONS, UNLIMITED_WINDOW, None, sm_scale).over(geometry)
        lists = PagedKVLists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._given = lists.batch(qo_indptr, page_size), geometry

    begin_forward = plan  # type: ignore[assignment]  # see plan

    def run(  # type: ignore[override]  # FlashInfer's too takes less than its parent's
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        bidirectional_ranges: Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Result:
        """Returns the attention of the planned batch over a layer's pages: [tokens, q_heads, v_head_dim], and LSE.

        bidirectional_ranges: int32 [tokens, 2], contiguous, first and last key of each new token's span, counted in its
                              sequence; -1 and -1: none
        causal_window_left:   previous keys that a token sees besides itself outside of its span; negative: all
        range_window_left:    keys of the span that it sees up to its own, itself included; 0 or negative: all. Later
                              ones are seen in any case
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(kv_cache_sf=kv_cache_sf)
        if self._given is None:
            raise WrongState("nothing is planned; call plan() before run()")
        batch, geometry = self._given
        lengths, ranges = batch.lengths, bidirectional_ranges
        shape = (lengths.num_tokens, 2)
        if ranges.dtype != torch.int32 or tuple(ranges.shape) != shape or not ranges.is_contiguous():
            raise BadTensor(
                f"bidirectional_ranges are {ranges.dtype} {list(ranges.shape)} with strides {list(ranges.stride())}; "
                f"they must be int32 {list(shape)}, contiguous"
            )
        cells = ranged_cells(lengths, ranges.to(self.device), causal_window_left, range_window_left)
        self._plan(replace(batch, mask=cells), geometry, self._made_with["o_data_type"])
        call = RunArguments(out, lse, return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return self._attend(q, pages_of(paged_kv_cache, self._kv_layout), call)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(  # type: ignore[override]  # see run
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        bidirectional_ranges: Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedKV | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Deprecated in FlashInfer: run()."""
        spans = bidirectional_ranges, causal_window_left, range_window_left, q_scale, k_scale, v_scale
        return self.run(q, paged_kv_cache, *spans, return_lse=return_lse, kv_cache_sf=kv_cache_sf)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

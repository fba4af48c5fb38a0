"""Prefill: any number of new tokens per sequence, over pages. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor, WrongState
from rocm_attn.integrations.flashinfer.asked import (
    Geometry,
    Scores,
    as_dtype,
    check_layout,
    provider_of,
    refuse,
)
from rocm_attn.integrations.flashinfer.batch import Room
from rocm_attn.integrations.flashinfer.calls import Call, PagedKV, Result, Scale, attend, pages_of
from rocm_attn.integrations.flashinfer.planned import PlannedAttention
from rocm_attn.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from rocm_attn.integrations.flashinfer.single import as_nhd, attend_alone
from rocm_attn.integrations.flashinfer.wrapped import PagedKVLists, Wrapper, keep

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
    refuse(
        scale_q=scale_q is not None,
        scale_k=scale_k is not None,
        scale_v=scale_v is not None,
        kv_cache_sf=kv_cache_sf is not None,
    )
    return attend_alone(
        q,
        as_nhd(k, v, kv_layout),
        Scores(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        Call(return_lse=return_lse, k_scale=k_scale, v_scale=v_scale),
        causal=causal,
        masks=(custom_mask, packed_custom_mask),
        out_dtype="as q" if o_dtype is None else o_dtype,
        backend=backend,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Prefill over lists of pages: plan() once per step, run() for each layer.

    float_workspace_buffer: sets the wrapper's device; nothing is written to it
    use_cuda_graph:         whether run() is captured. Batches then have as many sequences as qo_indptr_buf names, and
                            no more new tokens than the first batch; the buffers keep the arguments of plan()
    backend:                a provider of ours, or a name of FlashInfer's, which stands for the best one
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
        refuse(jit_args=jit_args is not None, jit_kwargs=bool(jit_kwargs), variant_owns_mask=variant_owns_mask)
        super().__init__(float_workspace_buffer)
        self._kv_layout = check_layout(kv_layout)
        self._provider = provider_of(backend)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        if use_cuda_graph and any(buffer is None for buffer in self._buffers().values()):
            raise BadTensor(f"with use_cuda_graph give {', '.join(self._buffers())}")
        self._planned: PlannedAttention | None = (
            None if use_cuda_graph else PlannedAttention(self.device, self._provider)
        )
        self._geometry: Geometry | None = None
        self._out_dtype = torch.float16

    def _buffers(self) -> dict[str, Tensor | None]:
        return {
            "qo_indptr_buf": self._qo_indptr_buf,
            "paged_kv_indptr_buf": self._paged_kv_indptr_buf,
            "paged_kv_indices_buf": self._paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": self._paged_kv_last_page_len_buf,
        }

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller's is used."""

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
            prefix_len_ptr=prefix_len_ptr is not None,
            token_pos_in_items_ptr=token_pos_in_items_ptr is not None,
            max_item_len_ptr=max_item_len_ptr is not None,
        )
        q_dtype = as_dtype(q_data_type)
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, page_size
        deterministic = fixed_split_size is not None or disable_split_kv
        geometry = Geometry(
            *sizes, q_dtype, as_dtype(kv_data_type or q_dtype), scale=1.0, causal=causal, deterministic=deterministic
        )
        geometry = Scores(pos_encoding_mode, window_left, logits_soft_cap, sm_scale).over(geometry)
        lists = PagedKVLists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        self._use(qo_indptr, lists, (custom_mask, packed_custom_mask), geometry)
        self._out_dtype = as_dtype(o_data_type or q_dtype)

    begin_forward = plan

    def _use(
        self,
        qo_indptr: Tensor,
        lists: PagedKVLists,
        masks: tuple[Tensor | None, Tensor | None],
        geometry: Geometry,
    ) -> None:
        batch = lists.batch(qo_indptr, geometry.page_size, masks)
        if self._planned is None:
            assert self._qo_indptr_buf is not None
            assert self._paged_kv_indices_buf is not None
            num_entries = len(self._paged_kv_indices_buf)
            fixed = Room(len(self._qo_indptr_buf) - 1, max(batch.lengths.num_tokens, 1), num_entries, num_entries)
            self._planned = PlannedAttention(self.device, self._provider, fixed=fixed)
        self._planned.plan(batch, geometry)
        if self._use_cuda_graph:
            given = qo_indptr, lists.indptr, lists.indices[: batch.num_entries], lists.last_page_len
            for (name, buffer), values in zip(self._buffers().items(), given, strict=True):
                keep(name, buffer, values)
        self._geometry = geometry

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
            positional=bool(args),
            kv_cache_sf=kv_cache_sf is not None,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor is not None,
            uses_spcompress=bool(uses_spcompress),
        )
        planned, geometry = self._ready()
        if window_left is not None and window_left != geometry.window_left:
            raise BadSetting(f"window_left is {window_left}, planned with {geometry.window_left}; call plan() again")
        call = Call(out, lse, return_lse, lse_base, lse_layout, q_scale, k_scale, v_scale, sinks)
        return attend(planned, geometry, self._out_dtype, q, pages_of(paged_kv_cache, self._kv_layout), call)

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
    ) -> Result:
        """Deprecated in FlashInfer: run(), with scores that may differ from those of plan()."""
        scores = Scores(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        self._geometry = self._ready()[1].seen(causal, scores)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
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
    ) -> Result:
        """Deprecated in FlashInfer: forward() with the LSE."""
        scores = Scores(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        self._geometry = self._ready()[1].seen(causal, scores)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def _ready(self) -> tuple[PlannedAttention, Geometry]:
        if self._planned is None or self._geometry is None:
            raise WrongState("nothing is planned; call plan() before run()")
        return self._planned, self._geometry

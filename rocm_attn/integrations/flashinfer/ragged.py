"""Prefill whose K and V are two tensors, token after token. Names and arguments are FlashInfer's.

Kernels treat each token as a page of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.batch import token_batch
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments
from rocm_attn.integrations.flashinfer.cells import Masks
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, on_host
from rocm_attn.integrations.flashinfer.requests import Geometry, ScoreRules, as_dtype, is_deterministic, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper


class BatchPrefillWithRaggedKVCacheWrapper(PlannedWrapper):
    """Prefill of sequences whose K and V are concatenated.

    kv_layout: NHD: k and v are [tokens, kv_heads, dim]; HND: [kv_heads, tokens, dim]
    Raises Unsupported, also for use_cuda_graph, because the lengths of K and V have no bound.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs or None, variant_owns_mask=variant_owns_mask)
        if use_cuda_graph:
            raise Unsupported(
                "the ragged wrapper does not serve use_cuda_graph, because no buffer bounds K and V; capture the "
                "paged one"
            )
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plans a batch for later calls of run().

        qo_indptr, kv_indptr: int [S + 1], the first new token of each sequence, and its first row of K and V
        Other arguments: see BatchPrefillWithPagedKVCacheWrapper.plan. Raises Unsupported, BadBatch, BadTensor.
        """
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        q_dtype = as_dtype(q_data_type)
        geometry = Geometry(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo or head_dim_qk,
            1,
            q_dtype,
            as_dtype(kv_data_type or q_dtype),
            causal=causal,
            deterministic=is_deterministic(fixed_split_size, disable_split_kv),
        )
        geometry = ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale).over(geometry)
        q, kv = on_host(qo_indptr, kv_indptr)
        lengths = BatchLengths(q, kv[:-1], np.diff(kv))
        batch = token_batch(lengths, kv, Masks(custom_mask, packed_custom_mask), self.device)
        self._plan(batch, geometry, as_dtype(o_data_type or q_dtype))

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Result:
        """Returns the attention of the planned batch over a layer's K and V: [tokens, q_heads, v_head_dim], and LSE.

        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(args=args or None, o_scale=None if o_scale == 1.0 else o_scale, kv_cache_sf=kv_cache_sf)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if k.dim() != 3 or v.dim() != 3:
            raise BadTensor(f"k is {list(k.shape)} and v {list(v.shape)}; each must have 3 dimensions")
        call = RunArguments(out, lse, return_lse, lse_base, lse_layout, q_scale, k_scale, v_scale)
        return self._attend(q, (k.unsqueeze(1), v.unsqueeze(1)), call)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

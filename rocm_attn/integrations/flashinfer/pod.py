"""Prefill and decode in one batch (POD). Names and arguments are FlashInfer's.

Source: Kamath et al., "POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM Inference", 2024.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.calls import PagedKV, pages_of
from rocm_attn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, Dtype
from rocm_attn.integrations.flashinfer.lengths import on_host
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from rocm_attn.integrations.flashinfer.requests import refuse
from rocm_attn.integrations.flashinfer.wrapped import Wrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper(Wrapper):
    """Decode over lists of pages, and prefill of one sequence whose K and V are two tensors: two launches."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, *buffers, jit_args=jit_args
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._decode.is_cuda_graph_enabled

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decode batch. Raises the same as BatchDecodeWithPagedKVCacheWrapper.plan."""
        lists, sizes = (indptr, indices, last_page_len), (num_qo_heads, num_kv_heads, head_dim, page_size)
        scores: dict[str, Any] = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left}
        scores |= {
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "data_type": data_type,
        }
        self._decode.plan(*lists, *sizes, **scores)

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: PagedKV,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs of prefill, [tokens, q_heads, head_dim], and of decode. Log-sum-exps are not returned.

        ..._p: as in single_prefill_with_kv_cache. ..._d: the plan and the layout of the wrapper hold, as in FlashInfer.
        Scales are those of decode. Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d, args=args or None)
        decode = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        scores: dict[str, Any] = {"pos_encoding_mode": pos_encoding_mode_p, "window_left": window_left_p}
        scores |= {"sm_scale": sm_scale_p, "causal": causal_p, "kv_layout": kv_layout_p}
        scores |= {"custom_mask": custom_mask_p, "packed_custom_mask": packed_custom_mask_p}
        prefill = single_prefill_with_kv_cache(q_p, k_p, v_p, **scores)
        assert isinstance(prefill, Tensor)
        assert isinstance(decode, Tensor)
        return prefill, decode


class BatchPODWithPagedKVCacheWrapper(Wrapper):
    """Prefill and decode over lists of pages of one cache, in one mixed step: decode's sequences are its last ones."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        self._both = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._num_prefill = 0
        self._causal = True  # of the last run(): the next plan begins the same step
        self._scores: dict[str, Any] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False, as in FlashInfer: run() of this wrapper is not captured."""
        return False

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans both batches as one. Raises the same as BatchPrefillWithPagedKVCacheWrapper.plan."""
        q_p, kv_p, q_d, kv_d = map(torch.from_numpy, on_host(qo_indptr_p, kv_indptr_p, qo_indptr_d, kv_indptr_d))
        if not len(kv_p) or not len(kv_d) or not len(q_p) or (q_d.diff() != 1).any():
            raise BadBatch(f"qo_indptr_d is {q_d[:9].tolist()}...; decode has one token each, and indptr begin at 0")
        self._num_prefill, num_pages = int(q_p[-1]), int(kv_p[-1])
        self._scores = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
        self._both.plan(
            torch.cat((q_p, self._num_prefill + q_d[1:])),
            torch.cat((kv_p, num_pages + kv_d[1:])),
            torch.cat((kv_indices_p[:num_pages], kv_indices_d)),
            torch.cat((last_page_len_p, last_page_len_d)),
            *(num_qo_heads, num_kv_heads, head_dim, page_size),
            causal=self._causal,
            q_data_type=q_data_type or data_type or "float16",
            kv_data_type=kv_data_type or data_type,
            **self._scores,
        )

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: PagedKV,
        q_d: Tensor,
        paged_kv_cache_d: PagedKV,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """Returns the outputs of prefill and of decode; return_lse: then also a pair of log-sum-exps, to base 2.

        Both caches must be one. FlashInfer's scales are those of decode alone, and so are refused if they are not 1.
        Raises Unsupported, BadTensor, WrongState.
        """
        refuse(custom_mask_p=custom_mask_p, packed_custom_mask_p=packed_custom_mask_p)
        if any(scale not in (None, 1.0) for scale in (q_scale, k_scale, v_scale)):
            raise Unsupported(
                "q_scale, k_scale and v_scale scale decode alone, and are not served in one step with "
                "prefill; give sm_scale to plan(), and scale the output"
            )
        sides = zip(pages_of(paged_kv_cache_p, "NHD"), pages_of(paged_kv_cache_d, "NHD"), strict=True)
        if any(p.data_ptr() != d.data_ptr() or p.stride() != d.stride() for p, d in sides):
            raise Unsupported(
                "prefill and decode over two caches are not served in one step; give one cache, or use "
                "BatchPrefillWithPagedKVCacheWrapper and BatchDecodeWithPagedKVCacheWrapper"
            )
        if len(q_p) != self._num_prefill:
            raise BadTensor(f"q_p has {len(q_p)} tokens, and {self._num_prefill} are planned; call plan() again")
        self._causal = causal_p
        out, lse = self._both.forward_return_lse(
            torch.cat((q_p, q_d)), paged_kv_cache_p, causal=causal_p, **self._scores
        )
        sides_of = [each.split((len(q_p), len(q_d))) for each in (out, lse)]
        return (sides_of[0], sides_of[1]) if return_lse else sides_of[0]

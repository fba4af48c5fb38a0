"""The calls of FlashInfer's wrappers by vLLM 0.32.0 and SGLang 0.5.23, written from their source lines.

Only lines that touch a wrapper are here, with the engines' names of variables. `flashinfer` is given, as an engine
imports it.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def vllm_fast_plan_decode(
    flashinfer: ModuleType,
    self: Any,  # decode wrapper
    indptr_cpu: Tensor,
    indices: Tensor,
    last_page_len_cpu: Tensor,
    seq_lens_cpu: Tensor,
    *,
    fixed_split_size: int = -1,
    disable_split_kv: bool = False,
    **more: Any,
) -> None:
    """vllm/v1/attention/backends/flashinfer.py:2676, fast_plan_decode."""
    if not self.is_cuda_graph_enabled or getattr(self, "vllm_first_call", True):
        self.plan(
            indptr=indptr_cpu,
            indices=indices,
            last_page_len=last_page_len_cpu,
            non_blocking=True,
            block_tables=None,
            seq_lens=seq_lens_cpu,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            data_type=None,
            rope_scale=None,
            rope_theta=None,
            **more,
        )
        self.vllm_first_call = False
        return
    assert self.is_cuda_graph_enabled, "Should be cudagraph only here"
    more.pop("o_data_type")
    flashinfer.decode.fast_decode_plan(
        self,
        indptr=indptr_cpu,
        indices=indices,
        last_page_len=last_page_len_cpu,
        data_type=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        **more,
    )


class VllmImpl:
    """The state of vllm/v1/attention/backends/flashinfer.py:1842, FlashInferImpl, that wrappers meet."""

    def __init__(self, scale: float, window_left: int, logits_soft_cap: float | None, sinks: Tensor | None) -> None:
        self.scale, self.window_left, self.logits_soft_cap, self.sinks = scale, window_left, logits_soft_cap, sinks

    def decode(self, decode_wrapper: Any, query: Tensor, kv_cache: Any, output: Tensor) -> None:
        """Lines 2404 to 2461 of its forward."""
        assert decode_wrapper is not None
        assert decode_wrapper._window_left == self.window_left
        assert decode_wrapper._logits_soft_cap == (self.logits_soft_cap or 0.0)
        assert decode_wrapper._sm_scale == self.scale
        decode_wrapper.run(
            query,
            kv_cache,
            q_scale=1.0,
            k_scale=1.0,
            v_scale=1.0,
            out=output,
            kv_cache_sf=None,
            sinks=self.sinks,
        )

    def prefill(self, flashinfer: ModuleType, prefill_wrapper: Any, query: Tensor, kv_cache: Any, out: Tensor) -> None:
        """Lines 2220 to 2273 of its forward."""
        assert isinstance(prefill_wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
        assert prefill_wrapper._window_left == self.window_left
        assert prefill_wrapper._logits_soft_cap == (self.logits_soft_cap or 0.0)
        assert prefill_wrapper._sm_scale == self.scale
        assert prefill_wrapper._causal
        if isinstance(prefill_wrapper, flashinfer.BatchAttentionWithAttentionSinkWrapper):
            assert self.sinks is not None
            prefill_wrapper.run(query, kv_cache, self.sinks, self.scale * 1.0 * 1.0, v_scale=1.0, out=out)
        else:
            prefill_wrapper.run(query, kv_cache, q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out, kv_cache_sf=None)


class SglangDecode:
    """sglang/srt/layers/attention/flashinfer_backend.py: decode steps in a graph, with pages of one token.

    Lines 1142 (_create_decode_wrappers), 1766 (call_begin_forward), 846 (the planner in a capture), 1566 (forward).
    """

    def __init__(self, flashinfer: ModuleType, bs: int, room: int, workspace: Tensor, **model: Any) -> None:
        device, self._flashinfer, self._model = workspace.device, flashinfer, model
        self.kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
        self.cuda_graph_kv_indices = torch.zeros(room, dtype=torch.int32, device=device)
        self.kv_last_page_len = torch.ones(bs, dtype=torch.int32, device=device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            backend="auto",
            use_cuda_graph=True,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=self.kv_indptr[: bs + 1],
            paged_kv_indices_buffer=self.cuda_graph_kv_indices,
            paged_kv_last_page_len_buffer=self.kv_last_page_len[:bs],
        )

    def call_begin_forward(self, seq_lens_cpu: Tensor, slots: Tensor, *, in_capture: bool) -> None:
        wrapper, bs = self.wrapper, len(seq_lens_cpu)
        kv_indptr = self.kv_indptr
        kv_indptr[1 : bs + 1] = torch.cumsum(seq_lens_cpu.to(kv_indptr.device), dim=0)
        kv_indptr = kv_indptr[: bs + 1]
        assert wrapper.is_cuda_graph_enabled
        kv_indices = wrapper._paged_kv_indices_buf
        kv_indices[: len(slots)] = slots
        global_override_indptr_cpu = torch.empty_like(kv_indptr, device="cpu")
        global_override_indptr_cpu[0] = 0
        global_override_indptr_cpu[1 : bs + 1] = torch.cumsum(seq_lens_cpu, dim=0)
        wrapper_uses_fast_decode_plan = (
            hasattr(wrapper.begin_forward, "func") and wrapper.begin_forward.func == self._flashinfer.fast_decode_plan
        )
        assert wrapper_uses_fast_decode_plan == (not in_capture)
        more = {"global_override_indptr_cpu": global_override_indptr_cpu} if wrapper_uses_fast_decode_plan else {}
        wrapper.begin_forward(
            kv_indptr,
            kv_indices,
            self.kv_last_page_len[:bs],
            self._model["num_qo_heads"],
            self._model["num_kv_heads"],
            self._model["head_dim"],
            1,
            data_type=torch.float32,
            q_data_type=torch.float32,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
            **more,
        )
        if in_capture:
            wrapper.begin_forward = partial(self._flashinfer.fast_decode_plan, wrapper)

    def forward(self, q: Tensor, kv_cache: Any) -> Tensor:
        out: Tensor = self.wrapper.forward(
            q.contiguous(), kv_cache, sm_scale=self._model["scaling"], logits_soft_cap=0.0, k_scale=1.0, v_scale=1.0
        )
        return out


def sglang_fast_prefill_plan(self: Any) -> None:
    """flashinfer_backend.py:225: the start of fast_prefill_plan, which needs FlashInfer's CUDA module."""
    assert self.is_cuda_graph_enabled, "fast_prefill_plan is cuda-graph only"
    assert getattr(self, "_backend", None) == "fa2", "fast_prefill_plan supports the fa2 backend only"
    self._plan_info = self._cached_module.plan()


def vllm_mla_plan_info(self: Any) -> list[int]:
    """mla/flashinfer_mla_sparse_sm90.py:377, which reads the plan of FlashInfer's CUDA module."""
    return [int(x) for x in self.wrapper._plan_info]

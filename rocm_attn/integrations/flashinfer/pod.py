"""Prefill and decode in one batch (POD). Names and arguments are FlashInfer's.

Source: Kamath et al., "POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM Inference", 2024.
"""

from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.calls import pages_of
from rocm_attn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.lengths import on_host
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer, refuse
from rocm_attn.integrations.flashinfer.wrapped import Wrapper, as_plan

# Arguments of single_prefill_with_kv_cache whose names end with _p here.
_OF_PREFILL = (
    *("pos_encoding_mode", "window_left", "sm_scale", "causal", "kv_layout"),
    *("custom_mask", "packed_custom_mask"),
)

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper(Wrapper):
    """Decode over lists of pages, and prefill of one sequence whose K and V are two tensors: two launches."""

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given.float_workspace_buffer)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(use_tensor_cores=True, **vars(given))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._decode.is_cuda_graph_enabled

    def _forget_plan(self) -> None:
        self._decode._forget_plan()

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans the decode batch. Raises the same as BatchDecodeWithPagedKVCacheWrapper.plan."""
        self._decode.plan(**vars(given))

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> tuple[Tensor, Tensor]:
        """Returns the outputs of prefill, [tokens, q_heads, head_dim], and of decode. Log-sum-exps are not returned.

        ..._p: as in single_prefill_with_kv_cache. ..._d: the plan and the layout of the wrapper hold, as in FlashInfer.
        Scales are those of decode. Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        scales = {name: getattr(given, name) for name in ("q_scale", "k_scale", "v_scale")}
        decode = self._decode.run(given.q_d, given.paged_kv_cache_d, **scales)
        of_prefill = {name: getattr(given, f"{name}_p") for name in _OF_PREFILL}
        prefill = single_prefill_with_kv_cache(given.q_p, given.k_p, given.v_p, **of_prefill)
        assert isinstance(prefill, Tensor)
        assert isinstance(decode, Tensor)
        return prefill, decode


class BatchPODWithPagedKVCacheWrapper(Wrapper):
    """Prefill and decode over lists of pages of one cache, in one mixed step: decode's sequences are its last ones."""

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given.float_workspace_buffer)
        self._both = BatchPrefillWithPagedKVCacheWrapper(given.float_workspace_buffer, given.kv_layout)
        self._num_prefill = 0
        self._causal = True  # of the last run(): the next plan begins the same step
        self._scores: dict[str, Any] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False, as in FlashInfer: run() of this wrapper is not captured."""
        return False

    def _forget_plan(self) -> None:
        self._both._forget_plan()

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans both batches as one. Raises the same as BatchPrefillWithPagedKVCacheWrapper.plan."""
        bounds = given.qo_indptr_p, given.kv_indptr_p, given.qo_indptr_d, given.kv_indptr_d
        q_p, kv_p, q_d, kv_d = map(torch.from_numpy, on_host(*bounds))
        if not len(kv_p) or not len(kv_d) or not len(q_p) or (q_d.diff() != 1).any():
            raise BadBatch(f"qo_indptr_d is {q_d[:9].tolist()}...; decode has one token each, and indptr begin at 0")
        self._num_prefill, num_pages = int(q_p[-1]), int(kv_p[-1])
        for side, q, kv in (("p", q_p, kv_p), ("d", q_d, kv_d)):
            num_last, num_indices = (len(getattr(given, f"{name}_{side}")) for name in ("last_page_len", "kv_indices"))
            if not len(q) == len(kv) == num_last + 1 or int(kv[-1]) > num_indices:
                raise BadBatch(
                    f"qo_indptr_{side} has {len(q)} entries, kv_indptr_{side} {len(kv)} and ends at {int(kv[-1])}, "
                    f"last_page_len_{side} has {num_last} and kv_indices_{side} {num_indices}; both indptr have one "
                    "entry more than there are sequences, and kv_indptr ends within the indices"
                )
        self._scores = {name: getattr(given, name) for name in ("pos_encoding_mode", "window_left", "sm_scale")}
        self._both.plan(
            torch.cat((q_p, self._num_prefill + q_d[1:])),
            torch.cat((kv_p, num_pages + kv_d[1:])),
            torch.cat((given.kv_indices_p[:num_pages], given.kv_indices_d)),
            torch.cat((given.last_page_len_p, given.last_page_len_d)),
            *(given.num_qo_heads, given.num_kv_heads, given.head_dim, given.page_size),
            causal=self._causal,
            q_data_type=given.q_data_type or given.data_type or "float16",
            kv_data_type=given.kv_data_type or given.data_type,
            **self._scores,
        )

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> tuple[Any, Any]:
        """Returns the outputs of prefill and of decode; return_lse: then also a pair of log-sum-exps, to base 2.

        Both caches must be one. FlashInfer's scales are those of decode alone, and so are refused if they are not 1.
        Raises Unsupported, BadTensor, WrongState.
        """
        refuse(custom_mask_p=given.custom_mask_p, packed_custom_mask_p=given.packed_custom_mask_p)
        if any(scale not in (None, 1.0) for scale in (given.q_scale, given.k_scale, given.v_scale)):
            raise Unsupported(
                "q_scale, k_scale and v_scale scale decode alone, and are not served in one step with "
                "prefill; give sm_scale to plan(), and scale the output"
            )
        q_p, q_d, cache = given.q_p, given.q_d, given.paged_kv_cache_p
        sides = zip(pages_of(cache, "NHD"), pages_of(given.paged_kv_cache_d, "NHD"), strict=True)
        if any(p.data_ptr() != d.data_ptr() or p.stride() != d.stride() for p, d in sides):
            raise Unsupported(
                "prefill and decode over two caches are not served in one step; give one cache, or use "
                "BatchPrefillWithPagedKVCacheWrapper and BatchDecodeWithPagedKVCacheWrapper"
            )
        if len(q_p) != self._num_prefill:
            raise BadTensor(f"q_p has {len(q_p)} tokens, and {self._num_prefill} are planned; call plan() again")
        self._causal = given.causal_p
        both = torch.cat((q_p, q_d))
        out, lse = self._both.forward_return_lse(both, cache, causal=self._causal, **self._scores)
        sides_of = [each.split((len(q_p), len(q_d))) for each in (out, lse)]
        return (sides_of[0], sides_of[1]) if given.return_lse else sides_of[0]

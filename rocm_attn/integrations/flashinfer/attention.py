"""Attention of batches of any lengths, and with sinks in its softmax. Names and arguments are FlashInfer's."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.integrations.flashinfer.batch import listed_batch
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments, pages_of
from rocm_attn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, on_host
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from rocm_attn.integrations.flashinfer.requests import geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]


class BatchAttention(PlannedWrapper):
    """Prefill and decode over lists of pages in one step, with log-sum-exps. Raises BadSetting."""

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        workspace = torch.empty(0, dtype=torch.uint8, device=given.device)
        super().__init__(Given(float_workspace_buffer=workspace, kv_layout=given.kv_layout))

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans a batch for later calls of run().

        qo_indptr:  int [S + 1], the first new token of each sequence; new tokens are its last ones
        kv_indptr:  int [S + 1], the first entry of each sequence's pages in kv_indices; kv_len_arr: int [S], its tokens
        Raises Unsupported, BadBatch, BadTensor. Then nothing is planned.
        """
        geometry, page_size = geometry_of(given), given.page_size
        q, indptr, kv_len = on_host(given.qo_indptr, given.kv_indptr, given.kv_len_arr)
        if len(indptr) != len(kv_len) + 1 or (indptr[1:] - indptr[:-1] < -(-kv_len // page_size)).any():
            raise BadBatch(
                f"kv_len_arr is {kv_len.tolist()} with kv_indptr {indptr.tolist()}; give each sequence an entry, and "
                f"pages of {page_size} tokens for all of its tokens"
            )
        batch = listed_batch(BatchLengths(q, indptr[:-1], kv_len), given.kv_indices, indptr)
        self._plan(batch, geometry, geometry.dtype)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: kernels here read K and V at any strides. Raises BadSetting for a variant without a name."""
        if variant != "independent":
            raise BadSetting(f"variant is {variant!r}; it must be 'independent'")

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the planned batch's attention over a layer's pages, [tokens, q_heads, v_head_dim], and LSE to base 2.

        logits_soft_cap: the plan's; 0 means the same
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        planned = self._ready()[1].soft_cap
        if given.logits_soft_cap not in (0.0, planned):
            raise BadSetting(f"logits_soft_cap is {given.logits_soft_cap}, planned with {planned}; call plan() again")
        call = RunArguments.of(given, return_lse=True)
        return self._attend(given.q, pages_of(given.kv_cache, self._kv_layout), call)


class _WithSinks(PlannedWrapper):
    """The run() of wrappers that have a sink of each head in the denominator.

    The constructor's arguments after backend choose FlashInfer's kernel before a plan; here plan() fixes them.
    """

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        **kwargs: Any,
    ) -> Result:
        """Returns attention as the wrapper without sinks does, with its keywords.

        args: the sinks, float [q_heads], in units of logits, and then the scale of logits in place of the plan's
        Raises BadBatch if they are missing, and what that run() raises.
        """
        if len(args) != 2 or not isinstance(args[0], Tensor):
            raise BadBatch(f"run() got {len(args)} arguments after the cache; give the sinks and the scale of logits")
        scale = args[1] / self._ready()[1].scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else factor
        found: Result = super().run(q, paged_kv_cache, q_scale=scale, sinks=args[0], **kwargs)
        return found

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchAttentionWithAttentionSinkWrapper(_WithSinks, BatchPrefillWithPagedKVCacheWrapper):
    """Prefill and decode over lists of pages, with a sink of each head. Ignores the arguments after backend.

    Raises Unsupported, BadSetting, BadTensor.
    """

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        of_prefill = inspect.signature(BatchPrefillWithPagedKVCacheWrapper).parameters
        super().__init__(**{name: value for name, value in vars(given).items() if name in of_prefill})


class BatchDecodeWithAttentionSinkWrapper(_WithSinks, BatchDecodeWithPagedKVCacheWrapper):
    """Decode over lists of pages, with a sink of each head. Ignores the arguments after backend.

    kwargs: others of BatchDecodeWithPagedKVCacheWrapper. Raises Unsupported, BadSetting, BadTensor.
    """

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        buffer, layout, backend = given.float_workspace_buffer, given.kv_layout, given.backend
        super().__init__(buffer, layout, use_tensor_cores=True, backend=backend, **given.kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plans as BatchDecodeWithPagedKVCacheWrapper.plan does, and raises what that raises."""
        super().plan(*args, **kwargs)

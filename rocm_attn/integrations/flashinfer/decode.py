"""Decode: one new token, or a few, in each sequence of a batch. Names and arguments are FlashInfer's."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, Unsupported
from rocm_attn.integrations.flashinfer.batch import PagedKVLists
from rocm_attn.integrations.flashinfer.calls import PagedKV, Result, RunArguments, Scale, pages_of
from rocm_attn.integrations.flashinfer.requests import Geometry, ScoreRules, as_dtype, is_deterministic, refuse
from rocm_attn.integrations.flashinfer.single import as_nhd, attend_alone
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper
from rocm_attn.problem import UNLIMITED_WINDOW

Dtype = str | torch.dtype | None

# Arguments that plan() once took by position after page_size, in order.
_ONCE_POSITIONAL = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Returns the attention of one new token: [q_heads, v_head_dim], and its LSE [q_heads] if asked for.

    q: [q_heads, head_dim]; k, v: [kv_len, kv_heads, dim] in NHD, [kv_heads, kv_len, dim] in HND
    Raises Unsupported, BadTensor.
    """
    call = RunArguments(return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    scores = ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
    result = attend_alone(q.unsqueeze(0), as_nhd(k, v, kv_layout), scores, call, causal=True)
    return result.squeeze(0) if isinstance(result, Tensor) else (result[0].squeeze(0), result[1].squeeze(0))


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper):
    """Decode over lists of pages.

    use_cuda_graph: whether run() is captured; the three buffers then keep the arguments of plan()
    use_tensor_cores, enable_pdl: ignored, kernels are chosen here
    Raises Unsupported, BadSetting, BadTensor.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse(jit_args=jit_args)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers, use_cuda_graph=use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        """The value that the wrapper was made with."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Plans a batch for later calls of run(). Takes _plan_impl's optional arguments, by position with a warning.

        Raises Unsupported, BadBatch, BadTensor, NeverFits. Then nothing is planned.
        """
        if len(deprecated_positional_args) > len(_ONCE_POSITIONAL):
            raise TypeError(
                f"plan() takes at most {len(_ONCE_POSITIONAL)} arguments by position after page_size; got "
                f"{len(deprecated_positional_args)}"
            )
        if deprecated_positional_args:
            warnings.warn(
                "arguments of plan() after page_size are deprecated by position; name them",
                DeprecationWarning,
                stacklevel=2,
            )
            named = dict(zip(_ONCE_POSITIONAL, deprecated_positional_args, strict=False))
            if twice := sorted(named.keys() & kwargs.keys()):
                raise TypeError(f"plan() got {', '.join(twice)} twice")
            kwargs |= named
        of_kv = indptr, indices, last_page_len
        self._plan_impl(*of_kv, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Does the work of plan().

        window_left, window_right: keys before and after its own that a token sees; -1: all of them
        fixed_split_size, disable_split_kv: results are the same in any batch
        """
        if q_len_per_req < 1:
            raise BadBatch(f"q_len_per_req is {q_len_per_req}; it must be at least 1")
        if is_causal is not None and is_causal != (q_len_per_req > 1):
            raise Unsupported(f"is_causal={is_causal} with q_len_per_req={q_len_per_req} is not served; leave it None")
        q_dtype = as_dtype(data_type if q_data_type is None and data_type is not None else q_data_type or "float16")
        geometry = Geometry(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            head_dim,
            page_size,
            q_dtype,
            as_dtype(kv_data_type or data_type or q_dtype),
            window_right=max(window_right, UNLIMITED_WINDOW),
            # A request's last token has none after it.
            causal=window_right == 0 or q_len_per_req == 1,
            deterministic=is_deterministic(fixed_split_size, disable_split_kv),
        )
        geometry = ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale).over(geometry)
        lists = PagedKVLists(indptr, indices, last_page_len, seq_lens)
        batch = lists.batch(torch.arange(len(last_page_len) + 1) * q_len_per_req, page_size)
        if q_len_per_req > 1 and (batch.lengths.kv_len < q_len_per_req).any():
            raise BadBatch(
                f"a sequence has fewer tokens in its KV than q_len_per_req, {q_len_per_req}; append them first"
            )
        if self.is_cuda_graph_enabled and self._planned is not None and q_len_per_req != self._q_len_per_req:
            raise BadBatch(
                f"q_len_per_req is {q_len_per_req} after {self._q_len_per_req}; make a wrapper for each value"
            )
        self._plan(batch, geometry, as_dtype(o_data_type or q_dtype), each_one=q_len_per_req == 1)
        self._keep([indptr, indices[: batch.num_entries], last_page_len])
        self._q_len_per_req = q_len_per_req

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Result:
        """Returns the planned batch's attention over a layer's pages: [tokens, q_heads, head_dim], and LSE to base 2.

        paged_kv_cache: [pages, 2, page_size, kv_heads, head_dim] in NHD, [pages, 2, kv_heads, page_size, head_dim] in
                        HND, or K and V alone
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(
            args=args or None,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        self._check_window(window_left)
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req was given to run(); give it to plan()", DeprecationWarning, stacklevel=2)
            if q_len_per_req != self._q_len_per_req:
                raise BadBatch(
                    f"q_len_per_req is {q_len_per_req}, planned with {self._q_len_per_req}; call plan() again"
                )
        call = RunArguments(out, lse, return_lse, "log2", "NH", q_scale, k_scale, v_scale, sinks)
        return self._attend(q, pages_of(paged_kv_cache, self._kv_layout), call)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._rescore(ScoreRules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Decode whose run() is captured. Every batch has as many sequences as last_page_len_buffer has entries."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Dtype = None,
    kv_data_type: Dtype = None,
    data_type: Dtype = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """Plans as the wrapper's plan() does, and raises the same; engines put it in place of that one.

    global_override_indptr_cpu: indptr on the host, int [S + 1]. With pages of one token no length is read from a device
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise BadBatch(f"fast_decode_plan() got a {type(self).__name__}; give it a BatchDecodeWithPagedKVCacheWrapper")
    last = torch.ones(len(last_page_len), dtype=torch.int32) if page_size == 1 else last_page_len
    more: dict[str, Any] = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
    more |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "data_type": data_type}
    more |= {"fixed_split_size": fixed_split_size, "disable_split_kv": disable_split_kv}
    more |= {"logits_soft_cap": logits_soft_cap, "q_len_per_req": q_len_per_req}
    starts = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    self._plan_impl(starts, indices, last, num_qo_heads, num_kv_heads, head_dim, page_size, **more)

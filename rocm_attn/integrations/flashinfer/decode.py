"""Decode: one new token, or a few, in each sequence of a batch. Names and arguments are FlashInfer's."""

import functools
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import MOST_TOKENS
from rocm_attn.errors import BadBatch, BadProblem, Unsupported
from rocm_attn.integrations.flashinfer.batch import PagedKVLists
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, pages_of
from rocm_attn.integrations.flashinfer.requests import ScoreRules, as_dtype, geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.single import as_nhd, attend_alone
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan, deprecated
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import whole_number
from rocm_attn.problem import UNLIMITED_WINDOW

# Arguments of _plan_impl() that plan() never took by position after page_size; the others it did, in this order.
_BY_NAME_ONLY = ("window_right", "is_causal", "use_token_head_sf")


@as_in_flashinfer
def single_decode_with_kv_cache(q: Tensor, given: Given) -> Result:
    """Returns the attention of one new token: [q_heads, v_head_dim], and its LSE [q_heads] if asked for.

    q: [q_heads, head_dim]; k, v: [kv_len, kv_heads, dim] in NHD, [kv_heads, kv_len, dim] in HND
    Raises Unsupported, BadTensor.
    """
    require_tensor("q", q)
    kv, call = as_nhd(given.k, given.v, given.kv_layout), RunArguments.of(given)
    result = attend_alone(q.unsqueeze(0), kv, ScoreRules.of(given), call, causal=True)
    return result.squeeze(0) if isinstance(result, Tensor) else (result[0].squeeze(0), result[1].squeeze(0))


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper):
    """Decode over lists of pages.

    use_cuda_graph: whether run() is captured; the three buffers then keep the arguments of plan()
    use_tensor_cores, enable_pdl: ignored, kernels are chosen here
    Raises Unsupported, BadSetting, BadTensor.
    """

    BUFFERS = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._use_tensor_cores: bool = given.use_tensor_cores
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        """The value that the wrapper was made with."""
        return self._use_tensor_cores

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans a batch for later calls of run(). Takes _plan_impl's optional arguments, by position with a warning.

        Raises Unsupported, BadBatch, BadTensor, NeverFits. Then nothing is planned.
        """
        values = vars(given)
        named, by_position = values.pop("kwargs"), values.pop("deprecated_positional_args")
        if by_position:
            of_impl = inspect.signature(self._plan_impl).parameters
            allowed = [name for name in of_impl if name not in (*values, *_BY_NAME_ONLY)]
            if len(by_position) > len(allowed):
                raise TypeError(
                    f"plan() takes at most {len(allowed)} arguments by position after page_size; got {len(by_position)}"
                )
            warnings.warn(
                "arguments of plan() after page_size are deprecated by position; name them",
                DeprecationWarning,
                stacklevel=4,
            )
            once = dict(zip(allowed, by_position, strict=False))
            if twice := sorted(once.keys() & named.keys()):
                raise TypeError(f"plan() got {', '.join(twice)} twice")
            named |= once
        self._plan_impl(**values, **named)

    @as_plan
    def _plan_impl(self, given: Given) -> None:
        """Does the work of plan().

        window_left, window_right: keys before and after its own that a token sees; -1: all of them
        """
        each = whole_number("q_len_per_req", given.q_len_per_req, BadProblem)
        if not 1 <= each <= MOST_TOKENS:
            raise BadBatch(f"q_len_per_req is {each}; it must be from 1 to {MOST_TOKENS}")
        if given.is_causal is not None and given.is_causal != (each > 1):
            raise Unsupported(f"is_causal={given.is_causal} with q_len_per_req={each} is not served; leave it None")
        geometry = geometry_of(
            given,
            window_right=max(whole_number("window_right", given.window_right, BadProblem), UNLIMITED_WINDOW),
            # A request's last token has none after it.
            causal=given.window_right == 0 or each == 1,
        )
        require_tensor("last_page_len", given.last_page_len)
        lists = PagedKVLists(given.indptr, given.indices, given.last_page_len, given.seq_lens)
        batch = lists.batch(torch.arange(len(given.last_page_len) + 1) * each, given.page_size)
        if each > 1 and (batch.lengths.kv_len < each).any():
            raise BadBatch(f"a sequence has fewer tokens in its KV than q_len_per_req, {each}; append them first")
        if self.is_cuda_graph_enabled and self._planned is not None and each != self._q_len_per_req:
            raise BadBatch(f"q_len_per_req is {each} after {self._q_len_per_req}; make a wrapper for each value")
        self._plan(batch, geometry, as_dtype(given.o_data_type or geometry.dtype), each_one=each == 1)
        self._keep([given.indptr, given.indices[: batch.num_entries], given.last_page_len])
        self._q_len_per_req = each

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the planned batch's attention over a layer's pages: [tokens, q_heads, head_dim], and LSE to base 2.

        paged_kv_cache: [pages, 2, page_size, kv_heads, head_dim] in NHD, [pages, 2, kv_heads, page_size, head_dim] in
                        HND, or K and V alone
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        self._check_window(given.window_left)
        if (each := given.q_len_per_req) is not None:
            warnings.warn("q_len_per_req was given to run(); give it to plan()", DeprecationWarning, stacklevel=3)
            if each != self._q_len_per_req:
                raise BadBatch(f"q_len_per_req is {each}, planned with {self._q_len_per_req}; call plan() again")
        return self._attend(given.q, pages_of(given.paged_kv_cache, self._kv_layout), RunArguments.of(given))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    forward = deprecated("BatchDecodeWithPagedKVCacheWrapper.forward")
    forward_return_lse = deprecated("BatchDecodeWithPagedKVCacheWrapper.forward_return_lse")


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


@as_in_flashinfer
def fast_decode_plan(wrapper: Any, given: Given) -> None:
    """Plans as the wrapper's plan() does, and raises the same; engines put it in place of that one.

    global_override_indptr_cpu: indptr on the host, int [S + 1]. With pages of one token no length is read from a device
    """
    if not isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
        got = type(wrapper).__name__
        raise BadBatch(f"fast_decode_plan() got a {got}; give it a BatchDecodeWithPagedKVCacheWrapper")
    values = vars(given)
    on_host = values.pop("global_override_indptr_cpu")
    if on_host is not None:
        values["indptr"] = on_host
    if given.page_size == 1:
        require_tensor("last_page_len", given.last_page_len)
        values["last_page_len"] = torch.ones(len(given.last_page_len), dtype=torch.int32)
    wrapper._plan_impl(**values)

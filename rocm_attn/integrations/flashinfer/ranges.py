"""Prefill whose new tokens are causal, and see a span of keys besides. Names and arguments are FlashInfer's."""

import functools
import inspect
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.integrations.flashinfer.batch import PagedKVLists, PlannedBatch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, pages_of
from rocm_attn.integrations.flashinfer.cells import ranged_cells
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.requests import NO_POSITIONS, Geometry, as_dtype, geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.wrapped import as_plan, deprecated

__all__ = ["BatchPrefillWithCausalBidirectionalRangesWrapper"]

# Arguments of plan() that run() determines.
_OF_RUN = (
    *("custom_mask", "packed_custom_mask", "causal", "window_left", "logits_soft_cap", "pos_encoding_mode"),
    *("max_sequence_kv", "token_pos_in_items_len"),
)


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill over lists of pages, whose mask each run() gives as a span of keys for each new token.

    Each run() makes the cells of its mask and begins a step with them, so run() cannot be captured.
    q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo: of every plan
    Raises Unsupported, BadSetting, BadTensor.
    """

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        if given.use_cuda_graph:
            raise Unsupported(
                "use_cuda_graph is not served with spans of each run(), because their mask is made on the way; leave "
                "it False"
            )
        if given.pos_encoding_mode != NO_POSITIONS:
            raise BadSetting(f"pos_encoding_mode is {given.pos_encoding_mode!r}; this wrapper takes NONE alone")
        super().__init__(given.float_workspace_buffer, given.kv_layout)
        names = ("q_data_type", "kv_data_type", "o_data_type", "head_dim_qk", "head_dim_vo")
        self._made_with = {name: getattr(given, name) for name in names}
        self._made_with["o_data_type"] = given.o_data_type or given.q_data_type
        self._given: tuple[PlannedBatch, Geometry] | None = None

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._given = None

    @as_plan
    def plan(self, given: Given) -> None:
        """Takes a batch for later calls of run(), which plan it with their spans.

        Causality, masks and windows are refused here, as in FlashInfer: run() determines them.
        Raises Unsupported, BadSetting, BadBatch, BadTensor. Then nothing is planned.
        """
        defaults = inspect.signature(self.plan).parameters
        given.logits_soft_cap = given.logits_soft_cap or None
        for name in _OF_RUN:
            value, plain = getattr(given, name), defaults[name].default
            if value is not plain and (isinstance(value, Tensor) or value != plain):
                raise BadSetting(f"plan() got {name}; run() takes the spans and their windows, so leave it out")
        for name, made_with in self._made_with.items():
            found = getattr(given, name)
            if isinstance(found, str):
                found = as_dtype(found)
            if found not in (None, made_with):
                raise BadSetting(f"{name} is {found}, and the wrapper was made with {made_with}; make another")
        geometry = geometry_of(Given(**vars(given) | self._made_with))
        lists = PagedKVLists(given.paged_kv_indptr, given.paged_kv_indices, given.paged_kv_last_page_len)
        self._given = lists.batch(given.qo_indptr, given.page_size), geometry

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the attention of the planned batch over a layer's pages: [tokens, q_heads, v_head_dim], and LSE.

        bidirectional_ranges: int32 [tokens, 2], contiguous, first and last key of each new token's span, counted in its
                              sequence; -1 and -1: none
        causal_window_left:   previous keys that a token sees besides itself outside of its span; negative: all
        range_window_left:    keys of the span that it sees up to its own, itself included; 0 or negative: all. Later
                              ones are seen in any case
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        if self._given is None:
            raise WrongState("nothing is planned; call plan() before run()")
        batch, geometry = self._given
        lengths, ranges = batch.lengths, given.bidirectional_ranges
        shape = (lengths.num_tokens, 2)
        if ranges.dtype != torch.int32 or tuple(ranges.shape) != shape or not ranges.is_contiguous():
            raise BadTensor(
                f"bidirectional_ranges are {ranges.dtype} {list(ranges.shape)} with strides {list(ranges.stride())}; "
                f"they must be int32 {list(shape)}, contiguous"
            )
        windows = given.causal_window_left, given.range_window_left
        cells = ranged_cells(lengths, ranges.to(self.device), *windows)
        self._plan(replace(batch, mask=cells), geometry, self._made_with["o_data_type"])
        return self._attend(given.q, pages_of(given.paged_kv_cache, self._kv_layout), RunArguments.of(given))

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward = deprecated("BatchPrefillWithCausalBidirectionalRangesWrapper.forward")
    forward_return_lse = deprecated("BatchPrefillWithCausalBidirectionalRangesWrapper.forward_return_lse")

"""Levels of shared KV, and merging over them. Names and arguments are FlashInfer's."""

from torch import Tensor

from rocm_attn.errors import BadBatch
from rocm_attn.integrations.flashinfer.calls import PagedKV
from rocm_attn.integrations.flashinfer.merging import merge_state, merge_state_in_place, merge_states
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.integrations.flashinfer.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.wrapped import Wrapper, as_plan

_LISTS = "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Attention over levels of KV, merged over all levels. More sequences share a level than the next one.

    num_levels:             of KV, from the one that most sequences share to the one that each has for itself
    float_workspace_buffer: sets the wrapper's device; nothing is written to it
    ..._buf_arr:            with use_cuda_graph, the buffer of each level's BatchPrefillWithPagedKVCacheWrapper
    Raises BadBatch, BadSetting, BadTensor.
    """

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        workspace, use_cuda_graph, num_levels = given.float_workspace_buffer, given.use_cuda_graph, given.num_levels
        super().__init__(workspace)
        arrays = [getattr(given, f"{name}_arr") for name in BatchPrefillWithPagedKVCacheWrapper.BUFFERS]
        buffers = [each if use_cuda_graph and each is not None else [None] * num_levels for each in arrays]
        _check_levels(num_levels, *buffers)
        self._use_cuda_graph: bool = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, given.kv_layout, use_cuda_graph, *of_level)
            for of_level in zip(*buffers, strict=True)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffers: Tensor | list[Tensor]
    ) -> None:
        """Does nothing: no workspace of the caller's is used."""

    def _forget_plan(self) -> None:
        for level in self._levels:
            level._forget_plan()

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans batches for later calls of run(), one per level; all have the same new tokens.

        causal: for the last level; tokens see all of the levels before it
        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan. Raises Unsupported, BadBatch,
        BadTensor, NeverFits. Then nothing is planned.
        """
        values = vars(given)
        lists = [values.pop(name) for name in _LISTS]
        _check_levels(len(self._levels), *lists)
        head_dim, causal = values.pop("head_dim"), values.pop("causal")
        for level, of_level in enumerate(zip(*lists, strict=True)):
            is_last = level == len(self._levels) - 1
            self._levels[level].plan(*of_level, head_dim_qk=head_dim, causal=causal and is_last, **values)

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: PagedKV) -> Tensor:
        """Returns the attention over all levels: [tokens, q_heads, head_dim]. Raises BadTensor, WrongState."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


def _check_levels(num_levels: int, *lists: list[Tensor] | list[None]) -> None:
    if num_levels < 1 or any(len(each) != num_levels for each in lists):
        raise BadBatch(
            f"{[len(each) for each in lists]} tensors for {num_levels} levels; give one of each kind per level"
        )

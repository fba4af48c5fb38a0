"""Merging attention over parts of the keys, and levels of shared KV. Names and arguments are FlashInfer's.

A state is an output [tokens, heads, dim] and its log-sum-exp [tokens, heads], to base 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.integrations.flashinfer.calls import PagedKV
from rocm_attn.integrations.flashinfer.page import step_ops
from rocm_attn.integrations.flashinfer.planned import LOG2_E
from rocm_attn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from rocm_attn.machine.devices import on_device, with_index

_LN_2 = 1.0 / LOG2_E


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both sides; the output has the dtype of v_a.

    v_a, v_b: [tokens, heads, dim]; s_a, s_b: [tokens, heads], to base 2
    Raises BadTensor.
    """
    out, lse = torch.empty_like(v_a, memory_format=torch.contiguous_format), s_a.to(torch.float32, copy=True)
    _check(v_a, lse)
    _merge((v_a, lse.mul_(_LN_2)), (v_b, s_b.to(torch.float32) * _LN_2), (out, lse))
    return out, lse.mul_(LOG2_E)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """merge_state into v and s.

    s:    float32 [tokens, heads]
    mask: [tokens], not 0 where a token takes the other side; None: all do
    Raises BadTensor.
    """
    _check(v, s)
    if s.dtype != torch.float32:
        raise BadTensor(f"s is {s.dtype}; it is written, so it must be torch.float32")
    other = s_other.to(torch.float32) * _LN_2
    if mask is not None:
        if mask.shape != s.shape[:1]:
            raise BadTensor(f"mask is {list(mask.shape)}; it has one entry for each of {s.shape[0]} tokens")
        other = other.masked_fill((mask == 0)[:, None], float("-inf"))
    merged = s * _LN_2
    _merge((v, merged), (v_other, other), (v, merged))
    merged.mul_(LOG2_E)
    s.copy_(merged if mask is None else torch.where((mask != 0)[:, None], merged, s))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all sides.

    v: [tokens, sides, heads, dim]; s: [tokens, sides, heads], to base 2
    Raises BadTensor.
    """
    if v.dim() != 4 or s.shape != v.shape[:3] or v.shape[1] == 0:
        raise BadTensor(
            f"v is {list(v.shape)} and s {list(s.shape)}; they are [tokens, sides, heads, dim] and without dim"
        )
    natural = s.to(torch.float32) * _LN_2
    lse = natural[:, 0].clone()
    # Between sides float32, so that a sum of many is rounded once.
    out = v[:, 0].to(torch.float32, copy=True).contiguous()
    sides = [(v[:, side], natural[:, side]) for side in range(1, v.shape[1])]
    for side in sides or [(v[:, 0], torch.full_like(lse, float("-inf")))]:
        _merge((out, lse), side, (out, lse))
    return out.to(v.dtype), lse.mul_(LOG2_E)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    if a[0].shape != b[0].shape or a[1].shape != b[1].shape:
        raise BadTensor(f"the sides are {list(a[0].shape)} and {list(b[0].shape)}; they have the same tokens and heads")
    device = with_index(a[0].device)
    with on_device(device):
        step_ops(device).merge_states(*a, *b, *into)


def _check(v: Tensor, s: Tensor) -> None:
    if v.dim() != 3 or s.shape != v.shape[:2]:
        raise BadTensor(
            f"v is {list(v.shape)} and s {list(s.shape)}; they are [tokens, heads, dim] and [tokens, heads]"
        )


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of KV, each of which more sequences share than the next: merged over all levels.

    num_levels:             of KV, from what most share to what is each sequence's own
    float_workspace_buffer: its device is the wrapper's; nothing is written to it
    ..._buf_arr:            for each level, what BatchPrefillWithPagedKVCacheWrapper takes; with use_cuda_graph
    Raises BadBatch, BadSetting, BadTensor.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        given = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers = [each if use_cuda_graph and each is not None else [None] * num_levels for each in given]
        _check_levels(num_levels, *buffers)
        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *of_level)
            for of_level in zip(*buffers, strict=True)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether run() is captured."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        """Nothing: no workspace of the caller's is used."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Use these batches from now on, one for each level; all have the same new tokens.

        causal: of the last level; tokens see all of the levels before it
        The rest as BatchPrefillWithPagedKVCacheWrapper.plan. Raises Unsupported, BadBatch, BadTensor, NeverFits.
        """
        lists = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        _check_levels(len(self._levels), *lists)
        for level, of_level in enumerate(zip(*lists, strict=True)):
            self._levels[level].plan(
                *of_level,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: PagedKV) -> Tensor:
        """Attention over all levels: [tokens, q_heads, head_dim]. Raises BadTensor, WrongState."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


def _check_levels(num_levels: int, *lists: list[Tensor] | list[None]) -> None:
    if num_levels < 1 or any(len(each) != num_levels for each in lists):
        raise BadBatch(
            f"{[len(each) for each in lists]} tensors for {num_levels} levels; give one of each kind a level"
        )

"""aiter.flash_attn_varlen_func over packed keys and values: expanded attention of latent layers.

A key has 192 elements and a value 128 in DeepSeek-V3. Chunks of a prefix are merged by its log-sum-exps.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.entries import VARLEN
from rocm_attn.providers.aiter.prefill import varlen_scores
from rocm_attn.providers.contract import SMALLEST_POOL


class PackedRows(NamedTuple):
    """Sequences one after the other; each has at least one query and one key.

    q:          [T, heads, dim]
    k, v:       [keys, heads, dim | v_dim], contiguous
    q_indptr, kv_indptr: int32 [S + 1] on the device
    max_q_len, max_kv_len: of the longest sequence
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_indptr: Tensor
    kv_indptr: Tensor
    max_q_len: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class PackedVarlen:
    """Attention of each sequence's queries to its keys. problem: as many KV heads as query heads, without a window"""

    problem: Problem

    def describe(self) -> str:
        """Name and problem as text."""
        return f"aiter.flash_attn_varlen_func({self.problem})"

    def attend(self, rows: PackedRows, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns out [T, heads, v_dim] in q's dtype, and lse float32 [T, heads]."""
        q, v = rows.q, rows.v
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        out, lse = library.flash_attn_varlen_func()(
            q=q,
            k=rows.k,
            v=v,
            cu_seqlens_q=rows.q_indptr,
            cu_seqlens_k=rows.kv_indptr,
            max_seqlen_q=rows.max_q_len,
            max_seqlen_k=rows.max_kv_len,
            alibi_slopes=None,
            return_lse=True,
            out=out,
            sink_ptr=sinks,
            **varlen_scores(self.problem),
        )
        return out, lse.t()


def packed_varlen(problem: Problem, target: Target, provider: str, max_kv_len: int) -> PackedVarlen | None:
    """The kernel for sequences of up to max_kv_len keys.

    None if the provider is another one, AITER is not installed, or its row refuses the problem.
    """
    if provider not in ("auto", "aiter") or not target.is_amd:
        return None
    pool = replace(SMALLEST_POOL, max_kv_len=max_kv_len)
    if any(entry.complaint() for entry in library.ENTRY_POINTS[VARLEN.name]) or VARLEN.refusals(problem, target, pool):
        return None
    try:
        VARLEN.bind(problem, target, pool)
    except LookupError:
        return None
    return PackedVarlen(problem)

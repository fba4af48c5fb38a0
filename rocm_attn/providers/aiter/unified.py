"""aiter.ops.triton.attention.unified_attention: one Triton kernel for decode, extend and mixed steps."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.scores import refuse_unified, window_size
from rocm_attn.providers.contract import AttendArgs, PoolSize, Unscheduled
from rocm_attn.target import Target


@dataclass(frozen=True, slots=True)
class Unified(Unscheduled):
    """Attention through the dense block table.

    It allocates its own split buffers; while a graph is captured they come from the graph's memory pool.
    """

    problem: Problem

    def describe(self) -> str:
        return f"aiter.unified_attention({self.problem})"

    def attend(self, args: AttendArgs) -> None:
        step = args.step
        # Releases that read linear pools alone do not know the word.
        layout = {"shuffled_kv_cache": True} if self.problem.pool is PoolKind.VECTORIZED else {}
        # With 1 it takes token i for the only one of sequence i, which holds in steps that decode alone.
        max_seqlen_q = 1 if step.shape.kind.decodes else max(2, step.max_q_len)
        library.unified_attention()(
            q=args.q,
            k=args.k_pages,
            v=args.v_pages,
            out=args.out,
            cu_seqlens_q=step.q_indptr,
            max_seqlen_q=max_seqlen_q,
            # int64: its address arithmetic takes the dtype of the lengths, and wraps above 2 GiB with int32.
            seqused_k=step.kv_len_int64,
            max_seqlen_k=step.max_kv_len,
            softmax_scale=self.problem.scale,
            # It knows no other; the only new token of a sequence sees all keys either way.
            causal=True,
            window_size=window_size(self.problem),
            block_table=step.block_table,
            softcap=self.problem.logits_soft_cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            alibi_slopes=args.alibi_slopes,
            sinks=args.sinks,
            **layout,
        )


def bind_unified(problem: Problem, target: Target, pool: PoolSize) -> Unified:
    """The kernel; it chooses its own tiles. Raises LookupError for scores that it gets wrong."""
    refuse_unified(problem)
    return Unified(problem)

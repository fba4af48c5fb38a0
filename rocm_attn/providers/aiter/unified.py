"""aiter.ops.triton.attention.unified_attention: one Triton kernel for decode, extend and mixed steps.

A tile that shows a query no key sets its running maximum to 0 if it was -inf. If that tile is the first one, and all
logits that follow are below about -87, their exponentials underflow: the result is NaN, or wrong with splits. Only
queries in a block with others meet such tiles, in two cases, and both are prevented: - before a window that begins in a
later tile. A sink of FAR_BELOW starts the maximum there, and adds exp(-1e30) = 0. - at the head of a split that comes
after the query. Steps of more than one new token are not split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.aiter.scores import refuse_unified, window_size
from rocm_attn.providers.contract import NO_SCHEDULE, Schedule, StepBounds

# Below every logit, and in float32 far from overflow when it is multiplied by log2(e).
FAR_BELOW = -1e30

# Sequences of up to this number of keys are not split; it does not use their length otherwise.
LONGEST_UNSPLIT = 512


@dataclass(frozen=True, slots=True)
class FarBelowSinks:
    """A sink for each query head, far below every logit. Decode steps have none, since a single query needs none."""

    num_q_heads: int

    def words(self, shape: PaddedShape) -> int:
        return 0 if shape.kind.decodes else self.num_q_heads

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        words.view(torch.float32).fill_(FAR_BELOW)


class Unified(AiterKernel):
    """Attention through the dense block table.

    It allocates its own split buffers; while a graph is captured they come from the graph's memory pool.
    """

    name = "unified_attention"
    refuses = (refuse_unified,)

    @property
    def schedule(self) -> Schedule:
        """Provides sinks for layers that have a window and no sinks of their own."""
        lacks_sinks = self.problem.window_left != UNLIMITED_WINDOW and not self.problem.has_sinks
        return FarBelowSinks(self.problem.num_q_heads) if lacks_sinks else NO_SCHEDULE

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        decodes = bounds.shape.kind.decodes
        # Releases that read only linear pools do not have this argument.
        layout = {"shuffled_kv_cache": True} if self.problem.pool is PoolKind.VECTORIZED else {}
        library.unified_attention()(
            q=args.q,
            k=args.pages.k,
            v=args.pages.v,
            out=args.out,
            cu_seqlens_q=step.q_indptr,
            # With 1 it assumes that token i is the only one of sequence i, which is true only in decode steps.
            max_seqlen_q=1 if decodes else max(2, bounds.max_q_len),
            # int64: its address arithmetic takes the dtype of the lengths, and wraps above 2 GiB with int32.
            seqused_k=step.kv_len_int64,
            max_seqlen_k=bounds.max_kv_len if decodes else min(bounds.max_kv_len, LONGEST_UNSPLIT),
            softmax_scale=self.problem.scale,
            # It supports no other value; the only new token of a sequence sees all keys in both cases.
            causal=True,
            window_size=window_size(self.problem),
            block_table=step.block_table,
            softcap=self.problem.logits_soft_cap,
            # q is unchanged: codes of eight-bit pages become elements of its dtype.
            q_descale=None,
            k_descale=args.pages.k_scale,
            v_descale=args.pages.v_scale,
            alibi_slopes=args.slopes,
            sinks=args.schedule.view(torch.float32) if self.schedule.words(bounds.shape) else args.sinks,
            **layout,
        )

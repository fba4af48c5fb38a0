"""aiter.mla.mla_decode_fwd with a schedule: every compute unit gets an equal share of all keys, cut where it must be.

get_mla_metadata_v1 makes the schedule from the step's lengths, on the device, once per step. It writes two addresses of
the schedule's own buffers into it, so a schedule that has moved must be made again; here both are one buffer.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.few_tokens import RowStarts
from rocm_attn.providers.aiter.mla import FEW_HEADS, MANY_HEADS, MOST_SPLITS, EqualSplits, LatentDecode
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, num_words

# A share is a multiple of this number of keys.
_KV_GRANULARITY = 16


@dataclass(frozen=True, slots=True)
class LatentShares:
    """A share of all keys for each compute unit.

    compute_units: of the device; AITER always makes this number of shares
    dtype:         of q and of the pages
    num_heads:     query heads that are passed to mla_decode_fwd, a multiple of 16
    num_rows:      new tokens of each sequence; several lie in rows of LastRows, whose beginnings are in the schedule
    """

    compute_units: int
    dtype: torch.dtype
    num_heads: int = FEW_HEADS
    num_rows: int = 1

    def words(self, shape: PaddedShape) -> int:
        return num_words(self.parts(shape))

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        addresses, indptr, work, reduce_indptr, final_map, partial_map, starts = cut(words, self.parts(bounds.shape))
        if self.num_rows > 1:
            RowStarts().build(queries, step, bounds, starts)
        library.get_mla_metadata_v1()(
            seqlens_qo_indptr=starts if self.num_rows > 1 else step.q_indptr,
            seqlens_kv_indptr=step.page_indptr,
            kv_last_page_lens=step.last_page_len,
            num_heads_per_head_k=self.num_heads,
            num_heads_k=1,
            is_causal=True,
            work_metadata_ptrs=addresses,
            work_info_set=work,
            work_indptr=indptr,
            reduce_indptr=reduce_indptr,
            reduce_final_map=final_map,
            reduce_partial_map=partial_map,
            page_size=1,
            kv_granularity=_KV_GRANULARITY,
            max_seqlen_qo=self.num_rows,
            uni_seqlen_qo=self.num_rows,
            fast_mode=True,
            max_split_per_batch=-1,
            dtype_q=self.dtype,
            dtype_kv=self.dtype,
        )

    def parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """The schedule's buffers, of the sizes that get_mla_metadata_info_v1 gives.

        They are: two addresses; shares by compute unit, and the work of each; partial results by sequence, their
        destinations, and their indices; last, where rows of several tokens begin. Heads that no kernel takes unchanged
        count as further sequences of 16 heads. It depends on the release which those are, and unneeded room stays
        empty. Up to 128 rows of heads and tokens are one tile, so four tokens of 16 heads take the room of one.
        """
        units, tiles = self.compute_units, 1 if self.num_heads == MANY_HEADS else self.num_heads // FEW_HEADS
        num_seqs, shares = shape.num_seqs, (shape.num_seqs + units - 1) * tiles
        return (
            ScratchTensor((2,), torch.uint64),
            ScratchTensor((units + 1,), torch.int32),
            ScratchTensor((shares, 8), torch.int32),
            ScratchTensor((num_seqs * tiles + 1,), torch.int32),
            ScratchTensor((num_seqs * tiles, 2), torch.int32),
            ScratchTensor((min(shares, 2 * (units - 1) * tiles),), torch.int32),
            ScratchTensor((num_seqs + 1 if self.num_rows > 1 else 0,), torch.int32),
        )

    def as_arguments(self, shape: PaddedShape, words: Tensor) -> dict[str, Tensor | int]:
        addresses, indptr, work, reduce_indptr, final_map, partial_map, _ = cut(words, self.parts(shape))
        return {
            "work_meta_data": addresses,
            "work_indptr": indptr,
            "work_info_set": work,
            "reduce_indptr": reduce_indptr,
            "reduce_final_map": final_map,
            "reduce_partial_map": partial_map,
            # The most shares that one sequence may be cut into. Without it, the function may ignore the schedule.
            "num_kv_splits": self.compute_units,
        }


@dataclass(frozen=True, slots=True)
class SharesOfFew:
    """Shares in steps of up to max_seqs sequences; larger steps use equal splits."""

    max_seqs: int
    shares: LatentShares
    splits: EqualSplits

    def words(self, shape: PaddedShape) -> int:
        """Room for this step and for every smaller one: shares of few sequences take more than splits of many."""
        few = replace(shape, num_seqs=min(shape.num_seqs, self.max_seqs))
        return max(self.shares.words(few), self.splits.words(shape))

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        work = self._of(bounds.shape)
        work.build(queries, step, bounds, words[: work.words(bounds.shape)])

    def as_arguments(self, shape: PaddedShape, words: Tensor) -> dict[str, Tensor | int]:
        work = self._of(shape)
        return work.as_arguments(shape, words[: work.words(shape)])

    def _of(self, shape: PaddedShape) -> LatentShares | EqualSplits:
        return self.shares if shape.num_seqs <= self.max_seqs else self.splits


def bind_scheduled_latent_decode(problem: Problem, target: Target, pool: PoolSize) -> LatentDecode:
    """Binds the kernel, with shares for the compute units, for steps in which equal splits leave some of them idle.

    No more has been measured: AITER's own gate ends the schedule at 31 sequences on gfx950, and SGLang uses it for FP8
    alone, because it costs more than it gains.
    """
    units = target.compute_units
    work = SharesOfFew((units - 1) // MOST_SPLITS, LatentShares(units, problem.dtype), EqualSplits(units))
    return LatentDecode(problem, work)

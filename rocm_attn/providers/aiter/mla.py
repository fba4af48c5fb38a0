"""aiter.mla: attention over a latent pool, whose one row per token is K and, in its first part, V.

mla_decode_fwd serves decode and verify steps, mla_prefill_fwd all others. Both read tokens one by one: their bfloat16
kernels read the wrong ones on pages of more. Both have kernels for 16 and for 128 query heads; other counts are padded
to those. Releases from v0.1.14 on have decode kernels for 32 and 64 heads as well. They are not used: the kernel that
combines their splits takes steps of 32 keys for 64 heads, like the decode kernel of gfx950, while that of gfx942 takes
16. And AITER's tests run neither count by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import FEW_TOKENS
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.few_tokens import LastRows, RowStarts
from rocm_attn.providers.contract import NO_SCHEDULE, PoolSize, Schedule, StepBounds
from rocm_attn.providers.schedules import Schedules
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, num_words, room_for, whole_rows

# Query heads that the kernels are made for, in every release.
FEW_HEADS, MANY_HEADS = 16, 128

# The most splits that AITER's own choice takes.
MOST_SPLITS = 16

_LAST_ROWS = LastRows()


@dataclass(frozen=True, slots=True)
class EqualSplits:
    """Cuts every sequence into enough parts to give every compute unit a share: an indptr over sequences."""

    compute_units: int

    def splits(self, shape: PaddedShape) -> int:
        """Parts of each sequence."""
        return min(-(-self.compute_units // shape.num_seqs), MOST_SPLITS)

    def words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        num_seqs, splits = bounds.shape.num_seqs, self.splits(bounds.shape)
        torch.arange(0, (num_seqs + 1) * splits, splits, out=words)


@dataclass(frozen=True, slots=True)
class AiterLatentDecode:
    """One new token in each sequence.

    Heads are padded with zeros to 16 or 128: the time of a decode step is reading the latent rows, which are read once
    in both cases. The number of splits and their indptr are always given. The function's own choice depends on the
    length of the page list, is kept for ever, and may be allocated inside a capture.
    """

    problem: Problem
    compute_units: int

    def describe(self) -> str:
        return f"aiter.mla_decode_fwd({self.problem}, compute_units={self.compute_units})"

    @property
    def schedule(self) -> EqualSplits:
        return EqualSplits(self.compute_units)

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q_rows, out_rows = cut(args.workspace, self._parts(bounds.shape))
        out = room_for(args.out, out_rows)
        decode_latents(
            self.problem,
            args,
            step,
            q=whole_rows(args.q, q_rows),
            out=out,
            qo_indptr=step.q_indptr,
            max_seqlen_q=1,
            num_kv_splits=self.schedule.splits(bounds.shape),
            num_kv_splits_indptr=args.schedule,
        )
        keep_rows(args.out, out)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor]:
        num_heads = FEW_HEADS if self.problem.num_q_heads <= FEW_HEADS else MANY_HEADS
        return padded_rows(self.problem, shape.num_tokens, num_heads)


@dataclass(frozen=True, slots=True)
class AiterLatentVerify:
    """Up to FEW_TOKENS new tokens in each sequence, by the kernel of 16 heads and as many rows.

    All releases have that kernel, and v0.1.10:op_tests/test_mla.py runs it by default as heads and tokens (16, 4).
    """

    problem: Problem
    compute_units: int

    def describe(self) -> str:
        return f"aiter.mla_decode_fwd({self.problem}, compute_units={self.compute_units}) of {FEW_TOKENS} rows each"

    @property
    def schedule(self) -> Schedules:
        return Schedules((RowStarts(), self._splits, _LAST_ROWS))

    @property
    def _splits(self) -> EqualSplits:
        return EqualSplits(self.compute_units)

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q, out = cut(args.workspace, self._parts(bounds.shape))
        indptr, splits, rows = self.schedule.split(bounds.shape, args.schedule)
        decode_latents(
            self.problem,
            args,
            step,
            q=_LAST_ROWS.spread(args.q, q, rows),
            out=out,
            qo_indptr=indptr,
            max_seqlen_q=FEW_TOKENS,
            num_kv_splits=self._splits.splits(bounds.shape),
            num_kv_splits_indptr=splits,
        )
        _LAST_ROWS.collect(out, args.out, rows)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor]:
        return padded_rows(self.problem, shape.num_seqs * FEW_TOKENS, FEW_HEADS)


@dataclass(frozen=True, slots=True)
class AiterLatentExtend:
    """Any number of new tokens in each sequence.

    Heads that are not 16 or 128 run in groups of 16, the last one padded with zeros: the time of an extend step is its
    products, and a padded head has as many as a real one. A sequence with one new token is not split over its keys,
    unlike in mla_decode_fwd.
    """

    problem: Problem
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"aiter.mla_prefill_fwd({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        for first in range(0, self.problem.num_q_heads, self._heads_of_launch()):
            heads = slice(first, first + self._heads_of_launch())
            self._attend_heads(args._replace(q=args.q[:, heads], out=args.out[:, heads]), step, bounds)

    def _attend_heads(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q_rows, out_rows = cut(args.workspace, self._parts(bounds.shape))
        written = room_for(args.out, out_rows)
        library.mla_prefill_fwd()(
            q=whole_rows(args.q, q_rows),
            kv_buffer=args.pages.k,
            o=written,
            qo_indptr=step.q_indptr,
            kv_indptr=step.page_indptr,
            kv_indices=step.page_list,
            kv_last_page_lens=step.last_page_len,
            max_seqlen_q=bounds.max_q_len,
            sm_scale=self.problem.scale,
            logit_cap=0.0,
        )
        keep_rows(args.out, written)

    def _heads_of_launch(self) -> int:
        return MANY_HEADS if self.problem.num_q_heads == MANY_HEADS else FEW_HEADS

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor]:
        return padded_rows(self.problem, shape.num_tokens, self._heads_of_launch())


def decode_latents(
    problem: Problem,
    args: AttendArgs,
    step: StepTensors,
    *,
    q: Tensor,
    out: Tensor,
    qo_indptr: Tensor,
    max_seqlen_q: int,
    **more: Tensor | int | None,
) -> None:
    """Calls mla_decode_fwd for the pages of a step.

    q, out:       [rows, heads, head_dim | v_head_dim]
    qo_indptr:    int32 [num_seqs + 1]: boundaries of sequences among these rows
    max_seqlen_q: the most rows of a sequence
    more:         how the work is cut, and the scales of codes
    """
    library.mla_decode_fwd()(
        q=q,
        kv_buffer=args.pages.k,
        o=out,
        qo_indptr=qo_indptr,
        kv_indptr=step.page_indptr,
        kv_indices=step.page_list,
        kv_last_page_lens=step.last_page_len,
        max_seqlen_q=max_seqlen_q,
        sm_scale=problem.scale,
        logit_cap=0.0,
        **more,
    )


def padded_rows(problem: Problem, num_tokens: int, num_heads: int) -> tuple[ScratchTensor, ScratchTensor]:
    """Room for q and out with num_heads heads, if those of the step cannot be used directly."""
    rows = (num_tokens, num_heads)
    return ScratchTensor((*rows, problem.head_dim), problem.dtype), ScratchTensor(
        (*rows, problem.v_head_dim), problem.dtype
    )


def bind_latent_decode(problem: Problem, target: Target, pool: PoolSize) -> AiterLatentDecode:
    """Binds the kernel, with splits for the target's compute units."""
    return AiterLatentDecode(problem, target.compute_units)


def bind_latent_verify(problem: Problem, target: Target, pool: PoolSize) -> AiterLatentVerify:
    """Binds the kernel, with splits for the target's compute units."""
    return AiterLatentVerify(problem, target.compute_units)


def bind_latent_extend(problem: Problem, target: Target, pool: PoolSize) -> AiterLatentExtend:
    """Binds the kernel; it has one tile."""
    return AiterLatentExtend(problem)

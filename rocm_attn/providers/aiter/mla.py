"""aiter.mla: attention over a latent pool, whose one row per token is K and, in its first part, V.

mla_decode_fwd serves decode and verify steps, mla_prefill_fwd all others. Both read tokens one by one: their bfloat16
kernels read the wrong ones on pages of more. Both have kernels for 16 and for 128 query heads; other counts are padded
to those. AITER has decode kernels for 32 and 64 heads as well. They are not used: the kernel that combines their splits
takes steps of 32 keys for 64 heads, like the decode kernel of gfx950, while that of gfx942 takes 16. And AITER's tests
run neither count by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.contract import PoolSize, Schedule, StepBounds
from rocm_attn.providers.schedules import Schedules
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, room_for, rows_of_heads, whole_rows

# Query heads that the kernels are made for, in every release.
FEW_HEADS, MANY_HEADS = 16, 128

# The most splits that AITER's own choice takes.
MOST_SPLITS = 16

_LAST_ROWS = LastRows()


@dataclass(frozen=True, slots=True)
class EqualSplits:
    """Cuts every sequence into enough parts to give every compute unit a share: an indptr over sequences."""

    compute_units: int

    def words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        splits = self._splits(bounds.shape)
        torch.arange(0, (bounds.shape.num_seqs + 1) * splits, splits, out=words)

    def as_arguments(self, shape: PaddedShape, words: Tensor) -> dict[str, Tensor | int]:
        return {"num_kv_splits": self._splits(shape), "num_kv_splits_indptr": words}

    def _splits(self, shape: PaddedShape) -> int:
        """Parts of each sequence."""
        return min(-(-self.compute_units // shape.num_seqs), MOST_SPLITS)


class LatentWork(Schedule, Protocol):
    """How the keys of a step are shared out over the compute units."""

    def as_arguments(self, shape: PaddedShape, words: Tensor) -> dict[str, Tensor | int]:
        """Arguments of mla_decode_fwd for a schedule that was built into words."""


@dataclass(frozen=True)
class _OfWork(AiterKernel):
    """A kernel that takes the shares of its work, in equal splits unless it is bound otherwise."""

    work: LatentWork

    @classmethod
    def bind(cls, problem: Problem, target: Target, pool: PoolSize) -> _OfWork:
        return cls(problem, EqualSplits(target.compute_units))


class LatentDecode(_OfWork):
    """One new token in each sequence.

    Heads are padded with zeros to 16 or 128: the time of a decode step is reading the latent rows, which are read once
    in both cases. The number of splits and their indptr are always given. The function's own choice depends on the
    length of the page list, is kept for ever, and may be allocated inside a capture.
    """

    name = "mla_decode_fwd"

    @property
    def schedule(self) -> Schedule:
        return self.work

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q_rows, out_rows = cut(args.workspace, self.room(bounds.shape))
        out = room_for(args.out, out_rows)
        work = self.work.as_arguments(bounds.shape, args.schedule)
        rows = LatentQueries(whole_rows(args.q, q_rows), out, step.q_indptr, 1)
        decode_latents(self.problem, args, step, rows, **work)
        keep_rows(args.out, out)

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        num_heads = FEW_HEADS if self.problem.num_q_heads <= FEW_HEADS else MANY_HEADS
        return rows_of_heads(self.problem, shape.num_tokens, num_heads)


class LatentVerify(_OfWork):
    """Up to FEW_TOKENS new tokens in each sequence, by the kernel of 16 heads and as many rows.

    All releases have that kernel, and op_tests/test_mla.py runs it by default as heads and tokens (16, 4).
    """

    name = "mla_decode_fwd[verify]"

    @property
    def schedule(self) -> Schedules:
        return Schedules((RowStarts(), self.work, _LAST_ROWS))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q, out = cut(args.workspace, self.room(bounds.shape))
        indptr, words, rows = self.schedule.split(bounds.shape, args.schedule)
        work = self.work.as_arguments(bounds.shape, words)
        queries = LatentQueries(_LAST_ROWS.spread(args.q, q, rows), out, indptr, FEW_TOKENS)
        decode_latents(self.problem, args, step, queries, **work)
        _LAST_ROWS.collect(out, args.out, rows)

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return rows_of_heads(self.problem, shape.num_seqs * FEW_TOKENS, FEW_HEADS)


class LatentExtend(AiterKernel):
    """Any number of new tokens in each sequence.

    Heads that are not 16 or 128 run in groups of 16, the last one padded with zeros: the time of an extend step is its
    products, and a padded head has as many as a real one. A sequence with one new token is not split over its keys,
    unlike in mla_decode_fwd.
    """

    name = "mla_prefill_fwd"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        for first in range(0, self.problem.num_q_heads, self._heads_of_launch()):
            heads = slice(first, first + self._heads_of_launch())
            self._attend_heads(args._replace(q=args.q[:, heads], out=args.out[:, heads]), step, bounds)

    def _attend_heads(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q_rows, out_rows = cut(args.workspace, self.room(bounds.shape))
        written = room_for(args.out, out_rows)
        library.mla_prefill_fwd()(
            q=whole_rows(args.q, q_rows),
            o=written,
            qo_indptr=step.q_indptr,
            max_seqlen_q=bounds.max_q_len,
            **_keys(self.problem, args, step),
        )
        keep_rows(args.out, written)

    def _heads_of_launch(self) -> int:
        return MANY_HEADS if self.problem.num_q_heads == MANY_HEADS else FEW_HEADS

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return rows_of_heads(self.problem, shape.num_tokens, self._heads_of_launch())


class LatentQueries(NamedTuple):
    """Queries of a step.

    q, out: [rows, heads, head_dim | v_head_dim]
    indptr: int32 [num_seqs + 1]: boundaries of sequences among these rows
    most:   rows of a sequence
    """

    q: Tensor
    out: Tensor
    indptr: Tensor
    most: int


def decode_latents(
    problem: Problem, args: AttendArgs, step: StepTensors, rows: LatentQueries, **more: Tensor | int | None
) -> None:
    """Calls mla_decode_fwd for the pages of a step. more: how the work is cut, and the scales of codes"""
    queries = {"q": rows.q, "o": rows.out, "qo_indptr": rows.indptr, "max_seqlen_q": rows.most}
    library.mla_decode_fwd()(**queries, **_keys(problem, args, step), **more)


def _keys(problem: Problem, args: AttendArgs, step: StepTensors) -> dict[str, object]:
    """The latent rows that a step attends to, and how they are scored."""
    return {
        "kv_buffer": args.pages.k,
        "kv_indptr": step.page_indptr,
        "kv_indices": step.page_list,
        "kv_last_page_lens": step.last_page_len,
        "sm_scale": problem.scale,
        "logit_cap": 0.0,
    }

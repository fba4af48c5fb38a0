"""aiter.mla.mla_decode_fwd: decode over a latent pool, whose one row a token is K and, in its first part, V."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.padding import PaddedShape
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.scratch import Part, cut, num_words, whole_rows
from rocm_attn.providers.contract import AttendArgs, PoolSize, StepMetadata
from rocm_attn.target import Target

# The most that AITER's own choice takes.
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class LatentDecode:
    """One new token in each sequence.

    The number of splits and their indptr are always given. What the function chooses itself depends on the length of
    the page list, is kept for ever, and may be allocated inside a capture.
    """

    problem: Problem
    compute_units: int

    def describe(self) -> str:
        return f"aiter.mla_decode_fwd({self.problem}, compute_units={self.compute_units})"

    def schedule_words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def schedule_key(self) -> Hashable:
        return "splits", self.compute_units

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def build_schedule(self, step: StepMetadata, schedule: Tensor) -> None:
        num_seqs, splits = step.shape.num_seqs, self._splits(step.shape)
        torch.arange(0, (num_seqs + 1) * splits, splits, out=schedule)

    def attend(self, args: AttendArgs) -> None:
        step = args.step
        q_rows, out_rows = cut(args.workspace, self._parts(step.shape))
        out = args.out if args.out.is_contiguous() else out_rows
        library.mla_decode_fwd()(
            q=whole_rows(args.q, q_rows),
            kv_buffer=args.k_pages,
            o=out,
            qo_indptr=step.q_indptr,
            kv_indptr=step.page_indptr,
            kv_indices=step.page_list,
            kv_last_page_lens=step.last_page_len,
            max_seqlen_q=1,
            sm_scale=self.problem.scale,
            logit_cap=0.0,
            num_kv_splits=self._splits(step.shape),
            num_kv_splits_indptr=args.schedule,
        )
        if out is not args.out:
            args.out.copy_(out)

    def _splits(self, shape: PaddedShape) -> int:
        """As many as give every compute unit a share."""
        return min(-(-self.compute_units // shape.num_seqs), _MOST_SPLITS)

    def _parts(self, shape: PaddedShape) -> tuple[Part, Part]:
        """Room for q and out where their rows are not contiguous."""
        problem = self.problem
        rows = (shape.num_tokens, problem.num_q_heads)
        return Part((*rows, problem.head_dim), problem.dtype), Part((*rows, problem.v_head_dim), problem.dtype)


def bind_latent_decode(problem: Problem, target: Target, pool: PoolSize) -> LatentDecode:
    """The kernel, split for the target's compute units."""
    return LatentDecode(problem, target.compute_units)

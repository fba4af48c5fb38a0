"""Decode of sequences that share prefixes, put together of the kernels that a provider has.

prefix   the queries of a group as those of one sequence over the shared pages, not causal
suffix   decode of each sequence over what is its own, the sink in it: every sequence has one key there, its own
merge    both by their log-sum-exps
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.contract import AttendArgs, BoundKernel, Limits, StepBounds, aligned_words
from rocm_attn.providers.scratch import Part, cut, num_words

# (out_a, lse_a, out_b, lse_b, out, lse), as launch_merge_states
Merge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class SuffixKernel(BoundKernel, Protocol):
    """A decode kernel that may begin behind a sequence's first pages."""

    def attend(self, args: AttendArgs, first_page: Tensor | None = None) -> None:
        """As BoundKernel.attend. first_page: as in launch_paged_decode."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPrefixKernel:
    """One new token in each sequence; sequences of a group read its prefix together.

    prefix: of the problem without causality and sinks
    suffix: of the problem
    """

    problem: Problem
    prefix: BoundKernel
    suffix: SuffixKernel
    merge: Merge

    def describe(self) -> str:
        return f"{self.prefix.describe()} + {self.suffix.describe()} merged"

    def schedule_words(self, shape: PaddedShape) -> int:
        return aligned_words(self.prefix.schedule_words(shape)) + self.suffix.schedule_words(shape)

    def schedule_key(self) -> Hashable:
        return "shared", self.prefix.schedule_key(), self.suffix.schedule_key()

    def workspace_words(self, shape: PaddedShape) -> int:
        used_in_turn = max(self.prefix.workspace_words(shape), self.suffix.workspace_words(shape))
        return num_words(self._parts(shape)) + used_in_turn

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        words = aligned_words(self.prefix.schedule_words(bounds.shape))
        self.prefix.build_schedule(_prefixes(step), _of_prefixes(bounds), schedule[:words])
        self.suffix.build_schedule(_suffixes(step), bounds, schedule[words:])

    def attend(self, args: AttendArgs) -> None:
        words, parts = aligned_words(self.prefix.schedule_words(args.bounds.shape)), self._parts(args.bounds.shape)
        prefix_out, prefix_lse, own_lse = cut(args.workspace, parts)
        used_in_turn = args.workspace[num_words(parts) :]
        lse = own_lse if args.lse is None else args.lse
        self.prefix.attend(
            replace(
                args,
                step=_prefixes(args.step),
                bounds=_of_prefixes(args.bounds),
                schedule=args.schedule[:words],
                workspace=used_in_turn,
                out=prefix_out,
                lse=prefix_lse,
                sinks=None,
            )
        )
        suffix = replace(
            args, step=_suffixes(args.step), schedule=args.schedule[words:], workspace=used_in_turn, lse=lse
        )
        self.suffix.attend(suffix, args.step.suffix_page)
        self.merge(prefix_out, prefix_lse, args.out, lse, args.out, lse)

    def _parts(self, shape: PaddedShape) -> tuple[Part, Part, Part]:
        """What the prefixes give, and the log-sum-exp of the suffixes where the caller wants none."""
        rows = (shape.num_tokens, self.problem.num_q_heads)
        lse = Part(rows, torch.float32)
        return Part((*rows, self.problem.v_head_dim), self.problem.dtype), lse, lse


def limits_of_shared_prefix(limits: Limits) -> Limits:
    """What is served of that which a provider's extend and decode kernels serve.

    A window and slopes are counted from each query's own place, which a query over a shared prefix has not.
    """
    return replace(limits, window=False, alibi=False, pools=(PoolKind.SPLIT,))


def problem_of_prefixes(problem: Problem) -> Problem:
    """The layer as its queries see a prefix: all of it, and no sink."""
    return replace(problem, causal=False, has_sinks=False)


def _prefixes(step: StepTensors) -> StepTensors:
    """The groups of a step as sequences over their prefixes; a group has the number, and so the row, of its first."""
    # The kernel of the prefixes does not read q_len: it is that of sequences.
    return replace(step, kv_len=step.prefix_len, q_indptr=step.group_indptr)


def _of_prefixes(bounds: StepBounds) -> StepBounds:
    """All queries may belong to one group."""
    return replace(bounds, max_q_len=bounds.shape.num_tokens)


def _suffixes(step: StepTensors) -> StepTensors:
    """The sequences of a step without what they share."""
    return replace(step, kv_len=step.suffix_kv_len)

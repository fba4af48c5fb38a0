"""Decode with shared prefixes (cascade attention), composed of a provider's other kernels.

prefix   the queries of a group, as one sequence over the shared pages, not causal
suffix   decode of each sequence over its own keys, with the sink: every sequence has at least one such key
merge    of both, by their log-sum-exps
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers.contract import Bind, BoundKernel, Limits, PoolSize, StepBounds
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.schedules import Schedules
from rocm_attn.providers.scratch import ScratchTensor, cut, num_words


def of_prefixes(queries: Queries, step: StepTensors) -> Queries:
    """The groups of a step as sequences over their prefixes; a group has the index and row of its first.

    All queries may belong to one group.
    """
    return replace(queries, kv_len=step.prefix_len, q_indptr=step.group_indptr, max_q_len=queries.num_tokens)


def of_suffixes(queries: Queries, step: StepTensors) -> Queries:
    """The sequences of a step without their shared prefixes."""
    return replace(queries, kv_len=step.suffix_kv_len, first_page=step.suffix_page)


class SharedSchedules(Schedules):
    """The schedules of the prefixes and of the suffixes."""

    __slots__ = ()

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        of_parts = of_prefixes(queries, step), of_suffixes(queries, step)
        for part, its_queries, its_words in zip(self.parts, of_parts, self.split(bounds.shape, words), strict=True):
            part.build(its_queries, step, bounds, its_words)


@dataclass(frozen=True, slots=True)
class SharedPrefixKernel:
    """One new token in each sequence; sequences of a group read its prefix together.

    prefix: an extend kernel of the problem without causality and sinks
    suffix: a decode kernel of the problem, which may begin after a sequence's first pages
    ops:    the provider's launches, for the merge
    """

    problem: Problem
    prefix: BoundKernel
    suffix: BoundKernel
    ops: Callable[[], StepOps]

    @property
    def schedule(self) -> SharedSchedules:
        return SharedSchedules((self.prefix.schedule, self.suffix.schedule))

    def describe(self) -> str:
        return f"{self.prefix.describe()} + {self.suffix.describe()} merged"

    def workspace_words(self, shape: PaddedShape) -> int:
        used_in_turn = max(self.prefix.workspace_words(shape), self.suffix.workspace_words(shape))
        return num_words(self._parts(shape)) + used_in_turn

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        prefix_words, suffix_words = self.schedule.split(bounds.shape, args.schedule)
        parts = self._parts(bounds.shape)
        prefix_out, prefix_lse, own_lse = cut(args.workspace, parts)
        used_in_turn = args.workspace[num_words(parts) :]
        lse = own_lse if args.lse is None else args.lse
        prefix = args._replace(
            queries=of_prefixes(args.queries, step),
            schedule=prefix_words,
            workspace=used_in_turn,
            out=prefix_out,
            lse=prefix_lse,
            sinks=None,
        )
        self.prefix.attend(prefix, step, bounds)
        suffix = args._replace(
            queries=of_suffixes(args.queries, step),
            schedule=suffix_words,
            workspace=used_in_turn,
            lse=lse,
        )
        self.suffix.attend(suffix, step, bounds)
        self.ops().merge_states(prefix_out, prefix_lse, args.out, lse, args.out, lse)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor, ScratchTensor]:
        """The outputs of the prefixes, and the log-sum-exp of the suffixes if the caller requests none."""
        rows = (shape.num_tokens, self.problem.num_q_heads)
        lse = ScratchTensor(rows, torch.float32)
        return ScratchTensor((*rows, self.problem.v_head_dim), self.problem.dtype), lse, lse


def bind_shared(prefix: Bind, suffix: Bind, ops: Callable[[], StepOps]) -> Bind:
    """Returns what binds the kernel of a provider. prefix, suffix: bind its extend and decode kernels"""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> SharedPrefixKernel:
        # Queries over a prefix see all of it, and no sink.
        of_prefixes = replace(problem, window_right=UNLIMITED_WINDOW, has_sinks=False)
        both = prefix(of_prefixes, target, pool), suffix(problem, target, pool)
        return SharedPrefixKernel(problem, *both, ops)

    return bind


def limits_of_shared_prefix(limits: Limits) -> Limits:
    """Limits of this kernel, from those of a provider's extend and decode kernels.

    A window and slopes are counted from each query's own place, which a query over a shared prefix does not have.
    """
    pools = tuple(pool for pool in limits.pools if pool is not PoolKind.VECTORIZED)
    return replace(limits, window=False, alibi=False, pools=pools)

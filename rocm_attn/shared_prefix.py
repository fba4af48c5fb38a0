"""SharedPrefix: decode of sequences that share pages at their beginning, which are read once for all of them.

    prefix   the queries of a group as those of one sequence over the shared pages, not causal
    suffix   decode of each sequence over what is its own
    merge    both by their log-sum-exps (merging.py)

For eager steps: what it derives is allocated anew each step, so it is not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, Unsupported
from rocm_attn.head_weights import LayerHeadWeights
from rocm_attn.kv_pool import HybridKVPool
from rocm_attn.merging import merge_into
from rocm_attn.padding import PaddedShape, StepKind
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers.contract import AttendArgs, BoundKernel, StepMetadata
from rocm_attn.providers.select import Selection, select
from rocm_attn.request_table import RequestTable
from rocm_attn.step_batch import StepBatch
from rocm_attn.table_view import TableView


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Consecutive sequences of a decode step that share a prefix.

    num_seqs:   sequences
    prefix_len: tokens at the beginning of each that lie in the same pages, whole ones; 0: none
    """

    num_seqs: int
    prefix_len: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The prefixes, or the suffixes, of a step; schedules and workspaces by problem."""

    metadata: StepMetadata
    schedules: dict[Problem, Tensor]
    workspaces: dict[Problem, Tensor]
    kernels: dict[Problem, BoundKernel]

    @classmethod
    def of(cls, metadata: StepMetadata, kernels: dict[Problem, BoundKernel]) -> _Part:
        device, part = metadata.kv_len.device, cls(metadata, {}, {}, kernels)
        for problem, kernel in kernels.items():
            words = kernel.schedule_words(metadata.shape)
            part.schedules[problem] = torch.empty(words, dtype=torch.int32, device=device)
            part.workspaces[problem] = torch.empty(kernel.workspace_words(metadata.shape), device=device)
            kernel.build_schedule(metadata, part.schedules[problem])
        return part


class SharedPrefix:
    """The attention of one running decode step over shared prefixes. Made by AttentionRuntime.share_prefix().

    problem_of: layer -> its problem; raises BadTensor for one that does not exist
    require_running: raises WrongState when the step does not run
    """

    def __init__(
        self,
        step: StepMetadata,
        batch: StepBatch,
        groups: Sequence[PrefixGroup],
        *,
        selections: Sequence[Selection],
        table: RequestTable,
        pool: HybridKVPool,
        head_weights: LayerHeadWeights,
        problem_of: Callable[[int], Problem],
        require_running: Callable[[], None],
    ) -> None:
        _check(batch, groups, table, step.shape.kind)
        kernels = {selection.problem: _kernels(selection) for selection in selections}
        self._pool = pool
        self._head_weights = head_weights
        self._problem_of = problem_of
        self._require_running = require_running
        prefixes, suffixes = _metadata(step, batch, groups, table.page_size)
        self._prefixes = _Part.of(prefixes, {problem: pair[0] for problem, pair in kernels.items()})
        self._suffixes = _Part.of(suffixes, {problem: pair[1] for problem, pair in kernels.items()})

    def attend(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """As AttentionRuntime.attend; returns the log-sum-exp, float32 [T, q_heads]. K and V are stored already.

        Raises BadTensor, WrongState.
        """
        self._require_running()
        problem, weights, pages = self._problem_of(layer), self._head_weights.of(layer), self._pool.layer(layer)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        prefix_out, prefix_lse = torch.empty_like(out), torch.empty_like(lse)
        # The sink is in the suffix: every sequence has one, its new token.
        for part, to, to_lse, sinks in (
            (self._prefixes, prefix_out, prefix_lse, None),
            (self._suffixes, out, lse, weights.sinks),
        ):
            part.kernels[problem].attend(
                AttendArgs(
                    step=part.metadata,
                    schedule=part.schedules[problem],
                    workspace=part.workspaces[problem],
                    q=q,
                    k_pages=pages.k,
                    v_pages=pages.v,
                    out=to,
                    lse=to_lse,
                    sinks=sinks,
                    alibi_slopes=None,
                )
            )
        merge_into(prefix_out, prefix_lse, out, lse, out, lse)
        return lse


def _kernels(selection: Selection) -> tuple[BoundKernel, BoundKernel]:
    """For the prefixes and for the suffixes: the project's own, which read any table. Raises Unsupported."""
    problem = selection.problem
    reasons = []
    if problem.window_left != UNLIMITED_WINDOW:
        reasons.append(f"a window (window_left {problem.window_left}) is counted from each query, which lies elsewhere")
    if problem.has_alibi_slopes:
        reasons.append("ALiBi slopes weigh distances, which a query over a shared prefix has not")
    if problem.pool is not PoolKind.SPLIT:
        reasons.append(f"{problem.pool.value} are not read in two parts")
    if reasons:
        raise Unsupported("a layer cannot share prefixes; decode the step without", reasons)
    provider = "torch" if selection.provider == "torch" else "triton"
    plain = replace(problem, wants_lse=True, custom_mask=False)
    prefix = select(replace(plain, causal=False, has_sinks=False), selection.target, provider)
    suffix = select(plain, selection.target, provider)
    return prefix.kernel(StepKind.EXTEND).bound, suffix.kernel(StepKind.DECODE).bound


def _metadata(
    step: StepMetadata, batch: StepBatch, groups: Sequence[PrefixGroup], page_size: int
) -> tuple[StepMetadata, StepMetadata]:
    """The groups of a step as sequences over their prefixes, and its sequences over their suffixes."""
    device, num_padded = step.kv_len.device, step.shape.num_seqs
    counts = [group.num_seqs for group in groups]
    ends = np.cumsum([0, *counts])

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    longest = max(group.prefix_len for group in groups)
    prefixes = replace(
        step,
        shape=PaddedShape(StepKind.EXTEND, len(groups), step.shape.num_tokens),
        max_q_len=max(counts),
        max_kv_len=max(1, longest),
        kv_len=ints([group.prefix_len for group in groups]),
        q_len=ints(counts),
        q_indptr=ints(ends.tolist()),
        table=TableView(step.table.entries, ints(batch.rows[ends[:-1]].tolist())),
    )
    skipped = np.zeros(num_padded, np.int32)
    skipped[: batch.num_seqs] = np.repeat([group.prefix_len for group in groups], counts)
    skipped_tokens = ints(skipped.tolist())
    # A table of the suffixes alone: row i is sequence i, its first entry the first page that is its own.
    width = step.table.entries.shape[1]
    column = torch.arange(width, device=device) + (skipped_tokens // page_size)[:, None]
    rows = step.table.entries[step.table.row_of_seq.long()]
    entries = torch.where(column < width, rows.gather(1, column.clamp(max=width - 1)), 0)
    suffixes = replace(
        step,
        max_kv_len=max(1, int((batch.kv_len - skipped[: batch.num_seqs]).max())),
        kv_len=(step.kv_len - skipped_tokens).clamp(min=0),
        table=TableView(entries, torch.arange(num_padded, dtype=torch.int32, device=device)),
    )
    return prefixes, suffixes


def _check(batch: StepBatch, groups: Sequence[PrefixGroup], table: RequestTable, kind: StepKind) -> None:
    """Raises BadBatch for groups that are none of this batch."""
    if kind is not StepKind.DECODE or batch.num_seqs == 0:
        raise BadBatch(f"prefixes are shared in decode steps with sequences; this is a {kind.value} step")
    if not batch.inputs.lengths_on_host:
        raise BadBatch("prefixes are shared where the host knows the lengths; give kv_len on the host")
    if sum(group.num_seqs for group in groups) != batch.num_seqs or min(group.num_seqs for group in groups) < 1:
        raise BadBatch(
            f"groups of {', '.join(str(group.num_seqs) for group in groups)} sequences for {batch.num_seqs}; "
            "every sequence is in one group, in the order of the step"
        )
    first = 0
    for group in groups:
        members = slice(first, first + group.num_seqs)
        first += group.num_seqs
        shortest = int(batch.kv_len[members].min())
        if group.prefix_len % table.page_size or not 0 <= group.prefix_len < shortest:
            raise BadBatch(
                f"a prefix of {group.prefix_len} tokens in pages of {table.page_size}, with {shortest} tokens in the "
                "shortest sequence; a prefix has whole pages, and every sequence goes on behind it"
            )
        pages = table.entries_host[batch.rows[members], : group.prefix_len // table.page_size]
        strangers = (pages != pages[0]).any(1)
        if strangers.any():
            raise BadBatch(
                f"sequence {members.start + int(strangers.argmax())} does not share the {group.prefix_len} tokens of "
                f"sequence {members.start}; fork its row from that one's, or put it into another group"
            )

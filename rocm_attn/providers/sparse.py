"""Sparse attention in providers: the entries of indexer kernels and of kernels that attend to a selection.

A layer with an indexer keeps its dense kernels, for attend(), and gets two more, which serve every kind of step: one
selects, the other attends to the selection. A layer that reuses an earlier layer's selection gets only the second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.sparse.arguments import IndexArgs, Indexing, LastTokens, SelectedArgs, SelectedKeys, SparseTokens
from rocm_attn.machine.target import Target
from rocm_attn.problem import Indexer, KVEncoding, Problem, Scales
from rocm_attn.providers.contract import (
    Baked,
    BoundKernel,
    LayerKernel,
    Limits,
    PoolSize,
    Schedule,
    StepBounds,
    arch_matches,
    dtype_name,
)


class BoundIndexer(Protocol):
    """An indexer for one problem on one target. A frozen value, like BoundKernel."""

    def describe(self) -> str:
        """Name and tiles as text."""

    def workspace_words(self, shape: PaddedShape) -> int:
        """See BoundKernel.workspace_words."""

    def select(self, args: IndexArgs, selection: SelectedKeys, workspace: Tensor) -> None:
        """Writes the units of every token to the selection; padded tokens get none.

        workspace: workspace_words(shape) or more; content is undefined
        """


class BoundSelected(Protocol):
    """Attention over a selection, for one problem on one target. A frozen value, like BoundKernel."""

    def describe(self) -> str:
        """Name and tiles as text."""

    def workspace_words(self, shape: PaddedShape) -> int:
        """See BoundKernel.workspace_words."""

    def attend(self, args: SelectedArgs) -> None:
        """Runs one layer's attention; padded tokens of out receive zeros, and those of lse -inf."""


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """The limits of an indexer; see Limits.

    archs:      exact names, or prefixes that end with "*"
    dtypes:     of q, and of keys that do not have eight bits
    head_dim:   range of elements of a row, both ends included
    num_heads:  the most index heads
    encodings, scales: of the keys
    whole_blocks: whether keys of a unit must be a power of two
    """

    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dim: tuple[int, int]
    num_heads: int
    whole_blocks: bool = False
    encodings: tuple[KVEncoding, ...] = (KVEncoding.LIKE_Q,)
    scales: tuple[Scales, ...] = (Scales.NONE,)

    def refusals(self, indexer: Indexer, problem: Problem, target: Target) -> tuple[str, ...]:
        """Every limit that an indexer of a problem breaks, one clause each; empty if it is served."""
        if not any(arch_matches(target.arch, pattern) for pattern in self.archs):
            return (f"arch {target.arch} is not one of {', '.join(self.archs)}",)
        reasons = []
        if problem.dtype not in self.dtypes:
            named = ", ".join(map(dtype_name, self.dtypes))
            reasons.append(f"dtype {dtype_name(problem.dtype)} is not one of {named}")
        low, high = self.head_dim
        if not low <= indexer.head_dim <= high:
            reasons.append(f"an indexer's head_dim {indexer.head_dim} is outside {low}..{high}")
        if indexer.num_heads > self.num_heads:
            reasons.append(f"{indexer.num_heads} index heads are more than {self.num_heads}")
        unit_keys = indexer.indexing.unit_keys
        if self.whole_blocks and unit_keys & (unit_keys - 1):
            reasons.append(f"units of {unit_keys} keys are no power of two")
        if indexer.key_encoding not in self.encodings or indexer.key_scales not in self.scales:
            reasons.append(f"it does not read index keys {indexer.key_encoding.value} with {indexer.key_scales.value}")
        return tuple(reasons)


@dataclass(frozen=True, slots=True)
class IndexerEntry:
    """An indexer of a provider; see KernelEntry for the fields."""

    name: str
    limits: IndexLimits
    bind: Callable[[Indexer, Problem, Target, PoolSize], BoundIndexer]
    batch_invariant: bool = False
    bakes: frozenset[Baked] = frozenset()


@dataclass(frozen=True, slots=True)
class SelectedKeysEntry:
    """Attention over a selection, of a provider; see KernelEntry for the fields.

    serves: indexing -> why its selections are not supported, one clause each; empty if they are
    is_probed: of latent layers and single tokens alone (selection/probe_runs.py)
    """

    name: str
    limits: Limits
    bind: Callable[[Problem, Target, PoolSize], BoundSelected]
    batch_invariant: bool = False
    bakes: frozenset[Baked] = frozenset()
    serves: Callable[[Indexing], Sequence[str]] = lambda indexing: ()
    is_probed: bool = False


@dataclass(frozen=True, slots=True)
class Selecting:
    """The kernels of a layer that has an indexer.

    keys:   selects the keys
    blocks: selects the blocks of keys that are left for a later choice; None if none are
    """

    entry: IndexerEntry
    keys: BoundIndexer
    blocks: BoundIndexer | None = None


@dataclass(frozen=True, slots=True)
class SparseKernels:
    """The kernels of a layer in addition to those of its steps.

    entry:     of attention over a selection
    selected:  attends to the selection
    gives_lse: True if it returns the log-sum-exp
    selecting: None if an earlier layer's selection is used
    """

    entry: SelectedKeysEntry
    selected: BoundSelected
    gives_lse: bool
    selecting: Selecting | None

    @property
    def _rows(self) -> list[SelectedKeysEntry | IndexerEntry]:
        return [self.entry] if self.selecting is None else [self.entry, self.selecting.entry]

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the rows, that of attention over a selection first."""
        return tuple(row.name for row in self._rows)

    def beside(self, dense: LayerKernel) -> LayerKernel:
        """Adds these kernels to that of a kind of step: a plan has room for them, and its graph key names them."""
        entry = replace(
            dense.entry,
            bakes=dense.entry.bakes.union(*(row.bakes for row in self._rows)),
            batch_invariant=all(row.batch_invariant for row in (dense.entry, *self._rows)),
        )
        return LayerKernel(entry, BesideSparse(dense.bound, self))


@dataclass(frozen=True, slots=True)
class BesideSparse:
    """The kernel of a kind of step in a layer that has sparse kernels too."""

    dense: BoundKernel
    sparse: SparseKernels

    @property
    def schedule(self) -> Schedule:
        """The schedule of the dense kernel: a selection is no schedule, and nothing is planned from it."""
        return self.dense.schedule

    def describe(self) -> str:
        """The descriptions of all kernels."""
        return " and ".join(each.describe() for each in self._kernels())

    def workspace_words(self, shape: PaddedShape) -> int:
        """The most words of any kernel, because they run one after the other."""
        return max(each.workspace_words(shape) for each in self._kernels())

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        """Attends to all keys."""
        self.dense.attend(args, step, bounds)

    def _kernels(self) -> list[BoundKernel | BoundSelected | BoundIndexer]:
        selecting = self.sparse.selecting
        indexers = () if selecting is None else (selecting.keys, selecting.blocks)
        return [self.dense, self.sparse.selected, *(each for each in indexers if each is not None)]


def every_row(args: AttendArgs, step: StepTensors, bounds: StepBounds, keys: int) -> SelectedArgs:
    """The arguments of attention to all rows that a token sees, `keys` of them at most."""
    tokens = SparseTokens(
        step.row_of_token, step.last_key_of_token, step.counts[1:2], bounds.max_q_len, bounds.max_kv_len
    )
    rows, results = (args.q, args.pages, args.table, tokens), (args.out, args.lse, args.sinks, args.workspace)
    return SelectedArgs(*rows, LastTokens(keys), *results)

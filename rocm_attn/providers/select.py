"""Chooses a layer's kernels: a pure function of problem, target, pool, requested provider, and disabled kernels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.machine.choices import PROVIDERS
from rocm_attn.machine.releases import aiter_not_read
from rocm_attn.machine.target import Target
from rocm_attn.problem import ALL_KEYS, AllKeys, Indexer, Problem
from rocm_attn.providers import torch_sparse, triton_sparse
from rocm_attn.providers.aiter import selected as aiter_selected
from rocm_attn.providers.aiter.entries import ENTRIES as AITER_ENTRIES
from rocm_attn.providers.contract import SMALLEST_POOL, KernelEntry, LayerKernel, PoolSize
from rocm_attn.providers.cpu import CPU
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.sparse import IndexerEntry, SelectedKeysEntry, Selecting, SparseKernels
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON

# In order of preference within a provider and a kind of step.
ENTRIES: Mapping[str, Sequence[KernelEntry]] = {
    "aiter": AITER_ENTRIES,
    "triton": TRITON.entries,
    "cpu": CPU.entries,
    "torch": TORCH.entries,
}

# Further kernels of layers with an indexer. No indexer of AITER is bound, so Triton's select for it.
INDEXER_ENTRIES: Mapping[str, Sequence[IndexerEntry]] = {
    "aiter": triton_sparse.INDEXER_ENTRIES,
    "triton": triton_sparse.INDEXER_ENTRIES,
    "torch": torch_sparse.INDEXER_ENTRIES,
}
SELECTED_ENTRIES: Mapping[str, Sequence[SelectedKeysEntry]] = {
    "aiter": aiter_selected.SELECTED_ENTRIES,
    "triton": triton_sparse.SELECTED_ENTRIES,
    "torch": torch_sparse.SELECTED_ENTRIES,
}

# The providers that "auto" tries for each kind of step, in order. Plain torch is no fallback on a GPU: it would serve
# silently, and far too slowly. On a CPU it serves all that the kernels for CPUs do not.
_AUTO_ON_GPU = ("aiter", "triton")
_AUTO_ON_CPU = ("cpu", "torch")

# Kernel name -> why it may not be used here, apart from its row.
Unavailable = Mapping[str, str]
_ALL_AVAILABLE: Unavailable = {}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel was not chosen for a kind of step."""

    kernel: str
    kind: StepKind
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernels of one kind of layer.

    kernels:  a bound kernel for each kind of step; a kind that another one serves instead may be missing
    refusals: every kernel that was considered before the chosen one, and why it was not taken
    sparse:   the kernels that select keys and attend to the selection; None in a layer that attends to all keys
    """

    problem: Problem
    target: Target
    kernels: Mapping[StepKind, LayerKernel]
    refusals: tuple[Refusal, ...]
    sparse: SparseKernels | None = None

    @property
    def provider(self) -> str:
        """The provider of these kernels; "auto" if there are several."""
        names = {kernel.entry.provider for kernel in self.kernels.values()}
        return names.pop() if len(names) == 1 else "auto"

    @property
    def deterministic(self) -> bool:
        """True if a sequence's results are bitwise the same in any batch."""
        return all(kernel.entry.batch_invariant for kernel in self.kernels.values())

    @property
    def eight_bit_products(self) -> bool:
        """True if a kernel rounds its operands to eight bits."""
        return any(kernel.entry.rounds_products for kernel in self.kernels.values())

    def kernel(self, kind: StepKind) -> LayerKernel:
        """The kernel of a kind of step."""
        return self.kernels[kind if kind in self.kernels else kind.instead]

    def lines(self) -> list[str]:
        """The choice in sentences: a line for each kind of step."""
        chosen = [f"{kind.value}: {self._named(kernel)}" for kind, kernel in self.kernels.items()]
        if self.sparse is not None:
            chosen.append(f"over a selection: {', '.join(self.sparse.entries)}")
        return chosen

    def refusal_lines(self) -> list[str]:
        """The refusals in sentences: a line for each kind of step and reason."""
        refused: dict[tuple[StepKind, str], dict[str, None]] = {}
        for refusal in self.refusals:
            refused.setdefault((refusal.kind, refusal.reason), {})[refusal.kernel] = None
        return [f"{kind.value}: not {', '.join(names)}: {reason}" for (kind, reason), names in refused.items()]

    def sentence(self) -> str:
        """The choice in one sentence: the layer, the kernels, and the refused kernels, with each reason once."""
        chosen = [f"{kind.value} by {self._named(kernel)}" for kind, kernel in self.kernels.items()]
        if self.sparse is not None:
            chosen.append(f"over a selection by {', '.join(self.sparse.entries)}")
        refused: dict[str, dict[str, None]] = {}
        for refusal in self.refusals:
            refused.setdefault(refusal.reason, {})[refusal.kernel] = None
        why = "".join(f"; not {_few(list(kernels))}, because {reason}" for reason, kernels in refused.items())
        return f"{_describe(self.problem)}: {', '.join(chosen)}{why}"

    def _named(self, kernel: LayerKernel) -> str:
        """A kernel's name, marked if it is of a release of AITER that was not read."""
        of_aiter = kernel.entry.provider == "aiter"
        return kernel.entry.name + " (not read)" * (of_aiter and bool(aiter_not_read(self.target.releases.aiter)))


def select(
    problem: Problem,
    target: Target,
    provider: str,
    *,
    pool: PoolSize = SMALLEST_POOL,
    unavailable: Unavailable = _ALL_AVAILABLE,
    deterministic: bool = False,
) -> Selection:
    """Chooses a kernel for every kind of step.

    provider:    a name of PROVIDERS; "auto" takes, for each kind of step, the first provider that serves it
    pool:        refuses kernels whose offsets do not reach; if not given, none
    unavailable: refuses kernels that the machine lacks, or that were switched off
    deterministic: refuses kernels whose results depend on the batch
    Raises Unsupported with every reason, BadSetting for an unknown name.
    """
    names, allowed = _candidates(provider, target), _Allowed(unavailable, deterministic)
    refusals: list[Refusal] = []
    kernels = {}
    # For steps that attend to all keys, which a layer with an indexer may also run.
    dense = replace(problem, indexer=ALL_KEYS)
    # A layer with custom_mask must have a kernel for masks; other layers serve a step with a mask like any other step.
    kinds = [kind for kind in StepKind if kind.extra is not Extra.MASK or problem.custom_mask]
    for kind in kinds:
        kernel = allowed.first(
            # A row that is not bound and refuses the layer would not be a kernel of it.
            (
                entry
                for name in names
                for entry in ENTRIES[name]
                if entry.kind is kind and not (entry.not_bound and entry.limits.refusals(dense, target, pool))
            ),
            lambda entry: entry.refusals(dense, target, pool),
            lambda entry: LayerKernel(entry, entry.bind(dense, target, pool)),
            lambda entry, reason: refusals.append(Refusal(entry.name, entry.kind, reason)),
        )
        if kernel is not None:
            kernels[kind] = kernel
    needed = [kind for kind in kinds if kind.instead is kind or kind.extra is Extra.MASK]
    missing = [kind.value for kind in needed if kind not in kernels]
    if not missing:
        sparse = _sparse_kernels(names, problem, target, pool, allowed)
        if sparse is not None:
            kernels = {kind: sparse.beside(kernel) for kind, kernel in kernels.items()}
        return Selection(problem, target, kernels, tuple(refusals), sparse)
    raise Unsupported(
        f"no {'deterministic ' if deterministic else ''}kernel of provider {provider!r} serves {_and(missing)} steps "
        f"of {_describe(problem)} on {target.arch}",
        [f"{r.kind.value}: {r.kernel}: {r.reason}" for r in refusals],
    )


def ops_for(selections: Sequence[Selection], device: torch.device) -> StepOps:
    """The launches around attention for the kernels on a device.

    They are Triton's, for AITER's kernels as well. Torch's twins serve torch's kernels, and others if Triton has no
    device to run on and none of the kernels is Triton's. They also serve all kernels on torch's meta device, whose
    tensors have no memory: nothing is launched there, and Triton need not be installed. With a kernel for CPUs, those
    of the store are for CPUs too.
    """
    names = {
        kernel.entry.provider
        for selection in selections
        for kind, kernel in selection.kernels.items()
        # Kernels for shared prefixes serve only steps that bring them.
        if kind.extra is not Extra.PREFIXES
    }
    if "cpu" in names and device.type == "cpu":
        return CPU.ops()
    if "torch" in names or device.type == "meta" or (device.type == "cpu" and "triton" not in names):
        return TORCH.ops()
    return TRITON.ops()


def _candidates(provider: str, target: Target) -> tuple[str, ...]:
    if provider not in PROVIDERS:
        raise BadSetting(f"provider {provider!r} is not known; choose one of {', '.join(PROVIDERS)}")
    if provider != "auto":
        return (provider,)
    return _AUTO_ON_GPU if target.is_gpu else _AUTO_ON_CPU


_Row = TypeVar("_Row", KernelEntry, IndexerEntry, SelectedKeysEntry)
_Bound = TypeVar("_Bound")


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The kernels that may be used; see select()."""

    unavailable: Unavailable
    deterministic: bool

    def first(
        self,
        rows: Iterable[_Row],
        refusals: Callable[[_Row], Sequence[str]],
        bind: Callable[[_Row], _Bound],
        refuse: Callable[[_Row, str], None],
    ) -> _Bound | None:
        """Binds the first kernel that serves; None if none does. refuse: called for each reason not to take a kernel"""
        for row in rows:
            reasons = list(refusals(row))
            if self.deterministic and not (row.batch_invariant or (isinstance(row, KernelEntry) and row.not_bound)):
                reasons.append("a sequence's result may depend on the batch")
            if row.name in self.unavailable:
                reasons.append(self.unavailable[row.name])
            if not reasons:
                try:
                    return bind(row)
                except LookupError as miss:
                    reasons.append(str(miss.args[0]))
            for reason in reasons:
                refuse(row, reason)
        return None


def _sparse_kernels(
    names: Sequence[str], problem: Problem, target: Target, pool: PoolSize, allowed: _Allowed
) -> SparseKernels | None:
    """The kernels of the first provider that has them all; None if none are needed. Raises Unsupported.

    Triton's come before AITER's, which cut no token's keys into parts for more programs.
    """
    if isinstance(problem.indexer, AllKeys):
        return None
    reasons: list[str] = []
    for name in reversed(names):
        of_provider: list[str] = []
        kernels = _sparse_kernels_of(name, problem, target, pool, allowed, of_provider)
        if kernels is not None:
            return kernels
        reasons += [f"{name}: {reason}" for reason in of_provider or ["it has no such kernel"]]
    raise Unsupported(
        f"no {'deterministic ' if allowed.deterministic else ''}kernels of {_and(names)} select keys and attend to "
        f"them for {_describe(problem)} on {target.arch}",
        reasons,
    )


def _sparse_kernels_of(
    provider: str, problem: Problem, target: Target, pool: PoolSize, allowed: _Allowed, reasons: list[str]
) -> SparseKernels | None:
    """The kernels of a provider; None if it lacks one, and then the reasons not to take those that it has."""
    assert not isinstance(problem.indexer, AllKeys)
    indexer, indexing, selecting = problem.indexer, problem.indexer.indexing, None

    def refuse(row: IndexerEntry | SelectedKeysEntry, reason: str) -> None:
        reasons.append(f"{row.name}: {reason}")

    if isinstance(indexer, Indexer):
        blocks = [replace(indexer, indexing=indexing.of_blocks)] if indexing.candidate_blocks else []
        selecting = allowed.first(
            INDEXER_ENTRIES.get(provider, ()),
            lambda row: row.limits.refusals(indexer, problem, target),
            lambda row: Selecting(row, *(row.bind(each, problem, target, pool) for each in (indexer, *blocks))),
            refuse,
        )
        if selecting is None:
            return None
    return allowed.first(
        SELECTED_ENTRIES.get(provider, ()),
        lambda row: (*row.limits.refusals(problem, target, pool), *row.serves(indexing)),
        lambda row: SparseKernels(row, row.bind(problem, target, pool), row.limits.gives_lse(problem), selecting),
        refuse,
    )


def _few(kernels: Sequence[str]) -> str:
    """Up to two kernels by name; more by their number and providers."""
    if len(kernels) <= 2:
        return _and(kernels)
    providers = sorted({kernel.partition(".")[0] for kernel in kernels})
    return f"{len(kernels)} kernels of {_and(providers)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1]) if len(words) > 1 else words)


def _describe(problem: Problem) -> str:
    return (
        f"{problem.num_q_heads} query heads over {problem.num_kv_heads} KV heads, head_dim {problem.head_dim}, "
        f"v_head_dim {problem.v_head_dim}, {str(problem.dtype).removeprefix('torch.')}, page size {problem.page_size}"
    )

"""Which kernel serves a problem: a pure function of problem, target and the provider that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.padding import StepKind
from rocm_attn.plan import LayerKernel
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import Provider
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON
from rocm_attn.target import Target

PROVIDER_NAMES = ("auto", "torch", "triton", "aiter")

_PROVIDERS: Mapping[str, Provider] = {provider.name: provider for provider in (TRITON, TORCH)}

# What "auto" tries, in order. Plain torch is no fallback on a GPU: it would serve, far too slowly, in silence.
_AUTO_ON_GPU = ("aiter", "triton")
_AUTO_ON_CPU = ("torch",)

_AITER_REASON = "AITER's kernels are not bound in this version"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel was not chosen for a kind of step."""

    kernel: str
    kind: StepKind
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernels of one kind of layer.

    provider: whose kernels they are, and whose metadata and store launches go with them
    kernels:  a bound kernel for each kind of step
    refusals: every kernel that was considered before it and why it was not taken
    """

    problem: Problem
    target: Target
    provider: Provider
    kernels: Mapping[StepKind, LayerKernel]
    refusals: tuple[Refusal, ...]

    def lines(self) -> list[str]:
        """The choice in sentences: a line for each kind of step, then a line for each refusal."""
        chosen = [f"{kind.value}: {kernel.row.name}" for kind, kernel in self.kernels.items()]
        return chosen + [f"{r.kind.value}: not {r.kernel}: {r.reason}" for r in self.refusals]


def select(problem: Problem, target: Target, provider: str) -> Selection:
    """Choose kernels for every kind of step from one provider.

    provider: a name of PROVIDER_NAMES; "auto" takes the first that serves all kinds of step
    Raises Unsupported with every reason, BadSetting for an unknown name.
    """
    refusals: list[Refusal] = []
    for name in _candidates(provider, target):
        found = _PROVIDERS.get(name)
        if found is None:
            refusals.extend(Refusal(name, kind, _AITER_REASON) for kind in StepKind)
            continue
        kernels = {}
        for kind in StepKind:
            kernel = _first_that_serves(found, kind, problem, target, refusals)
            if kernel is not None:
                kernels[kind] = kernel
        if len(kernels) == len(StepKind):
            return Selection(problem, target, found, kernels, tuple(refusals))
    raise Unsupported(
        f"no kernel of provider {provider!r} serves {_describe(problem)} on {target.arch}",
        [f"{r.kind.value}: {r.kernel}: {r.reason}" for r in refusals],
    )


def _candidates(provider: str, target: Target) -> tuple[str, ...]:
    if provider not in PROVIDER_NAMES:
        raise BadSetting(f"provider {provider!r} is not known; choose one of {', '.join(PROVIDER_NAMES)}")
    if provider != "auto":
        return (provider,)
    return _AUTO_ON_GPU if target.is_gpu else _AUTO_ON_CPU


def _first_that_serves(
    provider: Provider, kind: StepKind, problem: Problem, target: Target, refusals: list[Refusal]
) -> LayerKernel | None:
    for row in provider.rows:
        if row.kind is not kind:
            continue
        reasons = row.limits.refusals(problem, target)
        if not reasons:
            try:
                return LayerKernel(row, row.bind(problem, target))
            except LookupError as miss:
                reasons = (str(miss.args[0]),)
        refusals.extend(Refusal(row.name, kind, reason) for reason in reasons)
    return None


def _describe(problem: Problem) -> str:
    return (
        f"{problem.num_q_heads} query heads over {problem.num_kv_heads} KV heads, head_dim {problem.head_dim}, "
        f"v_head_dim {problem.v_head_dim}, {str(problem.dtype).removeprefix('torch.')}, page size {problem.page_size}"
    )

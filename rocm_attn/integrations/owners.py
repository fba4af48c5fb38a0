"""What owns pages and runs steps over them, as the modules here take it."""

from __future__ import annotations

from rocm_attn.external import ExternalAttention
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import StepOps
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.layer_kinds import LayerKinds

Owner = AttentionRuntime | ExternalAttention


def problems_of(owner: Owner) -> tuple[Problem, ...]:
    """The problem of each layer."""
    return _kinds(owner).problems


def spaces_of(owner: Owner) -> tuple[Space, ...]:
    """The space of each layer."""
    return _kinds(owner).spaces_of_layers


def ops_of(owner: Owner) -> StepOps:
    """The launches around attention."""
    return owner.core.ops if isinstance(owner, AttentionRuntime) else owner.ops


def _kinds(owner: Owner) -> LayerKinds:
    return owner.kinds if isinstance(owner, AttentionRuntime) else owner.kernels()

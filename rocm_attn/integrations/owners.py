"""Owner: an AttentionRuntime or ExternalAttention, seen by KV transfer and compiled forwards through one interface."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from rocm_attn.errors import BadSetting
from rocm_attn.external import ExternalAttention
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space
from rocm_attn.paging.state_pool import StatePool
from rocm_attn.paging.storage import PagePool
from rocm_attn.problem import Problem
from rocm_attn.providers.launches import StepOps
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.layer_kinds import LayerKinds

Owner = AttentionRuntime | ExternalAttention


def problems_of(owner: Owner) -> tuple[Problem, ...]:
    """Returns the problem of each layer. Raises BadSetting for an owner of another type."""
    if not isinstance(owner, AttentionRuntime | ExternalAttention):
        raise BadSetting(
            f"the owner of KV is a {type(owner).__name__}; give the AttentionRuntime or the ExternalAttention itself"
        )
    return _kinds(owner).problems


def spaces_of(owner: Owner) -> tuple[Space, ...]:
    """Returns the space of each layer."""
    return _kinds(owner).spaces_of_layers


def pool_of(owner: Owner) -> PagePool:
    """Returns the pool with the pages of all layers."""
    return owner.pool if isinstance(owner, AttentionRuntime) else owner.pages


def states_of(owner: Owner) -> StatePool:
    """Returns the slots of recurrent layers. Those of an engine are not known here."""
    return owner.states if isinstance(owner, AttentionRuntime) else StatePool.none(owner.pages.device)


def ops_of(owner: Owner) -> StepOps:
    """Returns the launches around attention."""
    return owner.core.ops if isinstance(owner, AttentionRuntime) else owner.ops


def given_back(owner: Owner) -> Mapping[Space, int]:
    """Returns the number that marks a page given back, per space: the reserved page 0, or -1 if page 0 is in use."""
    if isinstance(owner, AttentionRuntime):
        return dict.fromkeys(spaces_of(owner), RESERVED_PAGE)
    return {table.space: RESERVED_PAGE if table.terms.null_page else -1 for table in owner.tables.spaces}


def idle(owner: Owner, refused: str) -> AbstractContextManager[None]:
    """Returns a context in which no step of a runtime begins. Raises WrongState if one has begun.

    An engine orders its steps itself.
    """
    return owner.gate.holder.idle(refused) if isinstance(owner, AttentionRuntime) else nullcontext()


def clears_tails(owner: Owner) -> bool:
    """True if the rest of a sequence's last page may be zeroed, which some kernels need."""
    return isinstance(owner, AttentionRuntime) or owner.options.zero_tails


def _kinds(owner: Owner) -> LayerKinds:
    return owner.kinds if isinstance(owner, AttentionRuntime) else owner.kernels()

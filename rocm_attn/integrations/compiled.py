"""Layer calls as torch.library operations, so that torch.compile can compile the models that make them.

torch.compile cannot trace a runtime, because the host plans its steps. So a compiled model calls operations
(rocm_attn::store, rocm_attn::attend and so on) that refer to their runtime by a number. Each operation makes the layer
call of the running step: eager, captured and compiled steps share one path.

An operation changes pages, step and workspace. It declares all of this as a write to one small tensor, the runtime's
state. So compiled code keeps a runtime's operations, in their order, and never copies the pool.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState, no_such_layer
from rocm_attn.external import ExternalAttention
from rocm_attn.hip_graphs.host_ops import is_host_code
from rocm_attn.hip_graphs.record_guard import guard_here
from rocm_attn.integrations.owners import Owner, problems_of
from rocm_attn.kernels.cache.row_work import QkvWork, RopePairs, RopeTable, RowNorm
from rocm_attn.machine.devices import require_tensor
from rocm_attn.problem import PoolKind
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.protocols import LayerCalls, WrappedLayers
from rocm_attn.step.step import Part

Result = TypeVar("Result")

NAMESPACE = "rocm_attn"

# Arguments of an operation for norms and rope: see _flat().
_Norms = tuple[Tensor | None, Tensor | None, Tensor | None, Sequence[float]]
_Rope = tuple[Tensor | None, bool, bool]

_ROPE_WORK = (
    "Tensor? q_norm, Tensor? k_norm, Tensor? v_norm, float[] eps_and_offsets, "
    "Tensor? cos_sin, bool neighbours, bool at_end"
)


class _Called:
    """The runtime that a number stands for. Valid as long as the runtime lives."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._v_dims = tuple(problem.v_head_dim for problem in problems_of(owner))
        self._works: dict[int, tuple[tuple[object, ...], QkvWork]] = {}

    @property
    def owner(self) -> Owner:
        owner = self._owner()
        assert owner is not None  # the number is removed with its runtime
        return owner

    def layers(self, part: int) -> LayerCalls:
        """Returns the layer calls of a part of the step that is running. Raises WrongState."""
        owner = self.owner
        return owner.gate.running(part) if isinstance(owner, AttentionRuntime) else owner.layers

    def v_of(self, layer: int, k: Tensor, v: Tensor | None) -> Tensor:
        """Returns V of a layer. If v is None, as for latent layers, it is the first v_head_dim elements of k."""
        return k[..., : self._v_dims[layer]] if v is None else v

    def work(self, layer: int, norms: _Norms, rope: _Rope) -> QkvWork:
        """Returns the norms and rope of a layer. The object is reused while its tensors and numbers are the same."""
        *weights, numbers = norms
        cos_sin, *of_table = rope
        tensors = *weights, cos_sin
        # The kept object holds the tensors, so only they and their views can have these addresses.
        forms = (None if each is None else (each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors)
        made_of = *forms, *numbers, *of_table
        kept = self._works.get(layer)
        if kept is None or kept[0] != made_of:
            each = [
                None if weight is None else RowNorm(weight, eps, offset)
                for weight, eps, offset in zip(weights, numbers[::2], numbers[1::2], strict=True)
            ]
            kept = self._works[layer] = made_of, QkvWork(_table(*rope), *each)
        return kept[1]


_called: dict[int, _Called] = {}
_numbers = itertools.count(1)
_of_owner: weakref.WeakKeyDictionary[Owner, CompiledLayers] = weakref.WeakKeyDictionary()


def _of(number: int) -> _Called:
    called = _called.get(number)
    if called is None:
        raise WrongState(
            f"runtime {number} is not of this process, or has ended; call compiled_layers() with the running one, "
            "and compile again"
        )
    return called


class CompiledLayers(WrappedLayers):
    """LayerCalls for forwards that torch.compile compiles. Made by compiled_layers().

    Each call goes to the step that is running when the operation runs. The object may be kept as long as the runtime
    lives, and does not keep it alive. It has no gradients.

    number: the runtime's number in operations
    part:   Part.number of the part whose calls these are
    state:  int32 [1], declared as written by operations, in place of pages, step and workspace
    """

    def __init__(self, number: int, part: int, state: Tensor, is_latent: tuple[bool, ...]) -> None:
        self.number, self.part, self.state, self._is_latent = number, part, state, is_latent

    def of(self, part: Part) -> CompiledLayers:
        """Returns the layer calls of a part of a step."""
        return CompiledLayers(self.number, part.number, self.state, self._is_latent)

    def fill(self, *written: Tensor, slots: Tensor | None = None) -> None:
        """Does Step.fill(), or ExternalAttention.fill(slots), within compiled code.

        written: every tensor of the step that the code reads afterwards; torch must know that fill writes it
        """
        torch.ops.rocm_attn.fill(self.state, written, slots, self.number)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._call("store", layer, k, self._v(layer, v))

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        flat = *_flat(work), *_flat_rope(work.rope)
        self._call("rope_and_store", layer, q, k, self._v(layer, v), q_out, *flat)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._call("rope_queries", layer, q, q_out, *_flat(work), *_flat_rope(work.rope))

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        self._call("finish", layer, out, gate, *_flat_rope(undo))

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(torch.ops.rocm_attn, name)(self.state, *given, self.number, self.part, layer)

    def _v(self, layer: int, v: Tensor) -> Tensor | None:
        """Returns V as an argument; None for a latent layer. Its V is part of k, and compiled code might copy it."""
        if layer not in range(len(self._is_latent)):
            raise no_such_layer(layer, len(self._is_latent))
        if self._is_latent[layer]:
            return None
        require_tensor("v", v)  # an operation would take None for V that is part of k
        return v


def compiled_layers(owner: Owner) -> CompiledLayers:
    """Returns the layer calls for a compiled forward, in place of `Part.layers`; one object per runtime.

    owner: an AttentionRuntime or ExternalAttention. A step of the latter has one part, so of() is not needed for it
    Raises BadSetting for an owner of another type.
    """
    problems = problems_of(owner)
    kept = _of_owner.get(owner)
    if kept is None:
        with torch.inference_mode(False):
            state = torch.zeros(1, dtype=torch.int32, device=owner.device)
        is_latent = tuple(problem.pool is PoolKind.LATENT for problem in problems)
        kept = _of_owner[owner] = CompiledLayers(next(_numbers), 0, state, is_latent)
        _called[kept.number] = _Called(owner)
        weakref.finalize(owner, _called.pop, kept.number, None)
    return kept


class CompiledForward(Generic[Result]):
    """A compiled forward, which may be captured. Made by compile_forward().

    A capture is guarded by a mode that intercepts each torch operation, under which torch runs no compiled code. So on
    a GPU this mode is suspended while compiled code runs. On a CPU, the recorder records torch operations, so it gets
    the original forward.
    """

    def __init__(self, forward: Callable[..., Result], compiled: Callable[..., Result]) -> None:
        self._forward, self._compiled = forward, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Runs the forward."""
        guard = guard_here()
        if guard is None:
            return self._compiled(*args, **kwargs)
        if guard.device.type == "cpu":
            return self._forward(*args, **kwargs)
        with guard.stepped_out():
            return self._compiled(*args, **kwargs)


def compile_forward(forward: Callable[..., Result], **options: Any) -> CompiledForward[Result]:
    """Compiles a forward whose layer calls are CompiledLayers, without graph breaks; a StepRunner can run it.

    options: options of torch.compile; fullgraph is True
    """
    return CompiledForward(forward, torch.compile(forward, fullgraph=True, **options))


def _flat(work: QkvWork) -> _Norms:
    """Returns the weights of the three norms (None without a norm), then eps and offset of each (zeros without one)."""
    norms = work.q_norm, work.k_norm, work.v_norm
    q, k, v = (None if norm is None else norm.weight for norm in norms)
    numbers: list[float] = []
    for norm in norms:
        numbers += [0.0, 0.0] if norm is None else [norm.eps, norm.offset]
    return q, k, v, numbers


def _flat_rope(rope: RopeTable | None) -> _Rope:
    """Returns cos_sin, whether neighbours are pairs, and at_end."""
    return (None, False, False) if rope is None else (rope.cos_sin, rope.pairs is RopePairs.NEIGHBOURS, rope.at_end)


def _table(cos_sin: Tensor | None, neighbours: bool, at_end: bool) -> RopeTable | None:
    if cos_sin is None:
        return None
    return RopeTable(cos_sin, RopePairs.NEIGHBOURS if neighbours else RopePairs.HALVES, at_end)


def _fill(state: Tensor, written: Sequence[Tensor], slots: Tensor | None, number: int) -> None:
    owner = _of(number).owner
    if isinstance(owner, ExternalAttention):
        owner.fill(slots)
    elif slots is None:
        owner.gate.fill()
    else:
        raise BadTensor(
            "slots were given to fill() of a runtime that has its own; give slots only to an engine's steps"
        )


def _store(state: Tensor, k: Tensor, v: Tensor | None, number: int, part: int, layer: int) -> None:
    called = _of(number)
    called.layers(part).store(layer, k, called.v_of(layer, k, v))


def _plain(name: str) -> Callable[..., None]:
    """Returns the body of an operation whose arguments are those of the layer call of this name."""

    def body(state: Tensor, *flat: Any) -> None:
        *given, number, part, layer = flat
        getattr(_of(number).layers(part), name)(layer, *given)

    return body


def _rope_and_store(state: Tensor, q: Tensor, k: Tensor, v: Tensor | None, q_out: Tensor, *flat: Any) -> None:
    *work, number, part, layer = flat
    called = _of(number)
    its_work = called.work(layer, tuple(work[:4]), tuple(work[4:]))
    called.layers(part).rope_and_store(layer, q, k, called.v_of(layer, k, v), q_out, its_work)


def _rope_queries(state: Tensor, q: Tensor, q_out: Tensor, *flat: Any) -> None:
    *work, number, part, layer = flat
    called = _of(number)
    called.layers(part).rope_queries(layer, q, q_out, called.work(layer, tuple(work[:4]), tuple(work[4:])))


def _finish(state: Tensor, out: Tensor, gate: Tensor | None, *flat: Any) -> None:
    *undo, number, part, layer = flat
    _of(number).layers(part).finish(layer, out, gate=gate, undo=_table(*undo))


# Name -> the arguments between the state and the number, and the function that runs. Tensor(x!) is written.
_OPERATIONS: Mapping[str, tuple[str, Callable[..., None]]] = {
    "store": ("Tensor k, Tensor? v", _store),
    "attend": ("Tensor q, Tensor(b!) out, Tensor(c!)? lse", _plain("attend")),
    "rope_and_store": (f"Tensor q, Tensor k, Tensor? v, Tensor(b!) q_out, {_ROPE_WORK}", _rope_and_store),
    "rope_queries": (f"Tensor q, Tensor(b!) q_out, {_ROPE_WORK}", _rope_queries),
    "finish": ("Tensor(b!) out, Tensor? gate, Tensor? cos_sin, bool neighbours, bool at_end", _finish),
    "fold": ("Tensor values, Tensor gates, Tensor(b!) rows", _plain("fold")),
    "store_index": ("Tensor k", _plain("store_index")),
    "select": ("Tensor q, Tensor? weights", _plain("select")),
    "select_among": ("Tensor q, Tensor? weights", _plain("select_among")),
    "give_selection": ("Tensor units, Tensor counts", _plain("give_selection")),
    "attend_selected": ("Tensor q, Tensor(b!) out, Tensor(c!)? lse", _plain("attend_selected")),
}

_SCHEMAS = {
    name: f"(Tensor(a!) state, {given}, int number, int part, int layer) -> ()"
    for name, (given, _) in _OPERATIONS.items()
}
_SCHEMAS["fill"] = "(Tensor(a!) state, Tensor(b!)[] written, Tensor? slots, int number) -> ()"
_BODIES = {"fill": _fill, **{name: body for name, (_, body) in _OPERATIONS.items()}}

# Each of these runs host code of a step. An engine that captures a model in pieces splits it at these operations and
# captures none of them. The names are written as engines list them.
SPLITTING_OPS = tuple(f"{NAMESPACE}::{name}" for name in _BODIES)

# Operations depend on the strides of their arguments. Inductor captures no graph around one that must not be replayed.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)


def _writes_only(*arguments: object) -> None:
    """Does nothing, for tensors without memory: operations return nothing."""


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, body in _BODIES.items():
        library.define(name + _SCHEMAS[name], tags=_TAGS)  # type: ignore[no-untyped-call]
        library.impl(name, body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", _writes_only, lib=library)
        is_host_code(getattr(torch.ops.rocm_attn, name).default, body)
    return library


# The operations live as long as this object.
_LIBRARY = _define()

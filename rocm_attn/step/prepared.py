"""PreparedCalls: a layer call that was made once is made again by its launches alone, with other addresses.

Triton looks at every argument of every launch to see which compiled variant it needs, and a launcher asks tensors for
their sizes; for one layer of attention that costs ten times what the launches do. A call of equal forms needs the same
variants with the same numbers. So the first call of a form runs as it is, with all its checks, and what it launches is
noted; later calls of that form put their own addresses into those launches.

A call is not prepared where its launches are not all that it does, where a launch is given memory that is neither the
call's, nor the layer's, nor the step's, or where tensors do not begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_attn.hip_graphs.tensor_trees import tensors_in
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork
from rocm_attn.kernels.launch import Launch, does_only_launch, note_launches
from rocm_attn.paging.storage import Pool
from rocm_attn.providers.contract import BoundKernel
from rocm_attn.step.head_weights import LayerHeadWeights

# What Triton looks at of an address; variants for others than multiples of it are as rare as such tensors.
ALIGNMENT = 16
# Forms of calls that a step remembers. A caller that gives tensors of ever other strides makes each call as it is.
_MOST_FORMS = 64

Run = Callable[..., object]


class PreparedCall:
    """The launches of a call, for any addresses of its tensors.

    launches:  what runs each, and from where in (stream, *addresses, *constants) its arguments come
    constants: everything that calls of the form have in common
    stream:    the handle of the current stream
    """

    __slots__ = ("_constants", "_launches", "_stream")

    def __init__(
        self,
        launches: Sequence[tuple[Run, Callable[[tuple[object, ...]], tuple[object, ...]]]],
        constants: tuple[object, ...],
        stream: Callable[[], int],
    ) -> None:
        self._launches = tuple(launches)
        self._constants = constants
        self._stream = stream

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Launch on the current stream. addresses: of the tensors that the call was prepared with, in their order"""
        values = (self._stream(), *addresses, *self._constants)
        for run, arguments_of in self._launches:
            run(*arguments_of(values))


class PreparedCalls:
    """The calls that were made of one step's layers, by their form. It goes when the step's views do.

    A form holds all that a call's launches follow from but addresses: the operation, the kind and layout of the layer,
    shape, strides, dtype and device of every tensor that is given, and which of them are one.
    """

    __slots__ = ("_owned", "by_form")

    def __init__(self) -> None:
        self.by_form: dict[Hashable, PreparedCall] = {}
        self._owned: frozenset[int] = frozenset()

    @contextmanager
    def noting(self, call: Call, memory: object, stream: Callable[[], int]) -> Iterator[None]:
        """Prepare calls of this one's form by what is launched meanwhile.

        memory: a tree of tensors that stay where they are for as long as the step's views
        """
        with note_launches() as notes:
            yield
        is_clear = notes.is_whole and call.is_alone and not any(each % ALIGNMENT for each in call.addresses)
        if is_clear and len(self.by_form) < _MOST_FORMS:
            self._owned = self._owned or frozenset(_storage(tensor) for tensor in tensors_in(memory))
            prepared = prepare(notes.launches, call.addresses, self._owned, stream)
            if prepared is not None:
                self.by_form[call.form] = prepared


def prepare(
    launches: Sequence[Launch], addresses: tuple[int, ...], owned: frozenset[int], stream: Callable[[], int]
) -> PreparedCall | None:
    """A call of these launches for other addresses, or None where something in them is not understood.

    addresses: what the launches were given; 0 for what is not there
    owned:     addresses of the storages that stay where they are
    """
    places = {address: 1 + place for place, address in enumerate(addresses) if address}
    constants: list[object] = []
    made: list[tuple[Run, Callable[[tuple[object, ...]], tuple[object, ...]]]] = []
    for launch in launches:
        found = _arguments(launch, places, owned)
        if launch.compiled is None or found is None:
            return None
        # What compiled[grid] does, less looking for hooks of a profiler.
        compiled, grid = launch.compiled, (*launch.grid, 1, 1)[:3]
        handles = compiled.function, compiled.packed_metadata, None, None, None
        taken = []
        for argument in (*grid, _Place(0), *handles, *found):
            if isinstance(argument, _Place):
                taken.append(argument.number)
            else:
                taken.append(1 + len(addresses) + len(constants))
                constants.append(argument)
        made.append((compiled.run, itemgetter(*taken)))
    return PreparedCall(made, tuple(constants), stream) if made else None


class _Place(NamedTuple):
    """An argument that is the stream, whose number is 0, or one of a call's addresses, from 1 on."""

    number: int


def _arguments(launch: Launch, places: dict[int, int], owned: frozenset[int]) -> list[object] | None:
    """A launch's arguments: places, addresses that stay, and plain values; None where one is something else."""
    found: list[object] = []
    for parameter, argument in zip(launch.kernel.params, launch.arguments, strict=True):
        if parameter.is_constexpr or argument is None or isinstance(argument, (bool, int, float)):
            found.append(argument)
        elif not isinstance(argument, Tensor):
            return None
        elif argument.data_ptr() in places:
            found.append(_Place(places[argument.data_ptr()]))
        elif _storage(argument) in owned:
            found.append(argument.data_ptr())
        else:
            return None
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_prepared(kernel: BoundKernel) -> bool:
    """Whether all work of a kernel, and of those that it is made of, is launches."""
    parts: list[Any] = [getattr(kernel, each.name) for each in fields(kernel)] if is_dataclass(kernel) else []
    of_parts = (is_prepared(part) for part in parts if hasattr(part, "attend"))
    return does_only_launch(type(kernel).attend) and all(of_parts)


def _form(tensor: Tensor) -> tuple[object, ...]:
    """What launches follow from, of a tensor that a call is given."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Call(NamedTuple):
    """A layer call as PreparedCalls know it.

    form:      see PreparedCalls
    addresses: of the tensors that are the call's, then of the layer's; 0 where there is none
    num_own:   how many are the call's
    """

    form: Hashable
    addresses: tuple[int, ...]
    num_own: int

    @property
    def is_alone(self) -> bool:
        """Whether no tensor of the call begins where one of the layer does: launches could be given either."""
        own, of_layer = set(self.addresses[: self.num_own]), set(self.addresses[self.num_own :])
        return not (own & of_layer) - {0}


class _LayerMemory(NamedTuple):
    """What a layer's launches are given beside a call's own tensors and the step's.

    owners:    the objects that hold it: for as long as a layer has these, the addresses are right
    addresses: of each tensor; 0 where there is none
    layout:    a number that only layers of this kind with tensors of these forms have
    """

    owners: tuple[object, object]
    addresses: tuple[int, ...]
    layout: int


class LayerForms:
    """The forms of calls of a model's layers.

    kind_of_layer: layers of a kind have one problem, and one kernel in each step
    """

    def __init__(self, kind_of_layer: Sequence[int], pool: Pool, head_weights: LayerHeadWeights) -> None:
        self._kind_of_layer = kind_of_layer
        self._pool = pool
        self._head_weights = head_weights
        self._numbers: dict[Hashable, int] = {}
        self._written: dict[int, _LayerMemory] = {}
        self._read: dict[int, _LayerMemory] = {}
        self._roped: dict[int, _LayerMemory] = {}

    # What follows runs at every layer of every eager step: forms are written out, as calls would take half of the time.

    def store(self, prepared: PreparedCalls, layer: int, k: Tensor, v: Tensor) -> Call | None:
        """Make Layers.store again, if one of its form was prepared. The call, where it was not made."""
        pages = self._pool.layer(layer)
        memory = self._written.get(layer)
        if memory is None or memory.owners[0] is not pages:
            memory = self._written[layer] = self._memory(layer, (pages, None), _tensors_of_pages(pages), pages.format)
        at_k, at_v = k.data_ptr(), v.data_ptr()
        of_k, of_v = (k.shape, k.stride(), k.dtype, k.device), (v.shape, v.stride(), v.dtype, v.device)
        form = "store", memory.layout, at_k == at_v, of_k, of_v
        addresses = at_k, at_v, *memory.addresses
        call = prepared.by_form.get(form)
        if call is None or (at_k | at_v) % ALIGNMENT:
            return Call(form, addresses, 2)
        call(addresses)
        return None

    def rope_and_store(self, prepared: PreparedCalls, layer: int, given: Projected, work: QkvWork) -> Call | None:
        """As store, of Layers.rope_and_store."""
        pages = self._pool.layer(layer)
        memory = self._roped.get(layer)
        if memory is None or memory.owners[0] is not pages or memory.owners[1] is not work:
            tensors = (*_tensors_of_pages(pages), *_tensors_of_work(work))
            memory = self._roped[layer] = self._memory(layer, (pages, work), tensors, (pages.format, _numbers(work)))
        q, k, v, q_out = given
        at_q, at_k, at_v, at_out = q.data_ptr(), k.data_ptr(), v.data_ptr(), q_out.data_ptr()
        form = "rope", memory.layout, at_q == at_out, at_k == at_v, _form(q), _form(k), _form(v), _form(q_out)
        addresses = at_q, at_k, at_v, at_out, *memory.addresses
        call = prepared.by_form.get(form)
        if call is None or (at_q | at_k | at_v | at_out) % ALIGNMENT:
            return Call(form, addresses, 4)
        call(addresses)
        return None

    def attend(self, prepared: PreparedCalls, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> Call | None:
        """As store, of Layers.attend. Raises WrongState for a layer that wants head weights."""
        pages, weights = self._pool.layer(layer), self._head_weights.of(layer)
        memory = self._read.get(layer)
        if memory is None or memory.owners[0] is not pages or memory.owners[1] is not weights:
            tensors = (*_tensors_of_pages(pages), weights.sinks, weights.alibi_slopes)
            memory = self._read[layer] = self._memory(layer, (pages, weights), tensors, pages.format)
        at_q, at_out, at_lse = q.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr()
        of_q, of_out = (q.shape, q.stride(), q.dtype, q.device), (out.shape, out.stride(), out.dtype, out.device)
        form = "attend", memory.layout, at_q == at_out, of_q, of_out, None if lse is None else _form(lse)
        addresses = at_q, at_out, at_lse, *memory.addresses
        call = prepared.by_form.get(form)
        if call is None or (at_q | at_out | at_lse) % ALIGNMENT:
            return Call(form, addresses, 3)
        call(addresses)
        return None

    def _memory(
        self, layer: int, owners: tuple[object, object], tensors: Sequence[Tensor | None], common: Hashable
    ) -> _LayerMemory:
        """common: what else launches follow from"""
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        forms = tuple(None if tensor is None else _form(tensor) for tensor in tensors)
        # Of tensors that begin at one place, launches do not say which they were given.
        same = tuple(addresses.index(address) for address in addresses)
        layout = self._kind_of_layer[layer], common, forms, same
        return _LayerMemory(owners, addresses, self._numbers.setdefault(layout, len(self._numbers)))


def _tensors_of_pages(pages: LayerPages) -> tuple[Tensor | None, ...]:
    return pages.raw_k, pages.raw_v, pages.k_scale, pages.v_scale


def _tensors_of_work(work: QkvWork) -> tuple[Tensor | None, ...]:
    norms = work.q_norm, work.k_norm, work.v_norm
    rope = None if work.rope is None else work.rope.cos_sin
    return (rope, *(None if norm is None else norm.weight for norm in norms))


def _numbers(work: QkvWork) -> Hashable:
    """What is not in the tensors of work."""
    rope = None if work.rope is None else (work.rope.pairs, work.rope.at_end)
    norms = work.q_norm, work.k_norm, work.v_norm
    return (rope, *(None if norm is None else (norm.eps, norm.offset) for norm in norms))


def current_stream(device: torch.device) -> Callable[[], int]:
    """Gives the handle of a GPU's current stream."""
    # torch._C: what Triton asks in its place costs as much as the launch.
    raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return partial(raw, device.index)

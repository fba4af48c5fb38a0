"""PreparedCalls: makes eager layer calls cheap on the host, by repeating their recorded launches with new addresses.

Triton checks every argument of every launch to find the compiled variant, and a launcher reads the sizes of tensors.
For one layer of attention that costs ten times as much as the launches. Calls with equal shapes, dtypes and strides
need the same variants and the same numbers. So the first such call runs unchanged, with all its checks, and its
launches are recorded; later calls put their own addresses into those launches. If a layer's arguments have the same
addresses as last time, nothing is replaced.

A call is not prepared if it does more than launch kernels, if a launch uses memory that belongs neither to the call,
nor to the layer, nor to the step, or if a tensor does not begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.hip_graphs.tensor_trees import tensors_in
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork
from rocm_attn.kernels.driver_call import (
    ArgumentPlace,
    Arguments,
    DescribedPlace,
    MapOf,
    Run,
    arguments_of,
    driver_call,
    with_maps,
)
from rocm_attn.kernels.launch import Launch, does_only_launch, note_launches, observers
from rocm_attn.paging.storage import PagePool
from rocm_attn.providers.by_tokens import KernelByTokens, SchedulesByTokens
from rocm_attn.step.head_weights import HeadWeights, LayerHeadWeights

# The check of torch's compiler; None in a torch that no longer has it, since the name is not public.
_TENSOR_GUARDS: Callable[..., Any] | None = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
# Triton compiles other variants for addresses that are no multiples of it. Such tensors are rare.
ALIGNMENT = 16
# Forms of calls that a step remembers. Later forms, as of strides that keep changing, are not prepared.
_MOST_FORMS = 64

# Pairs of a call's tensors of which one is written, by the operation and the number of tensors: no part of one may be
# in the other's memory.
_APART: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {
    ("store", 2): (),
    ("rope", 4): ((0, 3),),
    **{("attend", count): tuple(combinations(range(count), 2)) for count in (2, 3)},
    **{("store and attend", count): tuple(combinations(range(2, count), 2)) for count in (4, 5)},
}
# Such pairs, each with the bytes from the beginning to the end of both.
Apart = tuple[tuple[int, int, int, int], ...]

# Calls of the driver, with all their arguments.
Launches = tuple[tuple[Run, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """The launches of a call, for any addresses of its tensors.

    made_of:   the function that runs each launch, and the one that builds its arguments from (stream, *addresses,
               *maps, *constants)
    maps:      functions that make maps of descriptors, each from the address with this number among the values
    constants: the values that all calls of the form share
    apart:     tensors that must not share memory
    """

    made_of: Sequence[tuple[Run, Arguments]]
    maps: Sequence[tuple[int, MapOf]]
    constants: tuple[object, ...]
    apart: Apart = ()

    def may_meet(self, own: tuple[int, ...]) -> bool:
        """True if tensors of these addresses may share memory and must not. One address is part of a form."""
        for one, other, of_one, of_other in self.apart:
            if -of_other < own[other] - own[one] < of_one and own[one] != own[other]:
                return True
        return False

    def launches(self, stream: int, addresses: tuple[int, ...]) -> Launches:
        """The launches of a call on a stream, by handle. addresses: of its tensors, in the order of the first call"""
        maps = [map_of(addresses[number - 1]) for number, map_of in self.maps]
        values = (stream, *addresses, *maps, *self.constants)
        return tuple([(run, arguments(values)) for run, arguments in self.made_of])


class LastCall(NamedTuple):
    """The last launches of a layer, with the arguments that they were made for.

    stream:    its handle
    addresses: of the call's own tensors; forms: of each, see _form
    owners:    see _LayerMemory
    same:      for a call that was repeated, a check that tensors have the same forms; see forms_alike
    """

    stream: int
    addresses: tuple[int, ...]
    forms: tuple[object, ...]
    owners: tuple[object, object]
    launches: Launches
    same: Callable[..., bool] | None = None


LastCalls = dict[int, LastCall]  # by layer
# For a layer that was called once: its launches are kept from the second time on, as many views serve only one step.
_NOT_KEPT = LastCall(-1, (), (), (None, None), ())


@dataclass(slots=True, eq=False)
class SameLaunches:
    """Launches that are made repeatedly with the same tensors.

    The launcher makes them the first two times, and they are recorded the second time. After that they go straight to
    the driver: nothing is checked, and no tensor is asked for its address. So the tensors must not move, while their
    content may change.
    """

    _made: tuple[int, Launches] = (-1, ())  # no stream has this handle
    _prepared: PreparedCall | None = None
    _were_made: bool = False

    def again(self, stream: int) -> bool:
        """Repeats the recorded launches on a stream, by its handle; returns whether there were any."""
        if self._prepared is None:
            return False
        if self._made[0] != stream:
            self._made = stream, self._prepared.launches(stream, ())
        for run, arguments in self._made[1]:
            run(*arguments)
        return True

    @contextmanager
    def noting(self, memory: object) -> Iterator[None]:
        """Records the launches made inside this context, by a launcher that does nothing else.

        memory: a tree of the tensors that they use
        """
        if not self._were_made:  # many run only once, and need no record
            self._were_made = True
            yield
            return
        with note_launches() as notes:
            yield
        if notes.is_whole:
            self._prepared = prepare(notes.launches, (), _storages(memory))


@dataclass(slots=True, eq=False)
class PreparedCalls:
    """The calls of one step's layers, by their form. It is dropped with the step's views.

    A form holds everything that determines a call's launches except addresses: the operation, the kind and layout of
    the layer, shape, strides, dtype and device of every tensor that is passed, and which of them are the same.

    stored, roped, attended: the last call of each layer
    both: for layers that stored and attended in one call: both last calls together, with the arguments of both and the
          owners of attend
    fill: the launches that derive the step's metadata
    """

    by_form: dict[Hashable, PreparedCall] = field(default_factory=dict)
    stored: LastCalls = field(default_factory=dict)
    roped: LastCalls = field(default_factory=dict)
    attended: LastCalls = field(default_factory=dict)
    both: LastCalls = field(default_factory=dict)
    fill: SameLaunches = field(default_factory=SameLaunches)
    _owned: frozenset[int] = frozenset()

    @contextmanager
    def noting(self, call: AddressedCall, memory: object) -> Iterator[None]:
        """Prepares calls of this form from the launches made inside this context.

        memory: a tree of tensors that do not move while the step's views exist
        """
        with note_launches() as notes:
            yield
        own, of_layer = set(call.addresses[: call.num_own]), set(call.addresses[call.num_own :])
        # If a tensor begins at the address of one of the layer's, the launches do not show which of them they use.
        is_clear = notes.is_whole and not (own & of_layer) - {0} and not _are_odd(call.addresses)
        if is_clear and len(self.by_form) < _MOST_FORMS:
            self._owned = self._owned or _storages(memory)
            prepared = prepare(notes.launches, call.addresses, self._owned)
            if prepared is not None:
                self.by_form[call.form] = replace(prepared, apart=call.apart)


class RepeatedLauncher:
    """A launcher with its arguments, which are the same at each call; see SameLaunches.

    A launcher that does more than launch, or launches on no GPU, is called each time.

    stream:    gives the handle of the current stream; None: there is none, as on a CPU
    launcher:  one of only_launches(), if its launches are to be kept
    arguments: the launcher's arguments; tensors on the device, or in pinned memory of the host
    """

    __slots__ = ("_arguments", "_launches", "_stream", "launcher")

    def __init__(
        self, stream: Callable[[], int] | None, launcher: Callable[..., object], *arguments: object, **options: object
    ) -> None:
        self.launcher = partial(launcher, *arguments, **options)
        self._arguments = arguments
        self._launches = SameLaunches()
        self._stream = stream if does_only_launch(launcher) else None

    def __call__(self) -> None:
        """Launches on the current stream."""
        if self._stream is None or observers:
            self.launcher()
        elif not self._launches.again(self._stream()):
            with self._launches.noting(self._arguments):
                self.launcher()


def prepare(launches: Sequence[Launch], addresses: tuple[int, ...], owned: frozenset[int]) -> PreparedCall | None:
    """A call of these launches for other addresses; None if a part of them is not understood.

    addresses: arguments of the launches; 0 for missing tensors
    owned:     addresses of the storages that do not move
    """
    places = {address: 1 + place for place, address in enumerate(addresses) if address}
    calls: list[tuple[Run, tuple[object, ...]]] = []
    maps: list[tuple[int, MapOf]] = []
    for launch in launches:
        found = _arguments(launch, places, owned)
        if launch.compiled is None or found is None:
            return None
        described = driver_call(launch.compiled, launch.grid, ArgumentPlace(0), found)
        call = with_maps(*described, 1 + len(addresses) + len(maps))
        if call is None:
            return None
        calls.append(call[:2])
        maps += call[2]
    # The variants are no arguments. They are kept because Triton unloads variants without a reference.
    constants: list[object] = [launch.compiled for launch in launches]
    num_values = 1 + len(addresses) + len(maps)
    made = [(run, arguments_of(template, num_values, constants)) for run, template in calls]
    return PreparedCall(made, maps, tuple(constants)) if made else None


def _arguments(launch: Launch, places: dict[int, int], owned: frozenset[int]) -> list[object] | None:
    """A launch's arguments: places, addresses that do not move, and plain values; None if one is something else."""
    found: list[object] = []
    for parameter, argument in zip(launch.kernel.params, launch.arguments, strict=True):
        if parameter.is_constexpr or argument is None or isinstance(argument, (bool, int, float)):
            found.append(argument)
        elif not isinstance(argument, Tensor):
            described = _described(argument, places)
            if described is None:
                return None
            found.append(described)
        elif argument.data_ptr() in places:
            found.append(ArgumentPlace(places[argument.data_ptr()]))
        elif _storage(argument) in owned:
            found.append(argument.data_ptr())
        else:
            return None
    return found


def _described(argument: object, places: dict[int, int]) -> DescribedPlace | None:
    """A descriptor of a tensor that is an argument of calls; None for anything else."""
    base, padding = getattr(argument, "base", None), getattr(argument, "padding", None)
    if not isinstance(base, Tensor) or not isinstance(padding, str) or base.data_ptr() not in places:
        return None
    described: Any = argument
    return DescribedPlace(places[base.data_ptr()], tuple(described.shape), tuple(described.strides), padding)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(tree: object) -> frozenset[int]:
    return frozenset(_storage(tensor) for tensor in tensors_in(tree))


def works_by_launches(value: Any, method: str, shape: PaddedShape) -> bool:
    """True if a kernel's "attend", or a schedule's "build", only makes launches in steps of a shape.

    A kernel that forks a stream in a capture does so in no other step: see Layers.attend.
    """
    if isinstance(value, (KernelByTokens, SchedulesByTokens)):
        value = value.of_shape(shape)
    held: list[Any] = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    parts = [part for each in held for part in (each if isinstance(each, tuple) else (each,))]
    of_parts = (works_by_launches(part, method, shape) for part in parts if hasattr(part, method))
    return does_only_launch(getattr(type(value), method)) and all(of_parts)


def _form(tensor: Tensor) -> tuple[object, ...]:
    """The properties of an argument tensor that launches depend on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _apart(operation: str, forms: Sequence[tuple[Any, ...]]) -> Apart:
    """The tensors of a call that must not share memory. forms: of each of its tensors"""
    lengths = [
        int(dtype.itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))))
        for shape, stride, dtype, _ in forms
    ]
    return tuple((one, other, lengths[one], lengths[other]) for one, other in _APART[operation, len(forms)])


def forms_alike(*tensors: Tensor) -> Callable[..., bool] | None:
    """Returns a function in C that checks whether as many tensors have the forms of these; it keeps none of them.

    The check may fail for equal forms, for instance in another grad or inference mode. None if a tensor is passed
    twice, which is always refused, or if torch has no such check.
    """
    if _TENSOR_GUARDS is None or len(set(map(id, tensors))) < len(tensors):
        return None
    check: Callable[..., bool] = _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _cannot_say(*tensors: Tensor) -> bool:
    """Always fails; replaces the result of forms_alike if that is None."""
    return False


class AddressedCall(NamedTuple):
    """A layer call in the form of PreparedCalls.

    form:      see PreparedCalls
    addresses: of the call's own tensors, then of the layer's; 0 if the layer has none
    num_own:   how many belong to the call
    apart:     those that must not share memory
    """

    form: Hashable
    addresses: tuple[int, ...]
    num_own: int
    apart: Apart = ()


# Memory that a layer's launches read in addition to a call's own tensors: its pages, row work and head weights.
Owners = tuple[LayerPages, QkvWork | HeadWeights | None]


class _LayerMemory(NamedTuple):
    """Memory that a layer's launches use in addition to a call's own tensors and the step's.

    owners:    the objects that hold it: while a layer has these, the addresses are right
    addresses: of each tensor; 0 if there is none
    layout:    a number that only layers of this kind with tensors of these forms have
    """

    owners: Owners
    addresses: tuple[int, ...]
    layout: int


class LayerForms:
    """The forms of calls of a model's layers.

    kind_of_layer: layers of a kind have one problem, and one kernel in each step
    stream:        gives the handle of the current stream
    """

    def __init__(
        self, kind_of_layer: Sequence[int], pool: PagePool, head_weights: LayerHeadWeights, stream: Callable[[], int]
    ) -> None:
        self._kind_of_layer = kind_of_layer
        self._pages_of, self._weights_of = pool.layer, head_weights.of
        self._stream = stream
        self._numbers: dict[Hashable, int] = {}
        self._memories: dict[tuple[str, int], _LayerMemory] = {}

    # The following code runs at every layer of every eager step.

    def store(self, prepared: PreparedCalls, layer: int, k: Tensor, v: Tensor) -> AddressedCall | None:
        """Makes a call of Layers.store if one of its form was prepared; else returns it, so that it can be prepared."""
        return self._call(prepared, prepared.stored, layer, "store", (k, v), None)

    def rope_and_store(
        self, prepared: PreparedCalls, layer: int, projected: Projected, work: QkvWork
    ) -> AddressedCall | None:
        """Does the same as `store`, for Layers.rope_and_store."""
        return self._call(prepared, prepared.roped, layer, "rope", projected, work)

    def attend(
        self, prepared: PreparedCalls, layer: int, q: Tensor, out: Tensor, lse: Tensor | None
    ) -> AddressedCall | None:
        """Does the same as `store`, for Layers.attend. Raises WrongState for a layer that lacks head weights."""
        given = (q, out) if lse is None else (q, out, lse)
        return self._call(prepared, prepared.attended, layer, "attend", given, self._weights_of(layer))

    def store_and_attend(
        self, prepared: PreparedCalls, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
    ) -> AddressedCall | None:
        """Does the same as `store`, for Layers.store_and_attend. Raises WrongState if the layer lacks head weights."""
        given = (k, v, q, out) if lse is None else (k, v, q, out, lse)
        return self._call(prepared, prepared.both, layer, "store and attend", given, self._weights_of(layer))

    def both_again(self, prepared: PreparedCalls, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
        """Repeats a layer's last store and attend if the arguments are the same, without lse; returns whether it did.

        Raises WrongState for a layer that lacks head weights.
        """
        try:
            addresses = k.data_ptr(), v.data_ptr(), q.data_ptr(), out.data_ptr()
        except AttributeError:  # one is no tensor, which the call's checks refuse
            return False
        return self._again(prepared.both, layer, addresses, (k, v, q, out), self._weights_of(layer))

    def join(self, prepared: PreparedCalls, layer: int) -> None:
        """Notes that a layer has stored and attended in one call, without lse: keeps both as one, if both are kept."""
        stored, attended = prepared.stored.get(layer, _NOT_KEPT), prepared.attended.get(layer, _NOT_KEPT)
        if not (stored.launches and attended.launches):
            return
        # Either may be from an earlier call, if this one's was not prepared; then no call has the arguments of both.
        if stored.stream == attended.stream and stored.owners[0] is attended.owners[0]:
            prepared.both[layer] = LastCall(
                stored.stream,
                stored.addresses + attended.addresses,
                stored.forms + attended.forms,
                attended.owners,
                stored.launches + attended.launches,
            )

    def let_go(self, prepared: PreparedCalls, layer: int) -> None:
        """Drops all references to a layer's pages, which will not be bound again."""
        for calls in (prepared.stored, prepared.roped, prepared.attended, prepared.both):
            calls.pop(layer, None)
        self._memories = {at: memory for at, memory in self._memories.items() if at[1] != layer}

    def _again(
        self, calls: LastCalls, layer: int, addresses: tuple[int, ...], tensors: tuple[Tensor, ...], other: object
    ) -> bool:
        """Repeats a layer's last launches if it has the same arguments and owners; returns whether it did.

        calls: of this operation; other: the owner in addition to the layer's pages
        """
        last = calls.get(layer, _NOT_KEPT)
        stream, known, forms, (pages, owner), launches, same = last
        if known != addresses or stream != self._stream() or pages is not self._pages_of(layer) or owner is not other:
            return False
        # Asking four tensors for their forms takes half as long as the driver takes to launch a kernel.
        if same is None or not same(*tensors):
            if forms != tuple(map(_form, tensors)):
                return False
            if same is not _cannot_say:
                calls[layer] = last._replace(same=forms_alike(*tensors) or _cannot_say)
        for run, arguments in launches:
            run(*arguments)
        return True

    def _call(
        self,
        prepared: PreparedCalls,
        calls: LastCalls,
        layer: int,
        operation: str,
        tensors: tuple[Tensor, ...],
        other: QkvWork | HeadWeights | None,
    ) -> AddressedCall | None:
        """Makes a call of a form that was prepared, and keeps it as the layer's last one; returns any other call."""
        try:
            own = tuple(map(Tensor.data_ptr, tensors))
        except TypeError:  # one is no tensor, which the call's checks refuse
            return AddressedCall(None, (), 0)
        if self._again(calls, layer, own, tensors, other):
            return None
        owners, memory = (self._pages_of(layer), other), self._memories.get((operation, layer))
        if memory is None or memory.owners[0] is not owners[0] or memory.owners[1] is not other:
            memory = self._memories[operation, layer] = self._memory(layer, owners)
        forms = tuple(map(_form, tensors))
        form = operation, memory.layout, tuple(map(own.index, own)), forms
        addresses = (*own, *memory.addresses)
        call = prepared.by_form.get(form)
        if call is None or _are_odd(own) or call.may_meet(own):
            return AddressedCall(form, addresses, len(own), _apart(operation, forms))
        stream = self._stream()
        launches = call.launches(stream, addresses)
        calls[layer] = LastCall(stream, own, forms, owners, launches) if layer in calls else _NOT_KEPT
        for run, arguments in launches:
            run(*arguments)
        return None

    def _memory(self, layer: int, owners: Owners) -> _LayerMemory:
        pages, beside = owners
        tensors = [pages.raw_k, pages.raw_v, pages.k_scale, pages.v_scale]
        if pages.record is not None:
            tensors += [pages.record.scales, pages.record.rest]
        numbers: tuple[Hashable, ...] = ()
        if isinstance(beside, HeadWeights):
            tensors += [beside.sinks, beside.alibi_slopes]
        elif beside is not None:
            rope, norms = beside.rope, (beside.q_norm, beside.k_norm, beside.v_norm)
            tensors.append(None if rope is None else rope.cos_sin)
            tensors += [None if norm is None else norm.weight for norm in norms]
            numbers = rope and (rope.pairs, rope.at_end), *(norm and (norm.eps, norm.offset) for norm in norms)
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        forms = tuple(None if tensor is None else _form(tensor) for tensor in tensors)
        # If tensors begin at the same address, the launches do not show which of them they use.
        same = tuple(addresses.index(address) for address in addresses)
        # Calls that were prepared with other addresses may rely on the alignment of these.
        layout = self._kind_of_layer[layer], pages.format, numbers, forms, same, _are_odd(addresses)
        return _LayerMemory(owners, addresses, self._numbers.setdefault(layout, len(self._numbers)))


def _are_odd(addresses: tuple[int, ...]) -> bool:
    """True if one of them is not a multiple of the alignment that prepared launches require."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT != 0


def stream_of(device: torch.device) -> Callable[[], int] | None:
    """Returns a function for the handle of a GPU's current stream; None for a CPU, which has none."""
    # torch._C, because the function that Triton uses costs as much as the launch.
    return partial(torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else None

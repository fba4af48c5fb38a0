"""The ATen operations that a recording cannot hold, and their replacements.

The rules are those of a device capture: no operation may wait for the device, depend on values that the host would have
to read, or copy from pageable host memory. Random operations are refused as well: a replay is a function of the tensors
that it reads.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

READS_ON_HOST = "reads device values on the host"
KEEP_ON_DEVICE = "keep the values on the device, or read them before recording"
SETS_FROM_HOST = "sets elements from a host number by copying it"
USE_FILL = "use fill_(), index_fill_() or masked_fill_(), which take a host number"
COPY_INTO_PLACE = "copy it before the replay into a tensor that exists already"

_MOVES_A_TENSOR = frozenset({aten.resize_, aten.resize_as_, aten.set_})
_PUTS = frozenset({aten.index_put, aten.index_put_})
_MASK_DTYPES = (torch.bool, torch.uint8)


def refusal(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    device: torch.device,
    is_host_number: Callable[[Tensor], bool],
) -> tuple[str, str] | None:
    """Returns (the operation's effect, its replacement) if no recording of work on the device may hold it, else None.

    tensors: those among its arguments
    device:  where the recorded work runs; operations that only involve tensors elsewhere are allowed. A CPU that stands
    in for a device cannot tell its host tensors from its device tensors, so all of them count as device tensors, except
    the single numbers that is_host_number knows.
    """
    if _depends_on_devices_alone(func):
        return _refuse_devices(tensors, device)
    packet = func.overloadpacket
    if packet is aten.lift_fresh:
        return _refuse_lift(tensors[0], device)
    if packet is aten._to_copy:
        return _refuse_cast(tensors[0], kwargs, device)
    if packet is aten.copy_:
        return _refuse_copy(args, kwargs, device, is_host_number)
    if _creates_random(func, args, kwargs):
        return "draws random numbers", "draw them outside of the recording, into a tensor that it reads"
    if not _any_on(device, tensors):
        return None
    if packet in _MOVES_A_TENSOR:
        return "moves or resizes a tensor", "allocate it at its full size before recording"
    if torch.Tag.data_dependent_output in func.tags:
        return READS_ON_HOST, KEEP_ON_DEVICE
    if packet in _PUTS and is_host_number(args[2]):
        # With a mask this is masked_fill; with indices, the number would have to become a device tensor first.
        return None if _selects_by_mask(args[1]) else (SETS_FROM_HOST, USE_FILL)
    if _has_shape_of_values(func, args, kwargs):
        return "has a result whose shape depends on values", "mask instead of selecting (torch.where, masked_fill)"
    return _refuse_devices(tensors, device)


@cache
def _depends_on_devices_alone(func: OpOverload) -> bool:
    """True if func is refused for the devices of its tensors or not at all, as most operations are."""
    packet = func.overloadpacket
    special = {aten.lift_fresh, aten._to_copy, aten.copy_, aten.index, *_MOVES_A_TENSOR, *_PUTS}
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return packet not in special and tags.isdisjoint(func.tags)


def _refuse_devices(tensors: Sequence[Tensor], device: torch.device) -> tuple[str, str] | None:
    if len(tensors) < 2:
        return None
    first = tensors[0].device
    if all(tensor.device == first or tensor.dim() == 0 for tensor in tensors) or not _any_on(device, tensors):
        return None
    return "mixes tensors of two devices, which copies implicitly", COPY_INTO_PLACE


def _any_on(device: torch.device, tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type == device.type for tensor in tensors)


@cache
def is_composite(func: OpOverload, device_type: str) -> bool:
    """True if func consists of other operations on that type of device and has no kernel of its own there.

    Under inference mode such calls arrive whole. Splitting an operation that has a kernel would change its rounding.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own_key = torch._C._dispatch_key_for_device(device_type)
    name: str = func.name()  # type: ignore[no-untyped-call]
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, own_key)


def _refuse_lift(tensor: Tensor, device: torch.device) -> tuple[str, str] | None:
    """Handles a tensor made of Python values; a single number on the CPU is a launch argument and needs no copy."""
    if tensor.device.type != device.type or (tensor.dim() == 0 and tensor.device.type == "cpu"):
        return None
    return "makes a tensor from Python values, which copies from pageable host memory", "make it before recording"


def _refuse_cast(source: Tensor, kwargs: Mapping[str, Any], device: torch.device) -> tuple[str, str] | None:
    target = kwargs.get("device")
    target = source.device if target is None else torch.device(target)
    if target.type == source.device.type and target.index in (None, source.device.index):
        return None
    if device.type not in (target.type, source.device.type):
        return None
    if target.type == "cpu":
        return READS_ON_HOST, KEEP_ON_DEVICE
    return f"makes a copy on {target} of a tensor on {source.device}", COPY_INTO_PLACE


def _refuse_copy(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, is_host_number: Callable[[Tensor], bool]
) -> tuple[str, str] | None:
    target, source = args[0], args[1]
    if target.device.type == device.type and is_host_number(source):
        return SETS_FROM_HOST, USE_FILL
    if target.device == source.device or device.type not in (target.device.type, source.device.type):
        return None
    host = source if source.device.type == "cpu" else target
    if host.device.type != "cpu":
        return f"copies from {source.device} to {target.device}", COPY_INTO_PLACE
    if not host.is_pinned():
        return "copies between the device and pageable host memory", "use pinned memory (pin_memory())"
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if not non_blocking:
        return "waits for a copy between host and device", "copy with non_blocking=True"
    return None


def _creates_random(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Fused kernels are tagged as random because of their dropout; without dropout they are not random."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value != 0.0)
    return True


def _has_shape_of_values(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet is aten.index:
        return _selects_by_mask(args[1])
    if packet in _PUTS:
        return _selects_by_mask(args[1])
    if packet is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


def _selects_by_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in _MASK_DTYPES for index in indices)

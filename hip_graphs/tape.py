"""Tape: records operations of a function, with their scalars and addresses frozen, for the host to repeat."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rocm_attn.hip_graphs.collectives import gives_promises, is_wait, run_and_wait
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.frozen_ops import Replayed, frozen_op, leaves_values, writes_into_arguments
from rocm_attn.hip_graphs.host_pool import HostPool
from rocm_attn.hip_graphs.record_guard import call_site
from rocm_attn.hip_graphs.tensor_trees import map_tensors, tensors_in

Thunk = Callable[[], object]


class Tape:
    """Runs the operations that it records, and gives every result that needs memory a place in the pool.

    operations:   in order, to be called again
    storages:     of tensors that the recorded work uses and the pool does not own: a function that returns the address,
                  and the recorded address
    """

    def __init__(self, pool: HostPool) -> None:
        self.operations: list[Replayed] = []
        self.storages: dict[int, Callable[[], int]] = {}
        self._pool = pool
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs without recording."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def note_launch(self, thunk: Thunk) -> None:
        """Runs a launch once and records it as one operation, regardless of its inner operations."""
        self.operations.append(self._freeze_launch(thunk))
        with self.paused():
            thunk()

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns func(*args, **kwargs), recorded; its new tensors lie in the pool."""
        # A view does no work. The operations that use it are recorded at its addresses.
        if self._paused or func.is_view:
            return func(*args, **kwargs)
        frozen_args, frozen_kwargs = self._freeze((args, kwargs))
        if is_wait(func):
            return args[0]  # every collective was waited for when it was recorded
        # A pending result is waited for before it moves; the code that gets a Work waits for it, and some only once.
        result = run_and_wait(func, args, kwargs) if gives_promises(func) else func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        returned = tensors_in(result)
        owned = self._move_into_pool([tensor for tensor in returned if _is_new(tensor, given)])
        if (owned or writes_into_arguments(func)) and leaves_values(func):
            homes = [self._pool.alias(owned[id(tensor)]) if id(tensor) in owned else None for tensor in returned]
            self.operations.append(frozen_op(func, frozen_args, frozen_kwargs, homes))
        if not owned:
            return result
        return map_tensors(lambda tensor: owned.get(id(tensor), tensor), result)

    def _move_into_pool(self, fresh: list[Tensor]) -> dict[int, Tensor]:
        """Returns id of a tensor -> its twin in the pool, of the same layout and values."""
        twins: dict[int, Tensor] = {}
        for tensor in fresh:
            _require_cpu(tensor)
            storage = tensor.untyped_storage()
            block = self._pool.take(storage.nbytes()).untyped_storage()
            block.copy_(storage)
            twin = torch.empty(0, dtype=tensor.dtype)
            twins[id(tensor)] = twin.set_(block, tensor.storage_offset(), tensor.size(), tensor.stride())
        return twins

    def _freeze(self, tree: Any) -> Any:
        return map_tensors(self._alias, tree)

    def _freeze_launch(self, thunk: Thunk) -> Thunk:
        if isinstance(thunk, partial):
            args, kwargs = self._freeze((thunk.args, thunk.keywords))
            return partial(thunk.func, *args, **kwargs)
        return thunk

    def _alias(self, tensor: Tensor) -> Tensor:
        """Returns another tensor of the same elements, which keeps its address if the tensor object changes."""
        _require_cpu(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise RecordingRefused(
                f"a lazily conjugated or negated tensor at {call_site()} cannot be recorded; call resolve_conj() "
                "or resolve_neg() before"
            )
        inside = self._pool.alias(tensor)
        if inside is not None:
            return inside
        storage = tensor.untyped_storage()
        if storage.data_ptr() != 0:  # an empty tensor may still get its memory, from the out= operation it is given to
            self.storages.setdefault(storage.data_ptr(), storage.data_ptr)
        return tensor.detach()


def _require_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise RecordingRefused(
            f"a tensor on {tensor.device} is used at {call_site()}, and the host's recorder replays only CPU "
            "tensors; use the recorder of that device"
        )


def _is_new(tensor: Tensor, given: set[int]) -> bool:
    """True if a result needs a place in the pool: it has elements, and does not share an argument's memory."""
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() not in given


def require_unmoved(storages: dict[int, Callable[[], int]]) -> None:
    """Raises StaleRecording if a storage was resized in place, which would have left a device reading freed memory."""
    for address, now in storages.items():
        if now() != address:
            raise StaleRecording(
                f"memory at {address:#x} that a recording uses was resized in place and is now at {now():#x}; "
                "allocate it at its full size before recording"
            )

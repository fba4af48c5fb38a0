"""MeteredMemory: the memory of CPU tensors, as a DeviceMemory of a made-up size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MeteredMemory(TorchDispatchMode):
    """Counts the bytes of living tensors that operations make while the mode is on; nothing is cached.

    total: of the device, all of it free in the beginning
    """

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total, self._peak = total, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0  # the bytes of _storages, of which some may have died since they were counted

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                _, before = self._storages.get(storage.data_ptr(), (None, 0))
                self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                self._most += storage.nbytes() - before
        if self._most > self._peak:  # else it is no new peak, and to count would take most of a test's time
            self._peak = max(self._peak, self.held())
        return out

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self.held()

    def held(self) -> int:
        living = ((at, kept) for at, kept in self._storages.items() if not kept[0].expired())  # type: ignore[no-untyped-call]
        self._storages = dict(living)
        self._most = sum(num_bytes for _, num_bytes in self._storages.values())
        return self._most

    def most_held(self) -> int:
        return self._peak

    def start_peak(self) -> None:
        self._peak = self.held()

    def give_back(self) -> None:
        """Does nothing: only living tensors are counted."""

    def of_a_graph(self) -> int:
        return 0

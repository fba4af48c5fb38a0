"""RecordGuard: refuses work that no recording can repeat, and names the place in the caller's code.

A capture that meets such work fails late and without a place; ROCm before 7.14 does not even fail. So the guard watches
three ways in which work arrives: ATen operations (a dispatch mode), tensor methods that read memory without an
operation (a function mode) and the runtime's own waits and queries (wrapped while a guard is active, and only for the
guard's thread).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_attn.hip_graphs.collectives import unwraps_itself
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.forbidden_ops import KEEP_ON_DEVICE, READS_ON_HOST, is_composite, refusal
from rocm_attn.hip_graphs.host_ops import body_of
from rocm_attn.hip_graphs.tensor_trees import tensors_in

_NOT_THE_CALLER = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

# On a CPU these read memory without any operation, so that only the call itself can be seen.
_HOST_READS: Mapping[Callable[..., Any], str] = {
    getattr(Tensor, name): f"Tensor.{name}()"
    for name in (
        "cpu",
        "tolist",
        "numpy",
        "item",
        "nonzero",
        "apply_",
        "map_",
        "map2_",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__repr__",
        "__format__",
    )
}

_WAITS_AND_QUERIES: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", "torch.cuda.synchronize()"),
    (torch.cuda, "empty_cache", "torch.cuda.empty_cache()"),
    (torch.accelerator, "synchronize", "torch.accelerator.synchronize()"),
    (torch.cuda.Stream, "synchronize", "Stream.synchronize()"),
    (torch.cuda.Stream, "query", "Stream.query()"),
    (torch.cuda.Event, "synchronize", "Event.synchronize()"),
    (torch.cuda.Event, "query", "Event.query()"),
    (torch.cuda.Event, "elapsed_time", "Event.elapsed_time()"),
)


# Runs an operation, (func, args, kwargs) -> its result.
RunOperation = Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]


def call_site() -> str:
    """file:line of the innermost frame outside torch and hip_graphs."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_THE_CALLER) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class RecordGuard:
    """While active, raises RecordingRefused in this thread for work on the device that a recording cannot hold.

    device:          where the recorded work runs
    still_recording: whether work enqueued now would be part of the recording; a device's recorder asks the device,
                     which detects work on a stream that was not forked from the recorded one
    run:             runs each operation that it lets pass; the host's recorder notes them here, since every mode that
                     torch asks costs about as much as an operation
    """

    def __init__(
        self,
        device: torch.device,
        still_recording: Callable[[], bool] = lambda: True,
        run: RunOperation = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        self.device = device
        self.still_recording = still_recording
        self.run = run
        self.is_lifted = False
        self._open: list[ExitStack] = []
        self._host_numbers: dict[int, Tensor] = {}

    def __enter__(self) -> RecordGuard:
        stack = ExitStack()
        try:
            # A cast that autocast has kept from before would be read, and not recorded; it dies with its autocast.
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(_WATCH.by(self))
            stack.enter_context(_MethodGuard(self))
            stack.enter_context(_OperationGuard(self))
            self._open.append(stack)
            return self
        except BaseException:  # an interrupt at any line: a guard that was not entered must not stay in force
            stack.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self._open.pop().close()
        self._host_numbers.clear()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lets everything pass for a while: for work that is recorded as a whole, with any inner operations."""
        before, self.is_lifted = self.is_lifted, True
        try:
            yield
        finally:
            self.is_lifted = before

    @contextmanager
    def stepped_out(self) -> Iterator[None]:
        """Stops watching for a while: for compiled code, which torch runs only if no mode is active."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def refuse(self, subject: str, what: str, remedy: str) -> None:
        """Raises RecordingRefused about the subject, unless the guard is lifted."""
        if not self.is_lifted:
            raise RecordingRefused(
                f"{subject} at {call_site()} {what}, which a recording cannot repeat on replay; {remedy}"
            )

    def note_host_number(self, tensor: Tensor) -> None:
        """Remembers a tensor that was made of one Python number, by its address, and keeps it alive meanwhile."""
        self._host_numbers[tensor.data_ptr()] = tensor

    def is_host_number(self, tensor: Tensor) -> bool:
        """True if tensor is one number in host memory; on a CPU, one that was made while this guard was active."""
        if tensor.dim() > 0 or tensor.device.type != "cpu":
            return False
        return self.device.type != "cpu" or tensor.data_ptr() in self._host_numbers

    def covers(self, tensor: Tensor) -> bool:
        """True if a tensor is on the device that records."""
        return tensor.device.type == self.device.type


class LightDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does not make torch.compile skip it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import all of torch.compile, a second of start-up


class _OperationGuard(LightDispatchMode):
    """The guard's view of ATen operations."""

    def __init__(self, guard: RecordGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if unwraps_itself(types):
            return NotImplemented
        guard = self._guard
        if guard.is_lifted:
            return guard.run(func, args, kwargs)
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        refused = refusal(func, args, kwargs, tensors, guard.device, guard.is_host_number)
        if refused is not None:
            guard.refuse(str(func), *refused)
        if not guard.still_recording() and any(map(guard.covers, tensors)):
            guard.refuse(str(func), "runs on a stream that is not recorded", "fork that stream from the recorded one")
        if is_composite(func, guard.device.type):
            with self:
                return func.decompose(*args, **kwargs)
        result = guard.run(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default and result.dim() == 0:
            guard.note_host_number(result)
        return result


class _MethodGuard(TorchFunctionMode):
    """The guard's view of tensor methods."""

    def __init__(self, guard: RecordGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        subject = _HOST_READS.get(func)
        if subject is not None and self._guard.covers(args[0]):
            self._guard.refuse(subject, READS_ON_HOST, KEEP_ON_DEVICE)
        return func(*args, **(kwargs or {}))


class _Watch:
    """Wraps the runtime's waits and queries while any thread records; other threads pass through the wrapper."""

    def __init__(self) -> None:
        # An interrupt may leave it held, and the same thread then acquires it again.
        self._lock = threading.RLock()
        self._active: list[RecordGuard] = []
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._here = threading.local()

    @contextmanager
    def by(self, guard: RecordGuard) -> Iterator[None]:
        outer = self.here()
        try:
            with self._lock:
                self._active.append(guard)
                if not self._wrapped:
                    self._wrap_all()
            self._here.guard = guard
            yield
        finally:
            self._here.guard = outer
            with self._lock:
                if guard in self._active:  # an interrupt may have come before it was added
                    self._active.remove(guard)
                if not self._active:
                    self._restore_all()

    def here(self) -> RecordGuard | None:
        """Returns the active guard of this thread that watches."""
        return getattr(self._here, "guard", None)

    def _wrap_all(self) -> None:
        for owner, name, subject in _WAITS_AND_QUERIES:
            self._wrapped.append((owner, name, vars(owner)[name]))
            setattr(owner, name, self._wrapper(getattr(owner, name), subject))

    def _restore_all(self) -> None:
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def _wrapper(self, original: Callable[..., Any], subject: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            guard = self.here()
            if guard is not None:
                guard.refuse(subject, "waits for the device, or queries it", "do it before or after recording")
            return original(*args, **kwargs)

        return watched


_WATCH = _Watch()


def guard_here() -> RecordGuard | None:
    """Returns the guard that is active in this thread."""
    return _WATCH.here()


def refuse_nested() -> None:
    """Raises RecordingRefused if this thread records already: a stream of a device is captured into one graph."""
    if guard_here() is not None:
        raise RecordingRefused(
            "a recording begins while this thread makes another one; begin it before that one, or after its end"
        )

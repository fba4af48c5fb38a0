"""TorchRecorder: recordings that a GPU replays by itself (HIP graphs on ROCm, CUDA graphs on NVIDIA)."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_void_p
from functools import cache
from threading import Lock
from typing import TypeVar

import torch

from rocm_attn.hip_graphs.driver_graphs import DriverRefused, LaunchGraph, launch_of_graphs
from rocm_attn.hip_graphs.plain_launch import Here, PlainLaunch, is_known
from rocm_attn.hip_graphs.record_guard import RecordGuard, refuse_nested
from rocm_attn.hip_graphs.recorder import refuse_unfinished

T = TypeVar("T")

# True if the driver can launch torch's instantiated graph, instead of torch's replay.
_GIVES_READY_GRAPHS = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") and is_known(torch.__version__)


class TorchRecording:
    """A captured graph of a device, with strong references to the objects that it was captured from."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.bytes = 0
        self.replay: Callable[[], None] = refuse_unfinished
        self.graph = graph
        self._kept: object = None

    def finish(self, device: torch.device, num_bytes: int) -> None:
        """Makes the recording ready; its graph is instantiated."""
        self.bytes = num_bytes
        self.replay = _replay_of(self.graph, device)  # on the stream that is current then

    def keep(self, kept: object) -> None:
        """Keeps a reference to the object that it was captured from."""
        self._kept = kept


class NoGarbageCollection:
    """Pauses garbage collection while any thread captures: freeing another graph or its memory is illegal then."""

    def __init__(self) -> None:
        self._lock, self._captures, self._was_enabled = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._captures:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._captures += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures and self._was_enabled:
                gc.enable()


NO_GARBAGE_COLLECTION = NoGarbageCollection()


class TorchRecorder:
    """Recorder of functions on one GPU, which need not be the current one.

    All recordings share one memory pool; they are warmed up and captured on the recorder's own stream, since kernels
    load their code, and libraries allocate their workspaces, per stream at the first launch.
    """

    # The first run may load, compile and allocate without limits; the second is watched like the capture, because a
    # refusal there leaves nothing to clean up.
    WARM_UPS = 2

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"a GPU recorder needs a device of type cuda (ROCm devices too), got {device}")
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._take_new_pool()

    def record(self, fn: Callable[[], T]) -> tuple[TorchRecording, T]:
        """Does the same as `Recorder.record`; fn runs twice on the device and once more for the capture."""
        with self._on_own_stream():
            self._warm_up(fn)
            return self._captured(fn)

    @contextmanager
    def capture(self) -> Iterator[TorchRecording]:
        with self._on_own_stream(), self._capturing() as recording:
            yield recording

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Runs after earlier work of the caller's stream, and before its later work."""
        refuse_nested()
        if not self._live:
            # A pool whose last graph is gone cannot be captured into again.
            self._take_new_pool()
        with torch.cuda.device(self.device), torch.no_grad():
            callers = torch.cuda.current_stream()
            self._stream.wait_stream(callers)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:  # runs before a refusal wrote to memory that the caller goes on with
                callers.wait_stream(self._stream)

    def release_memory(self) -> None:
        """Does the same as `Recorder.release_memory`; memory of warm-ups is freed even while recordings live."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def _take_new_pool(self) -> None:
        """Lets later recordings share another pool; earlier ones keep theirs."""
        self._pool = torch.cuda.graph_pool_handle()
        self._live: weakref.WeakSet[TorchRecording] = weakref.WeakSet()  # of this pool

    def _warm_up(self, fn: Callable[[], T]) -> None:
        fn()
        for _ in range(1, self.WARM_UPS):
            with RecordGuard(self.device):
                fn()
        self._stream.synchronize()

    def _captured(self, fn: Callable[[], T]) -> tuple[TorchRecording, T]:
        with self._capturing() as recording:
            outputs = fn()
        recording.keep((fn, outputs))
        return recording, outputs

    @contextmanager
    def _capturing(self) -> Iterator[TorchRecording]:
        graph = torch.cuda.CUDAGraph()
        recording = TorchRecording(graph)
        bytes_before = torch.cuda.memory_reserved()
        with NO_GARBAGE_COLLECTION:
            # thread_local: work of another thread meanwhile (loading, allocating) must not break the capture, but
            # illegal calls of this thread still must.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with RecordGuard(self.device, torch.cuda.is_current_stream_capturing):
                    yield recording
                graph.capture_end()  # raises if a stream was forked and not joined
            except BaseException:
                self._abandon(graph)
                raise
        recording.finish(self.device, torch.cuda.memory_reserved() - bytes_before)
        self._live.add(recording)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Takes the stream out of capture mode, in any state of the capture, and destroys the graph.

        The driver breaks off a later capture if it has to destroy a graph meanwhile, and the last reference to a
        refused recording may go at any time.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty graph is expected here
            try:
                graph.capture_end()
            except RuntimeError:
                self._mend()
            with suppress(RuntimeError):
                graph.reset()

    def _mend(self) -> None:
        """Ends what a broken capture has left open inside torch.

        The device's allocator still targets the pool, which can be ended; the host's does too, which cannot, hence
        another pool; and random numbers cannot be drawn until a capture has ended normally, hence an empty one.
        """
        with suppress(RuntimeError):  # no longer open in versions of torch that clean up themselves
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._take_new_pool()
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()


def _replay_of(graph: torch.cuda.CUDAGraph, device: torch.device) -> Callable[[], None]:
    """Returns the replay of an instantiated graph: by the driver, if it can and torch's replay does no more."""
    if _GIVES_READY_GRAPHS:
        with suppress(DriverRefused):
            ready = c_void_p(graph.raw_cuda_graph_exec())  # made once: otherwise each launch would convert a number
            return PlainLaunch(graph.replay, _launch(), ready, Here.of(device.index)).replay
    return graph.replay


@cache
def _launch() -> LaunchGraph:
    """Returns the launch of the driver that torch runs on. Raises DriverRefused."""
    return launch_of_graphs(is_hip=torch.version.hip is not None)

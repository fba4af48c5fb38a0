"""The driver's own graphs, made of captured ones: torch can capture a graph, but cannot join two into one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import CDLL, POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any, NamedTuple

# CUDA's and HIP's functions have the same arguments. A runtime graph is also a driver graph.
_CUDA, _HIP = "libcuda.so.1", "libamdhip64.so"
_GRAPH = c_void_p
# Both call it an invalid context: a thread that has used no device yet has none.
_NO_CONTEXT = 201
_ARGUMENTS: dict[str, list[Any]] = {
    "GraphCreate": [POINTER(_GRAPH), c_uint],
    "GraphAddChildGraphNode": [POINTER(_GRAPH), _GRAPH, POINTER(_GRAPH), c_size_t, _GRAPH],
    "GraphInstantiateWithFlags": [POINTER(_GRAPH), _GRAPH, c_ulonglong],
    "GraphLaunch": [_GRAPH, _GRAPH],
    "GraphExecDestroy": [_GRAPH],
    "GraphDestroy": [_GRAPH],
}

_Call = Callable[..., int]


class DriverRefused(RuntimeError):
    """The driver is not found, or cannot join these graphs."""


class GraphCalls(NamedTuple):
    """The driver's functions, which return 0 if all went well."""

    create: _Call
    add_child: _Call
    instantiate: _Call
    launch: _Call
    destroy_exec: _Call
    destroy: _Call


def graph_calls(*, is_hip: bool) -> GraphCalls:
    """Returns the loaded library's calls. Raises DriverRefused if the library is not loaded, or lacks a call."""
    prefix = "hip" if is_hip else "cu"
    try:
        library = CDLL(_loaded(_HIP) if is_hip else _CUDA)
        found = [getattr(library, prefix + name) for name in _ARGUMENTS]
    except (OSError, AttributeError) as error:
        raise DriverRefused(f"graphs cannot be joined: {error}") from error
    for call, arguments in zip(found, _ARGUMENTS.values(), strict=True):
        call.argtypes, call.restype = arguments, c_int
    return GraphCalls(*found)


def _loaded(name: str, maps: str = "/proc/self/maps") -> str:
    """Returns the path of a library that the process has loaded, or else its name.

    Raises OSError if it has loaded several copies: it is unknown which one torch calls and owns these graphs.
    """
    with open(maps) as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if name in line}
    if len(paths) > 1:
        raise OSError(f"this process has loaded {len(paths)} copies of {name}: {', '.join(sorted(paths))}")
    return paths.pop() if paths else name


class DriverGraph:
    """Captured graphs as one: each begins when the one before it has ended.

    graphs:       handles of them. They are copied, and what their kernels work on has to stay
    make_current: makes the device that they were captured on current in a thread that has used none yet

    That device is current. Raises DriverRefused.
    """

    def __init__(self, calls: GraphCalls, graphs: Sequence[int], make_current: Callable[[], None]) -> None:
        whole, last, ready = _GRAPH(), _GRAPH(), _GRAPH()
        _require(calls.create(byref(whole), 0), "GraphCreate")
        try:
            for place, graph in enumerate(graphs):
                node = _GRAPH()
                before = byref(last) if place else None
                _require(calls.add_child(byref(node), whole, before, int(place > 0), graph), "GraphAddChildGraphNode")
                last = node
            _require(calls.instantiate(byref(ready), whole, 0), "GraphInstantiateWithFlags")
        finally:
            calls.destroy(whole)
        self._launch, self._ready, self._make_current = calls.launch, ready, make_current
        # One that still runs is freed when it has ended. At the process's end the driver does it.
        weakref.finalize(self, calls.destroy_exec, ready).atexit = False

    def launch(self, stream: int) -> None:
        """Run it. stream: a handle, of the device that is current"""
        code = self._launch(self._ready, stream)
        if code == _NO_CONTEXT:  # nothing was launched
            self._make_current()
            code = self._launch(self._ready, stream)
        if code:
            raise RuntimeError(f"the driver could not launch a graph of several recordings: error {code}")


def _require(code: int, name: str) -> None:
    """Raises DriverRefused unless the code means success."""
    if code:
        raise DriverRefused(f"{name} gave error {code}")

"""The driver's own launch of captured graphs, which costs less than torch's replay."""

from collections.abc import Callable
from ctypes import CDLL, c_int, c_void_p

# CUDA's and HIP's functions have the same arguments. A runtime graph is also a driver graph.
_CUDA, _HIP = "libcuda.so.1", "libamdhip64.so"

# Instantiated graph, stream -> 0, or an error, with which nothing was launched.
LaunchGraph = Callable[..., int]


class DriverRefused(RuntimeError):
    """The driver is not loaded, or cannot launch graphs."""


def launch_of_graphs(*, is_hip: bool) -> LaunchGraph:
    """Returns the loaded library's launch. Raises DriverRefused if the library is not loaded, or lacks it."""
    try:
        launch = CDLL(_loaded(_HIP)).hipGraphLaunch if is_hip else CDLL(_CUDA).cuGraphLaunch
    except (OSError, AttributeError) as error:
        raise DriverRefused(f"the driver cannot launch graphs: {error}") from error
    launch.argtypes, launch.restype = [c_void_p, c_void_p], c_int
    return launch


def _loaded(name: str, maps: str = "/proc/self/maps") -> str:
    """Returns the path of a library that the process has loaded, or else its name.

    Raises OSError if it has loaded several copies: it is unknown which one torch calls and owns these graphs.
    """
    with open(maps) as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if name in line}
    if len(paths) > 1:
        raise OSError(f"this process has loaded {len(paths)} copies of {name}: {', '.join(sorted(paths))}")
    return paths.pop() if paths else name

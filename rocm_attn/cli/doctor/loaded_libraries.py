"""The ROCm libraries that a process has loaded: their files and their versions.

A wheel of torch may bring its own, and a variable may replace them by the system's. So the files are read from the
process that has loaded them (/proc/self/maps). Versions come from the libraries themselves or from their names:
libhsa-runtime64.so.1.18.70204 is of ROCm 7.2.4.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

# Libraries that torch links to, and that crash or compute wrong results if two copies or two releases of them meet.
NAMES = (
    "libamdhip64",
    "libhsa-runtime64",
    "libamd_comgr",
    "libhiprtc",
    "librocblas",
    "libhipblas",
    "libhipblaslt",
    "libMIOpen",
    "librccl",
    "librocsolver",
    "librocsparse",
    "librocprofiler-sdk",
)
_FILE = re.compile(r"(lib[\w-]+?)(?:-[0-9a-f]{8})?\.so(?:\.([\d.]+))?")
_RELEASE_IN_NAME = re.compile(r"(?:^|\.)(\d{1,2})(\d{2})(\d{2})$")


def loaded_libraries(maps: str) -> list[dict[str, str]]:
    """Facts of a LoadedLibrary for each ROCm library among the files of a process, in the order of NAMES.

    maps: text of /proc/self/maps
    """
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6)
    found = [(match[1], path) for path in paths if (match := _FILE.fullmatch(Path(path).name)) and match[1] in NAMES]
    return [_facts(name, path) for name, path in sorted(found, key=lambda each: NAMES.index(each[0]))]


def _facts(name: str, path: str) -> dict[str, str]:
    version, release = _said_version(name, path), release_in_name(os.path.realpath(path))
    if name == "libamdhip64" and version and not release:
        # HIP's version counts like ROCm's; its third number counts builds.
        release = ".".join(version.split(".")[:2])
    return {
        "name": name,
        "path": path,
        "identity": identity_of(path) or path,  # a file may be gone since it was loaded
        "version": version or _version_in_name(path),
        "rocm": release,
    }


def release_in_name(path: str) -> str:
    """The ROCm release at the end of a library's full name: "7.2.4" for x.so.1.18.70204; empty if it has none."""
    match = _RELEASE_IN_NAME.search(_version_in_name(path))
    return ".".join(str(int(number)) for number in match.groups()) if match else ""


def _version_in_name(path: str) -> str:
    match = _FILE.fullmatch(Path(path).name)
    return match[2] or "" if match else ""


def _said_version(name: str, path: str) -> str:
    """The version that a library reports; empty if it has no such function."""
    ask = _ASK.get(name)
    if ask is None:
        return ""
    try:
        # Opens only a library that is loaded already.
        return ask(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
    except (OSError, AttributeError):
        return ""


def _hip(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if library.hipRuntimeGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 10_000_000}.{number.value // 100_000 % 100}.{number.value % 100_000}"


def _rocblas(library: ctypes.CDLL) -> str:
    text = ctypes.create_string_buffer(128)
    return "" if library.rocblas_get_version_string(text, ctypes.c_size_t(128)) else text.value.decode()


def _rccl(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def _sizes(function: str, count: int) -> Callable[[ctypes.CDLL], str]:
    """Calls a function that writes the numbers of a version through `count` pointers to size_t."""

    def ask(library: ctypes.CDLL) -> str:
        numbers = [ctypes.c_size_t() for _ in range(count)]
        getattr(library, function)(*map(ctypes.byref, numbers))
        return ".".join(str(number.value) for number in numbers)

    return ask


_ASK: Mapping[str, Callable[[ctypes.CDLL], str]] = {
    "libamdhip64": _hip,
    "librocblas": _rocblas,
    "librccl": _rccl,
    "libMIOpen": _sizes("miopenGetVersion", 3),
    "libamd_comgr": _sizes("amd_comgr_get_version", 2),
}


def identity_of(path: str) -> str:
    """An identity that all names of one file share; empty if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def installation_of(path: str) -> str:
    """The installation that a library belongs to, by its path."""
    parts = Path(path).parts
    if any(part.startswith("_rocm_sdk") for part in parts):
        return "ROCm's Python packages"
    if "torch" in parts and "lib" in parts[parts.index("torch") :]:
        return "torch's own"
    return str(Path(path).parent)

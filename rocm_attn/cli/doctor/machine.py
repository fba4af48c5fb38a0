"""A machine as the checks of the doctor see it: facts. Tests write them by hand; reading.py reads the real machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Numbers of a release that are known: (7, 2) or (7, 2, 4).
Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotInstalled:
    """A library that Python does not find."""


@dataclass(frozen=True, slots=True)
class ImportFailure:
    """A library that is there and cannot be imported. error: the last line of Python's message."""

    error: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that is imported.

    hip, cuda: version that it was built for, empty if none
    num_gpus:  GPUs that it counts; counting touches no GPU memory
    """

    version: str
    hip: str
    cuda: str
    num_gpus: int

    @property
    def rocm(self) -> Release:
        """The ROCm release that it was built for: (major, minor, patch) if known, else two numbers; () for none.

        torch.version.hip ends with the minor: its third number counts builds, not patches.
        """
        if not self.hip:
            return ()
        hip = release_of(self.hip)[:2]
        said = re.search(r"rocm(\d+(?:\.\d+)+)", self.version)
        named = release_of(said.group(1)) if said else ()
        return named if named[:2] == hip else hip


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A ROCm library that a process has loaded by importing torch.

    name:     without its suffix, "libamdhip64"
    identity: equal for two names of one file
    version:  its own, empty if it is not known
    rocm:     the release of ROCm that it belongs to, "7.2.4" or "7.2"; empty if it is not known
    """

    name: str
    path: str
    identity: str
    version: str
    rocm: str


@dataclass(frozen=True, slots=True)
class TritonBuild:
    """The Triton that is imported. backends: those that it has a compiler for: "amd", "nvidia" ..."""

    version: str
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution. name: lower case with dashes; requires: names of its requirements, without extras."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AiterModule:
    """A compiled module of AITER.

    archs: GPUs that it holds code for; none for a module of host code only
    error: message of the dynamic linker, empty if it can be loaded
    built: when, in seconds since the epoch
    """

    path: str
    archs: tuple[str, ...] = ()
    error: str = ""
    built: float = 0.0


@dataclass(frozen=True, slots=True)
class AiterCopy:
    """A folder `aiter` on Python's path, the first one being the one that is imported.

    is_amds:      True if it is AMD's library and not another project of that name
    missing:      attention entry points that its source does not define
    modules:      modules that it was installed with
    installed:    when, in seconds since the epoch
    """

    path: str
    is_amds: bool
    missing: tuple[str, ...] = ()
    modules: tuple[AiterModule, ...] = ()
    installed: float = 0.0


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that will be written to, or the nearest folder above it that exists.

    purpose:    the data that is written there
    path:       the folder that was asked for
    writable:   True if this user may create files in it
    owner:      uid
    filesystem: "ext4", "nfs4", ...; empty if it is not known
    """

    purpose: str
    path: str
    writable: bool
    owner: int
    mode: int
    filesystem: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file. usable: True if this user may read and write it."""

    path: str
    usable: bool
    gid: int


@dataclass(frozen=True, slots=True)
class Machine:
    """All facts that the checks use.

    uid:             of the user who runs this process
    distributions:   in the order in which Python finds them
    loaded:          the ROCm libraries of a process that has imported torch for ROCm, or why they are not known
    named_hip:       the file that TRITON_LIBHIP_PATH names, as LoadedLibrary.identity; empty if there is none
    driver:          the version of the amdgpu driver; empty if it reports none
    rocm:            the system's ROCm release, () if there is none
    amd_gpus:        archs of the GPUs that the kernel driver lists, whether or not this process may use them
    nvidia_gpus:     names, likewise
    nodes:           /dev/kfd and the render nodes
    aiter_jit:       modules that AITER compiled on this machine
    aiter_jit_dir:   the folder that it compiles into and loads from
    aiter_linked:    names of the modules of its package that are linked into that folder
    leftover_locks:  lock files of AITER builds that no process holds
    folders:         caches
    c_compiler:      path of a C compiler, empty if there is none
    python_headers:  True if Python.h is there
    hipcc:           path, empty if there is none
    numa_balancing:  the kernel's setting, empty if it reports none
    shm_bytes:       size of /dev/shm, 0 if there is none
    """

    uid: int
    environment: Mapping[str, str]
    distributions: tuple[Distribution, ...]
    torch: TorchBuild | ImportFailure | NotInstalled
    triton: TritonBuild | ImportFailure | NotInstalled
    loaded: tuple[LoadedLibrary, ...] | ImportFailure
    named_hip: str
    driver: str
    rocm: Release
    amd_gpus: tuple[str, ...]
    nvidia_gpus: tuple[str, ...]
    nodes: tuple[DeviceNode, ...]
    aiter: tuple[AiterCopy, ...]
    aiter_jit: tuple[AiterModule, ...]
    aiter_jit_dir: str
    aiter_linked: tuple[str, ...]
    leftover_locks: tuple[str, ...]
    folders: tuple[Folder, ...]
    c_compiler: str
    python_headers: bool
    hipcc: str
    numa_balancing: str
    shm_bytes: int

    @property
    def torch_rocm(self) -> Release:
        """The ROCm release of torch, () if torch is not built for one."""
        return self.torch.rocm if isinstance(self.torch, TorchBuild) else ()

    @property
    def is_amd(self) -> bool:
        """True if AMD GPUs are used here, or are to be."""
        return bool(self.amd_gpus or self.torch_rocm)

    @property
    def has_gpu(self) -> bool:
        """True if the kernel lists a GPU of either vendor."""
        return bool(self.amd_gpus or self.nvidia_gpus)

    @property
    def imported_aiter(self) -> AiterCopy | None:
        """The folder that `import aiter` finds, None if there is none."""
        return self.aiter[0] if self.aiter else None

    def versions_of(self, name: str) -> tuple[str, ...]:
        """Versions of every installed distribution of that name."""
        return tuple(found.version for found in self.distributions if found.name == name)


def release_of(text: str) -> Release:
    """The dotted numbers that a version starts with: "7.2.4-93" is (7, 2, 4); () if there are none."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def release_name(release: Release) -> str:
    """The release as text: (7, 2, 4) is "7.2.4"."""
    return ".".join(str(number) for number in release)

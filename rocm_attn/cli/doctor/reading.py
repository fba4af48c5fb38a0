"""Reads the real machine. System files are read under a root folder, so that a test can build one."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from rocm_attn.cli.doctor.aiter_files import aiter_copies, jit_folder, leftover_locks, linked_modules, modules_in
from rocm_attn.cli.doctor.loaded_libraries import identity_of
from rocm_attn.cli.doctor.machine import (
    DeviceNode,
    Distribution,
    Folder,
    ImportFailure,
    LoadedLibrary,
    Machine,
    NotInstalled,
    Release,
    TorchBuild,
    TritonBuild,
    release_of,
)
from rocm_attn.cli.doctor.probe import probe

_NVIDIA_NODE = re.compile(r"nvidia\d+")


def read_machine(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Reads all facts that the checks use."""
    home = Path(environment.get("HOME") or os.path.expanduser("~"))  # Path.home() raises for a user without one
    distributions = tuple(read_distributions())
    torch, copies = _torch(), aiter_copies()
    jit = jit_folder(environment, home, copies)
    linked = linked_modules(jit, copies)
    return Machine(
        uid=os.getuid(),
        environment=dict(environment),
        distributions=distributions,
        torch=torch,
        triton=_triton(),
        loaded=_loaded(torch),
        named_hip=identity_of(environment.get("TRITON_LIBHIP_PATH", "")),
        driver=_text(root / "sys/module/amdgpu/version"),
        rocm=read_rocm(environment, root, distributions),
        amd_gpus=read_amd_gpus(root),
        nvidia_gpus=read_nvidia_gpus(root) or _counted_by(torch),
        nodes=read_nodes(root),
        aiter=copies,
        # Modules in a copy's own folder are the copy's.
        aiter_jit=() if any(jit.is_relative_to(copy.path) for copy in copies) else modules_in(jit, but=linked),
        aiter_jit_dir=str(jit),
        aiter_linked=linked,
        leftover_locks=leftover_locks(jit),
        folders=tuple(read_folder(purpose, path, root) for purpose, path in _caches(environment, home, jit, copies)),
        c_compiler=_first_program([environment.get("CC", ""), "gcc", "clang", "cc"]),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        hipcc=_first_program(["hipcc", str(_rocm_home(environment, root) / "bin/hipcc")]),
        numa_balancing=_text(root / "proc/sys/kernel/numa_balancing"),
        shm_bytes=_size_of(root / "dev/shm"),
    )


def read_amd_gpus(root: Path) -> tuple[str, ...]:
    """Archs of the GPUs that the amdgpu driver lists; a container sees them whether or not it may use them."""
    nodes = sorted(
        (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"), key=lambda each: int(each.parent.name)
    )
    versions = (re.search(r"^gfx_target_version (\d+)$", _text(path), re.MULTILINE) for path in nodes)
    return tuple(_arch_of(int(found.group(1))) for found in versions if found and int(found.group(1)))


def _arch_of(version: int) -> str:
    """The arch of a version: 90402 is gfx942, 90010 is gfx90a.

    The minor number and the stepping are two decimal digits each, written in hex.
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def read_nvidia_gpus(root: Path) -> tuple[str, ...]:
    """Names of the GPUs of NVIDIA's driver."""
    texts = [_text(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    names = [found.group(1) for text in texts if (found := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]
    nodes = [path for path in (root / "dev").glob("nvidia*") if _NVIDIA_NODE.fullmatch(path.name)]
    return tuple(names) or ("NVIDIA GPU",) * len(nodes)


def _counted_by(torch: TorchBuild | ImportFailure | NotInstalled) -> tuple[str, ...]:
    """The GPUs of torch for CUDA, for a sandbox that hides the driver's files."""
    return ("NVIDIA GPU",) * torch.num_gpus if isinstance(torch, TorchBuild) and torch.cuda else ()


def read_nodes(root: Path) -> tuple[DeviceNode, ...]:
    """The device files that ROCm opens."""
    paths = [root / "dev/kfd", *sorted((root / "dev/dri").glob("renderD*"))]
    return tuple(
        DeviceNode(f"/{path.relative_to(root)}", os.access(path, os.R_OK | os.W_OK), path.stat().st_gid)
        for path in paths
        if path.exists()
    )


def read_rocm(environment: Mapping[str, str], root: Path, distributions: tuple[Distribution, ...]) -> Release:
    """The system's ROCm release; since ROCm 10 it may be a Python distribution."""
    release = release_of(_text(_rocm_home(environment, root) / ".info/version"))
    return release or next((release_of(d.version) for d in distributions if d.name == "rocm-sdk-core"), ())


def read_distributions() -> Iterator[Distribution]:
    """Yields every installed distribution, once for each place where it is."""
    seen = set()
    for found in importlib.metadata.distributions():
        name, location = found.metadata["Name"], str(found.locate_file(""))
        if name and (name, location) not in seen:
            seen.add((name, location))
            requires = tuple(_normal(_name_of(line)) for line in found.requires or () if "extra ==" not in line)
            yield Distribution(_normal(name), found.version, requires)


def read_folder(purpose: str, path: Path, root: Path = Path("/")) -> Folder:
    """Reads a folder, or the nearest one above it that this user can see, in which it would be made."""
    # Path.exists() raises in a folder that this user may not read, in Python 3.11 at least.
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    status = there.stat()
    return Folder(
        purpose=purpose,
        path=str(path),
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        owner=status.st_uid,
        mode=status.st_mode & 0o7777,
        filesystem=_filesystem(there.resolve(), _text(root / "proc/self/mounts")),
        free_bytes=shutil.disk_usage(there).free,
    )


def _filesystem(path: Path, mounts: str) -> str:
    """The type of the file system that holds path: that of the longest mount point above it."""
    points = [(fields[1], fields[2]) for line in mounts.splitlines() if len(fields := line.split()) > 2]
    above = [(point, kind) for point, kind in points if path.is_relative_to(point)]
    return max(above, key=lambda entry: len(entry[0]), default=("", ""))[1]


def _caches(
    environment: Mapping[str, str], home: Path, jit: Path, copies: tuple[object, ...]
) -> Iterator[tuple[str, Path]]:
    triton_home = Path(environment.get("TRITON_HOME", str(home)))
    yield "Triton's cache", Path(environment.get("TRITON_CACHE_DIR") or triton_home / ".triton/cache")
    if copies:
        yield "AITER's cache", jit
        yield "AITER's other cache", Path(environment.get("AITER_ROOT_DIR") or home / ".aiter")


def _torch() -> TorchBuild | ImportFailure | NotInstalled:
    if not _is_there("torch"):
        return NotInstalled()
    facts = probe("torch")
    return facts if isinstance(facts, ImportFailure) else TorchBuild(**facts)


def _loaded(torch: TorchBuild | ImportFailure | NotInstalled) -> tuple[LoadedLibrary, ...] | ImportFailure:
    """The loaded libraries, read in another process, because asking them for their versions may fail."""
    if not isinstance(torch, TorchBuild) or not torch.hip:
        return ()
    facts = probe("loaded")
    return facts if isinstance(facts, ImportFailure) else tuple(LoadedLibrary(**each) for each in facts["libraries"])


def _triton() -> TritonBuild | ImportFailure | NotInstalled:
    if not _is_there("triton"):
        return NotInstalled()
    facts = probe("triton")
    return facts if isinstance(facts, ImportFailure) else TritonBuild(facts["version"], tuple(facts["backends"]))


def _is_there(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _rocm_home(environment: Mapping[str, str], root: Path) -> Path:
    named = environment.get("ROCM_PATH") or environment.get("ROCM_HOME") or "/opt/rocm"
    return root / named.lstrip("/")


def _first_program(names: list[str]) -> str:
    return next((found for name in names if name and (found := shutil.which(name.split()[0]))), "")


def _name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group() if found else requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return 0
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def _text(path: Path) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes()).strip()  # mount points may have names that are no text
    except OSError:
        return ""

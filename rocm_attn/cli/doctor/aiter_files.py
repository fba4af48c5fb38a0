"""Where AITER is and what it has compiled, read from its files: importing it would compile code and use the GPU."""

import fcntl
import importlib.util
import mmap
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rocm_attn.cli.doctor.machine import AiterCopy, AiterModule, ImportFailure
from rocm_attn.cli.doctor.probe import probe

# Functions that a provider may call.
ENTRY_POINTS = (
    "flash_attn_varlen_func",
    "mha_batch_prefill_func",
    "mla_decode_fwd",
    "paged_attention_ragged",
    "unified_attention",
)

# The arch of an entry in a bundle of device code, such as "hipv4-amdgcn-amd-amdhsa--gfx942".
_OFFLOAD_ARCH = re.compile(rb"amdhsa--(gfx[0-9a-z]+)")

# A younger lock may be just about to be made.
_LOCK_AGE_S = 60.0


def aiter_copies() -> tuple[AiterCopy, ...]:
    """Every folder `aiter` that Python could import, the imported one first."""
    folders = [Path(entry or ".").resolve() / "aiter" for entry in sys.path]
    spec = importlib.util.find_spec("aiter")
    if spec is not None and spec.origin:
        folders.insert(0, Path(spec.origin).resolve().parent)
    found = dict.fromkeys(folder for folder in folders if (folder / "__init__.py").is_file())
    return tuple(read_copy(folder) for folder in found)


def read_copy(folder: Path) -> AiterCopy:
    """Reads one folder `aiter`."""
    is_amds = (folder / "ops").is_dir() and (folder / "jit").is_dir()
    return AiterCopy(
        path=str(folder),
        is_amds=is_amds,
        missing=_missing_entry_points(folder) if is_amds else (),
        modules=modules_in(folder / "jit"),
        installed=(folder / "__init__.py").stat().st_mtime,
    )


def modules_in(folder: Path, but: Collection[str] = ()) -> tuple[AiterModule, ...]:
    """The compiled modules of a folder, each loaded once by a process of its own to see whether it can be.

    but: names of files to leave out
    """
    paths = [path for path in _files_in(folder, "*.so") if path.name not in but]
    if not paths:
        return ()
    modules = [AiterModule(str(path), offload_archs(path), built=path.stat().st_mtime) for path in paths]
    errors = probe("modules", *map(str, paths))
    if isinstance(errors, ImportFailure):
        return tuple(replace(module, error=errors.error) for module in modules)
    return tuple(replace(module, error=str(errors[module.path])) for module in modules)


def offload_archs(path: Path) -> tuple[str, ...]:
    """The archs that a compiled module holds code for."""
    if not path.stat().st_size:
        return ()
    # The file is mapped, not read: modules reach hundreds of megabytes.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return tuple(sorted({found.group(1).decode() for found in _OFFLOAD_ARCH.finditer(content)}))


def jit_folder(environment: Mapping[str, str], home: Path, copies: tuple[AiterCopy, ...]) -> Path:
    """The folder of AITER's compiled modules: $AITER_JIT_DIR, else its package if it is writable, else ~/.aiter/jit."""
    if environment.get("AITER_JIT_DIR"):
        return Path(environment["AITER_JIT_DIR"])
    for copy in copies[:1]:
        if os.access(Path(copy.path) / "jit", os.W_OK):
            return Path(copy.path) / "jit"
    return home / ".aiter" / "jit"


def linked_modules(jit: Path, copies: tuple[AiterCopy, ...]) -> tuple[str, ...]:
    """Names of the modules of the imported package that are links in the folder that AITER loads from."""
    return tuple(
        path.name
        for copy in copies[:1]
        for path in _files_in(jit, "*.so")
        if path.is_symlink() and path.resolve().is_relative_to(Path(copy.path).resolve())
    )


def leftover_locks(jit: Path) -> tuple[str, ...]:
    """Lock files of builds whose process is gone."""
    locks = [path for path in _files_in(jit / "build", "lock_*") if path.suffix != ".steal"]
    return tuple(str(path) for path in locks if _is_leftover(path))


def _files_in(folder: Path, pattern: str) -> list[Path]:
    """The files, sorted. None if the folder is missing or not readable for this user, for which glob() raises."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def _is_leftover(path: Path) -> bool:
    try:
        if time.time() - path.stat().st_mtime < _LOCK_AGE_S:
            return False
        lines = os.fsdecode(path.read_bytes()).splitlines()
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, released in the meantime, or not readable for this user
        return False
    # Older releases of AITER hold no lock on the file; their lock is left over if the process that it names is gone.
    return not (lines and lines[0].isdigit() and Path("/proc", lines[0]).exists())


def _missing_entry_points(folder: Path) -> tuple[str, ...]:
    lacking = set(ENTRY_POINTS)
    for path in folder.rglob("*.py"):
        if not lacking:
            break
        text = path.read_text(errors="replace")
        lacking -= {name for name in lacking if re.search(rf"^def {name}\(", text, re.MULTILINE)}
    return tuple(sorted(lacking))

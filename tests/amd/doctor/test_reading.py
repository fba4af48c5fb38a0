"""The real machine as the doctor reads it: from a folder that looks like one, and from this machine."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy.random._bounded_integers
import pytest
import torch

from rocm_attn.cli.doctor.aiter_files import (
    ENTRY_POINTS,
    jit_folder,
    leftover_locks,
    linked_modules,
    modules_in,
    offload_archs,
    read_copy,
)
from rocm_attn.cli.doctor.machine import AiterCopy, Distribution, ImportFailure
from rocm_attn.cli.doctor.probe import probe
from rocm_attn.cli.doctor.reading import (
    read_amd_gpus,
    read_distributions,
    read_folder,
    read_machine,
    read_nodes,
    read_nvidia_gpus,
    read_rocm,
)

GONE = ImportFailure("it is not there")
COPY = AiterCopy("/nowhere/aiter", is_amds=True, missing=(), modules=(), installed=0.0)


def write(path: Path, text: str = "") -> Path:
    """Writes a file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_amd_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, version in enumerate([0, 90402, 90500, 90010, 110000, 120001]):  # the first is a CPU
        write(nodes / str(number) / "properties", f"cpu_cores_count 0\ngfx_target_version {version}\nsimd_count 1216\n")
    assert read_amd_gpus(tmp_path) == ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")
    assert read_amd_gpus(tmp_path / "empty") == ()


def test_nvidia_gpus_are_read_from_the_driver_or_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(tmp_path / "dev" / name)
    assert read_nvidia_gpus(tmp_path) == ("NVIDIA GPU", "NVIDIA GPU")
    write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 5\n")
    assert read_nvidia_gpus(tmp_path) == ("NVIDIA H200",)


def test_device_files_are_listed_with_their_groups(tmp_path: Path) -> None:
    write(tmp_path / "dev/kfd")
    write(tmp_path / "dev/dri/renderD128").chmod(0)
    write(tmp_path / "dev/dri/card0")
    kfd, render = read_nodes(tmp_path)
    assert (kfd.path, kfd.usable, kfd.gid) == ("/dev/kfd", True, os.getgid())
    assert (render.path, render.usable) == ("/dev/dri/renderD128", os.getuid() == 0)


def test_the_rocm_release_is_the_systems_or_that_of_a_distribution(tmp_path: Path) -> None:
    sdk = Distribution("rocm-sdk-core", "10.0.0")
    assert read_rocm({}, tmp_path, ()) == ()
    assert read_rocm({}, tmp_path, (sdk,)) == (10, 0, 0)
    write(tmp_path / "opt/rocm/.info/version", "7.2.4-93\n")
    assert read_rocm({}, tmp_path, (sdk,)) == (7, 2, 4)
    write(tmp_path / "opt/other/.info/version", "7.1.1-38\n")
    assert read_rocm({"ROCM_PATH": "/opt/other"}, tmp_path, ()) == (7, 1, 1)


def test_a_cache_that_does_not_exist_is_judged_by_the_folder_above_it(tmp_path: Path) -> None:
    folder = read_folder("a cache", tmp_path / "a" / "b")
    assert folder.writable
    assert folder.owner == os.getuid()
    assert folder.filesystem
    assert not read_folder("a cache", write(tmp_path / "file") / "below").writable


def test_a_folder_counts_as_writable_when_files_can_be_made_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is asked, because root may write even if the mode forbids it."""
    requested: list[tuple[Path, int]] = []

    def refuse(path: Path, how: int) -> bool:
        requested.append((path, how))
        return False

    monkeypatch.setattr(os, "access", refuse)
    assert not read_folder("a cache", tmp_path / "new").writable
    assert requested == [(tmp_path, os.W_OK | os.X_OK)]


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that this user cannot read. Root can read any folder, so the system's answers are replaced."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def refusing(call: Any) -> Any:
        def requested(path: Any, *others: Any, **more: Any) -> Any:
            if not isinstance(path, int) and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, "closed", str(path))
            return call(path, *others, **more)

        return requested

    for name in ("stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return folder


def test_a_cache_that_is_closed_to_the_user_is_read_as_far_as_can_be(closed: Path) -> None:
    """Python 3.11's Path.exists() and Path.glob() raise there, and the doctor would report nothing at all."""
    jit = closed / "aiter" / "jit"
    with pytest.raises(PermissionError):
        jit.stat()
    assert read_folder("a cache", jit).owner == closed.stat().st_uid
    assert (modules_in(jit), linked_modules(jit, (COPY,)), leftover_locks(jit)) == ((), (), ())


def test_the_longest_mount_point_names_the_file_system(tmp_path: Path) -> None:
    inner = tmp_path / "home"
    inner.mkdir()
    root = tmp_path / "root"
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/home {inner} nfs4 rw 0 0\n/dev/sdb {inner}-2 xfs rw 0 0\n"
    write(root / "proc/self/mounts", mounts)
    assert read_folder("a cache", inner / "cache", root).filesystem == "nfs4"
    assert read_folder("a cache", tmp_path, root).filesystem == "ext4"


def test_files_and_names_that_are_no_utf_8_are_read(tmp_path: Path) -> None:
    """Mount points have any bytes for names, and one such ended the command in a traceback."""
    inner = tmp_path / os.fsdecode(b"caf\xe9")
    inner.mkdir()
    mounts = write(tmp_path / "proc/self/mounts")
    mounts.write_bytes(b"/dev/sda / ext4 rw 0 0\nserver:/home " + os.fsencode(inner) + b" nfs4 rw 0 0\n")
    assert read_folder("a cache", inner / "cache", tmp_path).filesystem == "nfs4"
    write(tmp_path / "opt/rocm/.info/version").write_bytes(b"\xff\xfe7.2.4\n")
    assert read_rocm({}, tmp_path, ()) == ()
    lock = write(tmp_path / "build/lock_damaged")
    lock.write_bytes(b"\xff\n")
    os.utime(lock, (0, 0))
    assert leftover_locks(tmp_path) == (str(lock),)


def test_distributions_have_normal_names_and_no_optional_requirements() -> None:
    found = {distribution.name: distribution for distribution in read_distributions()}
    assert found["torch"].version.partition("+")[0] == torch.__version__.partition("+")[0]  # wheels may leave it out
    assert "typing-extensions" in found["torch"].requires
    assert all(name == name.lower() and "_" not in name for name in found)


def aiter_like(folder: Path, functions: tuple[str, ...] = ENTRY_POINTS) -> Path:
    write(folder / "__init__.py", "raise ImportError('this may not be imported')\n")
    write(folder / "ops" / "attention.py", "".join(f"def {name}(q):\n    return q\n" for name in functions))
    (folder / "jit").mkdir()
    return folder


def test_aiter_is_read_and_not_imported(tmp_path: Path) -> None:
    whole = read_copy(aiter_like(tmp_path / "whole"))
    assert (whole.is_amds, whole.missing, whole.modules) == (True, (), ())
    assert read_copy(aiter_like(tmp_path / "part", ENTRY_POINTS[1:])).missing == ENTRY_POINTS[:1]
    write(tmp_path / "stranger" / "__init__.py")
    assert not read_copy(tmp_path / "stranger").is_amds


def test_modules_that_cannot_be_loaded_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "site" / "torch" / "__init__.py")  # a module may need its libraries; this one does not
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    extension = Path(numpy.random._bounded_integers.__file__)
    (tmp_path / "good.so").write_bytes(extension.read_bytes() + b"hipv4-amdgcn-amd-amdhsa--gfx942\0")
    (tmp_path / "bad.so").write_bytes(b"no module" * 100)
    (tmp_path / "elsewhere.so").symlink_to(tmp_path / "bad.so")
    write(tmp_path / "packaged.so", "no module")
    bad, elsewhere, good = modules_in(tmp_path, but=("packaged.so",))
    assert Path(elsewhere.path).name == "elsewhere.so"
    assert "bad.so: invalid ELF header" in bad.error
    assert bad.archs == ()
    assert good.error == ""
    assert good.archs == ("gfx942",)
    assert good.built == (tmp_path / "good.so").stat().st_mtime
    assert offload_archs(write(tmp_path / "empty.so")) == ()


def test_the_folder_that_aiter_compiles_into_follows_its_rules(tmp_path: Path) -> None:
    copy = read_copy(aiter_like(tmp_path / "aiter"))
    assert jit_folder({"AITER_JIT_DIR": "/cache"}, tmp_path, (copy,)) == Path("/cache")
    assert jit_folder({}, tmp_path, (copy,)) == tmp_path / "aiter" / "jit"
    assert jit_folder({}, tmp_path, ()) == tmp_path / ".aiter" / "jit"


def test_modules_of_the_package_that_the_cache_links_to_are_not_counted_as_compiled_here(tmp_path: Path) -> None:
    copy = read_copy(aiter_like(tmp_path / "aiter"))
    cache = tmp_path / "cache"
    cache.mkdir()
    packaged = write(tmp_path / "aiter" / "jit" / "packaged.so", "no module")
    (cache / "packaged.so").symlink_to(packaged)
    (cache / "elsewhere.so").symlink_to(write(tmp_path / "elsewhere.so", "no module"))
    assert linked_modules(cache, (copy,)) == ("packaged.so",)
    assert linked_modules(cache, ()) == ()


def test_a_lock_is_left_over_when_no_process_holds_it(tmp_path: Path) -> None:
    build = tmp_path / "build"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for name, owner in (("held", 1), ("left", gone.stdout.strip()), ("alive", os.getpid()), ("empty", ""), ("new", "")):
        lock = write(build / f"lock_{name}", f"{owner}\nhost\n" if owner else "")
        if name != "new":
            os.utime(lock, (0, 0))
    write(build / "lock_left.steal")
    with (build / "lock_held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert leftover_locks(tmp_path) == (str(build / "lock_empty"), str(build / "lock_left"))
    assert leftover_locks(tmp_path / "no cache") == ()


def test_a_probe_finds_this_package_from_any_folder_and_says_nothing_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not add the package's own folders to the search path of top-level packages either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    write(
        tmp_path / "triton" / "__init__.py",
        "import importlib.util, sys\nassert importlib.util.find_spec('runtime') is None\nsys.exit(4)",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe("triton") == ImportFailure("it failed without output")


def test_a_library_that_fails_or_crashes_takes_only_the_probe_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for body, said in (
        ("raise ImportError('libamdhip64.so.7: cannot open')", "ImportError: libamdhip64.so.7: cannot open"),
        ("import os; os.abort()", "the process was ended by signal 6"),
        ("import sys; sys.exit(3)", "it failed without output"),
        ("import os; os._exit(0)", "it ended the process early, and without an error"),
    ):
        write(tmp_path / "torch" / "__init__.py", body)
        assert probe("torch") == ImportFailure(said)


def test_a_library_that_prints_while_it_is_imported_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = "import atexit, os; atexit.register(os.write, 1, b'bye\\xff'); print('[aiter] hello', end='')"
    write(tmp_path / "triton" / "__init__.py", f"{own}; __version__ = '3.6.0'")
    write(tmp_path / "triton" / "backends" / "__init__.py", "backends = {'amd': 1}")
    assert probe("triton") == {"version": "3.6.0", "backends": ["amd"]}


def test_a_sandbox_that_hides_the_driver_has_the_gpus_that_torch_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_for_cuda = {"version": "2.11.0+cu130", "hip": "", "cuda": "13.0", "num_gpus": 2}
    monkeypatch.setattr(
        "rocm_attn.cli.doctor.reading.probe", lambda *what: torch_for_cuda if what == ("torch",) else GONE
    )
    assert read_machine({"HOME": "/nowhere"}, tmp_path).nvidia_gpus == ("NVIDIA GPU", "NVIDIA GPU")


def test_a_machine_is_read_for_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user of whom its system knows nothing."""
    monkeypatch.setattr("rocm_attn.cli.doctor.reading.probe", lambda *what: GONE)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    machine = read_machine({}, tmp_path)
    assert "~/.triton/cache" in [folder.path for folder in machine.folders]

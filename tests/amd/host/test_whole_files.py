"""A file that cannot be written to its end leaves the older one, and nothing of itself."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rocm_attn.capture.kernel_bundle import load_bundle, save_bundle
from rocm_attn.errors import BadSetting
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.machine.whole_files import require_place, whole_file
from rocm_attn.selection import probe
from rocm_attn.watch.evidence import EvidenceFile

OLD = "old"


@pytest.mark.parametrize(
    ("name", "says"),
    [("gone/file", "gone is not a folder; create it"), ("kept", "something that is no file is there; name a file")],
)
def test_a_place_that_takes_no_file_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(BadSetting, match=f"record .*{name} cannot be written: .*{says}"):
        require_place(tmp_path / name, "record")
    require_place(tmp_path / "kept" / "file", "record")


def test_a_folder_in_which_the_user_may_not_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: (folder, mode) != (tmp_path, os.W_OK | os.X_OK))
    with pytest.raises(BadSetting, match=r"this user may not write in .*; allow it, or name another folder"):
        require_place(tmp_path / "file", "record")


def test_a_device_or_a_pipe_is_no_older_file_and_stays(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(BadSetting, match=r"pipe cannot be written \(.*something that is no file is there.*; choose an"):
        TuningFile(()).write(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_two_processes_of_one_number_write_two_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every container has a process 1, and containers share caches."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    place = tmp_path / "file"
    with whole_file(place) as one:
        one.write_text("the first one's")
        with whole_file(place) as two:
            two.write_text("the second's")
        assert place.read_text() == "the second's"
    assert place.read_text() == "the first one's"
    assert [*tmp_path.iterdir()] == [place]


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets the system write no byte of a file. It ends within a test: pytest may write its dots into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _evidence(place: Path) -> None:
    file = EvidenceFile.__new__(EvidenceFile)
    file.path = place
    file._write({"out": torch.zeros(1000)})


def _tuning(place: Path) -> None:
    with pytest.raises(BadSetting, match="cannot be written") as refused:
        TuningFile(()).write(place)
    assert refused.value.__cause__ is not None
    raise refused.value.__cause__


def _verdict(place: Path) -> None:
    probe._write(place, {"kernel": "wrong"})
    raise OSError("a verdict that is not kept is no error")


def _bundle(place: Path) -> None:
    save_bundle(place, place.parent, {"arch": "gfx942"})


def _record(place: Path) -> None:
    with whole_file(place) as part:
        part.write_text("new")


@pytest.mark.parametrize("write", [_evidence, _tuning, _verdict, _bundle, _record])
def test_a_full_disk_leaves_the_older_file_alone(write: Callable[[Path], None], tmp_path: Path) -> None:
    place = tmp_path / "kept" / "file"
    place.parent.mkdir()
    place.write_text(OLD)
    with full_disk(), pytest.raises(OSError, match=r"too large|could not be written|no error"):
        write(place)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert place.read_text() == OLD


def test_entries_of_a_bundle_leave_no_parts_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "from" / "ENTRY").mkdir(parents=True)
    (tmp_path / "from" / "ENTRY" / "kernel.hsaco").write_bytes(b"code")
    save_bundle(tmp_path / "bundle", tmp_path / "from", {})

    def write_half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:2])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="no space"):
        load_bundle(tmp_path / "bundle", tmp_path / "to", {})
    assert [path for path in (tmp_path / "to").rglob("*") if path.is_file()] == []

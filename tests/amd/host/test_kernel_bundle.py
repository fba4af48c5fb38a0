"""Bundles of compiled kernels are whole, of this machine's kind, and stay within the cache that they fill."""

import io
import json
import tarfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest

from rocm_attn.capture.kernel_bundle import load_bundle, save_bundle
from rocm_attn.errors import BadSetting

FACTS = {"arch": "gfx942", "Triton": "3.9.0", "processor": "x86_64"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Returns a cache with one entry, whose index has whole paths, as Triton writes it."""
    entry = tmp_path / "cache" / "KEY0"
    entry.mkdir(parents=True)
    (entry / "decode.hsaco").write_bytes(b"\x7fELF code")
    (entry / "lock").touch()
    paths = {"decode.hsaco": str(entry / "decode.hsaco")}
    (entry / "__grp__decode.json").write_text(json.dumps({"child_paths": paths}))
    return tmp_path / "cache"


@pytest.fixture
def bundle(cache: Path, tmp_path: Path) -> Path:
    save_bundle(tmp_path / "kernels.tgz", cache, FACTS)
    return tmp_path / "kernels.tgz"


def packed(
    file: Path,
    files: dict[str, bytes],
    kind: bytes = tarfile.REGTYPE,
    changed: Mapping[str, bytes] = MappingProxyType({}),
    others: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """Returns a bundle with files of these names and of this kind.

    changed: content other than packed; others: values of the manifest other than right ones
    """
    sums = {name: sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps({"facts": FACTS, "files": sums, **others}).encode()
    with tarfile.open(file, "w:gz") as bundle:
        for name, content in {"manifest.json": manifest, **files, **changed}.items():
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, "/etc/hostname"
            if name == "manifest.json":
                member.type = tarfile.REGTYPE
            bundle.addfile(member, io.BytesIO(content))
    return file


def assert_refused(bundle: Path, sentence: str, facts: Mapping[str, str] = MappingProxyType(FACTS)) -> None:
    """Checks that nothing of a bundle is taken."""
    there = bundle.parent / "there"
    with pytest.raises(BadSetting, match=sentence):
        load_bundle(bundle, there, facts)
    assert not there.exists()


def test_entries_are_found_at_their_new_place(bundle: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    load_bundle(bundle, there, FACTS)
    index = json.loads((there / "KEY0" / "__grp__decode.json").read_text())
    assert index == {"child_paths": {"decode.hsaco": str(there / "KEY0" / "decode.hsaco")}}
    assert (there / "KEY0" / "decode.hsaco").read_bytes() == b"\x7fELF code"
    assert {path.name for path in there.glob("*/*")} == {"decode.hsaco", "__grp__decode.json"}


def test_kernels_of_another_machine_are_refused(bundle: Path, tmp_path: Path) -> None:
    wanted = r"for arch gfx942, Triton 3\.9\.0, processor x86_64, and here they must be for arch gfx950, "
    assert_refused(bundle, wanted, FACTS | {"arch": "gfx950"})


@pytest.mark.parametrize("name", ["../away", "KEY0/../../away", "/tmp/away", "KEY0/..", "KEY0/deep/away", "away"])
def test_a_name_that_leaves_the_cache_is_refused(name: str, tmp_path: Path) -> None:
    file = packed(tmp_path / "kernels.tgz", {"KEY0/good": b"1", name: b"2"})
    assert_refused(file, "is no file of an entry of a cache")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_a_link_in_a_bundle_is_refused(kind: bytes, tmp_path: Path) -> None:
    file = packed(tmp_path / "kernels.tgz", {"KEY0/decode.hsaco": b""}, kind)
    assert_refused(file, "is no bundle of kernels")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    name = "KEY0/decode.hsaco"
    bundle = packed(tmp_path / "kernels.tgz", {name: b"\x7fELF code"}, changed={name: b"other code"})
    assert_refused(bundle, r"is damaged: KEY0/\S+ is not the file that was packed")


@pytest.mark.parametrize("length", [0, 7, 60])
def test_half_a_bundle_is_refused(length: int, bundle: Path, tmp_path: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:length])
    assert_refused(bundle, "is no bundle of kernels")


@pytest.mark.parametrize(
    "others", [{"facts": None}, {"facts": 5}, {"facts": ["a"]}, {"files": None}, {"files": ["KEY0/good"]}, {"files": 7}]
)
def test_a_manifest_of_another_form_is_refused(others: dict[str, object], tmp_path: Path) -> None:
    assert_refused(packed(tmp_path / "kernels.tgz", {"KEY0/good": b"1"}, others=others), "is no bundle of kernels")


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"child_paths": 5}', b'{"child_paths": {"a": 5}}'])
def test_an_index_of_another_form_is_refused_before_anything_is_written(
    index: bytes, cache: Path, tmp_path: Path
) -> None:
    """An entry's file was written before its index was read. A cache may hold such an index, too."""
    file = packed(tmp_path / "kernels.tgz", {"KEY0/decode.hsaco": b"1", "KEY0/__grp__decode.json": index})
    assert_refused(file, "KEY0/__grp__decode.json is no index of compiled kernels")
    (cache / "KEY0" / "__grp__decode.json").write_bytes(index)
    with pytest.raises(BadSetting, match=r"KEY0/__grp__decode.json is no index of compiled kernels \(.*remove it"):
        save_bundle(tmp_path / "other.tgz", cache, FACTS)
    assert not (tmp_path / "other.tgz").exists()

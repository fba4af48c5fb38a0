"""Bundles: the compiled kernels of a Triton cache in one file, for machines that should compile nothing.

A bundle is a tar file, packed by gzip: `manifest.json`, and a member for each file of the cache. A copy of the folder
would be no use elsewhere: Triton's index of an entry has whole paths (`__grp__NAME`, FileCacheManager.put_group in
triton/runtime/cache.py). Here an index has the names of files, and load_bundle gives it the paths of the cache that it
fills.
"""

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_attn.machine.whole_files import whole_file

_MANIFEST, _INDEX, _PATHS = "manifest.json", "__grp__", "child_paths"
# The folder of an entry and a file in it; neither "." nor "..", and nothing that leaves the folder.
_NAME = re.compile(r"\w[\w+=-]*/\w[\w.+=-]*")

# JSON of another form than that of this file raises these where its values are read.
_NOT_AS_WRITTEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def save_bundle(file: Path, cache: Path, facts: Mapping[str, str]) -> None:
    """Writes all entries of a cache to a bundle, which appears when it is whole.

    facts: conditions under which the kernels can be used, as arch and Triton's release
    Raises OSError, and BadSetting for a damaged entry.
    """
    contents = {}
    for path in sorted(cache.glob("*/*")):
        if path.name != "lock":
            name, content = str(path.relative_to(cache)), path.read_bytes()
            # A bundle's index has names in place of paths.
            contents[name] = _index_in("", content, str(path)) if _is_index(name) else content
    manifest = {
        "facts": dict(facts),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    with whole_file(file) as part, tarfile.open(part, "w:gz") as bundle:
        for name, content in {_MANIFEST: json.dumps(manifest).encode(), **contents}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))


def load_bundle(file: Path, cache: Path, facts: Mapping[str, str]) -> None:
    """Adds the entries of a bundle to a cache. facts: see save_bundle

    Raises BadSetting, with the cache unchanged, for other facts and for a file that is no whole bundle; OSError.
    """
    made_for, contents = _read(file)
    if made_for != facts:
        raise BadSetting(
            f"{file} has kernels for {_in_words(made_for)}, and here they must be for {_in_words(facts)}; make a "
            "bundle with --bundle here"
        )
    # An index comes after the files that it names: another process may read the cache meanwhile.
    for name in sorted(contents, key=_is_index):
        to = cache / name
        to.parent.mkdir(parents=True, exist_ok=True)
        content = _index_in(str(to.parent), contents[name], name) if _is_index(name) else contents[name]
        with whole_file(to) as part:
            part.write_bytes(content)


def _read(file: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Returns a bundle's facts and its files. Raises BadSetting, OSError."""
    try:
        with tarfile.open(file, "r:gz") as bundle:
            manifest = json.loads(_content(bundle, _MANIFEST))
            facts, digests = dict(manifest["facts"]), dict(manifest["files"])
            contents = {name: _content(bundle, name) for name in digests}
    except (tarfile.TarError, zlib.error, EOFError, *_NOT_AS_WRITTEN) as error:
        raise BadSetting(f"{file} is no bundle of kernels: {error}") from None
    for name, content in contents.items():
        if not _NAME.fullmatch(name):
            raise BadSetting(f"{file} is no bundle of kernels: {name!r} is no file of an entry of a cache")
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise BadSetting(f"{file} is damaged: {name} is not the file that was packed; copy the bundle again")
        if _is_index(name):
            _index_in("", content, f"{file}: {name}")
    return facts, contents


def _content(bundle: tarfile.TarFile, name: str) -> bytes:
    """The bytes of a plain file. Raises LookupError."""
    member = bundle.getmember(name)
    read = bundle.extractfile(member) if member.isreg() else None
    if read is None:
        raise LookupError(f"{name} is no plain file")
    return read.read()


def _is_index(name: str) -> bool:
    return name.partition("/")[2].startswith(_INDEX)


def _index_in(folder: str, index: bytes, named: str) -> bytes:
    """An index whose files are in another folder; "": as names. Raises BadSetting if it is none."""
    try:
        old = json.loads(index)
        paths = {name: os.path.join(folder, os.path.basename(child)) for name, child in dict(old[_PATHS]).items()}
        return json.dumps(old | {_PATHS: paths}).encode()
    except _NOT_AS_WRITTEN as error:
        raise BadSetting(f"{named} is no index of compiled kernels ({error}); remove it, and compile again") from None


def _in_words(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())

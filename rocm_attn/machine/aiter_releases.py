"""Releases of AITER: which of them are served, and which were read. The facts are in aiter_releases.json.

Imports only the standard library: the doctor uses it, and so does the image's build, before anything is installed:

    python3 aiter_releases.py COMMIT    # exits with 1 if it must not be built
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)")
_POST = re.compile(r"\.?post(\d+)")
_DEVELOPMENT = re.compile(r"[.-]?dev(\d+)")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
# Shortest form of a hash in which two commits are compared.
_HASH_DIGITS = 7


@dataclass(frozen=True, slots=True)
class AiterRelease:
    """A release of AITER, or one commit between two.

    name:   its tag, such as "v0.1.20.post1"; of a commit the version that it gives itself, "0.1.21.dev46"
    read:   "tree" (the whole of it), "functions" (those that are called, with what they launch), "notes" (its release
            notes alone), "title" (of its release) or "nothing"
    commit: its hash, if it has no tag; else empty
    about:  what its notes or its title say of attention; empty if there is nothing
    """

    name: str
    read: str
    commit: str = ""
    about: str = ""

    @property
    def was_read(self) -> bool:
        """True if its sources were read as far as they are called."""
        return self.read in ("tree", "functions")


@cache
def releases() -> tuple[AiterRelease, ...]:
    """The known releases, oldest first."""
    return tuple(AiterRelease(**each) for each in _facts()["releases"])


def written_for() -> str:
    """The releases that were read, for a sentence: "AITER v0.1.15 to v0.1.20.post1", and the commits."""
    tags = [each.name for each in releases() if each.was_read and not each.commit]
    commits = [
        f" and commit {each.commit[:8]} ({each.name.partition('.dev')[0]} in development)"
        for each in releases()
        if each.was_read and each.commit
    ]
    return f"AITER {tags[0]} to {tags[-1]}{''.join(commits)}"


def not_read(version: str) -> str:
    """A sentence about a release that was not read; empty if it was.

    version: of the distribution ("0.1.23+rocm7.2", "0.1.21.dev46+ge4048607a"), a tag, a commit's hash, or empty
    """
    found = _find(version)
    if found is not None and found.was_read:
        return ""
    beyond = {"notes": " beyond its release notes", "title": " beyond its title"}.get(found.read if found else "", "")
    unread = f"AITER {version} was never read{beyond}" if version else "AITER's release is not known"
    return f"{unread}; this version of rocm_attn was written for {written_for()}"


def too_old(version: str) -> str:
    """A sentence about a release before the first one that is served; empty for another, and for an unknown one.

    version: as not_read takes it
    """
    numbers, _, _ = _key(version)
    first = releases()[0].name
    if not numbers or numbers >= _key(first)[0]:
        return ""
    return f"AITER {version} is older than {first}, the first that is served"


def verdict(version: str) -> tuple[bool, str]:
    """True if AITER may be built for an image, and the reason in a sentence. version: a tag or a commit's hash"""
    if sentence := too_old(version):
        return False, sentence
    unread = not_read(version)
    if unread:
        return True, f"{unread}, and others serve where their parameters agree and their probe passes"
    return True, f"AITER {version} was read"


def _find(version: str) -> AiterRelease | None:
    key = _key(version)
    for each in releases():
        numbers, part, _ = _key(each.name)
        if each.commit and _is_commit(key[2], each.commit):
            return each
        # A build of another commit may give itself the same number.
        if numbers and (numbers, part) == key[:2] and not (each.commit and key[2]):
            return each
    return None


def _key(version: str) -> tuple[tuple[int, ...], str, str]:
    """A version's numbers, its part after them ("post1", "dev46", a suffix of a tag or ""), and its commit if named."""
    match = _NUMBERS.match(version)
    if match is None:
        return (), "", version if _COMMIT.fullmatch(version) else ""
    public, _, local = version[match.end() :].partition("+")
    commit = re.match(r"g([0-9a-f]{7,40})", local)
    part = f"post{post[1]}" if (post := _POST.fullmatch(public)) else public.lstrip(".-")
    if development := _DEVELOPMENT.match(public):
        part = f"dev{development[1]}"
    return tuple(map(int, match[1].split("."))), part, commit[1] if commit else ""


def _is_commit(given: str, known: str) -> bool:
    digits = min(len(given), len(known))
    return digits >= _HASH_DIGITS and given[:digits] == known[:digits]


@cache
def _facts() -> dict[str, list[dict[str, Any]]]:
    facts: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return facts


if __name__ == "__main__":
    may_build, sentence = verdict(sys.argv[1])
    print(sentence, file=sys.stdout if may_build else sys.stderr)
    sys.exit(0 if may_build else 1)

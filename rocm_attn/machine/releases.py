"""Releases of ROCm, of AITER and of Triton, as values, so that the choice of kernels is a pure function of them."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from importlib import metadata

from rocm_attn.machine import aiter_releases
from rocm_attn.machine.aiter_marks import Mark, installed_marks
from rocm_attn.machine.aiter_switches import switches_set
from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS

_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)(.*)")
_POST = re.compile(r"\.?post(\d+)")
# Candidates, development builds, and builds of a commit: Triton's "3.9.0+git1234" may be of any day before 3.9.0, or of
# a branch after it. "3.6.0+rocm7.2.git1" is a release, built for a ROCm.
_BEFORE = re.compile(r"[.-]?(?:dev|rc)\d|\.dev(?![a-z0-9])|(?:a|b|alpha|beta)\d|\+git")


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A release by its numbers, or a build between two releases, in the order in which they are made.

    numbers:   of the release, and one more: 0.1.20 is (0, 1, 20, 0), and 0.1.19.post1 is (0, 1, 19, 1). Empty: it is
               not known
    is_before: True for a build of development or of a commit, or a candidate: before 0.1.21 its numbers are
               (0, 1, 21, -1), and before 0.1.19.post2 those of 0.1.19.post1
    """

    numbers: tuple[int, ...]
    is_before: bool = False

    @classmethod
    def of(cls, text: str) -> Release:
        """The release that a version names.

        Versions are, for instance, "0.1.20", "v0.1.19.post2", "0.1.21.dev0+g1234567", "0.1.19.post3.dev139",
        "7.2.53211-abc" and "3.9.0+git1234567". The release is not known if the text is not a version, or has fewer than
        two numbers.
        """
        match = _NUMBERS.match(text)
        if match is None:
            return UNKNOWN
        numbers, rest = tuple(map(int, match[1].split("."))), match[2]
        post = _POST.match(rest)
        number, rest = (int(post[1]), rest[post.end() :]) if post else (0, rest)
        is_before = _BEFORE.match(rest) is not None
        return cls((*numbers, number - is_before), is_before)

    def bounds(self) -> tuple[Release, Release]:
        """The releases between which it was built: it has what the first one has, and may lack what the last one has.

        Both are the release itself, if it is one.
        """
        if not self.numbers:
            return _FIRST, _ENDLESS
        if not self.is_before:
            return self, self
        *front, last = self.numbers
        earlier = (*front, last) if last >= 0 else (*front[:-1], front[-1] - 1, 0)
        return Release(earlier), Release((*front, last + 1))

    def __str__(self) -> str:
        if not self.numbers:
            return "of unknown release"
        *numbers, last = self.numbers
        last += self.is_before
        return ".".join(map(str, numbers)) + f".post{last}" * (last > 0) + " in development" * self.is_before


UNKNOWN = Release(())
# Before the first release, and after the last one.
_FIRST, _ENDLESS = Release((0,)), Release((1 << 30,))


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """The releases from `since` on, up to but without `before`. The defaults include all releases."""

    since: Release = _FIRST
    before: Release = _ENDLESS

    def __contains__(self, release: Release) -> bool:
        """True if a release is, or may be, one of them: an unknown release may be any."""
        earliest, latest = release.bounds()
        return self.since <= latest and earliest < self.before

    def __str__(self) -> str:
        since = f"from {self.since}" if self.since != _FIRST else ""
        before = f"before {self.before}" if self.before != _ENDLESS else ""
        return " and ".join(filter(None, (since, before))) or "every release"


EVERY_RELEASE = ReleaseRange()


@dataclass(frozen=True, slots=True)
class Releases:
    """The software of a device: the ROCm that compiles for it, and the AITER and Triton that are installed.

    marks:    of fixes that AITER's files have
    switches: NAME=VALUE of AITER's switches that are set (aiter_switches.py)
    """

    rocm: Release = UNKNOWN
    aiter: Release = UNKNOWN
    triton: Release = UNKNOWN
    marks: frozenset[Mark] = frozenset()
    switches: tuple[str, ...] = ()

    def is_on(self, switch: str) -> bool:
        """True if the environment sets a switch to a whole number that is not 0: AITER reads no other word as on."""
        settings = dict(each.split("=", 1) for each in self.switches)
        try:
            return int(settings.get(switch, "0")) != 0
        except ValueError:
            return False


NOT_KNOWN = Releases()


def installed_releases() -> Releases:
    """The software of this machine. torch names the HIP that it was built with, whose first two numbers are ROCm's."""
    # Imported here: the doctor compares releases where torch is broken.
    import torch

    return Releases(
        Release.of(torch.version.hip or ""),
        Release.of(aiter_version()),
        Release.of(triton_version()),
        installed_marks(),
        switches_set(os.environ),
    )


def aiter_not_read(release: Release) -> str:
    """A sentence about a release of AITER that was not read; empty if it was.

    A Release does not tell builds of one development apart: each counts as the one that was read, if one was.
    """
    named = (each.name for each in aiter_releases.releases() if Release.of(each.name) == release)
    return aiter_releases.not_read(next(named, f"v{release}" if release.numbers else ""))


def aiter_version() -> str:
    """The installed AITER's version; empty if its distribution does not say, or there is none."""
    try:
        return metadata.version("amd-aiter")
    except metadata.PackageNotFoundError:
        return ""


def triton_version() -> str:
    """The installed Triton's version, from whichever of TRITON_DISTRIBUTIONS is installed.

    Empty if there is none, or if several name different releases: the last one overwrote the others' files, and nothing
    says which that was. `rocm-attn doctor` reports it.
    """
    found = []
    for name in TRITON_DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(metadata.version(name))
    return found[0] if len({Release.of(version) for version in found}) == 1 else ""

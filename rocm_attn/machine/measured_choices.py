"""The measured choices of tiles that serve a GPU: those of the user's file that were measured on the same kind of GPU.

The file is that of $ROCM_ATTN_TUNING, or rocm_attn/tuning.json in the user's cache; "off" means none. A row serves the
arch, the number of compute units and the Triton that it was measured with; others are skipped, which one line reports.
A file that is refused serves nothing, and never stops a runtime: the tables' own rows serve then.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice
from rocm_attn.machine.releases import UNKNOWN, Release
from rocm_attn.machine.settings import settings
from rocm_attn.machine.target import Target
from rocm_attn.machine.tuning_file import TuningFile

OFF = "off"


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """The rows of a file, for one target.

    serving: measured on the same kind of GPU; passed_over: a sentence about the others, empty if there are none
    """

    serving: tuple[MeasuredTileChoice, ...]
    passed_over: str


def user_cache() -> Path:
    """The package's folder in the user's cache; below a folder named ~ for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # XDG's rule: processes in other folders would each have a cache of their own.
    named = named if os.path.isabs(named) else os.path.expanduser("~/.cache")  # Path.home() raises without a home
    return Path(named) / "rocm_attn"


def default_place() -> Path:
    """The file in the user's cache."""
    return user_cache() / "tuning.json"


def place_of(named: str) -> Path | None:
    """The file that a setting names; None if it is off."""
    if named.lower() == OFF:
        return None
    return Path(os.path.expanduser(named)) if named else default_place()


def sorted_for(target: Target, rows: Sequence[MeasuredTileChoice]) -> SortedChoices:
    """The rows that serve a target, and a sentence about the others."""
    serving = tuple(choice for choice in rows if not _differences(choice, target))
    of_arch = [choice for choice in rows if choice.measured.arch == target.arch and choice not in serving]
    # Rows of other archs are for other machines, since a file may serve several.
    if not of_arch:
        return SortedChoices(serving, "")
    why = "; ".join(dict.fromkeys(difference for choice in of_arch for difference in _differences(choice, target)))
    return SortedChoices(serving, f"{len(of_arch)} of {len(rows)} measured choices are not used: {why}")


def _differences(choice: MeasuredTileChoice, target: Target) -> list[str]:
    of, triton = choice.measured, target.releases.triton
    found = []
    if of.arch != target.arch:
        found.append(f"measured on {of.arch}, and this is {target.arch}")
    if triton == UNKNOWN or Release.of(of.triton) != triton:
        found.append(f"measured with Triton {of.triton}, and the installed one is {triton}")
    if of.compute_units != target.compute_units:
        found.append(f"measured on {of.compute_units} compute units, and this GPU has {target.compute_units}")
    return found


def with_choices_of(target: Target, place: Path) -> tuple[Target, str]:
    """A target with the rows of a file that serve it, and a sentence about the others. Raises BadSetting."""
    found = sorted_for(target, TuningFile.read(place).rows)
    about = f"tuning file {place}: {found.passed_over}" if found.passed_over else ""
    return replace(target, measured=found.serving), about


def with_measured_choices(target: Target) -> Target:
    """A target with the rows of the user's file, unless it has rows already. No content of the file makes it raise."""
    named = settings().tuning
    place = place_of(named)
    if place is None or target.measured or not target.is_gpu or (not named and not os.path.isfile(place)):
        return target
    try:
        served, about = with_choices_of(target, place)
    except BadSetting as refused:
        served, about = target, f"{refused}; the built-in tiles are used"
    if about:
        _warn_once(about)
    return served


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger(__name__).warning("%s", sentence)

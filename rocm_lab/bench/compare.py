"""Compares two runs, with verdicts that take noise into account.

The ratio of two medians has a 95% interval, from resampling the samples of both runs. A row is slower, or faster, if
the whole interval is beyond the smallest effect that counts. It is the same if the whole interval is within that
effect. Otherwise the result is unclear. The interval does not cover differences between runs that are constant within a
run, such as the place of pages in memory. The smallest effect has to cover those.
"""

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rocm_attn.errors import BadSetting
from rocm_lab.bench.result_file import KERNELS, ResultFile

_RESAMPLES, _SEED = 2000, 0
_LOW, _HIGH = 0.025, 0.975
# Fewer samples do not give a useful interval.
_FEWEST = 5


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """The facts by which rows of two runs are of the same. Suites share cases.

    dtype: of q; empty if the row names none
    nth:   of rows that are alike otherwise, such as those of layers that differ in their scale, in the file's order
    """

    suite: str
    case: str
    batch: str
    provider: str
    dtype: str
    nth: int


class Change(enum.Enum):
    """The change of a row."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNCLEAR = "unclear"
    BROKEN = "wrong now"
    MENDED = "right now"


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """A provider on a case, before and after.

    ratio, low, high: time after / time before, and its interval; NaN if one of them has no samples
    """

    case: str
    provider: str
    change: Change
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def line(self) -> str:
        """Returns the comparison in words."""
        if math.isnan(self.ratio):
            return f"{self.change.value:<10} {self.provider}, {self.case}"
        found = f"{self.ratio:.3f} x ({self.low:.3f} to {self.high:.3f})"
        return f"{self.change.value:<10} {found}  {self.provider}, {self.case}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed differences between the subjects of two runs.

    other_device: whether they may be of two devices
    common_cases: whether cases that only one run has are left out
    """

    other_device: bool = False
    common_cases: bool = False


def compare(before: ResultFile, after: ResultFile, smallest: float, allowed: Allowed) -> list[ComparedCase]:
    """Returns each row of both runs that has a result in one of them. smallest: the effect that counts, 0.02 for 2%

    Raises BadSetting for runs that cannot be compared.
    """
    _check_files(before, after, allowed)
    old, new = _by_key(before.rows), _by_key(after.rows)
    only = {"before": sorted(old.keys() - new.keys()), "after": sorted(new.keys() - old.keys())}
    if any(only.values()) and not allowed.common_cases:
        name, keys = next((name, keys) for name, keys in only.items() if keys)
        raise BadSetting(
            f"{len(keys)} rows are only in the run {name}, such as {keys[0].provider} on {keys[0].case} "
            f"({' in '.join(filter(None, (keys[0].batch, keys[0].dtype)))}); measure the same, or compare the common "
            "ones with --common-cases"
        )
    found = []
    for key in (key for key in old if key in new):
        compared = _row(key, old[key], new[key], smallest)
        if compared is not None:
            found.append(compared)
    if not found:
        raise BadSetting("no row has a result in both runs; give two runs of the same cases and providers")
    return found


def _check_files(before: ResultFile, after: ResultFile, allowed: Allowed) -> None:
    for kept in (before, after):
        if kept.kind != KERNELS:
            raise BadSetting(f"a file of {kept.kind} was given; files of `rocm-attn bench kernels` can be compared")
    devices = before.machine["device"], after.machine["device"]
    if devices[0] != devices[1] and not allowed.other_device:
        raise BadSetting(
            f"the runs are of {devices[0]!r} and of {devices[1]!r}; compare runs of one device, or give --other-device"
        )


def _by_key(rows: Sequence[Mapping[str, Any]]) -> dict[RowKey, Mapping[str, Any]]:
    found: dict[RowKey, Mapping[str, Any]] = {}
    seen: Counter[RowKey] = Counter()
    for row in rows:
        layer = row.get("layer")
        dtype = str(layer.get("dtype", "")) if isinstance(layer, dict) else ""
        first = RowKey(row["suite"], row["case"], row["batch"], row["provider"], dtype, 0)
        found[replace(first, nth=seen[first])] = row
        seen[first] += 1
    return found


def _row(key: RowKey, old: Mapping[str, Any], new: Mapping[str, Any], smallest: float) -> ComparedCase | None:
    before, after = old.get("samples_us"), new.get("samples_us")
    if not before and not after:
        return None
    if not before or not after:
        return ComparedCase(key.case, key.provider, Change.MENDED if after else Change.BROKEN)
    ratio, low, high = ratio_of_medians(before, after)
    least, most = 1 / (1 + smallest), 1 + smallest
    change = Change.UNCLEAR
    if low > most:
        change = Change.SLOWER
    elif high < least:
        change = Change.FASTER
    elif least <= low and high <= most:
        change = Change.SAME
    return ComparedCase(key.case, key.provider, change, ratio, low, high)


def ratio_of_medians(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio after / before, and its 95% interval. Raises BadSetting for fewer than five samples."""
    for samples in (before, after):
        if len(samples) < _FEWEST:
            raise BadSetting(f"a row has {len(samples)} samples; measure with --rounds {_FEWEST} or more to compare")
    chooser = np.random.default_rng(_SEED)

    def medians(samples: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        values = np.asarray(samples, np.float64)
        drawn: np.ndarray[Any, np.dtype[np.float64]] = np.median(
            chooser.choice(values, (_RESAMPLES, len(values))), axis=1
        )
        return drawn

    ratios = medians(after) / medians(before)
    low, high = np.quantile(ratios, (_LOW, _HIGH))
    return float(np.median(after) / np.median(before)), float(low), float(high)

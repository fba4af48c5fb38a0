"""Constants of the cost model (rocm_lab/cost/cost.py), fitted to the times of a report by least squares.

    max(loaded / hbm, own + waits latency, busy) + ends latency + launches

The terms loaded, own, waits, busy and ends are known of each layer (DecodeWork). With a decode's largest part known,
its time is linear in 1 / hbm, latency and launches. So parts are estimated from the model's constants, and constants
fitted to parts, in turns, until the parts are those that the constants make the largest. Errors are relative, as the
times of layers differ by 100 times.

Constants are refused if the points are few, or if the formula leaves more than MOST_RESIDUAL of the times unexplained;
a constant alone, if the points do not tell it from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rocm_lab.cost.cost import GPUS, LATENCY, LAUNCHES, DecodeWork
from rocm_lab.first_run.times import TimedLayer

LEAST_POINTS = 8
# Limits of the root mean square, relative to the times, and of a constant's standard error, relative to the constant.
MOST_RESIDUAL, MOST_ERROR = 0.15, 0.2
# Points that a bandwidth bounds, at least.
LEAST_BOUND = 3
_MOST_TURNS = 50
# The rounding of times, relative to them, and of singular values, relative to the largest one.
_ROUNDING = 1e-6

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant, its standard error, and the range that the model has today."""

    name: str
    value: float
    error: float
    today: tuple[float, float]


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """The constants of decode.

    points:    layers whose times were used
    residual:  root mean square of (fitted - measured) / measured; worst: that of one layer, which is named
    refused:   why there are no constants; empty if there are
    vague:     names of those that have too large an error
    """

    points: int
    residual: float = 0.0
    worst: float = 0.0
    worst_layer: str = ""
    refused: str = ""
    constants: tuple[Constant, ...] = ()
    vague: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Lines for people."""
        if self.refused:
            return [f"constants of decode: none, as {self.refused}"]
        return [
            f"constants of decode, from {self.points} layers; {self.residual:.1%} of their times are left, "
            f"{self.worst:+.1%} at most ({self.worst_layer})",
            *(
                f"  {each.name}: {each.value:.4g} +- {each.error:.2g}, and the model has {each.today[0]:.4g} to "
                f"{each.today[1]:.4g}"
                for each in self.constants
            ),
            *(f"  {name}: the layers do not tell it from the others" for name in self.vague),
        ]


def fit_decode(layers: Sequence[TimedLayer], arch: str) -> FittedConstants:
    """Bandwidth of HBM (bytes per second), latency and launches (seconds)."""
    if len(layers) < LEAST_POINTS:
        few = f"there are {len(layers)} layers with a time, and {LEAST_POINTS} are needed"
        return FittedConstants(len(layers), refused=few)
    hbm = GPUS[arch].hbm
    found = _fit_parts(layers, 1 / hbm[0], LATENCY[0])
    reads, wait, launch = found.values
    bound = _parts(layers, reads, wait).count(0)
    if bound < LEAST_BOUND:
        few = f"{bound} of {len(layers)} layers are bound by HBM, and {LEAST_BOUND} are needed"
        return FittedConstants(len(layers), refused=few)
    left = [each.work.seconds(1 / reads, wait, launch) / each.seconds - 1 for each in layers]
    worst, residual = max(left, key=abs), math.sqrt(sum(each * each for each in left) / len(left))
    fitted = FittedConstants(len(layers), residual, worst, layers[left.index(worst)].name)
    if residual > MOST_RESIDUAL:
        reason = f"the formula leaves {residual:.0%} of the times, and at most {MOST_RESIDUAL:.0%} is a fit"
        return replace(fitted, refused=reason)
    constants = (
        Constant("hbm", 1 / reads, found.errors[0] / reads**2, hbm),
        Constant("latency", wait, found.errors[1], LATENCY),
        Constant("launches", launch, found.errors[2], LAUNCHES),
    )
    clear = tuple(each for each in constants if each.error < MOST_ERROR * each.value)
    return replace(fitted, constants=clear, vague=tuple(each.name for each in constants if each not in clear))


@dataclass(frozen=True, slots=True)
class _Fit:
    """errors: standard errors of the values"""

    values: tuple[float, ...]
    errors: tuple[float, ...]


def _fit_parts(layers: Sequence[TimedLayer], reads: float, latency: float) -> _Fit:
    """The fit that a start leads to: with the parts that its own values make the largest, unless turns run out."""
    seconds = np.array([each.seconds for each in layers])
    parts = _parts(layers, reads, latency)
    for _ in range(_MOST_TURNS):
        works = [(each.work, part) for each, part in zip(layers, parts, strict=True)]
        rows = np.array([_row(work, part) for work, part in works])
        known = np.array([(0.0, work.own, work.busy)[part] for work, part in works])
        found = _least_squares(rows, seconds - known, seconds)
        before, parts = parts, _parts(layers, found.values[0], found.values[1])
        if parts == before:
            break
    return found


def _parts(layers: Sequence[TimedLayer], reads: float, latency: float) -> list[int]:
    """The largest part of each time: bytes, waits, units."""
    works = (each.work for each in layers)
    each = ((work.loaded * reads, work.own + work.waits * latency, work.busy) for work in works)
    return [parts.index(max(parts)) for parts in each]


def _row(work: DecodeWork, part: int) -> tuple[float, float, float]:
    return (work.loaded if part == 0 else 0.0, work.ends + (work.waits if part == 1 else 0.0), 1.0)


def _least_squares(rows: Array, wanted: Array, seconds: Array) -> _Fit:
    """The values with rows @ values closest to wanted, relative to seconds."""
    rows, wanted = rows / seconds[:, None], wanted / seconds
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1.0
    scaled = rows / sizes
    _, singular, turned = np.linalg.svd(scaled, full_matrices=False)
    values = np.linalg.lstsq(scaled, wanted, rcond=_ROUNDING)[0]
    cost = float(np.square(scaled @ values - wanted).sum())
    # The errors of values that the rows do not tell apart are as large as the values, even without noise.
    variance = max(cost, len(rows) * _ROUNDING**2) / (len(rows) - len(values))
    errors = np.sqrt(variance * np.square(turned.T / np.maximum(singular, _ROUNDING * singular[0])).sum(1)) / sizes
    values /= sizes
    return _Fit(tuple(values.tolist()), tuple(errors.tolist()))

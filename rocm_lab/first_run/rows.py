"""Rows of tiles from a report: candidates that the GPU ran faster than the row that serves today.

The report has every candidate's verdict and times, taken in turn with those of the row in use. A row is made of the
fastest candidate that is right, over enough rounds, and faster than today's row by more than LEAST_GAIN. Nothing is
made of a report with a failed test, of another Triton than the one that is asked for, or of a row that serves no more.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice, Tiles, TileTable
from rocm_attn.machine.releases import UNKNOWN, Release
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.machine.values_json import from_json
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.first_run.report import PASSED, GpuReport, problem_in, shape_in
from rocm_lab.tune.candidates import CandidateTiles
from rocm_lab.tune.jobs import TuneJob, jobs_of
from rocm_lab.tune.search import CONFIRM, MORE_SPILLED, FasterTiles, Times, gain_of, row_of

LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """Rows of a report, and a sentence for each search that gave none."""

    rows: tuple[MeasuredTileChoice, ...]
    left_out: tuple[str, ...]


def rows_of(report: GpuReport, triton: str) -> ReportedRows:
    """The rows of a report. triton: the release that rows are wanted for. Raises BadSetting for damaged times."""
    found: list[MeasuredTileChoice] = []
    left_out = list(_refusals(report, triton))
    if not left_out:
        for test, trials in report.measured("tile trials"):
            if test.outcome != PASSED:
                left_out.append(f"{test.name} is {test.outcome}")
                continue
            for trial in trials:
                row = _row(report, trial)
                found += [row] if isinstance(row, MeasuredTileChoice) else []
                left_out += [row] if isinstance(row, str) else []
    # If two kernels serve the same steps, only the faster one's row does.
    file = TuningFile()
    for row in sorted(found, key=lambda row: row.measured.gain):
        file = file.with_choice(row)
    return ReportedRows(file.rows, tuple(left_out))


def _refusals(report: GpuReport, triton: str) -> Iterator[str]:
    """Why no row is made of a report at all."""
    failed = [test.name for test in report.failed]
    if failed:
        yield f"{len(failed)} tests failed, so nothing is known to be right: {', '.join(failed[:3])}" + (
            " and others" if len(failed) > 3 else ""
        )
    of, wanted = report.target.releases.triton, Release.of(triton)
    if UNKNOWN in (of, wanted) or of != wanted:
        yield (
            f"the report is of Triton {report.versions['triton'] or 'of unknown release'}, and rows are wanted for "
            f"{triton or 'an unknown one'}; give --triton-release {report.versions['triton']} if that one will serve"
        )


def _row(report: GpuReport, trial: Mapping[str, Any]) -> MeasuredTileChoice | str:
    """The row of a search, or why there is none."""
    try:
        job, in_use = _job_of_today(report, trial), _tiles(trial["in_use"])
        candidates = [_candidate(each, len(trial["shapes"])) for each in trial["candidates"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadSetting(f"the times of tiles in the report are damaged ({type(error).__name__}: {error})") from error
    if job is None or job.in_use != in_use:
        said = job.in_use if job else "none that was searched"
        return f"{trial['table']} at {trial['shapes']}: {in_use} was in use, and today's row is {said}; measure again"
    spilled = next((each.spilled for each in candidates if each.tiles == in_use), 0)
    faster = [
        FasterTiles(CandidateTiles(each.tiles, ()), gain, each.spilled)
        for each in candidates
        if not each.wrong and each.spilled <= spilled + MORE_SPILLED and each.tiles != in_use
        if len(each.times[0]) >= CONFIRM
        for gain in [gain_of(each.times)]
        if gain.ratio < 1 - LEAST_GAIN and gain.high < 1
    ]
    if not faster:
        return f"{job}: none of {len(candidates)} candidates is right and more than {LEAST_GAIN:.0%} faster"
    facts = {
        "device": report.device,
        "arch": report.target.arch,
        "compute_units": str(report.target.compute_units),
        "software": report.versions["rocm-attn"],
        "commit": report.commit,
        **{name: report.versions[name] for name in ("triton", "torch", "rocm")},
    }
    return row_of(job, min(faster, key=lambda each: each.gain.ratio), facts, report.date)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """times: of the row in use and of these tiles, by round and shape; no rounds if it was not timed"""

    tiles: Tiles
    wrong: str
    spilled: int
    times: tuple[Times, Times]


def _job_of_today(report: GpuReport, trial: Mapping[str, Any]) -> TuneJob | None:
    """The search of today's tables with the same layer, steps and shapes; None if there is none."""
    shapes = tuple(BatchSpec((shape_in(each),)) for each in trial["shapes"])
    jobs, _ = jobs_of([problem_in(trial["layer"])], replace(report.target, measured=()), shapes)
    wanted = TileTable(trial["table"]), from_json(int, trial["max_rows"], "max_rows"), shapes
    return next((each for each in jobs if (each.table, each.max_rows, each.shapes) == wanted), None)


def _tiles(given: Mapping[str, Any]) -> Tiles:
    tiles: Tiles = from_json(TileTable(given["table"]).tiles, given["tiles"], "tiles")
    return tiles


def _candidate(given: Mapping[str, Any], num_shapes: int) -> _Candidate:
    in_use, own = (from_json(tuple[tuple[float, ...], ...], given.get(name, []), name) for name in ("in_use_us", "us"))
    samples = [us for of_round in (*in_use, *own) for us in of_round]
    if len(in_use) != len(own) or any(len(each) != num_shapes for each in (*in_use, *own)):
        raise ValueError("times are not one for each shape and round of both")
    if samples and not (min(samples) > 0 and math.isfinite(max(samples))):
        raise ValueError("a time is not a positive number")
    return _Candidate(
        _tiles(given),
        from_json(str, given["wrong"], "wrong"),
        from_json(int, given["spilled"], "spilled"),
        ([list(each) for each in in_use], [list(each) for each in own]),
    )

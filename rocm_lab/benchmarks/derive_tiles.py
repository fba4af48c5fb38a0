"""Tiles by search: those of today's tables derived again, and those of layers and steps that nothing was tuned for.

python -m rocm_lab.benchmarks.derive_tiles --out rocm_lab/benchmarks/results/derived_tiles_h200.json --seconds 210

The search is that of `rocm-attn tune`. For a row of a table it begins with tiles that follow from the kernel's
description alone (rocm_lab/tune/hopper.py), or with plain ones, and is compared with the row: `ratio` is the time of
the tiles that were found, divided by the row's. For random layers and steps (rocm_lab/bench/random_cases.py) it begins
with the row that serves. The best candidate of each search is measured again, in turn with the row, over CONFIRM
rounds; low and high are quartiles. Rows that gain enough are written to a tuning file next to the result, with where
they come from.

Every search has an equal share of the time that is left. Trials are kept next to the result: the same command goes on
where it stopped, if the commit is the same (a file in the checkout changes it; $BENCHMARK_COMMIT names it). Compilers
run on all cores but one, and take most of the time. If a candidate hangs on the GPU, the process ends, with what was
found so far; the next run skips it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.hopper_tiles import DIMS, HopperTiles, is_gathered
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles, LatentTiles
from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import clock_of
from rocm_lab.bench.random_cases import random_cases
from rocm_lab.benchmarks.script import Row, parser_of, write
from rocm_lab.tune.ahead import CompiledAhead
from rocm_lab.tune.bench import JobSteps, LayerBench, edges_of
from rocm_lab.tune.command import TuneRun, facts_of
from rocm_lab.tune.hopper import derived_latent_tiles, derived_tiles
from rocm_lab.tune.jobs import TuneJob, jobs_of
from rocm_lab.tune.journal import Journal
from rocm_lab.tune.search import CONFIRM, TIMED, Bench, Search, Tried, gain_of, what_became

ROWS, RANDOM = "rows", "random"
COUNT, SEED = 20, 49
_SAMPLE_US = 2000.0
# Ratios within this much of 1 are neither loss nor gain.
_SAME = 0.01
# Seconds without a trial after which a candidate is taken to hang: several times those of the slowest compilers.
_STUCK = 90.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A search. part: ROWS or RANDOM; what: the row or the case, in words"""

    part: str
    what: str
    job: TuneJob


def _layer(dims: tuple[int, int], heads: tuple[int, int], page_size: int, **more: Any) -> Problem:
    given: dict[str, Any] = {"v_head_dim": dims[1], "scale": dims[0] ** -0.5, **more}
    return Problem(*heads, dims[0], torch.bfloat16, page_size, **given)


_CODES: Mapping[str, Any] = {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.HEAD}
# A chunk of a long prompt, and short ones: of every row of Hopper's tables, with 32 query heads on 8 KV heads. No table
# of pages has rows of a multiple of 16, as none of the edges' has: one variant of a kernel serves all of them.
_CHUNKS = ("1x2048+6100", "6x700+1800")
_LAYERS: tuple[tuple[str, Problem, tuple[str, ...]], ...] = (
    *((f"boxes of {dims}", _layer(dims, (32, 8), 16), _CHUNKS) for dims in DIMS),
    *((f"gathered keys of {dims}", _layer(dims, (32, 8), 2), _CHUNKS) for dims in DIMS if dims != (96, 96)),
    *((f"codes of {dim}", _layer((dim, dim), (32, 8), 16, **_CODES), _CHUNKS) for dim in (64, 128, 192)),
    ("latents of Hopper", _layer((576, 512), (128, 1), 64, pool=PoolKind.LATENT), ("64d4k",)),
    ("latents", _layer((576, 512), (16, 1), 64, pool=PoolKind.LATENT), ("128d4k",)),
    ("decode of 128", _layer((128, 128), (32, 8), 16), ("64d4k", "4d16k")),
    ("decode of 64", _layer((64, 64), (64, 8), 16), ("64d4k", "4d16k")),
    ("drafts of 128", _layer((128, 128), (32, 8), 16), ("64x5+2048",)),
)


def wanted(target: Target, parts: Sequence[str]) -> tuple[list[Wanted], list[str]]:
    """The searches on a target, and a sentence for each layer that has none."""
    found: list[Wanted] = []
    left_out: list[str] = []
    for what, problem, texts in _LAYERS if ROWS in parts else ():
        (job,), without = jobs_of([problem], target, [BatchSpec.parse(text) for text in texts])
        found.append(Wanted(ROWS, what, _without_table(job, target)))
        left_out += without
    for number, case in enumerate(random_cases(COUNT, SEED) if RANDOM in parts else ()):
        jobs, without = jobs_of([case.problem], target, [case.batch])
        found += [Wanted(RANDOM, f"{number}: {case.name}", job) for job in jobs]
        left_out += without
    return found, left_out


def _without_table(job: TuneJob, target: Target) -> TuneJob:
    """The same search, begun with tiles that no table says."""
    return TuneJob(job.table, job.problem, job.max_rows, _start(job, target), job.in_use, job.shapes)


def _start(job: TuneJob, target: Target) -> Tiles:
    tiles = job.tiles
    if isinstance(tiles, HopperTiles):
        return derived_tiles(job.problem, target.lds_bytes, is_gathered=is_gathered(job.problem.page_size))
    if isinstance(tiles, HopperLatentTiles):
        return derived_latent_tiles()
    if isinstance(tiles, LatentTiles):
        return LatentTiles(16, 32, 4, 2)
    if isinstance(tiles, ExtendTiles):
        return ExtendTiles(max(16, min(64, job.max_rows)), 32, 4, 2)
    return DecodeTiles(32, 4, 2, 2)


@dataclass
class Derivation:
    """The searches of a run, one after the other. moved: called with each trial"""

    search: Search
    run: TuneRun
    moved: Callable[[], None]

    def rows(self, every: Sequence[Wanted]) -> Iterator[Row]:
        """The result of each search that could begin."""
        jobs = [each.job for each in every]
        for number, each in enumerate(every):
            tried = []
            for trial in self.search.run_one(each.job, jobs[number + 1 :]):
                self.moved()
                self.run.took(trial)
                tried.append(trial)
            if tried:
                yield {"part": each.part, "what": each.what, **self._result(each.job, tried)}

    def _result(self, job: TuneJob, tried: Sequence[Tried]) -> Row:
        outcomes = Counter(each.trial.outcome.partition(":")[0] for each in tried)
        said: Row = {"job": str(job), "today": asdict(job.in_use), "start": asdict(job.tiles), "tried": dict(outcomes)}
        timed = [each for each in tried if each.trial.outcome == TIMED and not each.was_known]
        timed = timed or [each for each in tried if each.trial.outcome == TIMED]
        if not timed:
            return {**said, "why": what_became(tried[0].trial)}
        best = min(timed, key=lambda each: each.trial.ratio).candidate
        start = [each.trial.ratio for each in tried if not each.candidate.changes]
        gain = gain_of(self.search.bench.times(job, (job.in_use, best.tiles), CONFIRM))
        figures = {"ratio": gain.ratio, "low": gain.low, "high": gain.high}
        return {
            **said,
            "found": asdict(best.tiles),
            "changes": str(best),
            "is_todays": best.tiles == job.in_use,
            "ratio_of_start": round(start[0], 4) if start else 1.0,
            **{name: round(value, 4) for name, value in figures.items()},
            "today_us": gain.in_use_us,
            "found_us": gain.us,
        }


def summary(rows: Sequence[Row]) -> Row:
    """For each part: the searches, those with a loss and with a gain, and the geometric mean of their ratios."""
    said = {}
    for part in (ROWS, RANDOM):
        ratios = [row["ratio"] for row in rows if row["part"] == part and "ratio" in row]
        if ratios:
            said[part] = {
                "searches": len(ratios),
                "losses": sum(ratio > 1 + _SAME for ratio in ratios),
                "gains": sum(ratio < 1 - _SAME for ratio in ratios),
                "worst": max(ratios),
                "best": min(ratios),
                "mean": round(math.exp(statistics.fmean(map(math.log, ratios))), 4),
            }
    return said


def derive(options: argparse.Namespace, target: Target, device: str, bench: Bench, moved: Callable[[], None]) -> None:
    """Searches on a bench, and writes the result. device: its name; moved: called with each trial"""
    begun = time.monotonic()
    ends = begun + options.seconds
    every, left_out = wanted(target, (options.only,) if options.only else (ROWS, RANDOM))
    facts = facts_of(target, device)
    tuning = options.out.with_suffix(".tuning.json")
    run = TuneRun(TuningFile.read(tuning) if tuning.exists() else TuningFile(), tuning, facts)
    journal = Journal(options.out.with_suffix(".trials"), facts)
    search = Search(bench, target, journal, lambda: ends - time.monotonic(), run.keep, run.kept)
    rows: list[Row] = []
    try:
        for row in Derivation(search, run, moved).rows(every):
            rows.append(row)
            seconds = round(time.monotonic() - begun, 1)
            print(f"{seconds} s: {row['what']}: {row.get('ratio', row.get('why'))}, {row['tried']}", flush=True)
            # Each time whole: a run that is cut off leaves what it had.
            write(options.out, facts=facts, seconds=seconds, left_out=left_out, summary=summary(rows), rows=rows)
    finally:
        journal.close()
    print(summary(rows), f"{len(rows)} of {len(every)} searches begun", sep="\n")


class StuckWatch:
    """Ends the process if nothing moves: a thread that waits for a GPU that hangs cannot end by itself."""

    def __init__(self, most: float) -> None:
        self._most, self._last = most, time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def moved(self) -> None:
        """Says that a trial has ended."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last < self._most:
            time.sleep(1.0)
        print(
            f"nothing moved for {self._most} s; run the same command again, which skips the last candidate", flush=True
        )
        os._exit(3)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=210.0, help="no candidate is begun after this many")
    parser.add_argument("--only", choices=(ROWS, RANDOM), help="rows of the tables, or random cases; else both")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise BadSetting("there is no GPU to measure on")
    device = torch.device("cuda", 0)
    target, steps = detect_target(device), JobSteps(edges_of)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    with torch.cuda.device(device):
        layers = LayerBench(device, target, clock_of(device, _SAMPLE_US), steps)
        ahead = CompiledAhead(layers, target, max(1, len(os.sched_getaffinity(0)) - 1), steps)
        try:
            derive(options, target, torch.cuda.get_device_name(device), ahead, StuckWatch(_STUCK).moved)
        finally:
            ahead.close()


if __name__ == "__main__":
    main()

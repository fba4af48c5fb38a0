"""`rocm-attn tune`: searches faster tiles for a model's layers on this GPU, and keeps them where runtimes look."""

import argparse
import datetime
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from rocm_attn.cli.arguments import described_model, device_named, page_choice
from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.cli.streams import say
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice
from rocm_attn.machine.measured_choices import OFF, default_place, place_of
from rocm_attn.machine.releases import UNKNOWN, triton_version
from rocm_attn.machine.settings import TUNING, settings
from rocm_attn.machine.target import Target, detect_target, target_elsewhere
from rocm_attn.machine.tuning_file import TuningFile, as_json
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_attn.selection.arithmetic import code_digest
from rocm_attn.selection.kv_formats import KVFormat
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.machine import UNKNOWN_COMMIT, commit, version_of
from rocm_lab.tune.candidates import candidates
from rocm_lab.tune.jobs import SHAPES, TuneJob, jobs_of, shapes_named
from rocm_lab.tune.journal import Journal
from rocm_lab.tune.search import TIMED, Bench, FasterTiles, Search, Tried, row_of, what_became

# Length of a sample. It decides how often a graph is replayed.
_SAMPLE_US = 2000.0
_GEOMETRY = re.compile(r"(\d+)x(\d+)x(\d+)")


def run(options: argparse.Namespace) -> None:
    """Searches for options.config and prints the findings; with options.dry_run, prints what would be tried."""
    if options.dry_run:
        target = target_elsewhere(options.arch or "gfx942")
        problems = problems_of(options, target)
        jobs, left_out = jobs_of(problems, target, _shapes(options))
        _print_candidates(jobs, left_out, target, options.json)
        return
    if options.arch is not None:
        raise BadSetting("--arch needs --dry-run, because times are measured on this machine's GPU")
    device = device_named(options.device)
    target = detect_target(device)
    if not target.is_gpu:
        raise BadSetting("there is no GPU to measure on; --dry-run lists the candidates without one")
    if target.releases.triton == UNKNOWN:
        raise BadSetting("the installed Triton's release is not known, and a row is for one release; install triton")
    # Imported here, because it captures graphs of a GPU.
    from rocm_lab.bench.clocks import clock_of
    from rocm_lab.tune.ahead import CompiledAhead
    from rocm_lab.tune.bench import JobSteps, LayerBench, edges_of

    steps = JobSteps(edges_of)
    workers = options.jobs or max(1, len(os.sched_getaffinity(0)) - 1)
    with torch.cuda.device(device):
        ahead = CompiledAhead(LayerBench(device, target, clock_of(device, _SAMPLE_US), steps), target, workers, steps)
        try:
            tune(options, target, torch.cuda.get_device_name(device), ahead)
        finally:
            ahead.close()


def tune(options: argparse.Namespace, target: Target, device: str, bench: Bench) -> None:
    """Searches on a bench. device: its name"""
    place = output_place(options.output)
    file = _rows_at(place)
    problems = problems_of(options, target)
    jobs, left_out = jobs_of(problems, target, _shapes(options))
    say(*left_out, *_not_served(problems, target, options.provider, jobs))
    facts = facts_of(target, device)
    ends = time.monotonic() + options.seconds
    journal = Journal(place.with_name(place.name + ".trials"), facts)
    run = TuneRun(file, place, facts, journal)
    search = Search(bench, target, journal, lambda: ends - time.monotonic(), run.keep, run.kept)
    try:
        with sigterm_interrupts():
            for tried in search.run(jobs):
                run.took(tried)
    finally:
        journal.close()
        run.report(options.json, was_enough=time.monotonic() < ends)


class TuneRun:
    """The findings of a search so far, and the file that they are kept in."""

    def __init__(self, file: TuningFile, place: Path, facts: dict[str, str], journal: Journal) -> None:
        self._file, self._place, self._facts, self._journal = file, place, facts, journal
        self._found: dict[str, MeasuredTileChoice] = {}
        self._tried: list[Tried] = []

    def kept(self, job: TuneJob) -> MeasuredTileChoice | None:
        """The row that an earlier search kept for the job, at the same shapes and with the same software, or None."""
        for choice in self._file.rows:
            is_same = all(str(getattr(choice.measured, name)) == fact for name, fact in self._facts.items())
            shapes = tuple(times.shape for times in choice.measured.shapes)
            if (
                is_same
                and choice.table in job.table.rivals
                and choice == job.choice(choice.tiles, choice.measured)
                and shapes == tuple(map(str, job.shapes))
            ):
                return choice
        return None

    def keep(self, job: TuneJob, found: FasterTiles) -> None:
        """Writes a row into the file. Raises BadSetting."""
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        choice = row_of(job, found, self._facts, date)
        with self._journal.alone():  # searches on other GPUs have written rows since it was read
            self._file = _rows_at(self._place).with_choice(choice)
            self._file.write(self._place)
        # Rows of other kernels that this row replaces are not reported.
        self._found = {name: old for name, old in self._found.items() if old in self._file.rows} | {str(job): choice}

    def took(self, tried: Tried) -> None:
        """Reports the trial of a candidate."""
        if not self._tried or self._tried[-1].job != tried.job:
            say(str(tried.job))
        again = " (from an earlier search)" if tried.was_known else ""
        say(f"  {tried.number} of {tried.of}: {tried.candidate}: {what_became(tried.trial)}{again}")
        self._tried.append(tried)

    def report(self, in_json: bool, *, was_enough: bool) -> None:
        """Prints the findings on stdout."""
        failed = [tried for tried in self._tried if tried.trial.outcome != TIMED]
        if in_json:
            rows = [as_json(choice) for choice in self._found.values()]
            not_timed = [
                {"job": str(each.job), "candidate": str(each.candidate), "why": what_became(each.trial)}
                for each in failed
            ]
            said = {"file": str(self._place), "tried": len(self._tried), "not_timed": not_timed, "rows": rows}
            print(json.dumps({**self._facts, **said, "finished": was_enough}, indent=2))
            return
        for job, choice in self._found.items():
            print(f"{job}\n  {choice.tiles}\n  {choice.origin()}")
        spilling = sum(bool(each.trial.spilled) for each in self._tried)
        print(
            f"{len(self._tried)} candidates, {len(failed)} of them without a time, {spilling} spill; "
            f"{len(self._found)} rows written to {self._place}"
        )
        if not was_enough:
            print("time was up before all were tried; run the same command again to continue")


def _rows_at(place: Path) -> TuningFile:
    """The rows of a file, none if there is no file. Raises BadSetting."""
    return TuningFile.read(place) if place.exists() else TuningFile()


def problems_of(options: argparse.Namespace, target: Target) -> tuple[Problem, ...]:
    """The layers of options.config, or of one geometry. Raises BadModel, BadSetting, Unsupported."""
    dtype = getattr(torch, options.dtype)
    kv = KVFormat.named(options.kv_dtype, options.kv_scales, target)
    named = _GEOMETRY.fullmatch(options.config)
    if named is not None:
        heads, kv_heads, dim = map(int, named.groups())
        if options.tp != 1:
            raise BadSetting(f"--tp is {options.tp} and {options.config} are the heads of one rank; leave --tp out")
        over: Sequence[Problem] = (
            Problem(heads, kv_heads, dim, dtype, 1, kv_encoding=kv.encoding, kv_scales=kv.scales),
        )
    else:
        model = described_model(options.config, ", or query heads x KV heads x head dim, as in 32x8x128")
        geometry = model.geometry.without_idle_windows(model.max_kv_len(options.max_kv_len)).on_one_of(options.tp)
        over = geometry.problems(dtype=dtype, page_size=geometry.least_page_size, kv=kv)
    pages = page_choice(options, over, lambda problem: select(problem, target, options.provider))
    return tuple(dict.fromkeys(pages.problems(over)))


def output_place(named: str | None) -> Path:
    """The file of --output, else that of the setting, else the one in the cache. Raises BadSetting."""
    if named is not None:
        return Path(os.path.expanduser(named))
    if settings().tuning.lower() == OFF:
        raise BadSetting(f"{TUNING} is {OFF}, so no runtime would read the rows; name a file with --output")
    return place_of(settings().tuning) or default_place()


def facts_of(target: Target, device: str) -> dict[str, str]:
    """The facts that a time depends on in addition to tiles and shapes, with the names of Provenance."""
    of_code = commit()
    if not of_code.isalnum() or of_code == UNKNOWN_COMMIT:  # it names no code: files differ, or are those of a wheel
        of_code = f"{of_code} {code_digest()[:12]}"
    return {
        "device": device,
        "arch": target.arch,
        "compute_units": str(target.compute_units),
        "triton": triton_version(),
        "torch": str(torch.__version__),
        "rocm": torch.version.hip or f"CUDA {torch.version.cuda}",
        "software": version_of("rocm-attn"),
        "commit": of_code,
    }


def _shapes(options: argparse.Namespace) -> Sequence[BatchSpec]:
    return SHAPES if options.shapes is None else shapes_named(options.shapes)


def _not_served(problems: Sequence[Problem], target: Target, provider: str, jobs: Sequence[TuneJob]) -> list[str]:
    """Sentences for steps whose kernels are not Triton's with this provider; their rows would serve with another."""
    said = []
    for problem in problems:
        kernels = select(problem, target, provider).kernels
        for kind in dict.fromkeys(job.kind for job in jobs if job.problem == problem):
            if kernels[kind].entry.provider != "triton":
                name = kernels[kind].entry.name
                said.append(f"{kind.value} steps run on {name} with provider {provider}, and rows are for triton")
    return said


def _print_candidates(jobs: Sequence[TuneJob], left_out: Sequence[str], target: Target, in_json: bool) -> None:
    listed = [(job, candidates(job, target)) for job in jobs]
    if in_json:
        said = [
            {
                "job": str(job),
                "table": job.table.value,
                "in_use": asdict(job.in_use),
                "row": asdict(job.tiles),
                "candidates": [asdict(each.tiles) for each in found],
            }
            for job, found in listed
        ]
        print(json.dumps({"arch": target.arch, "jobs": said, "left_out": list(left_out)}, indent=2))
        return
    for job, found in listed:
        print(f"{job}\n  in use: {job.in_use}")
        print("\n".join(f"  {number}: {each}" for number, each in enumerate(found, 1)))
    print("\n".join([*left_out, f"{sum(len(found) for _, found in listed)} candidates on {target.arch}"]))

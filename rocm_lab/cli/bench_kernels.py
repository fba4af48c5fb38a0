"""`rocm-attn bench kernels`: runs one layer of a step by each provider, checks it and then times it."""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rocm_attn.cli.arguments import described_model, device_named, kv_encodings
from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.cli.streams import say
from rocm_attn.cli.torch_failures import first_line, memory_failure
from rocm_attn.errors import BadSetting, RocmAttnError
from rocm_attn.machine.target import detect_target
from rocm_attn.machine.whole_files import require_place
from rocm_attn.problem import Problem
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.ceilings import measured_ceilings
from rocm_lab.bench.choices import HOST, RANDOM
from rocm_lab.bench.clocks import clock_of
from rocm_lab.bench.contestants import contestants
from rocm_lab.bench.energy import meter_of
from rocm_lab.bench.host_time import HostOptions, host_rows
from rocm_lab.bench.kernels import OK, ContestantResult, KernelOptions, Race, compile_ahead
from rocm_lab.bench.layers import NAMED, LayerSizes
from rocm_lab.bench.random_cases import COUNT, random_cases
from rocm_lab.bench.request_trace import read_step
from rocm_lab.bench.result_file import KERNELS, deliver, head, kernels_as_json, lines_of
from rocm_lab.bench.suites import SuiteCase, suite
from rocm_lab.cli.bench_parser import LAYER_OPTIONS

# A CPU takes milliseconds for work that takes a GPU microseconds.
_ROUND_US_ON_CPU = 20_000.0
_MOST_PROCESSES = 16


class WrongResults(RocmAttnError):
    """A provider gave a wrong result, or none."""


def run(options: argparse.Namespace) -> None:
    """Prints and writes the measurements, those so far after an interrupt. Raises WrongResults then, or BadSetting."""
    device = device_named(options.device)
    if options.out:
        require_place(Path(options.out), "--out")
    if HOST in (options.suite or ()):
        _run_host(options, device)
        return
    cases = list(_cases(options, device))
    names = options.providers or _providers_of(device)
    race_of = contestants(names, options.fa3)
    usual = KernelOptions()
    kernel_options = KernelOptions(
        options.rounds or usual.rounds,
        options.round_us or (usual.round_us if device.type == "cuda" else _ROUND_US_ON_CPU),
        options.seed,
        options.energy_seconds,
    )
    if device.type == "cuda":
        processes = min(_MOST_PROCESSES, os.cpu_count() or 1) if options.processes is None else options.processes
        say(f"compiling the kernels of {len(cases)} cases in {processes} processes")
        compile_ahead(cases, race_of, device, processes)
    meter = meter_of(device)
    if options.energy_seconds and meter.why_not:
        say(meter.why_not)
    ceilings = measured_ceilings(device, cases[0].problem.dtype, clock_of(device, kernel_options.round_us))
    say(f"copies {ceilings.copied_per_s / 1e9:.0f} GB/s, reads {ceilings.read_per_s / 1e9:.0f} GB/s, "
        f"multiplies {ceilings.flops_per_s / 1e12:.1f} TFLOP/s")  # fmt: skip
    race = Race(race_of, device, ceilings, kernel_options, meter)
    rows: list[ContestantResult] = []
    failure: RuntimeError | MemoryError | KeyboardInterrupt | None = None
    try:
        with sigterm_interrupts():
            for found in race.rows(_begun(cases, options.max_seconds)):
                rows += found
                if not options.json:
                    print("\n".join(lines_of(found)), flush=True)
    # Earlier results are written after a fault of the device too, on which nothing runs then.
    except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
        failure = error
    if rows:  # no result takes the place of an earlier run's
        result = kernels_as_json(rows, device, ceilings, kernel_options, meter.why_not or meter.source)
        deliver(result, options.out, in_json=options.json)
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if failure is not None:
        at = cases[len(dict.fromkeys(row.case for row in rows))]
        what = "memory ran out" if memory_failure(failure) else "the device failed"
        raise WrongResults(f"{what} at {at.name}, and the cases from there on are not measured: {first_line(failure)}")
    _raise_for_wrong(rows)


def _run_host(options: argparse.Namespace, device: torch.device) -> None:
    """Runs the suite of the host, which times other things than kernels. Raises WrongResults, BadSetting."""
    given = _of_no_suite(options)
    if options.suite != [HOST] or given:
        raise BadSetting(f"--suite host is measured alone; leave out {', '.join(given or ['other suites'])}")
    usual = HostOptions() if device.type == "cuda" else HostOptions(num_layers=4, num_seqs=(1, 8))
    host_options = replace(usual, rounds=options.rounds or usual.rounds)
    providers = options.providers or (("triton",) if device.type == "cuda" else ("torch",))
    rows: list[dict[str, Any]] = []
    try:
        with sigterm_interrupts():
            for row in host_rows(providers, device, host_options):
                rows.append(row)
                if not options.json:
                    found = f"{row['us']:.1f} us" if row["status"] == OK else f"WRONG: {row['reason']}"
                    print(f"{row['case']}, {row['batch']}, {row['provider']}: {found}", flush=True)
    finally:  # earlier results are kept after an error or Ctrl-C
        if rows:
            _write_host(options, device, host_options, rows)
    bad = [f"{row['provider']}, {row['case']}: {row['reason']}" for row in rows if row["status"] != OK]
    if bad:
        raise WrongResults(f"{bad[0]}; wrong results have no time")


def _write_host(
    options: argparse.Namespace, device: torch.device, host_options: HostOptions, rows: list[dict[str, Any]]
) -> None:
    arch = detect_target(device).arch
    result = {**head(KERNELS, device), "arch": arch, "options": asdict(host_options), "rows": rows}
    deliver(result, options.out, in_json=options.json)


def _begun(cases: Sequence[SuiteCase], max_seconds: float) -> Iterator[SuiteCase]:
    """Yields the cases until max_seconds are over."""
    begin = time.monotonic()
    for number, case in enumerate(cases):
        if time.monotonic() - begin > max_seconds:
            say(f"{len(cases) - number} of {len(cases)} cases were not begun within {max_seconds:g} s")
            return
        yield case


def _raise_for_wrong(rows: Sequence[ContestantResult]) -> None:
    bad = [f"{row.provider} on {row.case.name}: {row.reason}" for row in rows if row.is_bad]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise WrongResults(f"{bad[0]}{more}; wrong results were not timed")
    if not rows:
        raise WrongResults("no case was begun, and nothing is written; give more seconds as --max-seconds")
    if not any(row.samples.us for row in rows):
        reasons = "; ".join(dict.fromkeys(f"{row.provider}: {row.reason}" for row in rows))
        raise WrongResults(f"no provider serves any of the cases: {reasons}")


def _providers_of(device: torch.device) -> tuple[str, ...]:
    """The providers that are measured if none is named."""
    if device.type != "cuda":
        return ("torch", "sdpa")
    own = ("triton", "triton+deterministic")
    if torch.version.hip is not None:
        return (*own, "aiter", "vllm-triton", "sdpa")
    return (*own, "fa3", "flashinfer", "vllm-triton", "sdpa")


def _cases(options: argparse.Namespace, device: torch.device) -> Iterator[SuiteCase]:
    """Yields the cases of the options. Raises BadSetting, BadProblem, BadModel."""
    if options.tp > 1 and not options.config:
        raise BadSetting("--tp divides the heads of --config; give it, or the heads of one rank as --heads")
    if (options.head_dim or options.v_head_dim) and not options.heads:
        raise BadSetting("--head-dim and --v-head-dim are those of --heads; give it too")
    if options.suite:
        if given := _of_no_suite(options):
            raise BadSetting(f"--suite has its own layers and batches; leave out {', '.join(given)}")
        for name in options.suite:
            yield from random_cases(COUNT, options.seed) if name == RANDOM else suite(name)
        return
    if not options.batch:
        raise BadSetting("nothing to measure: give --batch, as in --batch 64d4k, or --suite")
    for problem in dict.fromkeys(_problems(options)):
        for word in options.batch:
            batch = read_step(word[1:]) if word.startswith("@") else BatchSpec.parse(word)
            step = f"requests of {word[1:]}" if word.startswith("@") else ""
            yield SuiteCase(problem, batch, step=step)


def _of_no_suite(options: argparse.Namespace) -> list[str]:
    """The options of layers and batches that were given another value than they have without."""
    values = {"--batch": options.batch}
    for each in LAYER_OPTIONS:
        (flag,) = each.names
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        values[flag] = None if value == each.arguments.get("default") else value
    return [flag for flag, value in values.items() if value]


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    dtype = getattr(torch, options.dtype)
    for page_size in options.page_sizes:
        for encoding, scales in kv_encodings(options.kv_encodings):
            for problem in _layers(options, dtype, page_size):
                changed = replace(problem, kv_encoding=encoding, kv_scales=scales)
                if options.window is not None:
                    changed = replace(changed, window_left=options.window - 1)
                if options.soft_cap:
                    changed = replace(changed, logits_soft_cap=options.soft_cap)
                yield replace(changed, has_sinks=changed.has_sinks or options.sinks)


def _layers(options: argparse.Namespace, dtype: torch.dtype, page_size: int) -> Iterator[Problem]:
    if options.config:
        geometry = described_model(options.config).geometry.on_one_of(options.tp)
        yield from dict.fromkeys(geometry.problems(dtype=dtype, page_size=page_size))
    if options.heads:
        num_q_heads, num_kv_heads = options.heads
        head_dim = options.head_dim or 128
        v_head_dim = options.v_head_dim or head_dim
        yield LayerSizes(num_q_heads, num_kv_heads, head_dim, v_head_dim).problem(dtype, page_size)
    names = options.layer or ([] if options.config or options.heads else ["llama-8b"])
    for name in names:
        yield NAMED[name].problem(dtype, page_size)

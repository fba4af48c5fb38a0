"""`rocm-attn bench flashinfer`: definitions and workloads of flashinfer-bench, run by this package."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rocm_attn.cli.arguments import device_named
from rocm_attn.errors import BadSetting
from rocm_lab.bench.flashinfer_run import WorkloadRun
from rocm_lab.bench.flashinfer_schema import Definition, Trace, read_definition, read_solution, read_traces
from rocm_lab.bench.flashinfer_solution import require_runs, solution_of
from rocm_lab.cli.bench_kernels import WrongResults

_PASSED = "PASSED"


def run(options: argparse.Namespace) -> None:
    """Prints and writes the results of the workloads. Raises WrongResults, BadSetting, Unsupported."""
    definition = read_definition(Path(options.definition))
    workloads = _workloads(options, definition)
    solution = solution_of(definition, options.provider)
    if options.solution:
        solution = read_solution(Path(options.solution))
        require_runs(solution, definition)
    # The layout of the public data set: ROOT/workloads/OP_TYPE/NAME.jsonl, with paths from ROOT.
    root = Path(options.root) if options.root else Path(options.workloads).resolve().parent.parent.parent
    runner = WorkloadRun(device_named(options.device), root, options.run_reference)
    traces = []
    for each in workloads:
        trace = runner.trace(definition, each.workload, solution)
        traces.append(trace)
        if not options.json:
            print(_line(trace), flush=True)
    _write(options.solution_out, json.dumps(solution.as_json(), indent=2) + "\n")
    _write(options.traces_out, "".join(json.dumps(trace.as_json()) + "\n" for trace in traces))
    if options.json:
        print(json.dumps([trace.as_json() for trace in traces], indent=1))
    bad = [trace for trace in traces if _status(trace) != _PASSED]
    if bad:
        raise WrongResults(f"{len(bad)} of {len(traces)} workloads did not pass; the first: {_line(bad[0])}")


def _workloads(options: argparse.Namespace, definition: Definition) -> Sequence[Trace]:
    found = [trace for trace in read_traces(Path(options.workloads)) if trace.definition == definition.name]
    if not found:
        raise BadSetting(f"{options.workloads} has no workload of {definition.name}; give the file of that name")
    return found[: options.requests] if options.requests else found


def _status(trace: Trace) -> str:
    assert trace.evaluation is not None, "it ran"
    return str(trace.evaluation["status"])


def _line(trace: Trace) -> str:
    evaluation = trace.evaluation or {}
    axes = ", ".join(f"{name} {size}" for name, size in trace.workload.axes.items())
    status = f"{_status(trace)} {trace.workload.uuid}: {axes}"
    if evaluation["performance"]:
        performance = evaluation["performance"]
        reference = performance["reference_latency_ms"]
        times = f", the reference {reference:.3f} ms" if reference else ""
        return f"{status}: {performance['latency_ms']:.3f} ms{times}"
    return f"{status} {evaluation['log']}".rstrip()


def _write(name: str, text: str) -> None:
    if not name:
        return
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise BadSetting(f"{name} cannot be written ({error.strerror}); choose another file") from error

"""Code shared by `rocm-attn bench serve` and `bench runner`: the trace, the load, and the output."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rocm_attn.errors import RocmAttnError
from rocm_lab.bench.load import LoadOptions, ServingResult
from rocm_lab.bench.request_trace import RequestTrace, read_trace
from rocm_lab.bench.result_file import SERVING, as_text, head, shareable, write_json


class RequestsLost(RocmAttnError):
    """Requests of a trace failed."""


def trace_of(options: argparse.Namespace) -> RequestTrace:
    """The trace of --trace, --requests and --speed. Raises BadSetting."""
    trace = read_trace(Path(options.trace))
    if options.requests is not None:
        trace = trace.first(options.requests)
    return trace.faster(float("inf") if options.at_once else options.speed)


def load_options(options: argparse.Namespace, vocabulary: int, processes: int = 1) -> LoadOptions:
    """The options for sending the trace. Raises BadSetting."""
    return LoadOptions(options.concurrency, vocabulary, options.seed, options.max_seconds, processes)


def show(options: argparse.Namespace, result: ServingResult, device: torch.device, target: str, energy: str) -> None:
    """Prints and writes the results. Raises RequestsLost."""
    found = {
        **head(SERVING, device),
        "target": shareable(target),
        "trace": Path(options.trace).name,
        "energy": energy,
        "rows": [result.as_json()],
    }
    if options.out:
        write_json(Path(options.out), found)
    print(as_text(found) if options.json else "\n".join(result.lines()))
    if result.num_failed:
        reason = next(iter(result.failures))
        raise RequestsLost(f"{result.num_failed} of {result.requests} requests failed; first reason: {reason}")

"""Code shared by `rocm-attn bench serve` and `bench runner`: the trace, the load, and the output."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

from rocm_attn.errors import RocmAttnError
from rocm_lab.bench.load import LoadOptions, ServingResult
from rocm_lab.bench.plots import draw_serving
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


def show(
    options: argparse.Namespace, results: Mapping[str, ServingResult], device: torch.device, energy: Mapping[str, str]
) -> None:
    """Prints, writes and draws the results. Raises RequestsLost, BadSetting.

    energy: the counter at each target, or why there is none
    """
    rows = [
        {"target": shareable(target), "energy": energy[target], **result.as_json()}
        for target, result in results.items()
    ]
    found = {**head(SERVING, device), "trace": Path(options.trace).name, "rows": rows}
    if options.out:
        write_json(Path(options.out), found)
    if options.picture:
        draw_serving(rows, found["machine"], Path(options.picture))
    if options.json:
        print(as_text(found))
    else:
        for row, result in zip(rows, results.values(), strict=True):
            print("\n".join([f"{row['target']}:", *(f"  {line}" for line in result.lines())]))
    for target, result in results.items():
        if result.num_failed:
            reason = next(iter(result.failures))
            raise RequestsLost(
                f"{shareable(target)}: {result.num_failed} of {result.requests} requests failed; first reason: {reason}"
            )

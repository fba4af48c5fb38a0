"""`rocm-attn bench serve`: a trace of requests to any server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import os

import torch

from rocm_attn.errors import BadSetting
from rocm_lab.bench.energy import EnergyMeter, meter_of
from rocm_lab.bench.openai_load import run_load
from rocm_lab.cli.bench_serving import load_options, show, trace_of

KEY_VARIABLE = "OPENAI_API_KEY"


def run(options: argparse.Namespace) -> None:
    """Prints the results. Raises RequestsLost, BadSetting."""
    url = options.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise BadSetting(f"--url is {options.url!r}; give it in the form http://127.0.0.1:8000")
    trace, how = trace_of(options), load_options(options, options.vocabulary, options.load_processes)
    # The server runs on this machine only if its name says so.
    local = any(name in url for name in ("//127.", "//localhost", "//[::1]"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meter = meter_of(device) if local else EnergyMeter(lambda: float("nan"), "", "the server is on another machine")
    key = os.environ.get(KEY_VARIABLE, "")
    result = asyncio.run(run_load(url, options.model, key, trace, how, meter))
    show(options, result, device, url, meter.why_not or meter.source)

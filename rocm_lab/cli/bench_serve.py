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
    """Prints the results, one server after the other. Raises RequestsLost, BadSetting."""
    servers = dict(map(_named, options.url))
    if len(servers) < len(options.url):
        raise BadSetting("two --url have one name; give each its own, as in vllm=http://127.0.0.1:8000")
    trace, how = trace_of(options), load_options(options, options.vocabulary, options.load_processes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key, results, energy = os.environ.get(KEY_VARIABLE, ""), {}, {}
    for name, url in servers.items():
        # The server runs on this machine only if its name says so.
        local = any(place in url for place in ("//127.", "//localhost", "//[::1]"))
        meter = meter_of(device) if local else EnergyMeter(lambda: float("nan"), "", "the server is on another machine")
        results[name] = asyncio.run(run_load(url, options.model, key, trace, how, meter))
        energy[name] = meter.why_not or meter.source
    show(options, results, device, energy)


def _named(word: str) -> tuple[str, str]:
    """Returns a server's name and its URL. Raises BadSetting."""
    name, _, url = word.rpartition("=") if "://" not in word.partition("=")[0] else ("", "", word)
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise BadSetting(f"--url is {word!r}; give it in the form http://127.0.0.1:8000, or NAME=http://127.0.0.1:8000")
    return name or url, url

"""`rocm-attn bench serve`: a trace of requests to any server that speaks OpenAI's API."""

import argparse
import asyncio
import importlib
import os
import signal
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import torch

from rocm_attn.cli.signals import signals_to
from rocm_attn.errors import BadSetting, RocmAttnError
from rocm_attn.machine.whole_files import require_place
from rocm_lab.bench.energy import EnergyMeter, meter_of
from rocm_lab.bench.load import LoadOptions, ServingResult
from rocm_lab.bench.openai_load import run_load
from rocm_lab.bench.plots import draw_serving
from rocm_lab.bench.request_trace import read_trace
from rocm_lab.bench.result_file import SERVING, deliver, head, shareable

KEY_VARIABLE = "OPENAI_API_KEY"


class RequestsLost(RocmAttnError):
    """Requests of a trace failed."""


def run(options: argparse.Namespace) -> None:
    """Prints the results, one server after the other. Raises RequestsLost, BadSetting."""
    servers = dict(map(_named, options.url))
    if len(servers) < len(options.url):
        raise BadSetting("two --url have one name; give each its own, as in vllm=http://127.0.0.1:8000")
    read_or_written = {Path(options.trace).resolve(): "--trace"}
    for flag, place in {"--out": options.out, "--picture": options.picture}.items():
        if place:
            require_place(Path(place), flag)
            if (other := read_or_written.setdefault(Path(place).resolve(), flag)) != flag:
                raise BadSetting(f"{flag} would overwrite the file of {other}, {place}; name another file")
    if options.picture:
        importlib.import_module("matplotlib")  # a picture is drawn last, and whether it can be is known now
        if Path(options.picture).suffix != ".png":
            raise BadSetting(f"--picture is {options.picture}; pictures are PNG, so name a file that ends in .png")
    trace = read_trace(Path(options.trace))
    if options.requests is not None:
        trace = trace.first(options.requests)
    trace = trace.faster(float("inf") if options.at_once else options.speed)
    how = LoadOptions(
        options.concurrency, options.vocabulary, options.seed, options.max_seconds, options.load_processes
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key, energy = os.environ.get(KEY_VARIABLE, "").strip(), {}
    if not (key.isascii() and key.isprintable()):
        raise BadSetting(f"{KEY_VARIABLE} holds a character that no header may have; give the key alone, or unset it")
    results: dict[str, ServingResult] = {}
    try:
        for name, url in servers.items():
            # The server runs on this machine only if its name says so.
            local = any(place in url for place in ("//127.", "//localhost", "//[::1]"))
            elsewhere = EnergyMeter(lambda: float("nan"), "", "the server is on another machine")
            meter = meter_of(device) if local else elsewhere
            energy[name] = meter.why_not or meter.source
            with signals_to(_interrupt, signal.SIGINT, signal.SIGTERM):
                asyncio.run(_keep(results, name, run_load(url, options.model, key, trace, how, meter)))
    finally:  # what came so far is kept at Ctrl-C, and earlier servers' results if a later server is not there
        if results:
            _show(options, results, device, energy)
    _require_answers(results)


async def _keep(results: dict[str, ServingResult], name: str, load: Awaitable[ServingResult]) -> None:
    """Keeps a server's result, also that of a load which asyncio.run cancels because of an interrupt."""
    results[name] = await load


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt. In place of Python's own handler of SIGINT, asyncio.run would put another one."""
    raise KeyboardInterrupt


def _named(word: str) -> tuple[str, str]:
    """Returns a server's name and its URL. Raises BadSetting."""
    name, _, url = word.rpartition("=") if "://" not in word.partition("=")[0] else ("", "", word)
    url = url.rstrip("/").removesuffix("/v1")
    try:
        place = urlsplit(url)
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # of a port above 65535, or an open bracket
        is_url = False
    if not is_url:
        raise BadSetting(f"--url is {word!r}; give it in the form http://127.0.0.1:8000, or NAME=http://127.0.0.1:8000")
    return name or url, url


def _show(
    options: argparse.Namespace, results: Mapping[str, ServingResult], device: torch.device, energy: Mapping[str, str]
) -> None:
    """Prints, writes and draws the results. Raises BadSetting.

    energy: the counter at each target, or why there is none
    """
    rows = [
        {"target": shareable(target), "energy": energy[target], **result.as_json()}
        for target, result in results.items()
    ]
    found = {**head(SERVING, device), "trace": Path(options.trace).name, "rows": rows}
    if not options.json:
        for row, result in zip(rows, results.values(), strict=True):
            print("\n".join([f"{row['target']}:", *(f"  {line}" for line in result.lines())]))
    deliver(found, options.out, in_json=options.json)
    if options.picture:
        draw_serving(rows, found["machine"], Path(options.picture))


def _require_answers(results: Mapping[str, ServingResult]) -> None:
    """Raises RequestsLost if requests failed."""
    for target, result in results.items():
        if result.num_failed:
            reason = next(iter(result.failures))
            raise RequestsLost(
                f"{shareable(target)}: {result.num_failed} of {result.requests} requests failed; first reason: {reason}"
            )

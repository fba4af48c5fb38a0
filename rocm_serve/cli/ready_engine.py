"""The engine of `rocm-attn serve`, made in its own process, which imports torch; the server's process does not."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import torch

from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.streams import say
from rocm_attn.errors import BadRequest, BadSetting
from rocm_attn.watch.flight_recorder import FlightRecorder, dump_on_signal
from rocm_serve.cli.engine_start import EngineStart
from rocm_serve.engine import Engine
from rocm_serve.models.loading import default_dtype, load_model
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import ONE_RANK
from rocm_serve.report import Report


@contextmanager
def ready_engine(start: EngineStart) -> Iterator[Engine | RankedEngine]:
    """Yields an engine that has its graphs. Raises RocmAttnError."""
    with loaded_engine(start) as engine:
        _make_ready(engine, device_named(start.device).type)
        yield engine


@contextmanager
def loaded_engine(start: EngineStart) -> Iterator[Engine | RankedEngine]:
    """Yields an engine whose weights were read, and says on stderr that they are. Raises RocmAttnError."""
    device = device_named(start.device)
    if start.num_ranks > 1 and device.index is not None:
        raise BadSetting(
            f"--device is {device} and --tp {start.num_ranks}; ranks use the first GPUs, so give --device cuda"
        )
    dtype = dtype_of(start.dtype, start.model, device)
    on = f"{device}" if start.num_ranks == 1 else f"{start.num_ranks} ranks of {device.type}"
    say(f"loading {start.name} on {on} in {str(dtype).removeprefix('torch.')}")
    load = partial(load_model, start.model, dtype=dtype)
    if start.num_ranks == 1:
        engine = Engine(load(device=device, ranks=ONE_RANK), start.options)
        if isinstance(engine.flight, FlightRecorder):
            dump_on_signal(engine.flight)
        yield engine
        return
    with RankedEngine(load, start.options, num_ranks=start.num_ranks, device_type=device.type) as ranked:
        if start.options.flight_record is not None:
            signal.signal(signal.SIGUSR1, _pass_on)
        yield ranked


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Passes a signal on to the ranks, each of which writes its own flight record."""
    for rank in multiprocessing.active_children():
        if rank.pid is not None:
            os.kill(rank.pid, number)


def dtype_of(name: str | None, model: str, device: torch.device) -> torch.dtype:
    """The dtype of --dtype; if not given, default_dtype. Raises BadModel if there is no model."""
    if name is not None:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return default_dtype(model, device.type)


def _make_ready(engine: Engine | RankedEngine, device_type: str) -> None:
    """Does the work ahead that the first request would wait for."""
    with suppress(BadRequest):  # a request with a constraint gets the reason why there can be none
        engine.prepare_constraints()
    if device_type == "cuda":  # see `rocm-attn generate`
        engine.capture_all(ProgressBar(sys.stderr))
        # Its kernels are compiled here, and not while requests wait. /health/truth tells what it finds later.
        verdict = engine.probe_truth(0)
        if verdict.word == "wrong":
            say(verdict.sentence)
        engine.compile_all(ProgressBar(sys.stderr, "compiling"))
    report = engine.report()
    kernels = (f"  {line}" for line in report.kernels)
    for line in (layers_line(report), *kernels, report.memory_line(), report.start_line(), *report.steps):
        say(line)


def layers_line(report: Report) -> str:
    """The provider of kernels, and the pages that they read, in words."""
    pages = f"{' and '.join(report.pools)} of {report.page_size} tokens"
    return f"provider {report.provider} on {report.device} ({report.arch}), {report.dtype}, {pages}"

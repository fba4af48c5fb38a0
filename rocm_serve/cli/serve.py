"""`rocm-attn serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.streams import say
from rocm_attn.errors import BadModel, BadRequest, BadSetting
from rocm_attn.watch.flight_recorder import FlightRecorder, dump_on_signal
from rocm_serve.cli.generate import dtype_of
from rocm_serve.cli.options import ON_SERVE, SERVER
from rocm_serve.engine import Engine
from rocm_serve.engine_process import EngineProcess
from rocm_serve.models.loading import find_model, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.messages import ModelLoader
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import ONE_RANK
from rocm_serve.server.generation_config import defaults_from
from rocm_serve.server.keys import keys_from
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.run import bind, serve
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.traces import otlp_traces
from rocm_serve.speculation.engines import require_drafter
from rocm_serve.text.chat_template import ChatTemplate


def run(options: argparse.Namespace) -> None:
    """Serves until a signal comes. Raises RocmAttnError; EngineEnded if the engine has ended by itself."""
    settings = ServerOptions(**{name: getattr(options, name) for name in SERVER})
    keys = keys_from(settings, os.environ)
    name = settings.served_model_name or options.model
    traces = [otlp_traces(name)] if settings.traces else []
    template = _template(settings)
    with bind(settings) as bound:
        defaults = defaults_from(settings.generation_config, options.model)
        with _engine(options) as engine:
            tokenizer = engine.limits.tokenizer
            if options.flight_record is not None:
                signal.signal(signal.SIGUSR1, lambda number, _: os.kill(engine.pid, number))
            if template is not None and tokenizer is not None:
                tokenizer = tokenizer.with_template(template)
            model = ServedModel(name, tokenizer, engine.limits, settings, defaults)
            asyncio.run(serve(engine, model, keys, bound, _announce, traces))


def _template(settings: ServerOptions) -> str | None:
    """Returns the text of --chat-template, or None. Raises BadSetting for one that cannot write a conversation."""
    if settings.chat_template is None:
        return None
    try:
        source = settings.chat_template.read_text(encoding="utf-8")
        ChatTemplate(source).render([{"role": "user", "content": "?"}])
    except (OSError, UnicodeDecodeError, BadModel, BadRequest) as error:
        raise BadSetting(f"chat_template {settings.chat_template} cannot be used: {error}") from error
    return source


def _announce(line: str) -> None:
    say(f"rocm-attn serve: {line}")


def _engine(options: argparse.Namespace) -> EngineProcess:
    """Starts the engine's process, and waits until it has its graphs."""
    engine_options = EngineOptions(**{name: getattr(options, name) for name in ON_SERVE})
    require_drafter(engine_options.speculative)
    device = device_named(options.device)
    if options.tp > 1 and device.index is not None:
        raise BadSetting(f"--device is {device} and --tp {options.tp}; ranks use the first GPUs, so give --device cuda")
    model = str(find_model(options.model))
    dtype = dtype_of(options.dtype, model, device)
    on = f"{device}" if options.tp == 1 else f"{options.tp} ranks of {device.type}"
    say(f"loading {options.model} on {on} in {str(dtype).removeprefix('torch.')}")
    return EngineProcess(
        partial(ready_engine, partial(load_model, model, dtype=dtype), engine_options, device, options.tp)
    )


@contextmanager
def ready_engine(
    load: ModelLoader, options: EngineOptions, device: torch.device, num_ranks: int
) -> Iterator[Engine | RankedEngine]:
    """Yields an engine that has its graphs. Called in its process."""
    if num_ranks == 1:
        engine = Engine(load(device=device, ranks=ONE_RANK), options)
        if isinstance(engine.flight, FlightRecorder):
            dump_on_signal(engine.flight)
        _make_ready(engine, device.type)
        yield engine
        return
    with RankedEngine(load, options, num_ranks=num_ranks, device_type=device.type) as ranked:
        _make_ready(ranked, device.type)
        yield ranked


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
    say(report.start_line())
    for line in report.steps:
        say(line)

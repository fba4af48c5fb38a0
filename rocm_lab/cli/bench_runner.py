"""`rocm-attn bench runner`: a trace of requests to an engine of this process."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.streams import say
from rocm_lab.bench.energy import meter_of
from rocm_lab.bench.runner_load import run_on_engine
from rocm_lab.cli.bench_serving import load_options, show, trace_of
from rocm_serve.cli.options import ON_GENERATE
from rocm_serve.cli.ready_engine import dtype_of
from rocm_serve.engine import Engine
from rocm_serve.models.loading import load_model
from rocm_serve.models.places import find_model
from rocm_serve.options import EngineOptions


def run(options: argparse.Namespace) -> None:
    """Prints the results. Raises RequestsLost, BadSetting, BadModel, NeverFits."""
    trace = trace_of(options)
    device = device_named(options.device)
    model = str(find_model(options.model))
    dtype = dtype_of(options.dtype, model, device)
    say(f"loading {options.model} on {device} in {str(dtype).removeprefix('torch.')}")
    loaded = load_model(model, dtype=dtype, device=device)
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    chosen = {name: getattr(options, name) for name in ON_GENERATE}
    engine = Engine(loaded, EngineOptions(**chosen, max_kv_len=longest))
    if device.type == "cuda":
        engine.capture_all(ProgressBar(sys.stderr))
        engine.compile_all(ProgressBar(sys.stderr, "compiling"))
    how = load_options(options, loaded.config.vocab_size)
    meter = meter_of(device)
    result = asyncio.run(run_on_engine(engine, trace, how, meter))
    name = f"{options.model}, this process"
    show(options, {name: result}, device, {name: meter.why_not or meter.source})

"""The parts of an engine's step on a GPU: its time, its lower bound, and the kernels that run in it.

python -m rocm_lab.benchmarks.step_profile --out rocm_lab/benchmarks/results/step_profile_h200.json

An engine serves a Llama of 1.1B with random weights in bfloat16, greedily, over graphs. Each row is one load:

decode: all requests have their prompts of 512 tokens behind them, and a step brings each one token
prompt: one prompt of 8,192 tokens, in one step
mixed:  all but one request decode, and the step holds as many tokens of a long prompt as the engine's budget allows,
        2,048 at most: their number varies, so there is no lower bound

step_us:   the median time between two steps, on the wall
busy_us:   the time in which a kernel runs, of one step
host_us:   the host's time in Engine.step() less the waits for the device
floor_us:  of decode the bytes of weights and of K and V over the bandwidth that a large copy reaches in this run; of
           prompts the operations of the layers' products and of causal attention over the rate of a large product
kernels:   microseconds and launches of a step, by kernel
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from rocm_attn.models.config import ModelConfig
from rocm_lab.bench.ceilings import measured_ceilings
from rocm_lab.bench.clocks import clock_of
from rocm_lab.benchmarks.random_models import LLAMA_8B, model_of, random_model
from rocm_lab.benchmarks.round_time import prompt_of, python_us, watch
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import expected_shapes
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request

MODELS = {
    "1.1B": model_of((32, 8, 64), 2048, 8192, 32000, 16, 65536),
    "8B": dataclasses.replace(LLAMA_8B, context_len=65536),
}
PROMPT, LONG_PROMPT, MIXED_CHUNK = 512, 8192, 2048
DECODES = (1, 32, 256)
STEPS, PROFILED = 96, 16
MOST_TOKENS = 2048  # of a text: more than the steps until all requests run, and those that are measured
MOST_KERNELS = 24
ROUND_US = 2000.0  # of a round of the limits' clock


def engine_of(loaded: LoadedModel, num_seqs: int, chunk: int) -> Engine:
    """Returns an engine with all its graphs. The engine before it gives its memory back."""
    gc.collect()
    torch.cuda.empty_cache()
    options = EngineOptions(
        max_batch_size=num_seqs,
        max_kv_len=LONG_PROMPT + MOST_TOKENS,
        prefix_caching=False,
        capture_after=0,
        kv_bytes=48 << 30,
        chunk=chunk,
    )
    engine = Engine(loaded, options)
    engine.capture_all(lambda *_: None)
    return engine


def decode(loaded: LoadedModel, num_seqs: int) -> Row:
    """Returns the figures of steps in which each of num_seqs requests gets one token."""
    engine = engine_of(loaded, num_seqs, 0)
    for number in range(num_seqs):
        prompt = prompt_of(PROMPT, number, loaded.config.vocab_size)
        engine.submit(Request(prompt, MOST_TOKENS, ignore_eos=True))
    running = engine._scheduler._running
    while len(running) < num_seqs or any(each.num_new == 0 for each in running):
        engine.step()
    for _ in range(PROFILED):
        engine.step()
    tokens = sum(each.num_tokens for each in running) + num_seqs * STEPS // 2
    found = steps_of(engine, STEPS)
    assert len(running) == num_seqs, "a request ended while steps were measured"
    return {"load": "decode", "requests": num_seqs, **found, "kv_bytes": kv_bytes(engine, tokens)}


def prompts(loaded: LoadedModel) -> Row:
    """Returns the figures of steps that each hold one whole long prompt."""
    engine = engine_of(loaded, 2, 0)  # the second prompt is launched while the first one runs
    for number in range(16 + PROFILED):
        engine.submit(Request(prompt_of(LONG_PROMPT, number, loaded.config.vocab_size), 1, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return {"load": "prompt", "requests": 1, **steps_of(engine, 8), "tokens": LONG_PROMPT}


def mixed(loaded: LoadedModel, num_seqs: int) -> Row:
    """Returns the figures of steps in which requests decode and a part of a long prompt is computed."""
    engine = engine_of(loaded, num_seqs, MIXED_CHUNK)
    vocabulary = loaded.config.vocab_size
    for number in range(num_seqs - 1):
        engine.submit(Request(prompt_of(PROMPT, number, vocabulary), 1024, ignore_eos=True))
    while engine._scheduler.num_running < num_seqs - 1:
        engine.step()
    for number in range(12):
        engine.submit(Request(prompt_of(LONG_PROMPT, num_seqs + number, vocabulary), 1, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return {"load": "mixed", "requests": num_seqs, **steps_of(engine, 16)}


def kv_bytes(engine: Engine, tokens: int) -> int:
    """Returns the bytes that K and V of these tokens take."""
    pool = engine.runtime.pool
    return tokens * pool.num_bytes // (pool.num_pages * pool.page_size)


def steps_of(engine: Engine, num: int) -> Row:
    """Returns the times of some steps, and then the kernels of some more."""
    waits, _ = watch(engine)
    walls, hosts = list[float](), list[float]()
    last = time.perf_counter()
    for _ in range(num):
        waits.clear()
        before = time.perf_counter()
        engine.step()
        after = time.perf_counter()
        walls.append((after - last) * 1e6)
        hosts.append((after - before) * 1e6 - sum(us for us, _ in waits))
        last = after
    return {
        "step_us": round(statistics.median(walls), 1),
        "step_us_mean": round(statistics.mean(walls), 1),
        "host_us": round(statistics.median(hosts), 1),
        **kernels_of(engine, PROFILED),
    }


def kernels_of(engine: Engine, num: int) -> Row:
    """Returns the GPU's busy time and its kernels in one of `num` steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num):
            engine.step()
        torch.cuda.synchronize()
    us, launches, spans = Counter[str](), Counter[str](), list[tuple[int, int]]()
    for event in found.profiler.kineto_results.events():
        if event.device_type().name != "CUDA":
            continue
        us[event.name()] += event.duration_ns() / 1e3
        launches[event.name()] += 1
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return {
        "busy_us": round(busy(spans) / 1e3 / num, 1),
        "launches": round(sum(launches.values()) / num, 1),
        "kernels": [
            {"name": name[:120], "us": round(total / num, 2), "launches": round(launches[name] / num, 2)}
            for name, total in us.most_common(MOST_KERNELS)
        ],
    }


def busy(spans: list[tuple[int, int]]) -> int:
    """Returns the nanoseconds that some interval covers."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def attention_operations(config: ModelConfig, tokens: int) -> int:
    """Returns the operations of causal attention over one prompt."""
    layers = config.attention.layers
    return sum(2 * layer.num_q_heads * layer.head_dim for layer in layers) * tokens**2


def rows(loaded: LoadedModel) -> Iterator[Row]:
    """Yields the figures of each load."""
    for num_seqs in DECODES:
        yield decode(loaded, num_seqs)
    yield prompts(loaded)
    yield mixed(loaded, 32)


def main() -> None:
    """Measures all loads."""
    options = parser_of(__doc__).parse_args()
    device = torch.device("cuda")
    limits = measured_ceilings(device, torch.bfloat16, clock_of(device, ROUND_US))
    found = list[Row]()
    for model, config in MODELS.items():
        loaded = random_model(config)
        sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items() if "embed" not in name}
        for row in printed(rows(loaded)):
            if row["load"] == "decode":
                row["floor_us"] = round((2 * sum(sizes.values()) + row["kv_bytes"]) / limits.bytes_per_s * 1e6, 1)
            elif row["load"] == "prompt":
                of_layers = sum(sizes.values()) - sizes["lm_head.weight"]
                operations = 2 * of_layers * row["tokens"] + attention_operations(config, row["tokens"])
                row["floor_us"] = round(operations / limits.flops_per_s * 1e6, 1)
            if "floor_us" in row:
                row["by_floor"] = round(row["step_us"] / row["floor_us"], 2)
            found.append({"model": model, **row})
        del loaded
    write(options.out, of_machine={**dataclasses.asdict(limits), "python_loop_us": python_us()}, rows=found)


if __name__ == "__main__":
    main()

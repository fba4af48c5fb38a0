"""The parts of an engine's step on a GPU: its time, its lower bound, and the kernels that run in it.

python -m rocm_lab.benchmarks.step_profile --out rocm_lab/benchmarks/results/step_profile_h200.json

An engine serves a model with random weights in bfloat16, greedily, over graphs: Llamas of 1.1B and 8B, and eight layers
of models with experts, which take a step's time in the same proportions as all of them. One model is served in
deterministic mode too. Each row is one load:

decode: the prompts of all requests, 512 tokens each, are computed, and a step brings each request one token
prompt: one prompt of 8,192 tokens, in one step
mixed:  all but one request decode, and the step holds as many tokens of a long prompt as the engine's budget allows,
        2,048 at most: their number varies, so there is no lower bound

step_us:   the median time between two steps, on the wall
busy_us:   the time in which a kernel runs, of one step
host_us:   the host's time in Engine.step() less the waits for the device
floor_us:  StepTimes, with the bandwidth that a large read and the rate that a large product reaches in this run: of
           decode that is the bytes of weights, of K and V and of states, where a step reads the experts that its tokens
           are expected to choose; of prompts the operations of the layers' products and of causal attention
kernels:   microseconds and launches of a step, by kernel
"""

import dataclasses
import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from rocm_attn.machine.gpus import Rates
from rocm_attn.models.hf_config import config_from_json
from rocm_lab.bench.ceilings import Ceilings, measured_ceilings
from rocm_lab.bench.clocks import clock_of
from rocm_lab.benchmarks.random_models import LLAMA_8B, model_of, random_model
from rocm_lab.benchmarks.round_time import prompt_of, python_us, watch
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.step_sizes import times_of

_WITH_EXPERTS = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "eos_token_id": 2,
    "norm_topk_prob": True,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
MODELS = {
    "1.1B": model_of((32, 8, 64), 2048, 8192, 32000, 16, 65536),
    "8B": dataclasses.replace(LLAMA_8B, context_len=65536),
    "8 layers of Qwen3-30B-A3B": config_from_json(_WITH_EXPERTS | _QWEN3_MOE),
    "8 layers of Qwen3-Next-80B-A3B": config_from_json(_WITH_EXPERTS | _QWEN3_NEXT),
}
DETERMINISTIC = "1.1B"  # is also served so that a request's tokens depend on no other request
PROMPT, LONG_PROMPT, MIXED_CHUNK = 512, 8192, 2048
DECODES = (1, 32, 256)
STEPS, PROFILED = 96, 16
MOST_TOKENS = 2048  # of a text: more than the steps until all requests run, and those that are measured
MOST_KERNELS = 24
ROUND_US = 2000.0  # of a round of the limits' clock


def measured(options: EngineOptions, num_seqs: int, chunk: int) -> EngineOptions:
    """Returns the options with which steps of num_seqs requests are measured; a graph is captured at its first need."""
    return dataclasses.replace(
        options,
        max_batch_size=num_seqs,
        max_kv_len=LONG_PROMPT + MOST_TOKENS,
        prefix_caching=False,
        capture_after=0,
        kv_bytes=48 << 30,
        chunk=chunk,
    )


def engine_of(loaded: LoadedModel, options: EngineOptions, num_seqs: int, chunk: int) -> Engine:
    """Returns an engine. The one before it gives its memory back."""
    gc.collect()
    torch.cuda.empty_cache()
    return Engine(loaded, measured(options, num_seqs, chunk))


def decode(loaded: LoadedModel, options: EngineOptions, num_seqs: int) -> Row:
    """Returns the figures of steps in which each of num_seqs requests gets one token."""
    engine = engine_of(loaded, options, num_seqs, 0)
    for number in range(num_seqs):
        prompt = prompt_of(PROMPT, number, loaded.config.vocab_size)
        engine.submit(Request(prompt, MOST_TOKENS, ignore_eos=True))
    running = engine._scheduler._running
    while len(running) < num_seqs or any(each.num_new == 0 for each in running):
        engine.step()
    for _ in range(PROFILED):
        engine.step()
    tokens = sum(each.num_tokens for each in running) // num_seqs + STEPS // 2
    found = steps_of(engine, STEPS)
    assert len(running) == num_seqs, "a request ended while steps were measured"
    return {"load": "decode", "requests": num_seqs, **found, "tokens": tokens}


def prompts(loaded: LoadedModel, options: EngineOptions) -> Row:
    """Returns the figures of steps that each hold one whole long prompt."""
    engine = engine_of(loaded, options, 2, 0)  # the second prompt is launched while the first one runs
    engine.capture_all(lambda *_: None)
    for number in range(16 + PROFILED):
        engine.submit(Request(prompt_of(LONG_PROMPT, number, loaded.config.vocab_size), 1, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return {"load": "prompt", "requests": 1, **steps_of(engine, 8), "tokens": LONG_PROMPT}


def mixed(loaded: LoadedModel, options: EngineOptions, num_seqs: int) -> Row:
    """Returns the figures of steps in which requests decode and a part of a long prompt is computed."""
    engine = engine_of(loaded, options, num_seqs, MIXED_CHUNK)
    engine.capture_all(lambda *_: None)
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


def lower_bound(loaded: LoadedModel, limits: Ceilings, row: Row) -> float:
    """Returns the least seconds of a step of a row, by the rates of this run. Only a prompt's last token has logits."""
    rates = Rates(limits.bytes_per_s, limits.flops_per_s, "this run")
    times = times_of(loaded, EngineOptions(max_kv_len=LONG_PROMPT + MOST_TOKENS), rates)
    tokens: int = row["tokens"]
    if row["load"] == "decode":
        return times.decode(row["requests"], tokens)
    of_logits = 2 * loaded.config.vocab_size * loaded.config.hidden_size * (tokens - 1)
    return times.prompt(tokens) - of_logits / limits.flops_per_s


def rows(loaded: LoadedModel, options: EngineOptions) -> Iterator[Row]:
    """Yields the figures of each load."""
    for num_seqs in DECODES:
        yield decode(loaded, options, num_seqs)
    yield prompts(loaded, options)
    yield mixed(loaded, options, 32)


def main() -> None:
    """Measures all loads."""
    out = parser_of(__doc__).parse_args().out
    device = torch.device("cuda")
    limits = measured_ceilings(device, torch.bfloat16, clock_of(device, ROUND_US))
    found = list[Row]()
    for model, config in MODELS.items():
        loaded = random_model(config)
        served = {model: EngineOptions()}
        if model == DETERMINISTIC:
            served[f"{model}, deterministic"] = EngineOptions(deterministic=True)
        for name, options in served.items():
            for row in printed(rows(loaded, options)):
                if row["load"] != "mixed":
                    row["floor_us"] = round(1e6 * lower_bound(loaded, limits, row), 1)
                    row["by_floor"] = round(row["step_us"] / row["floor_us"], 2)
                found.append({"model": name, **row})
        del loaded
    write(out, of_machine={**dataclasses.asdict(limits), "python_loop_us": python_us()}, rows=found)


if __name__ == "__main__":
    main()

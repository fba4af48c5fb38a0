"""vLLM with our attention backend and with another one: tokens a second, and whether the text is the same.

python -m benchmarks.vllm_throughput --model smollm2 --dtype float32 --out benchmarks/results/vllm_h200.json

Each backend runs in a process of its own, in turn, once for each cudagraph mode: vLLM keeps one engine a process. A
process generates the workloads named below, each once to warm up. Float32 text must be the same token for token; of
two-byte dtypes the share of equal requests is written beside the speed, and is no verdict.

Where --model names a folder with config.json alone, --dummy gives it random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, version_of

OURS = "CUSTOM"
MODES = ("eager", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
# What a finished generation reports.
_RESULT = "RESULT "


@dataclass(frozen=True)
class Workload:
    """Requests that come at once. prompts: tokens of each one's prompt; new: tokens that each one generates"""

    name: str
    prompts: tuple[int, ...]
    new: tuple[int, ...]


def workloads(requests: int, longest: int, new: int) -> list[Workload]:
    """Requests of one length, and of lengths between a sixteenth of it and all of it."""
    draw = random.Random(1)
    ragged = tuple(round(longest * 2 ** draw.uniform(-4, 0)) for _ in range(requests))
    ends = tuple(round(new * 2 ** draw.uniform(-2, 0)) for _ in range(requests))
    even = Workload("even", (longest // 2,) * requests, (new,) * requests)
    return [even, Workload("ragged", ragged, ends)]


def main() -> None:
    """Run every backend and mode, compare, and write the result."""
    args = parse_args()
    if args.run:
        generate(args)
        return
    runs = [(backend, mode) for mode in args.modes for backend in (args.against, OURS)]
    found = {run: in_a_process(args, *run) for run in runs}
    rows = []
    for mode in args.modes:
        ours, theirs = found[OURS, mode], found[args.against, mode]
        for name in ours:
            pairs = list(zip(ours[name]["tokens"], theirs[name]["tokens"], strict=True))
            row = {
                "mode": mode,
                "workload": name,
                "requests": len(pairs),
                "equal": sum(a == b for a, b in pairs),
                "ours_tokens_per_s": ours[name]["tokens_per_s"],
                f"{args.against.lower()}_tokens_per_s": theirs[name]["tokens_per_s"],
                "ratio": round(ours[name]["tokens_per_s"] / theirs[name]["tokens_per_s"], 3),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    result = {
        "machine": {**describe_machine(), "vllm": version_of("vllm")},
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "against": args.against,
        "rows": rows,
    }
    Path(args.out).write_text(json.dumps(result, indent=1))
    if args.dtype == "float32" and any(row["equal"] != row["requests"] for row in rows):
        sys.exit("the text differs")


def in_a_process(args: argparse.Namespace, backend: str, mode: str) -> dict[str, Any]:
    """What a backend does in a mode, by workload: tokens_per_s, and the tokens of each request."""
    command = [sys.executable, "-m", "benchmarks.vllm_throughput", *sys.argv[1:], "--run", backend, "--modes", mode]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        errors.seek(0)
        log = errors.read()
    line = next((line for line in done.stdout.splitlines() if line.startswith(_RESULT)), None)
    said = [line for line in (done.stdout + log).splitlines() if "rocm_attn serves" in line]
    print("\n".join(said), flush=True)
    if done.returncode or line is None:
        sys.exit(f"{backend} in mode {mode} failed:\n{(done.stdout + log)[-4000:]}")
    result: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
    return result


def generate(args: argparse.Namespace) -> None:
    """In a process of its own: generate every workload twice, and print what the second time gave."""
    from vllm import LLM, SamplingParams

    from rocm_attn.integrations.vllm import register

    register()  # an installed package is registered already, and this changes nothing then
    (mode,) = args.modes
    graphs = {"enforce_eager": True} if mode == "eager" else {"compilation_config": {"cudagraph_mode": mode}}
    engine = LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        attention_backend=args.run,
        max_model_len=args.longest + args.new,
        max_num_seqs=args.requests,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **graphs,
    )
    found = {}
    for workload in workloads(args.requests, args.longest, args.new):
        prompts = prompts_of(workload, args.vocabulary)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in workload.new]
        for _ in range(2):
            begin = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        found[workload.name] = {
            "tokens_per_s": round(sum(workload.new) / seconds, 1),
            "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        }
    print(_RESULT + json.dumps(found), flush=True)


def prompts_of(workload: Workload, vocabulary: int) -> list[dict[str, list[int]]]:
    """Random tokens, the same in every process."""
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(n)]} for n in workload.prompts]


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of Hugging Face's")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--against", default="TRITON_ATTN")
    parser.add_argument("--modes", nargs="+", default=["eager", "FULL"], choices=MODES)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that a request generates at most")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the device's memory")
    parser.add_argument("--out", default="vllm_throughput.json")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()

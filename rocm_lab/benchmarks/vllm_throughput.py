"""vLLM with our attention backend and with others: tokens per second, and whether the text is the same.

python -m rocm_lab.benchmarks.vllm_throughput --model smollm2 --dtype float32 --out RESULTS/vllm_h200.json

Each backend runs in a separate process, once for each cudagraph mode, one after the other: vLLM keeps one engine per
process. A process generates the workloads named below --turns times, each of them first with a part of its requests and
a few new tokens, to warm up. tokens_per_s counts new tokens from the first prompt to the last token.
decode_tokens_per_s counts those that came after each request had its first one. Both are medians of the turns. Float32
text must be the same token for token; for two-byte dtypes the share of equal requests is reported with the speed,
without a verdict. A process that fails affects only its own mode.

Triton multiplies float32 numbers in TF32 unless a kernel specifies otherwise, and TRITON_ATTN's does not. Text of such
a model is compared with TRITON_F32_DEFAULT=ieee.

If --model names a folder with config.json alone, --dummy gives it random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_lab.bench.machine import version_of
from rocm_lab.benchmarks.script import parser_of, printed, write

OURS, AGAINST = "CUSTOM", ("TRITON_ATTN", "FLASH_ATTN")
MODES = ("eager", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_WARM_UP_TOKENS, _WARM_UP_PART = 8, 4
_VOCABULARY, _KV_BYTES = 1000, 8 << 30


@dataclass(frozen=True)
class RequestLoad:
    """Requests that come at once. prompts: tokens of each one's prompt; new: tokens that each one generates"""

    name: str
    prompts: tuple[int, ...]
    new: tuple[int, ...]


def workloads(requests: int, longest: int, new: int) -> list[RequestLoad]:
    """Requests of a quarter of the longest length, and of lengths between a sixteenth of it and all of it."""
    draw = random.Random(1)
    ragged = tuple(round(longest * 2 ** draw.uniform(-4, 0)) for _ in range(requests))
    ends = tuple(round(new * 2 ** draw.uniform(-2, 0)) for _ in range(requests))
    even = RequestLoad("even", (longest // 4,) * requests, (new,) * requests)
    return [even, RequestLoad("ragged", ragged, ends)]


def main() -> None:
    """Runs every backend and mode, compares, and writes the result."""
    args = parse_args()
    if args.run:
        generate(args)
        return
    runs = [(backend, mode) for mode in args.modes for backend in (OURS, *args.against)]
    found = {run: in_its_process(*run) for run in runs}
    rows = printed(row for mode in args.modes for other in args.against for row in compared(found, mode, other))
    write(
        args.out,
        of_machine={"vllm": version_of("vllm")},
        model=Path(args.model).name,
        dtype=args.dtype,
        compiled=not args.no_compile,
        turns=args.turns,
        rows=rows,
    )
    if failed := [" ".join(run) for run in runs if not found[run]]:
        sys.exit(f"failed: {', '.join(failed)}")
    if args.dtype == "float32" and any(row["equal"] != row["requests"] for row in rows):
        sys.exit("the text differs")


def in_its_process(backend: str, mode: str) -> dict[str, Any]:
    """Returns a backend's results of each workload, in a mode. Empty if its process fails, whose output says why."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "rocm_lab.benchmarks.vllm_throughput", *sys.argv[1:]]
        command += ["--run", backend, "--modes", mode, "--answer", str(answer)]
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Greedy tokens need no sampler of FlashInfer's, which vLLM imports on CUDA unless it is switched off.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": folder,
            "HF_HUB_OFFLINE": "1",
            "TRITON_F32_DEFAULT": "ieee",
        }
        print(backend, mode, flush=True)
        subprocess.run(command, env={**settings, **os.environ})
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {}
    return found


def compared(found: Mapping[tuple[str, str], Mapping[str, Any]], mode: str, other: str) -> list[dict[str, Any]]:
    """Returns a row for each workload of a mode that our backend and another one have generated."""
    ours, theirs = found.get((OURS, mode)), found.get((other, mode))
    if not ours or not theirs:
        return []
    rows = []
    for name in ours:
        pairs = list(zip(ours[name]["tokens"], theirs[name]["tokens"], strict=True))
        row = {"against": other, "mode": mode, "workload": name, "requests": len(pairs)}
        row["equal"] = sum(a == b for a, b in pairs)
        for speed in ("tokens_per_s", "decode_tokens_per_s"):
            row[f"ours_{speed}"], row[f"theirs_{speed}"] = ours[name][speed], theirs[name][speed]
            row[f"{speed}_ratio"] = round(ours[name][speed] / theirs[name][speed], 3)
            row[f"{speed}_of_turns"] = [ours[name][f"{speed}_of_turns"], theirs[name][f"{speed}_of_turns"]]
        rows.append(row)
    return rows


def generate(args: argparse.Namespace) -> None:
    """Runs in a separate process: makes an engine, and writes the results of the workloads."""
    from vllm import LLM

    from rocm_attn.integrations.vllm import register

    register()  # an installed package is registered already, and this changes nothing then
    (mode,) = args.modes
    compilation = {"cudagraph_mode": mode} | ({"mode": 0} if args.no_compile else {})
    graphs = {"enforce_eager": True} if mode == "eager" else {"compilation_config": compilation}
    engine = LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        attention_backend=args.run,
        max_model_len=args.longest + args.new,
        max_num_seqs=args.requests,
        # vLLM would measure the device's free memory, which other processes may change.
        kv_cache_memory_bytes=_KV_BYTES,
        gpu_memory_utilization=0.02,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **graphs,
    )
    asked = workloads(args.requests, args.longest, args.new)
    turns = [one_turn(engine, asked) for _ in range(args.turns)]
    Path(args.answer).write_text(json.dumps({name: of_turns([turn[name] for turn in turns]) for name in turns[0]}))


def one_turn(engine: Any, asked: Sequence[RequestLoad]) -> dict[str, dict[str, Any]]:
    """Returns the results of timed() for each workload."""
    found = {}
    for workload in asked:
        prompts = prompts_of(workload)
        few = prompts[::_WARM_UP_PART]
        timed(engine, few, [_WARM_UP_TOKENS] * len(few))
        found[workload.name] = timed(engine, prompts, workload.new)
    return found


def of_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a workload's medians, its slowest and fastest turn, and the tokens of the first one."""
    speeds = {name: [turn[name] for turn in turns] for name in ("tokens_per_s", "decode_tokens_per_s")}
    spread = {f"{name}_of_turns": [min(each), max(each)] for name, each in speeds.items()}
    medians = {name: round(statistics.median(each), 1) for name, each in speeds.items()}
    return {**medians, **spread, "tokens": turns[0]["tokens"]}


def timed(engine: Any, prompts: Sequence[dict[str, list[int]]], new: Sequence[int]) -> dict[str, Any]:
    """Generates new[i] tokens after prompt i, all at once: tokens_per_s, decode_tokens_per_s and tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core = engine.llm_engine
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    begin = time.perf_counter()
    for number, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
        greedy = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        core.add_request(str(number), prompt, greedy)
    all_began = begin
    came_before = 0
    while core.has_unfinished_requests():
        for each in core.step():
            tokens[each.request_id] += each.outputs[0].token_ids
        if all_began == begin and all(tokens.values()):
            all_began, came_before = time.perf_counter(), sum(map(len, tokens.values()))
    end = time.perf_counter()
    count = sum(map(len, tokens.values()))
    assert count == sum(new), (count, sum(new))
    return {
        "tokens_per_s": round(count / (end - begin), 1),
        "decode_tokens_per_s": round((count - came_before) / (end - all_began), 1),
        "tokens": list(tokens.values()),
    }


def prompts_of(workload: RequestLoad) -> list[dict[str, list[int]]]:
    """Returns random tokens, the same in every process."""
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(3, _VOCABULARY) for _ in range(n)]} for n in workload.prompts]


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a folder of Hugging Face's")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-compile", action="store_true", help="full graphs of a model as it is, without Inductor")
    parser.add_argument("--against", nargs="+", default=list(AGAINST), help="vLLM's names of other backends")
    parser.add_argument("--modes", nargs="+", default=["eager", "FULL"], choices=MODES)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that a request generates at most")
    parser.add_argument("--turns", type=int, default=1, help="how often each workload is generated")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""`rocm-attn serve` as it starts by itself: throughput, first tokens, times between tokens, and a long prompt's gap.

python -m rocm_lab.benchmarks.serving --random /tmp/llama-1b --out RESULTS/serving_h200.json
python -m rocm_lab.benchmarks.serving --model Qwen/Qwen3-8B --out RESULTS/serving_h200.json --serve=--latency=20

The script starts the server, and sends the requests of each number in --at-once at once, --turns times: prompts of 512
tokens, 128 new ones, streamed. The first turn shows what is compiled or made while users wait. Then for each number in
--streams, that many streams run, and a prompt of 32k tokens comes in, --long-turns times: a row has the usual gap
between a stream's pieces before it came, and the longest gap until it had its token, in which a machine's own delays
take part. The result has the server's own lines about its start.

--random FOLDER writes a Llama of 1.1B there first, if it is empty: 16 layers of 2048, 32/8 heads of 64, random weights.
--url measures a server that runs already. Its prefix cache finds nothing: each prompt begins with tokens of its own.
"""

import argparse
import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from rocm_attn.models.hf_config import config_from_json
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions, Quantiles, RequestRecord
from rocm_lab.bench.openai_load import OpenAITarget, first_model, run_load
from rocm_lab.bench.request_trace import RequestTrace, TracedRequest
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.models.weights import expected_shapes

PROMPT, NEW, LONG = 512, 128, 32768
_NO_METER = EnergyMeter(lambda: float("nan"), "", "not counted")
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class LongPromptGap:
    """Streams while a long prompt comes in. Milliseconds between pieces: before it, and from its request to its token.

    worst_of_usual: the longest gap over the median before
    """

    streams: int
    prompt: int
    usual_ms: float
    usual_p99_ms: float
    worst_ms: float
    worst_of_usual: float
    first_token_ms: float
    failures: tuple[str, ...]


def main() -> None:
    """Measures, and writes the result."""
    args = parse_args()
    if args.random is not None:
        write_llama(args.random)
    with server_of(args) as (url, started):
        model = first_model(url, "")
        rows = printed(measured(args, url, model))
        write(
            args.out,
            model=Path(model).name,
            prompt=args.prompt,
            new=args.new,
            serve=args.serve,
            start=started,
            rows=rows,
        )
    if failed := sum(bool(row["failures"]) for row in rows):
        sys.exit(f"requests failed in {failed} rows")


def measured(args: argparse.Namespace, url: str, model: str) -> Iterator[Row]:
    """Yields a row for each turn of each load, and for each number of streams."""
    for turn in range(args.turns):
        for seed, at_once in enumerate(args.at_once, 100 * turn):
            trace = RequestTrace((TracedRequest(0.0, args.prompt, args.new),) * at_once)
            how = LoadOptions(at_once, args.vocabulary, seed, processes=min(args.processes, at_once))
            result = asyncio.run(run_load(url, model, "", trace, how, _NO_METER))
            yield {"load": at_once, "turn": turn, **result.as_json()}
    for streams in args.streams:
        for turn in range(args.long_turns):
            gap = asyncio.run(long_prompt(OpenAITarget(url, model), streams, 7000 + 100 * turn + streams, args))
            yield {"load": "long prompt", "turn": turn, **asdict(gap)}


async def long_prompt(target: OpenAITarget, streams: int, seed: int, args: argparse.Namespace) -> LongPromptGap:
    """Runs streams, sends a long prompt once all of them have had some pieces, and waits for its first token."""
    new = args.long_new
    requests = (*(TracedRequest(0.0, args.prompt, new),) * streams, TracedRequest(0.0, args.long, 1))
    how = LoadOptions(vocabulary=args.vocabulary, seed=seed)
    *short, long = target.all_prepared(RequestTrace(requests), how)
    outcomes = [RequestRecord(time.perf_counter()) for _ in short]
    tasks = [asyncio.ensure_future(sending(outcome)) for sending, outcome in zip(short, outcomes, strict=True)]
    while not all(len(each.pieces) > args.pieces_before or each.failure for each in outcomes):
        await asyncio.sleep(0.01)
    late = RequestRecord(time.perf_counter())
    await long(late)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return gap_of(outcomes, late, args.long)


def gap_of(streams: Sequence[RequestRecord], late: RequestRecord, prompt: int) -> LongPromptGap:
    """Compares the streams' gaps before and while a prompt came in, of `prompt` tokens."""
    arrived = late.pieces[0] if late.pieces else math.inf
    # A stream's first pieces come while others have their prompts computed.
    all_began = max((each.pieces[0] for each in streams if each.pieces), default=late.sent)
    # Pieces that came together have no gap between them.
    gaps = [pair for each in streams for pair in pairwise(sorted(set(each.pieces)))]
    usual = Quantiles.of([end - start for start, end in gaps if start >= all_began and end <= late.sent])
    worst = max((end - start for start, end in gaps if end > late.sent and start < arrived), default=math.nan)
    median, _, p99 = usual.percentiles
    failures = tuple(each.failure for each in (*streams, late) if each.failure)
    usual_ms, p99_ms, worst_ms, first_ms = (1e3 * seconds for seconds in (median, p99, worst, arrived - late.sent))
    return LongPromptGap(len(streams), prompt, usual_ms, p99_ms, worst_ms, worst / median, first_ms, failures)


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yields the URL of the server, and its lines about its start. A server that was started here is ended."""
    if args.url is not None:
        yield args.url, []
        return
    model = args.model if args.random is None else str(args.random)
    command = [sys.executable, "-m", "rocm_attn.cli", "serve", "--model", model, "--port", "0", *args.serve]
    began = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", env=os.environ)
    assert server.stderr is not None
    lines: list[str] = []
    try:
        url = ""
        while not url and (line := server.stderr.readline()):
            sys.stderr.write(line)
            lines.append(line.strip().rpartition("\r")[2].replace(model, Path(model).name))
            listening = re.search(r"listening on (\S+)", line)
            url = listening.group(1) if listening else ""
        if not url:
            sys.exit(f"the server did not start: exit code {server.wait()}")
        lines.append(f"listening after {time.perf_counter() - began:.1f} s")
        # A pipe that is not read would stop the server.
        threading.Thread(target=lambda: [sys.stderr.write(each) for each in server.stderr or ()], daemon=True).start()
        yield url, lines
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def write_llama(folder: Path, **changes: Any) -> None:
    """Writes a Llama of random weights, with a tokenizer that has a word for each token. changes: to its config"""
    if (folder / "tokenizer.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    described = {**_LLAMA, **changes}
    config = config_from_json(described)
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensors[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02, generator=draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    words = {f"w{token}": token for token in range(config.vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--model", help="as of rocm-attn serve")
    served.add_argument("--random", type=Path, metavar="FOLDER", help="for a Llama of random weights")
    served.add_argument("--url", help="of a server with OpenAI's API that runs already")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="=--FLAG", help="for rocm-attn serve; repeatable"
    )
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32], help="that run while a long prompt comes")
    parser.add_argument("--turns", type=int, default=2, help="of the loads; the first one is cold")
    parser.add_argument("--long-turns", type=int, default=5, help="long prompts per number of streams")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=NEW, help="new tokens of a request")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompt")
    parser.add_argument("--long-new", type=int, default=4096, help="most new tokens of the other streams")
    parser.add_argument("--pieces-before", type=int, default=64, help="of each stream before the long prompt comes")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4, help="that send requests")
    return parser.parse_args()


if __name__ == "__main__":
    main()

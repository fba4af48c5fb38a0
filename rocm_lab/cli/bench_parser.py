"""The arguments of `rocm-attn bench`. Nothing here imports torch."""

from __future__ import annotations  # argparse's Commands takes no parameter at run time

import argparse
from functools import partial

from rocm_attn.cli import options as o
from rocm_attn.cli.parser import add_options
from rocm_lab.bench.choices import ALL_SUITES, HOST, LAYERS, RANDOM, SUITES

_EXIT_CODES = (
    "exit codes: 0 done, 1 a result was wrong or a comparison found something slower, 2 wrong usage or bad input\n"
)
_EXAMPLES = """\
examples:
  rocm-attn bench kernels --batch 64d4k --batch 1x2048+6144 --layer llama-8b
  rocm-attn bench kernels --batch 63d4k+1x2048 --heads 32/8 --head-dim 128 --providers triton,fa3 --out run.json
  rocm-attn bench kernels --suite all --out run.json
  rocm-attn bench compare before.json after.json
  rocm-attn bench plot run.json --folder pictures
  rocm-attn bench traffic --requests 200 --rate 8 > trace.jsonl
  rocm-attn bench serve --url http://127.0.0.1:8000 --trace trace.jsonl

"""


def heads(text: str) -> tuple[int, int]:
    """Parses query heads and KV heads, such as 32/8. Raises ArgumentTypeError."""
    q, slash, kv = text.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(f"{text!r} is not query heads and KV heads, as in 32/8")
    return o.positive(q), o.positive(kv)


def above_zero(text: str) -> float:
    """Parses a finite number above 0. Raises ArgumentTypeError."""
    number = o.not_negative(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


STEPS = (
    o.option(
        "--batch",
        action="append",
        metavar="BATCH",
        help="sequences of a step, repeatable: 64d4k, 1x2048+6144, 63d4k+1x2048, @FILE of a trace (docs/bench.md)",
    ),
    o.option(
        "--suite",
        action="append",
        choices=(*SUITES, ALL_SUITES, RANDOM, HOST),
        help="predefined layers and steps, repeatable; random: 100 random ones, by --seed; host: the host time of a "
        "step, which cannot be combined",
    ),
)
LAYER_OPTIONS = (
    o.option("--layer", action="append", choices=LAYERS, help="layer of a well-known model, repeatable (llama-8b)"),
    o.option("--config", metavar="CONFIG.json", help="every kind of layer of a model"),
    o.RANKS,
    o.option("--heads", type=heads, metavar="Q/KV", help="query heads and KV heads of a layer, as in 32/8"),
    o.option("--head-dim", type=o.positive, metavar="N", help="with --heads (128)"),
    o.option("--v-head-dim", type=o.positive, metavar="N", help="head dim of V, with --heads (that of --head-dim)"),
    o.DTYPE,
    o.option(
        "--page-sizes", type=o.sizes, default=(16,), metavar="N,N,...", help="tokens per page, several in turn (16)"
    ),
    o.KV_ENCODINGS,
    o.option("--window", type=o.positive, metavar="TOKENS", help="keys that a token sees, including its own (all)"),
    o.option("--soft-cap", type=o.not_negative, default=0.0, metavar="CAP", help="soft cap of logits (none)"),
    o.switch("--sinks", "layers with sinks"),
)
OUT = o.option("--out", metavar="FILE", help="write everything as JSON, with each sample")
MAX_SECONDS = o.option("--max-seconds", type=above_zero, metavar="S")
MEASURING = (
    o.DEVICE,
    o.option(
        "--providers",
        type=o.names,
        metavar="NAME,...",
        help="providers to measure: triton, torch, aiter, auto, also with +deterministic; fa3, flashinfer, "
        "vllm-triton, sdpa",
    ),
    o.option("--fa3", default="", metavar="LIBRARY", help="shared library of FlashAttention-3 (installed vLLM's)"),
    o.option("--rounds", type=o.positive, metavar="N", help="samples per provider, taken in turn (15)"),
    o.option("--round-us", type=o.not_negative, metavar="US", help="microseconds of work per sample (3000; CPU 20000)"),
    o.option(
        "--energy-seconds",
        type=o.not_negative,
        default=0.0,
        metavar="S",
        help="seconds of work per provider for counting joules (none)",
    ),
    o.option("--processes", type=o.natural, metavar="N", help="processes that compile ahead (one per core)"),
    MAX_SECONDS.but(default=86400.0, help="seconds after which no further case is started (a day)"),
    o.SEED,
)
COMPARED = (
    o.option("before", metavar="BEFORE.json", help="file that `bench kernels --out` wrote"),
    o.option("after", metavar="AFTER.json", help="the same cases, measured again"),
    o.option(
        "--smallest", type=o.not_negative, default=2.0, metavar="PERCENT", help="smallest difference that counts (2)"
    ),
    o.switch("--other-device", "allow runs of two devices"),
    o.switch("--common-cases", "ignore rows that only one run has"),
    o.switch("--every", "also print rows that stayed the same"),
)
PLOTTED = (
    o.option("result", metavar="RUN.json", help="file that --out of `bench kernels` or `bench serve` wrote"),
    o.option("--folder", default=".", metavar="FOLDER", help="folder for pictures (.)"),
    o.option("--prefix", default="bench", metavar="NAME", help="beginning of the pictures' names (bench)"),
)
REQUESTS = o.option("--requests", type=o.positive, metavar="N", help="use the first N requests only (all)")
SERVING = (
    o.option(
        "--url",
        required=True,
        action="append",
        metavar="[NAME=]URL",
        help="URL of the server, as in http://127.0.0.1:8000; repeat it for servers that are measured one after the "
        "other",
    ),
    o.option("--model", default="", metavar="NAME", help="model name at the server (the first that it lists)"),
    o.option(
        "--vocabulary",
        type=o.positive,
        default=1000,
        metavar="N",
        help="prompts have random token ids below this (1000)",
    ),
    o.option("--trace", required=True, metavar="FILE", help="requests in our own, Mooncake's or Azure's format"),
    REQUESTS,
    o.option(
        "--speed", type=above_zero, default=1.0, metavar="TIMES", help="factor by which requests arrive faster (1)"
    ),
    o.switch("--at-once", "let all arrive at the beginning"),
    o.option("--concurrency", type=o.positive, default=256, metavar="N", help="most open requests (256)"),
    MAX_SECONDS.but(default=3600.0, help="seconds after which the remaining requests are aborted (3600)"),
    o.SEED.but(help="seed of prompts (0)"),
    o.option("--load-processes", type=o.positive, default=1, metavar="N", help="processes that send the requests (1)"),
    OUT,
    o.option("--picture", metavar="FILE.png", help="draw throughput and times"),
)
TRAFFIC = (
    REQUESTS.but(default=200, help="requests (200)"),
    o.option("--rate", type=above_zero, default=4.0, metavar="R", help="requests per second, on average (4)"),
    o.option("--prompt", type=o.positive, default=512, metavar="TOKENS", help="median tokens of prompts (512)"),
    o.option("--output", type=o.positive, default=128, metavar="TOKENS", help="median of new tokens (128)"),
    o.option(
        "--spread",
        type=partial(o.not_negative, most=10.0),  # e to the power of far larger ones is no float
        default=0.5,
        metavar="S",
        help="standard deviation of the logarithm of lengths (0.5)",
    ),
    o.option(
        "--shared-prefix", type=o.natural, default=0, metavar="TOKENS", help="tokens that all prompts begin with (none)"
    ),
    o.SEED,
)


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` and its subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure kernels side by side, compare runs, and measure servers",
        description="Measure performance. Results are first compared with the float64 reference; a wrong one gets "
        "no time.",
        epilog=_EXAMPLES + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = bench.add_subparsers(dest="what", metavar="WHAT", required=True)

    def add(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return what.add_parser(name, help=help, description=description, epilog=_EXIT_CODES)

    kernels = add(
        "kernels",
        "one layer of a step, with each provider",
        "Check and time one layer of a step with each provider, alternately.",
    )
    add_options(kernels, STEPS)
    add_options(kernels.add_argument_group("layers"), LAYER_OPTIONS)
    add_options(kernels.add_argument_group("measuring"), MEASURING)
    add_options(kernels.add_argument_group("results"), (OUT, o.JSON))
    compare = add(
        "compare",
        "two runs of the same cases; exit code 1 if something is slower",
        "Say which cases of two runs are slower, faster, the same, or unclear.",
    )
    add_options(compare, (*COMPARED, o.JSON))
    add_options(add("plot", "pictures of a run", "Draw a run of `bench kernels` or `bench serve`."), PLOTTED)
    serve = add(
        "serve",
        "send a trace of requests to servers with OpenAI's API",
        "Send a trace of requests to servers with OpenAI's API, and report throughput and times.",
    )
    add_options(serve, (*SERVING, o.JSON))
    traffic = add(
        "traffic",
        "write a synthetic trace: Poisson arrivals, log-normal lengths",
        "Write a synthetic trace of requests to stdout: Poisson arrivals, log-normal lengths.",
    )
    add_options(traffic, TRAFFIC)
    for name, parser in what.choices.items():
        parser.set_defaults(module=f"rocm_lab.cli.bench_{name}")

"""The arguments of every command. Imports nothing but the standard library, so that --help is instant."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

# The same as rocm_attn.providers.select.PROVIDER_NAMES and the dtypes of rocm_attn.problem; a test holds them together.
PROVIDERS = ("auto", "torch", "triton", "aiter")
DTYPES = ("bfloat16", "float16", "float32")
POOLS = ("linear", "vectorized", "auto")
# Sizes are int32 on the device.
_LARGEST = 2**31 - 1

_EPILOG = """\
exit codes: 0 done, 1 the job failed, 2 wrong usage or bad input, 130 interrupted
"""

_GENERATE_EXAMPLES = """\
examples:
  rocm-attn generate "What is the capital of France?"
  rocm-attn generate --model ./Llama-3.1-8B-Instruct --device cuda --dtype bfloat16 "Hello" "Tell me a joke."
  rocm-attn generate --json --prompts-file prompts.txt --max-new-tokens 32 > results.json
  echo "Once upon a time" | rocm-attn generate --raw --temperature 0.8 --seed 7
"""

_EXPLAIN_EXAMPLES = """\
examples:
  rocm-attn explain config.json --arch gfx942
  rocm-attn explain ./Llama-3.1-8B-Instruct/config.json --arch gfx950 --page-size 64 --json
  rocm-attn explain ./DeepSeek-V3/config.json --arch gfx950 --tp 8 --page-size auto
  rocm-attn explain config.json --arch gfx942 --page-size auto --pool auto
  rocm-attn explain config.json --arch gfx950 --aiter-release 0.1.14 --rocm-release 7.0
  rocm-attn explain ./Llama-3.1-70B-Instruct/config.json --arch gfx942 --tp 8
"""

_SOAK_EXAMPLES = """\
examples:
  rocm-attn soak --steps 2000
  rocm-attn soak --steps 20000 --seed 7 --device cuda --json > soak.json
"""

_PREWARM_EXAMPLES = """\
examples:
  rocm-attn prewarm ./Llama-3.1-8B-Instruct                       on the GPU that will serve, as the user who will
  rocm-attn prewarm config.json --arch gfx942 --max-batch-size 256    while an image is built
"""

_CAPTURE_PLAN_EXAMPLES = """\
examples:
  rocm-attn capture-plan config.json --arch gfx942 --max-batch-size 256
  rocm-attn capture-plan config.json --arch gfx950 --max-batch-size 64 --max-kv-len 32768 --json
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `rocm-attn`; the command's name is in .command."""
    parser = argparse.ArgumentParser(
        prog="rocm-attn",
        description="A ROCm-first attention runtime: paged KV cache, HIP graphs, and a small model runner on top.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_explain(commands)
    _add_capture_plan(commands)
    _add_prewarm(commands)
    _add_replay_step(commands)
    _add_soak(commands)
    commands.add_parser("kernels", help="print the table of all kernels with their limits, as Markdown")
    guards = commands.add_parser("guards", help="list the safeguards, what each prevents and whether it is on")
    guards.add_argument("--json", action="store_true", help="print a list of JSON objects")
    _add_doctor(commands)
    env = commands.add_parser("env", help="print versions and devices, for a bug report")
    env.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers() returns


def _add_generate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model. Text goes to stdout as it comes, progress and a report to stderr.",
        epilog=_GENERATE_EXAMPLES + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="prompts, served together; without any, stdin is read")
    add("--prompts-file", metavar="FILE", help="a prompt a line, empty lines skipped; stdin is read the same way")
    add("--raw", action="store_true", help="take the prompt as it stands instead of applying the chat template")
    add("--json", action="store_true", help="print one JSON object with results and report, and nothing else")

    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--model", default="smollm2", help="a directory with config.json and safetensors, a .gguf file, or smollm2")
    add("--provider", choices=PROVIDERS, default="auto", help="whose attention kernels to use (auto: the fastest)")
    add("--device", help="cpu, cuda or cuda:1; HIP devices are cuda (a GPU if there is one, else cpu)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights, KV cache and arithmetic (on a GPU bfloat16, but float16 for a .gguf file and smollm2, whose "
        "quantised weights bfloat16 blurs; on a CPU float32)",
    )

    serving = parser.add_argument_group("serving")
    add = serving.add_argument
    _add_pages(add)
    add("--max-batch-size", type=_positive, default=64, metavar="SEQS", help="prompts served at the same time (64)")
    add(
        "--chunk",
        type=_positive,
        default=512,
        metavar="TOKENS",
        help="tokens of a step; a longer prompt takes several (512)",
    )
    add(
        "--num-pages", type=_positive, metavar="PAGES", help="pages of the KV cache, the reserved one included (enough)"
    )
    add(
        "--swa-pages",
        type=_natural,
        metavar="PAGES",
        help="likewise, of a pool for layers with a window; 0 for none (what the windows need)",
    )
    add(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record decode steps and replay them at padded sizes (on); a CPU does so in long runs, where it pays",
    )
    add(
        "--deterministic",
        action="store_true",
        help="the same tokens for a prompt whatever is served beside it, at some cost in speed",
    )
    add(
        "--flight-record",
        type=Path,
        metavar="FILE",
        help="write the last steps here when one fails, or on SIGUSR1; `rocm-attn replay-step` reads it",
    )

    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-new-tokens", type=_positive, default=128, metavar="TOKENS", help="most tokens to add to a prompt (128)")
    add("--temperature", type=_not_negative, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    add("--top-p", type=_probability, default=1.0, metavar="P", help="sample from the likeliest tokens of mass P (1)")
    add("--seed", type=int, default=0, help="of the sampling; the same seed gives the same text (0)")


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="say which kernels would run a model, and why no others; needs no GPU",
        description="Name the kernel of every kind of layer and step of a model on an arch, and every kernel refused.",
        epilog=_EXPLAIN_EXAMPLES + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.json", help="a model's config.json, the directory that holds it, or a .gguf file")
    add("--arch", required=True, help="gfx942 (MI300X), gfx950 (MI355X), sm_90, sm_80 or cpu")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of q, k, v and the KV cache (bfloat16)")
    _add_pages(add)
    add("--provider", choices=PROVIDERS, default="auto", help="whose attention kernels to ask (auto)")
    add("--tp", type=_positive, default=1, metavar="RANKS", help="tensor-parallel ranks that share the heads (1)")
    add("--num-pages", type=_positive, metavar="PAGES", help="pages of the KV cache, for kernels with a limit on them")
    add("--deterministic", action="store_true", help="only kernels whose results do not depend on the batch")
    add("--aiter-release", metavar="RELEASE", help="of AITER, for instance 0.1.14 (what the image brings)")
    add("--rocm-release", metavar="RELEASE", help="of ROCm, for instance 7.0 (what the image brings)")
    add("--json", action="store_true", help="print one JSON object")


def _add_pages(add: Callable[..., object]) -> None:
    add("--page-size", type=_page_size, default=16, metavar="TOKENS", help="of the KV cache; auto chooses it (16)")
    add("--pool", choices=POOLS, default="linear", help="how K and V lie in pages; auto chooses it (linear)")


def _add_capture_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "capture-plan",
        help="say which graphs a model would get and what its buffers would take; needs no GPU",
        description="List the graphs that would be made, largest first, and every buffer with its bytes and with the "
        "setting that decides its size. Nothing is captured or allocated.",
        epilog=_CAPTURE_PLAN_EXAMPLES + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.json", help="a model's config.json, the directory that holds it, or a .gguf file")
    add("--arch", required=True, help="gfx942 (MI300X), gfx950 (MI355X), sm_90, sm_80 or cpu")
    add("--max-batch-size", type=_positive, required=True, metavar="SEQS", help="sequences that run at a time")
    add("--max-kv-len", type=_positive, metavar="TOKENS", help="tokens of the longest sequence (the model's context)")
    add("--num-pages", type=_positive, metavar="PAGES", help="pages of the KV cache (enough for all sequences)")
    add(
        "--swa-pages",
        type=_positive,
        default=0,
        metavar="PAGES",
        help="pages of a pool for layers with a window (none)",
    )
    _add_pages(add)
    add("--dtype", choices=DTYPES, default="bfloat16", help="of q, k, v and the KV cache (bfloat16)")
    add("--provider", choices=PROVIDERS, default="auto", help="whose attention kernels to ask (auto)")
    add("--capture-sizes", type=_sizes, metavar="N,N,...", help="sequence counts (a ladder up to --max-batch-size)")
    add(
        "--capture-tokens",
        type=_sizes,
        default=(1,),
        metavar="N,N,...",
        help="token counts of extend and mixed steps (none)",
    )
    add("--split-steps", action="store_true", help="graphs of steps that run as two halves, too")
    add("--shared-prefixes", action="store_true", help="graphs of decode steps that share prefixes, too")
    add("--deterministic", action="store_true", help="kernels whose results do not depend on the batch")
    add("--json", action="store_true", help="print one JSON object")


def _add_prewarm(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "prewarm",
        help="compile what a model will need, as the user who will serve it",
        description="Run a model's attention steps once, at the sizes that will be served, so that every kernel is in "
        "the cache. With --arch nothing runs, and no GPU is needed: what is compiled is what that GPU will find.",
        epilog=_PREWARM_EXAMPLES + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.json", help="a model's config.json, the directory that holds it, or a .gguf file")
    add("--arch", help="gfx942 (MI300X), gfx950 (MI355X), sm_90 or sm_80 (this machine's GPU)")
    add("--provider", choices=PROVIDERS, default="auto", help="whose attention kernels to compile (auto)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of q, k, v and the KV cache (bfloat16)")
    _add_pages(add)
    add("--max-batch-size", type=_positive, default=64, metavar="SEQS", help="sequences that run at a time (64)")
    add("--max-kv-len", type=_positive, metavar="TOKENS", help="tokens of the longest sequence (the model's context)")
    add("--num-pages", type=_positive, metavar="PAGES", help="pages of the KV cache (enough for all sequences)")
    add("--capture-sizes", type=_sizes, metavar="N,N,...", help="sequence counts (a ladder up to --max-batch-size)")
    add(
        "--capture-tokens",
        type=_sizes,
        default=(1,),
        metavar="N,N,...",
        help="token counts of extend and mixed steps (none)",
    )
    add("--deterministic", action="store_true", help="the kernels of `generate --deterministic`")
    add("--shared-prefixes", action="store_true", help="decode steps that share prefixes, too")
    add("--json", action="store_true", help="print one JSON object")


def _add_replay_step(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay-step",
        help="run a step of a flight recorder's dump again and compare",
        description="Rebuild one step of a dump, with its lengths, rows and sizes and with random K and V; run it "
        "eagerly, as a graph and by the float64 reference. Exit code 1 if they do not agree.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("dump", metavar="DUMP", help="the file that a flight recorder wrote")
    add("--step", type=int, metavar="N", help="number of the step (the last one)")
    add("--seed", type=_natural, default=0, help="of the random K and V (0)")
    add("--device", help="cpu, cuda or cuda:1; HIP devices are cuda (a GPU if there is one, else cpu)")
    add("--provider", choices=PROVIDERS, help="whose attention kernels to use (the dump's)")
    add("--json", action="store_true", help="print one JSON object")


def _add_soak(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "soak",
        help="run random steps of a tiny model and compare every output with the reference",
        description="Let requests come, grow, share pages, run out of them and go, with graphs on, and compare every "
        "output of every step with a float64 reference. Stops with exit code 1 at the first difference.",
        epilog=_SOAK_EXAMPLES + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=2000, metavar="N", help="steps to run (2000)")
    add("--seed", type=_natural, default=0, metavar="S", help="of everything random; the same seed, the same steps (0)")
    add("--device", help="cpu, cuda or cuda:1; HIP devices are cuda (a GPU if there is one, else cpu)")
    add("--provider", choices=PROVIDERS, default="auto", help="whose attention kernels to use (auto: the fastest)")
    add("--dtype", choices=DTYPES, help="of q, k, v and the KV cache (bfloat16 on a GPU, float32 on a CPU)")
    add(
        "--deterministic",
        action="store_true",
        help="soak deterministic mode: some sequences must be bitwise what they are alone",
    )
    add("--json", action="store_true", help="print one JSON object with what was done, or what was found")


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look for what is known to go wrong with installations and machines, with the fix of each",
        description="Look at packages, ROCm, GPUs, caches and variables for everything that has gone wrong for others. "
        "Works where torch or AITER cannot be imported; touches no GPU memory. Exit code 1 if there is a problem.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--at-build", action="store_true", help="leave out what only the host that will serve can show")
    add("--json", action="store_true", help="print a list of JSON objects")


def _positive(text: str) -> int:
    return _at_least(1, text)


def _page_size(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(size) for size in text.split(","))


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    if number > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is above {_LARGEST}")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def _probability(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number

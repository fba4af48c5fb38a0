"""The arguments of the library's commands, and those of the commands that other distributions add.

A distribution adds commands by an entry point of the group COMMANDS: a function that is called with the subparsers.
Nothing here imports torch, so that --help is instant.
"""

from __future__ import annotations  # argparse's Commands takes no parameter at run time

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from rocm_attn.cli import options as o
from rocm_attn.cli.command_parser import CommandParser
from rocm_attn.machine.distributions import versions_line

COMMANDS = "rocm_attn.commands"
# The commands of this project's other distributions, and the folder that each is installed from.
ELSEWHERE = {
    **dict.fromkeys(("generate", "serve"), "rocm_serve"),
    **dict.fromkeys(("bench", "cycles", "read-report", "replay-step", "simulate", "soak", "tune", "waits"), "rocm_lab"),
}

EPILOG = """\
exit codes: 0 done, 1 the job failed, 2 wrong usage or bad input, 130 interrupted
"""

_EXPLAIN_EXAMPLES = """\
examples:
  rocm-attn explain config.json --arch gfx942
  rocm-attn explain ./Llama-3.1-8B-Instruct/config.json --arch gfx950 --page-size 64 --json
  rocm-attn explain ./DeepSeek-V3/config.json --arch gfx950 --tp 8 --page-size auto
  rocm-attn explain config.json --arch gfx942 --page-size auto --pool auto
  rocm-attn explain config.json --arch gfx950 --aiter-release 0.1.20 --rocm-release 7.0
  rocm-attn explain ./Llama-3.1-70B-Instruct/config.json --arch gfx942 --tp 8
  rocm-attn explain ./Kimi-K3/config.json --arch gfx950 --tp 8 --engine vllm@0.33
"""

_TRUTH_EXAMPLES = """\
examples:
  rocm-attn truth ./Llama-3.1-8B-Instruct
  rocm-attn truth tokens --providers triton --kv-encodings as-q,e4m3fnuz/token
  rocm-attn truth config.json --tp 8 --kv-encodings all --pool-gib 9 --json > truth.json
  rocm-attn truth blocks --device cpu --lengths 500,900 --chunk 250
"""

_PREWARM_EXAMPLES = """\
examples:
  rocm-attn prewarm ./Llama-3.1-8B-Instruct                       on the GPU that will serve, as the serving user
  rocm-attn prewarm config.json --arch gfx942 --max-batch-size 256    while an image is built
  rocm-attn prewarm config.json --arch gfx942 --bundle kernels.tgz    the same into a file
  rocm-attn prewarm config.json --check kernels.tgz                   on the machine that serves: compiles nothing
"""

_CAPTURE_PLAN_EXAMPLES = """\
examples:
  rocm-attn capture-plan config.json --gpu mi300x --max-batch-size 256
  rocm-attn capture-plan ./Llama-3.1-70B-Instruct --gpu mi300x --tp 8 --max-batch-size 64 --max-kv-len 32768
  rocm-attn capture-plan config.json --arch gfx950 --max-batch-size 64 --max-kv-len 32768 --json
"""

# The options of explain.
EXPLAINED = (
    *(o.CONFIG, o.ARCH.but(required=True), o.DTYPE, *o.KV_FORMAT, *o.PAGES, o.PROVIDER, o.RANKS, o.NUM_PAGES),
    *(o.DETERMINISTIC, *o.RELEASES, o.TUNING_FILE, o.JSON),
)

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers() returns


def build_parser() -> argparse.ArgumentParser:
    """The parser of `rocm-attn`; the command's name is in .command."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="rocm-attn",
        description="A ROCm-first attention runtime: paged KV cache, HIP graphs, and a serving engine on top.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_explain, _add_capture_plan, _add_prewarm, _add_truth):
        add(commands)
    add_command(
        commands,
        "kernels",
        help="print the table of all kernels with their limits, as Markdown",
        description="Print each attention kernel with the layers that it supports: archs, releases, heads, page sizes "
        "and dtypes. docs/kernels.md is this output.",
    )
    guards = add_command(
        commands,
        "guards",
        help="list the safeguards, the fault that each prevents, and their state",
        description="List each safeguard: its id, its state, the fault that it prevents, and reports of that fault.",
    )
    add_options(guards, [o.JSON.but(help="print a list of JSON objects")])
    _add_doctor(commands)
    env = add_command(
        commands,
        "env",
        help="print versions and devices, for a bug report",
        description="Print the versions of packages, the GPUs that torch sees, and the variables that are set. Works "
        "even if torch cannot be imported.",
    )
    add_options(env, [o.JSON])
    for name in commands.choices:
        commands.choices[name].set_defaults(module=f"{__package__}.{name.replace('-', '_')}")
    for entry_point in sorted(entry_points(group=COMMANDS), key=lambda each: each.name):
        entry_point.load()(commands)
    for name, folder in ELSEWHERE.items():
        if name not in commands.choices:
            # Without a prefix for options every word is an argument, which the refusal need not understand.
            said = f"not installed, a part of {folder.replace('_', '-')}; run it to see how to install that"
            absent = commands.add_parser(name, help=said, prefix_chars="\0")
            absent.add_argument("arguments", nargs="*")
            absent.set_defaults(module=f"{__package__}.elsewhere", folder=folder)
    return parser


class _Version(argparse.Action):
    """Prints the versions. They are read only then: --help does not wait for them."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the versions, and nothing else")

    def __call__(self, parser: argparse.ArgumentParser, *of_call: object) -> None:
        print(versions_line())
        parser.exit()


def add_options(parser: argparse._ActionsContainer, options: Iterable[o.Option]) -> None:
    """Adds options to a parser, or to a group of one."""
    for option in options:
        parser.add_argument(*option.names, **option.arguments)


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, *, help: str, description: str = "", examples: str = ""
) -> argparse.ArgumentParser:
    """Adds a command. examples: printed before the exit codes"""
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"{examples}\n{EPILOG}" if examples else EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "explain",
        help="list the kernels that would run a model, and why others are refused; needs no GPU",
        description="Name the kernel for every kind of layer and step of a model on an arch, and list every refused "
        "kernel with the reason.",
        examples=_EXPLAIN_EXAMPLES,
    )
    add_options(parser, (*(o.PAGE_SIZE_FOUND if each is o.PAGES[0] else each for each in EXPLAINED), o.ENGINE))


def _add_capture_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "capture-plan",
        help="list the graphs of a model and the sizes of its buffers; needs no GPU",
        description="List the graphs that would be captured, largest first, every buffer with its bytes and the "
        "setting that determines its size, and the weights; with --gpu also whether everything fits. Nothing "
        "is captured, allocated or loaded.",
        examples=_CAPTURE_PLAN_EXAMPLES,
    )
    swa_pages = o.SWA_PAGES.but(default=0, help="pages of a separate pool for layers with a window (none)")
    # The module that counts a model's weights is rocm-serve's, which sets it.
    parser.set_defaults(weights_counted_in=None)
    gpu = (o.ARCH, o.GPU, o.GPU_MEMORY_SHARE, o.WEIGHTS_GIB, o.RANKS)
    options = (o.CONFIG, *gpu, o.MAX_BATCH_SIZE, o.MAX_KV_LEN, o.NUM_PAGES, swa_pages, *o.PAGES)
    captured = (o.CAPTURE_SIZES, o.CAPTURE_TOKENS, o.SPLIT_STEPS, o.SHARED_PREFIXES, o.DRAFTS)
    add_options(parser, (*options, o.DTYPE, *o.KV_FORMAT, o.PROVIDER, *captured, o.DETERMINISTIC, *o.RELEASES, o.JSON))


def _add_prewarm(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "prewarm",
        help="compile a model's kernels ahead of time; run it as the user that will serve",
        description="Run a model's attention steps once, at the sizes that will be served, so that Triton's cache "
        "has every kernel. With --arch, only compile them for that arch; this needs no GPU.",
        examples=_PREWARM_EXAMPLES,
    )
    arch = o.ARCH.but(help="gfx942, gfx950, sm_90, sm_80, or a GPU's name, such as mi300x (this machine's GPU)")
    layers = (o.CONFIG, arch, o.RANKS, o.PROVIDER, o.DTYPE, *o.KV_FORMAT, *o.PAGES)
    sizes = (o.MAX_BATCH_SIZE, o.MAX_KV_LEN, o.NUM_PAGES, o.CAPTURE_SIZES, o.CAPTURE_TOKENS)
    served = (o.DETERMINISTIC, o.SHARED_PREFIXES, o.DRAFTS, o.VERIFY_TOKENS)
    add_options(parser, (*layers, *sizes, *served, o.JSON))
    add_options(parser.add_mutually_exclusive_group(), (o.BUNDLE, o.CHECK_BUNDLE))


def _add_truth(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "truth",
        help="place needles in long contexts, and check that every one is found",
        description="Run long sequences through a model's layers, in prefill chunks and in captured decode steps. "
        "Every query matches one key: the check fails if the output is not that key's value, or if it "
        "contains a hidden key's value. Pages are on both sides of 2 and 4 GiB. Exit code 1 if a needle was "
        "missed.",
        examples=_TRUTH_EXAMPLES,
    )
    config = o.CONFIG.but(
        metavar="CONFIG.json|SHAPE",
        help="a model's config.json, its directory, a .gguf file, or built-in layers of well-known models: dense, "
        "latent, tokens, pools, blocks or compressed",
    )
    seed = o.SEED.but(help="seed of keys, values and queries (0)")
    served = (o.DEVICE, o.PROVIDERS, o.DTYPE, o.KV_ENCODINGS, *o.PAGES, o.RANKS, o.DETERMINISTIC)
    add_options(parser, (config, *served, o.LENGTHS, o.CHUNK, o.POOL_GIB, o.EAGER, seed, o.JSON))


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "doctor",
        help="check this installation and machine for known problems, and name the fixes",
        description="Check packages, ROCm, GPUs, caches and environment variables for known problems. Works even if "
        "torch or AITER cannot be imported; uses no GPU memory. Exit code 1 if there is a problem.",
    )
    add_options(parser, (o.AT_BUILD, o.JSON.but(help="print a list of JSON objects")))

"""The options of the library's commands, each written once. Imports only the standard library and option texts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import BadBatch
from rocm_attn.machine.choices import AUTO, DTYPES, USED_SHARE
from rocm_attn.machine.choices import PROVIDERS as PROVIDER_NAMES
from rocm_attn.machine.gpus import GPUS, arch_named
from rocm_attn.machine.option_texts import AttentionOptions, OptionText, option_texts

# Sizes are int32 on the device.
_LARGEST = 2**31 - 1
# A larger number of GiB or seconds might be infinite as bytes or nanoseconds.
_MOST = 1e15
# The largest machines have fewer GPUs in one domain of fast links.
_MOST_RANKS = 1024
# Bytes are counted by the host.
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    names:     its flag, or its name if it is a positional argument
    arguments: of argparse's add_argument
    """

    names: tuple[str, ...]
    arguments: Mapping[str, Any]

    def but(self, **changes: Any) -> Option:
        """The same option with other arguments."""
        return Option(self.names, {**self.arguments, **changes})


def option(*names: str, **arguments: Any) -> Option:
    """An option with these arguments of add_argument."""
    return Option(names, arguments)


def switch(name: str, help: str) -> Option:
    """An option that is off unless it is given."""
    return option(name, action="store_true", help=help)


def number(kind: type[int] | type[float], text: str) -> Any:
    """Parses a number of a kind. Raises ArgumentTypeError."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None


def at_least(least: int, text: str, most: int = _LARGEST) -> int:
    """Parses a whole number, of an int32 if nothing else is given. Raises ArgumentTypeError."""
    parsed: int = number(int, text)
    if parsed < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}, the smallest allowed value")
    if parsed > most:
        raise argparse.ArgumentTypeError(f"{text} is above {most}")
    return parsed


positive, natural = partial(at_least, 1), partial(at_least, 0)


def not_negative(text: str, most: float = _MOST) -> float:
    """Parses a number of at least 0, which is finite in any smaller unit too. Raises ArgumentTypeError."""
    parsed: float = number(float, text)
    if not (parsed >= 0 and math.isfinite(parsed)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    if parsed > most:
        raise argparse.ArgumentTypeError(f"{text} is above {most:g}")
    return parsed


def sizes(text: str) -> tuple[int, ...]:
    """Parses whole numbers of at least 1, separated by commas."""
    return tuple(positive(size) for size in text.split(","))


def drafts(text: str) -> tuple[Drafts, ...]:
    """Parses rounds of drafts as KxS, branches and steps, separated by commas. Raises ArgumentTypeError."""
    rounds = []
    for word in text.split(","):
        branches, x, steps = word.partition("x")
        if not x:
            raise argparse.ArgumentTypeError(f"{word!r} is not branches and steps, as in 8x4")
        try:
            rounds.append(Drafts(positive(branches), positive(steps)))
        except BadBatch as refused:
            raise argparse.ArgumentTypeError(str(refused)) from refused
    return tuple(rounds)


def names(text: str) -> tuple[str, ...]:
    """Parses names separated by commas."""
    return tuple(text.split(","))


def providers(text: str) -> tuple[str, ...]:
    """Parses names of PROVIDERS, separated by commas. Raises ArgumentTypeError."""
    for name in names(text):
        if name not in PROVIDER_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PROVIDER_NAMES)}")
    return names(text)


def _count_or_name(count: Callable[[str], int], names: Sequence[str], text: str) -> int | str:
    """Parses a number, or one of the names that an option has besides. Raises ArgumentTypeError."""
    if text in names:
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError as refused:
        raise argparse.ArgumentTypeError(f"{refused}{''.join(f', or {name}' for name in names)}") from None


def _parser_of(text: OptionText) -> Callable[[str], Any]:
    """Returns the function that turns a word of the command line into a value of the option."""
    if text.kind is int:
        count = partial(at_least, int(text.least or 0), most=_MOST_BYTES if text.unit == "BYTES" else _LARGEST)
        return partial(_count_or_name, count, text.choices)
    return not_negative if text.kind is float else text.kind


def of_field(name: str, default: Any, text: OptionText) -> Option:
    """The flag of a dataclass's field that is an option."""
    flag, shown = "--" + name.replace("_", "-"), text.default_is or str(default)
    if text.kind is bool:
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        return option(flag, action=action, default=default, help=f"{text.help} ({shown})" if default else text.help)
    arguments: dict[str, Any] = {"type": _parser_of(text), "default": default, "help": f"{text.help} ({shown})"}
    arguments |= {"metavar": text.unit} if text.unit else {"choices": text.choices}
    return option(flag, **arguments)


# The flag of each field of AttentionOptions.
OF_ATTENTION = {name: of_field(name, *option) for name, option in option_texts(AttentionOptions).items()}
PROVIDER, NUM_PAGES, SWA_PAGES, DETERMINISTIC, MAX_BATCH_SIZE, MAX_KV_LEN = (
    OF_ATTENTION[name]
    for name in ("provider", "num_pages", "swa_pages", "deterministic", "max_batch_size", "max_kv_len")
)
MAX_BATCH_SIZE = MAX_BATCH_SIZE.but(type=positive, default=256, help="most sequences that run at a time (256)")
PAGES = (OF_ATTENTION["page_size"], OF_ATTENTION["pool"])
PAGE_SIZE_FOUND = PAGES[0].but(
    default=None,
    help="tokens per page of the KV cache; auto lists every size (the sizes with the best kernels; with --engine, 16)",
)
KV_FORMAT = (OF_ATTENTION["kv_dtype"], OF_ATTENTION["kv_scales"])

JSON = switch("--json", "print one JSON object, and nothing else")
CONFIG = option(
    "config",
    metavar="CONFIG.json",
    help="a model's config.json, its directory, a .gguf file, or a Hugging Face id such as Qwen/Qwen3-8B",
)
ARCH = option(
    "--arch", type=arch_named, help="gfx942, gfx950, sm_90, sm_80, cpu, or a GPU's name, such as mi300x or mi355x"
)
DEVICE = option("--device", help="cpu, cuda or cuda:1; AMD GPUs are called cuda too (a GPU if there is one, else cpu)")
DTYPE = option(
    "--dtype",
    choices=DTYPES,
    default="bfloat16",
    help="dtype of q, k and v, and of the KV cache if --kv-dtype is auto (bfloat16)",
)
CAPTURE_SIZES = option(
    "--capture-sizes",
    type=sizes,
    metavar="N,N,...",
    help="batch sizes of decode steps to capture (several sizes up to --max-batch-size)",
)
CAPTURE_TOKENS = option(
    "--capture-tokens",
    type=sizes,
    default=(1,),
    metavar="N,N,...",
    help="token counts of extend and mixed steps to capture (none)",
)
SPLIT_STEPS = switch("--split-steps", "include steps that run as two halves")
DRAFTS = option(
    "--drafts",
    type=drafts,
    default=(),
    metavar="KxS,...",
    help="include speculative rounds with K branches and S draft steps, such as 8x4 (none)",
)
VERIFY_TOKENS = option(
    "--verify-tokens",
    type=positive,
    default=0,
    metavar="TOKENS",
    help="include steps that verify drafts, with up to this many new tokens per sequence: 1 + --draft-tokens (none)",
)
SHARED_PREFIXES = switch("--shared-prefixes", "include decode steps that share prefixes")
GPU = option("--gpu", type=str.lower, choices=tuple(GPUS), help="GPU into whose memory everything must fit")
GPU_MEMORY_SHARE = option(
    "--gpu-memory-share",
    type=not_negative,
    default=USED_SHARE,
    metavar="SHARE",
    help=f"share of the GPU's memory to use ({USED_SHARE:g})",
)
WEIGHTS_GIB = option(
    "--weights-gib",
    type=not_negative,
    metavar="GIB",
    help="size of the weights on each rank, for instance an engine's FP8 weights (the model's size in --dtype)",
)
RANKS = option(
    "--tp",
    type=partial(at_least, 1, most=_MOST_RANKS),
    default=1,
    metavar="RANKS",
    help="tensor-parallel ranks that share the heads (1)",
)
AITER_RELEASE = option("--aiter-release", metavar="RELEASE", help="AITER release, for instance 0.1.20 (the image's)")
ROCM_RELEASE = option("--rocm-release", metavar="RELEASE", help="ROCm release, for instance 7.0 (the image's)")

PROVIDERS = option(
    "--providers",
    type=providers,
    default=(AUTO,),
    metavar="NAME,...",
    help="providers to try in turn: auto, aiter, triton, torch (auto)",
)
KV_ENCODINGS = option(
    "--kv-encodings",
    type=names,
    default=("as-q",),
    metavar="CODE[/SCALES],...",
    help="KV encodings to try in turn: as-q, e4m3fn, e4m3fnuz, e5m2, with /layer, /head, /token or, of latents, "
    "/group; or all (as-q)",
)
LENGTHS = option(
    "--lengths", type=sizes, metavar="N,N,...", help="sequence lengths in tokens (2048 to 86016; on a CPU 200 to 1000)"
)
CHUNK = option("--chunk", type=positive, metavar="TOKENS", help="tokens of a prefill chunk (9216; on a CPU 300)")
POOL_GIB = option(
    "--pool-gib",
    type=not_negative,
    metavar="GIB",
    help="least size of the largest layer's K pages, and of its V pages (5; on a CPU no more than is needed)",
)
EAGER = switch("--eager", "run every step without a graph")

SEED = option("--seed", type=natural, default=0, metavar="S", help="seed of all random values (0)")
TUNING_FILE = option(
    "--tuning",
    metavar="FILE",
    help="file of measured tiles, or off (the file in ROCM_ATTN_TUNING, else the one in the cache)",
)
BUNDLE = option("--bundle", metavar="FILE", help="recompile all kernels, and write them to this file")
CHECK_BUNDLE = option(
    "--check",
    metavar="FILE",
    help="add the kernels of this bundle to Triton's cache first; exit code 2 if anything is left to compile",
)
TRITON_RELEASE = option(
    "--triton-release", metavar="RELEASE", help="Triton release, for instance 3.6.0 (the installed one)"
)
ENGINE = option(
    "--engine",
    metavar="NAME@RELEASE",
    help="choose kernels for this engine's pages, and list the known faults of its release with this model: vllm, "
    "sglang or atom, as in vllm@0.33",
)
RELEASES = (AITER_RELEASE, ROCM_RELEASE, TRITON_RELEASE)
AT_BUILD = switch("--at-build", "skip the checks that only the serving host can make")

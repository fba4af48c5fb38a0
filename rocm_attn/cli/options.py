"""The options that commands take, each written once. Imports only the standard library and option texts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocm_attn.batch.drafts import Drafts
from rocm_attn.machine.choices import AUTO, DTYPES
from rocm_attn.machine.choices import PROVIDERS as PROVIDER_NAMES
from rocm_attn.runner.logprobs import MOST_LIKELIEST, NO_LOGPROBS
from rocm_attn.runner.options import EngineOptions, OptionText, option_texts
from rocm_attn.runner.sampling_options import Sampling
from rocm_attn.server.options import ServerOptions

# Sizes are int32 on the device.
_LARGEST = 2**31 - 1


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


def at_least(least: int, text: str) -> int:
    """Parses a whole number that an int32 holds. Raises ArgumentTypeError, ValueError."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    if number > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is above {_LARGEST}")
    return number


positive, natural = partial(at_least, 1), partial(at_least, 0)


def not_negative(text: str) -> float:
    """Parses a finite number of at least 0. Raises ArgumentTypeError, ValueError."""
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def token_ids(text: str) -> tuple[int, ...]:
    """Parses token ids separated by commas."""
    return tuple(natural(token) for token in text.split(","))


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Parses biases of tokens, such as 17=-100,4=2.5. Raises ArgumentTypeError, ValueError."""
    found = []
    for word in text.split(","):
        token, equals, bias = word.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{word!r} is not a token id and its bias, as 17=-100")
        found.append((natural(token), float(bias)))
    return tuple(found)


def sizes(text: str) -> tuple[int, ...]:
    """Parses whole numbers of at least 1, separated by commas."""
    return tuple(positive(size) for size in text.split(","))


def drafts(text: str) -> tuple[Drafts, ...]:
    """Parses rounds of drafts as KxS, branches and steps, separated by commas. Raises ArgumentTypeError, ValueError."""
    rounds = []
    for word in text.split(","):
        branches, x, steps = word.partition("x")
        if not x:
            raise argparse.ArgumentTypeError(f"{word!r} is not branches and steps, as 8x4")
        rounds.append(Drafts(positive(branches), positive(steps)))
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


def _parser_of(text: OptionText) -> Callable[[str], Any]:
    """Returns the function that turns a word of the command line into a value of the option."""
    if text.kind is int:
        # The component that needs a bound above 1 reports it: a pool of one page has no page to give out.
        number = partial(at_least, min(int(text.least or 0), 1))
        return lambda word: word if word in text.choices else number(word)
    return not_negative if text.kind is float else text.kind


def _within(text: OptionText, word: str) -> Any:
    """Parses a number within an option's bounds. Raises ArgumentTypeError, ValueError."""
    number = text.kind(word)
    if not text.allows(number):
        raise argparse.ArgumentTypeError(f"{word} is not {text.bounds}")
    return number


def _of_sampling(name: str, default: Any, text: OptionText) -> Option:
    """The flag of a field of Sampling."""
    return _of_field(name, default, text).but(type=biases if text.kind is tuple else partial(_within, text))


def _of_field(name: str, default: Any, text: OptionText) -> Option:
    """The flag of a field of EngineOptions, ServerOptions or Sampling."""
    flag, shown = "--" + name.replace("_", "-"), text.default_is or str(default)
    if text.kind is bool:
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        return option(flag, action=action, default=default, help=f"{text.help} ({shown})" if default else text.help)
    arguments: dict[str, Any] = {"type": _parser_of(text), "default": default, "help": f"{text.help} ({shown})"}
    arguments |= {"metavar": text.unit} if text.unit else {"choices": text.choices}
    return option(flag, **arguments)


# The flag of each field of EngineOptions, and those that `rocm-attn generate` and `serve` take.
OF_ENGINE = {name: _of_field(name, *of_field) for name, of_field in option_texts(EngineOptions).items()}
ON_GENERATE = tuple(name for name, (_, text) in option_texts(EngineOptions).items() if text.on_generate)
ON_SERVE = tuple(name for name in OF_ENGINE if name != "capture_after")  # graphs are made before the first request
# The flag of each field of ServerOptions.
SERVER = {name: _of_field(name, *of_field) for name, of_field in option_texts(ServerOptions).items()}
# The flag of each field of Sampling.
SAMPLING = {name: _of_sampling(name, *of_field) for name, of_field in option_texts(Sampling).items()}

PROVIDER, NUM_PAGES, SWA_PAGES, DETERMINISTIC, MAX_BATCH_SIZE, MAX_KV_LEN = (
    OF_ENGINE[name] for name in ("provider", "num_pages", "swa_pages", "deterministic", "max_batch_size", "max_kv_len")
)
PAGES = (OF_ENGINE["page_size"], OF_ENGINE["pool"])
KV_FORMAT = (OF_ENGINE["kv_dtype"], OF_ENGINE["kv_scales"])

COST = switch("--cost", "predict times of one layer's Triton kernels on gfx942 and gfx950, as ranges")
JSON = switch("--json", "print one JSON object, and nothing else")
CONFIG = option(
    "config", metavar="CONFIG.json", help="a model's config.json, the directory that holds it, or a .gguf file"
)
ARCH = option("--arch", help="gfx942 (MI300X), gfx950 (MI355X), sm_90, sm_80 or cpu")
DEVICE = option("--device", help="cpu, cuda or cuda:1; HIP devices are cuda (a GPU if there is one, else cpu)")
DTYPE = option(
    "--dtype",
    choices=DTYPES,
    default="bfloat16",
    help="of q, k and v, and of the KV cache where --kv-dtype is auto (bfloat16)",
)
CAPTURE_SIZES = option(
    "--capture-sizes", type=sizes, metavar="N,N,...", help="sequence counts (a ladder up to --max-batch-size)"
)
CAPTURE_TOKENS = option(
    "--capture-tokens",
    type=sizes,
    default=(1,),
    metavar="N,N,...",
    help="token counts of extend and mixed steps (none)",
)
SPLIT_STEPS = switch("--split-steps", "steps that run as two halves, too")
DRAFTS = option(
    "--drafts",
    type=drafts,
    default=(),
    metavar="KxS,...",
    help="rounds of drafts with K branches and S steps, too, as 8x4 (none)",
)
VERIFY_TOKENS = option(
    "--verify-tokens",
    type=positive,
    default=0,
    metavar="TOKENS",
    help="steps that verify drafts, of up to so many new tokens a sequence, too: 1 + --draft-tokens (none)",
)
SHARED_PREFIXES = switch("--shared-prefixes", "decode steps that share prefixes, too")
RANKS = option("--tp", type=positive, default=1, metavar="RANKS", help="tensor-parallel ranks that share the heads (1)")
RANKS_THAT_SERVE = RANKS.but(help="ranks that share the model by tensor parallelism, on a GPU each or on this CPU (1)")
DTYPE_OF_MODEL = DTYPE.but(
    default=None,
    help="of weights and arithmetic, and of the KV cache where --kv-dtype is auto (on a GPU bfloat16, but float16 "
    "for a .gguf file and smollm2, whose quantised weights bfloat16 blurs; on a CPU float32)",
)
AITER_RELEASE = option(
    "--aiter-release", metavar="RELEASE", help="of AITER, for instance 0.1.14 (what the image brings)"
)
ROCM_RELEASE = option("--rocm-release", metavar="RELEASE", help="of ROCm, for instance 7.0 (what the image brings)")

PROMPTS = option("prompts", nargs="*", metavar="PROMPT", help="prompts, served together; without any, stdin is read")
PROMPTS_FILE = option(
    "--prompts-file", metavar="FILE", help="a prompt a line, empty lines skipped; stdin is read the same way"
)
RAW = switch("--raw", "take the prompt as it stands instead of applying the chat template")
MODEL = option(
    "--model", default="smollm2", help="a directory with config.json and safetensors, a .gguf file, or smollm2"
)
MAX_NEW_TOKENS = option(
    "--max-new-tokens", type=positive, default=128, metavar="TOKENS", help="most tokens to add to a prompt (128)"
)
STOP = option(
    "--stop", action="append", default=[], metavar="TEXT", help="end the text before this one, again and again (none)"
)
INCLUDE_STOP = switch("--include-stop", "end the text after such a text, and not before it")
STOP_TOKEN_IDS = option(
    "--stop-token-ids", type=token_ids, default=(), metavar="ID,ID,...", help="end the text with these tokens (none)"
)
IGNORE_EOS = switch("--ignore-eos", "pass over the model's own end tokens")
MIN_TOKENS = option(
    "--min-tokens", type=natural, default=0, metavar="TOKENS", help="add so many to a prompt before the text ends (0)"
)
LOGPROBS = option(
    "--logprobs",
    type=natural,
    default=NO_LOGPROBS,
    metavar="N",
    help=f"with --json: each new token's logprob, and those of the N likeliest, up to {MOST_LIKELIEST} (none)",
)
JSON_SCHEMA = option(
    "--json-schema",
    metavar="SCHEMA|FILE",
    help="add JSON that a schema accepts, which is given, or a file's (any text)",
)
REGEX = option("--regex", metavar="PATTERN", help="add a text that matches from end to end (any text)")
# Options of a request, in addition to those of sampling.
OF_REQUEST = (MAX_NEW_TOKENS, MIN_TOKENS, STOP, INCLUDE_STOP, STOP_TOKEN_IDS, IGNORE_EOS, LOGPROBS, JSON_SCHEMA, REGEX)

PROVIDERS = option(
    "--providers",
    type=providers,
    default=(AUTO,),
    metavar="NAME,...",
    help="whose kernels are tried, one after the other: auto, aiter, triton, torch (auto)",
)
KV_ENCODINGS = option(
    "--kv-encodings",
    type=names,
    default=("as-q",),
    metavar="CODE[/SCALES],...",
    help="how K and V are kept, one after the other: as-q, e4m3fn, e4m3fnuz, e5m2, with /layer, /head or /token; or "
    "all (as-q)",
)
LENGTHS = option(
    "--lengths", type=sizes, metavar="N,N,...", help="tokens of the sequences (2048 to 86016; on a CPU 200 to 1000)"
)
CHUNK = option("--chunk", type=positive, metavar="TOKENS", help="tokens of a prompt's chunks (9216; on a CPU 300)")
POOL_GIB = option(
    "--pool-gib",
    type=not_negative,
    metavar="GIB",
    help="of the largest layer's K pages, and of its V pages, at least (5; on a CPU as much as is needed)",
)
EAGER = switch("--eager", "run every step without a graph")

DUMP = option("dump", metavar="DUMP", help="the file that a flight recorder wrote")
STEP = option("--step", type=int, metavar="N", help="number of the step (the last one)")
STEPS = option("--steps", type=positive, default=2000, metavar="N", help="steps to run (2000)")
ROUNDS = option(
    "--rounds",
    type=positive,
    metavar="N",
    help="run until so many steps have drafted or verified, in place of --steps; mostly for --speculative",
)
SEED = option("--seed", type=natural, default=0, metavar="S", help="of everything random (0)")
SHAPES = option(
    "--shapes",
    metavar="SEQSxCACHED+NEW,...",
    help="steps of interest, with k for 1024, as 64x4k,1x6144+2048 (decode, chunks of prompts, and drafts)",
)
SECONDS = option(
    "--seconds", type=positive, default=600, metavar="S", help="after which no other candidate is begun (600)"
)
OUTPUT = option(
    "--output", metavar="FILE", help="where rows are kept (what ROCM_ATTN_TUNING names, or the cache's tuning.json)"
)
JOBS = option("--jobs", type=positive, metavar="N", help="processes that compile (all cores but one)")
DRY_RUN = switch("--dry-run", "list the candidates, and try none; needs no GPU")
TUNING_FILE = option(
    "--tuning", metavar="FILE", help="a file of measured tiles, or off (what ROCM_ATTN_TUNING names, or the cache's)"
)
TRITON_RELEASE = option("--triton-release", metavar="RELEASE", help="of Triton, for instance 3.6.0 (what is installed)")
RELEASES = (AITER_RELEASE, ROCM_RELEASE, TRITON_RELEASE)
AT_BUILD = switch("--at-build", "leave out what only the host that will serve can show")

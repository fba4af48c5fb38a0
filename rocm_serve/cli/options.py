"""The options of generate and serve, each written once. Imports only the standard library and option texts."""

import argparse
from functools import partial
from typing import Any

from rocm_attn.cli.options import DTYPE, RANKS, Option, natural, number, of_field, option, positive, switch
from rocm_attn.machine.option_texts import OptionText, option_texts
from rocm_serve.options import EngineOptions
from rocm_serve.sampling.logprobs import MOST_LIKELIEST, NO_LOGPROBS
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.options import ServerOptions


def token_ids(text: str) -> tuple[int, ...]:
    """Parses token ids separated by commas."""
    return tuple(natural(token) for token in text.split(","))


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Parses biases of tokens, such as 17=-100,4=2.5. Raises ArgumentTypeError."""
    found = []
    for word in text.split(","):
        token, equals, bias = word.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{word!r} is not a token id and its bias, as in 17=-100")
        found.append((natural(token), number(float, bias)))
    return tuple(found)


def _within(text: OptionText, word: str) -> Any:
    """Parses a number within an option's bounds. Raises ArgumentTypeError."""
    parsed = number(text.kind, word)
    if text.kind_missed(parsed) or not text.allows(parsed):
        raise argparse.ArgumentTypeError(f"{word} is not {text.bounds}")
    return parsed


def _of_sampling(name: str, default: Any, text: OptionText) -> Option:
    """The flag of a field of Sampling."""
    return of_field(name, default, text).but(type=biases if text.kind is tuple else partial(_within, text))


# The flag of each field of EngineOptions, and those that `rocm-attn generate` and `serve` take.
OF_ENGINE = {name: of_field(name, *text) for name, text in option_texts(EngineOptions).items()}
ON_GENERATE = tuple(name for name, (_, text) in option_texts(EngineOptions).items() if text.on_generate)
ON_SERVE = tuple(name for name in OF_ENGINE if name != "capture_after")  # graphs are made before the first request
# The flag of each field of ServerOptions.
SERVER = {name: of_field(name, *text) for name, text in option_texts(ServerOptions).items()}
# The flag of each field of Sampling.
SAMPLING = {name: _of_sampling(name, *text) for name, text in option_texts(Sampling).items()}

RANKS_THAT_SERVE = RANKS.but(help="tensor-parallel ranks, each on its own GPU, or all on this CPU (1)")
DTYPE_OF_MODEL = DTYPE.but(
    default=None,
    help="dtype of weights and arithmetic, and of the KV cache if --kv-dtype is auto (on a GPU bfloat16, but "
    "float16 for a .gguf file and smollm2, whose quantised weights need its precision; on a CPU float32)",
)
PROMPTS = option(
    "prompts", nargs="*", metavar="PROMPT", help="prompts, served together; without a prompt, stdin is read"
)
PROMPTS_FILE = option(
    "--prompts-file",
    metavar="FILE",
    help="file with one prompt per line; empty lines are skipped; stdin is read the same way",
)
RAW = switch("--raw", "use the prompt unchanged instead of applying the chat template")
MODEL = option(
    "--model",
    default="smollm2",
    help="a directory with config.json and safetensors, a .gguf file, a Hugging Face id such as Qwen/Qwen3-8B, which "
    "is downloaded unless it is cached, or smollm2, the default",
)
MAX_NEW_TOKENS = option(
    "--max-new-tokens", type=positive, default=128, metavar="TOKENS", help="most new tokens per prompt (128)"
)
STOP = option(
    "--stop",
    action="append",
    default=[],
    metavar="TEXT",
    help="end the output before this string; may be repeated (none)",
)
INCLUDE_STOP = switch("--include-stop", "include the stop string in the output")
STOP_TOKEN_IDS = option(
    "--stop-token-ids", type=token_ids, default=(), metavar="ID,ID,...", help="end the output at these tokens (none)"
)
ALLOWED_TOKEN_IDS = option(
    "--allowed-token-ids", type=token_ids, default=(), metavar="ID,ID,...", help="pick only these tokens (all)"
)
IGNORE_EOS = switch("--ignore-eos", "ignore the model's own end tokens")
MIN_TOKENS = option(
    "--min-tokens", type=natural, default=0, metavar="TOKENS", help="new tokens before the output may end (0)"
)
LOGPROBS = option(
    "--logprobs",
    type=natural,
    default=NO_LOGPROBS,
    metavar="N",
    help=f"with --json: the logprob of each new token, and of the N top tokens, up to {MOST_LIKELIEST} (none)",
)
PROMPT_LOGPROBS = option(
    "--prompt-logprobs",
    type=natural,
    default=NO_LOGPROBS,
    metavar="N",
    help="with --json: likewise for each token of the prompt except the first (none)",
)
JSON_SCHEMA = option(
    "--json-schema",
    metavar="SCHEMA|FILE",
    help="generate JSON that follows this schema, given as text or as a file (any text)",
)
REGEX = option("--regex", metavar="PATTERN", help="generate text that matches this pattern as a whole (any text)")
# Options of a request, in addition to those of sampling.
OF_REQUEST = (
    *(MAX_NEW_TOKENS, MIN_TOKENS, STOP, INCLUDE_STOP, STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS, IGNORE_EOS),
    *(LOGPROBS, PROMPT_LOGPROBS, JSON_SCHEMA, REGEX),
)

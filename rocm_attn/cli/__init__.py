"""The command line, `rocm-attn COMMAND`; parser.py lists the commands, each with the module that runs it.

Exit codes: 0 done, 1 the job failed, 2 wrong usage or bad input, 130 interrupted, 141 the reader of stdout went away.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from rocm_attn.cli.streams import Stdout, StdoutFailed, say
from rocm_attn.cli.torch_failures import memory_failure, torch_failure
from rocm_attn.errors import BadModel, BadProblem, BadRequest, BadSetting, RocmAttnError
from rocm_attn.machine.distributions import installing

DONE, FAILED, BAD_INPUT, INTERRUPTED, READER_GONE = 0, 1, 2, 130, 141
_STDERR = 2
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BAD_INPUT_ERRORS = (BadModel, BadProblem, BadRequest, BadSetting)

# Libraries that are not always installed with the package -> how to install them.
_REMEDIES = {
    "gguf": installing(".", "gguf"),
    "huggingface_hub": installing(".", "hub"),
    **dict.fromkeys(("jinja2", "rocm_serve", "safetensors", "tokenizers"), installing("rocm_serve")),
    **dict.fromkeys(("fastapi", "pydantic", "starlette", "uvicorn"), installing("rocm_serve", "server")),
    "matplotlib": installing("rocm_lab", "bench"),
    "triton": "it compiles kernels; torch for a GPU brings it; with torch for CPUs run: pip install 'triton>=3.6'",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage ends in argparse's SystemExit(2)."""
    if sys.stderr is None:  # else the next file that is opened has its number, and gets what libraries print there
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
        os.set_inheritable(_STDERR, True)
        sys.stderr = open(_STDERR, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        say("rocm-attn: stdout is closed, and results go there; redirect it to a file or to /dev/null")
        return FAILED
    with Stdout(sys.stdout):
        try:
            _run(arguments)
        except BaseException as error:
            return _answer(error)
    return DONE


def _run(arguments: Sequence[str] | None) -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise BadSetting(
            "the current folder was deleted, and torch cannot be loaded there; change to another"
        ) from error
    # An interrupt during this import ends in a sentence, and --help does not wait for torch, which takes a second.
    parser = importlib.import_module("rocm_attn.cli.parser").build_parser()
    try:
        options = parser.parse_args(arguments)
    finally:
        sys.stdout.flush()  # --help prints there, and exits
    # Interrupted while they are loaded, torch's libraries abort the process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        command = importlib.import_module(options.module)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        command.run(options)
    finally:
        sys.stdout.flush()  # also before an error: Python's own flush at exit says it in two lines, with code 120


def _answer(error: BaseException) -> int:
    """Prints what is wrong in a sentence and returns the exit code. Raises bugs of this package again."""
    if isinstance(error, KeyboardInterrupt):
        say("rocm-attn: interrupted")
        return INTERRUPTED
    if isinstance(error, StdoutFailed):
        if error.reader_is_gone:
            return READER_GONE
        say(f"rocm-attn: stdout cannot be written ({error})")
        return FAILED
    if isinstance(error, RocmAttnError):
        say(f"rocm-attn: {error}")
        return BAD_INPUT if isinstance(error, _BAD_INPUT_ERRORS) else FAILED
    if sentence := about_a_library(error):
        say(f"rocm-attn: {sentence}")
        return FAILED
    if what := memory_failure(error):
        say(f"rocm-attn: out of memory ({what}); ask for fewer pages, tokens or sequences")
        return FAILED
    if isinstance(error, OSError) and error.filename is not None:
        say(f"rocm-attn: {error.filename} cannot be used ({error.strerror}); look at its path and its permissions")
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in _DISK_FULL:  # a file that is open already has no name
        say(f"rocm-attn: a file cannot be written ({error.strerror}); make room where Triton's cache and TMPDIR are")
        return FAILED
    raise error


def about_a_library(error: BaseException) -> str:
    """The sentence about a library that is missing, or that cannot be imported; "" for any other error."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in _REMEDIES:
            return f"{package} is not installed; {_REMEDIES[package]}"
    return torch_failure(error)

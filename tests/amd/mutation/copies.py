"""Runs a check on a copy of the kernels, in a process of its own that has to import little.

Torch and Triton are imported once, by a server that forks for each check.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from tests.amd.mutation.memory import Fenced, Memory, Poisoned
from tests.amd.mutation.mutants import KERNELS

_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Trial:
    """How a check is run.

    memory:       where its tensors lie
    is_backwards: whether the last program of a launch runs first. A GPU promises no order, the interpreter has one:
                  what a program writes over a later one's words is gone when the later one has run
    """

    memory: type[Memory]
    is_backwards: bool


# The second is for what the first does not notice.
TRIALS = (Trial(Poisoned, False), Trial(Fenced, True))


def copy_of_kernels(folder: Path, path: str = "", source: str = "") -> Path:
    """A folder with a copy of kernels/ in which the file of that path has another source."""
    shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    if path:
        (folder / "kernels" / path).write_text(source)
    return folder


def start_server() -> None:
    """The server that processes are forked from; it runs kernels under Triton's interpreter."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "triton.language", "triton.runtime.interpreter"])
    with patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


def verdict(folder: Path, check: str, trial: Trial) -> str:
    """What comes of a check on the copy of the kernels in folder.

    check: a name in checks.py
    Returns "right"; what the check found wrong; or "SIGSEGV". Raises RuntimeError if the check could not be done.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(folder, check, trial, sender))
    process.start()
    sender.close()
    has_ended = receiver.poll(_SECONDS)  # with an answer, or without
    if not has_ended:
        process.kill()
    try:
        answer: str = receiver.recv()
    except EOFError:
        answer = ""
    receiver.close()
    process.join()
    if process.exitcode == -signal.SIGSEGV:
        return "SIGSEGV"
    if process.exitcode != 0 or not answer:
        raise RuntimeError(f"{check} on a copy of the kernels ended with {process.exitcode}: {answer}")
    return answer


def _report(folder: Path, check: str, trial: Trial, sender: Connection) -> None:
    """In the forked process: rocm_attn.kernels is the copy in folder."""
    import rocm_attn

    rocm_attn.__path__ = [str(folder), *rocm_attn.__path__]
    checks = import_module("tests.amd.mutation.checks")
    copied = sys.modules["rocm_attn.kernels.launch"].__file__ or ""
    assert Path(copied).is_relative_to(folder), f"{copied} is not the copy in {folder}"
    if trial.is_backwards:
        _run_programs_backwards()
    try:
        checks.CHECKS[check](trial.memory())
    except AssertionError as wrong:
        sender.send(f"wrong: {str(wrong).partition(chr(10))[0][:120]}")
    else:
        sender.send("right")


def _run_programs_backwards() -> None:
    from triton.runtime.interpreter import interpreter_builder

    set_index = interpreter_builder.set_grid_idx

    def set_mirrored(*index: int) -> None:
        set_index(*(size - 1 - at for size, at in zip(interpreter_builder.grid_dim, index, strict=True)))

    interpreter_builder.set_grid_idx = set_mirrored

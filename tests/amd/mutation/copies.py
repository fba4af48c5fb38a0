"""Runs a check on a copy of the kernels, in a separate process that has little to import.

A server imports Torch and Triton once and forks for each check.
"""

import itertools
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
from typing import Any
from unittest.mock import patch

from tests.amd.mutation.memory import Fenced, Memory, Poisoned
from tests.amd.mutation.mutants import KERNELS
from tests.amd.quick_interpreter import make_quick

# Operations on two operands in Triton's interpreter. A check does fewer than 200,000 on the unchanged kernels. A kernel
# that does three times as many is taken for endless.
MOST_OPERATIONS = 600_000
# Only for a hang outside of the interpreter: even on a busy machine no check takes this long.
_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Trial:
    """How a check is run.

    memory:       where its tensors lie
    is_backwards: true if the last program of a launch runs first. A GPU promises no order, but the interpreter has one.
                  A word that a program wrongly writes over a later program's is overwritten when the later one runs
    """

    memory: type[Memory]
    is_backwards: bool


# The second is for faults that the first does not notice.
TRIALS = (Trial(Poisoned, False), Trial(Fenced, True))


def copy_of_kernels(folder: Path, path: str = "", source: str = "") -> Path:
    """Returns a folder with a copy of kernels/ in which the file at path has the given source.

    The compiled files are copied too; otherwise each process would compile a hundred files again. Those of the changed
    file go, since Python would take them for files of the same time and size.
    """
    shutil.copytree(KERNELS, folder / "kernels")
    if path:
        changed = folder / "kernels" / path
        changed.write_text(source)
        for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*.pyc"):
            compiled.unlink()
    return folder


def start_server() -> None:
    """The server that processes are forked from; it runs kernels under Triton's interpreter."""
    context = multiprocessing.get_context("forkserver")
    # rocm_attn is not preloaded: each process has another rocm_attn.kernels.
    context.set_forkserver_preload(["torch", "triton", "triton.language", "triton.runtime.interpreter", "pytest"])
    with patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


def verdict(folder: Path, check: str, trial: Trial, *, most_operations: int = MOST_OPERATIONS) -> str:
    """Returns the result of a check on the copy of the kernels in folder.

    check:           a name in checks.py
    most_operations: limit on the interpreter's operations; a kernel that does more is taken for endless
    Returns "right"; the fault that the check found; "endless"; or "SIGSEGV". Raises RuntimeError if the check could not
    be done.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(folder, check, trial, most_operations, sender))
    process.start()
    sender.close()
    has_ended = receiver.poll(_SECONDS)  # with an answer, or without
    if not has_ended:
        process.kill()
        process.join()
        raise RuntimeError(f"{check} on a copy of the kernels hung for {_SECONDS:g} s and was ended")
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


def _report(folder: Path, check: str, trial: Trial, most_operations: int, sender: Connection) -> None:
    """Runs in the forked process, in which rocm_attn.kernels is the copy in folder."""
    import rocm_attn

    assert "rocm_attn.kernels" not in sys.modules, "the kernels were imported before their copy"
    rocm_attn.__path__ = [str(folder), *rocm_attn.__path__]
    checks = import_module("tests.amd.mutation.checks")
    copied = sys.modules["rocm_attn.kernels.launch"].__file__ or ""
    assert Path(copied).is_relative_to(folder), f"{copied} is not the copy in {folder}"
    make_quick()
    if trial.is_backwards:
        _run_programs_backwards()
    _count_operations(most_operations)
    try:
        checks.run_check(check, trial.memory())
    except AssertionError as wrong:
        sender.send(f"wrong: {str(wrong).partition(chr(10))[0][:120]}")
    except _Endless:
        sender.send("endless")
    else:
        sender.send("right")


class _Endless(BaseException):
    """A kernel does more than it should ever need. No Exception: the interpreter would wrap it in one of its own."""


def _count_operations(most: int) -> None:
    """Raises _Endless after `most` operations. Every loop of a kernel computes an offset or compares a bound."""
    from triton.runtime.interpreter import interpreter_builder

    operate, left = interpreter_builder.binary_op, itertools.count(most, -1)

    def counted(*operands: Any) -> Any:
        if next(left) == 0:
            raise _Endless
        return operate(*operands)

    interpreter_builder.binary_op = counted


def _run_programs_backwards() -> None:
    from triton.runtime.interpreter import interpreter_builder

    set_index = interpreter_builder.set_grid_idx

    def set_mirrored(*index: int) -> None:
        set_index(*(size - 1 - at for size, at in zip(interpreter_builder.grid_dim, index, strict=True)))

    interpreter_builder.set_grid_idx = set_mirrored

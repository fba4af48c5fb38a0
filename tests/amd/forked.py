"""Separate processes: forked from one that has done nothing but import torch, or fresh."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.amd.house.source_tree import ROOT


def context() -> ForkServerContext:
    """Returns the context that starts processes. They have the environment from the first one's start."""
    forking = multiprocessing.get_context("forkserver")
    # None of these modules looks for a GPU: a process forked later could not use it then.
    forking.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "rocm_attn.selection.build",
            "rocm_serve.cli.ready_engine",
            "rocm_serve.server.run",
        ]
    )
    return forking


def run_python(*arguments: str) -> str:
    """Returns the output of a fresh interpreter at the root of the checkout, which has to end well."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_forked(code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code as `python -c` does and returns the completed process."""
    with tempfile.TemporaryDirectory() as folder:
        process = context().Process(target=_run, args=(code, folder))
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(code, process.exitcode, out, err)


def _run(code: str, folder: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    exec(code, {})

"""Separate processes that begin with torch imported: forked from one that has done nothing else."""

import multiprocessing
import os
import subprocess
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path


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

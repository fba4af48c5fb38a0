"""The truth test over pages beyond 2 GiB notices kernels whose offsets into pages have 32 bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amd.house.source_tree import ROOT
from tests.amd.mutation.copies import copy_of_kernels
from tests.amd.mutation.mutants import KERNELS

_WIDE, _NARROW = ".to(tl.int64)", ".to(tl.int32)"
_DENSE, _SELECTS = "dense", "selects"


def what_comes_of(folder: Path, layers: str) -> str:
    """Returns the outcome of the truth test on the copy in folder: passed, missed, or that the process ended."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.amd.mutation.truth_of_copy", str(folder), layers]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    # A negative code is the signal that ended it: a wrapped offset leads to unmapped memory.
    return run.stdout.strip() if run.returncode == 0 else "ended" if run.returncode < 0 else run.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [_DENSE, _SELECTS])
def test_kernels_as_they_are_find_every_needle(layers: str, tmp_path: Path) -> None:
    assert what_comes_of(copy_of_kernels(tmp_path), layers) == "passed"


@pytest.mark.parametrize(
    ("path", "layers"),
    [
        ("cache/store.py", _DENSE),
        pytest.param("attention/key_loop.py", _DENSE, marks=pytest.mark.nightly),
        pytest.param("attention/decode.py", _DENSE, marks=pytest.mark.nightly),
        pytest.param("sparse/attention.py", _SELECTS, marks=pytest.mark.nightly),
        pytest.param("sparse/index_scores.py", _SELECTS, marks=pytest.mark.nightly),
    ],
)
def test_offsets_of_32_bits_are_noticed(path: str, layers: str, tmp_path: Path) -> None:
    source = (KERNELS / path).read_text()
    assert _WIDE in source
    folder = copy_of_kernels(tmp_path, path, source.replace(_WIDE, _NARROW))
    assert what_comes_of(folder, layers) in ("missed", "ended")

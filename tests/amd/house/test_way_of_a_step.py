"""From a batch to a launch: the number of files that a warm decode step enters. No call goes back up to one of them.

A way begins with an existing batch, and a call of it ends where it enters kernels/: there a launcher, or its torch
twin, does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.options import RuntimeOptions
from tests.amd.house.source_tree import ROOT

# Files of a runtime: the runtime, its gate, planner, core, memory and layers; the table's checks and its stored tokens;
# devices; the publisher and its ring; and a provider's kernel.
MOST_FILES = 12
# Files of an engine's tables and pages.
MOST_FILES_OF_AN_ENGINE = 12
PROBLEM = Problem(4, 2, 32, torch.float32, 16)
_KERNELS = "kernels/"
_PRODUCT = ("rocm_attn/", "rocm_serve/", "hip_graphs/", _KERNELS)


@cache
def _file_of(path: str) -> str:
    """Returns the path of a file of the product in the tree, and "" for others and for code that Python generates."""
    real = Path(path).resolve()
    inner = str(real.relative_to(ROOT)) if real.is_relative_to(ROOT) else ""
    return inner if inner.startswith(_PRODUCT) and not path.startswith("<") else ""


@dataclass
class Way:
    """The files that a call enters. files: each once, in order; back: calls that go up to a file that has called"""

    files: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, call: Callable[[], object]) -> Way:
        """Returns the way of a call."""
        way, before = cls(), sys.getprofile()
        sys.setprofile(way._profile)
        try:
            call()
        finally:
            sys.setprofile(before)
        return way

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and self._stack:
            self._stack.pop()
        elif event == "call":
            file = _file_of(frame.f_code.co_filename)
            above = next((each for each in reversed(self._stack) if each), "")
            if above.startswith(_KERNELS):
                file = above  # the rest belongs to the launcher
            elif file and file != above and not file.startswith(_KERNELS):
                self._enter(file, f"{above or 'the caller'} -> {file} {frame.f_code.co_name}")
            self._stack.append(file)

    def _enter(self, file: str, step: str) -> None:
        if file in self._stack:
            self.back.append(step)
        if file not in self.files:
            self.files.append(file)
        if step not in self.steps:
            self.steps.append(step)

    def require(self, most_files: int) -> None:
        """Fails if the way has more files, or goes back."""
        told = "\n".join((f"{len(self.files)} files, at most {most_files}:", *self.files, "", *self.steps))
        assert len(self.files) <= most_files, told
        assert not self.back, "\n".join(("calls back up:", *self.back, "", told))


def qkv_and_out() -> tuple[torch.Tensor, ...]:
    """Returns q, k, v and out of two tokens."""
    return (
        torch.randn(2, PROBLEM.num_q_heads, PROBLEM.head_dim),
        torch.randn(2, PROBLEM.num_kv_heads, PROBLEM.head_dim),
        torch.randn(2, PROBLEM.num_kv_heads, PROBLEM.head_dim),
        torch.empty(2, PROBLEM.num_q_heads, PROBLEM.head_dim),
    )


def way_of_a_runtime() -> Way:
    """Begins a warm step, and stores and attends in a layer of it. Returns the way."""
    options = RuntimeOptions(num_pages=40, max_num_seqs=4, max_kv_len=256, provider="torch")
    runtime = build_runtime([PROBLEM], options, device="cpu")
    rows = [runtime.table.admit() for _ in range(2)]
    for row in rows:
        runtime.table.reserve(row, 64)
    given = qkv_and_out()

    def step(batch: StepBatch) -> None:
        (part,) = runtime.step(batch).parts
        part.layers.store_and_attend(0, *given)

    for kv_len in range(1, 4):
        step(StepBatch(rows, [kv_len, kv_len], [1, 1]))
        runtime.end_step()
    batch = StepBatch(rows, [4, 4], [1, 1])
    way = Way.of(lambda: step(batch))
    runtime.end_step()
    runtime.check_device()
    return way


def way_of_an_engine() -> Way:
    """Returns the same way over the tables and pages of an engine."""
    table = torch.zeros(4, 16, dtype=torch.int32)
    table[0, 0], table[1, 0] = 3, 4
    bounds = Bounds(num_seqs=4, num_tokens=16, kv_len=256, num_pages=40)
    attention = ExternalAttention(
        [LayerSource(PROBLEM)],
        TableSource(table),
        device="cpu",
        bounds=bounds,
        options=ExternalOptions(provider="torch"),
    )
    attention.pages.bind_all(torch.zeros(2, 1, 40, 16, 2, 32), "kv layer page token head dim")
    attention.seal()
    q, k, v, out = qkv_and_out()

    def step(its: ExternalStep) -> None:
        attention.begin(its)
        attention.fill()
        attention.layers.store(0, k, v)
        attention.layers.attend(0, q, out)

    steps = [
        ExternalStep.decode(torch.tensor([kv_len, kv_len], dtype=torch.int32), num_seqs=2, max_kv_len=kv_len)
        for kv_len in range(1, 5)
    ]
    for its in steps[:-1]:
        step(its)
    way = Way.of(lambda: step(steps[-1]))
    attention.check_device()
    return way


def test_a_warm_step_of_a_runtime_enters_few_files_and_never_goes_back() -> None:
    way_of_a_runtime().require(MOST_FILES)


def test_a_warm_step_of_an_engine_enters_few_files_and_never_goes_back() -> None:
    way_of_an_engine().require(MOST_FILES_OF_AN_ENGINE)


def test_a_way_holds_every_file_on_it_and_every_call_back_up() -> None:
    """Files count once. Calls of a launcher do not count, nor does a second way down to a file."""

    def made(file: str, text: str, **names: object) -> dict[str, object]:
        exec(compile(text, str(ROOT / file), "exec"), names)
        return names

    launcher = made("kernels/launcher.py", "def launch(up):\n    up()")
    layers = made("rocm_attn/layers.py", "def attend():\n    launch(up)\n    up()", **launcher)
    gate = made("rocm_attn/gate.py", "def begin():\n    attend()\n    attend()\ndef require(): pass", **layers)
    layers["up"] = gate["require"]
    begin = gate["begin"]
    assert callable(begin)
    way = Way.of(begin)
    assert way.files == ["rocm_attn/gate.py", "rocm_attn/layers.py"]
    assert way.back == ["rocm_attn/layers.py -> rocm_attn/gate.py require"] * 2
    with pytest.raises(AssertionError, match="2 files, at most 1"):
        way.require(1)
    with pytest.raises(AssertionError, match="calls back up"):
        way.require(2)

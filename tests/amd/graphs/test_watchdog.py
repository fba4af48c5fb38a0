"""A watchdog names what hangs, and says nothing about what ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.graphs import recorder_for
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.step_batch import StepBatch
from rocm_attn.step_runner import StepRunner
from rocm_attn.steps import Steps
from rocm_attn.watchdog import NO_WATCHDOG, Watch, Watchdog, WatchedSteps
from tests.amd.graphs.tiny import Tiny, same, serve
from tests.amd.runtime.stepping import providers

SECONDS = 0.05


class Slow:
    """A recorder that seems to hang."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        time.sleep(4 * SECONDS)
        return self._inner.record(fn)

    def release_memory(self) -> None:
        self._inner.release_memory()


class SlowSteps:
    """Steps that seem to hang."""

    def __init__(self, inner: Steps) -> None:
        self._inner = inner

    def run(self, batch: StepBatch, pad_to: int | None = None) -> torch.Tensor:
        time.sleep(2 * SECONDS)
        return self._inner.run(batch, pad_to)


def said(tmp_path: Path, hangs: Callable[[Watch], object]) -> str:
    """What a watchdog says about it."""
    with open(tmp_path / "said", "w+") as stream:
        hangs(Watchdog(SECONDS, stream=stream))
        stream.seek(0)
        return stream.read()


def test_what_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    def a_place_that_hangs(watchdog: Watch) -> None:
        with watchdog.watch("the capture of decode"):
            time.sleep(4 * SECONDS)

    text = said(tmp_path, a_place_that_hangs)
    assert text.startswith("rocm-attn: the capture of decode has not ended after 0.05 s\n")
    assert "in a_place_that_hangs" in text
    assert text.count("has not ended") == 1


def test_what_ends_in_time_is_not_mentioned(tmp_path: Path) -> None:
    def ends(watchdog: Watch) -> None:
        with watchdog.watch("the capture of decode"):
            pass
        with pytest.raises(ZeroDivisionError), watchdog.watch("the capture of decode"):
            raise ZeroDivisionError
        time.sleep(4 * SECONDS)

    assert said(tmp_path, ends) == ""


def test_whoever_asked_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    with open(tmp_path / "said", "w") as stream, Watchdog(SECONDS, stream=stream, on_hang=told.append).watch("it"):
        time.sleep(4 * SECONDS)
    assert told == ["rocm-attn: it has not ended after 0.05 s"]


@pytest.mark.parametrize("provider", providers())
@pytest.mark.parametrize("on", [True, False])
def test_a_capture_that_hangs_is_named(on: bool, provider: str, device: torch.device, tmp_path: Path) -> None:
    def capture(watchdog: Watch) -> None:
        tiny = Tiny.build(device, provider, [4])
        recorder = Slow(recorder_for(tiny.runtime.device))
        StepRunner(tiny.runtime, tiny.forward, recorder, watchdog=watchdog if on else NO_WATCHDOG).capture_all()

    text = said(tmp_path, capture)
    assert ("the capture of decode of 4 sequences and its check has not ended" in text) == on
    assert ("in record" in text) == on


@pytest.mark.parametrize("provider", providers())
def test_a_forward_that_hangs_in_a_capture_is_named(provider: str, device: torch.device, tmp_path: Path) -> None:
    def capture(watchdog: Watch) -> None:
        tiny = Tiny.build(device, provider, [4])

        def forward(step: Any) -> torch.Tensor:
            time.sleep(4 * SECONDS)
            return tiny.forward(step)

        StepRunner(tiny.runtime, forward, recorder_for(tiny.runtime.device), watchdog=watchdog).capture_all()

    assert "forward, run for the capture of decode of 4 sequences, has not ended" in said(tmp_path, capture)


@pytest.mark.parametrize("provider", providers())
def test_a_step_that_hangs_is_named_and_comes_out_the_same(provider: str, device: torch.device, tmp_path: Path) -> None:
    outs = []

    def steps(watchdog: Watch) -> None:
        tiny = Tiny.build(device, provider, [4])
        runner = StepRunner(tiny.runtime, tiny.forward, recorder_for(tiny.runtime.device))
        runner.capture_all()
        outs.append(serve(runner, tiny.runtime))
        outs.append(serve(WatchedSteps(SlowSteps(runner), watchdog), tiny.runtime))

    text = said(tmp_path, steps)
    assert "step 2 (3 sequences, 3 tokens) has not ended" in text
    assert same(*outs)

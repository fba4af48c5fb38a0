"""A watchdog names a step that hangs, and reports nothing about steps that end."""

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.step.protocols import NO_WATCHDOG, RunsSteps
from rocm_serve.watched import WatchedSteps
from tests.amd.graphs.small_models import Tiny, WrappedRecorder, same, serve

SECONDS = 0.05
# Longer than any test: a watched step ends, or is reported, earlier.
NEVER = 300.0


class Reports:
    """The watchdog's reports, in the file and for the waiting test. No result depends on a duration."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.sentences: list[str] = []
        self._changed = threading.Condition()

    def on_hang(self, sentence: str) -> None:
        """Called when the stacks have been written."""
        with self._changed:
            self.sentences.append(sentence)
            self._changed.notify_all()

    def wait_for(self, words: str) -> None:
        """Waits until the watchdog has reported these words."""
        with self._changed:
            said = self._changed.wait_for(lambda: any(words in sentence for sentence in self.sentences), NEVER)
        assert said, f"the watchdog never said that {words}"

    def watchdog(self, seconds: float = SECONDS) -> Watchdog:
        return Watchdog(seconds, stream=self._stream, on_hang=self.on_hang)

    def text(self) -> str:
        self._stream.seek(0)
        return self._stream.read()


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    with open(tmp_path / "said", "w+") as stream:
        yield Reports(stream)


def test_a_time_beyond_that_of_a_clock_is_none_to_wait_for(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of each watched step ended with an OverflowError and its stack."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(threading.enumerate())
    with reports.watchdog(1e30).watch("a step"):
        (timer,) = set(threading.enumerate()) - before
        timer.join(SECONDS)
        assert timer.is_alive()
    assert not raised


class Slow(WrappedRecorder):
    """A recorder that hangs until it has been reported, or does not hang without a watchdog."""

    def __init__(self, inner: Recorder, reports: Reports, *, is_watched: bool) -> None:
        super().__init__(inner)
        self._reports = reports
        self._is_watched = is_watched

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        if self._is_watched:
            self._reports.wait_for("and its check has not finished")
        return self._inner.record(fn)


class SlowSteps:
    """Steps that hang until they have been reported."""

    def __init__(self, inner: RunsSteps, reports: Reports) -> None:
        self._inner = inner
        self._reports = reports
        self._num_steps = 0

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> torch.Tensor:
        self._num_steps += 1
        self._reports.wait_for(f"step {self._num_steps} (")
        return self._inner.run(batch, pad_to)


def test_what_hangs_is_named_once_with_its_stack(reports: Reports) -> None:
    def a_place_that_hangs() -> None:
        with reports.watchdog().watch("the capture of decode"):
            reports.wait_for("the capture of decode has not finished")

    a_place_that_hangs()
    assert reports.text().startswith("rocm-attn: the capture of decode has not finished after 0.05 s\n")
    assert "in a_place_that_hangs" in reports.text()
    assert reports.sentences == ["rocm-attn: the capture of decode has not finished after 0.05 s"]


def test_what_ends_is_watched_no_more(reports: Reports) -> None:
    watchdog = reports.watchdog(NEVER)
    with watchdog.watch("the capture of decode"):
        assert len(timers()) == 1
    with pytest.raises(ZeroDivisionError), watchdog.watch("the capture of decode"):
        raise ZeroDivisionError
    assert not timers()
    assert reports.text() == ""


def timers() -> list[threading.Timer]:
    """Returns the timers that are still running."""
    running = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    return [timer for timer in running if not timer.finished.is_set()]


@pytest.mark.parametrize("on", [True, False])
def test_a_capture_that_hangs_is_named(on: bool, provider: str, device: torch.device, reports: Reports) -> None:
    tiny = Tiny.build(device, provider, [4])
    recorder = Slow(recorder_for(tiny.runtime.device), reports, is_watched=on)
    watchdog = reports.watchdog() if on else NO_WATCHDOG
    runner = StepRunner(tiny.runtime, tiny.forward, recorder)
    runner.watchdog = watchdog
    runner.capture_all()
    assert ("the capture of decode of 4 sequences and its check has not finished" in reports.text()) == on
    assert ("in record" in reports.text()) == on


def test_a_step_that_hangs_is_named_and_comes_out_the_same(
    provider: str, device: torch.device, reports: Reports
) -> None:
    tiny = Tiny.build(device, provider, [4])
    runner = tiny.runner()
    runner.capture_all()
    outs = serve(runner, tiny.runtime)
    slow = WatchedSteps(SlowSteps(runner, reports), reports.watchdog())
    assert same(outs, serve(slow, tiny.runtime))
    assert "step 2 (3 sequences, 3 tokens) has not finished" in reports.text()


def test_a_hang_that_cannot_be_written_is_handed_over() -> None:
    said: list[str] = []
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as full:  # raised when it is closed
        Watchdog(SECONDS, stream=full, on_hang=said.append)._report("a step")
    assert said == [f"rocm-attn: a step has not finished after {SECONDS} s"]


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, None, "5"])
def test_a_time_that_never_comes_is_refused(seconds: Any) -> None:
    """The watch of NaN seconds ended at once, and reported nothing."""
    with pytest.raises(BadSetting, match="seconds is "):
        Watchdog(seconds)


@pytest.mark.parametrize("stream", [io.StringIO(), "stderr"], ids=["StringIO", "text"])
def test_a_stream_without_a_descriptor_is_refused(stream: Any) -> None:
    """The report ended in its thread before on_hang was called."""
    with pytest.raises(
        BadSetting, match=f"stream is a {type(stream).__name__} without a descriptor; give an open file"
    ):
        Watchdog(SECONDS, stream=stream)

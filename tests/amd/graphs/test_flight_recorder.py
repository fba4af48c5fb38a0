"""The flight recorder: the steps that it keeps, the times when it writes, and a dump that reads back unchanged."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.step.step import Part
from rocm_attn.watch.flight_recorder import FlightRecorder, dump_on_signal, read_dump
from tests.amd.graphs.small_models import SERVED, Tiny, same, serve
from tests.amd.worlds.problems import deterministic_providers


def flown(tiny: Tiny, path: Path, *, graphs: bool = True, num_steps: int = 64) -> tuple[StepRunner, FlightRecorder]:
    flight = FlightRecorder(tiny.runtime, path, num_steps=num_steps)
    recorder = recorder_for(tiny.runtime.device) if graphs else None
    return StepRunner(tiny.runtime, tiny.forward, recorder, flight=flight), flight


def test_steps_are_remembered_as_they_were_and_come_out_the_same(
    provider: str, device: torch.device, tmp_path: Path
) -> None:
    tiny, plain = (Tiny.build(device, provider, [2, 4]) for _ in range(2))
    runner, flight = flown(tiny, tmp_path / "dump.json")
    outs = serve(runner, tiny.runtime)
    assert same(outs, serve(plain.runner(graphs=False), plain.runtime))
    steps = flight.steps()
    assert [list(step.q_len) for step in steps] == SERVED
    assert [step.number for step in steps] == list(range(len(SERVED)))
    assert [step.kind for step in steps] == ["extend", *["decode"] * 6]
    assert [(step.real_seqs, step.padded_seqs) for step in steps[:4]] == [(3, 4), (3, 4), (2, 2), (3, 4)]
    # A graph exists from the second step of a size on.
    assert [step.replayed for step in steps] == [False, False, False, True, True, True, True]
    assert steps[1].kv_len == (6, 3, 8)
    assert all(kernel.startswith(f"{provider}.decode(") for kernel in steps[1].kernels)
    assert {step.epoch for step in steps} == {0}
    runner.reopen([4])
    serve(runner, tiny.runtime)
    assert flight.steps()[-1].epoch > 0


def test_the_last_steps_are_kept(device: torch.device, tmp_path: Path) -> None:
    tiny = Tiny.build(device, "torch")
    runner, flight = flown(tiny, tmp_path / "dump.json", graphs=False, num_steps=3)
    serve(runner, tiny.runtime)
    assert [step.number for step in flight.steps()] == [len(SERVED) - 3, len(SERVED) - 2, len(SERVED) - 1]


@pytest.mark.parametrize("deterministic", [False, True], ids=["normal", "deterministic"])
def test_a_dump_comes_back_as_it_was(deterministic: bool, device: torch.device, tmp_path: Path) -> None:
    provider = deterministic_providers()[0]
    tiny = Tiny.build(device, provider, [2, 4], tokens=(8, 16), deterministic=deterministic)
    runner, flight = flown(tiny, tmp_path / "dump.json")
    serve(runner, tiny.runtime)
    dump = read_dump(flight.dump("on request"))
    assert dump.reason == "on request"
    assert dump.steps == tuple(flight.steps())
    assert dump.problems == (tiny.problem,)
    facts = dump.runtime.options
    assert (facts.num_pages, facts.max_num_seqs, facts.max_kv_len) == (200, 8, 128)
    assert (facts.capture_sizes, facts.capture_tokens, facts.provider) == ((2, 4), (8, 16), provider)
    assert facts.deterministic == deterministic
    assert dump.step(None).number == len(SERVED) - 1
    assert dump.step(2) == dump.steps[2]
    with pytest.raises(BadSetting, match=f"no step 99; it has steps 0 to {len(SERVED) - 1}"):
        dump.step(99)


@pytest.mark.parametrize("on", [True, False])
def test_an_exception_inside_a_step_writes_a_dump(on: bool, device: torch.device, tmp_path: Path) -> None:
    tiny, path = Tiny.build(device, "torch"), tmp_path / "dump.json"
    flight = FlightRecorder(tiny.runtime, path)

    def forward(step: Part) -> Tensor:
        if step.num_tokens == 2:
            raise ZeroDivisionError("by no sequence")
        return tiny.forward(step)

    runner = StepRunner(tiny.runtime, forward, None, flight=flight) if on else StepRunner(tiny.runtime, forward, None)
    with pytest.raises(ZeroDivisionError) as raised:
        serve(runner, tiny.runtime)
    assert path.exists() == on
    if on:
        dump = read_dump(path)
        assert dump.reason == "ZeroDivisionError: by no sequence"
        assert dump.step(None).q_len == (1, 1)
        assert str(path) in "".join(getattr(raised.value, "__notes__", [str(path)]))


def test_a_fault_of_the_device_that_surfaces_later_writes_a_dump(device: torch.device, tmp_path: Path) -> None:
    tiny, path = Tiny.build(device, "torch"), tmp_path / "dump.json"
    runner, _ = flown(tiny, path, graphs=False)
    serve(runner, tiny.runtime)

    failure = RuntimeError("an illegal memory access was encountered")
    tiny.runtime.gate.stage = Mock(side_effect=failure)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        serve(runner, tiny.runtime)
    assert read_dump(path).step(None).number == len(SERVED) - 1


def test_a_bad_batch_writes_no_dump(device: torch.device, tmp_path: Path) -> None:
    tiny, path = Tiny.build(device, "torch"), tmp_path / "dump.json"
    runner, _ = flown(tiny, path, graphs=False)
    with pytest.raises(BadBatch):
        runner.run(StepBatch(np.array([3]), np.array([1]), np.array([1]), NO_TOKEN_IDS))
    assert not path.exists()


def test_a_dump_that_cannot_be_written_hides_no_error(device: torch.device, tmp_path: Path) -> None:
    tiny = Tiny.build(device, "torch")
    folder = tmp_path / "gone"
    folder.mkdir()
    flight = FlightRecorder(tiny.runtime, folder / "dump.json")
    folder.rmdir()

    with pytest.raises(ZeroDivisionError):
        serve(StepRunner(tiny.runtime, Mock(side_effect=ZeroDivisionError), None, flight=flight), tiny.runtime)


def test_a_record_that_has_no_folder_is_refused_at_once(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="gone is not a folder; create it"):
        FlightRecorder(Tiny.build(device, "torch").runtime, tmp_path / "gone" / "dump.json")


@pytest.mark.parametrize("num_steps", [0, -1, None, 1.5])
def test_a_record_of_no_steps_is_refused_at_once(num_steps: Any, device: torch.device, tmp_path: Path) -> None:
    """A record of 0 steps ended every step with a ZeroDivisionError."""
    with pytest.raises(BadSetting, match=f"num_steps is {num_steps}; it must be"):
        FlightRecorder(Tiny.build(device, "torch").runtime, tmp_path / "dump.json", num_steps=num_steps)


@pytest.fixture
def own_handler() -> Iterator[None]:
    """Restores the signal's handler."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("own_handler")
def test_a_signal_writes_a_dump(device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny, path = Tiny.build(device, "torch"), tmp_path / "dump.json"
    runner, flight = flown(tiny, path, graphs=False)
    serve(runner, tiny.runtime)
    dump_on_signal(flight)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert read_dump(path).reason == "signal SIGUSR1"
    serve(runner, tiny.runtime)
    shutil.rmtree(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR1)  # whatever step runs now goes on
    assert "the last steps could not be written" in caplog.text


def with_field(place: str, value: object, text: str) -> str:
    """Returns a dump in which the field at a place has another value."""
    content = json.loads(text)
    *path, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    holder = content
    for name in path:
        holder = holder[name]
    holder[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-5], "is not a dump of a flight recorder"),
        (lambda text: "[]", "is not a dump of a flight recorder"),
        (lambda text: "1" * 5000, "is not a dump of a flight recorder"),  # Python reads no longer numbers
        (lambda text: json.dumps({**json.loads(text), "format": 9}), "format 9; this version reads format 8"),
        (lambda text: json.dumps({**json.loads(text), "steps": [{}]}), r"dump.steps\[0\].branches is missing"),
        (lambda text: json.dumps({**json.loads(text), "problems": 3}), "dump.problems is 3; it must be a list"),
        (lambda text: json.dumps({**json.loads(text), "problems": []}), "dump: problems is empty; it must have one"),
        (
            lambda text: json.dumps({**json.loads(text), "problems": json.loads(text)["problems"] * 2}),
            "dump: problems has one twice; it must have one for each kind of layer",
        ),
        *[
            (partial(with_field, place, value), complaint)
            for place, value, complaint in (
                ("steps.0.kv_len.1", "x", r"dump.steps\[0\].kv_len\[1\] is 'x'; it must be of type int"),
                ("steps.0.rows.0", True, r"dump.steps\[0\].rows\[0\] is True; it must be of type int"),
                ("steps.0.kind", "gone", r"dump.steps\[0\]: kind is 'gone'; it must be one of decode, "),
                ("steps.0.group_seqs", [1], r"dump.steps\[0\]: group_seqs has 1 groups and group_prefix_len 0"),
                ("problems.0.dtype", "Tensor", r"dump.problems\[0\].dtype is 'Tensor'; it must be a dtype of torch"),
                ("problems.0.pool", 3, r"dump.problems\[0\].pool is 3; it must be one of SPLIT, LATENT"),
                (
                    "problems.0.indexer",
                    {},
                    r"dump.problems\[0\].indexer is \{\}; it must be an object whose kind is one",
                ),
                ("problems.0.num_kv_heads", 0, r"dump.problems\[0\]: num_kv_heads is 0; it must be at least 1"),
                ("runtime.options", [], "dump.runtime.options is .*; it must be an object with the fields of Runtime"),
                ("runtime.options.capture_sizes", [None], r"capture_sizes\[0\] is None; it must be of type int"),
                ("runtime.options.more", 1, "dump.runtime.options.more is no field of RuntimeOptions"),
            )
        ],
    ],
)
def test_a_damaged_dump_is_refused(damage: object, complaint: str, device: torch.device, tmp_path: Path) -> None:
    tiny = Tiny.build(device, "torch")
    runner, flight = flown(tiny, tmp_path / "dump.json", graphs=False)
    serve(runner, tiny.runtime)
    path = flight.dump("on request")
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(BadSetting, match=complaint):
        read_dump(path)


def test_a_missing_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="is not a dump of a flight recorder"):
        read_dump(tmp_path / "gone.json")

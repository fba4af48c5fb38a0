"""Faults on the device reach the host some steps later: once, by name, and whatever breaks in meanwhile."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.error_word import LENGTH_BEYOND_BOUND, TOKEN_WITHOUT_PAGE, WINDOW_WITHOUT_PAGE
from rocm_attn.kernels.metadata.slot_layout import (
    ECHO,
    ECHOED_STEP,
    HEADER_WORDS,
    NO_ECHO,
    STEP,
    STEP_BEFORE,
    WRONG_STEP,
)
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.echo import EchoCheck, fault_of
from tests.amd.runtime.interrupts import OutOfMemory, interrupted_at
from tests.amd.worlds.problems import providers
from tests.amd.worlds.two_rows import decode_of_both, run_split, run_whole, runtime_of_two_rows
from tests.amd.worlds.world import Request, World

pytestmark = pytest.mark.fast(interpreted=0)


def set_error_word(serving: World, word: int) -> int:
    """Sets the error word as a kernel of the last step would; returns that step's number."""
    counts = serving.runtime.gate._publisher._lines[0].counts
    assert counts is not None
    counts[3] = word
    return serving.runtime.faults.step_number


def steps_until_reported(serving: World, requests: Sequence[Request], num_steps: int = 6) -> list[tuple[int, str]]:
    """Returns (steps run before, message) for each fault that decode steps raise; each step is right."""
    reported = []
    for count in range(num_steps):
        try:
            serving.step(requests, [1] * len(requests))
        except DeviceFault as fault:
            reported.append((count, str(fault)))
            serving.step(requests, [1] * len(requests))
    return reported


def decoding(provider: str, device: torch.device, *, graphs: bool) -> tuple[World, list[Request]]:
    """Returns two requests after a decode step, whose graph is made."""
    serving = World.one_layer(device, graphs=graphs, provider=provider)
    requests = serving.begun(3, 5)
    serving.step(requests, [1, 1])
    return serving, requests


@pytest.mark.parametrize(
    ("word", "what"),
    [
        (TOKEN_WITHOUT_PAGE, "a new token had no page of its own"),
        (WINDOW_WITHOUT_PAGE, "was in a page that its row no longer holds"),
        (LENGTH_BEYOND_BOUND, "a length on the device was outside"),
        (TOKEN_WITHOUT_PAGE | LENGTH_BEYOND_BOUND, "dropped; .* a length on the device was outside"),
        (1 << 20, "the error word is 0x100000"),
    ],
)
def test_an_error_word_is_reported_two_steps_later(
    word: int, what: str, graphs: bool, provider: str, device: torch.device
) -> None:
    serving, requests = decoding(provider, device, graphs=graphs)
    number = set_error_word(serving, word)
    ((count, message),) = steps_until_reported(serving, requests)
    assert count == 2
    assert re.match(rf"step {number}: .*{what}", message)
    serving.runtime.check_device()


def test_every_bit_of_the_error_word_is_reported_in_words_and_described() -> None:
    """Each is a separate bit, below those that the echo of a step has for itself."""
    bits = {name: bit for name, bit in vars(error_word).items() if name.isupper() and name != "ERROR_WORD"}
    assert sorted(bits.values()) == [1 << at for at in range(len(bits))]
    assert max(bits.values()) < WRONG_STEP
    reported = [str(fault_of(7, bit)) for bit in bits.values()]
    assert len(set(reported)) == len(bits)
    assert not [words for words in reported if "the error word is" in words]
    table = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    assert [name for name in bits if f"| `{name}` |" not in table] == []


def test_a_step_in_anothers_place_is_reported_unless_its_lost_inputs_were() -> None:
    check, words = EchoCheck(), np.zeros(HEADER_WORDS, np.int32).data
    words[ECHO], words[ECHOED_STEP] = WRONG_STEP, 1
    with pytest.raises(DeviceFault, match="the device took step 0 for step 1"):
        check(words)
    words[ECHO], words[STEP] = NO_ECHO, 7
    with pytest.raises(DeviceFault, match="the inputs of step 7 never reached the device"):
        check(words)
    words[ECHO], words[STEP_BEFORE] = WRONG_STEP, 7
    check(words)


def test_a_fault_of_a_step_in_other_buffers_is_reported_too(provider: str, device: torch.device) -> None:
    """The fault is one of an extend step, whose buffers grow; later decode steps use the buffers that graphs read."""
    serving, requests = decoding(provider, device, graphs=True)
    serving.step(requests, [3, 2])
    number = set_error_word(serving, TOKEN_WITHOUT_PAGE)
    assert [message.partition(":")[0] for _, message in steps_until_reported(serving, requests)] == [f"step {number}"]


def test_a_fault_is_reported_although_its_memory_was_given_up(provider: str, device: torch.device) -> None:
    serving, requests = decoding(provider, device, graphs=True)
    number = set_error_word(serving, TOKEN_WITHOUT_PAGE)
    serving.runtime.seals.give_up()
    assert [message.partition(":")[0] for _, message in steps_until_reported(serving, requests)] == [f"step {number}"]


def test_a_fault_is_reported_by_a_slot_that_grows(provider: str, device: torch.device) -> None:
    serving, requests = decoding(provider, device, graphs=False)
    number = set_error_word(serving, TOKEN_WITHOUT_PAGE)
    serving.step(requests, [1, 1])
    serving.step(requests, [1, 1])
    rows = np.array([request.row for request in requests])
    kv_len = np.array([request.kv_len + 20 for request in requests], np.int32)
    serving.runtime.table.reserve_all(rows, kv_len)
    large = StepBatch(rows, kv_len, np.array([20, 20]), np.zeros(40, np.int32))
    with pytest.raises(DeviceFault, match=f"step {number}: "):
        serving.runtime.step(large)
    serving.step(requests, [1, 1])


def test_a_graph_that_never_ran_is_reported_when_the_device_is_asked(device: torch.device) -> None:
    """It would have taken its inputs; the next one takes them in its place."""
    serving, requests = decoding(providers()[-1], device, graphs=True)
    serving.step(requests, [1, 1])
    (entry,) = (graph for graph in serving.runner._graph_of_plan.values() if graph.takes_inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry.recording, "replay", partial(serving.runtime.graph_runs.run, lambda: None))
        serving.run(requests, [1, 1])
    serving.run(requests, [1, 1])
    with pytest.raises(
        DeviceFault, match=f"the inputs of step {serving.runtime.faults.step_number} never reached the device"
    ):
        serving.runtime.check_device()
    serving.free(*requests)
    assert steps_until_reported(serving, serving.admit_all(2)) == []
    serving.runtime.check_device()


def test_a_step_whose_inputs_were_lost_is_reported_once(provider: str, device: torch.device) -> None:
    serving, requests = decoding(provider, device, graphs=False)
    publisher = serving.runtime.gate._publisher
    publish = publisher._ops.publish
    publisher._ops = replace(publisher._ops, publish=lambda *args, **kwargs: None)
    serving.run(requests, [1, 1])
    publisher._ops = replace(publisher._ops, publish=publish)
    lost = serving.runtime.faults.step_number
    # The requests have one token fewer than they assume: the lost token is gone.
    serving.free(*requests)
    requests = serving.admit_all(2)
    ((count, message),) = steps_until_reported(serving, requests)
    assert count == 1
    assert message.startswith(f"the inputs of step {lost} never reached the device, which went on with those of an ear")
    serving.runtime.check_device()


def test_counts_that_somebody_overwrote_are_reported(provider: str, device: torch.device) -> None:
    serving, requests = decoding(provider, device, graphs=False)
    counts, number = serving.runtime.gate._publisher._lines[0].counts, serving.runtime.faults.step_number
    assert counts is not None
    counts.fill_(0x7F7F7F7F)
    ((_, message),) = steps_until_reported(serving, requests)
    assert message.startswith(
        f"the device took step {number} for step {0x7F7F7F7F}; look for code that wrote to the step's"
    )


def test_a_launch_that_fails_is_not_taken_for_a_lost_step(provider: str, device: torch.device) -> None:
    serving, requests = decoding(provider, device, graphs=False)
    publisher = serving.runtime.gate._publisher
    publish = publisher._ops.publish

    for _ in range(2):
        publisher._ops = replace(publisher._ops, publish=Mock(side_effect=RuntimeError("no launch")))
        number = serving.runtime.faults.step_number
        with pytest.raises(RuntimeError, match="no launch"):
            serving.run(requests, [1, 1])
        publisher._ops = replace(publisher._ops, publish=publish)
        assert serving.runtime.faults.step_number == number
        serving.step(requests, [1, 1])
    assert steps_until_reported(serving, requests) == []


def test_a_step_that_is_missing_at_the_end_is_reported(provider: str, device: torch.device) -> None:
    serving, _ = decoding(provider, device, graphs=False)
    counts, number = serving.runtime.gate._publisher._lines[0].counts, serving.runtime.faults.step_number
    assert counts is not None
    counts[2] = number - 1
    with pytest.raises(DeviceFault, match=f"counts of step {number - 1} and step {number} was published last"):
        serving.runtime.check_device()
    serving.runtime.check_device()


def test_two_runtimes_hear_of_their_own_steps_only(provider: str, device: torch.device) -> None:
    served = [decoding(provider, device, graphs=graphs) for graphs in (False, True)]
    served[0][0].step(served[0][1], [1, 1])
    numbers = [set_error_word(served[1][0], TOKEN_WITHOUT_PAGE)]
    reported: list[list[str]] = [[], []]
    for round_ in range(8):
        for at, (serving, requests) in enumerate(served):
            try:
                serving.step(requests, [1, 1])
            except DeviceFault as fault:
                reported[at].append(str(fault).partition(":")[0])
                serving.step(requests, [1, 1])
        if round_ == 3:
            numbers.append(set_error_word(served[0][0], LENGTH_BEYOND_BOUND))
    assert reported == [[f"step {numbers[1]}"], [f"step {numbers[0]}"]]


def two_faults() -> AttentionRuntime:
    """Returns a runtime after a whole step, 1, and a split one, 2 and 3; 1 and 3 got lengths beyond their bounds."""
    made = runtime_of_two_rows()
    run_whole(made, decode_of_both(10, 99))
    run_split(made, decode_of_both(10, 99))
    return made


def listen(reported: set[int], call: Callable[[], object]) -> None:
    """Adds the steps whose faults a call raises, or was about to raise when another error came."""
    try:
        call()
    except DeviceFault as fault:
        reported |= steps_of(fault)
    except BaseException as error:
        reported |= steps_of(error.__context__)
        raise


def steps_of(error: BaseException | None) -> set[int]:
    lines = str(error).splitlines() if isinstance(error, DeviceFault) else []
    return {int(line.partition(":")[0].removeprefix("step ")) for line in lines}


def go_on(runtime: AttentionRuntime, reported: set[int]) -> None:
    """Runs as many whole steps as a report may take."""
    for _ in range(8):
        listen(reported, partial(runtime.step, decode_of_both(10, 10)))
        runtime.end_step()


CALLS: dict[str, Callable[[AttentionRuntime], object]] = {
    "check_device": lambda runtime: runtime.check_device(),
    "reseal": lambda runtime: runtime.seals.reseal((1, 2)),
    "steps": lambda runtime: runtime.step(decode_of_both(10, 10)),
}


# Number of operations, or lines, from one failure to the next.
apart = pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.nightly)])


@pytest.mark.fast(2)
@apart
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rest", ["steps", "check_device"])
def test_a_fault_is_reported_although_memory_runs_out_while_the_device_is_asked(
    call: str, rest: str, apart: int
) -> None:
    operation, broken = 1, True
    while broken:
        runtime, reported, broken = two_faults(), set[int](), False
        try:
            with OutOfMemory(operation):
                listen(reported, partial(CALLS[call], runtime))
        except torch.OutOfMemoryError:
            broken = True
        runtime.end_step()
        if rest == "steps":
            go_on(runtime, reported)
        else:
            listen(reported, runtime.check_device)
        assert reported == {1, 3}, f"memory ran out at operation {operation}"
        operation += apart
    assert operation > 3


@pytest.mark.fast(1)
@apart
@pytest.mark.parametrize("call", ["check_device", "steps"])
def test_a_fault_is_reported_although_the_user_interrupts_while_the_device_is_asked(call: str, apart: int) -> None:
    line, broken = 1, True
    while broken:
        runtime, reported = two_faults(), set[int]()
        broken = interrupted_at(line, partial(listen, reported, partial(CALLS[call], runtime)))
        runtime.end_step()
        listen(reported, runtime.check_device)
        go_on(runtime, reported)
        assert reported == {1, 3}, f"interrupted at line {line}"
        line += apart
    assert line > 20

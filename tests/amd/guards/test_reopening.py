"""reopen() that fails, is interrupted, or is called by another runner: no graph of an earlier seal serves again."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import CapacityExceeded, DeviceFault
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.metadata.error_word import TOKEN_WITHOUT_PAGE
from rocm_attn.step.metrics import Reason
from rocm_attn.step.step import Part
from tests.amd.runtime.interrupts import interrupted_at
from tests.amd.worlds.world import ALL_ON, Request, World, is_right

CPU = torch.device("cpu")


def decoding(guards: Guards = ALL_ON) -> tuple[World, list[Request]]:
    """Returns requests whose decode steps of two sequences are replayed."""
    serving = World.one_layer(CPU, guards, graphs=True, capture_sizes=(1, 2))
    requests = serving.begun(4, 3, 2, 2, 2)
    for _ in range(2):
        serving.step(requests[:2], [1, 1])
    return serving, requests


def steps_of_all_sizes(serving: World, requests: list[Request]) -> bool:
    """True if decode steps are right while their sizes grow, and when earlier sizes return."""
    right = True
    for count in (1, 2, 4, 1, 5, 2):
        serving.run(requests[:count], [1] * count)
        right &= is_right(serving, requests[:count], [1] * count)
    return right


def test_no_graph_is_made_of_memory_that_may_move() -> None:
    """Half of a reopen: the old seal is gone, and there is no new one."""
    serving, requests = decoding(ALL_ON)
    serving.runtime.seals.unseal((1, 2, 4))
    replays = serving.runner.counters.replays
    assert steps_of_all_sizes(serving, requests)
    assert serving.runner.counters.replays == replays
    assert "the addresses that graphs read are not sealed" in serving.runner.counters.graphs_off
    assert serving.runner.capture_report().graphs_off == serving.runner.counters.graphs_off
    serving.runner.reopen((1, 2, 4))
    assert steps_of_all_sizes(serving, requests)
    assert serving.runner.counters.graphs_off == ""
    assert serving.runner.counters.replays > replays

    serving, requests = decoding(Guards().without("sealed_capture"))
    serving.runtime.seals.unseal((1, 2, 4))
    assert not steps_of_all_sizes(serving, requests)


def run_out_of_memory(patch: pytest.MonkeyPatch, *, after: int) -> None:
    """Allows `after` more tensors to be allocated; later allocations fail."""
    left = after

    def limited(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: object, **kwargs: object) -> torch.Tensor:
            nonlocal left
            if left == 0:
                raise torch.OutOfMemoryError("no memory is left")
            left -= 1
            return allocate(*args, **kwargs)

        return allocated

    for name in ("full", "empty", "zeros"):
        patch.setattr(torch, name, limited(getattr(torch, name)))


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1,)], ids=["larger", "smaller"])
def test_a_reopen_that_runs_out_of_memory_changes_nothing(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, requests = decoding()
    addresses = {name: tensor.data_ptr() for name, tensor in serving.runtime.seals.tensors().items()}
    failures = 0
    while True:
        with monkeypatch.context() as patch:
            run_out_of_memory(patch, after=failures)
            try:
                serving.runner.reopen(sizes)
            except torch.OutOfMemoryError:
                failures += 1
            else:
                break
        before = serving.runner.counters.replays
        assert addresses == {name: tensor.data_ptr() for name, tensor in serving.runtime.seals.tensors().items()}
        serving.step(requests[:2], [1, 1])
        assert serving.runner.counters.replays == before + 1
        serving.runner.check_addresses()
    assert failures > 5
    assert serving.runtime.padding.seqs.sizes == sizes
    assert steps_of_all_sizes(serving, requests)


@pytest.mark.fast(1)
@pytest.mark.parametrize("apart", [197, pytest.param(23, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (1,)], ids=["larger", "smaller"])
def test_a_reopen_that_is_interrupted_at_any_line_serves_right(sizes: tuple[int, ...], apart: int) -> None:
    serving, requests = decoding()
    line = 1
    while interrupted_at(line, lambda: serving.runner.reopen(sizes)):
        serving.step(requests[:2], [1, 1])
        serving.step(requests[:4], [1] * 4)
        serving.step(requests[:2], [1, 1])
        if serving.runner.counters.graphs_off == "":
            serving.runner.check_addresses()
        if line % 5 == 1:
            serving.runner.reopen((1, 2))
            serving.free(*requests)
            requests = serving.begun(4, 3, 2, 2, 2)
        line += apart
    assert line > 200
    assert steps_of_all_sizes(serving, requests)


def test_reopening_reports_the_last_steps_first_and_changes_nothing_then() -> None:
    serving, requests = decoding()
    counts = serving.runtime.gate._publisher._lines[0].counts
    assert counts is not None
    counts[3] = TOKEN_WITHOUT_PAGE
    with pytest.raises(DeviceFault, match=f"step {serving.runtime.faults.step_number}: "):
        serving.runner.reopen((1, 2, 4))
    before = serving.runner.counters.replays
    serving.step(requests[:2], [1, 1])
    assert serving.runner.counters.replays == before + 1
    serving.runner.reopen((1, 2, 4))
    assert steps_of_all_sizes(serving, requests)


def test_a_rank_that_cannot_reopen_leaves_all_ranks_as_they_are() -> None:
    serving, requests = decoding()
    reported = []

    def as_on_another_rank(findings: object) -> dict[str, str]:
        reported.append(findings)
        return {"reopen": "on rank 1: OutOfMemoryError: no memory is left"}

    serving.runtime.agree = as_on_another_rank
    with pytest.raises(CapacityExceeded, match="because a rank could not: on rank 1: OutOfMemoryError: no memory"):
        serving.runner.reopen((1, 2, 4))
    assert reported == [{}]
    before = serving.runner.counters.replays
    serving.step(requests[:2], [1, 1])
    assert serving.runner.counters.replays == before + 1


def test_a_rank_that_cannot_reopen_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, _ = decoding()
    reported: list[object] = []
    serving.runtime.agree = lambda findings: reported.append(findings) or {}  # type: ignore[func-returns-value]

    monkeypatch.setattr(serving.runtime.core.memory, "part_for", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        serving.runner.reopen((1, 2, 4))
    assert reported == [{"reopen": "KeyboardInterrupt: "}]


# Two runners over one runtime: actions of the second one, and whether the first one's graphs still serve then.


def refused(serving: World) -> None:
    """Has its graph refused: forward reads a value on the host."""

    def forward(step: Part) -> torch.Tensor:
        int(step.token_ids.sum())
        return serving.forward(step)

    serving.runner = StepRunner(serving.runtime, forward, recorder_for(CPU), check=NO_CHECK)


def reopened(serving: World) -> None:
    serving.runner = StepRunner(serving.runtime, serving.forward, recorder_for(CPU), check=NO_CHECK)
    serving.runner.reopen((1, 2, 4))


def unsealed(serving: World) -> None:
    serving.runtime.seals.unseal((1, 2))


@pytest.mark.fast(2)
@pytest.mark.parametrize(("second", "keeps_graphs"), [(refused, True), (reopened, True), (unsealed, False)])
def test_what_another_runner_of_the_runtime_does_makes_no_result_wrong(
    second: Callable[[World], None], keeps_graphs: bool
) -> None:
    serving, requests = decoding()
    first = serving.runner
    second(serving)
    other = serving.runner
    for _ in range(2):
        for runner in (first, other):
            serving.runner = runner
            assert steps_of_all_sizes(serving, requests[:5])
        serving.free(*requests)
        requests = serving.admit_all(5)
        serving.runner = first
        serving.step(requests, [4, 3, 2, 2, 2])
    before = first.counters.replays
    serving.step(requests[:2], [1, 1])
    assert (first.counters.replays > before) == keeps_graphs
    if second is refused:
        assert "test_reopening.py" in other.counters.graphs_off
    if not keeps_graphs:
        assert "unseal() or an interrupted reopen(); call reopen() to make" in first.counters.graphs_off
        first.reopen((1, 2))
        serving.step(requests[:2], [1, 1])
        assert first.counters.graphs_off == ""
        assert first.counters.replays == before + 1


def test_the_last_runner_that_is_refused_gives_up_the_sealed_addresses() -> None:
    serving, requests = decoding()
    first = serving.runner
    refused(serving)
    serving.step(requests[:2], [1, 1])
    assert serving.runtime.seals.number
    first._switch_off(Reason("as if it were refused", "refused"))
    assert not serving.runtime.seals.number

"""A fresh graph is compared with the eager run before it serves: right graphs pass, planted wrong ones are refused."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape, fits
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.check import NO_CHECK, CaptureCheck, _own_draws, bitwise_equal, rows_beyond_bounds
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.probe_requests import ProbeLimits
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadSetting, DeviceFault
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.paging.index_spaces import RESERVED_PAGE
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import (
    SERVED,
    Forgetful,
    GivesNaN,
    Lazy,
    Requests,
    Tiny,
    counts_on_the_host,
    same,
    serve,
    takes_another_bias_each_step,
)

Forward = Callable[[Part], Tensor]
Plant = Callable[[Tiny], tuple[Forward, Recorder]]


def _recorder(tiny: Tiny) -> Recorder:
    return recorder_for(tiny.runtime.device)


PLANTED: dict[str, Plant] = {
    "a count baked": lambda tiny: (counts_on_the_host(tiny), _recorder(tiny)),
    "a stale address": lambda tiny: (takes_another_bias_each_step(tiny), _recorder(tiny)),
    "no fill": lambda tiny: (tiny.forward, Forgetful(_recorder(tiny), tiny.runtime, "fill")),
    "no store": lambda tiny: (tiny.forward, Forgetful(_recorder(tiny), tiny.runtime, "store_kv")),
    "a dead graph": lambda tiny: (tiny.forward, Lazy(_recorder(tiny))),
    "NaN alone": lambda tiny: (tiny.forward, GivesNaN(_recorder(tiny))),
}


def eager_outputs(device: torch.device, provider: str, plant: Plant) -> list[Tensor]:
    """Returns the outputs of the planted forward without graphs."""
    tiny = Tiny.build(device, provider, [4])
    forward, _ = plant(tiny)
    return serve(StepRunner(tiny.runtime, forward, None), tiny.runtime)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_graph_is_refused_and_serving_goes_on_eagerly(
    planted: str, provider: str, device: torch.device
) -> None:
    tiny = Tiny.build(device, provider, [4])
    forward, recorder = PLANTED[planted](tiny)
    runner = StepRunner(tiny.runtime, forward, recorder)
    outs = serve(runner, tiny.runtime)
    assert "the graph of decode of 4 sequences differs from the eager run" in runner.counters.graphs_off
    assert runner.counters.graphs_off.word == "differs"
    assert (runner.counters.replays, runner.counters.captures) == (0, 0)
    assert runner.capture_report().graphs_off == runner.counters.graphs_off
    assert same(outs, eager_outputs(device, provider, PLANTED[planted]))


@pytest.mark.fast(2)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_graph_is_refused_where_every_row_is_taken(planted: str, provider: str, device: torch.device) -> None:
    outs = []
    for graphs in (False, True):
        tiny = Tiny.build(device, provider, [4], max_num_seqs=3)
        forward, recorder = PLANTED[planted](tiny)
        runner = StepRunner(tiny.runtime, forward, recorder if graphs else None)
        outs.append(serve(runner, tiny.runtime))
        assert ("differs from the eager run" in runner.counters.graphs_off) == graphs
    assert same(*outs)


@pytest.mark.fast(1)
@pytest.mark.parametrize("rows", [3, 4, 8], ids=["no free row", "one free row", "free rows"])
def test_right_graphs_pass_and_nothing_is_left_behind(rows: int, provider: str, device: torch.device) -> None:
    outs = []
    for check in (CaptureCheck(), NO_CHECK):
        tiny = Tiny.build(device, provider, [2, 4], max_num_seqs=rows)
        runner = tiny.runner(check=check)
        outs.append(serve(runner, tiny.runtime))
        assert runner.counters.graphs_off == ""
        assert runner.counters.replays == len(SERVED) - 1
        table = tiny.runtime.table
        assert (table.num_free_rows, table.full.num_free_pages) == (rows, 199)
    assert same(*outs)


@pytest.mark.fast
@pytest.mark.parametrize("planted", ["nothing", "no fill", "no store", "a dead graph"])
@pytest.mark.parametrize("rows", [3, 8], ids=["no free row", "free rows"])
def test_the_kv_of_requests_is_the_same_with_and_without_a_check(
    rows: int, planted: str, provider: str, device: torch.device
) -> None:
    """This holds for requests in the captured step, and for others."""
    stored = []
    for graphs in (False, True):
        tiny = Tiny.build(device, provider, [4], max_num_seqs=rows)
        forward, recorder = PLANTED[planted](tiny) if planted in PLANTED else (tiny.forward, _recorder(tiny))
        idle, busy = Requests(tiny.runtime, seed=2), Requests(tiny.runtime, seed=3)
        idle.admit(1)
        busy.admit(2)
        eager = StepRunner(tiny.runtime, forward, None)
        for requests, q_len in ((busy, [7, 2]), (idle, [9]), (idle, [1])):
            requests.run(eager, q_len)
        runner = StepRunner(tiny.runtime, forward, recorder if graphs else None)
        busy.run(runner, [1, 1])
        assert bool(runner.counters.graphs_off) == (graphs and planted in PLANTED)
        stored.append([kv for requests in (idle, busy) for kv in requests.stored()])
        assert not any(tiny.runtime.pool.layer(layer).k[RESERVED_PAGE].any() for layer in range(len(tiny.problems)))
    assert same(*stored)


def test_a_refusal_gives_up_the_sealed_addresses(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4])
    runner = StepRunner(tiny.runtime, counts_on_the_host(tiny), recorder_for(tiny.runtime.device))
    assert tiny.runtime.core.memory._sealed.sealed
    runner.capture_all()
    assert runner.counters.graphs_off
    assert not tiny.runtime.core.memory._sealed.sealed


def test_probes_reach_the_largest_lengths_that_there_is_room_for_with_any_vocabulary(
    provider: str, device: torch.device
) -> None:
    for num_pages, limits, longest in (
        (200, ProbeLimits(128, 200), 64 if provider == "torch" else 128),
        (200, ProbeLimits(20, 200), 20),
        (12, ProbeLimits(128, 200), 20),
    ):
        tiny = Tiny.build(device, provider, [4], num_pages=num_pages)
        check = CaptureCheck(limits=limits, vocabulary=1)
        runner = tiny.runner(check=check)
        (bucket,) = runner.capture_all().buckets
        assert f"bitwise in 3 random batches of up to 4 sequences and {longest} tokens" in bucket.check


@pytest.mark.fast(1)
@pytest.mark.parametrize("planted", ["no fill", "no store", "a dead graph"])
def test_graphs_of_ragged_steps_are_checked_too(planted: str, provider: str, device: torch.device) -> None:
    served = [[3, 5], [4, 4], [1, 6], [2, 2], [5, 1]]
    right, wrong = [Tiny.build(device, provider, [2], tokens=(8,)) for _ in range(2)]
    passes = right.runner()
    outs = serve(passes, right.runtime, served)
    assert (passes.counters.graphs_off, passes.counters.replays) == ("", len(served))
    fails = StepRunner(wrong.runtime, *PLANTED[planted](wrong))
    assert same(outs, serve(fails, wrong.runtime, served))
    assert "the graph of extend of 2 sequences with 8 tokens differs" in fails.counters.graphs_off


def test_an_exception_in_a_check_keeps_no_graph(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4])
    runs = 0

    def forward(step: Part) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 5:  # after warm-up and recording, on every recorder
            raise ZeroDivisionError
        return tiny.forward(step)

    runner = StepRunner(tiny.runtime, forward, recorder_for(tiny.runtime.device))
    with pytest.raises(ZeroDivisionError):
        runner.capture_all()
    assert runner.capture_report().buckets == ()
    assert tiny.runtime.table.num_free_rows == 8
    serve(runner, tiny.runtime)
    assert runner.counters.graphs_off == ""
    assert runner.counters.replays == len(SERVED) - 1


def test_a_model_that_gives_no_numbers_is_not_taken_for_checked(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4])
    runner = StepRunner(tiny.runtime, lambda step: tiny.forward(step) * float("nan"), recorder_for(tiny.runtime.device))
    runner.capture_all()
    assert "only NaN or infinity" in runner.counters.graphs_off


@pytest.mark.fast
@pytest.mark.parametrize("num_bad", [1, 1000])
def test_a_live_step_without_numbers_leaves_graphs_to_later_steps(
    num_bad: int, provider: str, device: torch.device
) -> None:
    """One request may be at fault. A model whose steps never have any is found at the next try."""
    tiny, num_steps = Tiny.build(device, provider, [4], max_num_seqs=3), 0

    def forward(step: Part) -> Tensor:
        return tiny.forward(step) * (float("nan") if num_steps <= num_bad else 1.0)

    runner = StepRunner(tiny.runtime, forward, _recorder(tiny))
    requests = Requests(tiny.runtime, seed=3)
    requests.admit(3)
    requests.run(runner, [7, 2, 3])
    for _ in range(70):
        num_steps += 1
        requests.run(runner, [1, 1, 1])
    assert runner.counters.fallbacks["forward returns only NaN or infinity"] == 1
    assert (runner.counters.replays > 0) == (num_bad == 1)
    assert ("only NaN or infinity" in runner.counters.graphs_off) == (num_bad > 1)


@pytest.mark.parametrize("num_bad", [1, 1000])
def test_a_live_step_with_nan_in_a_request_leaves_graphs_to_later_steps(num_bad: int) -> None:
    """One request's K that is NaN in the step that a graph was tried on switched all graphs off."""
    tiny = Tiny.build(torch.device("cpu"), "torch", [4], max_num_seqs=3)
    runner, requests = StepRunner(tiny.runtime, tiny.forward, _recorder(tiny)), tiny.admitted(3)
    requests.run(runner, [7, 2, 3])
    embedding = tiny.embedding.clone()
    for number in range(70):
        batch = requests.batch([1, 1, 1])
        tiny.embedding[batch.token_ids[0]] = float("nan") if number < num_bad else 1.0
        for _ in range(4):  # faults of earlier steps come first
            with suppress(DeviceFault):
                runner.run(batch)
                break
        tiny.embedding.copy_(embedding)
    assert (runner.counters.replays > 0) == (num_bad == 1)
    assert ("K or V of a new token was infinite or NaN" in runner.counters.graphs_off) == (num_bad > 1)


def test_each_step_of_a_check_fits_the_shape_where_another_order_of_the_halves_does_not() -> None:
    live, shape = StepBatch([1, 2, 3, 4], [6, 1, 1, 6], [6, 1, 1, 6]), PaddedShape(StepKind.EXTEND, 4, 14, 2)
    draws = list(_own_draws(live, shape))
    assert all(fits(batch, shape) for batch in draws)
    assert [batch.rows.tolist() for batch in draws] == [[1, 2, 3, 4], [2, 1], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_rows_beyond_the_bounds_are_found(provider: str) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for change, wrong in ((1e-7, []), (1e-3, [2]), (float("nan"), [2]), (float("inf"), [2])):
        other = rows.clone()
        other[2, 1] += change
        assert rows_beyond_bounds(other, rows) == wrong
    gap = rows.clone()
    gap[3] = float("nan")
    assert rows_beyond_bounds(gap, gap.clone()) == []
    assert bitwise_equal(gap, gap.clone())
    assert not bitwise_equal(gap, rows)
    assert rows_beyond_bounds(rows, gap) == [3]
    assert rows_beyond_bounds(rows[:, 0], rows[:, 0] + torch.arange(5)) == [1, 2, 3, 4]
    assert rows_beyond_bounds(torch.arange(4), torch.tensor([0, 1, 5, 3])) != []
    assert rows_beyond_bounds(rows[:0], rows[:0]) == []
    assert rows_beyond_bounds(rows, torch.full_like(rows, float("nan"))) == [0, 1, 2, 3, 4]
    assert rows_beyond_bounds(rows.half().float(), rows.half()) == [0, 1, 2, 3, 4]


def kept_values(runtime: AttentionRuntime, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[torch.Tensor]:
    """Returns copies of K and V of kept pages in every layer."""
    values = []
    for layer in range(len(runtime.core.layers)):
        space = runtime.pool.space_of_layer(layer)
        pages = torch.from_numpy(runtime.table.kept.pages(ids, space)).long().to(runtime.device)
        values += [side[pages].clone() for side in (runtime.pool.layer(layer).k, runtime.pool.layer(layer).v)]
    return values


@pytest.mark.parametrize("swa_pages", [0, 60], ids=["one space", "two spaces"])
def test_the_check_of_a_graph_leaves_kept_pages_alone(swa_pages: int, device: torch.device) -> None:
    tiny = Tiny.build(
        device, "torch", [1, 2], num_pages=60, window_left=9 if swa_pages else UNLIMITED_WINDOW, swa_pages=swa_pages
    )
    runtime, table = tiny.runtime, tiny.runtime.table
    runner = StepRunner(runtime, tiny.forward, recorder_for(runtime.device))
    requests = Requests(runtime)
    requests.admit(1)
    requests.run(runner, [12])
    ids = table.kept.keep(requests.rows[0], 0, 3)
    table.free(requests.rows.pop())
    requests.kv_len.pop()
    before = kept_values(runtime, ids)
    assert runner.capture_all().buckets
    requests.admit(2)
    requests.run(runner, [30, 30])
    requests.run(runner, [1, 1])
    assert runner.counters.replays > 0
    for old, new in zip(before, kept_values(runtime, ids), strict=True):
        assert torch.equal(old, new)
    assert all(table.kept.num_holders_of(ids, space.space).tolist() == [1, 1, 1] for space in table.spaces)


@pytest.mark.parametrize("given", [{"vocabulary": 0}, {"vocabulary": None}, {"seed": -1}, {"seed": 1.5}], ids=str)
def test_a_check_of_no_tokens_is_refused_before_anything_is_captured(given: dict[str, Any]) -> None:
    """It was refused in a step, by NumPy."""
    with pytest.raises(BadSetting, match=r"(vocabulary|seed) is .*; it must be"):
        CaptureCheck(**given)

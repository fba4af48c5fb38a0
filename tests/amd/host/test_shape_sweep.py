"""Random shapes: the same for a seed, all legal and of one size; limits and the worst of a sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_lab.bench.prepared import step_kind
from rocm_lab.benchmarks import random_shapes as sweep
from rocm_lab.benchmarks.shape_sweep import (
    MOST_BYTES,
    MOST_FLOPS,
    TUNED_DIMS,
    TUNED_RATIOS,
    TUNED_RATIOS_OF_DECODE,
    SweepShape,
    SweepStep,
    SweepTimes,
    random_shapes,
)

SHAPES = random_shapes(300, 14)
PLAIN = SweepShape(8, 2, 64, 16, UNLIMITED_WINDOW, SweepStep.EXTEND, kv_len=(10, 3), q_len=(4, 3))


def pairs_one_by_one(shape: SweepShape) -> int:
    return sum(
        min(token + 1, shape.window_left + 1 if shape.is_windowed else kv_len)
        for kv_len, q_len in zip(shape.kv_len, shape.q_len, strict=True)
        for token in range(kv_len - q_len, kv_len)
    )


def test_a_seed_gives_the_same_shapes_and_another_seed_others() -> None:
    assert random_shapes(20, 14) == SHAPES[:20]
    assert random_shapes(20, 15) != SHAPES[:20]


def test_every_shape_is_legal_and_no_larger_than_it_may_be() -> None:
    for shape in SHAPES:
        for each in (shape, shape.neighbour()):
            assert each.num_q_heads == each.gqa_ratio * each.num_kv_heads, each
            assert 1 <= each.num_q_heads <= 256, each
            assert len(each.kv_len) == len(each.q_len) >= 1, each
            assert all(1 <= q <= kv for kv, q in zip(each.kv_len, each.q_len, strict=True)), each
            pages = sum(-(-kv // each.page_size) for kv in each.kv_len) * each.page_size
            assert 4 * pages * each.num_kv_heads * each.head_dim <= MOST_BYTES, each
            assert each.needs.flops <= MOST_FLOPS, each


@pytest.mark.parametrize("window_left", [UNLIMITED_WINDOW, 0, 2, 8, 9, 100])
def test_products_are_counted_for_each_key_that_a_token_sees(window_left: int) -> None:
    shape = replace(PLAIN, window_left=window_left)
    assert shape.powers == 8 * pairs_one_by_one(shape)
    assert shape.needs.flops == 4 * 64 * shape.powers


def test_a_neighbour_has_the_nearest_tuned_layout_and_the_same_step() -> None:
    shape = replace(PLAIN, head_dim=80, num_q_heads=2 * 5)
    assert shape.neighbour() == replace(shape, head_dim=64, num_q_heads=2 * 4)
    for each in SHAPES:
        neighbour = each.neighbour()
        assert neighbour.head_dim in TUNED_DIMS
        is_decode = each.work is SweepStep.DECODE
        assert neighbour.gqa_ratio in (TUNED_RATIOS_OF_DECODE if is_decode else TUNED_RATIOS)
        assert neighbour.neighbour() == neighbour
        assert (neighbour.kv_len, neighbour.q_len, neighbour.page_size) == (each.kv_len, each.q_len, each.page_size)


def timed(name: str, us: float, neighbour_us: float, peer_us: float = 0.0) -> SweepTimes:
    return SweepTimes(name, us, 10.0, "neighbour", neighbour_us, 20.0, peer_us=peer_us)


def test_a_cliff_is_far_from_its_neighbour_or_from_the_best_peer() -> None:
    assert not timed("neither", 15.0, 30.0, peer_us=15.0).is_cliff
    assert timed("neighbour", 24.0, 30.0, peer_us=24.0).is_cliff
    assert timed("peer", 15.0, 30.0, peer_us=9.0).is_cliff


class Gpu:
    """A lock that records the calls made while it is held, and while it is not."""

    def __init__(self) -> None:
        self.is_held = False
        self.done: list[tuple[str, bool]] = []

    def __enter__(self) -> None:
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False

    def notes(self, name: str, result: Any) -> Any:
        def call(*_: object) -> Any:
            self.done.append((name, self.is_held))
            return result

        return call


@pytest.mark.parametrize(("error", "times"), [(1e-3, 2), (1.0, 0)], ids=["right", "wrong"])
def test_a_process_only_compiles_while_another_one_has_the_gpu(
    error: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    cases = [Mock(launch=Mock(run=gpu.notes("compile", None)))]
    for owner, name, result in (
        (sweep, "cases_of", cases),
        (sweep, "error_of", error),
        (sweep, "_microseconds", 5.0),
        (torch.cuda, "synchronize", None),
        (torch.cuda, "memory_reserved", sweep.MOST_RESERVED + 1),
        (torch.cuda, "empty_cache", None),
    ):
        monkeypatch.setattr(owner, name, gpu.notes(name, result))
    found = sweep.Worker(gpu, "", float("inf")).measured(7, replace(PLAIN, head_dim=40))  # type: ignore[arg-type]
    assert found is not None
    assert bool(found.wrong) == (not times)
    assert {name for name, is_held in gpu.done if not is_held} == {"compile"}
    assert [name for name, _ in gpu.done].count("_microseconds") == times
    assert gpu.done[-1] == ("empty_cache", True)


def test_what_the_last_replay_leaves_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each shape the first case is compared after its eager run, and the last one after replays over NaN."""
    shape = replace(PLAIN, head_dim=40)
    cases = [Mock(), Mock()]
    timed = Mock(**{"microseconds.return_value": 5.0})
    gpu: Any = Gpu()
    monkeypatch.setattr(sweep, "cases_of", lambda *_: cases)
    monkeypatch.setattr(sweep, "error_of", Mock(side_effect=[0.0, 0.0, 0.0, float("inf")]))
    monkeypatch.setattr(sweep, "_graph_of", lambda work: timed)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    found = sweep.Worker(gpu, "", float("inf")).measured(7, shape)
    assert found is not None
    assert found.wrong == {str(shape.neighbour()): "after replays: error inf"}
    assert not found.times
    for case in cases:
        assert case.data.out.fill_.call_count == 2
    assert timed.run.call_count == 2


def test_a_process_whose_device_fails_says_at_which_shape_and_measures_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = replace(PLAIN, head_dim=40)
    neighbour = shape.neighbour()
    assert neighbour != shape
    failure = RuntimeError("an illegal memory access was encountered\nand more")
    times = Mock(side_effect=[5.0, failure])
    gpu: Any = Gpu()
    monkeypatch.setattr(sweep, "cases_of", lambda *_: [Mock()])
    monkeypatch.setattr(sweep, "error_of", lambda *_: 0.0)
    monkeypatch.setattr(sweep, "_microseconds", times)
    # The first one comes before anything ran.
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=[None, None, failure]))
    worker = sweep.Worker(gpu, "", float("inf"))
    found = worker.measured(7, shape)
    assert found is not None
    assert found.wrong == {str(neighbour): f"in a graph: RuntimeError: {failure}"}
    assert not found.times
    assert worker.measured(8, shape) is None
    assert times.call_count == 2


@pytest.mark.parametrize(
    ("kv_len", "q_len", "name"),
    [
        ((9, 5), (9, 5), "triton.hopper_prefill"),
        ((9, 6), (9, 5), "triton.hopper_extend"),
        ((9, 1), (9, 1), "triton.hopper_extend+decode"),
        ((1, 1), (1, 1), "triton.decode"),
    ],
)
def test_a_step_of_a_benchmark_has_the_kernel_that_an_eager_step_has(
    kv_len: tuple[int, ...], q_len: tuple[int, ...], name: str
) -> None:
    target = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
    layer = Problem(8, 2, 64, torch.bfloat16, v_head_dim=64, page_size=16, scale=0.125)
    assert select(layer, target, "triton").kernel(step_kind(q_len, kv_len)).entry.name == name
    elsewhere = select(layer, known_target("sm_80"), "triton").kernel(step_kind(q_len, kv_len))
    assert elsewhere.entry.name == name.replace("hopper_prefill", "extend").replace("hopper_", "")

"""The simulation of nodes against results computed by hand."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence

import pytest

from rocm_lab.benchmarks import gateway_routing, scale_page
from rocm_lab.benchmarks.scale_engines import Cluster, EngineKind, SimulatedJob, gaps
from rocm_lab.benchmarks.scale_nodes import (
    BEST,
    LLAMA_70B,
    MIDDLE,
    WORST,
    Layout,
    NodeStep,
    step_seconds,
)
from rocm_lab.benchmarks.scale_out import RESULT, SETUPS, Setup, jobs_at
from tests.amd.house.source_tree import ROOT


def steady(seconds: float) -> Callable[[NodeStep], float]:
    """Returns a step that takes the same time for every batch."""
    return lambda batch: seconds


def cluster(step: Callable[[NodeStep], float], **options: int) -> Cluster:
    """Returns a cluster of one engine."""
    kind = EngineKind(step, **{"kv_tokens": 1 << 20, **options})
    return Cluster(kind, kind, num_whole=1)


def random_jobs(rate: float, num: int, output: int = 1) -> list[SimulatedJob]:
    chance, now, jobs = random.Random(5), 0.0, []
    for _ in range(num):
        now += chance.expovariate(rate)
        jobs.append(SimulatedJob(now, 1, output))
    return jobs


def sojourns(jobs: Sequence[SimulatedJob]) -> list[float]:
    return [job.tokens[-1] - job.arrival for job in jobs]


@pytest.mark.parametrize("name", ["70B, one node, TP8", "70B, two nodes, TP8 prefills, TP8 decodes"])
def test_every_request_gets_all_of_its_tokens_in_order_and_no_kv_is_left(name: str) -> None:
    (setup,) = [setup for setup in SETUPS if setup.name == name]
    jobs = jobs_at(6.0, 60)
    engines = setup.cluster(MIDDLE, 0.1).serve(jobs)
    for job in jobs:
        assert len(job.tokens) == job.output
        assert job.prefilled == job.prompt
        assert job.arrival < job.tokens[0]
        assert all(before < after for before, after in itertools.pairwise(job.tokens))
    assert all(engine.free == engine.kind.kv_tokens and not engine.running and not engine.waiting for engine in engines)


def test_a_request_alone_takes_its_steps_and_nothing_else() -> None:
    def step(batch: NodeStep) -> float:
        return step_seconds(LLAMA_70B, Layout(8), MIDDLE, batch)

    job = SimulatedJob(3.0, 5000, 4)
    cluster(step).serve([job])
    prompt = sum(step(NodeStep(0, 1, ((new, cached),))) for new, cached in ((2048, 0), (2048, 2048), (904, 4096)))
    assert job.tokens[0] == pytest.approx(3.0 + prompt)
    assert list(gaps([job])) == pytest.approx([step(NodeStep(1, length)) for length in (5001, 5002, 5003)])


def test_one_place_and_equal_steps_are_the_queue_of_the_textbook() -> None:
    """M/D/1: the mean wait is load * seconds / (2 (1 - load)), within the variation of 12,000 requests."""
    seconds, load = 0.1, 0.6
    jobs = random_jobs(load / seconds, 12_000)
    cluster(steady(seconds), max_seqs=1).serve(jobs)
    wait = sum(sojourns(jobs)) / len(jobs) - seconds
    assert wait == pytest.approx(load * seconds / (2 * (1 - load)), rel=0.08)


def test_kv_that_runs_out_makes_requests_wait_and_one_that_never_fits_is_refused() -> None:
    jobs = [SimulatedJob(0.0, 60, 4) for _ in range(3)]
    cluster(steady(1.0), kv_tokens=128).serve(jobs)
    assert sorted(job.tokens[-1] for job in jobs) == [4.0, 5.0, 8.0]
    with pytest.raises(ValueError, match=r"a job of 120 \+ 10 tokens; the engine holds 128"):
        cluster(steady(1.0), kv_tokens=128).serve([SimulatedJob(0.0, 120, 10)])


def test_a_transfer_comes_between_the_first_token_and_the_second_and_one_after_the_other() -> None:
    kind = EngineKind(steady(1.0), 1 << 20)
    jobs = [SimulatedJob(0.0, 8, 3), SimulatedJob(0.0, 8, 3)]
    Cluster(kind, kind, num_prefill=1, num_decode=1, transfer=lambda job: 10.0).serve(jobs)
    assert [job.tokens for job in jobs] == [[1.0, 12.0, 13.0], [2.0, 22.0, 23.0]]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_what_is_assumed_better_is_faster(setup: Setup) -> None:
    for batch in (NodeStep(1, 512), NodeStep(64, 4096), NodeStep(32, 2048, ((480, 0),))):
        best, middle, worst = (
            step_seconds(setup.model, setup.layout, machine, batch) for machine in (BEST, MIDDLE, WORST)
        )
        assert best < middle < worst


def test_the_page_of_the_simulation_is_current() -> None:
    result = json.loads(RESULT.read_text())
    assert (ROOT / "docs" / "scale_simulation.md").read_text() == scale_page.page(result)
    assert (ROOT / "docs" / "scale_simulation.svg").read_text() == scale_page.picture(result)


def test_the_table_of_routing_is_current() -> None:
    text = gateway_routing.PAGE.read_text()
    assert gateway_routing.with_table(text, json.loads(gateway_routing.RESULT.read_text())) == text

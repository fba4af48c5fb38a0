"""The simulation of nodes against results computed by hand."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence

import pytest

from rocm_lab.benchmarks import gateway_routing, scale_out, scale_page
from rocm_lab.benchmarks.scale_engines import Cluster, EngineKind, Job, gaps
from rocm_lab.benchmarks.scale_nodes import (
    BEST,
    LLAMA_70B,
    MIDDLE,
    QWEN_235B,
    WORST,
    Batch,
    Experts,
    Layout,
    kv_tokens,
    step_seconds,
)
from rocm_lab.benchmarks.scale_out import RESULT, SETUPS, Setup, figures, jobs_at, quantile
from tests.amd.house.source_tree import ROOT


def steady(seconds: float) -> Callable[[Batch], float]:
    """Returns a step that takes the same time for every batch."""
    return lambda batch: seconds


def cluster(step: Callable[[Batch], float], **options: int) -> Cluster:
    """Returns a cluster of one engine."""
    kind = EngineKind(step, **{"kv_tokens": 1 << 20, **options})
    return Cluster(kind, kind, num_whole=1)


def random_jobs(rate: float, num: int, output: int = 1) -> list[Job]:
    chance, now, jobs = random.Random(5), 0.0, []
    for _ in range(num):
        now += chance.expovariate(rate)
        jobs.append(Job(now, 1, output))
    return jobs


def sojourns(jobs: Sequence[Job]) -> list[float]:
    return [job.tokens[-1] - job.arrival for job in jobs]


def test_which_way_comes_first_depends_on_the_rule_for_chunks_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    short = min(scale_out.GAP_LIMITS)

    def keeps(name: str, step_tokens: int, rate: float) -> bool:
        monkeypatch.setattr(scale_out, "tokens_of_steps", lambda *_: step_tokens)
        (setup,) = [setup for setup in SETUPS if setup.name == name]
        jobs = jobs_at(rate)
        setup.cluster(MIDDLE, short).serve(jobs)
        return scale_out.keeps(figures(jobs), short)

    whole, split = "70B, one node, TP8", "70B, one node, TP4 prefills, TP4 decodes"
    assert keeps(whole, 256, 4.0)
    assert not keeps(split, 256, 4.0)
    assert keeps(split, 512, 2.0)
    assert not keeps(whole, 512, scale_out.RATES[0])
    assert scale_page.SAYS in (ROOT / "docs" / "scale_simulation.md").read_text()


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
    def step(batch: Batch) -> float:
        return step_seconds(LLAMA_70B, Layout(8), MIDDLE, batch)

    job = Job(3.0, 5000, 4)
    cluster(step).serve([job])
    prompt = sum(step(Batch(0, 1, ((new, cached),))) for new, cached in ((2048, 0), (2048, 2048), (904, 4096)))
    assert job.tokens[0] == pytest.approx(3.0 + prompt)
    assert list(gaps([job])) == pytest.approx([step(Batch(1, length)) for length in (5001, 5002, 5003)])


def test_littles_law_holds() -> None:
    """The mean number of requests, by the simulated clock, is their rate times their mean time."""
    jobs = random_jobs(3.0, 500, output=20)
    cluster(steady(0.02), max_seqs=4).serve(jobs)
    events = sorted([(job.arrival, 1) for job in jobs] + [(job.tokens[-1], -1) for job in jobs])
    area, present = 0.0, 0
    for (time, change), (following, _) in itertools.pairwise(events):
        present += change
        area += present * (following - time)
    seconds = events[-1][0] - events[0][0]
    assert area / seconds == pytest.approx(len(jobs) / seconds * sum(sojourns(jobs)) / len(jobs))


def test_one_place_and_equal_steps_are_the_queue_of_the_textbook() -> None:
    """M/D/1: the mean wait is load * seconds / (2 (1 - load)), within the variation of 12,000 requests."""
    seconds, load = 0.1, 0.6
    jobs = random_jobs(load / seconds, 12_000)
    cluster(steady(seconds), max_seqs=1).serve(jobs)
    wait = sum(sojourns(jobs)) / len(jobs) - seconds
    assert wait == pytest.approx(load * seconds / (2 * (1 - load)), rel=0.08)


def test_a_full_engine_makes_as_many_tokens_as_its_places_do() -> None:
    jobs = [Job(0.0, 1, 100) for _ in range(32)]
    cluster(steady(0.05), max_seqs=8).serve(jobs)
    # Four rounds of eight; the first request begins alone, so the others are a step later.
    assert max(job.tokens[-1] for job in jobs) == pytest.approx((4 * 100 + 1) * 0.05)


def test_kv_that_runs_out_makes_requests_wait_and_one_that_never_fits_is_refused() -> None:
    jobs = [Job(0.0, 60, 4) for _ in range(3)]
    cluster(steady(1.0), kv_tokens=128).serve(jobs)
    assert sorted(job.tokens[-1] for job in jobs) == [4.0, 5.0, 8.0]
    with pytest.raises(ValueError, match=r"a job of 120 \+ 10 tokens; the engine holds 128"):
        cluster(steady(1.0), kv_tokens=128).serve([Job(0.0, 120, 10)])


def test_a_transfer_comes_between_the_first_token_and_the_second_and_one_after_the_other() -> None:
    kind = EngineKind(steady(1.0), 1 << 20)
    jobs = [Job(0.0, 8, 3), Job(0.0, 8, 3)]
    Cluster(kind, kind, num_prefill=1, num_decode=1, transfer=lambda job: 10.0).serve(jobs)
    assert [job.tokens for job in jobs] == [[1.0, 12.0, 13.0], [2.0, 22.0, 23.0]]


def test_sums_take_what_their_links_do() -> None:
    assert MIDDLE.all_reduce(1e9, 1) == 0
    assert BEST.all_reduce(0, 8) == BEST.sum_latency
    # 2 * 7/8 of the bytes leave a rank, over seven links at a time.
    assert BEST.all_reduce(1e9, 8) - BEST.sum_latency == pytest.approx(2 * 7 / 8 * 1e9 / (7 * 48e9))


def test_one_sequence_is_bound_by_the_weights_it_reads() -> None:
    for ranks in (1, 2, 4, 8):
        weights = (LLAMA_70B.params - LLAMA_70B.vocab * LLAMA_70B.hidden) * 2 / ranks  # the embedding is not read
        least = weights / BEST.stream
        found = step_seconds(LLAMA_70B, Layout(ranks), BEST, Batch(1, 256))
        assert least < found < least + 80 * (2 * BEST.sum_latency + BEST.rest + 40e-6)


def test_a_long_chunk_is_bound_by_operations() -> None:
    found = step_seconds(LLAMA_70B, Layout(1), BEST, Batch(0, 1, ((8192, 0),)))
    products = 2 * 80 * (LLAMA_70B.attention_params + LLAMA_70B.mlp_params) * 8192 / BEST.matrix_ops
    assert products < found < 1.4 * products


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_what_is_assumed_better_is_faster(setup: Setup) -> None:
    for batch in (Batch(1, 512), Batch(64, 4096), Batch(32, 2048, ((480, 0),))):
        best, middle, worst = (
            step_seconds(setup.model, setup.layout, machine, batch) for machine in (BEST, MIDDLE, WORST)
        )
        assert best < middle < worst


def test_models_have_the_sizes_of_their_names() -> None:
    assert LLAMA_70B.params == pytest.approx(70.6e9, rel=0.01)
    assert QWEN_235B.params == pytest.approx(235e9, rel=0.01)


def test_attention_of_its_own_holds_each_token_once_and_heads_that_are_few_are_held_twice() -> None:
    shared, own = Layout(8), Layout(8, own_attention=True)
    # Four KV heads over eight ranks: two ranks hold each, so about half as many tokens, except for the weights.
    assert 1.7 < kv_tokens(QWEN_235B, own) / kv_tokens(QWEN_235B, shared) < 2.0
    with pytest.raises(ValueError, match="does not fit 1 GPUs of 192 GB"):
        kv_tokens(QWEN_235B, Layout(1))


def test_the_experts_of_one_token_and_of_many() -> None:
    experts = Experts(128, 8)
    assert experts.touched(1) == pytest.approx(8 / 128)
    assert experts.touched(4096) == pytest.approx(1)
    assert Experts().touched(1) == 1


def test_quantiles_and_figures() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(1, 101))), 0.99) == 99.0
    job = Job(1.0, 8, 2, tokens=[3.0, 3.5])
    assert figures([job]) == {
        "ttft_p50_s": 2.0,
        "ttft_p99_s": 2.0,
        "gap_p50_s": 0.5,
        "gap_p99_s": 0.5,
        "tokens_per_s": 0.8,
    }


def test_the_page_of_the_simulation_is_current() -> None:
    result = json.loads(RESULT.read_text())
    assert (ROOT / "docs" / "scale_simulation.md").read_text() == scale_page.page(result)
    assert (ROOT / "docs" / "scale_simulation.svg").read_text() == scale_page.picture(result)


def test_what_the_page_says_is_what_came_out() -> None:
    setups = {each["setup"]: each for each in json.loads(RESULT.read_text())["setups"]}

    def rates(name: str) -> tuple[float, float]:
        """Returns rates at the middle of the assumptions, for the wide limit and for the short one."""
        wide, short = setups[name]["limits"]
        return wide["highest"]["middle"], short["highest"]["middle"]

    node = {name: rates(name) for name in setups if name.startswith("70B, one node") and "prefills" not in name}
    tp8 = node.pop("70B, one node, TP8")
    assert all(tp8[0] >= wide and short == 0 < tp8[1] for wide, short in node.values())
    assert node["70B, one node, 8 x TP1"] == (0, 0)
    for nodes, whole in (("one node", "TP8"), ("two nodes", "2 x TP8")):
        (name,) = [name for name in setups if name.startswith(f"70B, {nodes}") and "prefills" in name]
        wide, short = rates(name)
        assert wide == short
        assert wide < rates(f"70B, {nodes}, {whole}")[0]
    tp, dp = "235B-A22B, one node, TP8", "235B-A22B, one node, DP attention"
    assert rates(tp) == rates(dp)
    assert 1.7 < setups[dp]["kv_tokens"] / setups[tp]["kv_tokens"] < 2


def test_the_table_of_routing_is_current() -> None:
    text = gateway_routing.PAGE.read_text()
    assert gateway_routing.with_table(text, json.loads(gateway_routing.RESULT.read_text())) == text

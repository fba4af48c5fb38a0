"""Rounds that follow each other on the device, of a model that ranks share: each has the same rounds and texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.step.host_ring import Fence
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import Completion, Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.device_steps import DeviceSpeculation
from tests.amd.runner.round_texts import OPTIONS, round_model
from tests.amd.runner.thread_ranks import ThreadRank, on_threads
from tests.amd.runner.tiny_model import CONFIG

BASE = replace(OPTIONS, max_kv_len=200)


def shared(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    return round_model(device, ranks=ranks)


def requests() -> list[Request]:
    """Greedy requests, and some that draw."""
    draw, made = random.Random(3), list[Request]()
    for seed in range(4):
        prompt = tuple(draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(2, 20)))
        sampling = Sampling(0.7, 0.95, seed=seed, top_k=6) if seed % 2 else Sampling()
        made.append(Request(prompt, 40 + 9 * seed, sampling))
    return made


def plainly() -> list[Completion]:
    options = replace(BASE, speculative="off", draft_tokens=4, steps_ahead=0)
    return Engine(round_model(), options).generate(requests())


class AtChance:
    """A fence that reports at random that it is reached before it is waited for."""

    def __init__(self, fence: Fence, draw: random.Random) -> None:
        self.record, self.synchronize, self._draw = fence.record, fence.synchronize, draw

    def query(self) -> bool:
        """Does the same as `Fence.query`."""
        return self._draw.random() < 0.5


def with_a_clock_of_its_own(engine: Engine, seed: int) -> list[str]:
    """Returns a list that gets an engine's launches and reads, in order; fences and pace depend on the seed."""
    rounds, draw, did = engine._speculative_steps, random.Random(seed), list[str]()
    assert isinstance(rounds, DeviceSpeculation)
    for memory in rounds._memory:
        memory.done = AtChance(memory.done, draw)
    note = engine._pace.note
    engine._pace.note = lambda seconds, num_speculative_steps: note(draw.random() * 0.002, num_speculative_steps)  # type: ignore[method-assign]

    def noted(owner: object, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def and_note(*arguments: Any) -> Any:
            did.append(name)
            return call(*arguments)

        setattr(owner, name, and_note)

    noted(rounds, "launch")
    noted(rounds, "took")
    noted(engine, "_read_oldest")
    return did


def test_ranks_launch_and_read_the_same_rounds_whatever_their_clocks_say() -> None:
    def serve(rank: ThreadRank) -> tuple[list[Completion], list[str]]:
        engine = Engine(round_model(ranks=rank), BASE)
        did = with_a_clock_of_its_own(engine, rank.shard.rank)
        return engine.generate(requests()), did

    wanted, (first, second) = plainly(), on_threads(2, serve)
    assert first[0] == second[0] == wanted
    assert first[1] == second[1]
    assert first[1].count("launch") > 5
    assert "took" in first[1]


@pytest.mark.nightly
@pytest.mark.parametrize("graphs", [False, True])
def test_processes_over_gloo_give_the_texts_of_one_rank(graphs: bool) -> None:
    with RankedEngine(shared, replace(BASE, graphs=graphs), num_ranks=2) as engine:
        assert engine.generate(requests()) == plainly()
        report = engine.report()
        assert (report.ranks, report.speculative_steps) == (2, "follow from each other on the device")
        assert report.metrics.accepted_drafts > 0

"""Rounds whose launches are one graph: texts, faults and interrupts are those of rounds launched part by part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.capture.graphs import Graph
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import DeviceFault
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.hip_graphs.recorder import InTurn, Recording
from rocm_serve.engine import Engine
from rocm_serve.speculation.device_launches import SpeculativeLaunches
from rocm_serve.speculation.device_steps import DeviceSpeculation
from rocm_serve.speculation.drafts_again import DraftsAgain
from rocm_serve.speculation.sealed_cache import SealedCache
from tests.amd.runner.round_texts import CIRCLE, round_model
from tests.amd.runner.serving import served_to_the_end, until_done
from tests.amd.runner.test_device_steps import DEVICE, KINDS, Kind, at_pace, of_circle, rounds_of, with_an_error_word

AT_NIGHT = ("drafted", "drawn", "head", "trees", "trees of a head", "drawn in windows", "deterministic")
EVERY_KIND = pytest.mark.parametrize(
    "kind", ["greedy", *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)], indirect=True
)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def with_graphs(kind: Kind, **changes: Any) -> Engine:
    """An engine with free rows on which graphs of masked steps are checked."""
    return kind.engine(**{"graphs": True, "capture_after": 0, "max_batch_size": 8, **changes})


@dataclass
class Launched:
    """How often rounds were launched as one graph, and in parts."""

    whole: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found, again = Launched(), StepRunner.run_again

    def and_note(runner: Any, batch: Any, joined: Recording | None = None) -> Any:
        (found.parts if joined is None else found.whole).append(1)
        return again(runner, batch, joined)

    monkeypatch.setattr(StepRunner, "run_again", and_note)
    return found


def until_whole(engine: Engine, launched: Launched) -> None:
    """Steps until a round was launched as one graph, and two rounds are unread."""
    rounds, before = rounds_of(engine), len(launched.whole)
    while len(launched.whole) == before or rounds._series is None or rounds._series.num_pending < 2:
        engine.step()


@pytest.mark.parametrize(
    "kind",
    ["greedy", "drafted", *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT[1:])],
    indirect=True,
)
def test_a_round_is_one_graph_after_those_that_were_launched_in_parts(
    kind: Kind, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that graph, the graph of its drafts and a copy are launched, and the texts are those of plain decoding."""
    requests = [kind.request(seed, 40) for seed in range(3)]
    engine, in_parts = with_graphs(kind), list[int]()
    accept, make_next = SpeculativeLaunches.pick, SpeculativeLaunches.make_next

    def and_pick(*arguments: Any, **how: Any) -> None:
        in_parts.append(1)
        accept(*arguments, **how)

    monkeypatch.setattr(SpeculativeLaunches, "pick", and_pick)
    monkeypatch.setattr(SpeculativeLaunches, "make_next", lambda self: make_next(self))
    assert engine.generate(requests) == kind.plainly(requests)
    assert len(launched.whole) > 3
    assert len(in_parts) == len(launched.parts) <= len(launched.whole)


@EVERY_KIND
def test_rounds_that_came_before_have_no_parts_again(kind: Kind, launched: Launched) -> None:
    """Each round of a series is one graph if an earlier series had its size, and none is recorded."""
    requests, engine = [kind.request(seed, 40) for seed in range(3)], at_pace(2, with_graphs(kind))
    wanted = kind.plainly(requests)
    assert engine.generate(requests) == wanted
    made, num_parts, num_whole = dict(rounds_of(engine)._launches._values), len(launched.parts), len(launched.whole)
    engine.forget_prefixes()
    assert engine.generate(requests) == wanted
    assert rounds_of(engine)._launches._values == made
    assert len(launched.parts) == num_parts
    assert len(launched.whole) - num_whole == num_whole + num_parts


@pytest.mark.parametrize("kind", ["greedy"], indirect=True)
def test_what_is_picked_from_the_logits_of_a_graph_is_joined_with_no_other_graph(
    kind: Kind, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if a graph is made again between the parts of a round and their being joined."""
    join, others = SpeculativeLaunches.join, 0

    def with_another(launches: SpeculativeLaunches, graph: Graph[Tensor] | None) -> None:
        nonlocal others
        if graph is not None:
            other, others = replace(graph), others + 1
            join(launches, other)
            assert launches.as_one(other) is None
        join(launches, graph)

    monkeypatch.setattr(SpeculativeLaunches, "join", with_another)
    requests = [kind.request(seed, 40) for seed in range(2)]
    assert with_graphs(kind).generate(requests) == kind.plainly(requests)
    assert others > 0
    assert launched.whole


@pytest.mark.parametrize("kind", ["greedy"], indirect=True)
def test_a_round_that_lacks_a_part_of_its_graph_has_other_texts(
    kind: Kind, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work after the step is in its graph and nowhere else."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(FakeRecorder, "join", lambda self, recordings: InTurn(recordings[:-1]))
        requests = [kind.request(seed, 40) for seed in range(2)]
        assert with_graphs(kind).generate(requests) != kind.plainly(requests)
        assert launched.whole


@pytest.mark.parametrize("kind", ["asking"], indirect=True)
def test_rows_that_are_shaped_are_picked_from_between_a_step_and_what_follows(kind: Kind, launched: Launched) -> None:
    requests = [kind.request(seed, 30) for seed in range(2)]
    assert with_graphs(kind).generate(requests) == kind.plainly(requests)
    assert launched.parts
    assert not launched.whole


@EVERY_KIND
@pytest.mark.parametrize("at", ["whole", "joined", pytest.param("told", marks=pytest.mark.nightly)])
def test_an_interrupt_of_a_round_that_is_one_graph_changes_no_text(
    at: str, kind: Kind, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [kind.request(seed, 40) for seed in range(2)]
    engine = with_graphs(kind)
    numbers = [engine.submit(request) for request in requests]
    owner, name = {
        "whole": (StepRunner, "run_again"),
        "told": (DeviceSpeculation, "_emitted"),
        "joined": (SpeculativeLaunches, "join"),
    }[at]
    if at != "joined":
        until_whole(engine, launched)
    call: Any = getattr(owner, name)

    def and_interrupt(*arguments: Any) -> Any:
        call(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            until_done(engine)
    assert served_to_the_end(engine, numbers) == kind.plainly(requests)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["greedy", "trees"], indirect=True)
def test_addresses_that_are_sealed_anew_leave_no_round_on_the_old_graph(kind: Kind, launched: Launched) -> None:
    requests, engine = [kind.request(seed, 60) for seed in range(2)], with_graphs(kind)
    numbers = [engine.submit(request) for request in requests]
    until_whole(engine, launched)
    engine.settle()
    before = rounds_of(engine)._launches._values.copy()
    engine._runner.reopen(engine.runtime.options.capture_sizes or (1, 2, 4, 8))
    assert served_to_the_end(engine, numbers) == kind.plainly(requests)
    after = rounds_of(engine)._launches._values
    assert all(after.get(key) is not kept for key, kept in before.items())


@pytest.mark.parametrize("kind", ["greedy"], indirect=True)
def test_a_fault_within_the_graph_of_a_round_ends_its_requests_alone(kind: Kind, launched: Launched) -> None:
    engine = with_graphs(kind)
    number = engine.submit(kind.request(1, 200))
    at_pace(3, engine)
    until_whole(engine, launched)
    with_an_error_word(engine)
    with pytest.raises(DeviceFault):
        until_done(engine)
    assert served_to_the_end(engine, [number])[0].error
    requests = [kind.request(3, 40)]
    assert engine.generate(requests) == kind.plainly(requests)


@pytest.mark.parametrize("kind", ["greedy"], indirect=True)
def test_logits_that_are_no_numbers_in_the_graph_of_a_round_end_their_request_alone(
    kind: Kind, launched: Launched
) -> None:
    loaded = round_model(DEVICE, windows=kind.windows)
    requests = [of_circle(circle, 80) for circle in range(3)]
    wanted = kind.plainly(requests, loaded)
    engine = kind.engine(loaded, graphs=True, capture_after=0, max_batch_size=8)
    numbers = [engine.submit(request) for request in requests]
    until_whole(engine, launched)
    loaded.weights.embedding[CIRCLE + 2] = float("nan")
    while engine.has_work:
        try:
            engine.step()
        except DeviceFault:
            continue
    done = [engine.completion(number) for number in numbers]
    assert [done[0], done[2]] == [wanted[0], wanted[2]]
    assert done[1].error
    assert done[1].token_ids == wanted[1].token_ids[: len(done[1].token_ids)]


@pytest.mark.nightly
def test_drafts_of_a_size_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series of two sizes alternate."""
    kind, made = KINDS["drafted"], list[int]()
    init: Any = DraftsAgain.__init__

    def and_count(*arguments: Any) -> None:
        made.append(1)
        init(*arguments)

    monkeypatch.setattr(DraftsAgain, "__init__", and_count)
    engine = with_graphs(kind)
    for turn in range(4):
        requests = [kind.request(2 * seed, 60) for seed in range(1 + turn % 2)]
        assert engine.generate(requests) == kind.plainly(requests)
        engine.forget_prefixes()
        if turn == 1:
            first = len(made)
    assert first >= 2
    assert len(made) == first


def test_what_is_kept_is_bounded_and_of_one_seal() -> None:
    kept = SealedCache[int, str]()
    assert not kept.of(1)
    for key in range(100):
        assert kept.put(key, str(key)) == str(key)
    assert list(kept.of(1)) == list(range(92, 100))
    kept.put(95, "again")
    assert kept.of(1)[95] == "again"
    assert len(kept.of(1)) == 8
    assert not kept.of(2)

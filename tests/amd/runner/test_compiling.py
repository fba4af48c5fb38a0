"""Constraints are compiled outside of the engine's thread: other requests do not wait, however long it takes."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.errors import BadRequest, FitsLater
from rocm_serve import engine_thread
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import Request
from rocm_serve.text import matching
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.matching import Matching
from tests.amd.runner.async_engines import is_empty
from tests.amd.runner.with_parameters import BASE, CONSTRAINED, PLAIN, PROMPT, character_model


class HeldUp:
    """The compiler of an engine's constraints, which waits for the test. In the engine's thread it raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        compile_one = Matching._compile

        def held_up(of_engine: Matching, *key: Any) -> Any:
            assert threading.current_thread().name != "rocm_attn engine", "every other request would wait"
            self.begun.release()
            self.may_end.wait()
            return compile_one(of_engine, *key)

        monkeypatch.setattr(Matching, "_compile", held_up)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    held = HeldUp(monkeypatch)
    yield held
    held.may_end.set()


async def test_others_are_served_while_a_constraint_is_compiled(held_up: HeldUp) -> None:
    loaded = character_model()
    served, expected = Engine(loaded, BASE), Engine(loaded, BASE).generate([PLAIN])[0]
    async with AsyncEngine(served) as front:
        waiting = asyncio.ensure_future(front.complete(CONSTRAINED[2]))
        await asyncio.to_thread(held_up.begun.acquire)
        assert await front.complete(PLAIN) == expected
        assert not waiting.done()
        held_up.may_end.set()
        found = (await waiting).text
    assert found in ("yes", "no")
    assert is_empty(served)


async def test_a_request_may_leave_or_be_aborted_while_its_constraint_is_compiled(held_up: HeldUp) -> None:
    served = Engine(character_model(), BASE)
    async with AsyncEngine(served) as front:
        left, aborted = front.stream(CONSTRAINED[0]), front.stream(CONSTRAINED[1])
        await asyncio.to_thread(held_up.begun.acquire)
        left.close()
        await front.abort(aborted.number)
        done = await aborted.completion()
        assert (done.token_ids, front.num_requests) == ((), 0)
        found = done.finish_reason
    assert found == "abort"
    assert is_empty(served)


async def test_a_constraint_that_takes_too_long_ends_its_request_alone(
    held_up: HeldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "MOST_PREPARING_SECONDS", 0.0)
    served = Engine(character_model(), BASE)
    async with AsyncEngine(served) as front:
        with pytest.raises(BadRequest, match="the constraint was not compiled within 0 seconds"):
            await front.complete(CONSTRAINED[0])
        found = len((await front.complete(PLAIN)).token_ids)
    assert found == PLAIN.max_new_tokens
    assert is_empty(served)


def test_two_are_compiled_at_a_time_and_no_other_thread_waits(held_up: HeldUp) -> None:
    """This holds for any number of requests: a process that can start no more threads would lose its engine."""
    of_engine = Engine(character_model(), BASE)._matching
    assert of_engine is not None
    before, constraints = set(threading.enumerate()), [Constraint.regex("a" * num) for num in range(1, 9)]
    assert not any(of_engine.is_ready(each, ()) for each in constraints)
    begun = [held_up.begun.acquire() for _ in range(2)]
    assert len(set(threading.enumerate()) - before) == len(begun)
    held_up.may_end.set()
    for each in constraints:
        of_engine.matcher(each, ())
    assert all(of_engine.is_ready(each, ()) for each in constraints)


async def test_no_more_constraints_wait_than_may_those_included_whose_clients_have_left(
    held_up: HeldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MOST_COMPILING", 3)
    monkeypatch.setattr(engine_thread, "MOST_COMPILING", 3)
    served = Engine(character_model(), BASE)
    requests = [replace(CONSTRAINED[2], constraint=Constraint.choice([f"a{num}"])) for num in range(5)]
    async with AsyncEngine(served) as front:
        left, *waiting = (front.stream(each) for each in requests[:3])
        await asyncio.to_thread(held_up.begun.acquire)
        left.close()
        with pytest.raises(FitsLater, match="3 constraints are being compiled or wait for it"):
            await front.complete(requests[3])
        assert len((await front.complete(PLAIN)).token_ids) == PLAIN.max_new_tokens
        held_up.may_end.set()
        assert [(await each.completion()).text for each in waiting] == ["a1", "a2"]
        assert (await front.complete(requests[4])).text == "a4", "nothing is left of those that have left"
        found = (await front.metrics()).refusals
    assert found == 1
    assert is_empty(served)


async def test_a_constraint_that_many_ask_for_counts_once(held_up: HeldUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MOST_COMPILING", 1)
    served = Engine(character_model(), BASE)
    async with AsyncEngine(served) as front:
        waiting = [front.stream(CONSTRAINED[2]) for _ in range(4)]
        await asyncio.to_thread(held_up.begun.acquire)
        with pytest.raises(FitsLater, match="constraints are being compiled or wait for it"):
            await front.complete(CONSTRAINED[0])
        held_up.may_end.set()
        found = [(await each.completion()).text for each in waiting]
    assert set(found) <= {"yes", "no"}
    assert is_empty(served)


def test_whether_there_is_room_is_reported_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a constraint whose client has left would be compiled again after it is dropped, for no one."""
    served, compiled = Engine(character_model(), BASE), list[Any]()
    assert served._matching is not None
    monkeypatch.setattr(Matching, "_compile", lambda of, *key: compiled.append(key))
    assert served.can_prepare(CONSTRAINED[2])
    assert (compiled, served._matching._compiled) == ([], {})
    monkeypatch.setattr(matching, "MOST_COMPILING", 0)
    assert [served.can_prepare(each) for each in (CONSTRAINED[2], PLAIN)] == [False, True]


@dataclass(frozen=True)
class LoadSlowRank:
    """Loads a rank whose constraints are compiled when the test wants: rank 0 reports when it has, rank 1 waits."""

    folder: Path

    def __call__(self, *, device: torch.device, ranks: Ranks) -> LoadedModel:
        compile_one = Matching._compile

        def held_up(of_rank: Matching, *key: Any) -> Any:
            compiled = compile_one(of_rank, *key)
            name, how = ("done", "w") if ranks.shard.rank == 0 else ("may end", "r")
            open(self.folder / name, how).close()  # a FIFO: until the test opens it too
            return compiled

        Matching._compile = held_up  # type: ignore[assignment,method-assign]
        return character_model(ranks)


@pytest.mark.nightly  # two processes
def test_a_request_is_prepared_when_it_is_on_every_rank(tmp_path: Path) -> None:
    """Otherwise the ranks that compile it would delay all requests of the others."""
    for name in ("done", "may end"):
        os.mkfifo(tmp_path / name)
    with RankedEngine(LoadSlowRank(tmp_path), BASE, num_ranks=2) as ranked:
        assert not ranked.is_prepared(CONSTRAINED[2])
        open(tmp_path / "done").close()
        assert [ranked.is_prepared(CONSTRAINED[2]) for _ in range(100)] == [False] * 100
        open(tmp_path / "may end", "w").close()
        while not ranked.is_prepared(CONSTRAINED[2]):
            pass
        assert ranked.generate([CONSTRAINED[2]])[0].text in ("yes", "no")


def test_what_is_compiled_is_kept_and_what_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Engine(character_model(), BASE)
    assert served._matching is not None
    bad = Request(PROMPT, 5, constraint=Constraint.regex("[a"))
    for _ in range(2):
        with pytest.raises(BadRequest, match="unclosed character class"):
            served.submit(bad)
    assert not served._matching._compiled
    served.generate([CONSTRAINED[2]])

    def panics(of_engine: Matching, *key: Any) -> Any:
        raise BaseException("a panic")

    monkeypatch.setattr(Matching, "_compile", panics)
    served.generate([CONSTRAINED[2]])
    with pytest.raises(BadRequest, match=r"the library fails \(BaseException: a panic\)"):
        served.submit(replace(CONSTRAINED[2], constraint=Constraint.regex("new")))

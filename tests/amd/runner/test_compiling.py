"""Constraints are compiled, and their masks computed, in other threads: other requests do not wait for them."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.errors import BadRequest, FitsLater
from rocm_attn.models.config import ModelConfig
from rocm_serve import engine_thread
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import Completion, Request, RequestsFailed
from rocm_serve.text import constraint, matching
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.matching import Matching, TextMatcher
from tests.amd.runner.async_engines import is_empty
from tests.amd.runner.serving import served_to_the_end, until_done
from tests.amd.runner.thread_ranks import ThreadRank, on_threads
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model
from tests.amd.runner.with_parameters import (
    BASE,
    CONSTRAINED,
    END,
    PLAIN,
    PROMPT,
    character_model,
    character_tokenizer,
    drawn,
)


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

    monkeypatch.setattr(Matching, "_compile", Mock(side_effect=BaseException("a panic")))
    served.generate([CONSTRAINED[2]])
    with pytest.raises(BadRequest, match=r"the library fails \(BaseException: a panic\)"):
        served.submit(replace(CONSTRAINED[2], constraint=Constraint.regex("new")))


class HeldMasks:
    """The mask of HELD's third token, which waits for the test from hold() on.

    of: the engine's; None: of all engines
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end = threading.Event()
        self.of: Matching | None = None
        self.may_end.set()
        compute = TextMatcher._compute

        def held(matcher: TextMatcher, new: list[int], **how: bool) -> None:
            again: Any = matcher._compiled.again
            if again.args[0] == HELD.constraint and matcher.num_asked == 2 and self.of in (None, again.func.__self__):
                self.may_end.wait()
            compute(matcher, new, **how)

        monkeypatch.setattr(TextMatcher, "_compute", held)

    def hold(self, of: Matching | None = None) -> None:
        self.of = of
        self.may_end.clear()


@pytest.fixture
def held_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldMasks]:
    held = HeldMasks(monkeypatch)
    yield held
    held.may_end.set()


HELD, OTHERS = CONSTRAINED[1], (PLAIN, CONSTRAINED[0])


def alone(loaded: LoadedModel, options: EngineOptions) -> list[Completion]:
    return [Engine(loaded, options).generate([each])[0] for each in (HELD, *OTHERS)]


def served_while_held(served: Engine, held_masks: HeldMasks) -> list[Completion]:
    """The completions of HELD and OTHERS. HELD goes on when the others have ended."""
    numbers = [served.submit(each) for each in (HELD, *OTHERS)]
    while not {*numbers[1:]} <= served._done.keys():
        served.step()
    assert numbers[0] in served._outputs
    held_masks.may_end.set()
    until_done(served)
    completions = [served.completion(number) for number in numbers]
    assert is_empty(served)
    return completions


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("base", [CONFIG, RECURRENT], ids=["attention", "recurrent"])
def test_a_mask_that_takes_long_holds_up_its_own_text_alone(
    held_masks: HeldMasks, base: ModelConfig, steps_ahead: int
) -> None:
    loaded = tiny_model(base=base, tokenizer=character_tokenizer(), eos_token_ids=(END,))
    options = replace(BASE, steps_ahead=steps_ahead)
    expected = alone(loaded, options)
    held_masks.hold()
    assert served_while_held(Engine(loaded, options), held_masks) == expected


@pytest.mark.parametrize("base", [CONFIG, RECURRENT], ids=["attention", "recurrent"])
def test_a_text_whose_mask_is_computed_may_be_preempted(held_masks: HeldMasks, base: ModelConfig) -> None:
    """The others need all pages."""
    loaded = tiny_model(base=base, tokenizer=character_tokenizer(), eos_token_ids=(END,))
    requests = [replace(PLAIN, max_new_tokens=70), replace(HELD, priority=1), CONSTRAINED[0]]
    expected = [Engine(loaded, BASE).generate([each])[0] for each in requests]
    held_masks.hold()
    served = Engine(loaded, replace(BASE, num_pages=22))
    numbers = [served.submit(each) for each in requests]
    while not {numbers[0], numbers[2]} <= served._done.keys():
        served.step()
    assert served._outputs[numbers[1]].sequence.num_read == 2
    assert served.metrics.preemptions
    held_masks.may_end.set()
    assert served_to_the_end(served, numbers) == expected


def test_ranks_leave_out_the_same_texts(held_masks: HeldMasks) -> None:
    """A mask is late on one rank."""

    def serve(rank: ThreadRank) -> list[Completion]:
        served = Engine(character_model(rank), BASE)
        if rank.shard.rank == 1:
            held_masks.hold(served._matching)
        return served_while_held(served, held_masks)

    expected = alone(character_model(), BASE)
    for completions in on_threads(2, serve):
        assert [each.token_ids for each in completions] == [each.token_ids for each in expected]


async def test_a_request_may_end_while_its_mask_is_computed(held_masks: HeldMasks) -> None:
    held_masks.hold()
    served = Engine(character_model(), BASE)
    async with AsyncEngine(served) as front:
        left, aborted = front.stream(HELD), front.stream(HELD)
        await anext(left)
        await anext(aborted)
        left.close()
        await front.abort(aborted.number)
        assert (await aborted.completion()).finish_reason == "abort"
        assert len((await front.complete(PLAIN)).token_ids) == PLAIN.max_new_tokens
    assert is_empty(served)


def test_threads_for_masks_end_with_their_engine() -> None:
    before = set(threading.enumerate())
    served = Engine(character_model(), BASE)
    served.generate([CONSTRAINED[2]])
    threads = set(threading.enumerate()) - before
    assert {each.name for each in threads} == {"rocm_attn masks"}
    del served
    gc.collect()
    for each in threads:
        each.join()


def test_a_process_may_end_while_a_mask_is_computed() -> None:
    """Without waiting for it, the library crashes the process."""
    script = """
from rocm_serve.request import Request
from rocm_serve.text.constraint import Constraint
from tests.amd.server.tool_models import tool_engine
served = tool_engine("hermes")
for constraint in (None, Constraint.regex("a{60000}")):
    served.submit(Request((3, 4, 5), 9, constraint=constraint))
for _ in range(4):
    served.step()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_process_may_end_while_constraints_are_compiled() -> None:
    """Without waiting for those that have begun, six of ten such processes crash."""
    script = """
import time
from rocm_serve.engine import Engine
from rocm_serve.text.constraint import Constraint
from tests.amd.runner.with_parameters import BASE, character_model
of_engine = Engine(character_model(), BASE)._matching
for num in range(3000, 3008):
    of_engine.is_ready(Constraint.regex("(a|b|ab|ba){%d}(c|d|cd){3000}" % num), ())
time.sleep(0.004)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_texts_that_bring_their_common_lexer_to_its_limit_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts with the same constraint share a lexer. A text fails if it alone needs more states than a lexer has."""
    pattern = Constraint.regex("[a-z]*a[a-z]{20}0")
    requests = [Request(PROMPT, 40, drawn(temperature=9.0, seed=seed), constraint=pattern) for seed in range(12)]
    loaded = character_model()
    expected = Engine(loaded, BASE).generate(requests)
    monkeypatch.setattr(constraint, "MOST_LEXER_STATES", 100)
    served = Engine(loaded, BASE)
    for _ in range(2):
        assert served.generate(requests) == expected
    monkeypatch.setattr(constraint, "MOST_LEXER_STATES", 30)
    served, short = Engine(loaded, BASE), replace(requests[0], max_new_tokens=5)
    with pytest.raises(RequestsFailed) as failed:
        served.generate([requests[0], PLAIN, short])
    long, *others = failed.value.completions
    assert long.error.startswith("the constraint cannot be applied any further: lexer error: too many states")
    assert others == [Engine(loaded, BASE).generate([each])[0] for each in (PLAIN, short)]

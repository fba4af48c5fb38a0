"""The texts of constrained requests match the constraint, for any model and any way of serving.

Constraints are compiled outside of the engine's thread: other requests do not wait, however long it takes.
"""

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadRequest, FitsLater
from rocm_serve import engine_thread
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import Completion, Request, RequestsFailed
from rocm_serve.text import matching
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.matching import Matching, TextMatcher
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import is_empty
from tests.amd.runner.small_tokenizers import of_characters
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.runner.with_parameters import BASE, CHARACTERS, CONSTRAINED, END, PLAIN, PROMPT, character_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return character_model()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Completion]:
    return [Engine(loaded, BASE).generate([request])[0] for request in (PLAIN, *CONSTRAINED)]


def test_texts_match_their_constraints_and_end_where_they_may(alone: list[Completion]) -> None:
    plain, schema, regex, choice, allowed = alone
    assert plain.finish_reason == "length"
    value = json.loads(schema.text)
    assert value.keys() == {"a", "b"}
    assert isinstance(value["a"], int)
    assert value["a"] >= 3
    assert value["b"] in ("x", "yes")
    assert re.fullmatch("[a-f]{4,9}[0-9]", regex.text)
    assert choice.text in ("yes", "no")  # although min_tokens is larger
    assert all(done.finish_reason == "stop" and done.token_ids[-1] == END for done in (schema, regex, choice))
    assert re.fullmatch("[a-z]+", allowed.text)
    assert {*allowed.token_ids} <= {*range(9, 44, 2)}
    assert [emitted.token_id for emitted in schema.logprobs] == list(schema.token_ids)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint.choice(["a<end>b"]), "a<end>b"),
        (Constraint.regex("<end>[b]"), "<end>b"),
        (Constraint.json_schema({"enum": ["<end>"]}), '"<end>"'),
    ],
    ids=["choice", "regex", "schema"],
)
def test_a_text_that_looks_like_a_special_token_is_written_as_text(constraint: Constraint, text: str) -> None:
    """The token would end the text, and the text would lack it."""
    characters = CHARACTERS + "<>"
    words = Tokenizer(backend=of_characters(characters), bos_token_id=None, chat_template=None)
    spelling = tiny_model(tokenizer=words, eos_token_ids=(len(characters),))
    (done,) = Engine(spelling, BASE).generate([Request(PROMPT, 40, constraint=constraint)])
    assert (done.text, done.finish_reason) == (text, "stop")


def test_a_choice_may_have_thousands_of_texts(loaded: LoadedModel) -> None:
    texts = [f"{number:04}"[::-1] for number in range(5000)]
    (done,) = Engine(loaded, BASE).generate([Request(PROMPT, 40, constraint=Constraint.choice(texts))])
    assert done.text in texts


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        (lambda: Constraint.json_schema({"type": "strin"}), "cannot be used: .*strin"),
        (lambda: Constraint.json_schema("{bad"), "the JSON schema is not JSON"),
        (lambda: Constraint.json_schema("null"), "the JSON schema is no object; give one"),
        (lambda: Constraint.regex("[a"), "cannot be used: .*unclosed character class"),
        (lambda: Constraint.grammar("start: nothing"), "cannot be used: .*nothing"),
        (lambda: Constraint.json_schema({"a": {1, 2}}), "cannot be written as JSON"),
        (lambda: Constraint.regex("a" * 65_537), "has 65537 characters; at most 65536"),
        (lambda: Constraint.regex(""), "the constraint is empty"),
        (lambda: Constraint.choice([]), "a choice needs at least one text"),
        (lambda: Constraint.choice(["a", ""]), "a choice needs at least one text"),
        (lambda: Constraint.json_schema(nested(150)), "cannot be used: recursion limit exceeded"),
    ],
)
def test_constraints_without_sense_are_refused_with_the_reason(
    loaded: LoadedModel, constraint: Any, sentence: str
) -> None:
    """check(), which needs no model, and an engine refuse them; it keeps no trace of them, and of those before them."""
    with pytest.raises(BadRequest, match=sentence):
        constraint().check()
    engine = Engine(loaded, BASE)
    with pytest.raises(BadRequest, match=sentence):
        engine.generate([PLAIN, Request(PROMPT, 5, constraint=constraint())])
    assert not engine.has_work


def test_a_constraint_that_the_library_gives_up_on_fails_its_request_alone(
    loaded: LoadedModel, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = TextMatcher.mask

    def given_up(matcher: TextMatcher, token_ids: Sequence[int], banned: Any) -> Int32Array:
        return mask(matcher, (*token_ids, 20) if len(token_ids) == 3 else token_ids, banned)

    monkeypatch.setattr(TextMatcher, "mask", given_up)
    with pytest.raises(RequestsFailed) as failed:
        Engine(loaded, BASE).generate([PLAIN, CONSTRAINED[0]])
    plain, schema = failed.value.completions
    assert plain == alone[0]
    assert schema.error.startswith("the constraint cannot be applied any further: ")
    assert len(schema.token_ids) == 3


def test_what_a_constraint_needs_is_said(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request = CONSTRAINED[0]
    with pytest.raises(BadRequest, match="a constraint and the model has no tokenizer"):
        Engine(tiny_model(), BASE).submit(request)
    endless = Engine(replace(loaded, config=replace(loaded.config, eos_token_ids=())), BASE)
    with pytest.raises(BadRequest, match="no token that ends a text, which a constraint needs; give one in stop_token"):
        endless.submit(request)
    done = endless.generate([replace(CONSTRAINED[2], stop_token_ids=(END,))])[0]
    assert (done.text in ("yes", "no"), done.finish_reason) == (True, "stop")
    with pytest.raises(BadRequest, match="this model's tokenizer cannot be used with a constraint"):
        Engine(tiny_model(tokenizer=word_tokenizer(), eos_token_ids=(5,)), BASE).submit(request)
    with pytest.raises(BadRequest, match="ignore_eos is set together with a constraint"):
        replace(request, ignore_eos=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        BadRequest, match=r"need the library llguidance, which is not installed; run in a checkout of rocm_attn: pip"
    ):
        Engine(loaded, BASE).submit(request)


def test_banned_tokens_are_ruled_out_as_long_as_others_are_left(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    engine.prepare_constraints()
    assert engine._matching is not None
    ones = engine._matching.matcher(Constraint.regex("1*"), ())

    def allowed(mask: Int32Array) -> list[int]:
        found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return found

    one = PROMPT[1]
    assert allowed(ones.mask((), ())) == [one, END]
    assert allowed(ones.mask((one,), (END, 2))) == [one]
    assert allowed(ones.mask((one, one), (END, one))) == [one, END]


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

"""Stop texts: found across the borders of tokens, and no text after them is ever printed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.errors import BadRequest
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.paging.index_spaces import RESERVED_ROW
from rocm_serve.appended import Appended, Picks
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Request, TokenEvent
from rocm_serve.request_stream import Inbox
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.text.stop_texts import StopTexts
from tests.amd.runner.scripted_drafts import EveryOtherStep, with_drafter
from tests.amd.runner.serving import all_pages_are_free
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.runner.with_parameters import BASE, PROMPT, character_model, drawn

# Runs to its length, and has repeated parts.
LONG = Request(PROMPT, 24, drawn())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return character_model()


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> str:
    done = Engine(loaded, BASE).generate([LONG])[0]
    assert len(done.text) >= 10
    return done.text


def cut(pieces: list[str], stops: list[str], include: bool, num_free: int) -> tuple[str, bool]:
    """Tries every end: returns where the text ends, and whether one of the stops has ended it."""
    text, free = "".join(pieces), len("".join(pieces[:num_free]))
    for end in range(free + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(map(len, found))
            return (text[:end] if include else text[: end - longest]), True
    return text, False


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    num_free=st.integers(0, 3),
)
def test_a_text_ends_where_trying_every_end_finds_it(
    pieces: list[str], stops: list[str], include: bool, num_free: int
) -> None:
    """The text printed at any time is a beginning of the result; the text held back may still begin a stop."""
    finder, printed, (wanted, stopped) = StopTexts(stops, include), "", cut(pieces, stops, include, num_free)
    for number, piece in enumerate(pieces):
        printed += finder.push(piece, counts=number >= num_free)
        assert wanted.startswith(printed)
        held = "".join(pieces[: number + 1])[len(printed) :]
        assert finder.has_stopped or not held or any(stop.startswith(held) for stop in stops)
    assert (printed + finder.finish(), finder.has_stopped) == (wanted, stopped)


@pytest.mark.fast(1)
@pytest.mark.parametrize("include", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "options",
    [BASE, replace(BASE, steps_ahead=1), replace(BASE, speculative="ngram", draft_tokens=4, steps_ahead=1)],
    ids=["plain", "a step ahead", "draft tokens"],
)
def test_every_part_of_a_text_ends_it_as_a_stop(loaded: LoadedModel, text: str, include: bool, options: object) -> None:
    """The same text, many requests at once, each with another stop; the tokens end with the one that completes it."""
    stops = [text[at : at + 1 + at % 3] for at in range(0, len(text) - 2, 2)]
    requests = [replace(LONG, stop=(stop, "never"), include_stop=include) for stop in stops]
    engine = Engine(loaded, options)  # type: ignore[arg-type]
    printed: dict[int, str] = {}

    def note(event: object) -> None:
        assert isinstance(event, TokenEvent)
        printed[event.request] = printed.get(event.request, "") + event.text

    whole = Engine(loaded, BASE).generate([LONG])[0].token_ids
    for number, (stop, done) in enumerate(zip(stops, engine.generate(requests, note), strict=True)):
        end = text.index(stop) + len(stop)
        assert (done.text, done.finish_reason) == (text[: end if include else end - len(stop)], "stop")
        assert printed[number] == done.text
        assert done.token_ids == whole[: len(done.token_ids)]
        tokenizer = loaded.tokenizer
        assert tokenizer is not None
        assert stop in tokenizer.decode(done.token_ids)
        assert stop not in tokenizer.decode(done.token_ids[:-1])
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("topk", [1, 2])
def test_who_has_ended_by_its_text_takes_nothing_of_the_step_that_runs(
    loaded: LoadedModel, text: str, topk: int
) -> None:
    """K and V are not moved for it either: its row and its pages may be another's, which waits for them here."""
    free = replace(LONG, max_new_tokens=12, prefix_caching=False)
    requests = [*(replace(free, stop=(text[:num],), logprobs=0) for num in (1, 2, 3)), free]
    alone = Engine(loaded, BASE).generate(requests)
    options = replace(BASE, speculative="ngram", topk=topk, steps_ahead=1, max_batch_size=2)
    engine = Engine(loaded, options)
    with_drafter(engine, EveryOtherStep([PROMPT + alone[-1].token_ids] * len(requests), 64, branches=topk > 1))
    scheduler, move, moved, dropped = engine._scheduler, engine.runtime.move_accepted, list[int](), list[bool]()
    finish = scheduler.finish_step

    def noted_move(accepted: Accepted, seqs: list[int]) -> None:
        last = engine.runtime.gate._ran()
        assert last is not None
        rows = last.batch.rows[seqs].tolist()
        moved.extend(rows)
        assert set(rows) <= {sequence.row for sequence in scheduler._running}
        move(accepted, seqs)

    def noted_finish(step: ScheduledStep, picks: Picks) -> Appended:
        dropped.extend(sequence.row == RESERVED_ROW for sequence in step.sequences)
        return finish(step, picks)

    engine.runtime.move_accepted, scheduler.finish_step = noted_move, noted_finish  # type: ignore[method-assign,assignment]
    assert [alike(done) for done in engine.generate(requests)] == [alike(done) for done in alone]
    assert any(dropped), "one has ended while a step ran that it was in"
    assert bool(moved) == (topk > 1)
    metrics = engine.report().metrics
    assert metrics.new_tokens == sum(len(done.token_ids) for done in alone)
    assert metrics.requests_ended == {"stop": 3, "length": 1}
    assert engine.runtime.table.full.num_free_pages == engine.runtime.table.full.num_usable_pages


def alike(done: Completion) -> tuple[object, ...]:
    """All fields except the last bits of logprobs: in a tree keys lie in another order."""
    return done.token_ids, done.text, done.finish_reason, [emitted.token_id for emitted in done.logprobs]


def test_a_stop_counts_where_it_ends_after_the_least_tokens(loaded: LoadedModel, text: str) -> None:
    engine = Engine(loaded, BASE)
    whole = engine.generate([LONG])[0]
    for num in (1, 5, 9):
        done = engine.generate([replace(LONG, stop=tuple(set(text)), min_tokens=num)])[0]
        assert done.finish_reason == "stop"
        assert len(done.token_ids) > num
        assert done.token_ids == whole.token_ids[: len(done.token_ids)]
        assert done.text == text[: len(done.text)]


async def test_a_reader_gets_no_more_than_the_text(loaded: LoadedModel, text: str) -> None:
    request, (whole,) = replace(LONG, stop=(text[5:8],)), Engine(loaded, BASE).generate([LONG])
    async with AsyncEngine(Engine(loaded, replace(BASE, steps_ahead=1))) as front:
        pieces = [piece async for piece in front.stream(request)]
    assert pieces[-1].finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == text[: text.index(text[5:8])]
    inbox = Inbox(request, loaded.tokenizer)
    inbox.add(whole.token_ids)
    assert inbox.take().token_ids == sum((piece.token_ids for piece in pieces), ())


def test_stops_need_a_tokenizer() -> None:
    with pytest.raises(BadRequest, match="stop texts and the model has no tokenizer"):
        Engine(tiny_model(), BASE).submit(Request((1,), stop=("a",)))

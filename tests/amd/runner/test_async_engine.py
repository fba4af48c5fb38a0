"""AsyncEngine: tasks get the engine's output, regardless of other tasks; and all waiting tasks are woken at the end."""

import asyncio
import gc
import random
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from rocm_attn.errors import BadRequest, BadSetting, WrongState
from rocm_serve.async_engine import AsyncEngine, EngineEnded, TooManyRequests, _Books
from rocm_serve.engine import Engine
from rocm_serve.engine_thread import Ended, Message
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Event, Request
from rocm_serve.request_stream import Inbox, OutputChunk, RequestFailed, RequestStream
from rocm_serve.text.tokenizer import TextStream
from tests.amd.runner.async_engines import LONG, Broken, Gated, engine, is_empty, read, some_requests
from tests.amd.runner.small_tokenizers import sentencepiece
from tests.amd.runner.tiny_model import NAN_TOKEN, tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(tokenizer=sentencepiece())


async def test_a_stream_that_nothing_refers_to_is_ended(loaded: LoadedModel) -> None:
    served = engine(loaded)
    async with AsyncEngine(served) as front:
        front.stream(LONG)  # dropped at once
        stream = front.stream(LONG)
        await anext(stream)
        circle: list[object] = [stream]
        circle.append(circle)
        del stream, circle
        gc.collect()
        assert await front.between_steps(lambda: is_empty(served))


async def test_an_abort_before_the_first_step_computes_nothing(loaded: LoadedModel) -> None:
    served = engine(loaded)
    async with AsyncEngine(served) as front:
        async with front.paused():
            stream = front.stream(LONG)
            await front.abort(stream.number)
        assert [piece async for piece in stream] == [OutputChunk((), "", "abort")]
        assert (await stream.completion()).token_ids == ()
        await front.abort(stream.number)  # it has ended
        await front.abort(12345)  # there is no such request
    assert served.report().metrics.steps == 0


async def test_a_late_reader_finds_all_tokens_in_one_piece_and_holds_up_no_other(loaded: LoadedModel) -> None:
    request = replace(LONG, max_new_tokens=12)
    async with AsyncEngine(engine(loaded)) as front:
        late = front.stream(request)
        other = await front.complete(request)
        await front.between_steps(lambda: None)
        (piece,) = [piece async for piece in late]
    assert (piece.token_ids, piece.text, piece.finish_reason) == (other.token_ids, other.text, "length")


async def test_the_event_loop_goes_on_while_a_step_runs(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, and are refused, while a step hangs; and no text is made in the engine's thread."""
    served, threads = engine(loaded), set[int]()
    push, gated = TextStream.push, Gated(served)

    def noted(self: TextStream, token_id: int) -> str:
        threads.add(threading.get_ident())
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", noted)
    async with AsyncEngine(served, max_requests=2) as front:
        first = front.stream(LONG)
        await gated.begun()
        second = asyncio.ensure_future(front.complete(LONG))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests):
            front.stream(LONG)
        with pytest.raises(BadRequest):
            front.stream(Request((1,) * 97))
        front.check()
        metrics = await front.metrics()
        assert (metrics.steps, metrics.running) == (0, 0)
        first.close()
        gated.let(200)
        found = await second
    assert threads == {threading.get_ident()}
    assert found == engine(loaded).generate([LONG])[0]


async def leave(stream: RequestStream, way: str, pieces: int) -> None:
    """Reads some pieces, or none, and leaves in one of WAYS; "with" does nothing more."""
    async with stream:
        for _ in range(pieces):
            if await anext(stream, None) is None:
                break
        if way == "close":
            stream.close()
        elif way == "cancel":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        if way != "with":
            async for _ in stream:
                if way == "break":
                    break
                await asyncio.sleep(0)


WAYS = ("with", "break", "close", "cancel")


@pytest.mark.fast(2)
@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_calls_leaves_every_other_request_as_it_would_be(seed: int, loaded: LoadedModel) -> None:
    """Submissions, steps, readers that come late or leave in some way, aborts, pauses and calls, in a drawn order."""
    chooser, served = random.Random(seed), engine(loaded, num_pages=(None, 18)[seed % 2], max_batch_size=4)
    requests, gated = some_requests(40, seed), Gated(served)
    gone, aborted = dict[int, tuple[str, asyncio.Task[None]]](), set[int]()
    async with AsyncEngine(served) as front, AsyncExitStack() as pauses:
        streams: list[RequestStream] = []
        calls: list[asyncio.Future[None]] = []
        while len(streams) < len(requests):
            match chooser.choice(("submit", "submit", "let", "let", "leave", "abort", "call", "pause", "resume")):
                case "submit":
                    streams.append(front.stream(requests[len(streams)]))
                case "let":
                    gated.let(chooser.randrange(1, 6))
                case "leave" if stay := [number for number in range(len(streams)) if number not in gone]:
                    number, way = chooser.choice(stay), chooser.choice(WAYS)
                    task = asyncio.create_task(leave(streams[number], way, chooser.randrange(4)))
                    gone[number] = way, task
                case "abort" if streams:
                    aborted.add(ends := chooser.randrange(len(streams)))
                    calls.append(asyncio.ensure_future(front.abort(streams[ends].number)))
                case "call":
                    calls.append(asyncio.ensure_future(front.between_steps(lambda: None)))
                case "pause":
                    calls.append(asyncio.ensure_future(pauses.enter_async_context(front.paused())))
                case "resume":
                    gated.let(1000)
                    await asyncio.gather(*calls)
                    await pauses.aclose()
            await asyncio.sleep(0)
        gated.let(10_000)
        await asyncio.gather(*calls)
        await pauses.aclose()
        found = [
            None if number in gone else await (stream.completion() if number % 2 else read(stream))
            for number, stream in enumerate(streams)
        ]
        for way, task in gone.values():
            (end,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(end, asyncio.CancelledError) if way == "cancel" else end is None
        assert await front.between_steps(lambda: is_empty(served)), "the request that left has taken its pages along"
    for number, (got, wanted) in enumerate(zip(found, engine(loaded).generate(requests), strict=True)):
        if number in gone:
            continue
        assert got is not None
        if number in aborted and got.finish_reason == "abort":
            assert got.token_ids == wanted.token_ids[: len(got.token_ids)]
        else:
            assert got == wanted
    assert is_empty(served)


async def test_a_request_that_the_engine_refuses_when_it_is_queued_fails_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, requests = engine(loaded), some_requests(3)
    monkeypatch.setattr(served, "check", lambda request: None)
    submit = served.submit

    def checked(request: Request) -> int:
        Engine.check(served, request)
        return submit(request)

    monkeypatch.setattr(served, "submit", checked)
    async with AsyncEngine(served) as front:
        others = asyncio.gather(*map(front.complete, requests))
        with pytest.raises(BadRequest, match="97 tokens"):
            await front.complete(Request((1,) * 97))
        found = await others
    assert found == engine(loaded).generate(requests)


@pytest.mark.parametrize("prompt", [(3, 4, NAN_TOKEN), (3, NAN_TOKEN, 4)], ids=["logits", "K and V"])
async def test_a_request_that_fails_does_so_alone(prompt: tuple[int, ...], poisoned: LoadedModel) -> None:
    requests, served = [replace(request, max_new_tokens=1) for request in some_requests(6)], engine(poisoned)
    async with AsyncEngine(served) as front:
        bad = front.stream(Request(prompt, 6))
        others = asyncio.gather(*map(front.complete, requests))
        with pytest.raises(RequestFailed, match=r"nan|infinite") as why:
            await read(bad)
        with pytest.raises(RequestFailed):
            await asyncio.wait_for(bad.completion(), 60)
        assert [piece async for piece in bad] == [], "it is over"
        assert why.value.completion.finish_reason == "error"
        found = await others
    assert found == engine(poisoned).generate(requests)
    assert is_empty(served)


class Leaving(BaseException):
    """Like SystemExit, which asyncio passes on to whatever runs its loop."""


@pytest.mark.parametrize(("raised", "met"), [(Broken, Broken), (StopIteration, RuntimeError), (Leaving, Leaving)])
async def test_whatever_a_call_raises_is_its_callers_and_ends_no_request(
    raised: type[BaseException], met: type[BaseException], loaded: LoadedModel
) -> None:
    """With `lambda: next(nothing)` the engine ended, and with it all requests."""

    async with AsyncEngine(engine(loaded)) as front:
        done = asyncio.ensure_future(front.complete(LONG))
        with pytest.raises(met):
            await front.between_steps(Mock(side_effect=raised))
        found = await done
    assert found == engine(loaded).generate([LONG])[0]


async def test_an_abort_of_no_number_is_refused_and_ends_no_request(loaded: LoadedModel) -> None:
    """A list ended the engine, and a stream did nothing."""
    async with AsyncEngine(engine(loaded)) as front:
        stream = front.stream(LONG)
        for wrong in ([0], stream, None):
            with pytest.raises(BadRequest, match=r"number is .*; it must be a whole number"):
                await front.abort(wrong)  # type: ignore[arg-type]
        assert await stream.completion() == engine(loaded).generate([LONG])[0]


@pytest.mark.parametrize("raised", [Broken("only mine"), asyncio.CancelledError("only mine")])
@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_listener_that_raises_fails_its_own_request_alone(
    gives_up: bool, raised: BaseException, loaded: LoadedModel
) -> None:
    """The engine ended, and with it all requests; after a CancelledError, as of a task's result, others lost tokens."""

    served = engine(loaded)
    async with AsyncEngine(served) as front:
        stream, other = front.streams([LONG, LONG])
        stream.listen(Mock(side_effect=raised))
        if gives_up:
            stream.give_up(RequestFailed(Completion((5,), (), "", "error", error="given up")))
        with pytest.raises(RequestFailed, match="given up" if gives_up else "could not be taken in: .*: only mine"):
            await stream.completion()
        assert await other.completion() == engine(loaded).generate([LONG])[0]
        assert await front.between_steps(lambda: is_empty(served))


async def test_the_requests_of_an_iterator_are_queued(loaded: LoadedModel) -> None:
    async with AsyncEngine(engine(loaded)) as front:
        streams = front.streams(iter([LONG, LONG]))  # type: ignore[arg-type]
        assert [await stream.completion() for stream in streams] == engine(loaded).generate([LONG, LONG])


async def test_a_bound_that_is_no_number_is_refused_before_a_token_comes(loaded: LoadedModel) -> None:
    """The request failed at its first token."""
    async with AsyncEngine(engine(loaded)) as front:
        stream = front.stream(LONG)
        for wrong in ("8", -1, 2.5):
            with pytest.raises(BadSetting, match=f"most_unread is {wrong!r}; it must be"):
                stream.bound(wrong, lambda: None)  # type: ignore[arg-type]
        assert await stream.completion() == engine(loaded).generate([LONG])[0]


async def test_a_second_front_of_an_engine_is_refused_and_the_first_is_served(loaded: LoadedModel) -> None:
    """Each dropped the tokens of the other's requests."""
    served = engine(loaded)
    async with AsyncEngine(served) as front:
        second = AsyncEngine(served)
        with pytest.raises(WrongState, match="another AsyncEngine serves this engine; use that one, or leave its"):
            await second.__aenter__()
        found = await front.complete(LONG)
    async with second:
        assert await second.complete(LONG) == found


async def test_a_closed_stream_has_no_completion_and_lets_no_task_wait(loaded: LoadedModel) -> None:
    """The task waited for ever."""
    async with AsyncEngine(engine(loaded)) as front, front.paused():
        before, meanwhile, pieces = front.streams([LONG, LONG, LONG])
        waits, reads = asyncio.ensure_future(meanwhile.completion()), asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        for stream in (before, meanwhile, pieces):
            stream.close()
        with pytest.raises(StopAsyncIteration):
            await reads
        for completion in (waits, before.completion()):
            with pytest.raises(WrongState, match="the stream was closed before its request had ended"):
                await completion


async def test_more_requests_than_are_allowed_are_refused_until_one_is_done(loaded: LoadedModel) -> None:
    async with AsyncEngine(engine(loaded), max_requests=3) as front:
        async with front.paused():
            streams = [front.stream(LONG) for _ in range(3)]
            with pytest.raises(TooManyRequests, match="3 requests run or wait, and max_requests"):
                await front.complete(LONG)
            closed = streams.pop()  # a reference stays
            closed.close()
            await front.between_steps(lambda: None)
            streams.append(front.stream(LONG))
            with pytest.raises(TooManyRequests):
                front.stream(LONG)
            assert ((await front.metrics()).refusals, (await front.report()).metrics.refusals) == (2, 0)
        await asyncio.gather(*(stream.completion() for stream in streams))


def test_a_front_for_no_requests_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(BadSetting, match="max_requests is 0; it must be at least 1"):
        AsyncEngine(engine(loaded), max_requests=0)
    with pytest.raises(BadSetting, match="max_requests is None; it must be a whole number"):
        AsyncEngine(engine(loaded), max_requests=None)  # type: ignore[arg-type]


async def test_no_step_runs_while_it_is_paused(loaded: LoadedModel) -> None:
    served = engine(loaded)
    async with AsyncEngine(served) as front:
        stream = front.stream(LONG)
        await anext(stream)
        async with front.paused(), front.paused():
            steps = (await front.metrics()).steps
            await front.between_steps(lambda: None)
            waits = front.stream(LONG)
            await front.between_steps(lambda: None)
            assert (await front.metrics()).steps == steps
        assert await stream.completion() == await waits.completion()


async def test_it_is_used_in_one_loop_and_started_once(loaded: LoadedModel) -> None:
    front = AsyncEngine(engine(loaded))
    with pytest.raises(EngineEnded, match="it was not started"):
        front.stream(LONG)
    with pytest.raises(EngineEnded, match="it was not started"):
        await front.drain()
    with pytest.raises(EngineEnded, match="it was not started"):
        await front.stop()
    async with front:
        with pytest.raises(WrongState, match="started only once"):
            await front.__aenter__()

        def elsewhere() -> None:
            async def other() -> None:
                front.stream(LONG)

            with pytest.raises(WrongState, match="this is another one"):
                asyncio.run(other())

        await asyncio.to_thread(elsewhere)


async def test_one_task_at_a_time_waits_for_a_request(loaded: LoadedModel) -> None:
    async with AsyncEngine(engine(loaded)) as front, front.paused():
        stream = front.stream(LONG)
        first = asyncio.ensure_future(stream.completion())
        await asyncio.sleep(0)
        with pytest.raises(WrongState, match="another task waits"):
            await anext(stream)
        stream.close()
        first.cancel()


def breaks_in_step(served: Engine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, numbers = served.step, iter(range(number))

    def breaking() -> list[Event]:
        if next(numbers, None) is None:
            raise Broken("the bus has fallen off")
        return step()

    monkeypatch.setattr(served, "step", breaking)


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_an_exception_that_ends_the_engine_reaches_all_and_later_calls_are_refused(
    steps: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded, max_batch_size=2)
    breaks_in_step(served, steps, monkeypatch)
    async with AsyncEngine(served) as front:
        streams = [front.stream(LONG) for _ in range(5)]
        waiting = [*map(read, streams), *(front.complete(LONG) for _ in range(5))]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineEnded}
        assert {str(end) for end in ends} == {"the engine accepts no more requests: Broken: the bus has fallen off"}
        assert len({id(end) for end in ends}) == len(ends), "each has its own traceback"
        assert all(isinstance(end, EngineEnded) and isinstance(end.__cause__, Broken) for end in ends)
        with pytest.raises(EngineEnded, match="has fallen off"):
            front.check()
        with pytest.raises(EngineEnded, match="has fallen off"):
            front.stream(LONG)
        with pytest.raises(EngineEnded, match="has fallen off"):
            await front.between_steps(lambda: None)
        with pytest.raises(EngineEnded, match="has fallen off"):
            await front.abort(streams[0].number)
        assert (await front.metrics()).steps == steps
    assert is_empty(served), "it may serve again"


async def test_tokens_that_came_before_the_end_are_read_first(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded)
    breaks_in_step(served, 3, monkeypatch)
    async with AsyncEngine(served) as front:
        stream, waits_too = front.stream(LONG), asyncio.ensure_future(front.complete(LONG))
        await asyncio.wait([waits_too])
        piece = await anext(stream)
        with pytest.raises(EngineEnded, match="fallen off"):
            await anext(stream)
        assert isinstance(waits_too.exception(), EngineEnded)
    assert piece.token_ids == engine(loaded).generate([LONG])[0].token_ids[:3]


async def test_output_that_cannot_be_taken_in_fails_its_request_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of all requests come in one message: those after it were lost, and waited for ever."""
    served, add = engine(loaded), Inbox.add

    def adding(inbox: Inbox, *given: Any) -> None:
        if inbox.request.max_new_tokens == 7 and inbox.num_tokens == 2:
            raise MemoryError("no room")
        add(inbox, *given)

    monkeypatch.setattr(Inbox, "add", adding)
    requests = [replace(LONG, max_new_tokens=num) for num in (5, 7, 5)]
    async with AsyncEngine(served) as front:
        first, bad, last = (front.stream(request) for request in requests)
        with pytest.raises(RequestFailed, match="its output could not be taken in: MemoryError: no room"):
            await asyncio.wait_for(bad.completion(), 60)
        found = [await asyncio.wait_for(stream.completion(), 60) for stream in (first, last)]
    assert found == engine(loaded).generate([requests[0], requests[2]])
    assert is_empty(served)


async def test_a_message_that_cannot_be_taken_in_ends_the_engine_for_all(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = engine(loaded)
    async with AsyncEngine(served) as front:
        streams = [front.stream(LONG) for _ in range(3)]
        monkeypatch.setattr(front._books, "_take_output", Mock(side_effect=Broken("mine")))
        for stream in streams:
            with pytest.raises(EngineEnded, match="Broken: mine"):
                await asyncio.wait_for(stream.completion(), 60)
    assert "a message of the engine could not be taken in" in caplog.text
    assert is_empty(served)


async def test_an_engine_without_memory_for_its_last_message_sends_it_later(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who waited for the engine's end waited for ever."""
    missing, post = [MemoryError("no room")] * 2, _Books.post

    def posting(books: _Books, message: Message) -> None:
        if isinstance(message, Ended) and missing:
            raise missing.pop()
        post(books, message)

    monkeypatch.setattr(_Books, "post", posting)
    front = await AsyncEngine(engine(loaded)).__aenter__()
    stream = front.stream(LONG)
    await asyncio.wait_for(front.stop(), 60)
    with pytest.raises(EngineEnded, match="it was stopped"):
        await asyncio.wait_for(stream.completion(), 60)
    assert not missing


async def test_leaving_waits_for_those_that_are_served(loaded: LoadedModel) -> None:
    async with AsyncEngine(engine(loaded)) as front:
        streams = [front.stream(request) for request in some_requests(9)]
    with pytest.raises(EngineEnded, match="it was stopped"):
        front.stream(LONG)
    found = [await stream.completion() for stream in streams]
    assert found == engine(loaded).generate(some_requests(9))


async def test_leaving_by_an_exception_gives_up_those_that_are_served(loaded: LoadedModel) -> None:
    served = engine(loaded)
    streams: list[RequestStream] = []

    async def leave() -> None:
        async with AsyncEngine(served) as front:
            streams.extend(front.stream(LONG) for _ in range(9))
            await anext(streams[0])
            raise Broken("mine")

    with pytest.raises(Broken, match="mine"):
        await leave()
    for stream in streams:
        with pytest.raises(EngineEnded, match="it was stopped"):
            await stream.completion()
    assert is_empty(served)


async def test_draining_takes_no_more_requests_and_ends_those_that_there_are(loaded: LoadedModel) -> None:
    async with AsyncEngine(engine(loaded)) as front:
        stream = front.stream(LONG)
        drained = asyncio.ensure_future(front.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineEnded, match=r"drain\(\) was called"):
            front.stream(LONG)
        await drained
        front.check()
        found = await stream.completion()
    assert [found] == engine(loaded).generate([LONG])


@pytest.mark.fast
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("num", [0, 4])
def test_a_loop_that_is_closed_ends_the_thread_and_frees_all_pages(
    num: int, busy: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_serve.engine_thread._LOOK_AT_OWNER_SECONDS", 0.01)
    served = engine(loaded)
    gated = Gated(served)
    loop = asyncio.new_event_loop()
    front = AsyncEngine(served)
    loop.run_until_complete(front.__aenter__())
    streams: list[RequestStream] = []

    async def begin() -> None:
        streams.extend(front.stream(LONG) for _ in range(num))

    loop.run_until_complete(begin())
    if busy:
        loop.close()
        gated.let(100)
    else:
        gated.let(100 * num)
        loop.run_until_complete(front.drain())
        loop.close()
    front._thread.join()
    assert is_empty(served)

"""AsyncEngine: what tasks get is what the engine generates, whatever other tasks do; and everybody is woken at the end.

No test waits for a time: what is to have happened before is awaited, most often by between_steps(), which runs after
all that was asked of the engine before it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from rocm_attn.errors import BadRequest, DeviceFault, WrongState
from rocm_attn.runner.async_engine import AsyncEngine, EngineEnded, TooManyRequests
from rocm_attn.runner.engine import Engine
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.request import Completion, Event, Request
from rocm_attn.runner.request_stream import Piece, RequestFailed, RequestStream
from rocm_attn.runner.sampling import Sampling
from rocm_attn.runner.tokenizer import TextStream
from tests.amd.runner.test_tokenizer import from_gguf, sentencepiece_fields
from tests.amd.runner.tiny_model import CONFIG, tiny_model

T = TypeVar("T")

BASE = EngineOptions(
    provider="torch", page_size=4, max_batch_size=8, chunk=16, graphs=False, max_kv_len=64, capture_after=0
)
NAN_TOKEN = 7
LONG = Request((5, 6, 8), 60)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(tokenizer=from_gguf(sentencepiece_fields()))


@pytest.fixture(scope="module")
def poisoned() -> LoadedModel:
    """Token 7 has K, V and logits that are NaN."""
    model = tiny_model()
    model.weights.embedding[NAN_TOKEN] = float("nan")
    return model


def engine(loaded: LoadedModel, **changes: Any) -> Engine:
    return Engine(loaded, replace(BASE, **changes))


def some_requests(num: int, seed: int = 3) -> list[Request]:
    chooser = random.Random(seed)
    return [
        Request(
            tuple(chooser.choices(range(NAN_TOKEN + 1, CONFIG.vocab_size), k=chooser.randrange(1, 20))),
            chooser.randrange(1, 12),
            Sampling(temperature=chooser.choice((0.0, 0.9)), seed=chooser.randrange(9)),
        )
        for _ in range(num)
    ]


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run a test's tasks; afterwards no thread of an engine's is left."""

    async def awaited() -> T:
        return await main()

    result = asyncio.run(awaited())
    assert [thread.name for thread in threading.enumerate() if "engine" in thread.name] == []
    return result


def is_empty(served: Engine) -> bool:
    """Whether the engine holds nothing of any request, but for cached prefixes, which it forgets here."""
    if (served.has_work, served._outputs, served._done, served._events) != (False, {}, {}, []):
        return False
    served.forget_prefixes()
    table = served.runtime.table
    return (table.num_free_pages, table.num_free_rows) == (table.num_usable_pages, served.options.max_batch_size)


async def read(stream: RequestStream) -> Completion:
    """The pieces put together."""
    pieces = [piece async for piece in stream]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    reason = pieces[-1].finish_reason
    assert reason is not None
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    return Completion((await stream.completion()).prompt_token_ids, tokens, "".join(p.text for p in pieces), reason)


class Gated:
    """An engine that waits before each step for the test's word."""

    def __init__(self, served: Engine) -> None:
        self._step, self._gate, self._begun = served.step, threading.Semaphore(0), threading.Semaphore(0)
        served.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Event]:
        self._begun.release()
        self._gate.acquire()
        return self._step()

    async def begun(self) -> None:
        """Wait until another step has begun."""
        await asyncio.to_thread(self._begun.acquire)

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._gate.release()


def test_streams_and_completions_are_what_the_engine_generates(loaded: LoadedModel) -> None:
    requests = some_requests(20)

    async def main() -> tuple[list[Completion], list[Completion]]:
        async with AsyncEngine(engine(loaded)) as front:
            streamed = asyncio.gather(*(read(front.stream(request)) for request in requests))
            completed = asyncio.gather(*(front.complete(request) for request in requests))
            return await streamed, await completed

    expected = engine(loaded).generate(requests)
    assert run(main) == (expected, expected)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"num_pages": 18}], ids=["", "few pages"])
def test_fifty_tasks_some_of_which_leave_get_what_the_engine_generates(
    changes: dict[str, Any], seed: int, loaded: LoadedModel
) -> None:
    """Each task reads some pieces, or none, and then stays or leaves in one of the ways there are."""
    requests, chooser = some_requests(50, seed), random.Random(seed)
    served = engine(loaded, **changes)
    ways = [chooser.choice(("stay", "stay", "cancel", "break", "close", "abort", "with", "drop")) for _ in requests]
    reads = [chooser.randrange(4) for _ in requests]

    async def leave(front: AsyncEngine, request: Request, way: str, pieces: int) -> Completion | None:
        stream = front.stream(request)
        if way == "drop" and pieces == 0:
            return None
        async with stream:
            for _ in range(pieces):
                if await anext(stream, None) is None:
                    break
            if way == "with":
                return None
            if way == "close":
                stream.close()
            elif way == "abort":
                await front.abort(stream.number)
                return await stream.completion()
            elif way in ("break", "drop"):
                async for _ in stream:
                    break
            elif way == "cancel":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                async for _ in stream:
                    await asyncio.sleep(0)
            else:
                return await stream.completion()
        return None

    async def main() -> list[Completion | BaseException | None]:
        async with AsyncEngine(served) as front:
            tasks = (leave(front, *each) for each in zip(requests, ways, reads, strict=True))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert await front.between_steps(lambda: is_empty(served)), "whoever left has taken its pages along"
            return results

    for way, result, expected in zip(ways, run(main), engine(loaded).generate(requests), strict=True):
        if way == "stay":
            assert result == expected
        elif way == "abort":
            assert isinstance(result, Completion)
            assert result.finish_reason in ("abort", expected.finish_reason)
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        elif way == "cancel":
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result is None
    assert is_empty(served)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancelling_a_task_frees_its_pages(after: int, loaded: LoadedModel) -> None:
    served = engine(loaded)
    gated = Gated(served)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            gated.let(after)
            stream = front.stream(LONG)
            for _ in range(min(after, 1)):
                await anext(stream)
            reader, waiter = asyncio.ensure_future(read(stream)), asyncio.ensure_future(front.complete(LONG))
            await asyncio.sleep(0)
            reader.cancel()
            waiter.cancel()
            assert [type(end) for end in await asyncio.gather(reader, waiter, return_exceptions=True)] == (
                [asyncio.CancelledError] * 2
            )
            gated.let(100)
            assert await front.between_steps(lambda: is_empty(served))

    run(main)


def test_a_stream_that_nothing_refers_to_is_ended(loaded: LoadedModel) -> None:
    served = engine(loaded)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            front.stream(LONG)  # dropped at once
            stream = front.stream(LONG)
            await anext(stream)
            circle: list[object] = [stream]
            circle.append(circle)
            del stream, circle
            gc.collect()
            assert await front.between_steps(lambda: is_empty(served))

    run(main)


def test_an_abort_before_the_first_step_computes_nothing(loaded: LoadedModel) -> None:
    served = engine(loaded)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            async with front.paused():
                stream = front.stream(LONG)
                await front.abort(stream.number)
            assert [piece async for piece in stream] == [Piece((), "", "abort")]
            assert (await stream.completion()).token_ids == ()
            await front.abort(stream.number)  # it has ended
            await front.abort(12345)  # there is no such request

    run(main)
    assert served.report().metrics.steps == 0


def test_an_abort_ends_one_request_with_the_tokens_that_it_had(loaded: LoadedModel) -> None:
    served = engine(loaded)
    gated = Gated(served)

    async def main() -> tuple[Completion, list[Completion]]:
        async with AsyncEngine(served) as front:
            stream, others = front.stream(LONG), asyncio.gather(*map(front.complete, some_requests(5)))
            gated.let(3)
            await anext(stream)
            aborted = asyncio.ensure_future(front.abort(stream.number))
            await asyncio.sleep(0)
            gated.let(500)  # it was asked for before the step that these begin with has ended
            await aborted
            return await stream.completion(), await others

    aborted, others = run(main)
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 10
    whole = engine(loaded).generate([LONG])[0]
    assert aborted.token_ids == whole.token_ids[: len(aborted.token_ids)]
    assert aborted.text == loaded.tokenizer.decode(aborted.token_ids)  # type: ignore[union-attr]
    assert others == engine(loaded).generate(some_requests(5))


def test_a_late_reader_finds_all_tokens_in_one_piece_and_holds_up_no_other(loaded: LoadedModel) -> None:
    request = replace(LONG, max_new_tokens=12)

    async def main() -> tuple[list[Piece], Completion]:
        async with AsyncEngine(engine(loaded)) as front:
            late = front.stream(request)
            other = await front.complete(request)
            await front.between_steps(lambda: None)
            return [piece async for piece in late], other

    (piece,), other = run(main)
    assert (piece.token_ids, piece.text, piece.finish_reason) == (other.token_ids, other.text, "length")


def test_the_event_loop_goes_on_while_a_step_runs(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, and are refused, while a step hangs; and text is made of tokens in the engine's thread."""
    served, threads = engine(loaded), set[int]()
    push, gated = TextStream.push, Gated(served)

    def noted(self: TextStream, token_id: int) -> str:
        threads.add(threading.get_ident())
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", noted)

    async def main() -> Completion:
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
            return await second

    served_beside = run(main)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert served_beside == engine(loaded).generate([LONG])[0]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_leaves_every_other_request_as_it_would_be(seed: int, loaded: LoadedModel) -> None:
    """Submissions, steps, readers that come late, those that leave, aborts, pauses and calls, in a drawn order."""
    chooser, served = random.Random(seed), engine(loaded, num_pages=(None, 18)[seed % 2], max_batch_size=4)
    requests, gated = some_requests(24, seed), Gated(served)
    gone, aborted = set[int](), set[int]()

    async def main() -> list[Completion | None]:
        async with AsyncEngine(served) as front, AsyncExitStack() as pauses:
            streams: list[RequestStream] = []
            calls: list[asyncio.Future[None]] = []
            while len(streams) < len(requests):
                match chooser.choice(("submit", "submit", "let", "let", "leave", "abort", "call", "pause", "resume")):
                    case "submit":
                        streams.append(front.stream(requests[len(streams)]))
                    case "let":
                        gated.let(chooser.randrange(1, 6))
                    case "leave" if streams:
                        gone.add(leaves := chooser.randrange(len(streams)))
                        streams[leaves].close()
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
            return [
                None if number in gone else await (stream.completion() if number % 2 else read(stream))
                for number, stream in enumerate(streams)
            ]

    for number, (got, wanted) in enumerate(zip(run(main), engine(loaded).generate(requests), strict=True)):
        if number in gone:
            continue
        assert got is not None
        if number in aborted and got.finish_reason == "abort":
            assert got.token_ids == wanted.token_ids[: len(got.token_ids)]
        else:
            assert got == wanted
    assert is_empty(served)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [(Request((1,) * 97), "the prompt has 97 tokens"), (Request((1, 64)), "token 64 is not in")],
    ids=["long", "vocabulary"],
)
def test_a_bad_request_is_refused_to_its_caller_alone(bad: Request, sentence: str, loaded: LoadedModel) -> None:
    requests = some_requests(4)

    async def main() -> list[Completion]:
        async with AsyncEngine(engine(loaded)) as front:
            others = asyncio.gather(*map(front.complete, requests))
            with pytest.raises(BadRequest, match=sentence):
                front.stream(bad)
            with pytest.raises(BadRequest, match=sentence):
                await front.complete(bad)
            return await others

    assert run(main) == engine(loaded).generate(requests)


def test_a_request_that_the_engine_refuses_when_it_is_queued_fails_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, requests = engine(loaded), some_requests(3)
    monkeypatch.setattr(served, "check", lambda request: None)
    submit = served.submit

    def checked(request: Request) -> int:
        Engine.check(served, request)
        return submit(request)

    monkeypatch.setattr(served, "submit", checked)

    async def main() -> list[Completion]:
        async with AsyncEngine(served) as front:
            others = asyncio.gather(*map(front.complete, requests))
            with pytest.raises(BadRequest, match="97 tokens"):
                await front.complete(Request((1,) * 97))
            return await others

    assert run(main) == engine(loaded).generate(requests)


@pytest.mark.parametrize("prompt", [(3, 4, NAN_TOKEN), (3, NAN_TOKEN, 4)], ids=["logits", "K and V"])
def test_a_request_that_fails_does_so_alone(prompt: tuple[int, ...], poisoned: LoadedModel) -> None:
    requests, served = [replace(request, max_new_tokens=1) for request in some_requests(6)], engine(poisoned)

    async def main() -> list[Completion]:
        async with AsyncEngine(served) as front:
            bad = front.stream(Request(prompt, 6))
            others = asyncio.gather(*map(front.complete, requests))
            with pytest.raises(RequestFailed, match=r"nan|infinite") as why:
                await read(bad)
            with pytest.raises(RequestFailed):
                await bad.completion()
            assert [piece async for piece in bad] == [], "it is over"
            assert why.value.completion.finish_reason == "error"
            return await others

    assert run(main) == engine(poisoned).generate(requests)
    assert is_empty(served)


def test_a_fault_of_the_device_fails_the_requests_of_its_step_and_later_ones_are_served(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, requests = engine(loaded), some_requests(4)
    gated = Gated(served)

    async def main() -> list[Completion]:
        async with AsyncEngine(served) as front:
            concerned = [front.stream(LONG) for _ in range(2)]
            gated.let(2)
            for _ in range(3):
                await gated.begun()
            run_step = served._steps.run

            def faulty(*_: object) -> Any:
                monkeypatch.setattr(served._steps, "run", run_step)
                raise DeviceFault("step 2: a page was not there", served.runtime.step_number)

            monkeypatch.setattr(served._steps, "run", faulty)  # of the third step, which waits to begin
            gated.let(1000)
            for stream in concerned:
                with pytest.raises(RequestFailed, match="step 2: a page was not there"):
                    await stream.completion()
            return await asyncio.gather(*map(front.complete, requests))

    assert run(main) == engine(loaded).generate(requests)
    assert is_empty(served)


class Broken(Exception):
    pass


def breaks_in_step(served: Engine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, numbers = served.step, iter(range(number))

    def breaking() -> list[Event]:
        if next(numbers, None) is None:
            raise Broken("the bus has fallen off")
        return step()

    monkeypatch.setattr(served, "step", breaking)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_exception_that_ends_the_engine_reaches_all_and_later_calls_are_refused(
    steps: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded, max_batch_size=2)
    breaks_in_step(served, steps, monkeypatch)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            streams = [front.stream(LONG) for _ in range(5)]
            waiting = [*map(read, streams), *(front.complete(LONG) for _ in range(5))]
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(end) for end in ends} == {EngineEnded}
            assert {str(end) for end in ends} == {"the engine serves no more requests: Broken: the bus has fallen off"}
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

    run(main)
    assert is_empty(served), "it may serve again"


def test_tokens_that_came_before_the_end_are_read_first(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(loaded)
    breaks_in_step(served, 3, monkeypatch)

    async def main() -> tuple[int, ...]:
        async with AsyncEngine(served) as front:
            stream, waits_too = front.stream(LONG), asyncio.ensure_future(front.complete(LONG))
            await asyncio.wait([waits_too])
            piece = await anext(stream)
            with pytest.raises(EngineEnded, match="fallen off"):
                await anext(stream)
            assert isinstance(waits_too.exception(), EngineEnded)
        return piece.token_ids

    assert run(main) == engine(loaded).generate([LONG])[0].token_ids[:3]


def test_who_waits_for_a_call_gets_to_know_of_the_end_too(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(loaded)
    breaks_in_step(served, 0, monkeypatch)
    gated = Gated(served)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            stream = front.stream(LONG)
            await gated.begun()
            call = asyncio.ensure_future(front.between_steps(lambda: None))
            await asyncio.sleep(0)
            gated.let(1)
            with pytest.raises(EngineEnded, match="fallen off"):
                await call
            with pytest.raises(EngineEnded, match="fallen off"):
                await stream.completion()

    run(main)


def test_what_a_call_raises_is_its_callers_and_the_engine_goes_on(loaded: LoadedModel) -> None:
    def fails() -> None:
        raise Broken("only mine")

    async def main() -> Completion:
        async with AsyncEngine(engine(loaded)) as front:
            done = asyncio.ensure_future(front.complete(LONG))
            with pytest.raises(Broken, match="only mine"):
                await front.between_steps(fails)
            assert await front.between_steps(threading.get_ident) != threading.get_ident()
            return await done

    assert run(main) == engine(loaded).generate([LONG])[0]


def test_more_requests_than_are_allowed_are_refused_until_one_is_done(loaded: LoadedModel) -> None:
    async def main() -> None:
        async with AsyncEngine(engine(loaded), max_requests=3) as front:
            async with front.paused():
                streams = [front.stream(LONG) for _ in range(3)]
                with pytest.raises(TooManyRequests, match="3 requests are served or wait, and max_requests"):
                    await front.complete(LONG)
                streams.pop().close()
                await front.between_steps(lambda: None)
                streams.append(front.stream(LONG))
                with pytest.raises(TooManyRequests):
                    front.stream(LONG)
                assert ((await front.metrics()).refusals, (await front.report()).metrics.refusals) == (2, 0)
            await asyncio.gather(*(stream.completion() for stream in streams))

    run(main)


def test_no_step_runs_while_it_is_paused(loaded: LoadedModel) -> None:
    served = engine(loaded)

    async def main() -> None:
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

    run(main)


def test_leaving_waits_for_those_that_are_served(loaded: LoadedModel) -> None:
    async def main() -> list[Completion]:
        async with AsyncEngine(engine(loaded)) as front:
            streams = [front.stream(request) for request in some_requests(9)]
        with pytest.raises(EngineEnded, match="it was stopped"):
            front.stream(LONG)
        return [await stream.completion() for stream in streams]

    assert run(main) == engine(loaded).generate(some_requests(9))


def test_leaving_by_an_exception_gives_up_those_that_are_served(loaded: LoadedModel) -> None:
    served = engine(loaded)
    streams: list[RequestStream] = []

    async def main() -> None:
        async with AsyncEngine(served) as front:
            streams.extend(front.stream(LONG) for _ in range(9))
            await anext(streams[0])
            raise Broken("mine")

    async def caught() -> None:
        with pytest.raises(Broken, match="mine"):
            await main()
        for stream in streams:
            with pytest.raises(EngineEnded, match="it was stopped"):
                await stream.completion()

    run(caught)
    assert is_empty(served)


def test_a_cancelled_server_is_left_like_any_other_exception(loaded: LoadedModel) -> None:
    served = engine(loaded)

    async def main() -> None:
        async with AsyncEngine(served) as front:
            for _ in range(4):
                front.stream(LONG)
            streams = [front.stream(LONG) for _ in range(4)]
            await anext(streams[0])
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await streams[1].completion()

    with pytest.raises(asyncio.CancelledError):
        run(main)
    assert is_empty(served)


def test_draining_takes_no_more_requests_and_ends_those_that_there_are(loaded: LoadedModel) -> None:
    async def main() -> tuple[Completion, ...]:
        async with AsyncEngine(engine(loaded)) as front:
            stream = front.stream(LONG)
            drained = asyncio.ensure_future(front.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineEnded, match=r"drain\(\) was called"):
                front.stream(LONG)
            await drained
            front.check()
            return (await stream.completion(),)

    assert run(main) == tuple(engine(loaded).generate([LONG]))


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("num", [0, 4])
def test_a_loop_that_is_closed_ends_the_thread_and_frees_all_pages(
    num: int, busy: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_attn.runner.engine_thread._LOOK_AT_LOOP_SECONDS", 0.01)
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


def test_it_is_used_in_one_loop_and_started_once(loaded: LoadedModel) -> None:
    async def main() -> None:
        front = AsyncEngine(engine(loaded))
        with pytest.raises(EngineEnded, match="it was not started"):
            front.stream(LONG)
        with pytest.raises(EngineEnded, match="it was not started"):
            await front.drain()
        with pytest.raises(EngineEnded, match="it was not started"):
            await front.stop()
        async with front:
            with pytest.raises(WrongState, match="started once"):
                await front.__aenter__()

            def elsewhere() -> None:
                async def other() -> None:
                    front.stream(LONG)

                with pytest.raises(WrongState, match="this is another one"):
                    asyncio.run(other())

            await asyncio.to_thread(elsewhere)

    run(main)


def test_one_task_at_a_time_waits_for_a_request(loaded: LoadedModel) -> None:
    async def main() -> None:
        async with AsyncEngine(engine(loaded)) as front, front.paused():
            stream = front.stream(LONG)
            first = asyncio.ensure_future(stream.completion())
            await asyncio.sleep(0)
            with pytest.raises(WrongState, match="another task waits"):
                await anext(stream)
            stream.close()
            first.cancel()

    run(main)

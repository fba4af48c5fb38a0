"""How an AsyncEngine ends: by an exception, by leaving, by a closed event loop. Everybody who waits gets to know."""

from __future__ import annotations

import asyncio

import pytest

from rocm_serve.async_engine import AsyncEngine, EngineEnded
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Event
from rocm_serve.request_stream import RequestStream
from tests.amd.runner.async_engines import LONG, Broken, Gated, engine, is_empty, read, some_requests
from tests.amd.runner.small_tokenizers import sentencepiece
from tests.amd.runner.tiny_model import tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(tokenizer=sentencepiece())


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

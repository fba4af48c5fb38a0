"""EngineProcess: an engine in a process of its own gives what it gives alone, and the end of either is noticed."""

import asyncio
import gc
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from unittest.mock import Mock

import pytest

from rocm_attn.errors import BadRequest, BadSetting, WrongState
from rocm_serve import engine_process
from rocm_serve.async_engine import EngineClient, EngineEnded
from rocm_serve.engine import Engine
from rocm_serve.engine_process import EngineDied, EngineProcess
from rocm_serve.engine_thread import EngineThread, Left, Message, StepOutput
from rocm_serve.parallel.child_process import SWITCH_SECONDS
from rocm_serve.request import Completion, Event, Request
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.tokenizer import TextStream, Tokenizer
from tests.amd.runner.async_engines import LONG, read
from tests.amd.runner.serving import engine, salt_of_a_class_that_others_lack
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer

pytestmark = pytest.mark.usefixtures("torch_is_imported")

MANY = 256


@contextmanager
def served() -> Iterator[Engine]:
    """An engine whose tokenizer must not be used: what its process is made of."""

    for owner, name in ((Tokenizer, "encode"), (Tokenizer, "decode"), (Tokenizer, "stream"), (TextStream, "push")):
        setattr(owner, name, Mock(side_effect=AssertionError("the engine's process makes a text")))
    yield engine(tiny_model(tokenizer=word_tokenizer()))


@contextmanager
def without_old_garbage() -> Iterator[Engine]:
    """An engine whose steps fail if its process may pause: by a full garbage collection, or for another thread."""
    with served() as made:
        step = made.step

        def checked() -> list[Event]:
            assert len(gc.get_objects()) < gc.get_freeze_count() / 10
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
            return step()

        made.step = checked  # type: ignore[method-assign]
        yield made


@contextmanager
def held() -> Iterator[Engine]:
    """An engine that runs three steps, and no further one before a request is cancelled."""
    with served() as made:
        step, cancel, steps, cancelled = made.step, made.cancel, count(), list[int]()

        def noted(number: int) -> None:
            cancelled.append(number)
            cancel(number)

        made.step = lambda: step() if cancelled or next(steps) < 3 else []  # type: ignore[method-assign]
        made.cancel = noted  # type: ignore[method-assign]
        yield made


@contextmanager
def impossible() -> Iterator[Engine]:
    raise BadSetting("there is no such engine")
    yield


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Requests that end in each of their ways, with and without logprobs."""
    (whole,) = engine(tiny_model(tokenizer=word_tokenizer())).generate([LONG])
    stop = whole.text.split()[20]
    return [
        LONG,
        replace(LONG, stop=(stop,)),
        replace(LONG, stop=(stop,), include_stop=True, logprobs=2),
        replace(LONG, stop=(whole.text.split()[3],), min_tokens=9),
        replace(LONG, stop_token_ids=(whole.token_ids[12],), prompt_logprobs=1),
    ]


def facts(done: Completion) -> Completion:
    """The completion without logprobs, whose last bits depend on the batch; their tokens are in place of them."""
    tokens = tuple(each.token_id for each in (*done.logprobs, *done.prompt_logprobs))
    return replace(done, token_ids=done.token_ids + tokens, logprobs=(), prompt_logprobs=())


async def test_texts_stops_and_counts_are_those_of_the_engine_itself(requests: list[Request]) -> None:
    alone = engine(tiny_model(tokenizer=word_tokenizer()))
    expected = alone.generate(requests)
    assert [done.finish_reason for done in expected] == ["length", *["stop"] * 4]
    with EngineProcess(served) as process:
        async with EngineClient(process) as client:
            streams = client.streams(requests)
            pieces = await asyncio.gather(*map(read, streams))
            completions = [await stream.completion() for stream in streams]
            ended = (await client.metrics()).requests_ended
    for said, done in zip(pieces, completions, strict=True):
        assert (said.token_ids, said.text, said.finish_reason) == (done.token_ids, done.text, done.finish_reason)
    assert list(map(facts, completions)) == list(map(facts, expected))
    assert ended == alone.report().metrics.requests_ended


async def test_a_second_client_is_refused_and_the_first_is_served() -> None:
    """The requests of the first one had no results; after its end, a client met an OSError.

    What the second one was asked reached the engine: its stop() ended the first one's.
    """
    with EngineProcess(served) as process:
        async with EngineClient(process) as client:
            second = EngineClient(process)
            with pytest.raises(WrongState, match="this engine's process serves a client already, or was closed"):
                await second.__aenter__()
            for wrong in (second.stop, second.drain, second.ended, second.report, partial(second.complete, LONG)):
                with pytest.raises(EngineEnded, match="it was not started"):
                    await wrong()
            done = await client.complete(Request((5, 6), 3))
        assert len(done.token_ids) == 3
        with pytest.raises(WrongState, match="serves a client already, or was closed; make another one"):
            await EngineClient(process).__aenter__()


def test_the_tokens_of_a_step_are_one_message_for_all_requests() -> None:
    messages: list[Message] = []
    is_over = threading.Event()
    thread = EngineThread(engine(tiny_model(), max_batch_size=MANY, chunk=4 * MANY, num_pages=2000))

    def take(message: Message) -> None:
        messages.append(message)
        if isinstance(message, StepOutput) and message.completions:
            is_over.set()

    for ticket in range(MANY):
        thread.tell(EngineThread.submit, ticket, Request((5, 6, 8), 6))
    thread.start(take)
    is_over.wait()
    thread.tell(EngineThread.stop)
    thread.join()
    decoded = [message for message in messages if isinstance(message, StepOutput) and len(message.token_ids) == MANY]
    assert len(decoded) >= 5
    assert all(len(new) == 1 for message in decoded for new in message.token_ids.values())


def taking() -> tuple[EngineProcess, Connection, list[Message]]:
    """The reading side alone, the end of the pipe that an engine writes to, and the messages that were taken."""
    process = EngineProcess.__new__(EngineProcess)
    process._unread = bytearray()
    process._pipe, theirs = Pipe()
    taken: list[Message] = []
    process._owner = taken.append
    return process, theirs, taken


def test_a_late_event_loop_takes_the_results_of_steps_in_a_row_as_one() -> None:
    """Otherwise it would stay late, the pipe would fill, and the engine would wait for its clients."""
    process, theirs, taken = taking()
    logprobs = [TokenLogprobs(token, -1.0, ()) for token in range(4)]
    done = Completion((), (0, 1, 2), "", "length")
    steps = [StepOutput({7: [token]}, {7: [logprobs[token]]}) for token in range(2)]
    last = StepOutput({7: [2], 8: [5]}, {7: [logprobs[2]]}, {7: done})
    for message in (*steps, last, Left(7), StepOutput({8: [6]})):
        theirs.send(message)
    process._take()
    assert taken == [StepOutput({7: [0, 1, 2], 8: [5]}, {7: logprobs[:3]}, {7: done}), Left(7), StepOutput({8: [6]})]


def test_a_message_that_comes_in_parts_is_taken_when_it_is_whole() -> None:
    process, theirs, taken = taking()
    sent = [StepOutput({7: list(range(2**15))}), Left(7)]
    os.set_blocking(process._pipe.fileno(), False)
    writer = threading.Thread(target=lambda: list(map(theirs.send, sent)))
    writer.start()
    num_reads = 0
    while len(taken) < len(sent):
        process._take()
        num_reads += 1
    writer.join()
    assert taken == sent
    assert num_reads > 1


def test_messages_of_more_than_two_gib_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many completions with logprobs of long prompts may be that long. multiprocessing's form of it is used here."""
    process, theirs, taken = taking()
    content = pickle.dumps(Left(7))
    data = struct.pack("!iQ", -1, len(content)) + content
    for part in (data[:6], data[6:20], data[20:]):
        os.write(theirs.fileno(), part)
        process._take()
    theirs.send(Left(8))
    process._take()
    assert taken == [Left(7), Left(8)]
    monkeypatch.setattr(engine_process, "_MOST_OF_LENGTH", 5)
    process._commands, process._is_writing, process._unsent = queue.SimpleQueue(), True, bytearray()
    process._loop = Mock()
    process.tell(EngineThread.forget, 7)
    process._write()
    assert process._commands.empty()
    message = BytesIO(theirs.recv_bytes())
    assert [pickle.load(message), pickle.load(message)] == [(EngineThread.forget, (7,)), ()]


async def test_no_step_waits_for_a_collection_of_all_that_was_made_before(requests: list[Request]) -> None:
    with EngineProcess(without_old_garbage) as process:
        async with EngineClient(process) as client:
            await client.streams(requests[:1])[0].completion()


async def test_a_reader_that_leaves_ends_its_request_in_the_other_process() -> None:
    with EngineProcess(held) as process:
        async with EngineClient(process) as client:
            async with client.stream(LONG) as left:
                await anext(left)
            await client.complete(replace(LONG, max_new_tokens=2))
            metrics = await client.metrics()
            assert (metrics.running, metrics.waiting) == (0, 0)
            assert metrics.requests_ended == {"cancelled": 1, "length": 1}
            assert (await client.truth(0)).word != "wrong"


async def test_a_request_that_cannot_be_sent_is_refused_and_loses_no_other() -> None:
    class Salt(str):  # pickle finds no class of a function
        pass

    with EngineProcess(held) as process:
        async with EngineClient(process) as client:
            short = replace(LONG, max_new_tokens=2)
            first = client.stream(short)
            with pytest.raises(BadRequest, match="cannot be sent to the engine's process"):
                client.streams([short, replace(short, cache_salt=Salt("a"))])
            done = await first.completion()
            assert len(done.token_ids) == 2
            assert (client.num_requests, (await client.metrics()).requests_ended["length"]) == (0, 1)


async def test_a_request_with_a_class_that_the_other_process_lacks_is_refused_and_loses_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one of a notebook. The process read no further command, and all requests waited for ever."""
    salt = salt_of_a_class_that_others_lack(monkeypatch)
    with EngineProcess(held) as process:
        async with EngineClient(process) as client:
            short = replace(LONG, max_new_tokens=2)
            refused, taken = client.streams([replace(short, cache_salt=salt), short])
            with pytest.raises(BadRequest, match=r"cannot be sent to .*No module named 'only_in"):
                await refused.completion()
            assert len((await taken.completion()).token_ids) == 2
            assert client.num_requests == 0


async def test_a_killed_process_ends_all_streams_with_one_error_and_all_questions() -> None:
    with EngineProcess(held) as process:
        async with EngineClient(process) as client:
            streams = client.streams([LONG] * 8)
            await anext(streams[0])
            os.kill(process.pid, signal.SIGKILL)
            question = asyncio.ensure_future(client.truth(0))
            said = set[str]()
            for stream in streams:
                with pytest.raises(EngineEnded) as caught:
                    await stream.completion()
                assert isinstance(caught.value.__cause__, EngineDied)
                said.add(str(caught.value))
            with pytest.raises(EngineEnded):
                await question
            with pytest.raises(EngineEnded, match="SIGKILL"):
                client.check()
            with pytest.raises(EngineEnded):
                await client.report()
    (sentence,) = said
    assert "the engine's process was killed by SIGKILL" in sentence


async def test_messages_that_cannot_be_read_end_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreadable() -> None:
        with EngineProcess(held) as process:
            async with EngineClient(process) as client:
                streams = client.streams([LONG] * 2)
                await anext(streams[0])
                monkeypatch.setattr(process, "_messages", Mock(side_effect=MemoryError("no room")))
                streams[0].close()
                with pytest.raises(EngineEnded, match="MemoryError: no room"):
                    await streams[1].completion()

    await asyncio.wait_for(unreadable(), 60)


async def test_a_process_that_is_closed_before_its_client_ends_all_streams() -> None:
    """They waited for ever, and so did the client's end."""
    process = EngineProcess(held)

    async def closed_first() -> None:
        async with EngineClient(process) as client:
            with process:
                stream = client.stream(LONG)
                await anext(stream)
            with pytest.raises(EngineEnded, match="SIGKILL"):
                await stream.completion()

    await asyncio.wait_for(closed_first(), 60)
    assert process._pipe.closed


def test_a_process_that_cannot_make_its_engine_says_why_each_time() -> None:
    with EngineProcess(impossible) as process:
        for _ in range(2):
            with pytest.raises(BadSetting, match="there is no such engine"):
                _ = process.limits

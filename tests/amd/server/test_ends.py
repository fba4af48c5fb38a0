"""How requests and servers end: clients that leave or are slow, deadlines, too many at once, faults, drains.

Steps wait for the test if it matters what happens during one.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Message, Receive, Scope, Send

from rocm_attn.errors import DeviceFault
from rocm_serve.async_engine import EngineEnded
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Request
from rocm_serve.request_stream import Inbox, OutputChunk, RequestStream
from rocm_serve.server.api_errors import ApiError, client_gone
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.server.event_stream import EventStream
from rocm_serve.server.generation import Pieces
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.job import Job
from rocm_serve.server.record import WRITER
from rocm_serve.server.replies import CompletionReplies, PromptReport
from tests.amd.runner.async_engines import Broken, engine
from tests.amd.runner.tiny_model import NAN_TOKEN, with_nan_token
from tests.amd.server.raw import CHAT, Client, Reply, as_bytes, head_of_a_post, post, requested, send
from tests.amd.server.running import MANY_STEPS, NAME, Running, gate_of, gated_server, running, word_model

LONG: dict[str, Any] = {"max_tokens": 60}
JSON = (b"content-type", b"application/json")


def events(text: bytes) -> list[Any]:
    """Returns the events of a stream; [DONE] as a text."""
    found = [line.removeprefix(b"data: ") for line in text.splitlines() if line.startswith(b"data: ")]
    return [each.decode() if each == b"[DONE]" else json.loads(each) for each in found]


def ended(server: Running) -> dict[str, int]:
    """Returns the numbers of the engine's requests by their reason for ending."""
    return server.between_steps(lambda: dict(server.engine.metrics.requests_ended))


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_client_that_leaves_a_stream_frees_its_pages(path: str, num_choices: int, loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated):
        fields = {"prompt": "w9"} if path != CHAT else {"messages": [{"role": "user", "content": "w9"}]}
        client = Client(server, {"model": NAME, "n": num_choices, "stream": True, **LONG, **fields}, path)
        gated.let(3)
        client.read_until(b"data: ")
        client.leave()
        server.jobs_are_done()  # the engine is in a step meanwhile, which waits
        gated.let(MANY_STEPS)
        assert server.holds_nothing()
        assert ended(server) == {"cancelled": num_choices}
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 1


@pytest.mark.parametrize("only_its_side", [False, True])
def test_a_client_that_leaves_before_its_answer_frees_its_pages(only_its_side: bool, loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated), Client(server, requested(n=2, **LONG)) as client:
        gated.wait_until_begun()
        if only_its_side:
            client.socket.shutdown(socket.SHUT_WR)
        else:
            client.leave()
        server.jobs_are_done()
        gated.let(MANY_STEPS)
        assert server.holds_nothing()
        assert ended(server) == {"cancelled": 2}
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 1


def test_a_client_that_leaves_in_its_body_is_forgotten(loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, _):
        with socket.create_connection(server.address) as client:
            client.sendall(head_of_a_post("Content-Length: 99") + b"{")
            server.wait_until(lambda: len(server.jobs))
        server.jobs_are_done()
        assert send(server, "GET", "/health").status == 200


def test_an_answer_that_is_whole_is_not_kept_for_a_client_that_takes_nothing(loaded: LoadedModel) -> None:
    with running(engine(loaded), write_seconds=0.2) as server, slow_reader(server, stream=False):
        while not ended(server):  # it has come, and is computed
            pass
        server.wait_until(lambda: not len(server.server.server_state.connections))
        assert server.holds_nothing()


def test_a_client_that_takes_nothing_counts_as_gone(loaded: LoadedModel) -> None:
    """Its connection accepts little data, so that the answer fills it; the kernel ends it after write_seconds."""
    served = engine(loaded)
    with running(served, write_seconds=0.2) as server:
        with slow_reader(server):
            server.wait_until(lambda: server.generations.counts.disconnects)
            assert server.holds_nothing(), "the job has ended although nothing was read"
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 1


async def test_an_answer_whose_rest_waits_for_a_client_that_leaves_is_not_whole() -> None:
    """All of it was computed, and an ASGI server silently accepts data after the connection is lost."""
    received, writable = asyncio.Event(), asyncio.Event()
    messages: list[Message] = [{"type": "http.request"}]

    def lose_connection() -> None:
        for event in (received, writable):  # in uvicorn's order
            event.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        for more_body in (True, False):
            await send({"type": "http.response.body", "more_body": more_body})

    async def receive() -> Message:
        if not messages:
            await received.wait()
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            asyncio.get_running_loop().call_soon(lose_connection)
            await writable.wait()

    counts = HttpMetrics()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON]}
    await gate_of(app, counts)(scope, receive, send)
    assert counts.disconnects == 1


def slow_reader(server: Running, num_choices: int = 16, *, stream: bool = True) -> socket.socket:
    """A client that reads nothing, over a connection with small buffers."""
    server.between_loops(lambda: server.shrink_buffers(4096))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(server.address)
    slow.sendall(as_bytes(requested(n=num_choices, stream=stream, logprobs=20, **LONG)))
    return slow


def test_a_client_that_does_not_read_loses_its_request_and_not_only_its_connection(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_unread_tokens=10) as server, slow_reader(server):
        server.wait_until(lambda: server.generations.counts.disconnects)
        assert server.holds_nothing()
        assert server.between_loops(lambda: server.generations.counts.late_readers) == 1
        assert ended(server).get("cancelled", 0) > 0, "the engine has not computed all that nobody reads"
        assert b"rocm_attn_http_late_readers_total 1\n" in send(server, "GET", "/metrics").body


def test_a_computed_answer_that_waits_to_be_read_takes_no_place(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_requests=16) as server:
        with slow_reader(server, num_choices=3):
            server.wait_until(lambda: [job.is_computed for job in server.jobs] == [True])
            assert post(server, requested(n=16)).status == 200
            server.wait_until(lambda: len(server.jobs) <= 1)  # its last byte was read, and its job ends
            assert len(server.jobs) == 1, "the slow one is still there"
        server.jobs_are_done()


def test_whom_no_place_is_free_for_is_reported_when_to_come_again(loaded: LoadedModel) -> None:
    with gated_server(loaded, max_requests=2, max_choices=2) as (server, gated):
        first = Client(server, requested(stream=True, **LONG))
        gated.wait_until_begun()
        # One place is free, and two are requested: neither is taken.
        refused = [post(server, requested(n=2))]
        second = Client(server, requested(stream=True))
        server.wait_until(lambda: server.front.num_requests >= 2)
        refused.append(post(server, requested()))
        for reply in refused:
            assert (reply.status, reply.error["code"], reply.error["type"]) == (
                429,
                "too_many_requests",
                "rate_limit_error",
            )
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert server.between_loops(lambda: server.front.num_requests) == 2
        gated.let(MANY_STEPS)
        assert [events(client.read_until(b"[DONE]"))[-1] for client in (first, second)] == ["[DONE]"] * 2
        assert post(server, requested()).status == 200
        for client in (first, second):
            client.leave()


@pytest.mark.parametrize("way", ["field", "header", "option"])
def test_a_request_that_takes_too_long_is_given_up(way: str, loaded: LoadedModel) -> None:
    options = {"deadline_seconds": 0.05} if way == "option" else {}
    with gated_server(loaded, **options) as (server, gated):
        fields = {"timeout": 0.05} if way == "field" else {}
        headers = {"x_request_timeout": "0.05"} if way == "header" else {}
        reply = post(server, requested(**LONG, **fields), **headers)
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        assert "deadline of 0.05 seconds" in reply.error["message"]
        assert reply.headers["x-should-retry"] == "false"
        gated.let(MANY_STEPS)
        assert server.holds_nothing()


def test_a_stream_whose_deadline_passes_ends_with_an_error(loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated):
        client = Client(server, requested(stream=True, **LONG))
        gated.let(1)
        client.read_until(b"data: ")
        (job,) = server.jobs
        server.between_loops(lambda: job.hasten(0.001))
        *_, last = events(client.read_until(b"deadline_exceeded"))
        assert last["error"]["code"] == "deadline_exceeded"
        assert b"[DONE]" not in client.read_until(b"0\r\n"), "the answer is whole, and says that it is not done"
        client.leave()


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "nan", "5e-324", "0.009"])
def test_a_deadline_that_is_none_is_refused(timeout: str, loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, _):
        reply = post(server, requested(), x_request_timeout=timeout)
        assert (reply.status, "at least 0.01" in reply.error["message"]) == (400, True)


async def test_an_error_whose_reader_is_late_ends_the_answer_without_another_error() -> None:
    """One of several choices has failed, and the others continue while the error waits for its reader."""
    counts, bounds, sent = HttpMetrics(), list[Callable[[], None]](), list[bytes]()

    def write(data: bytes) -> None:
        sent.append(data)
        writer.is_full = True

    async def drain() -> None:
        bounds[0]()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def take() -> OutputChunk:
        if not sent:
            return OutputChunk((5,), "w5", None)
        raise ApiError(500, "the second choice has failed", code="request_failed")

    stream = SimpleNamespace(
        bound=lambda most, on_late: bounds.append(on_late), listen=lambda _: None, take=take, has_ended=True
    )
    generation: Any = SimpleNamespace(streams=[stream], job=SimpleNamespace(end=lambda why: None))
    generations: Any = SimpleNamespace(counts=counts, max_unread_tokens=4)
    replies = CompletionReplies(NAME, EmittedTokens(None), (), PromptReport())
    writer = SimpleNamespace(is_full=False, write=write, drain=drain)
    await EventStream(generations, generation, replies, usage=False)({WRITER: writer}, no_message, send)
    assert (counts.late_readers, b"w5" in sent[-1]) == (1, True)


async def test_headers_come_first_even_if_the_first_token_has_no_text() -> None:
    """It may be a part of a character."""
    sent, came, said = list[bytes](), list[OutputChunk](), list[Callable[[], None]]()

    async def send(message: Any) -> None:
        sent.append(message["type"].encode())

    stream: Any = SimpleNamespace(
        bound=lambda most, on_late: None,
        listen=said.append,
        take=lambda: came.pop() if came else None,
        has_ended=False,
    )
    generation: Any = SimpleNamespace(
        streams=[stream], note=lambda num: None, usage=lambda num: None, job=SimpleNamespace()
    )
    generations: Any = SimpleNamespace(counts=HttpMetrics(), max_unread_tokens=4)
    writer = SimpleNamespace(is_full=False, write=sent.append)
    answer = EventStream(
        generations, generation, CompletionReplies(NAME, EmittedTokens(None), (), PromptReport()), usage=False
    )
    sending = asyncio.ensure_future(answer({WRITER: writer}, no_message, send))
    for piece in (OutputChunk((5,), "", None), OutputChunk((6,), "w6", None), OutputChunk((7,), "w7", "stop")):
        for _ in range(3):
            await asyncio.sleep(0)
        stream.has_ended = piece.finish_reason is not None
        came.append(piece)
        said[0]()
    await sending
    assert sent[0] == b"http.response.start"
    assert [b"w6" in each for each in sent[:3]] == [False, True, False]


async def test_a_piece_that_cannot_be_written_ends_its_own_answer_alone() -> None:
    """Tokens of all streams come in one step."""
    inboxes = [Inbox(Request((1,)), None) for _ in range(2)]
    streams = [RequestStream(number, inbox, lambda _: None) for number, inbox in enumerate(inboxes)]

    broken, other = (
        Pieces(streams[:1], Mock(side_effect=ZeroDivisionError)),
        Pieces(streams[1:], Mock(return_value=False)),
    )
    readers = [asyncio.ensure_future(each.next()) for each in (broken, other)]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.add([7])
    with pytest.raises(ZeroDivisionError):
        await readers[0]
    found = await readers[1]
    assert found is not None
    assert found[1].token_ids == (7,)


async def no_message() -> Any:
    """A client that sends nothing more."""


def test_a_server_that_drains_finishes_what_it_has_taken(loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated), Client(server, requested(stream=True, **LONG)) as client:
        gated.wait_until_begun()
        server.drain()
        server.wait_until_draining()
        replies = [send(server, "GET", "/ready"), post(server, requested()), send(server, "GET", "/health")]
        assert [reply.status for reply in replies] == [503, 503, 200]
        assert replies[1].error["code"] == "draining"
        assert int(replies[1].headers["retry-after"]) >= 1
        assert b"rocm_attn_draining 1" in send(server, "GET", "/metrics").body
        gated.let(MANY_STEPS)
        *chunks, last = events(client.rest())
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        # An event has a token, or several if the machine is busy.
        assert (len(text.split()), last) == (LONG["max_tokens"], "[DONE]")
        client.leave()
        server.thread.join()
        assert server.ended is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)


def test_what_a_drain_has_no_time_for_ends_with_an_error(loaded: LoadedModel) -> None:
    with gated_server(loaded, drain_seconds=0.05) as (server, gated):
        streamed, whole = Client(server, requested(stream=True, **LONG)), Client(server, requested(**LONG))
        server.wait_until(lambda: server.front.num_requests >= 2)
        gated.let(2)
        streamed.read_until(b"data: ")
        server.drain()
        *_, last = events(streamed.rest())
        assert last["error"]["code"] == "shutting_down"
        answer = whole.rest()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"shutting_down"' in answer
        gated.let(MANY_STEPS)
        server.thread.join()
        assert server.ended is None
        for client in (streamed, whole):
            client.leave()


def test_a_request_that_fails_does_so_alone(loaded: LoadedModel) -> None:
    with running(engine(with_nan_token(word_model()))) as server:
        expected = post(server, requested(prompt=[5, 6, 8])).json["choices"]
        reply = post(server, requested(prompt=f"w{NAN_TOKEN}"))
        assert (reply.status, reply.error["code"]) == (500, "request_failed")
        assert "no token can be sampled" in reply.error["message"]
        stream = post(server, requested(prompt=[[5, 6, 8], [NAN_TOKEN]], stream=True))
        assert b'"code":"request_failed"' in stream.body
        assert b"[DONE]" not in stream.body
        assert post(server, requested(prompt=[5, 6, 8])).json["choices"] == expected
        assert server.holds_nothing()


def test_a_fault_of_the_device_fails_the_requests_of_its_step_and_is_counted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_server(loaded) as (server, gated):
        served = server.engine
        run_step = served._steps.run
        concerned = [Client(server, requested(stream=True, **LONG)) for _ in range(2)]
        server.wait_until(lambda: server.front.num_requests >= 2)
        gated.let(2)
        for _ in range(3):
            gated.wait_until_begun()

        def faulty(*_: object) -> Any:
            monkeypatch.setattr(served._steps, "run", run_step)
            served.metrics.faults += 1
            raise DeviceFault("step 2: a page was not there", served.runtime.faults.step_number)

        monkeypatch.setattr(served._steps, "run", faulty)  # of the third step, which waits to begin
        gated.let(MANY_STEPS)
        for streamed in concerned:
            error = events(streamed.read_until(b"error"))[-1]["error"]
            assert "step 2: a page was not there" in error["message"]
            streamed.leave()
        assert post(server, requested()).status == 200
        assert b"rocm_attn_faults_total 1" in send(server, "GET", "/metrics").body
        assert send(server, "GET", "/health").status == 200
        assert server.holds_nothing()


def test_the_engines_end_is_reported_to_everybody_and_ends_the_server(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_server(loaded) as (server, gated):
        streamed, whole = Client(server, requested(stream=True, **LONG)), Client(server, requested(**LONG))
        server.wait_until(lambda: server.front.num_requests >= 2)
        gated.let(2)
        streamed.read_until(b"data: ")

        def fails(*_: object) -> Any:
            raise Broken("the device is gone")

        monkeypatch.setattr(server.engine._steps, "run", fails)
        gated.let(MANY_STEPS)
        assert events(streamed.rest())[-1]["error"]["code"] == "engine_ended"
        assert b'"code":"engine_ended"' in whole.rest()
        server.thread.join()
        assert isinstance(server.ended, EngineEnded)
        assert isinstance(server.ended.__cause__, Broken)
        for client in (streamed, whole):
            client.leave()


def test_the_health_of_an_engine_that_has_ended_is_503(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends soon after; a client that still reads keeps it alive here."""
    replies: list[Reply] = []
    with gated_server(loaded) as (server, gated):
        held = server.hold()
        monkeypatch.setattr(server.engine, "step", Mock(side_effect=Broken("the device is gone")))
        gated.let(MANY_STEPS)
        post(server, requested())
        replies += [send(server, "GET", path) for path in ("/health", "/ready", "/ping", "/metrics")]
        replies.append(post(server, requested()))
        held()
    assert [reply.status for reply in replies] == [503, 503, 503, 200, 503]
    assert replies[0].error["code"] == "engine_ended"


async def test_work_for_a_request_that_has_ended_does_not_begin() -> None:
    job, begun = Job("", 600.0), list[bool]()

    async def work() -> None:
        begun.append(True)

    job.end(client_gone())
    with pytest.raises(ApiError, match="disconnected"):
        await job.wait_for(work())
    job.close()
    assert not begun


def test_a_half_of_a_request_is_not_waited_for(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""

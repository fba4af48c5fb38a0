"""Bodies: a fast parser reads and refuses all that Python's own does.

Those that are being read take no places, and their bytes are bounded, in total and by client.
"""

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rocm_attn.errors import BadSetting, FitsLater
from rocm_serve.limits import RequestLimits
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Request
from rocm_serve.server import gate, parsing, served_model
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.parsing import LONG_BODY, content_of, let_streams_write, parsed
from rocm_serve.server.schema import CompletionBody
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.waiting import WaitingBytes, client_at
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.server.raw import COMPLETIONS, Client, as_bytes, head_of_a_post, post, requested
from tests.amd.server.running import MANY_STEPS, Running, gated_server, running

READ = {
    "a text": b'{"a": "\\u00e9 \\n \xc3\xa9"}',
    "numbers": b"[0, -0.0, 1e400, 1e-400, 123456789012345678901234567890, 0.1, 2.5e3]",
    "a name twice": b'{"a": 1, "a": 2}',
    "infinite": b"[Infinity, -Infinity]",
    "half of a character": b'"\\ud800"',
    "two halves": b'"\\ud83d\\ude00"',
    "UTF-16": '{"a": "é"}'.encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf{}",
    "blanks": b" \n[ ]\t",
    "deep": b"[" * 300 + b"]" * 300,
}
REFUSED = {
    "nothing": b"",
    "an open list": b"[1, 2",
    "a word": b"nul",
    "two values": b"{} {}",
    "a tab in a text": b'"\t"',
    "no UTF-8": b'"\xff"',
    "a comma too many": b"[1,]",
}


def _outcome(body: bytes, read: Any) -> str:
    try:
        return repr(read(body))
    except ValueError as error:
        return repr(error)


@pytest.mark.parametrize("body", [*READ.values(), *REFUSED.values()], ids=[*READ, *REFUSED])
def test_a_body_is_read_as_pythons_parser_reads_it_and_refused_with_its_words(body: bytes) -> None:
    assert _outcome(body, parsed) == _outcome(body, json.loads)
    assert ("Error" in _outcome(body, parsed)) == (body in REFUSED.values())


def test_a_bodys_bytes_are_forgotten_before_its_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    served, freed, before = engine(tiny_model()), list[bytes](), list[int]()
    read, submit = gate._read, served.submit

    class Body(bytes):
        def __del__(self) -> None:
            freed.append(bytes(self))

    async def noted(*arguments: Any) -> bytes:
        return Body(await read(*arguments))

    def submitted(request: Request) -> int:
        before.append(len(freed))
        return submit(request)

    monkeypatch.setattr(gate, "_read", noted)
    monkeypatch.setattr(served, "submit", submitted)
    with running(served) as server:
        assert post(server, requested(max_tokens=1), COMPLETIONS).status == 200
    assert before == [1]


async def test_a_token_that_comes_during_a_pass_over_a_long_body_is_written_before_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [1] * LONG_BODY
    body = json.dumps({"prompt": ids}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    model = ServedModel("tiny", None, RequestLimits(2 * LONG_BODY, 2 * LONG_BODY, 64, None), ServerOptions())
    reading = content_of(receive)
    making = model.completion_requests(CompletionBody(model="tiny", prompt=ids), "")
    loop, num_bytes = asyncio.get_running_loop(), list[int]()

    async def noted(size: int) -> None:
        """A token comes through a pipe and a queue of the loop, and its stream waits for it."""
        num_bytes.append(size)
        ours, theirs = socket.socketpair()
        token, written = loop.create_future(), list[bool]()
        loop.add_reader(ours, lambda: (loop.remove_reader(ours), loop.call_soon_threadsafe(token.set_result, True)))

        async def stream() -> None:
            written.append(await token)

        waiting = asyncio.create_task(stream())
        await asyncio.sleep(0)
        with ours, theirs:
            theirs.send(b"1")
            await let_streams_write(size)
            assert written == [True]
        await waiting

    monkeypatch.setattr(parsing, "let_streams_write", noted)
    monkeypatch.setattr(served_model, "let_streams_write", noted)
    await reading
    await making
    assert num_bytes[0] == len(body)
    assert len(num_bytes) == 3


async def test_long_bodies_are_parsed_at_a_pace_that_leaves_others_most_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def slept(seconds: float) -> None:
        assert turn.locked()
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", slept)
    turn = asyncio.Lock()
    for num_bytes in (LONG_BODY, 2 * LONG_BODY, 4 * 2**20):
        await gate._Replay(b" " * num_bytes, asyncio.Event(), turn)()
    assert waits == [2 * LONG_BODY / gate._BYTES_A_SECOND, 4 * 2**20 / gate._BYTES_A_SECOND]


def test_the_server_reads_each_body_once_and_by_the_fast_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    class Recorded:
        def validate_json(self, body: bytes) -> Any:
            read.append(body)
            return json.loads(body)

    monkeypatch.setattr(parsing, "FAST", Recorded())
    body = json.dumps(requested(max_tokens=1)).encode()
    with running(engine(tiny_model())) as server:
        assert post(server, body, COMPLETIONS).status == 200
        assert read == [body]
        assert post(server, body[:-1], COMPLETIONS).error["code"] == "invalid_json"


KEYS = ("first-secret-key", "second-secret-key")
MOST = 30_000


@contextmanager
def slow_bodies(server: Running, sizes: Sequence[int], *headers: str) -> Iterator[list[socket.socket]]:
    """Clients that have sent all but the last byte of bodies of these sizes; the server expects them."""
    before = server.waiting_bytes()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address)) for _ in sizes]
        for client, size in zip(clients, sizes, strict=True):
            client.sendall(head_of_a_post(f"Content-Length: {size}", *headers) + b" " * (size - 1))
        server.wait_until(lambda: server.generations.counts.waiting_bytes >= before + sum(sizes))
        yield clients


def padded(size: int) -> dict[str, Any]:
    """Returns a request whose body has about this size."""
    return requested(prompt="w1" + " " * size)


def test_bodies_that_never_come_take_no_places(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_requests=2) as server, slow_bodies(server, [1] * 9):
        assert [post(server, requested()).status for _ in range(3)] == [200] * 3


def test_places_are_counted_again_when_a_body_has_come(loaded: LoadedModel) -> None:
    whole = as_bytes(requested())
    with gated_server(loaded, max_requests=1) as (server, gated), ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address)) for _ in range(2)]
        for client in slow:
            client.sendall(whole[:-1])
        server.wait_until(lambda: len(server.jobs) >= 2)
        slow[0].sendall(whole[-1:])
        gated.wait_until_begun()
        slow[1].sendall(whole[-1:])
        assert slow[1].recv(4096).startswith(b"HTTP/1.1 429 ")
        gated.let(MANY_STEPS)
        assert slow[0].recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_body_too_many_is_answered_429_and_read_when_others_have_gone(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_waiting_bytes": MOST, "max_body_bytes": 20_000, "client_share": 1.0}
    with running(engine(loaded), **options) as server:
        with slow_bodies(server, [14_000, 14_000]) as clients:
            reply = post(server, padded(5000))
            assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
            assert f"bodies of 28000 bytes wait to be served, and this server keeps at most {MOST}" in str(reply.json)
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert server.between_loops(lambda: server.generations.counts.refused["queue"]) == 1
            assert post(server, padded(500)).status == 200, "it fits beside the others"
            assert server.waiting_bytes() == 28_000
            clients[0].close()
            server.wait_until(lambda: server.generations.counts.waiting_bytes == 14_000)
            assert post(server, padded(5000)).status == 200
        server.jobs_are_done()
        assert server.waiting_bytes() == 0


def test_one_client_has_only_its_share_of_what_waits(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_waiting_bytes": 2 * MOST, "max_body_bytes": 20_000}
    with running(engine(loaded), keys=KEYS, **options) as server:
        first, second = (f"Bearer {key}" for key in KEYS)
        with slow_bodies(server, [14_000, 14_000], f"Authorization: {first}"):
            reply = post(server, padded(5000), Authorization=first)
            assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
            assert (
                f"28000 bytes of this client's bodies wait to be served, and this server keeps at most {MOST}"
                in str(reply.json)
            )
            assert post(server, padded(5000), Authorization=second).status == 200


def test_a_body_waits_no_longer_when_the_engine_has_its_requests(loaded: LoadedModel) -> None:
    """Otherwise a long answer to a long prompt would keep the bodies of others out."""
    with gated_server(loaded) as (server, gated), Client(server, {**padded(9000), "stream": True}) as client:
        gated.wait_until_begun()
        server.wait_until(lambda: not server.generations.counts.waiting_bytes)
        assert len(server.jobs) == 1
        gated.let(MANY_STEPS)
        client.read_until(b"[DONE]")


def test_a_body_that_is_too_long_is_counted_no_longer(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_body_bytes": 1000, "max_waiting_bytes": 2000}
    with running(engine(loaded), **options) as server, socket.create_connection(server.address) as client:
        client.sendall(head_of_a_post("Content-Length: 1900") + b" " * 1500)
        server.wait_until(lambda: len(server.jobs))
        server.wait_until(lambda: not server.generations.counts.waiting_bytes)
        client.sendall(b" " * 400)
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_what_was_counted_is_forgotten_once() -> None:
    counts = HttpMetrics()
    waiting = WaitingBytes(ServerOptions(max_waiting_bytes=100, max_body_bytes=40), counts)
    first, second = waiting.begin("a", 30), waiting.begin("a", 0)
    first.add(30)
    second.add(20)
    with pytest.raises(FitsLater, match="50 bytes of this client's bodies wait"):
        first.add(1)
    waiting.begin("b", 0).add(50)
    with pytest.raises(FitsLater, match="bodies of 100 bytes wait"):
        waiting.begin("c", 1)
    for _ in range(2):
        first.free()
        assert counts.waiting_bytes == 70
    second.free()
    assert waiting._of == {"b": 50}


def test_a_clients_share_must_hold_a_body() -> None:
    with pytest.raises(BadSetting, match=r"no client could send a body of 51 bytes.*raise max_waiting_bytes"):
        ServerOptions(max_body_bytes=51, max_waiting_bytes=100)
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(BadSetting, match="client_share"):
            ServerOptions(client_share=share)


def test_a_client_has_a_network_of_ipv6_and_one_address_of_ipv4() -> None:
    assert client_at("192.0.2.7") == "192.0.2.7" != client_at("192.0.2.8")
    assert client_at("2001:db8::1") == client_at("2001:db8::ffff:1") != client_at("2001:db8:0:1::1")
    assert client_at("somewhere") == "somewhere"

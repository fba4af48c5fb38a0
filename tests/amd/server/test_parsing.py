"""Bodies are read by a fast parser, which reads and refuses all that Python's own does."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from rocm_serve.limits import RequestLimits
from rocm_serve.request import Request
from rocm_serve.server import gate, parsing, served_model
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.parsing import LONG_BODY, content_of, let_streams_write, parsed
from rocm_serve.server.schema import CompletionBody
from rocm_serve.server.served_model import ServedModel
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.server.raw import COMPLETIONS, post, requested
from tests.amd.server.running import running

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

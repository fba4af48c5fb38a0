"""Bodies are read by a fast parser, which reads and refuses all that Python's own does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocm_serve.server import parsing
from rocm_serve.server.parsing import parsed
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

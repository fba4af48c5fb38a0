"""Requests below the level of OpenAI's client: answers byte by byte, and clients that misbehave."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.amd.server.running import NAME, Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. headers: names in lower case"""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The body of an error answer, which must have OpenAI's form and nothing else."""
        content = self.json
        assert list(content) == ["error"]
        assert list(content["error"]) == ["message", "type", "param", "code", "request_id"]
        assert content["error"]["message"]
        found: dict[str, Any] = content["error"]
        return found


def requested(**fields: Any) -> dict[str, Any]:
    """Returns a body that is served."""
    return {"model": NAME, "prompt": "w9 w12 w33", "max_tokens": 4, "temperature": 0, **fields}


def send(
    server: Running,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """Sends a request and reads the whole answer."""
    connection = http.client.HTTPConnection(*server.address)
    try:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def post(server: Running, body: bytes | dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Reply:
    """Sends a POST. headers: with _ for -"""
    return send(server, "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def as_bytes(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    """Returns a request as bytes on the wire."""
    content = json.dumps(body).encode()
    return head_of_a_post(f"Content-Length: {len(content)}", path=path) + content


def head_of_a_post(*headers: str, path: str = COMPLETIONS) -> bytes:
    """Returns the head of a request whose body is JSON. headers: those that say how long it is, and others"""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def all_of(client: socket.socket) -> bytes:
    """Returns all bytes until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(4096), b""))


class Client:
    """A connection over which a request was sent; a test reads the answer at any time; a context closes it."""

    def __init__(self, server: Running, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        self.socket = socket.create_connection(server.address)
        self.socket.sendall(as_bytes(body, path))
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def read_until(self, text: bytes) -> bytes:
        """Returns lines up to the first that holds a text. Raises AssertionError if there is none."""
        found = b""
        for line in self._reader:
            found += line
            if text in line:
                return found
        raise AssertionError(found)

    def rest(self) -> bytes:
        """Returns all bytes until the server closes the connection."""
        return self._reader.read()

    def leave(self) -> None:
        """Closes the connection."""
        self._reader.close()
        self.socket.close()

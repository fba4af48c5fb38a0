"""HTTP byte by byte, for requests that no client would send."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def connection(port: int, *, receive_buffer: int = 0) -> Iterator[socket.socket]:
    """receive_buffer: its bytes, as small as the kernel allows; 0: the default size"""
    with socket.socket() as opened:
        if receive_buffer:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        opened.connect(("127.0.0.1", port))
        yield opened


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Returns a request after whose answer the connection is closed."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chat(**fields: object) -> bytes:
    """Returns the body of a chat request of one word."""
    return json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 2, **fields}
    ).encode()


def answers(port: int, sent: bytes, *, ends: bool = False) -> bytes:
    """Returns all bytes until the server closes the connection. ends: true if the client signals its end"""
    with connection(port) as opened:
        # The server may close before it has read everything; shutdown() then raises an OSError that is no
        # ConnectionError.
        with contextlib.suppress(OSError):
            opened.sendall(sent)
            if ends:
                opened.shutdown(socket.SHUT_WR)
        return read_all(opened)


def read_all(opened: socket.socket) -> bytes:
    """Returns all bytes until the connection ends in any way."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := opened.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def statuses(received: bytes) -> list[int]:
    """Returns the status codes of the received answers."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]

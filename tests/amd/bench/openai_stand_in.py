"""A server on 127.0.0.1 that answers /v1/completions like OpenAI's, and fails on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StandIn:
    """The requests that it received, and the failures that it makes.

    bodies:   of requests, in the order in which they came
    at_once:  requests being answered now; most_at_once: the largest number of them
    refuse:   number of a request -> the status that it gets
    breaks:   numbers of requests whose stream ends early
    stalls:   numbers of requests that get no answer
    garbles:  number of a request -> the text that its stream has in place of an event
    """

    refuse: dict[int, int] = field(default_factory=dict)
    breaks: set[int] = field(default_factory=set)
    stalls: set[int] = field(default_factory=set)
    garbles: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StandIn]:
        """Serves until the context is left."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            if head.startswith("GET /v1/models"):
                await self._answer(writer, 200, json.dumps({"data": [{"id": "stand-in"}]}))
            else:
                self.keys.append(fields.get("authorization", ""))
                await self._complete(writer, json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if number in self.refuse:
                await self._answer(writer, self.refuse[number], '{"error": {"message": "too many"}}')
            elif number in self.stalls:
                await asyncio.Event().wait()
            else:
                await self._stream(writer, body, breaks=number in self.breaks, garbled=self.garbles.get(number, ""))
        finally:
            self.at_once -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, breaks: bool, garbled: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if garbled:
            writer.write(f"data: {garbled}\n\n".encode())
        for token in range(body["max_tokens"]):
            writer.write(f"data: {json.dumps({'choices': [{'text': f' {token}'}]})}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(0)
            if breaks:
                return
        usage = {"completion_tokens": body["max_tokens"]}
        writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()

"""Requests to a server with OpenAI's API: /v1/completions, streamed, prompts as token ids.

A connection serves one request, and its bytes are read as they come: a client of HTTP would take more of the processor
than a fast server leaves for it. Several processes share the requests of a trace that one could not keep up with.
"""

import asyncio
import http.client
import json
import multiprocessing
import operator
import ssl
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from rocm_attn.errors import BadSetting
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions, RequestRecord, Sending, ServingResult, prompts_of, result_of, send_all
from rocm_lab.bench.request_trace import RequestTrace

_CONNECT_S = 30.0
# Time for processes to make their requests' tasks before they send the first one.
_START_S = 0.2
_OK = 200


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    """A model of a server. url: of the server; key: a bearer token, or empty"""

    url: str
    model: str
    key: str = ""

    def prepared(self, prompt: Sequence[int], output_tokens: int) -> Sending:
        """Makes a request before the load begins: of a long prompt that takes the time of several tokens."""
        place = urlsplit(self.url)
        body = json.dumps(
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = [
            f"POST {place.path}/v1/completions HTTP/1.1",
            f"Host: {place.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return partial(self._send, "\r\n".join([*head, "", ""]).encode() + body)

    def all_prepared(self, trace: RequestTrace, options: LoadOptions) -> list[Sending]:
        """Makes all requests of a trace."""
        pairs = zip(prompts_of(trace, options), trace.requests, strict=True)
        return [self.prepared(prompt, each.output_tokens) for prompt, each in pairs]

    async def _send(self, request: bytes, outcome: RequestRecord) -> None:
        place = urlsplit(self.url)
        secured = ssl.create_default_context() if place.scheme == "https" else None
        port = place.port or (443 if secured else 80)
        connecting = asyncio.get_running_loop().create_connection(
            lambda: _Answer(request, outcome), place.hostname or "", port, ssl=secured
        )
        try:
            connection, answer = await asyncio.wait_for(connecting, _CONNECT_S)
        except (OSError, asyncio.TimeoutError, UnicodeError) as error:  # the last of names such as a..b
            outcome.failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return
        try:
            await answer.ended
        finally:
            connection.close()


class _Answer(asyncio.Protocol):
    """Sends a request, and notes in its outcome what comes.

    ended: a future that is done when the stream has ended, or the connection
    """

    def __init__(self, request: bytes, outcome: RequestRecord) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request, self._outcome = request, outcome
        self._status = 0  # before the head has come
        self._is_chunked = False
        self._left = 0  # bytes of the chunk
        self._raw = b""  # what came of a head, or of a chunk's length
        self._body = b""  # what came of a line, or of a refusal

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._receive(data, time.perf_counter())
        except (ValueError, LookupError):
            self._fail("not an answer of HTTP", data)

    def _receive(self, data: bytes, now: float) -> None:
        """Takes the next bytes. Raises ValueError, LookupError for some that are not HTTP's."""
        if not self._status:
            head, end, data = (self._raw + data).partition(b"\r\n\r\n")
            if not end:
                self._raw = head
                return
            self._raw, self._status = b"", int(head.split(b" ", 2)[1])
            self._is_chunked = b"transfer-encoding: chunked" in head.lower()
        self._body += self._dechunked(data) if self._is_chunked else data
        if self._status == _OK:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._read(line.rstrip(), now)

    def connection_lost(self, exc: Exception | None) -> None:
        outcome = self._outcome
        if self._status and self._status != _OK:
            outcome.failure = f"HTTP {self._status}: {_first_words(self._body.decode(errors='replace'))}"
        elif not self.ended.done() and not outcome.failure:
            outcome.failure = f"{type(exc).__name__}: {exc}" if exc else "the stream ended early"
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _dechunked(self, data: bytes) -> bytes:
        """The bytes without the lengths of HTTP's chunks between them."""
        found, data = [], self._raw + data
        while data:
            if not self._left:
                length, end, rest = data.lstrip(b"\r\n").partition(b"\n")
                if not end:
                    break
                self._left, data = int(length.partition(b";")[0], 16), rest
                if self._left < 0:
                    raise ValueError("a chunk has a negative length")
                if not self._left:  # the last chunk
                    data = b""
            found.append(data[: self._left])
            data, self._left = data[self._left :], self._left - len(found[-1])
        self._raw = data
        return b"".join(found)

    def _read(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:") or self.ended.done():
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self._end()
            return
        try:
            _read_event(json.loads(data), self._outcome, now)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._fail("not an event of OpenAI's API", data)

    def _fail(self, what: str, data: bytes) -> None:
        self._outcome.failure = f"{what}: {_first_words(data.decode(errors='replace'))}"
        self._end()


async def run_load(
    url: str, model: str, api_key: str, trace: RequestTrace, options: LoadOptions, meter: EnergyMeter
) -> ServingResult:
    """Sends a trace to a server. model: empty: the first that the server names; api_key: empty: none

    Raises BadSetting if there is no such server.
    """
    target = OpenAITarget(url, model or await asyncio.to_thread(first_model, url, api_key), api_key)
    sendings, num = target.all_prepared(trace, options), min(options.processes, len(trace.requests))
    joules, begin = meter.joules(), time.perf_counter()
    if num == 1:
        outcomes = await send_all(trace.requests, sendings, options, begin)
    else:
        workers = [_Worker() for _ in range(num)]
        for worker in workers:
            await worker.heard()
        # Linux's clock is the same in all processes.
        joules, begin = meter.joules(), time.perf_counter() + _START_S
        of_each = replace(options, concurrency=-(-options.concurrency // num))
        for place, worker in enumerate(workers):
            worker.pipe.send((trace.requests[place::num], sendings[place::num], of_each, begin))
        outcomes = [outcome for worker in workers for outcome in await worker.heard()]
    return result_of(trace, outcomes, max(each.ended for each in outcomes) - begin, meter.joules() - joules)


class _Worker:
    """A process that sends a part of the requests. It ends with this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=_send_share, args=(theirs,), daemon=True).start()
        theirs.close()

    async def heard(self) -> list[RequestRecord]:
        """Returns what it says next: nothing once it has begun, and the records of its requests. Raises EOFError."""
        said: list[RequestRecord] = await asyncio.to_thread(self.pipe.recv)
        return said


def _send_share(pipe: Connection) -> None:
    """Runs in a process of its own."""
    pipe.send([])
    pipe.send(asyncio.run(send_all(*pipe.recv())))


def first_model(url: str, api_key: str) -> str:
    """Returns the name of the first model that a server lists. Raises BadSetting."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Without proxies, because one would be measured too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=_CONNECT_S) as response:
            name: str = json.load(response)["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadSetting(
            f"{url}/v1/models lists no model ({_first_words(str(error))}); give the URL of a server, or --model"
        ) from error
    return name


def _read_event(found: dict[str, Any], outcome: RequestRecord, now: float) -> None:
    """Reads an event. Raises if it is none of OpenAI's."""
    if "error" in found:
        outcome.failure = f"an error in the stream: {_first_words(str(found['error']))}"
        return
    if any(choice.get("text") or choice.get("token_ids") for choice in found.get("choices") or ()):
        outcome.pieces.append(now)
    usage = found.get("usage")
    if usage:
        outcome.tokens = operator.index(usage["completion_tokens"])


def _first_words(text: str) -> str:
    return " ".join(text.split())[:120]

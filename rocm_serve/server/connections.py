"""Connections: bounds on their number, in total and by client, and on the time and bytes of a request's head.

uvicorn does not bound their number and time. A connection that sends nothing, or a head byte by byte, would stay for
ever.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from rocm_serve.server.api_errors import ApiError
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.record import WRITER
from rocm_serve.server.waiting import client_at

# Bytes of a request's head: h11's own limit.
MOST_HEAD_BYTES = 16 * 1024
# After a refusal, a client may go on sending for this long, and this many bytes. They are not kept. They reset a
# connection that is closed at once, and the client would lose the answer.
_SECONDS_IN_VAIN, _BYTES_IN_VAIN = 5.0, 16 * 2**20
_TOO_LARGE = 431


def bounded_protocol(options: ServerOptions, most: int, counts: HttpMetrics) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with the bounds of these options, in the form that uvicorn.Config takes.

    most:   connections at a time
    counts: gets one refusal per connection that is closed, under "connections" or "head"
    """
    by_client: Counter[str] = Counter()
    most_of_one = max(1, int(most * options.client_share))

    class Bounded(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._head_timer: asyncio.TimerHandle | None = None
            self._is_refused, self._num_in_vain = False, 0
            served = self.app
            self.app = lambda scope, receive, send: served({**scope, WRITER: self}, receive, send)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.transport = cast(asyncio.Transport, _Ended(transport, self._end))
            self._client = client_at(self.client[0]) if self.client is not None else ""
            by_client[self._client] += 1
            if len(self.connections) > most or by_client[self._client] > most_of_one:
                counts.refused["connections"] += 1
                transport.close()
            else:
                self._watch_head()

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                self._num_in_vain += len(data)
                if self._num_in_vain > _BYTES_IN_VAIN:
                    self.transport.abort()
                return
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            by_client[self._client] -= 1
            if not by_client[self._client]:
                del by_client[self._client]
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Refuses a head that is no HTTP, or too long, or a body in such chunks. The caller handles the error."""
            error = _refusal(sys.exc_info()[1])
            counts.refused["head"] += 1
            headers = [("content-type", "application/json"), ("connection", "close")]
            answer = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering:  # its application may answer before it learns that the connection ends
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = Context().run(error.body)  # the request that came before it has an id, and this one none
            for event in (answer, h11.Data(data=json.dumps(body).encode()), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self._end_after_answer(not is_answering)

        def _end(self) -> None:
            cycle = self.cycle
            self._end_after_answer(cycle is not None and cycle.response_complete and cycle.more_body)

        def _end_after_answer(self, may_send: bool) -> None:
            """Closes the connection; may_send: once a client that may still send has had time to read its answer."""
            transport: asyncio.Transport = self.transport.real  # type: ignore[attr-defined]  # see connection_made
            if not may_send or not transport.can_write_eof():
                transport.close()
            elif not self._is_refused and not transport.is_closing():
                self._is_refused = True
                transport.write_eof()
                self.loop.call_later(_SECONDS_IN_VAIN, transport.abort)

        @property
        def is_full(self) -> bool:
            return self.flow.write_paused

        def write(self, data: bytes) -> None:
            if data and not self.cycle.disconnected:  # a chunk without data would end the answer
                is_chunked = self.conn.their_http_version == b"1.1"
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

        async def drain(self) -> None:
            await self.flow.drain()

        def _watch_head(self) -> None:
            """Starts or stops the timer: the head of a request has begun, may begin, or is complete."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_head()
            elif self._head_timer is None and self.timeout_keep_alive_task is None and not self._is_refused:
                self._head_timer = self.loop.call_later(options.head_seconds, self._end_without_head)

        def _forget_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _end_without_head(self) -> None:
            if not self.transport.is_closing():
                counts.refused["head"] += 1
                self.transport.close()

    return Bounded


class _Ended:
    """A transport whose close() is called in its place: uvicorn closes it as soon as an answer is written."""

    def __init__(self, real: asyncio.Transport, close: Callable[[], None]) -> None:
        self.real, self.close = real, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def head_too_large() -> ApiError:
    """Returns the error for a request with a long head."""
    return ApiError(
        _TOO_LARGE,
        f"the request's first line and headers have more than {MOST_HEAD_BYTES} bytes; send fewer or shorter ones",
        code="headers_too_large",
    )


def _refusal(error: BaseException | None) -> ApiError:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _TOO_LARGE:
        return head_too_large()
    return ApiError(400, f"the request is not HTTP/1.1 ({error}); send one that is", code="invalid_http")

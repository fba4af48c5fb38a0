"""Connections: bounds on their number, and on the time that each may take to send a request's head.

uvicorn bounds neither. A connection that sends nothing, or a head byte by byte, would stay for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.options import ServerOptions


def bounded_protocol(options: ServerOptions, counts: HttpMetrics) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with the bounds of these options, in the form that uvicorn.Config takes.

    counts: gets one refusal per connection that is closed, under "connections" or "head"
    """

    class Bounded(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                counts.refused["connections"] += 1
                transport.close()
            else:
                self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            """Starts or stops the timer: the head of a request has begun, may begin, or is complete."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_head()
            elif self._head_timer is None and self.timeout_keep_alive_task is None:
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

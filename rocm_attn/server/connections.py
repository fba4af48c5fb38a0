"""Connections: how many there may be, and how long each may take to say what it wants.

uvicorn bounds neither: a connection over which nothing comes, or a head byte by byte, would stay for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rocm_attn.server.http_metrics import HttpMetrics
from rocm_attn.server.options import ServerOptions


def bounded_protocol(options: ServerOptions, counts: HttpMetrics) -> type[asyncio.Protocol]:
    """uvicorn's protocol with the bounds of these options, as uvicorn.Config takes it.

    counts: gets one refusal for each connection that is closed, by "connections" or "head"
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
            """The head of a request has begun, or could have, or is whole."""
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

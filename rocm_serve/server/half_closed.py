"""HalfClosed: tells a client that has only ended its own side of a connection from one that has gone.

Both look the same: the kernel reports the end of what the client sends. The difference shows when something is sent to
the client: the kernel of one that has gone answers with a reset.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# State of a connection that was reset, in the first byte of Linux's TCP_INFO.
_CLOSED = 7
# Seconds to the first look for a reset, and the most between two looks; each is twice the one before.
_FIRST_LOOK, _MOST_BETWEEN = 0.01, 1.0
# Looks after which something is sent again, as the client may have gone meanwhile.
_LOOKS = 20


class HalfClosed:
    """Looks for a reset until the connection is closed.

    probe: sends something that no answer contains
    gone:  called once if the client has gone
    """

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], None], gone: Callable[[], None]) -> None:
        self._transport, self._probe, self._gone = transport, probe, gone
        self._loop, self._num_looks, self._seconds = asyncio.get_running_loop(), 0, _FIRST_LOOK
        self._look_later()

    def _look_later(self) -> None:
        if self._num_looks % _LOOKS == 0:
            self._probe()
        self._num_looks += 1
        self._loop.call_later(self._seconds, self._look)
        self._seconds = min(2 * self._seconds, _MOST_BETWEEN)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _was_reset(self._transport):
            self._gone()
        else:
            self._look_later()


def can_be_told(transport: asyncio.Transport) -> bool:
    """True if a reset can be seen: on Linux, and not behind TLS, whose connections cannot be ended on one side."""
    return hasattr(socket, "TCP_INFO") and transport.can_write_eof()


def _was_reset(transport: asyncio.Transport) -> bool:
    connection = transport.get_extra_info("socket")
    state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == _CLOSED

"""WaitingBytes: a bound on the bodies that are being read, or that wait until the engine has their requests."""

from __future__ import annotations

import ipaddress
from collections import Counter

from rocm_attn.errors import FitsLater
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.options import ServerOptions


class WaitingBytes:
    """The bytes of all bodies, in total and by client. The event loop's thread owns them. counts: gets the total"""

    def __init__(self, options: ServerOptions, counts: HttpMetrics) -> None:
        self._counts = counts
        self._most, self._most_of_one = options.max_waiting_bytes, options.most_waiting_bytes_of_one
        self._of: Counter[str] = Counter()

    def begin(self, client: str, num_bytes: int) -> WaitingBody:
        """Returns a body of a client. num_bytes: that it is expected to have; 0 if that is unknown

        The expected bytes are counted at once: otherwise, of many bodies that come at the same time, each would have
        come in part when the bound is reached, and none would be served. Raises FitsLater if there are too many.
        """
        self.add(client, num_bytes)
        return WaitingBody(self, client, num_bytes)

    def add(self, client: str, num_bytes: int) -> None:
        """Counts bytes that have come. Raises FitsLater, and counts nothing, if there are too many."""
        total = self._counts.waiting_bytes
        if total + num_bytes > self._most:
            raise FitsLater(
                f"bodies of {total} bytes wait to be served, and this server keeps at most {self._most}; send this "
                "request again later"
            )
        if self._of[client] + num_bytes > self._most_of_one:
            raise FitsLater(
                f"{self._of[client]} bytes of this client's bodies wait to be served, and this server keeps at most "
                f"{self._most_of_one} of one client; send this request again when the others are answered"
            )
        self._counts.waiting_bytes += num_bytes
        self._of[client] += num_bytes

    def free(self, client: str, num_bytes: int) -> None:
        """Forgets the bytes that were counted of a body."""
        self._counts.waiting_bytes -= num_bytes
        self._of[client] -= num_bytes
        if not self._of[client]:
            del self._of[client]


class WaitingBody:
    """One body: the bytes that are expected of it, or those that have come if they are more."""

    def __init__(self, waiting: WaitingBytes, client: str, num_bytes: int) -> None:
        self._waiting, self._client, self._counted, self._num_come = waiting, client, num_bytes, 0

    def add(self, num_bytes: int) -> None:
        """Notes bytes that have come. Raises FitsLater if there are too many, of this or of all clients."""
        self._num_come += num_bytes
        more = self._num_come - self._counted
        if more > 0:
            self._waiting.add(self._client, more)
            self._counted += more

    def free(self) -> None:
        """Forgets all of them: the request has been taken, or was refused. A second call finds none."""
        self._waiting.free(self._client, self._counted)
        self._counted = self._num_come = 0


def client_at(host: str) -> str:
    """Returns the client at an address. One client has a network of 64 bits of IPv6's addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # not an address of the internet's
        return host
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else host

"""Clients that send much at once, and the waits of others beside them: by ratios to the same server without them.

The server is another process, so that the clients' own work holds up none of its threads.
"""

from __future__ import annotations

import http.client
import itertools
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rocm_serve.server.descriptors import raise_limit
from tests.amd.server.load.mixed import resident_bytes
from tests.amd.server.load.model_folder import CONTEXT
from tests.amd.server.load.served import Served, served
from tests.amd.server.load.wire import CHAT, answers, chat, post, statuses

NUM_BODIES, BODY_BYTES = 16, 4 << 20
# The longest wait of a few tenths of a second, without bodies, would be chance.
ROUND_SECONDS = 8.0
MOST_RATIO = 3.0
# A probe of a container's manager waits for about this long at least.
HEALTH_SECONDS = 0.1
MOST_GROWTH, MOST_KEPT = 300 << 20, 64 << 20
MOST_CONNECTIONS, OVER = 64, 1000
# Tokens of a stream. The last stream is read to its end, which on a busy machine takes long.
TOKENS = 64
# One line about connections may come every few seconds, and one more when all is over.
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of two clients: for a token after another one, and for /health; in seconds."""

    token: float
    health: float


def median(waits: Sequence[Waits]) -> Waits:
    """Returns the median of several rounds, which one pause of the machine does not move."""
    return Waits(statistics.median(each.token for each in waits), statistics.median(each.health for each in waits))


@dataclass(frozen=True, slots=True)
class Attacked:
    """The results.

    beside, alone: the medians of the rounds, with the bodies and without them
    grown, kept:   the most bytes of memory after a round; those after the last one
    lines:         of the log, about connections over the limit
    """

    beside: Waits
    alone: Waits
    statuses: dict[int, int]
    grown: float
    kept: float
    refused: float
    lines: int

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)

    def errors(self) -> list[str]:
        """Returns all bounds that do not hold, in sentences."""
        beside, alone = self.beside, self.alone
        most_health = max(HEALTH_SECONDS, MOST_RATIO * alone.health)
        checks = {
            f"a token came {beside.token:.3f} s after another, and {alone.token:.3f} s without the bodies": (
                beside.token < MOST_RATIO * alone.token
            ),
            f"/health took {beside.health:.3f} s, and may take {most_health:.3f} s": beside.health < most_health,
            f"the memory grew by {self.grown / 2**20:.0f} MiB": self.grown < MOST_GROWTH,
            f"{self.kept / 2**20:.0f} MiB of it were kept": self.kept < MOST_KEPT,
            f"the bodies were answered {self.statuses}": not self.statuses.keys() - {400, 413, 429},
            f"{self.refused:.0f} of {OVER} connections over the limit were refused": self.refused >= OVER,
            f"{self.lines} lines of log are about them": self.lines <= MOST_LINES,
        }
        return [sentence for sentence, holds in checks.items() if not holds]


def attack(model: Path, *flags: str, rounds: int) -> Attacked:
    """Sends large bodies for `rounds` rounds, and then opens too many connections. Raises OSError.

    The waits of a round are measured again right after it, without bodies: both see the same machine.
    """
    with served(model, "--max-kv-len", str(CONTEXT), "--num-pages", "600", *flags) as server:
        _waits_during(server, partial(time.sleep, 1))  # the first requests are slower
        before, found, body = resident_bytes(server.pid), list[int](), _large_body()
        beside, alone, grown = list[Waits](), list[Waits](), list[float]()
        for _ in range(rounds):
            begun = time.monotonic()
            beside.append(_waits_during(server, partial(_send_bodies, server.port, body, found)))
            seconds = time.monotonic() - begun
            grown.append(resident_bytes(server.pid) - before)
            alone.append(_waits_during(server, partial(time.sleep, seconds)))
        kept = resident_bytes(server.pid) - before
    with served(model, "--max-connections", str(MOST_CONNECTIONS), *flags) as server:
        num_lines = len(server.log)
        with _many_open(server.port):
            refused = server.counts()["http_refused_total:reason=connections"]
        lines = len(server.log) - num_lines
    by_status = {status: found.count(status) for status in sorted(set(found))}
    return Attacked(median(beside), median(alone), by_status, max(grown), kept, refused, lines)


def _large_body() -> bytes:
    text = "w1 " * (BODY_BYTES // 3)
    return post(CHAT, chat(messages=[{"role": "user", "content": text[: BODY_BYTES - 200]}]))


def _send_bodies(port: int, sent: bytes, found: list[int]) -> None:
    """Sends NUM_BODIES bodies at once, again and again for ROUND_SECONDS. found: gets the statuses of the answers"""
    end = time.monotonic() + ROUND_SECONDS
    with ThreadPoolExecutor(NUM_BODIES) as threads:
        while time.monotonic() < end:
            received = threads.map(lambda _: statuses(answers(port, sent)), range(NUM_BODIES))
            found.extend(itertools.chain.from_iterable(received))


@contextmanager
def _many_open(port: int) -> Iterator[None]:
    """Connections of one address, of which the server has closed as many as are over the limit."""
    raise_limit()
    with ExitStack() as opened, selectors.DefaultSelector() as closed:
        for _ in range(MOST_CONNECTIONS + OVER):
            # Another address than that of the metrics' reader, who is served meanwhile.
            one = opened.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
            closed.register(one, selectors.EVENT_READ)
        num_closed = 0
        while num_closed < OVER:
            for key, _ in closed.select():
                closed.unregister(key.fileobj)
                num_closed += 1
        yield


def _waits_during(server: Served, function: Callable[[], object]) -> Waits:
    """Calls a function while one client reads streams and another one asks for /health."""
    is_over = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        token = threads.submit(_longest, lambda: _token_wait(server.port), is_over)
        health = threads.submit(_longest, lambda: _health_wait(server.port), is_over)
        try:
            function()
        finally:
            is_over.set()
    return Waits(token.result(), health.result())


def _longest(wait: Callable[[], float], is_over: threading.Event) -> float:
    longest = wait()
    while not is_over.wait(0.02):
        longest = max(longest, wait())
    return longest


def _health_wait(port: int) -> float:
    begun = time.monotonic()
    asked = http.client.HTTPConnection("127.0.0.1", port)
    asked.request("GET", "/health")
    answer = asked.getresponse()
    answer.read()
    asked.close()
    assert answer.status == 200, answer.status
    return time.monotonic() - begun


def _token_wait(port: int) -> float:
    """Returns the longest wait between two tokens of a stream."""
    fields = {"model": "tiny", "prompt": "w9", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    asked = http.client.HTTPConnection("127.0.0.1", port)
    asked.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    answer = asked.getresponse()
    came = [time.monotonic() for line in answer if line.startswith(b"data: {")]
    asked.close()
    assert len(came) > 1, answer.status
    return max(later - earlier for earlier, later in itertools.pairwise(came))

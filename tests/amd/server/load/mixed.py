"""MixedLoad: clients that ask, leave and make errors, and a server that is drained and replaced meanwhile.

An accepted request is never lost: when the server is told to end, every request that it has read gets its whole answer.
A client sends a request that was not accepted again, to the next server.
"""

import asyncio
import random
import signal
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.amd.server.load.clients import MODEL, Answer, LostAnswer, ask, client_of, conversations
from tests.amd.server.load.served import Served, family

DISCONNECTS, INVALID = 0.10, 0.05
# A server's memory may grow by this much between its first quiet moment and its last.
MOST_GROWTH = 48 << 20
# Turns of the event loop, after which a client that has begun to send has sent all: it connects, and takes a few locks.
_TURNS = 100
# Wrong fields, which replace those of a good request, and the status of the answer.
WRONG: tuple[tuple[dict[str, Any], int], ...] = (
    ({"messages": []}, 400),
    ({"messages": [{"role": "nobody", "content": "w1"}]}, 400),
    ({"messages": [{"role": "user", "content": " ".join(["w1"] * 600)}]}, 400),
    ({"model": "another"}, 404),
    ({"max_tokens": -1}, 400),
    ({"temperature": 9.0}, 400),
    ({"n": 10_000}, 400),
    ({"seed": "seven"}, 400),
    ({"stop": [1, 2]}, 400),
    ({"stream": "maybe"}, 400),
)


@dataclass
class Tally:
    """The results of the requests of a load.

    kinds:     numbers of requests answered, left early, refused as invalid, or sent again to the next server
    wrong:     answers that differ from those of a quiet server, in sentences
    lost:      accepted requests without an answer, in sentences
    pages:     that the server held for requests when there were none, at each quiet moment; all are 0 unless pages leak
    resident:  bytes of memory of the servers at their quiet moments, one list per server
    """

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    resident: list[list[float]] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """True if every answer is right, none is lost, and no page leaked."""
        return not (self.wrong or self.lost or any(self.pages))

    @property
    def grown(self) -> float:
        """The most bytes by which a server's memory grew between its first quiet moment and its last."""
        return max(server[-1] - server[0] for server in self.resident)

    def assert_right(self) -> None:
        assert self.is_right, "\n".join([*self.wrong[:20], *self.lost[:20], f"pages left: {self.pages}"])


class MixedLoad:
    """A load of `at_a_time` clients on a server with these flags, and on later servers on its port.

    tally:    the results so far
    num_sent: number of requests that were sent
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        at_a_time: int,
        seed: int = 0,
        port: int = 0,
        max_tokens: int = 12,
    ) -> None:
        self.tally = Tally()
        self._model, self._flags, self._chooser, self._at_a_time = model, flags, random.Random(seed), at_a_time
        self._requested = conversations(40, seed, max_tokens=max_tokens)
        self._expected: list[Answer] = []
        self._open: dict[int, str] = {}  # number of a request that was sent -> its description; each must be answered
        self._accepted: set[int] = set()  # those of them that a server had read when it was told to end
        self.num_sent = 0
        self._may_send, self._is_served, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self._is_over = False
        self._server = Served(model, *flags, port=port)
        self.port = self._server.port
        self._may_send.set()
        self._is_served.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients send requests inside of it. At its end all are answered, and the server has given everything back."""
        async with client_of(self._server.url) as client:
            self._expected = [await ask(client, requested) for requested in self._requested]
        await self.settle()
        clients = [asyncio.ensure_future(self._be_a_client()) for _ in range(self._at_a_time)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
            await self.settle()
            await asyncio.to_thread(self._server.stop)

    async def until(self, num_requests: int) -> None:
        async with self._quiet:
            await self._quiet.wait_for(lambda: self.num_sent >= num_requests)

    async def settle(self) -> None:
        """Lets all requests end, checks that the server holds nothing of them, and continues."""
        self._may_send.clear()
        async with self._quiet:
            await self._quiet.wait_for(lambda: not self._open)
        while True:  # it may not have noticed yet that the last ones left
            counts = await asyncio.to_thread(self._server.counts)
            if counts["requests_total"] == counts["requests_ended_total"] and not counts["running"]:
                break
        self.tally.pages.append(int(counts.pages_of_requests))
        resident = resident_bytes(self._server.pid)
        if len(self.tally.resident) == self.tally.kinds["drains"]:
            self.tally.resident.append([])
        self.tally.resident[-1].append(resident)
        self._may_send.set()

    async def drain(self) -> None:
        """Tells the server to end while it serves, and starts another one on its port."""
        while True:
            self._may_send.clear()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            for _ in range(3):  # a scrape is read after earlier requests
                await asyncio.to_thread(self._server.counts)
            if self._open:  # otherwise all have been answered meanwhile
                break
            self._may_send.set()
            async with self._quiet:
                await self._quiet.wait_for(lambda: self._open)
        self._is_served.clear()
        self._accepted |= self._open.keys()
        self.tally.kinds["open at a drain"] += len(self._open)
        self._server.send(signal.SIGTERM)
        self._may_send.set()  # some send requests while it drains
        code = await asyncio.to_thread(self._server.end)
        if code != 0 or any("aborting" in line for line in self._server.log):
            self.tally.lost.append(f"the drained server ended with {code}: {self._server.log[-5:]}")
        self.tally.kinds["drains"] += 1
        self._server = await asyncio.to_thread(Served, self._model, *self._flags, port=self.port)
        self._is_served.set()

    async def _be_a_client(self) -> None:
        async with client_of(f"http://127.0.0.1:{self.port}") as client:
            while not self._is_over:
                await self._may_send.wait()
                try:
                    await self._ask_leave_or_err(client)
                except Exception as error:  # a client that stops would keep the load from ending
                    self.tally.wrong.append("".join(traceback.format_exception(error)))

    async def _ask_leave_or_err(self, client: openai.AsyncOpenAI) -> None:
        drawn, place = self._chooser.random(), self._chooser.randrange(len(self._requested))
        if drawn < DISCONNECTS:
            await self._leave_early(client, place)
        elif drawn < DISCONNECTS + INVALID:
            await self._err(client, place)
        else:
            await self._ask(client, place)

    async def _ask(self, client: openai.AsyncOpenAI, place: int) -> None:
        """Sends a request until a server has accepted it, and compares the answer."""
        while True:
            number = await self._sent(f"conversation {place}")
            try:
                answer = await ask(client, self._requested[place])
            except (openai.APIError, LostAnswer) as error:
                if not await self._is_refusal(number, error):
                    return
            else:
                await self._ended(number)
                self.tally.kinds["answered"] += 1
                if answer != self._expected[place]:
                    self.tally.wrong.append(f"conversation {place}: {answer}, not {self._expected[place]}")
                return
            await self._is_served.wait()

    async def _is_refusal(self, number: int, error: Exception) -> bool:
        """True if a request was not accepted and may be sent to the next server; otherwise it is lost."""
        drained = isinstance(error, openai.APIStatusError) and error.status_code == 503
        not_read = isinstance(error, openai.APIConnectionError) and not self._is_served.is_set()
        what, accepted = self._open[number], number in self._accepted
        await self._ended(number)
        if accepted or not (drained or not_read):
            self.tally.lost.append(f"{what}, accepted before the drain: {accepted}: {type(error).__name__}: {error}")
            return False
        self.tally.kinds["sent again after 503" if drained else "sent again after no connection"] += 1
        return True

    async def _leave_early(self, client: openai.AsyncOpenAI, place: int) -> None:
        """Closes the connection after a part of a stream, or before any of the answer."""
        num_chunks = self._chooser.randrange(4)
        number = await self._sent("one that leaves")
        asking = asyncio.ensure_future(self._read_some(client, place, num_chunks))
        try:
            if num_chunks == 0:
                await client.models.list()  # this takes as long as the server needs to read both
            else:
                await asking
        except openai.APIError:
            pass  # the server drains; the client leaves anyway
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self.tally.kinds["left"] += 1
            await self._ended(number)

    async def _read_some(self, client: openai.AsyncOpenAI, place: int, num_chunks: int) -> None:
        requested = {**self._requested[place], "stream": True, "max_tokens": 60}
        async with await client.chat.completions.create(**requested) as stream:
            async for _ in stream:
                num_chunks -= 1
                if num_chunks <= 0:
                    return

    async def _err(self, client: openai.AsyncOpenAI, place: int) -> None:
        wrong, status = self._chooser.choice(WRONG)
        requested = {**self._requested[place], "stream": False, "model": MODEL}
        number = await self._sent(f"one with {str(wrong)[:60]}")
        try:
            await client.chat.completions.create(**requested, extra_body=wrong)
        except openai.APIStatusError as error:
            self.tally.kinds["invalid"] += 1
            if error.status_code not in (status, 503):
                self.tally.wrong.append(f"{str(wrong)[:60]} is answered {error.status_code}, not {status}: {error}")
        except openai.APIConnectionError as error:
            if number in self._accepted or self._is_served.is_set():
                self.tally.lost.append(f"{str(wrong)[:60]}: {error}")
        else:
            self.tally.wrong.append(f"{str(wrong)[:60]} is answered as if it were right")
        finally:
            await self._ended(number)

    async def _sent(self, what: str) -> int:
        async with self._quiet:
            self.num_sent += 1
            self._open[self.num_sent] = what
            self._quiet.notify_all()
            return self.num_sent

    async def _ended(self, number: int) -> None:
        async with self._quiet:
            self._open.pop(number, None)
            self._quiet.notify_all()


def resident_bytes(pid: int) -> float:
    """Returns the bytes of memory of a process and its descendants."""
    return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) * 4096.0 for each in family(pid))

"""Shared parts of the tests of AsyncEngine: a small engine, requests, steps that wait for the test."""

import asyncio
import random
import threading

from rocm_serve.engine import Engine
from rocm_serve.request import Completion, Event, Request
from rocm_serve.request_stream import RequestStream
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.runner.serving import all_pages_are_free, engine
from tests.amd.runner.tiny_model import CONFIG, NAN_TOKEN

__all__ = ["engine"]
LONG = Request((5, 6, 8), 60)


def some_requests(num: int, seed: int = 3) -> list[Request]:
    chooser = random.Random(seed)
    return [
        Request(
            tuple(chooser.choices(range(NAN_TOKEN + 1, CONFIG.vocab_size), k=chooser.randrange(1, 20))),
            chooser.randrange(1, 12),
            Sampling(temperature=chooser.choice((0.0, 0.9)), seed=chooser.randrange(9)),
        )
        for _ in range(num)
    ]


def is_empty(served: Engine) -> bool:
    """True if the engine holds nothing of any request, except cached prefixes, which it forgets here."""
    if (served.has_work, served._outputs, served._done, served._events) != (False, {}, {}, []):
        return False
    return all_pages_are_free(served)


async def read(stream: RequestStream) -> Completion:
    """Joins the pieces of a stream."""
    pieces = [piece async for piece in stream]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    reason = pieces[-1].finish_reason
    assert reason is not None
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    return Completion((await stream.completion()).prompt_token_ids, tokens, "".join(p.text for p in pieces), reason)


class Broken(Exception):
    """The exception that tests raise."""


class Gated:
    """An engine that waits for the test before each step."""

    def __init__(self, served: Engine) -> None:
        self._step, self._gate, self._begun = served.step, threading.Semaphore(0), threading.Semaphore(0)
        served.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Event]:
        self._begun.release()
        self._gate.acquire()
        return self._step()

    async def begun(self) -> None:
        """Waits until another step has begun."""
        await asyncio.to_thread(self.wait_until_begun)

    def wait_until_begun(self) -> None:
        """Waits until another step has begun, in another thread than the event loop's."""
        self._begun.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._gate.release()

"""A server over a tiny model, in a thread of the test's process."""

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import uvloop
from starlette.types import ASGIApp

from rocm_attn.errors import RocmAttnError
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.address import bind, url_of
from rocm_serve.server.gate import ServerGate
from rocm_serve.server.generation import Generations
from rocm_serve.server.generation_config import OPENAI_DEFAULTS
from rocm_serve.server.health import Health
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.job import Job, Jobs
from rocm_serve.server.keys import ApiKeys
from rocm_serve.server.observers import Observers
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.run import Server
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.traces import OtelTraces
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import Gated, is_empty
from tests.amd.runner.serving import engine as small_engine
from tests.amd.runner.tiny_model import CONFIG, tiny_model, word_tokenizer
from tests.amd.runner.with_parameters import END, character_tokenizer

NAME = "tiny"
MANY_STEPS = 10_000
T = TypeVar("T")
_WORDS = word_tokenizer()
_ONE_LAYER = replace(CONFIG, layers=CONFIG.layers[:1])


def word_model() -> LoadedModel:
    """A model of one layer, whose tokens are words: a server's steps may be as short as they can be."""
    return tiny_model(tokenizer=word_tokenizer(), base=_ONE_LAYER)


def letter_model() -> LoadedModel:
    """A model of one layer, whose tokens are characters."""
    return tiny_model(tokenizer=character_tokenizer(), eos_token_ids=(END,), base=_ONE_LAYER)


def gate_of(app: ASGIApp, counts: HttpMetrics) -> ServerGate:
    """The gate of a server that runs nothing."""
    front = SimpleNamespace(check=lambda: None, num_requests=0)
    generations: Any = SimpleNamespace(counts=counts, jobs=Jobs(), front=front)
    return ServerGate(app, generations, ApiKeys(), Observers(NAME, False, counts, Health(1), ()), ServerOptions())


@dataclass(slots=True, eq=False)
class Running:
    """A server that runs in a thread.

    lines: the lines that it has announced
    ended: the error with which the engine has ended it; None if it was stopped
    """

    url: str
    engine: Engine
    front: AsyncEngine
    server: Server
    loop: asyncio.AbstractEventLoop
    lines: list[str]
    thread: threading.Thread
    ended: RocmAttnError | None = None

    @property
    def jobs(self) -> Jobs:
        """The server's jobs."""
        return self.server.jobs

    @property
    def generations(self) -> Generations:
        """The server's generations."""
        return self.server.generations

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def drain(self) -> None:
        """Starts a drain, like SIGTERM."""
        self.loop.call_soon_threadsafe(self.server.begin_drain)

    def between_steps(self, function: Callable[[], T]) -> T:
        """Calls a function in the engine's thread, after all earlier calls, and returns its result."""
        return asyncio.run_coroutine_threadsafe(self.front.between_steps(function), self.loop).result()

    def wait_until_draining(self) -> None:
        self.wait_until(lambda: any(line.startswith("shutting down") for line in self.lines))

    def between_loops(self, function: Callable[[], T]) -> T:
        """Calls a function in the server's event loop, and returns its result."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits until a condition holds in the server's event loop."""
        while not self.between_loops(condition):
            pass

    def waiting_bytes(self) -> int:
        return self.between_loops(lambda: self.generations.counts.waiting_bytes)

    def shrink_buffers(self, num_bytes: int) -> None:
        """Limits the kernel's send buffer of later connections. Call it in the event loop."""
        for listener in self.server.servers:
            for each in listener.sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def hold(self) -> Callable[[], None]:
        """Begins a job that keeps the server from ending, like one whose client reads slowly; the result ends it."""
        job = self.between_loops(lambda: Job("", 600.0))
        context = self.jobs.taken(job)
        self.between_loops(context.__enter__)

        def end() -> None:
            self.between_loops(lambda: context.__exit__(None, None, None))

        return end

    def jobs_are_done(self) -> None:
        """Waits until no request is being answered."""
        asyncio.run_coroutine_threadsafe(self.server.jobs.empty(), self.loop).result()

    def holds_nothing(self) -> bool:
        """True if no page and no row is left of any request, once all are answered."""
        self.jobs_are_done()
        return self.between_steps(lambda: is_empty(self.engine))


@contextmanager
def running(
    engine: Engine,
    *,
    tokenizer: Tokenizer | None = _WORDS,
    keys: Sequence[str] = (),
    traces: Sequence[OtelTraces] = (),
    defaults: Sampling = OPENAI_DEFAULTS,
    **options: Any,
) -> Iterator[Running]:
    """A server on its own port; it has ended afterwards.

    options: of ServerOptions
    """
    settings = ServerOptions(**{"port": 0, **options})
    model = ServedModel(NAME, tokenizer, engine.limits, settings, defaults)
    begun: queue.SimpleQueue[Running | BaseException] = queue.SimpleQueue()
    lines: list[str] = []

    async def main() -> None:
        with bind(settings) as bound:
            async with AsyncEngine(engine, max_requests=settings.max_requests) as front:
                server = Server(front, model, ApiKeys.of(list(keys)), announce, traces)
                loop, thread = asyncio.get_running_loop(), threading.current_thread()
                found.append(Running(url_of(bound, settings), engine, front, server, loop, lines, thread))
                await server.serve(sockets=[bound])
                front.check()

    def announce(line: str) -> None:
        lines.append(line)
        if line.startswith("listening"):
            begun.put(found[0])

    def run() -> None:
        try:
            uvloop.run(main())
        except RocmAttnError as error:
            if found:
                found[0].ended = error
            begun.put(error)
        except BaseException as error:
            begun.put(error)
            raise

    found: list[Running] = []
    thread = threading.Thread(target=run)
    thread.start()
    server = begun.get()
    if isinstance(server, BaseException):
        raise server
    try:
        yield server
    finally:
        if thread.is_alive():
            server.drain()
        thread.join()


@contextmanager
def gated_server(loaded: LoadedModel, **options: Any) -> Iterator[tuple[Running, Gated]]:
    """A server whose engine waits before each step; all steps may run at the end."""
    served = small_engine(loaded)
    gated = Gated(served)
    with running(served, **options) as server:
        try:
            yield server, gated
        finally:
            gated.let(MANY_STEPS)

"""Runs a server: its signals, and its end."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from types import FrameType

import uvicorn
import uvloop

from rocm_serve.async_engine import EngineClient, RunningEngine
from rocm_serve.server.address import cannot_listen, url_of
from rocm_serve.server.api_errors import given_up_at_shutdown
from rocm_serve.server.app import build_app
from rocm_serve.server.connections import MOST_HEAD_BYTES, bounded_protocol
from rocm_serve.server.constraint_checks import ConstraintChecks
from rocm_serve.server.descriptors import connections_within, raise_limit
from rocm_serve.server.generation import Generations
from rocm_serve.server.health import Health
from rocm_serve.server.job import Jobs
from rocm_serve.server.keys import ANONYMOUS, ApiKeys
from rocm_serve.server.observers import LOGGER, Observers
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.traces import OtelTraces
from rocm_serve.server.truth import TruthProbe

# Seconds that clients have to take the last bytes of their answers.
_LAST_BYTES_SECONDS = 5
_BACKLOG = 2048
# Connections that are accepted before the loop does something else. At the limit of open files, Python's loop tries,
# and reports, this many times in a row.
_AT_A_TIME = 1
# Seconds that a connection may be idle. Clients and gateways keep one for less (OpenAI's for 5 seconds, others for up
# to 60). So they close it, and no request comes on a connection that the server closes at that moment.
_IDLE_SECONDS = 75
# Uvicorn's log_level sets one level for its loggers, which is not that of the lines of requests. Those are JSON.
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}, "json": {"format": "%(message)s"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "line"},
        "requests": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "json"},
    },
    "loggers": {
        "uvicorn.error": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        LOGGER: {"handlers": ["requests"], "level": "INFO", "propagate": False},
    },
}


def serve(
    engine: RunningEngine,
    model: ServedModel,
    keys: ApiKeys,
    bound: socket.socket,
    announce: Callable[[str], None],
    traces: Sequence[OtelTraces] = (),
) -> None:
    """Serves until a signal ends it, in the main thread, or the engine ends. Raises EngineEnded.

    announce: called with a line when the server begins, and when it ends
    """

    async def served() -> None:
        async with EngineClient(engine, max_requests=model.options.max_requests) as front:
            server = Server(front, model, keys, announce, traces)
            await server.serve(sockets=[bound])
            front.check()
            await front.stop()  # no answer is left, and an engine that hangs would not give back the requests it holds

    uvloop.run(served())


class Server(uvicorn.Server):
    """A server that drains. At the first SIGTERM or SIGINT it finishes its requests; the second ends it at once."""

    def __init__(
        self,
        front: EngineClient,
        model: ServedModel,
        keys: ApiKeys,
        announce: Callable[[str], None],
        traces: Sequence[OtelTraces] = (),
    ) -> None:
        self._front, self._options, self._announce = front, model.options, announce
        self.jobs = Jobs()
        self._checks = ConstraintChecks(model.trial_of_constraints)
        self.generations = Generations(front, self.jobs, self._checks, model.options.max_unread_tokens)
        counts = self.generations.counts
        counts.max_requests = model.options.max_requests
        counts.know_keys(keys.names or (ANONYMOUS,))
        self._traces = traces
        self.health = Health(model.options.unhealthy_after)
        self._truth = TruthProbe(front, self.health, model.options.truth_seconds)
        observers = Observers(model.name, model.options.access_log, counts, self.health, traces)
        self._loop = asyncio.get_running_loop()
        self._signal = asyncio.Event()
        self._num_signals = 0
        self._tokenising = model.tokenising
        self._limit = raise_limit()
        self._most_connections = connections_within(self._limit, model.options.max_connections)
        super().__init__(
            uvicorn.Config(
                build_app(self.generations, model, keys, observers, self._truth),
                lifespan="off",
                ws="none",
                log_config=_LOGGING,
                access_log=False,
                backlog=_AT_A_TIME,
                server_header=False,
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
                timeout_keep_alive=_IDLE_SECONDS,
                http=bounded_protocol(model.options, self._most_connections, self.generations.counts),
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                ssl_certfile=model.options.tls_cert,
                ssl_keyfile=model.options.tls_key,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Does the same as uvicorn's method, but raises no signal again when the server has drained."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._listen(sockets)
        if self._most_connections < self._options.max_connections:
            self._announce(
                f"at most {self._most_connections} connections are served, and not {self._options.max_connections} "
                f"(--max-connections): the process may open {self._limit} files (ulimit -n)"
            )
        await super().startup(sockets)
        self._listen(sockets)  # the loop has set the kernel's queue to as few as it accepts at a time
        self._announce(f"listening on {url_of(sockets[0], self._options)}")
        watching = [self._drain(), self._watch_engine()]
        if self._options.truth_every:
            watching.append(self._truth.run_every(self._options.truth_every))
        self._watchers = [asyncio.ensure_future(each) for each in watching]

    def _listen(self, sockets: list[socket.socket]) -> None:
        for bound in sockets:
            try:
                bound.listen(_BACKLOG)
            except OSError as error:  # two servers may bind one port; the second one fails only when it listens
                raise cannot_listen(self._options, error) from error

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. Runs in the main thread, between any two instructions."""
        self._num_signals += 1
        if self._num_signals > 1:
            # Neither a hanging device nor a hanging loop can delay this. Ranks end with this process.
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Takes no more requests, finishes those that were taken, and ends. Call it in the event loop."""
        self._signal.set()

    async def _drain(self) -> None:
        await self._signal.wait()
        self.jobs.is_draining = True
        seconds = self._options.drain_seconds
        self._announce(
            f"shutting down: {len(self.jobs)} requests have {seconds:g} seconds to finish; a second signal ends at once"
        )
        try:
            await asyncio.wait_for(self.jobs.empty(), seconds)
        except asyncio.TimeoutError:
            self._announce(f"aborting {len(self.jobs)} requests")
            self.jobs.end_all(given_up_at_shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.jobs.empty(), _LAST_BYTES_SECONDS)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        """Ends the server after the engine has ended by itself. Its clients have got EngineEnded already."""
        await self._front.ended()
        self.jobs.is_draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.jobs.empty(), _LAST_BYTES_SECONDS)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        self._checks.close()
        if self._tokenising is not None:
            self._tokenising.close()
        await super().shutdown(sockets)
        for each in self._traces:
            await asyncio.to_thread(each.close)

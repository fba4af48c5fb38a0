"""Requests to an engine of this process, by AsyncEngine: the best that a server over it could reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from rocm_attn.errors import RocmAttnError
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions, RequestRecord, Sending, ServingResult, put_load
from rocm_lab.bench.request_trace import RequestTrace
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine_thread import ServingEngine
from rocm_serve.request import Request


class RunnerTarget:
    """An engine that serves."""

    def __init__(self, front: AsyncEngine) -> None:
        self._front = front

    def prepared(self, prompt: Sequence[int], output_tokens: int) -> Sending:
        """Does the same as RequestServer.prepared."""
        return partial(self._send, tuple(prompt), output_tokens)

    async def _send(self, prompt: tuple[int, ...], output_tokens: int, outcome: RequestRecord) -> None:
        try:
            request = Request(prompt, output_tokens, ignore_eos=True)
            async with self._front.stream(request) as stream:
                async for piece in stream:
                    if piece.token_ids:
                        outcome.pieces.append(time.perf_counter())
                        outcome.tokens += len(piece.token_ids)
        except RocmAttnError as error:
            outcome.failure = f"{type(error).__name__}: {error}"


async def run_on_engine(
    engine: ServingEngine, trace: RequestTrace, options: LoadOptions, meter: EnergyMeter
) -> ServingResult:
    """Sends a trace to an engine."""
    async with AsyncEngine(engine, max_requests=options.concurrency) as front:
        return await put_load(RunnerTarget(front), trace, options, meter)

"""Scrape: what /metrics answers, without a scraper that comes often costing steps."""

from __future__ import annotations

import asyncio

from rocm_attn.errors import RocmAttnError
from rocm_attn.server.generation import Generations
from rocm_attn.step.exposition import heading, sample, text_of
from rocm_attn.step.metrics import Metrics

# How long a scraper waits for the counts of now. While graphs are made, ranks answer nothing for minutes: then it gets
# those of the last scrape.
_PATIENCE_SECONDS = 2.0


class Scrape:
    """The engine's metrics: one reading at a time, which all who ask meanwhile share."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._reading: asyncio.Task[None] | None = None
        self._last = Metrics().snapshot()
        self._read_at = asyncio.get_running_loop().time()

    async def text(self) -> str:
        """In Prometheus' text format."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())
        await asyncio.wait([self._reading], timeout=_PATIENCE_SECONDS)
        age = asyncio.get_running_loop().time() - self._read_at
        name, help = "rocm_attn_metrics_age_seconds", "how old the engine's counts are: late while a step takes long"
        counts = self._generations.counts
        counts.draining = self._generations.jobs.is_draining
        age_lines = text_of([*heading(name, help, "gauge"), sample(name, round(age, 3))])
        return self._last.as_prometheus() + age_lines + counts.as_prometheus()

    async def _read(self) -> None:
        try:
            self._last = await self._generations.front.metrics()
        except RocmAttnError:
            return  # the ranks have ended, and the engine with them; the last counts stay
        self._read_at = asyncio.get_running_loop().time()

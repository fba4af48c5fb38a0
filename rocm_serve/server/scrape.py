"""Scrape: answers /metrics, so that a scraper that comes often costs no steps."""

import asyncio

from rocm_attn.errors import RocmAttnError
from rocm_attn.step.metrics import Metrics
from rocm_serve.server.build import build_facts
from rocm_serve.server.generation import Generations
from rocm_serve.server.health import Health

# Seconds that a scraper waits for new counts. While graphs are made, ranks do not answer for minutes. Then it gets the
# counts of the last scrape.
_PATIENCE_SECONDS = 2.0


class Scrape:
    """The engine's metrics. There is one reading at a time, which all requests made meanwhile share."""

    def __init__(self, generations: Generations, model: str, health: Health) -> None:
        self._generations, self._model, self._health = generations, model, health
        self._reading: asyncio.Task[None] | None = None
        self._last = Metrics().snapshot()
        self._read_at = asyncio.get_running_loop().time()

    async def text(self) -> str:
        """Returns the metrics in Prometheus' text format."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())
        await asyncio.wait([self._reading], timeout=_PATIENCE_SECONDS)
        counts = self._generations.counts
        counts.age_seconds = asyncio.get_running_loop().time() - self._read_at
        counts.draining = self._generations.jobs.is_draining
        counts.failing = bool(self._health.trouble)
        return self._last.as_prometheus() + counts.as_prometheus()

    async def _read(self) -> None:
        try:
            counts, front = self._generations.counts, self._generations.front
            if not counts.build:
                counts.build = {**build_facts((await front.report()).arch), "model_name": self._model}
            self._last = await front.metrics()
        except RocmAttnError:
            return  # the ranks have ended, and the engine with them; the last counts stay
        self._read_at = asyncio.get_running_loop().time()

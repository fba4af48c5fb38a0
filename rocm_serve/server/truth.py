"""TruthProbe: answers /health/truth, so that clients that ask often cost no steps."""

import asyncio
import logging
from itertools import count

from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.async_engine import EngineClient, EngineEnded
from rocm_serve.server.health import Health


class TruthProbe:
    """Runs the engine's truth probe, one at a time, and not again before a while has passed.

    health:  gets each verdict
    seconds: least time between the begins of two runs
    """

    def __init__(self, front: EngineClient, health: Health, seconds: float) -> None:
        self._front, self._health, self._seconds = front, health, seconds
        self._loop = asyncio.get_running_loop()
        self._seeds = count()
        self._run: asyncio.Task[TruthVerdict] | None = None
        self._began = 0.0

    async def verdict(self) -> tuple[TruthVerdict, float]:
        """Returns the verdict, of a run that is made now if the last one is too old, and the seconds since its begin.

        Raises EngineEnded.
        """
        if self._run is None or (self._run.done() and self._loop.time() - self._began >= self._seconds):
            self._began = self._loop.time()
            self._run = asyncio.ensure_future(self._probe())
        # A client that leaves does not end the run, for which others may wait.
        verdict = await asyncio.shield(self._run)
        return verdict, self._loop.time() - self._began

    async def run_every(self, seconds: float) -> None:
        """Runs the probe again and again, until the engine ends. A run that fails, as without memory, is logged."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.verdict()
            except EngineEnded:
                return
            except Exception as error:  # of the run alone
                logging.getLogger(__name__).error("the truth probe could not run: %s", error)

    async def _probe(self) -> TruthVerdict:
        verdict = await self._front.truth(next(self._seeds))
        if verdict.word == "wrong":
            logging.getLogger(__name__).error("%s", verdict.sentence)
        if verdict.word != "not checked":
            self._health.note_truth(verdict.sentence if verdict.word == "wrong" else "")
        return verdict

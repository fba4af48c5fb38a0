"""A run of some kernels that can be checked, and the processes that many of them run in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from tests.amd.simulator.driver import Simulation


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One run on an arch. run raises where a result is wrong; it may be sent to another process."""

    name: str
    arch: str
    run: Callable[[], Simulation]

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}"


class Runs:
    """Runs cases, each once, on as many cores as there are, or as a stage beside another has (scripts/test.sh)."""

    def __init__(self) -> None:
        # 0: pytest itself runs the tests of a stage beside another, on one core.
        cores = max(1, int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or os.cpu_count() or 1))
        # Spawned: a forked process would inherit whatever threads torch has started here.
        self._pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
        self._futures: dict[str, Future[Simulation]] = {}

    def start(self, case: KernelCase) -> Future[Simulation]:
        """The case's run, which goes on while the caller does something else."""
        if str(case) not in self._futures:
            self._futures[str(case)] = self._pool.submit(_run, case)
        return self._futures[str(case)]

    def result(self, case: KernelCase) -> Simulation:
        """What the case's run gave. Raises what it raised."""
        return self.start(case).result()

    def close(self) -> None:
        """Give up what has not begun, and end the processes."""
        self._pool.shutdown(cancel_futures=True)


def _run(case: KernelCase) -> Simulation:
    return case.run()

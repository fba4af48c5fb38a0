"""A run of some kernels that can be checked, and the processes that run many of them."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.machine.target import known_target
from rocm_lab.simulator.launcher import Simulation, simulated


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One run on an arch. run launches, and raises if a result is wrong; it may be sent to another process."""

    name: str
    arch: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}"

    def simulate(self) -> Simulation:
        """Runs it with every kernel as machine code."""
        with simulated(self.arch) as simulation:
            self.run()
        return simulation


def own_encoding(arch: str) -> Encoding:
    """The eight-bit encoding that the arch's matrix units multiply."""
    dtype = known_target(arch).fp8_dtype
    assert dtype is not None, f"{arch} multiplies no codes"
    return Encoding.of(dtype)


class Runs:
    """Runs cases, each once, on all cores, or on those of a stage that runs next to another (scripts/test.sh)."""

    def __init__(self) -> None:
        # 0: pytest itself runs the tests of a stage that runs next to another, on one core.
        cores = max(1, int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or os.cpu_count() or 1))
        # Spawned: a forked process would inherit the threads that torch has started here.
        self._pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
        self._futures: dict[str, Future[Simulation]] = {}

    def start(self, case: KernelCase) -> Future[Simulation]:
        """Starts the case's run, which continues while the caller does other work."""
        if str(case) not in self._futures:
            self._futures[str(case)] = self._pool.submit(case.simulate)
        return self._futures[str(case)]

    def result(self, case: KernelCase) -> Simulation:
        """Returns the result of the case's run. Raises the run's exception."""
        return self.start(case).result()

    def close(self) -> None:
        """Cancels the cases that have not begun, and ends the processes."""
        self._pool.shutdown(cancel_futures=True)

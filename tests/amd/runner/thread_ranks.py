"""Ranks of one model as threads of one process: the sums and gathers of tensor parallelism without any processes.

Ranks of which one dies, raises or hangs in place of a sum, and what tells that all of them have ended.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from rocm_attn.models.shards import Shard
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from tests.amd.runner.tiny_model import tiny_model

T = TypeVar("T")


class _Meeting:
    """A meeting point at which the threads exchange tensors.

    Between two meetings one thread runs at a time, because Triton's interpreter supports only one.
    """

    def __init__(self, num_ranks: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(num_ranks)
        self.brought: list[Tensor] = [torch.empty(0)] * num_ranks

    def wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadRank(Ranks):
    """One of the ranks; it serves eager steps, since no recording sees the exchange between threads."""

    def __init__(self, shard: Shard, meeting: _Meeting) -> None:
        self.shard = shard
        self._meeting = meeting

    def sum(self, x: Tensor) -> Tensor:
        return self.sum_in_order(x)

    def sum_in_order(self, x: Tensor) -> Tensor:
        return torch.stack(self.all_of(x)).sum(0)

    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat(self.all_of(x), -1)

    def least_of_each(self, numbers: list[int]) -> list[int]:
        found: list[int] = torch.stack(self.all_of(torch.tensor(numbers))).amin(0).tolist()
        return found

    def all_of(self, x: Tensor) -> list[Tensor]:
        """Returns what each rank brings."""
        self._meeting.brought[self.shard.rank] = x
        self._meeting.wait()
        everything = list(self._meeting.brought)
        self._meeting.wait()  # before one of them brings the next
        return everything


def on_threads(num_ranks: int, body: Callable[[ThreadRank], T]) -> list[T]:
    """Returns body's result on each rank."""
    meeting = _Meeting(num_ranks)

    def run(rank: int) -> T:
        with meeting.turn:
            try:
                return body(ThreadRank(Shard(rank, num_ranks), meeting))
            except BaseException:
                meeting.barrier.abort()  # the others are not left waiting
                raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


@dataclass(frozen=True)
class LoadSabotaged:
    """Loads a tiny model for ranks of which rank 1 fails in place of one of the sums.

    what:  "dies", "raises" or "hangs"
    after: number of sums before it
    """

    what: str
    after: int

    def __call__(self, *, device: torch.device, ranks: Ranks) -> LoadedModel:
        sums, summed = count(1), ranks.sum

        def summed_or_not(x: Tensor) -> Tensor:
            if next(sums) == self.after and ranks.shard.rank == 1:
                if self.what == "dies":
                    print("rank 1 gives up", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.what == "hangs":
                    signal.pause()
                raise torch.OutOfMemoryError("rank 1 has no memory left")
            return summed(x)

        loaded = tiny_model(device=device, ranks=ranks)
        vars(ranks)["sum"] = summed_or_not
        return loaded


def pids(engine: RankedEngine) -> list[int]:
    found = [rank.process.pid for rank in engine._processes._ranks]
    assert None not in found
    return [pid for pid in found if pid is not None]


def assert_all_end(processes: list[int]) -> None:
    """Wait until processes are gone; the minute is the end of a hang."""
    for pid in processes:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([watched], [], [], 60)[0], f"process {pid} did not end"
        finally:
            os.close(watched)

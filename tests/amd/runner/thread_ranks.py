"""Ranks of one model as threads of one process: the sums and gathers of tensor parallelism without any processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rocm_attn.models.shards import Shard
from rocm_serve.ranks import Ranks

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

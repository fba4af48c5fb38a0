"""Ranks of which one dies, raises or hangs in place of a sum, and what tells that all of them have ended."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rocm_attn.machine.agreement import Agreement
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from tests.amd.runner.tiny_model import tiny_model


@dataclass
class Sabotaged:
    """Ranks that sum; on rank 1 a failure replaces one of the sums.

    what:  "dies", "raises" or "hangs"
    after: number of sums before it
    """

    ranks: Ranks
    what: str
    after: int

    @property
    def shard(self) -> Any:
        return self.ranks.shard

    @property
    def agree(self) -> Agreement:
        return self.ranks.agree

    def sum(self, x: Tensor) -> Tensor:
        self.after -= 1
        if self.after == 0 and self.ranks.shard.rank == 1:
            if self.what == "dies":
                print("rank 1 gives up", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hangs":
                signal.pause()
            raise torch.OutOfMemoryError("rank 1 has no memory left")
        return self.ranks.sum(x)

    def sum_in_order(self, x: Tensor) -> Tensor:
        return self.ranks.sum_in_order(x)

    def gathered(self, x: Tensor) -> Tensor:
        return self.ranks.gathered(x)

    def least(self, number: int) -> int:
        return self.ranks.least(number)


@dataclass(frozen=True)
class LoadSabotaged:
    """Loads a tiny model for such ranks."""

    what: str
    after: int

    def __call__(self, *, device: torch.device, ranks: Ranks) -> LoadedModel:
        return replace(tiny_model(device=device, ranks=ranks), ranks=Sabotaged(ranks, self.what, self.after))


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

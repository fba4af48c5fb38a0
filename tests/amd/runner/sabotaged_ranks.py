"""Ranks of which one dies, raises or hangs in place of a sum, and what tells that all of them have ended."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from tests.amd.runner.tiny_model import tiny_model


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

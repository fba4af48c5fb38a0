"""Ranks the tiles of gfx942 and gfx950, and prints the candidates of each row, the best first.

    python -m tests.amd.offline.tuning_table [WORD...]

compiles every candidate with the installed Triton, which must be the newest supported, and costs it with llvm-mca (see
mca.py), which takes an hour or more. With WORDs only layers whose name contains one of them are ranked. Compiled
kernels are in Triton's cache, so that the same command continues where it was stopped. Exits with 1 if a row spills or
is worse than its best candidate by more than the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from tests.amd.offline.matrix import Row
from tests.amd.offline.tile_candidates import TOLERANCE, Kind, Ranking, layers, rank


def main(words: Sequence[str] = ()) -> int:
    """Ranks and prints; returns the exit status."""
    work = [each for each in layers() if not words or any(word in _name(*each) for word in words)]
    worst = 0.0
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for ranking in pool.map(_ranked, *zip(*work, strict=True)):
            print(_name(ranking.row, ranking.kind))
            for found in ranking.candidates:
                serves = "serves " if found is ranking.chosen else ""
                print(f"  {serves}{found.tiles}: {found.order:.3f}, {found.waves} waves, {found.cost}", flush=True)
            worst = max(worst, ranking.excess)
    print(f"the worst row is {worst:.1%} worse than its best candidate, or above the lower bound")
    return int(worst > TOLERANCE)


def _name(row: Row, kind: Kind) -> str:
    return f"{kind.__name__} {row}"


def _ranked(row: Row, kind: Kind) -> Ranking:
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return rank(row, kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

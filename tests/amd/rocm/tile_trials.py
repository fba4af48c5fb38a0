"""RecordedBench: a bench of `rocm-attn tune` that keeps all it has seen, for the report."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.providers.tiles import layer_of
from rocm_lab.tune.jobs import TuneJob
from rocm_lab.tune.search import Bench, Judged, Task, Times


class RecordedBench:
    """Asks another bench, and keeps the answers."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._candidates: dict[tuple[TuneJob, Tiles], dict[str, Any]] = {}

    def expect(self, tasks: Sequence[Task]) -> None:
        """See `Bench.expect`."""
        self._bench.expect(tasks)

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge`."""
        judged = self._bench.judge(job, tiles)
        self._candidates[job, tiles] = {**_tiles(job, tiles), **asdict(judged)}
        return judged

    def judge_others(self, job: TuneJob, tiles: Tiles) -> Judged:
        judged = self._bench.judge_others(job, tiles)
        if judged.wrong:
            self._candidates[job, tiles] |= asdict(judged)
        return judged

    def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """See `Bench.times`. The last times of a candidate are those that are kept."""
        in_use, own = self._bench.times(job, both, rounds)
        self._candidates[job, both[1]] |= {"in_use_us": in_use, "us": own}
        return in_use, own

    @property
    def verdicts(self) -> dict[tuple[TuneJob, Tiles], str]:
        """Why each candidate is wrong; empty for those that are right."""
        return {key: each["wrong"] for key, each in self._candidates.items()}

    @property
    def trials(self) -> list[dict[str, Any]]:
        """All that was seen of each job, in the form of docs/rocm.md."""
        jobs = dict.fromkeys(job for job, _ in self._candidates)
        return [
            {
                "table": job.table.value,
                "layer": asdict(layer_of(job.problem)),
                "max_rows": job.max_rows,
                "shapes": [[each.num_seqs, each.kv_len, each.new] for shape in job.shapes for each in shape.groups],
                "in_use": _tiles(job, job.in_use),
                "candidates": [each for (of, _), each in self._candidates.items() if of == job],
            }
            for job in jobs
        ]


def _tiles(job: TuneJob, tiles: Tiles) -> dict[str, Any]:
    table = next(table for table in job.table.rivals if type(tiles) is table.tiles)
    return {"table": table.value, "tiles": asdict(tiles)}

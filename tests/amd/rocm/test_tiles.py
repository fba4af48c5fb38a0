"""Candidates of tiles, each compared with the reference and timed in turn with the row that serves; for the report.

`rocm-attn read-report` makes rows of what is faster. A candidate that is wrong is reported, and fails no test.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.machine.target import Target, detect_target
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import clock_of
from rocm_lab.tune.ahead import CompiledAhead
from rocm_lab.tune.bench import JobSteps, LayerBench, edges_of
from rocm_lab.tune.jobs import TuneJob, jobs_of
from rocm_lab.tune.journal import Journal
from rocm_lab.tune.search import Search
from tests.amd.rocm.models import Measured, layer
from tests.amd.rocm.tile_trials import RecordedBench

pytestmark = pytest.mark.gpu

SHAPES = tuple(map(BatchSpec.parse, ("1d16k", "64d4k", "1x2k+6k")))
# After these no other candidate of a job is begun.
SECONDS_OF_A_JOB = 120
SAMPLE_US = 2000.0


@pytest.mark.parametrize("model", ["Llama-3-8B", "Llama-3-70B on one of 8 GPUs", "gpt-oss-120b"])
def test_candidates(model: str, device: torch.device, measured: Measured, tmp_path: Path) -> None:
    target = replace(detect_target(device), measured=())
    jobs, left_out = jobs_of([layer(model)], target, SHAPES)
    assert left_out == []
    steps, workers = JobSteps(edges_of), max(1, len(os.sched_getaffinity(0)) - 1)
    ahead = CompiledAhead(LayerBench(device, target, clock_of(device, SAMPLE_US), steps), target, workers, steps)
    bench, journal = RecordedBench(ahead), Journal(tmp_path / "trials", {})
    try:
        for job in jobs:
            search_for(SECONDS_OF_A_JOB, bench, target, journal, job)
    finally:
        measured("tile trials", bench.trials)
        journal.close()
        ahead.close()
    in_use = [bench.verdicts[job, job.in_use] for job in jobs]
    assert in_use == [""] * len(jobs)


def search_for(seconds: float, bench: RecordedBench, target: Target, journal: Journal, job: TuneJob) -> None:
    """Tries candidates of a job, which the bench records; nothing is kept."""
    ends = time.monotonic() + seconds
    search = Search(bench, target, journal, lambda: time.monotonic() < ends, lambda *_: None, lambda _: None)
    for _ in search.run([job]):
        pass

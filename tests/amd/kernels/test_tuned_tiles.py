"""Candidates of `rocm-attn tune` run under Triton's interpreter as on a GPU: judged by the reference, then timed.

Times are from a fake clock, which recognises tiles by the description of its kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.triton_later import triton_launches
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import Run
from rocm_lab.tune.bench import JobSteps, LayerBench
from rocm_lab.tune.jobs import TuneJob, jobs_of

TARGET = known_target("interpreter")
SHAPES = (BatchSpec.parse("1d20"), BatchSpec.parse("1x3+15"))
CPU = torch.device("cpu")


class FakeClock:
    """A clock whose times are the cost of the tiles: 10 us for blocks of 16 keys, otherwise 8."""

    def timed(self, runs: Sequence[Run]) -> FakeTimed:
        """Like Clock.timed; it runs the work, as a graph would."""
        for run in runs:
            run()
        kernel = runs[0].func.__self__  # type: ignore[attr-defined]
        return FakeTimed(10.0 if "key_block=16" in kernel.describe() else 8.0)


@dataclass(frozen=True)
class FakeTimed:
    us: float

    def microseconds(self) -> float:
        return self.us

    def run(self, seconds: float) -> int:
        raise NotImplementedError


def layer(**changes: object) -> Problem:
    plain = Problem(4, 2, 32, torch.float32, 16, v_head_dim=32, scale=32**-0.5)
    return replace(plain, **changes)  # type: ignore[arg-type]


LATENT = Problem(4, 1, 48, torch.float32, 16, v_head_dim=32, scale=48**-0.5, pool=PoolKind.LATENT)
CODED = layer(dtype=torch.float16, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN)


def job_of(problem: Problem, table: TileTable, shapes: tuple[BatchSpec, ...] = SHAPES) -> TuneJob:
    jobs, _ = jobs_of([problem], TARGET, shapes)
    return next(job for job in jobs if job.table is table)


def few_edges(job: TuneJob) -> list[BatchSpec]:
    """Returns a step with sequences that end in a page and with it, and one of every kind; a GPU has more of them."""
    return [
        BatchSpec.parse("1d5+1d16" if job.kind.decodes else "1x2+3+1x3+13"),
        BatchSpec.parse("1d17+1x3+1"),
    ]


@pytest.fixture
def bench(kernel_device: torch.device) -> LayerBench:
    if kernel_device.type != "cpu":
        pytest.skip("the clock of these tests is a stand-in that reads no GPU")
    return LayerBench(CPU, TARGET, FakeClock(), JobSteps(few_edges, apart=1))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("problem", "table"),
    [
        (layer(window_left=20, has_sinks=True), TileTable.DECODE),
        (layer(), TileTable.EXTEND),
        pytest.param(CODED, TileTable.DECODE, marks=pytest.mark.nightly),
        pytest.param(LATENT, TileTable.LATENT_DECODE, marks=pytest.mark.nightly),
    ],
    ids=["decode", "extend", "codes", "latent"],
)
def test_other_tiles_are_right_and_are_the_ones_that_run(bench: LayerBench, problem: Problem, table: TileTable) -> None:
    job = job_of(problem, table)
    other: Any = replace(job.in_use, key_block=32)  # type: ignore[arg-type]
    assert bench.judge(job, job.in_use).wrong == ""
    assert bench.judge(job, other).wrong == ""
    in_use, tuned = bench.times(job, (job.in_use, other), 1)
    assert in_use == [[10.0] * len(job.shapes)]
    assert tuned == [[8.0] * len(job.shapes)]


def test_a_kernel_that_is_wrong_with_its_tiles_is_seen(bench: LayerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head's results are in the other's place, as with tiles that mix up heads."""
    job = job_of(layer(), TileTable.DECODE)
    assert isinstance(job.in_use, DecodeTiles)
    launch = triton_launches.launch_paged_decode

    def mixed_up(args: AttendArgs, *, tiles: DecodeTiles, scores: Scores, cut: DecodeCut) -> None:
        launch(args, tiles=tiles, scores=scores, cut=cut)
        if tiles.key_block == 32:
            args.out.copy_(args.out.roll(1, dims=1))

    monkeypatch.setattr(triton_launches, "launch_paged_decode", mixed_up)
    assert "is off by" in bench.judge(job, replace(job.in_use, key_block=32)).wrong


def test_what_does_not_compile_is_a_sentence_and_the_next_candidate_runs(bench: LayerBench) -> None:
    job = job_of(layer(), TileTable.DECODE, SHAPES[:1])
    assert isinstance(job.in_use, DecodeTiles)
    wrong = bench.judge(job, replace(job.in_use, key_block=24)).wrong
    assert wrong.startswith("does not compile or run: ")
    assert bench.judge(job, job.in_use).wrong == ""

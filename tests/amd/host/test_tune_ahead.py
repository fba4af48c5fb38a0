"""Candidates of `rocm-attn tune` are compiled in separate processes, which may end."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.compile_only import AbsentGpu, CompileEvent, compile_only, observe_compiles
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.step_data import random_steps
from rocm_lab.tune.ahead import CompiledAhead, compile_tiles
from rocm_lab.tune.bench import JobSteps, kernel_of
from rocm_lab.tune.jobs import TuneJob
from rocm_lab.tune.search import Judged
from tests.amd.host.test_tune import FakeBench

# Each started process imports torch and Triton.
pytestmark = pytest.mark.nightly

GFX942 = known_target("gfx942")
TILES = DecodeTiles(16, 1, 2, 8)
DEADLY = 64


def launch(thunk: Callable[[], object]) -> None:
    thunk()


def job(num_q_heads: int) -> TuneJob:
    layer = Problem(num_q_heads, 2, 64, torch.bfloat16, 16, v_head_dim=64, scale=0.125)
    return TuneJob.of(TileTable.DECODE, layer, TILES, ())


def no_steps(job: TuneJob) -> list[BatchSpec]:
    """A worker's steps for a job: nothing to compile, or its end, as with a compiler that crashes."""
    if job.problem.num_q_heads == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


def one_step(job: TuneJob) -> list[BatchSpec]:
    return [BatchSpec.parse("1d40")]


@pytest.fixture
def judge() -> FakeBench:
    return FakeBench(lambda tiles, layer: 1.0)


@pytest.fixture
def ahead(judge: FakeBench) -> Iterator[CompiledAhead]:
    workers = CompiledAhead(judge, GFX942, 1, JobSteps(no_steps))
    yield workers
    workers.close()


def test_a_compiler_that_ends_its_process_ends_that_one_alone(ahead: CompiledAhead, judge: FakeBench) -> None:
    right, deadly = job(8), job(DEADLY)
    ahead.expect([(deadly, TILES)])
    assert ahead.judge(deadly, TILES) == Judged("its compiler ended the process (exit code -9)")
    assert judge.judged == [], "what has ended one process does not enter this one"
    # Not expected, and expected: both are compiled before they are judged.
    others = [replace(TILES, num_warps=warps) for warps in (4, 8)]
    assert ahead.judge(right, TILES) == Judged("")
    ahead.expect([(right, each) for each in others])
    assert [ahead.judge(right, each) for each in reversed(others)] == [Judged(""), Judged("")]
    assert judge.judged == [TILES, *reversed(others)]
    assert judge.timed == []


def test_what_is_compiled_ahead_is_what_a_launch_on_the_gpu_finds() -> None:
    """A launch over data compiles the same kernels, by their names in Triton's cache."""
    heads, steps, gpu = job(8), JobSteps(one_step), AbsentGpu("gfx942", 304, 64, 64 << 10)
    seen: list[CompileEvent] = []
    with compile_only(gpu), observe_launches(launch), observe_compiles(seen.append):
        compile_tiles(heads, TILES, GFX942, steps.of(heads), [])
        compiled = len(seen)
        (data,) = random_steps(heads.problem, one_step(heads)[0], 1, torch.device("cpu"), 0)
        data = data.with_lse()
        data.layer(kernel_of(heads, TILES, data, GFX942))()
    assert compiled >= 2, "decode and its schedule, at least"
    assert len(seen) == compiled, "nothing was left to compile"


def test_what_cannot_be_compiled_is_left_to_the_bench() -> None:
    gpu = AbsentGpu("gfx942", 304, 64, 64 << 10)
    with compile_only(gpu), observe_launches(launch):
        compile_tiles(job(8), replace(TILES, key_block=24), GFX942, JobSteps(one_step).of(job(8)), [])

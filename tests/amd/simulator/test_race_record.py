"""Our kernels have no races but those that are listed, and every barrier that is removed is found or was not needed."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.page_parts import rows_of
from rocm_lab.races.programs import Word as ProofWord
from rocm_lab.races.watch import RaceWatch
from rocm_lab.simulator.kernel import Launch
from rocm_lab.simulator.launcher import ARCHS, simulated, watched
from tests.amd.house.source_tree import ROOT
from tests.amd.kernels.attention_cases import Case, assert_served, build, run_decode
from tests.amd.simulator.barrier_mutants import Barrier, Judge
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.kernel_cases import GRID
from tests.amd.simulator.race_record import (
    CASES_OF_BARRIERS,
    CASES_OF_OTHER_BARRIERS,
    TOLERATED,
    watch_case,
    without_barriers,
)
from tests.amd.simulator.snippet import allocation
from tests.amd.simulator.test_launches import simulated_kernel
from tests.amd.simulator.test_races import CODES, Code

IN_EVERY_RUN = ("_store_kernel", "_take_inputs_kernel")


@pytest.mark.nightly
@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_case_has_no_race_and_the_right_answer_in_any_order(case: KernelCase) -> None:
    seen = watch_case(case, seed=GRID.index(case))
    assert not seen.not_tolerated
    assert not [proof.line() for proof in seen.proofs if proof.word is ProofWord.RACE]
    assert seen.with_barriers <= {*CASES_OF_BARRIERS}, "a kernel has barriers, and no case that removes them"


def test_the_page_answers_for_the_programs_of_every_kernel_that_it_names() -> None:
    page = (ROOT / "docs" / "races.md").read_text()
    names = [[row.split("|")[1] for row in rows_of(page, part)] for part in ("races", "proofs")]
    assert names[0] == names[1]


def test_every_case_that_reaches_barriers_is_there() -> None:
    others = chain.from_iterable(CASES_OF_OTHER_BARRIERS.values())
    assert {*CASES_OF_BARRIERS.values(), *others} <= {*map(str, GRID)}


@pytest.mark.nightly
def test_every_race_that_is_tolerated_is_there() -> None:
    cases = [case for case in GRID if case.name in ("metadata/watch_pages", "speculative/next_step")]
    races = [race for case in cases for seed in range(3) for race in watch_case(case, seed).races]
    assert {(race.kernel, race.memory) for race in races} == {*TOLERATED}


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in IN_EVERY_RUN)) for name in CASES_OF_BARRIERS],
)
def test_a_barrier_that_is_removed_is_found_or_was_not_needed(kernel: str) -> None:
    removed = without_barriers(kernel)
    assert removed
    assert not [each for each in removed if each.barrier is Barrier.MISSED]


@pytest.mark.parametrize(
    "code",
    [
        code
        for code in CODES.values()
        if "! s_barrier" in code.needed and code.programs == 1 and "_atomic_" not in code.lines
    ],
)
def test_the_judge_needs_a_barrier_once(code: Code) -> None:
    """The judge does not know atomics."""
    assert not _is_needed(code.without())
    assert _is_needed(code.without("! s_barrier"))


def _is_needed(lines: list[str]) -> bool:
    memory = np.zeros(1024, np.uint32)
    judge = Judge()
    pointer = memory.ctypes.data.to_bytes(8, "little")
    launch = Launch((1, 1, 1), 2, 1024, pointer, [allocation(memory)], watch=judge)
    written = ["v_mov_b32_e32 v60, 0", *(f"ds_write_b32 v60, v60 offset:{at}" for at in range(0, 512, 4))]
    begin = lines.index("v_lshlrev_b32_e32 v1, 2, v0")
    simulated_kernel(*lines[:begin], *written, "s_barrier", *lines[begin:]).run(launch)
    return judge.is_needed


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_a_barrier_does_not_wait_for_what_other_waves_store_for_other_programs(arch: str) -> None:
    """Decode that merges in its own launch, which AMD does not get for this reason: Target.orders_by_barriers."""
    found: dict[int, set[str]] = {}
    tiles = DecodeTiles(key_block=16, num_warps=1, num_stages=1, programs_per_cu=1, merge_group=8)
    for waves in (1, 4):
        tensors = build(
            Case([170], [1], heads=(8, 1), dims=(64, 64), dtype=torch.bfloat16, page_size=8), torch.device("cpu")
        )
        with watched(RaceWatch(seed=0)) as watch, simulated(arch):
            run_decode(tensors, num_programs=10, tiles=replace(tiles, num_warps=waves))
        assert_served(tensors)
        found[waves] = {race.memory for race in watch.races}
        assert all(race.first.program != race.second.program for race in watch.races)
    assert found == {1: set(), 4: {"partials"}}

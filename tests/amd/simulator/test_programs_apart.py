"""Programs of kernels are proved apart in global memory, or the planted race between them is shown."""

import itertools
import random
import re
from typing import Any

import pytest
import torch

from rocm_lab.races.programs import Proof, Word, prove_apart
from tests.amd.offline.offline_driver import offline
from tests.amd.simulator.apart_kernels import (
    _counted_kernel,
    _flag_kernel,
    _heads_kernel,
    _indirect_kernel,
    _looping_kernel,
    _rows_kernel,
    _shift_kernel,
    _striding_kernel,
    _sum_kernel,
)


def proof_of(kernel: Any, *args: Any, **constants: Any) -> Proof:
    tensors = [torch.empty(64, dtype=torch.int32) if arg == "tensor" else arg for arg in args]
    with offline("gfx942"):
        compiled = kernel.warmup(*tensors, **constants, grid=(1,))
    return prove_apart(compiled.asm["ttir"])


def rows(fault: str, stride: int = 100) -> Proof:
    return proof_of(_rows_kernel, "tensor", "tensor", stride, WIDTH=60, BLOCK=64, FAULT=fault)


def test_a_right_kernel_is_proved_for_every_grid() -> None:
    assert rows("") == Proof("_rows_kernel", Word.PROVED)


@pytest.mark.parametrize("fault", ["program forgotten", "mask off by one", "stride too small"])
def test_a_planted_race_is_found_with_an_example(fault: str) -> None:
    proof = rows(fault)
    assert proof.word is Word.RACE
    found = re.fullmatch(
        r"program \((\d+), 0, 0\) stores and program \((\d+), 0, 0\) stores byte (\d+) of out", proof.why
    )
    assert found
    first, second, byte = (int(number) for number in found.groups())
    step, width = (56, 60) if fault == "stride too small" else (60, 60 + (fault == "mask off by one"))
    of_program = (
        (range(width),) * 2 if "forgotten" in fault else [range(at * step, at * step + width) for at in (first, second)]
    )
    assert first != second
    assert all(byte // 4 in elements for elements in of_program)


def test_the_least_stride_is_found_and_an_example_with_a_smaller_one() -> None:
    proof = rows("stride unknown")
    assert (proof.word, proof.assumes) == (Word.PROVED, ("stride >= 60",))
    (stride,) = re.findall(r" with stride = (\d+)", proof.why)
    assert int(stride) < 60


def test_strides_of_two_axes_are_compared() -> None:
    proof = proof_of(_heads_kernel, "tensor", 700, 100, HEADS=6, DIM=64)
    assert proof.word is Word.PROVED
    assert len(proof.assumes) == 2
    assert proof.assumes[0] == "out_token >= 6 * out_head"


@pytest.mark.parametrize(("distance", "word"), [(0, Word.PROVED), (1, Word.RACE)])
def test_a_load_of_what_another_program_stores_is_a_race(distance: int, word: Word) -> None:
    proof = proof_of(_shift_kernel, "tensor", DISTANCE=distance, BLOCK=64)
    assert proof.word is word
    assert ("loads" in proof.why) == (word is Word.RACE)


@pytest.mark.parametrize(("step", "word"), [(64, Word.PROVED), (65, Word.RACE)])
def test_a_pointer_that_grows_in_a_loop_is_followed(step: int, word: Word) -> None:
    assert proof_of(_looping_kernel, "tensor", 12, STEP=step, BLOCK=64).word is word


@pytest.mark.parametrize(
    ("through", "expected"),
    [
        ("", Proof("_indirect_kernel", Word.PROVED)),
        ("condition", Proof("_indirect_kernel", Word.PROVED)),
        (
            "address",
            Proof("_indirect_kernel", Word.NOT_PROVED, why="the address depends on `table`, which is loaded"),
        ),
    ],
)
def test_an_address_that_is_loaded_is_neither_a_proof_nor_a_race(through: str, expected: Proof) -> None:
    assert proof_of(_indirect_kernel, "tensor", "tensor", BLOCK=64, THROUGH=through) == expected


@pytest.mark.parametrize(
    ("same", "atomic", "word"),
    [(True, False, Word.PROVED), (False, False, Word.RACE), (False, True, Word.PROVED)],
)
def test_the_same_number_and_atomics_are_no_race(same: bool, atomic: bool, word: Word) -> None:
    assert proof_of(_sum_kernel, "tensor", "tensor", BLOCK=64, SAME=same, ATOMIC=atomic).word is word


def test_blocks_are_dealt_to_any_number_of_programs() -> None:
    assert proof_of(_striding_kernel, "tensor", 1000, BLOCK=64) == Proof("_striding_kernel", Word.PROVED)


@pytest.mark.parametrize(("second", "word"), [(1, Word.PROVED), (2, Word.RACE)])
def test_two_stores_of_the_same_number_are_no_race(second: int, word: Word) -> None:
    assert proof_of(_flag_kernel, "tensor", 12, SECOND=second).word is word


def test_atomics_may_order_programs() -> None:
    expected = Proof("_counted_kernel", Word.NOT_PROVED, why="a condition depends on tt.atomic_rmw")
    assert proof_of(_counted_kernel, "tensor", "tensor") == expected


def test_what_is_no_ttir_is_not_proved() -> None:
    assert prove_apart("s_endpgm").word is Word.NOT_PROVED


def test_a_launch_with_one_program_along_an_axis_is_stated() -> None:
    with offline("gfx942"):
        compiled = _rows_kernel.warmup(
            *[torch.empty(64, dtype=torch.int32)] * 2, 100, WIDTH=60, BLOCK=64, FAULT="mask off by one", grid=(1,)
        )
    assert prove_apart(compiled.asm["ttir"], "x") == Proof("_rows_kernel", Word.PROVED, ("one program along x",))


TTIR = """\
module {{
  tt.func public @random(%out: !tt.ptr<i32>) attributes {{noinline = false}} {{
    %by_first = arith.constant {by_first} : i32
    %by_second = arith.constant {by_second} : i32
    %by_lane = arith.constant dense<{by_lane}> : tensor<4xi32>
    %divisor = arith.constant {divisor} : i32
    %limit = arith.constant dense<{limit}> : tensor<4xi32>
    %many = arith.constant 1000 : i32
    %x = tt.get_program_id x : i32
    %y = tt.get_program_id y : i32
    %quotient = arith.divsi %x, %divisor : i32
    %rest = arith.remsi %x, %divisor : i32
    %0 = arith.muli %{first}, %by_first : i32
    %1 = arith.muli %{second}, %by_second : i32
    %2 = arith.addi %0, %1 : i32
    %lane = tt.make_range {{end = 4 : i32, start = 0 : i32}} : tensor<4xi32>
    %3 = arith.muli %lane, %by_lane : tensor<4xi32>
    %4 = tt.splat %2 : i32 -> tensor<4xi32>
    %at = arith.addi %4, %3 : tensor<4xi32>
    %mask = arith.cmpi slt, %{masked}, %limit : tensor<4xi32>
    %5 = tt.splat %out : !tt.ptr<i32> -> tensor<4x!tt.ptr<i32>>
    %6 = tt.addptr %5, %at : tensor<4x!tt.ptr<i32>>, tensor<4xi32>
    %7 = arith.muli %y, %many : i32
    %8 = arith.addi %7, %x : i32
    %9 = tt.splat %8 : i32 -> tensor<4xi32>
    tt.store %6, %9, %mask : tensor<4x!tt.ptr<i32>>
    tt.return
  }}
}}
"""


@pytest.mark.parametrize("seed", range(30))
def test_a_random_kernel_is_proved_or_not_as_the_elements_of_its_programs_say(seed: int) -> None:
    rng = random.Random(seed)
    small = {name: rng.choice((1, 3, 4, 8, 12, 40)) for name in ("by_first", "by_second", "by_lane", "limit")}
    names = {name: rng.choice(("x", "y", "quotient", "rest")) for name in ("first", "second")}
    divisor, masked = rng.randint(1, 4), rng.choice(("at", "lane"))
    proof = prove_apart(TTIR.format(**small, **names, divisor=divisor, masked=masked))

    def stored(x: int, y: int) -> set[int]:
        values = {"x": x, "y": y, "quotient": x // divisor, "rest": x % divisor}
        first, second = values[names["first"]] * small["by_first"], values[names["second"]] * small["by_second"]
        places = [(lane, first + second + lane * small["by_lane"]) for lane in range(4)]
        return {at for lane, at in places if (at if masked == "at" else lane) < small["limit"]}

    if proof.word is Word.RACE:
        one, two, byte = re.findall(r"\((\d+), (\d+), 0\)|byte (\d+)", proof.why)
        assert one != two
        assert all(int(byte[2]) // 4 in stored(int(x), int(y)) for x, y, _ in (one, two))
        return
    assert proof.word is Word.PROVED
    most = {axis: int(size) for each in proof.assumes for axis, size in re.findall(r"along (.) <= (\d+)", each)}
    grid = itertools.product(range(min(12, most.get("x", 12))), range(min(12, most.get("y", 12))))
    elements = [at for x, y in grid for at in stored(x, y)]
    assert len(elements) == len(set(elements))

"""The check of running products finds its faults: in listings made by hand, and where the waits of a kernel go."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.tuning.tiles import ExtendTiles
from tests.amd.offline.candidate_kernels import extend_kernels
from tests.amd.offline.code_object import read_nvidia_code
from tests.amd.offline.matrix import Row
from tests.amd.offline.nvidia_code import code_of, machine_code
from tests.amd.offline.test_unwritten_registers import listing
from tests.amd.offline.warpgroup_products import touched_while_running

# Sums in R0 and R1, rows in R2 and R3; another one's in those that follow.
PRODUCT = "HGMMA.64x8x16.F32.BF16 R0, R2, gdesc[UR4], R0;R0 R1 R2 R3 UR4;R0 R1"
LAST_PRODUCT = PRODUCT.replace(", R0;", ", R0, gsb0;")
OTHER_PRODUCT = "HGMMA.64x8x16.F32.BF16 R4, R6, gdesc[UR4], R4, gsb0;R4 R5 R6 R7 UR4;R4 R5"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def touched(*lines: str) -> list[str]:
    (code,) = code_of(listing(*lines))
    return touched_while_running(code)


@pytest.mark.parametrize(
    "line",
    [
        "MOV R2, RZ;;R2",
        "@!P0 MOV R3, R4;P0 R4;R3",
        "FADD R4, R1, R5;R1 R5;R4",
        "FADD R0, R4, R5;R4 R5;R0",
        "STG.E desc[UR4][R4.64], R1;R1 R4 R5 UR4",
        # Sums over its rows; rows that are its sums; sums that overlap its sums.
        "HGMMA.64x8x16.F32.BF16 R2, gdesc[UR4], R2, gsb0;R2 R3 UR4;R2 R3",
        "HGMMA.64x8x16.F32.BF16 R4, R0, gdesc[UR4], R4, gsb0;R0 R1 R4 R5 UR4;R4 R5",
        "QGMMA.64x8x32.F32.E4M3.E4M3 R1, gdesc[UR4], R1, gsb0;R1 R2 UR4;R1 R2",
        # Not followed.
        "CALL.REL.NOINC `($f)",
        "BSYNC B0",
    ],
)
def test_what_touches_a_running_product_is_found(line: str) -> None:
    end = ("EXIT", "$f:", "RET.REL.NODEC R6 `(kernel)")
    assert touched(LAST_PRODUCT, line, WAIT, *end)
    assert not touched(LAST_PRODUCT, WAIT, line, WAIT, *end)
    assert not touched(line, WAIT, LAST_PRODUCT, WAIT, *end)


@pytest.mark.parametrize(
    "line",
    [
        LAST_PRODUCT,
        "HGMMA.64x8x16.F32.BF16 R0, R4, gdesc[UR4], R0;R0 R1 R4 R5 UR4;R0 R1",
        "FADD R4, R2, R3;R2 R3;R4",
        "STG.E desc[UR4][R4.64], R3;R3 R4 R5 UR4",
        "UMOV UR4, URZ;;UR4",
    ],
)
def test_what_does_not_is_not(line: str) -> None:
    assert not touched(LAST_PRODUCT, line, WAIT, "EXIT")


def test_a_wait_may_leave_products_running() -> None:
    left = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert not touched(LAST_PRODUCT, OTHER_PRODUCT, left, "MOV R2, R0;R0;R2", WAIT, "EXIT")
    assert len(touched(LAST_PRODUCT, OTHER_PRODUCT, left, "MOV R6, RZ;;R6", WAIT, "EXIT")) == 1
    # No wait ends a product that is in no commit yet.
    assert len(touched(PRODUCT, WAIT, "MOV R2, RZ;;R2", "EXIT")) == 1


def test_every_way_on_is_followed() -> None:
    loop = ".L_x_0:", "MOV R2, RZ;;R2", LAST_PRODUCT, "@P0 BRA `(.L_x_0);P0", WAIT, "EXIT"
    assert len(touched(*loop)) == 1
    assert not touched(*loop[:3], WAIT, *loop[3:])
    table = 'BRX R4 -0x3f0 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);R4'
    assert len(touched(table, ".L_x_0:", "EXIT", ".L_x_1:", LAST_PRODUCT, "MOV R2, RZ;;R2", "EXIT")) == 1


def test_a_kernel_has_waits_without_which_its_products_would_be_touched() -> None:
    tiles = ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, one_launch=True)
    kernel = extend_kernels(Row("sm_90", (32, 8), (64, 64), torch.bfloat16, 16), tiles)["_extend_kernel"]
    assert read_nvidia_code(kernel).touched == ()
    code = machine_code(kernel)
    waits = [each for each in code.steps if each.opcode.startswith("WARPGROUP.DEPBAR")]
    assert waits
    for wait in waits:
        steps = [replace(each, opcode="NOP", operands="") if each is wait else each for each in code.steps]
        assert touched_while_running(replace(code, steps=steps))

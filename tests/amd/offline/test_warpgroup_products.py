"""The check of running products finds its faults: in listings made by hand, and where the waits of a kernel go."""

import pytest
import torch

from rocm_attn.kernels.tuning.tiles import ExtendTiles
from tests.amd.offline.candidate_kernels import extend_kernels
from tests.amd.offline.code_object import machine_code, read_nvidia_code
from tests.amd.offline.matrix import Row
from tests.amd.offline.warpgroup_products import instructions, touched_while_running

# Sums in R24 to R55, rows in R180 to R183.
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R180, gdesc[UR12].tnspB, R24"
LAST_PRODUCT = f"{PRODUCT}, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def touched(*lines: str) -> list[str]:
    listing = "\n".join(f"  /*{16 * place:04x}*/   {line} ;   /* 0x0 */" for place, line in enumerate(lines))
    found = instructions(listing)
    assert len(found) == len(lines)
    return touched_while_running(found)


@pytest.mark.parametrize(
    "line",
    [
        "MOV R180, RZ",
        "@!P0 MOV R183, R2",
        "LDS.128 R180, [R2+UR5]",
        "LDG.E.64 R182, desc[UR4][R2.64]",
        "LDSM.16.M88.4 R180, [R2]",
        "IMAD.WIDE R182, R2, R3, R4",
        "ISETP.GT.AND P3, PT, R24, R4, PT",
        "FADD R2, R55, R4",
        "STG.E.128 desc[UR4][R2.64], R52",
        "STS [R55], R2",
        "LDG.E R2, desc[UR4][R54.64]",
        "FADD R24, R2, R4",
        "ATOMS.ADD R180, [R2], R4",
        "HMMA.16816.F32.BF16 R178, R2, R4, R8",
        "HMMA.16816.F32.BF16 R64, R2, R4, R54",
        "I2F.F64 R180, R2",
        # Sums over its rows; rows that are its sums; sums that overlap its sums.
        "HGMMA.64x64x16.F32.BF16 R160, gdesc[UR4], R160, gsb0",
        "HGMMA.64x64x16.F32.BF16 R64, R24, gdesc[UR4], R64, gsb0",
        "HGMMA.64x64x16.F32.BF16 R48, gdesc[UR4], R48, gsb0",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R64, R52, gdesc[UR4], R64, gsb0",
        # Not followed.
        "CALL.REL.NOINC 0x0",
        "BSYNC B0",
    ],
)
def test_what_touches_a_running_product_is_found(line: str) -> None:
    assert len(touched(LAST_PRODUCT, line, WAIT, "EXIT")) == 1
    assert not touched(LAST_PRODUCT, WAIT, line, "EXIT")
    assert not touched(line, WAIT, LAST_PRODUCT, WAIT, "EXIT")


@pytest.mark.parametrize(
    "line",
    [
        LAST_PRODUCT,
        "HGMMA.64x64x16.F32.BF16 R24, R184, gdesc[UR12].tnspB, R24",
        "FADD R2, R180, R183",
        "STG.E desc[UR4][R2.64], R183",
        "FADD R56, R23, R57",
        "MOV R184, R179",
        "UMOV UR24, URZ",
    ],
)
def test_what_does_not_is_not(line: str) -> None:
    assert not touched(LAST_PRODUCT, line, WAIT, "EXIT")


def test_a_wait_may_leave_products_running() -> None:
    other = "HGMMA.64x64x16.F32.BF16 R64, R184, gdesc[UR12].tnspB, R64, gsb0"
    left = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert not touched(LAST_PRODUCT, other, left, "MOV R180, R24", WAIT, "EXIT")
    assert len(touched(LAST_PRODUCT, other, left, "MOV R184, RZ", WAIT, "EXIT")) == 1
    # No wait ends a product that is in no commit yet.
    assert len(touched(PRODUCT, WAIT, "MOV R180, RZ", "EXIT")) == 1


def test_every_way_on_is_followed() -> None:
    loop = "MOV R180, RZ", LAST_PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT"
    assert len(touched(*loop)) == 1
    assert not touched(*loop[:2], WAIT, *loop[2:])
    assert len(touched("BRA 0x20", "EXIT", LAST_PRODUCT, "BRA.U UP0, 0x60", WAIT, "EXIT", "MOV R180, RZ", "EXIT")) == 1
    # After a jump by a table, whose targets the listing does not say.
    assert len(touched("BRX R2", LAST_PRODUCT, "MOV R180, RZ", "EXIT")) == 1
    assert not touched(LAST_PRODUCT, "EXIT", "MOV R180, RZ", "EXIT")


def test_a_kernel_has_waits_without_which_its_products_would_be_touched() -> None:
    tiles = ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, one_launch=True)
    kernel = extend_kernels(Row("sm_90", (32, 8), (64, 64), torch.bfloat16, 16), tiles)["_extend_kernel"]
    assert read_nvidia_code(kernel).touched == ()
    code = machine_code(kernel)
    waits = [each for each in code if each.opcode.startswith("WARPGROUP.DEPBAR")]
    assert waits
    for wait in waits:
        without = [each._replace(opcode="NOP", operands=()) if each is wait else each for each in code]
        assert touched_while_running(without)

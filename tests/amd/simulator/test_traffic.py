"""The work of a loop for the bytes that it loads, in loops whose figures follow by hand."""

import json
from pathlib import Path

import pytest

from rocm_attn.cli import DONE, main
from rocm_attn.errors import BadSetting
from rocm_lab.cycles.page import BY_WORDS, DECODES, waves_of_registers, with_aiter
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.simulator.assembly import parse_assembly
from tests.amd.simulator.test_wait_files import assembly_text

KIB = 1024
PRODUCT = "v_mfma_f32_16x16x32_bf16 v[0:3], v[64:67], v[68:71], v[0:3]"
# 16, 8 and 4 bytes of each of 64 lanes.
LOAD_16 = "buffer_load_dwordx4 v[64:67], v80, s[0:3], 0 offen"
LOAD_8 = "global_load_dwordx2 v[64:65], v[80:81], off"
LOAD_4 = "global_load_dword v90, v[80:81], off"
STORE_16 = "global_store_dwordx4 v[80:81], v[64:67], off"
INTO_LDS = "buffer_load_dword v80, s[0:3], 0 offen lds"
SCALAR = "s_load_dword s8, s[4:5], 0x0"


def text_of(*lines: str) -> str:
    """A kernel of one loop of these lines, with a branch back."""
    loop = [".LBB0_1:\n", *(f"\t{line}\n" for line in lines), "\ts_cbranch_scc1 .LBB0_1\n"]
    return assembly_text(*loop, arch="gfx950")


def traffic(*lines: str) -> LoopTraffic:
    found = loop_traffic(parse_assembly(text_of(*lines)))
    assert found is not None
    return found


def test_a_loop_of_known_figures() -> None:
    lines = [LOAD_16, LOAD_8, LOAD_4, SCALAR, "s_waitcnt vmcnt(0) lgkmcnt(0)", PRODUCT, PRODUCT]
    lines += ["ds_write_b64 v0, v[2:3]", "s_waitcnt lgkmcnt(0)", "s_barrier", "ds_read2_b32 v[2:3], v0 offset1:4"]
    found = traffic(*lines)
    assert found == LoopTraffic(
        # 16 and 8 bytes of 64 lanes; a page number of 4 bytes is none of K.
        kv_bytes=1536,
        # The lines and the branch.
        instructions=len(lines) + 1,
        matrix=2,
        waits=2,
        barriers=1,
        # 8 bytes of 64 lanes each.
        lds_bytes=2 * 512,
        in_flight=1536,
    )
    assert found.of_kib(found.matrix) == pytest.approx(2 / 1.5)


def test_figures_of_a_byte_do_not_depend_on_how_often_a_loop_is_unrolled() -> None:
    lines = (LOAD_16, LOAD_16, "s_waitcnt vmcnt(2)", PRODUCT, "ds_bpermute_b32 v2, v3, v4", "s_barrier")
    once, twice = traffic(*lines), traffic(*lines, *lines)
    for number in ("matrix", "waits", "barriers", "lds_bytes"):
        assert once.of_kib(getattr(once, number)) == twice.of_kib(getattr(twice, number))
    assert once.in_flight == twice.in_flight == 4 * KIB


@pytest.mark.parametrize(("left", "most"), [(0, 2), (1, 3), (2, 4)])
def test_loads_of_one_iteration_are_in_flight_in_the_next(left: int, most: int) -> None:
    assert traffic(LOAD_16, LOAD_16, f"s_waitcnt vmcnt({left})", PRODUCT).in_flight == most * KIB


def test_loads_on_both_sides_of_a_wait_are_never_in_flight_together() -> None:
    found = traffic(LOAD_16, LOAD_16, "s_waitcnt vmcnt(0)", PRODUCT, LOAD_16, "s_waitcnt vmcnt(0)")
    assert (found.kv_bytes, found.in_flight) == (3 * KIB, 2 * KIB)


def test_a_wait_for_lds_and_one_for_nothing_leave_loads_in_flight() -> None:
    assert traffic(LOAD_16, "s_waitcnt lgkmcnt(0)", LOAD_16, PRODUCT, "s_waitcnt vmcnt(0)").in_flight == 2 * KIB


def test_stores_and_narrow_loads_count_as_operations_and_not_as_bytes() -> None:
    found = traffic(LOAD_16, STORE_16, LOAD_4, "s_waitcnt vmcnt(2)", LOAD_16, "s_waitcnt vmcnt(0)", PRODUCT)
    assert (found.kv_bytes, found.in_flight) == (2 * KIB, KIB)


def test_a_full_counter_waits_for_the_oldest_load() -> None:
    assert traffic(*[LOAD_16] * 70, PRODUCT).in_flight == 63 * KIB


def test_loads_into_lds_are_bytes_of_lds_too() -> None:
    found = traffic(INTO_LDS, "s_waitcnt vmcnt(0)", PRODUCT)
    assert (found.kv_bytes, found.lds_bytes) == (256, 256)


def test_a_loop_that_loads_page_numbers_alone_has_no_figures() -> None:
    assert loop_traffic(parse_assembly(text_of(LOAD_4, PRODUCT))) is None
    assert loop_traffic(parse_assembly(text_of(LOAD_16))) is None, "no matrix instructions"


def test_a_kernel_that_loads_keys_by_words_has_figures_if_that_is_said() -> None:
    found = loop_traffic(parse_assembly(text_of(LOAD_4, LOAD_16, "s_waitcnt vmcnt(1)", PRODUCT)), narrowest=4)
    assert found is not None
    assert (found.kv_bytes, found.in_flight) == (KIB + 256, 2 * KIB + 256)


def test_the_command_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.s").write_text(text_of(LOAD_16, LOAD_16, "s_waitcnt vmcnt(1)", PRODUCT, "ds_read_b32 v2, v3"))
    assert main(["cycles", str(tmp_path)]) == DONE
    assert capsys.readouterr().out.endswith(
        "; for a KiB that a wave loads 3.0 instructions, 0.5 of them matrix ones, 0.50 waits, 0.00 barriers and 128 "
        "bytes of LDS; up to 3,072 bytes of a wave in flight\n"
    )
    assert main(["cycles", str(tmp_path), "--json"]) == DONE
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["traffic"]["kv_bytes"] == 2 * KIB


@pytest.mark.parametrize(
    ("lines", "waves"),
    [
        # Highest registers, rounded up to eights: 72; 128; 256 and 8 of both kinds; 256 of each.
        (["v_mov_b32 v70, 0"], 7),
        (["v_mov_b32 v127, 0"], 4),
        (["v_mov_b32 v255, 0", "v_accvgpr_write_b32 a3, v0"], 1),
        (["global_load_dwordx4 a[252:255], v[254:255], off"], 1),
        (["v_mov_b32 v3, 0"], 8),
        (["v_mov_b32 v127, 0", "a744:", "s_cbranch_scc1 a744"], 4),
    ],
)
def test_waves_are_those_for_which_there_are_registers(lines: list[str], waves: int) -> None:
    assert waves_of_registers(parse_assembly(assembly_text(*(f"\t{line}\n" for line in lines), arch="gfx950"))) == waves


def test_the_table_of_aiter_is_written_whole(tmp_path: Path) -> None:
    files = [tmp_path / arch / f"{name}.co" for arch, names in DECODES.items() for name in names]
    for arch, names in DECODES.items():
        for name in names:
            file = tmp_path / arch / f"{name}.co"
            file.parent.mkdir(parents=True, exist_ok=True)
            loads = [LOAD_4] * 8 if name in BY_WORDS else [LOAD_16] * 2
            text = text_of(*loads, f"s_waitcnt vmcnt({len(loads) // 2})", PRODUCT).replace("gfx950", arch)
            file.write_text(text.replace("16x16x32", "16x16x16") if arch == "gfx942" else text)
    page = "before\n<!-- aiter -->\n| file |\n|---|\n| old |\n<!-- end of aiter -->\nafter\n"
    written = with_aiter(page, tmp_path)
    assert with_aiter(written, tmp_path) == written
    assert "old" not in written
    for instructions, of_them in ((5.5, len(BY_WORDS)), (2.5, len(files) - len(BY_WORDS))):
        assert written.count(f".co` | {instructions:.2f} | 0.50 | 0.50 | 0.00 | 0 | 3 | 5 | 15 |") == of_them
    files[0].unlink()
    with pytest.raises(BadSetting, match="does not exist"):
        with_aiter(page, tmp_path)

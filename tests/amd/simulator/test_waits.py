"""The static check of waits: every rule in assembly by hand, right and wrong, and the mechanisms of public bugs."""

from dataclasses import dataclass

import numpy as np
import pytest
from triton._C.libtriton import amd, llvm

from rocm_lab.simulator.assembly import Assembly, Instruction, parse_instruction
from rocm_lab.simulator.core import POISON
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.isa import matrix
from rocm_lab.simulator.lds import Lds
from rocm_lab.waits import flow
from rocm_lab.waits.check import Verdict, Word, check_waits
from rocm_lab.waits.hazards import ROWS, Facts, Hazard

CDNA3, CDNA4 = "gfx942", "gfx950"


def assembly_of(code: str) -> Assembly:
    """A kernel of these lines, which ends after them; "name:" is a label."""
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for line in [*(line.strip() for line in code.strip().splitlines()), "s_endpgm"]:
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line:
            instructions.append(parse_instruction(line))
    return Assembly("kernel", tuple(instructions), labels, {}, ())


def verdict_of(code: str, arch: str = CDNA3) -> Verdict:
    """The check's verdict on these lines."""
    return check_waits(assembly_of(code), arch)


@dataclass(frozen=True, slots=True)
class Rule:
    """Code that needs a line, and that line.

    code:   with WAIT where the line belongs
    wait:   the least that proves it
    less:   a line that is weaker by one
    begins, uses: how the two instructions of the fault begin
    """

    code: str
    wait: str
    less: str
    begins: str
    uses: str
    archs: tuple[str, ...] = (CDNA3, CDNA4)

    def with_line(self, line: str) -> str:
        """The code with a line in the place."""
        return self.code.replace("WAIT", line)


def _nops(states: int) -> str:
    """That many wait states; none is a line that does nothing."""
    lines = []
    while states:
        lines.append(f"s_nop {min(states, 8) - 1}")
        states -= min(states, 8)
    return "\n".join(lines)


def _matrix(code: str, states: int, begins: str, uses: str, *archs: str) -> Rule:
    return Rule(code, _nops(states), _nops(states - 1), begins, uses, archs or (CDNA3, CDNA4))


# Waits for memory.
MEMORY = {
    "a register that is loaded is read": Rule(
        "global_load_dword v1, v0, s[0:1]\nWAIT\nv_add_u32_e32 v2, v1, v1",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "global_load", "v_add",
    ),
    "a register that is loaded is overwritten": Rule(
        "buffer_load_dword v1, v0, s[0:3], 0 offen\nWAIT\nv_mov_b32_e32 v1, 0",
        "s_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)", "buffer_load", "v_mov",
    ),
    "the first of two loads is read": Rule(
        "global_load_dword v1, v0, s[0:1]\nglobal_load_dword v2, v0, s[0:1]\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(2)", "global_load_dword v1", "v_mov",
    ),
    "stores count too": Rule(
        "global_load_dword v1, v0, s[0:1]\nglobal_store_dword v0, v2, s[0:1]\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(2)", "global_load", "v_mov",
    ),
    "the last register of a wide load is an address": Rule(
        "global_load_dwordx4 v[4:7], v0, s[0:1]\nWAIT\nglobal_load_dword v1, v7, s[0:1]",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "global_load_dwordx4", "global_load_dword v1",
    ),
    "a half that a load leaves as it is": Rule(
        "global_load_dword v1, v0, s[0:1]\nWAIT\nglobal_load_short_d16_hi v1, v0, s[0:1]",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "global_load_dword", "global_load_short_d16_hi",
    ),
    "data that is stored": Rule(
        "global_load_dword v1, v0, s[0:1]\nWAIT\nds_write_b32 v0, v1",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "global_load", "ds_write",
    ),
    "a value that an atomic returns": Rule(
        "global_atomic_add v1, v0, v2, s[0:1] sc0\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "global_atomic", "v_mov",
    ),
    "a value that a compare-and-swap returns": Rule(
        "buffer_atomic_cmpswap v[2:3], v0, s[0:3], 0 offen sc0\nv_mov_b32_e32 v4, v3\nWAIT\nv_mov_b32_e32 v4, v2",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "buffer_atomic", "v_mov_b32_e32 v4, v2",
    ),
    "a register that is read from LDS is a matrix operand": Rule(
        "ds_read_b64 v[2:3], v0\nds_read_b64 v[4:5], v0\nWAIT\nv_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[2:3], 0",
        "s_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(2)", "ds_read_b64 v[2:3]", "v_mfma",
    ),
    "an accumulation register that is loaded": Rule(
        "buffer_load_dword a1, v0, s[0:3], 0 offen\nWAIT\nv_accvgpr_read_b32 v1, a1",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "buffer_load", "v_accvgpr_read",
    ),
    "LDS operations are in order though scalar loads are pending": Rule(
        "ds_read_b32 v1, v0\ns_load_dword s4, s[0:1], 0x0\nds_read_b32 v2, v0\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(2)", "ds_read_b32 v1", "v_mov",
    ),
    "scalar loads are in no order": Rule(
        "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\nWAIT\ns_add_i32 s6, s4, 1",
        "s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(1)", "s_load_dword s4", "s_add",
    ),
    "VCC is loaded": Rule(
        "s_load_dwordx2 vcc, s[0:1], 0x0\nWAIT\ns_cbranch_vccz end\nv_mov_b32_e32 v1, 0\nend:",
        "s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(1)", "s_load", "s_cbranch",
    ),
    "a permuted value": Rule(
        "ds_permute_b32 v1, v0, v2\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)", "ds_permute", "v_mov",
    ),
    "a gathered value": Rule(
        "ds_bpermute_b32 v1, v0, v2\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)", "ds_bpermute", "v_mov",
    ),
    "LDS before the barrier that shows it": Rule(
        "ds_write_b32 v0, v1\nWAIT\ns_barrier\nds_read_b32 v2, v0",
        "s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(1)", "ds_write", "s_barrier",
    ),
    "a count as a number": Rule(
        "global_load_dword v1, v0, s[0:1]\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt 0xf70", "s_waitcnt 0xf71", "global_load", "v_mov",
    ),
    "private memory": Rule(
        "scratch_load_dword v1, off, off offset:4\nWAIT\nv_mov_b32_e32 v3, v1",
        "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "scratch_load", "v_mov",
    ),
}  # fmt: skip

_SMALL = "v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], v[8:11]"
_LARGE = "v_mfma_f32_32x32x8_f16 v[16:31], v[0:1], v[2:3], v[16:31]"
_SINGLE = "v_mfma_f32_16x16x4_f32 v[8:11], v0, v1, v[8:11]"
# Wait states, as the tables of the two ISA documents have them: 4 passes 7 or 8, 8 passes 11 or 12, SGEMM 8 passes 10.
HAZARDS = {
    "matrix, vector, 4 passes": _matrix(f"{_SMALL}\nWAIT\nv_mov_b32_e32 v4, v11", 7, "v_mfma", "v_mov", CDNA3),
    "matrix, 4 passes of CDNA 4": _matrix(f"{_SMALL}\nWAIT\nv_mov_b32_e32 v4, v11", 8, "v_mfma", "v_mov", CDNA4),
    "matrix, vector, 8 passes": _matrix(f"{_LARGE}\nWAIT\nv_mov_b32_e32 v4, v16", 11, "v_mfma", "v_mov", CDNA3),
    "matrix, 8 passes of CDNA 4": _matrix(f"{_LARGE}\nWAIT\nv_mov_b32_e32 v4, v16", 12, "v_mfma", "v_mov", CDNA4),
    "matrix of float32": _matrix(f"{_SINGLE}\nWAIT\nv_mov_b32_e32 v4, v8", 10, "v_mfma", "v_mov"),
    "matrix, 16 passes": _matrix(
        "v_mfma_f32_32x32x2_f32 v[16:31], v0, v1, 0\nWAIT\nv_mov_b32_e32 v4, v31", 18, "v_mfma", "v_mov"
    ),
    "matrix, double depth of CDNA 4": _matrix(
        "v_mfma_f32_16x16x32_bf16 v[8:11], v[0:3], v[4:7], 0\nWAIT\nv_mov_b32_e32 v4, v8", 8, "v_mfma", "v_mov", CDNA4
    ),
    "matrix of FP8": _matrix(
        "v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[0:1], v[2:3], 0\nWAIT\nv_mov_b32_e32 v4, v16",
        11, "v_mfma", "v_mov", CDNA3,
    ),
    "matrix of FP8 of CDNA 4": _matrix(
        "v_mfma_f32_16x16x128_f8f6f4 v[16:19], v[0:7], v[8:15], 0\nWAIT\nv_mov_b32_e32 v4, v16",
        12, "v_mfma", "v_mov", CDNA4,
    ),
    "matrix, vector write": _matrix(f"{_SMALL}\nWAIT\nv_mov_b32_e32 v8, 0", 7, "v_mfma", "v_mov", CDNA3),
    "matrix, store": _matrix(f"{_SMALL}\nWAIT\nglobal_store_dword v0, v8, s[0:1]", 7, "v_mfma", "global_store", CDNA3),
    "matrix, LDS": _matrix(f"{_SMALL}\nWAIT\nds_write_b32 v0, v8", 8, "v_mfma", "ds_write", CDNA4),
    "matrix, source A": _matrix(
        f"{_SMALL}\nWAIT\nv_mfma_f32_16x16x16_f16 v[4:7], v[8:9], v[2:3], 0", 7, "v_mfma", "v_mfma", CDNA3
    ),
    "matrix, source B": _matrix(
        f"{_SMALL}\nWAIT\nv_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[10:11], 0", 8, "v_mfma", "v_mfma", CDNA4
    ),
    "matrix, a part of source C": _matrix(
        f"{_SMALL}\nWAIT\nv_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], v[10:13]", 5, "v_mfma", "v_mfma", CDNA3
    ),
    "matrix, a part of source C of CDNA 4": _matrix(
        f"{_SMALL}\nWAIT\nv_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], v[10:13]", 6, "v_mfma", "v_mfma", CDNA4
    ),
    "source C overwritten": _matrix(
        "v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], v[4:7]\nWAIT\nv_mov_b32_e32 v4, 0", 3, "v_mfma", "v_mov"
    ),
    "vector, matrix": _matrix(f"v_mov_b32_e32 v1, 0\nWAIT\n{_SMALL}", 2, "v_mov", "v_mfma"),
    "vector, DPP": _matrix("v_mov_b32_e32 v1, 0\nWAIT\nv_mov_b32_dpp v2, v1 row_shr:1 row_mask:0xf bank_mask:0xf",
                           2, "v_mov_b32_e32", "v_mov_b32_dpp"),
    "vector, lane": _matrix("v_mov_b32_e32 v1, 0\nWAIT\nv_readlane_b32 s4, v1, 3", 1, "v_mov", "v_readlane"),
    "vector, first lane": _matrix("v_mov_b32_e32 v1, 0\nWAIT\nv_readfirstlane_b32 s4, v1", 1, "v_mov", "v_readfirst"),
    "vector, swapped lanes": _matrix(
        "v_mov_b32_e32 v1, 0\nWAIT\nv_permlane32_swap_b32_e32 v1, v2", 2, "v_mov", "v_permlane", CDNA4
    ),
    "mask, number": _matrix("v_cmp_gt_i32_e32 vcc, 3, v1\nWAIT\nv_add_u32_e32 v2, vcc_lo, v3", 2, "v_cmp", "v_add"),
    "scalar, vector": _matrix("v_readfirstlane_b32 s4, v1\nWAIT\nv_add_u32_e32 v2, s4, v3", 2, "v_readfirst", "v_add"),
    "scalar, memory": _matrix("v_readfirstlane_b32 s4, v1\nWAIT\nglobal_load_dword v2, v3, s[4:5]",
                              5, "v_readfirst", "global_load"),
    "scalar, number of a lane": _matrix("v_readfirstlane_b32 s4, v1\nWAIT\nv_readlane_b32 s5, v2, s4",
                                        4, "v_readfirst", "v_readlane"),
    "VCC, division": _matrix("v_cmp_gt_i32_e32 vcc, 3, v1\nWAIT\nv_div_fmas_f32 v2, v3, v4, v5", 4, "v_cmp", "v_div"),
    "EXEC, matrix": _matrix(f"v_cmpx_gt_i32_e32 vcc, 3, v30\nWAIT\n{_SMALL}", 4, "v_cmpx", "v_mfma"),
    "EXEC, DPP": _matrix(
        "v_cmpx_gt_i32_e32 vcc, 3, v30\nWAIT\nv_mov_b32_dpp v2, v1 row_shr:1 row_mask:0xf bank_mask:0xf",
        5, "v_cmpx", "v_mov"
    ),
    "EXEC, lane": _matrix("v_cmpx_gt_i32_e32 vcc, 3, v30\nWAIT\nv_readlane_b32 s4, v1, 3", 4, "v_cmpx", "v_readlane"),
    "transcendental, other": _matrix("v_exp_f32_e32 v1, v2\nWAIT\nv_add_f32_e32 v3, v1, v2", 1, "v_exp", "v_add"),
    "part of a register": _matrix(
        "v_add_u32_sdwa v1, v2, v3 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD\n"
        "WAIT\nv_mov_b32_e32 v4, v1", 1, "v_add", "v_mov"
    ),
    "matrix of bytes": _matrix(
        "v_mfma_i32_32x32x16_i8 v[16:31], v[0:1], v[2:3], 0\nWAIT\nv_mov_b32_e32 v4, v16", 11, "v_mfma", "v_mov", CDNA3
    ),
    "matrix of BF8 of CDNA 4": _matrix(
        "v_mfma_f32_16x16x128_f8f6f4 v[16:19], v[0:7], v[8:15], 0 cbsz:1 blgp:1\nWAIT\nv_mov_b32_e32 v4, v16",
        12, "v_mfma", "v_mov", CDNA4,
    ),
    "data of a wide compare-and-swap": _matrix(
        "global_atomic_cmpswap_x2 v0, v[4:7], s[0:1]\nWAIT\nv_mov_b32_e32 v7, 0", 2, "global_atomic", "v_mov"
    ),
    "data of a wide store": _matrix(
        "global_store_dwordx4 v0, v[4:7], s[0:1]\nWAIT\nv_mov_b32_e32 v7, 0", 2, "global_store", "v_mov"
    ),
    "data of a wide store to a buffer": _matrix(
        "buffer_store_dwordx3 v[4:6], v0, s[0:3], 0 offen\nWAIT\nv_mov_b32_e32 v4, 0", 2, "buffer_store", "v_mov"
    ),
    "data of a wide store with a register as offset": _matrix(
        "buffer_store_dwordx4 v[4:7], v0, s[0:3], s4 offen\nWAIT\nv_mov_b32_e32 v4, 0", 1, "buffer_store", "v_mov"
    ),
    "place of a load into LDS": _matrix(
        "s_mov_b32 m0, s4\nWAIT\nglobal_load_lds_dword v0, s[0:1]", 1, "s_mov", "global_load"
    ),
    "mode": _matrix(
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nWAIT\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0",
        2, "s_setreg", "s_setreg"
    ),
}  # fmt: skip

CASES = [
    pytest.param(rule, arch, id=f"{name}-{arch}")
    for name, rule in (MEMORY | HAZARDS).items()
    for arch in rule.archs
]  # fmt: skip


@pytest.mark.parametrize(("rule", "arch"), CASES)
def test_a_use_is_proved_with_the_least_wait_and_a_fault_with_less(rule: Rule, arch: str) -> None:
    assert verdict_of(rule.with_line(rule.wait), arch) == Verdict("kernel", (), ())
    for line in (rule.less, ""):
        found = verdict_of(rule.with_line(line), arch)
        assert found.word is Word.FAULT
        assert any(fault.begins.startswith(rule.begins) and fault.uses.startswith(rule.uses) for fault in found.faults)


@pytest.mark.parametrize(("rule", "arch"), CASES)
def test_the_assembler_accepts_every_line(rule: Rule, arch: str) -> None:
    """Triton's, which is LLVM's: registers have the widths that the check reads off them."""
    llvm.init_targets()
    for line in (rule.wait, rule.less):
        assert amd.assemble_amdgcn(f"{rule.with_line(line)}\ns_endpgm\n", "amdgcn-amd-amdhsa", arch, "")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_every_row_of_the_table_of_hazards_is_needed_by_a_rule(row: Hazard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "ROWS", tuple(each for each in ROWS if each is not row))
    assert any(verdict_of(rule.with_line(rule.less), rule.archs[0]).word is Word.PROVED for rule in HAZARDS.values())


RIGHT = {
    "loads of memory write a register in order": "global_load_dword v1, v0, s[0:1]\nglobal_load_dword v1, v0, s[0:1]",
    "a store's data may be overwritten": "global_store_dword v0, v1, s[0:1]\nv_mov_b32_e32 v1, 0",
    "a load's address may be overwritten": "global_load_dword v1, v0, s[0:1]\nv_mov_b32_e32 v0, 0",
    "63 later operations prove a load": "global_load_dword v1, v0, s[0:1]\n"
    + "global_store_dword v0, v2, s[0:1]\n" * 63
    + "v_mov_b32_e32 v3, v1",
    "15 later operations of LDS prove one": "ds_read_b32 v1, v0\n"
    + "ds_write_b32 v0, v2\n" * 15
    + "v_mov_b32_e32 v3, v1",
    "a chain of products in the same registers": f"{_SMALL}\n{_SMALL}\n{_SMALL}",
    "a scalar value is forwarded": "s_mov_b32 s4, 0\nv_add_u32_e32 v1, s4, v2",
    "a carry is forwarded": "v_add_co_u32_e32 v1, vcc, v2, v3\nv_addc_co_u32_e32 v4, vcc, v5, v6, vcc",
    "a choice of lanes is forwarded": "v_cmp_gt_i32_e64 s[4:5], 3, v1\nv_cndmask_b32_e64 v2, v3, v4, s[4:5]",
    "transcendentals follow each other": "v_exp_f32_e32 v1, v2\nv_rcp_f32_e32 v3, v1",
    "M0 is the place of a buffer's load into LDS": "s_add_u32 m0, s4, 64\nbuffer_load_dword v0, s[0:3], 0 offen lds",
    "the wave reads LDS that it wrote": "ds_write_b32 v0, v1\nds_read_b32 v2, v0\ns_waitcnt lgkmcnt(0)",
    "code that nothing leads to": "s_branch end\nv_unknown v1\nend:",
}
WRONG = {
    "a swap reads both of its registers": "global_load_dword v1, v0, s[0:1]\nv_swap_b32 v2, v1",
    "62 later operations prove nothing": "global_load_dword v1, v0, s[0:1]\n"
    + "global_store_dword v0, v2, s[0:1]\n" * 62
    + "v_mov_b32_e32 v3, v1",
    "the largest count waits for nothing": "ds_read_b32 v1, v0\n" + "ds_write_b32 v0, v2\n" * 14
    + "s_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)\nv_mov_b32_e32 v3, v1",
    "loads of LDS and of memory have no order": "ds_read_b32 v1, v0\nglobal_load_dword v1, v0, s[0:1]",
    "scalar loads do not fill the counter in order": "s_load_dword s4, s[0:1], 0x0\n"
    + "ds_write_b32 v0, v2\n" * 20 + "s_mov_b32 s5, s4",
    "one of two paths": "global_load_dword v1, v0, s[0:1]\ns_cbranch_scc1 late\ns_waitcnt vmcnt(0)\nlate:\n"
    "v_mov_b32_e32 v2, v1",
    "the next round of a loop":
    "loop:\nv_add_u32_e32 v2, v1, v2\nglobal_load_dword v1, v0, s[0:1]\ns_cbranch_scc1 loop",
    "fewer operations on one path": "global_load_dword v1, v0, s[0:1]\ns_cbranch_scc1 few\n"
    "global_load_dword v2, v0, s[0:1]\nfew:\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v3, v1",
    "a hazard across a branch": f"{_SMALL}\ns_cbranch_scc1 used\ns_nop 7\nused:\nv_mov_b32_e32 v1, v8",
}  # fmt: skip


@pytest.mark.parametrize("code", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("arch", [CDNA3, CDNA4])
def test_what_hardware_resolves_is_proved(code: str, arch: str) -> None:
    assert verdict_of(code, arch) == Verdict("kernel", (), ())


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("arch", [CDNA3, CDNA4])
def test_what_only_one_path_or_a_full_counter_shows_is_a_fault(code: str, arch: str) -> None:
    assert verdict_of(code, arch).word is Word.FAULT


def test_a_fault_has_its_path() -> None:
    (fault,) = verdict_of("begin:\n" + WRONG["one of two paths"]).faults
    assert fault.path == ("begin", "late")
    assert fault.why == "v1 is not waited for"
    (hazard,) = verdict_of("begin:\n" + WRONG["a hazard across a branch"]).faults
    assert hazard.path == ("begin", "used")
    assert hazard.why == "a matrix result is used before it is written: v8 needs 6 more wait states"
    (round_fault,) = verdict_of(WRONG["the next round of a loop"]).faults
    assert round_fault.path == ("loop", "loop")


UNREADABLE = {
    "v_dot2_f32_f16 v1, v2, v3, v4": "v_dot2_f32_f16",
    "s_setpc_b64 s[4:5]": "s_setpc_b64",
    "s_branch elsewhere": "the target",
    "v_mov_b32_e32 v1, ttmp4": "ttmp4",
    "s_mov_b32": "the operands of 's_mov_b32'",
    "s_waitcnt lgkmc": "the counts of 's_waitcnt lgkmc'",
    "s_waitcnt": "the counts of 's_waitcnt'",
    "v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], 0\ns_nop\nv_accvgpr_read_b32 v9, a0": "the number '' of 's_nop'",
    "s_branch": "the target of 's_branch'",
    "v_mfma_f32_16x16x16_f16 a[0:3]": "the operands of 'v_mfma_f32_16x16x16_f16",
}


@pytest.mark.parametrize(("code", "reason"), UNREADABLE.items(), ids=UNREADABLE)
def test_what_cannot_be_read_is_not_checked_and_said(code: str, reason: str) -> None:
    found = verdict_of(code)
    assert found.word is Word.NOT_CHECKED
    assert reason in found.reasons[0]


def test_every_matrix_instruction_of_the_simulator_has_passes() -> None:
    for name in matrix.BUILDERS:
        assert Facts.of(parse_instruction(f"{name} v[0:15], v[16:17], v[18:19], 0"), CDNA4).passes in (4, 8, 16)


_INTO_LDS = "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds"
LOADS_INTO_LDS = {
    "waited for before the barrier": (f"{_INTO_LDS}\ns_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v1, v2", Word.PROVED),
    "not waited for": (f"{_INTO_LDS}\ns_barrier\nds_read_b32 v1, v2", Word.NOT_CHECKED),
    "waited for after the barrier": (
        f"{_INTO_LDS}\ns_barrier\ns_waitcnt vmcnt(0)\nds_read_b32 v1, v2", Word.NOT_CHECKED),
    "waited for between two barriers": (
        f"{_INTO_LDS}\ns_barrier\ns_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v1, v2", Word.PROVED),
    "the newest of two": (
        f"{_INTO_LDS}\n{_INTO_LDS}\ns_waitcnt vmcnt(1)\ns_barrier\nds_read_b32 v1, v2", Word.NOT_CHECKED),
    "another place": (f"{_INTO_LDS}\ns_barrier\nds_read_b32 v1, v2 offset:256", Word.PROVED),
    "the last byte": (f"{_INTO_LDS}\ns_barrier\nds_read_b32 v1, v2 offset:255", Word.NOT_CHECKED),
    "another place by a wave's number": (
        "s_bfe_u32 s4, s5, 0x20006\ns_mul_i32 s4, s4, 0x100\ns_mov_b32 m0, s4\ns_nop 0\n"
        "buffer_load_dword v0, s[0:3], 0 offen lds\ns_barrier\nds_read_b32 v1, v2 offset:1024", Word.PROVED),
    "a place that is not known": (
        "s_mov_b32 m0, s4\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds\ns_barrier\n"
        "ds_read_b32 v1, v2 offset:1024", Word.NOT_CHECKED),
    "the last word of what a lane's number and a table of bits can name": (
        "v_and_b32_e32 v1, 3, v0\nv_lshlrev_b32_e32 v2, 6, v1\nv_and_b32_e32 v3, 48, v0\n"
        f"v_bitop3_b32 v2, v2, v3, 12 bitop3:0x36\n{_INTO_LDS} offset:256\ns_barrier\nds_read_b32 v1, v2", Word.PROVED),
    "a byte more": (
        "v_and_b32_e32 v1, 3, v0\nv_lshlrev_b32_e32 v2, 6, v1\nv_and_b32_e32 v3, 48, v0\n"
        f"v_bitop3_b32 v2, v2, v3, 12 bitop3:0x36\n{_INTO_LDS} offset:256\ns_barrier\nds_read_b32 v1, v2 offset:1",
        Word.NOT_CHECKED),
    "of one wave, which needs no barrier": (f"{_INTO_LDS}\ns_waitcnt vmcnt(0)\nds_read_b32 v1, v2", Word.PROVED),
    "of one wave, not waited for": (f"{_INTO_LDS}\nds_read_b32 v1, v2", Word.NOT_CHECKED),
    "an address of the lanes that are active": (
        f"s_and_saveexec_b64 s[10:11], s[12:13]\nv_mov_b32_e32 v2, 0x400\n{_INTO_LDS}\ns_barrier\nds_read_b32 v1, v2",
        Word.PROVED,
    ),
    "an address that other lanes do not have": (
        f"s_and_saveexec_b64 s[10:11], s[12:13]\nv_mov_b32_e32 v2, 0x400\ns_or_b64 exec, exec, s[10:11]\n{_INTO_LDS}\n"
        "s_barrier\nds_read_b32 v1, v2",
        Word.NOT_CHECKED,
    ),
    "an address that all lanes have again": (
        f"s_and_saveexec_b64 s[10:11], s[12:13]\nv_mov_b32_e32 v3, 0\ns_or_b64 exec, exec, s[10:11]\n"
        f"v_mov_b32_e32 v2, 0x400\n{_INTO_LDS}\ns_barrier\nds_read_b32 v1, v2",
        Word.PROVED,
    ),
    "two buffers in turn": (
        "s_mov_b32 s4, 0\nloop:\ns_add_i32 s5, s4, 1\ns_cmp_lt_i32 s5, 2\ns_cselect_b32 s4, s5, 0\n"
        "s_lshl_b32 s6, s4, 8\ns_mov_b32 m0, s6\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds\ns_barrier\n"
        "ds_read_b32 v1, v2 offset:512\ns_waitcnt lgkmcnt(0)\ns_cmp_lg_u32 s7, 0\ns_cbranch_scc1 loop", Word.PROVED),
}  # fmt: skip


@pytest.mark.parametrize(("code", "word"), LOADS_INTO_LDS.values(), ids=LOADS_INTO_LDS)
def test_a_load_into_lds_is_waited_for_before_the_barrier_that_shows_it(code: str, word: Word) -> None:
    assert verdict_of(code, CDNA4).word is word


def test_reads_that_may_follow_one_load_into_lds_are_one_reason() -> None:
    """AITER's assembly has hundreds of reads after dozens of loads, and each reason has a path."""
    reads = "\n".join(f"ds_read_b32 v{register}, v2" for register in (4, 5, 6))
    assert len(verdict_of(f"{_INTO_LDS}\ns_barrier\n{reads}", CDNA4).reasons) == 1


_PRODUCT = "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]"


@dataclass(frozen=True, slots=True)
class PublicBug:
    """A bug: code with WAIT, the line that was there, and the line that should have been."""

    code: str
    was: str
    should_be: str
    word: Word = Word.FAULT


BUGS = {
    # hipBLASLt's generator: the reads before the main loop were drained at the end of a round, and not on its entry.
    "ROCm/rocm-libraries#11174": PublicBug(
        f"ds_read_b64 v[2:3], v0\nds_read_b64 v[4:5], v0\nWAIT\nloop:\n{_PRODUCT}\nds_read_b64 v[2:3], v0\n"
        "ds_read_b64 v[4:5], v0\ns_waitcnt lgkmcnt(0)\ns_cbranch_scc1 loop",
        "s_nop 0",
        "s_waitcnt lgkmcnt(0)",
    ),
    # A wait for all but four reads, of which only three were later.
    "ROCm/rocm-libraries#3635": PublicBug(
        "ds_read_b64 v[2:3], v0\nds_read_b64 v[12:13], v0\nds_read_b64 v[14:15], v0\nds_read_b64 v[16:17], v0\nWAIT\n"
        "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]",
        "s_waitcnt lgkmcnt(4)",
        "s_waitcnt lgkmcnt(3)",
    ),
    # A wait that counts three reads, on a path that has only two of them.
    "ROCm/rocm-libraries#3017": PublicBug(
        "ds_read_b64 v[2:3], v0\nds_read_b64 v[12:13], v0\ns_cbranch_scc1 path\nds_read_b64 v[14:15], v0\npath:\nWAIT\n"
        "v_mov_b32_e32 v1, v2",
        "s_waitcnt lgkmcnt(2)",
        "s_waitcnt lgkmcnt(1)",
    ),
    # Scalar loads return in any order: a count above 0 is about no particular one.
    "ROCm/rocm-libraries#10929": PublicBug(
        "s_load_dwordx2 s[8:9], s[0:1], 0x0\ns_load_dwordx2 s[10:11], s[0:1], 0x8\nWAIT\ns_add_u32 s20, s8, s8",
        "s_waitcnt lgkmcnt(1)",
        "s_waitcnt lgkmcnt(0)",
    ),
    # The value that an atomic returns was taken for no load.
    "ROCm/rocm-libraries#9407": PublicBug(
        "global_atomic_add v1, v0, v2, s[0:1] sc0\nWAIT\nv_readfirstlane_b32 s4, v1", "s_nop 0", "s_waitcnt vmcnt(0)"
    ),
    # The wait for the input tensor in LDS came too late.
    "ROCm/aiter#3633": PublicBug(
        f"ds_read_b64 v[2:3], v0\nds_read_b64 v[4:5], v0\nWAIT\n{_PRODUCT}",
        "s_waitcnt lgkmcnt(1)",
        "s_waitcnt lgkmcnt(0)",
    ),
    # A load that comes after an instruction has written its register: it is overwritten.
    "ROCm/rocm-systems#7890": PublicBug(
        "global_load_dwordx2 v[2:3], v0, s[0:1]\nWAIT\nv_pk_mul_f32 v[2:3], v[4:5], v[6:7]\ns_waitcnt vmcnt(0)",
        "s_nop 0",
        "s_waitcnt vmcnt(0)",
    ),
    # A read moved up in an epilogue, without the wait for the load into LDS that it reads.
    "HazyResearch/HipKittens#40": PublicBug(
        "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds\nWAIT\ns_barrier\nds_read_b64 v[2:3], v1",
        "s_nop 0",
        "s_waitcnt vmcnt(0)",
        Word.NOT_CHECKED,
    ),
    # LLVM's GCNHazardRecognizer looks at a block once: it gives up there on the long way, and forgets the short one.
    # In our own latent decode, as Triton 3.9.0 compiled a variant of it.
    "LLVM's visited blocks": PublicBug(
        "v_mfma_f32_16x16x16_bf16 v[8:11], v[2:3], v[4:5], v[12:15]\ns_cbranch_scc1 short\n"
        + "v_or_b32_e32 v20, s2, v20\n" * 17
        + "s_branch short\nshort:\nWAIT\nv_max_f32_e32 v16, v9, v9",
        "s_setprio 0",
        "s_nop 6",
    ),
    # Triton's scheduled products: a copy of accumulators before the last product has written them.
    "facebookexperimental/triton#3417": PublicBug(
        "v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[4:5], a[0:3]\nWAIT\nv_accvgpr_read_b32 v1, a0", "s_nop 2", "s_nop 7"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
@pytest.mark.parametrize("arch", [CDNA3, CDNA4])
def test_a_public_bug_is_found_and_its_correction_proved(bug: PublicBug, arch: str) -> None:
    assert verdict_of(bug.code.replace("WAIT", bug.was), arch).word is bug.word
    assert verdict_of(bug.code.replace("WAIT", bug.should_be), arch).word is Word.PROVED


# The example of ROCm/rocm-systems#11202, whose checkers called it a fault: later reads stop at the full counter.
@pytest.mark.parametrize(("later", "word"), [(15, Word.PROVED), (14, Word.FAULT)])
def test_a_full_counter_proves_an_operation_and_the_largest_count_does_not(later: int, word: Word) -> None:
    reads = "\n".join(f"ds_read_b32 v{52 + number}, v16" for number in range(later))
    code = f"ds_read_b32 v51, v16\n{reads}\ns_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)\nv_perm_b32 v18, v51, v50, s77"
    assert verdict_of(code, CDNA4).word is word


def test_a_store_that_sinks_across_a_barrier_is_a_race_which_the_simulator_finds() -> None:
    """ROCm/rocm-libraries#10893: no wait is missing, a store is on the wrong side of a barrier."""
    sunk = "s_waitcnt lgkmcnt(0)\ns_barrier\nds_write_b32 v0, v1\nds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)"
    assert verdict_of(sunk).word is Word.PROVED
    lds = Lds(256, POISON)
    lds.barrier()
    lds.store(np.arange(64) * 4, np.ones((64, 4), np.uint8), wave=0)
    with pytest.raises(SimulationFault, match="without a barrier between them"):
        lds.load(np.arange(64) * 4, 4, wave=1)


def test_where_its_wait_sinks_instead_it_is_a_missing_wait() -> None:
    assert verdict_of("ds_write_b32 v0, v1\ns_barrier\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v3").word is Word.FAULT

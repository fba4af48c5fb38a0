"""Files of compiled kernels, and the command that checks their waits."""

import hashlib
import json
import struct
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.check import Word, check_waits
from rocm_lab.waits.effects import effects_of
from rocm_lab.waits.objects import files_of, kernels_of, parse_disassembly
from rocm_lab.waits.page import lines_of, with_lines

LOADED = "\tglobal_load_dword v1, v0, s[0:1]\n"
WAIT = "\ts_waitcnt vmcnt(0)\n"
USED = "\tv_mov_b32_e32 v2, v1\n"

# From llvm-objdump 19: padding comes after the end, and is no kernel of gfx942.
DISASSEMBLED = """
kernel.hsaco:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001a00 <kernel>:
	s_branch 1                                                 // 000000001A00: BF820001 <kernel+0x8>
	v_unknown_b32 v1, v2                                       // 000000001A04: BF800000
	global_load_dword v1, v0, s[0:1]                           // 000000001A08: DC508000 01000000
	s_waitcnt vmcnt(0)                                         // 000000001A10: BF8C0F70
	v_add_u32_e32 v2, v1, v2                                   // 000000001A14: 68040501
	s_cbranch_scc1 65531                                       // 000000001A18: BF85FFFB <kernel+0x8>
	s_endpgm                                                   // 000000001A1C: BF810000
	s_code_end                                                 // 000000001A20: BF9F0000

0000000000001b00 <other>:
	s_endpgm                                                   // 000000001B00: BF810000
"""
# "kernel" has no type either, but a descriptor.
SYMBOLS = """
SYMBOL TABLE:
0000000000001a08 l       .text	0000000000000000 again
0000000000001a1c l       .text	0000000000000000 done
0000000000001a00 g       .text	0000000000000000 .protected kernel
0000000000001b00 g     F .text	0000000000000000 .protected other
00000000000004c0 g     O .rodata	0000000000000040 kernel.kd
"""


def assembly_text(*lines: str, arch: str = "gfx942") -> str:
    """A kernel in the form of Triton's."""
    return (
        f'\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-{arch}"\nkernel:   ; @kernel\n{"".join(lines)}\ts_endpgm\n'
        '\t.section\t.rodata,"a",@progbits\n\t.amdgpu_metadata\n\t.end_amdgpu_metadata\n'
    )


def code_object(machine: int) -> bytes:
    """The head of a code object for an arch, by LLVM's number."""
    return b"\x7fELF\x02\x01\x01@\x03".ljust(48, b"\0") + struct.pack("<I", 0x500 | machine) + bytes(12)


def test_a_disassembly_is_read_with_its_branches() -> None:
    kernel, other = parse_disassembly(DISASSEMBLED)
    assert (kernel.name, other.name) == ("kernel", "other")
    assert check_waits(kernel, "gfx942").word is Word.PROVED
    unwaited = DISASSEMBLED.replace("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)")
    (fault,) = check_waits(parse_disassembly(unwaited)[0], "gfx942").faults
    assert fault.path == ("1a08",)
    # The next round adds to the same register.
    assert fault.uses.startswith("v_add_u32")


def test_labels_of_assembly_that_people_wrote_are_no_kernels() -> None:
    """AITER's code objects keep them as symbols, and llvm-objdump names them in branches; no branch names some."""
    symbol = "\n0000000000001a08 <again>:\n\tglobal_load_dword"
    labelled = DISASSEMBLED.replace("\tglobal_load_dword", symbol).replace("65531 ", "again ")
    labelled = labelled.replace("\ts_endpgm", "\n0000000000001a1c <done>:\n\ts_endpgm", 1)
    assert parse_disassembly(SYMBOLS + labelled) == parse_disassembly(DISASSEMBLED)


def test_padding_before_a_kernel_is_none_and_apertures_are_no_registers() -> None:
    """So clang compiles HIP: llvm-objdump names a section where no symbol is."""
    padding = "0000000000001900 <.text>:\n\ts_nop 0   // 000000001900: BF800000\n\n0000000000001a00 <kernel>:"
    based = DISASSEMBLED.replace("v_unknown_b32 v1, v2", "s_mov_b64 s[6:7], src_shared_base")
    kernel, _ = parse_disassembly(based.replace("0000000000001a00 <kernel>:", padding))
    assert kernel == parse_disassembly(based)[0]
    assert effects_of(kernel.instructions[1]).reads == 0


def test_a_branch_out_of_its_function_is_refused() -> None:
    with pytest.raises(UnknownInstruction, match="the target"):
        parse_disassembly(DISASSEMBLED.replace("BF85FFFB", "BF85FDE8"))


def test_a_code_object_is_read_by_the_disassembler_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, tool, file = tmp_path / "text", tmp_path / "objdump", tmp_path / "kernel.co"
    text.write_text(DISASSEMBLED)
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "-td --mcpu=gfx950" ] && cat {text}\n')
    tool.chmod(0o755)
    file.write_bytes(code_object(0x4F))
    kernels = kernels_of(file, [str(tool)])
    assert [(each.arch, each.assembly.name) for each in kernels] == [("gfx950", "kernel"), ("gfx950", "other")]
    assert kernels[0].sha256 == hashlib.sha256(code_object(0x4F)).hexdigest()
    assert main(["waits", str(file), "--objdump", str(tool)]) == DONE
    assert "2 kernels: 2 proved" in capsys.readouterr().out


def test_without_a_disassembler_that_knows_the_arch_the_reader_learns_what_to_do(tmp_path: Path) -> None:
    file, tool = tmp_path / "kernel.co", tmp_path / "objdump"
    file.write_bytes(code_object(0x4C))
    with pytest.raises(BadSetting, match=r"no llvm-objdump is found for .*--objdump"):
        kernels_of(file, [str(tool)])
    # A tool that finds no kernel has read nothing: the file is damaged, or the tool is another one.
    for done in ("exit 1", "echo no kernel", r"printf '\377 damaged'"):
        tool.write_text(f"#!/bin/sh\n{done}\n")
        tool.chmod(0o755)
        with pytest.raises(BadSetting, match=r"objdump cannot read .*--objdump"):
            kernels_of(file, [str(tool)])


def test_another_arch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kernel.co"
    file.write_bytes(code_object(0x3F))
    with pytest.raises(BadSetting, match="another arch"):
        kernels_of(file)
    file.with_suffix(".s").write_text(assembly_text(arch="gfx90a"))
    with pytest.raises(BadSetting, match="code for gfx90a"):
        kernels_of(file.with_suffix(".s"))


@pytest.mark.parametrize("content", [b"\x7fELF", b"\xff\x00 weights"], ids=["a cut code object", "neither"])
def test_a_file_of_another_kind_is_a_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.s"
    file.write_bytes(content)
    for command in ("waits", "cycles"):
        assert main([command, str(file)]) == BAD_INPUT
        assert f"{file} is code for an" in capsys.readouterr().err


def test_a_text_is_known_by_the_code_object_next_to_it(tmp_path: Path) -> None:
    text = tmp_path / "kernel.amdgcn"
    text.write_text(assembly_text())
    (alone,) = kernels_of(text)
    assert alone.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    text.with_suffix(".hsaco").write_bytes(code_object(0x4C))
    (kernel,) = kernels_of(text)
    assert kernel.sha256 == hashlib.sha256(code_object(0x4C)).hexdigest()
    assert files_of([tmp_path]) == [text]


def test_the_command_prints_verdicts_and_fails_for_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, unknown = (tmp_path / f"{name}.amdgcn" for name in ("a_right", "b_wrong", "c_unknown"))
    right.write_text(assembly_text(LOADED, WAIT, USED))
    wrong.write_text(assembly_text(LOADED, USED))
    unknown.write_text(assembly_text("\tv_unknown_b32 v1, v2\n"))
    assert main(["waits", str(right), str(unknown)]) == DONE
    printed = capsys.readouterr().out
    assert "gfx942 kernel: proved" in printed
    assert "2 kernels: 1 proved, 1 not checked" in printed
    assert main(["waits", str(tmp_path), "--json"]) == FAILED
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [kernel["verdict"] for kernel in kernels] == ["proved", "fault", "not checked"]
    assert kernels[1]["faults"][0]["why"] == "v1 is not waited for"
    assert main(["waits", str(tmp_path / "gone")]) == BAD_INPUT


def test_the_page_has_a_line_for_each_kernel_of_a_source(tmp_path: Path) -> None:
    for number, lines in enumerate([(LOADED, WAIT, USED), (LOADED, WAIT, USED), (LOADED, USED)]):
        (tmp_path / f"{number}.amdgcn").write_text(assembly_text(*lines))
    (line,) = lines_of("here", [tmp_path])
    assert line == "| here | gfx942 | `kernel` | 2 | 1 | 0 | 1 |\n"
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "first.co").write_text(assembly_text(LOADED, WAIT, USED))
    (shipped / "second.co").write_text(assembly_text(LOADED, USED).replace("kernel", "other"))
    (shipped / "older").mkdir()
    (shipped / "older" / "third.co").write_text(assembly_text(LOADED, WAIT, USED, USED))
    assert lines_of("here", [shipped]) == [
        "| here | gfx942 | `shipped/*.co` | 2 | 1 | 0 | 1 |\n",
        "| here | gfx942 | `shipped/older/*.co` | 1 | 1 | 0 | 0 |\n",
    ]
    table = "<!-- verdicts -->\n| compiled from |\n|---|\n| here | old |\n| there | 1 |\n<!-- end of verdicts -->\n"
    page = with_lines(f"before\n{table}after", "here", [line])
    assert page == f"before\n{table}after".replace("| here | old |\n", line)

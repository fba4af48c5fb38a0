"""Reads kernels from files: the assembly that Triton keeps next to a code object, or a code object itself.

A code object is read by LLVM's llvm-objdump, which must know its arch (gfx942 since LLVM 17, gfx950 since 20); ROCm's
own is found too. Source of the numbers of archs: LLVM's "User Guide for AMDGPU Backend", e_flags.
"""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.simulator.assembly import Assembly, Instruction, parse_assembly, parse_instruction
from rocm_lab.simulator.faults import UnknownInstruction

ARCHS = ("gfx942", "gfx950")
TEXTS, OBJECTS = (".amdgcn", ".s"), (".hsaco", ".co", ".o")

# Newest first.
OBJDUMPS = (
    *(f"llvm-objdump-{version}" for version in range(30, 16, -1)),
    "/opt/rocm/llvm/bin/llvm-objdump",
    "llvm-objdump",
)
# EF_AMDGPU_MACH, the low byte of e_flags.
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
_ELF, _E_FLAGS_AT = b"\x7fELF", 48
# The end of every kernel: without one, a tool is no llvm-objdump, or a file is damaged.
_END = "s_endpgm"
# "<kernel>:", and an instruction with its address and its first word.
_SYMBOL = re.compile(r"[0-9a-f]+ <([^>]+)>:")
_LINE = re.compile(r"\s+(\S.*?)\s*// ([0-9A-F]+): ([0-9A-F]+)")
# Symbols of code without a type in the table of symbols, and those of kernels, which have descriptors.
_UNTYPED = re.compile(r"(?m)^[0-9a-f]+ .{6}  \.text\s[0-9a-f]+ (?:\.\w+ )?(\S+)$")
_DESCRIBED = re.compile(r"(?m) (\S+)\.kd$")


@dataclass(frozen=True, slots=True)
class CodeKernel:
    """One kernel of a file. sha256: of the code object; of the text, if no code object of that name lies next to it"""

    path: Path
    arch: str
    sha256: str
    assembly: Assembly


@dataclass(frozen=True, slots=True)
class _Line:
    """An instruction of a disassembly, its address, and its first word."""

    text: str
    address: int
    word: int


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and in directories all texts, and the code objects without a text next to them.

    Raises BadSetting for a path that does not exist, and if there are none.
    """
    found: list[Path] = []
    paths = tuple(paths)
    for path in paths:
        if path.is_dir():
            texts = [each for suffix in TEXTS for each in path.rglob(f"*{suffix}")]
            have_text = {each.with_suffix("") for each in texts}
            objects = [each for suffix in OBJECTS for each in path.rglob(f"*{suffix}")]
            found += sorted(texts + [each for each in objects if each.with_suffix("") not in have_text])
        elif path.is_file():
            found.append(path)
        else:
            raise BadSetting(f"{path} does not exist; give assembly ({', '.join(TEXTS)}) or code objects")
    if not found:
        places = ", ".join(map(str, paths))
        raise BadSetting(
            f"{places} has no file that ends in one of {', '.join((*TEXTS, *OBJECTS))}; give another folder"
        )
    return found


def kernels_of(path: Path, objdumps: Sequence[str] = OBJDUMPS) -> list[CodeKernel]:
    """The kernels of one file. objdumps: names or paths of llvm-objdump, of which the first that knows the arch is used

    Raises BadSetting for another arch and without a disassembler, UnknownInstruction for what cannot be read.
    """
    data = path.read_bytes()
    if data.startswith(_ELF):
        arch = _MACHINES.get(int.from_bytes(data[_E_FLAGS_AT : _E_FLAGS_AT + 1], "little"))
        _require_known(path, arch or "another arch")
        assert arch is not None
        sha256 = hashlib.sha256(data).hexdigest()
        return [CodeKernel(path, arch, sha256, each) for each in parse_disassembly(_disassembled(path, arch, objdumps))]
    text = data.decode(errors="replace")  # of any file that was named, assembly or not
    target = re.search(r"^\s*\.amdgcn_target\s+\"\S*?(gfx\w+)", text, re.MULTILINE)
    arch = target[1] if target else "an unknown arch"
    _require_known(path, arch)
    code_object = path.with_suffix(".hsaco")
    sha256 = hashlib.sha256(code_object.read_bytes() if code_object.is_file() else data).hexdigest()
    return [CodeKernel(path, arch, sha256, parse_assembly(text))]


def _require_known(path: Path, arch: str) -> None:
    if arch not in ARCHS:
        raise BadSetting(f"{path} is code for {arch}; waits are checked for {' and '.join(ARCHS)}")


def _disassembled(path: Path, arch: str, objdumps: Sequence[str]) -> str:
    tried = []
    for name in objdumps:
        tool = shutil.which(name)
        if tool is None:
            continue
        done = subprocess.run([tool, "-td", f"--mcpu={arch}", str(path)], capture_output=True, check=False)
        text = done.stdout.decode(errors="replace")  # damaged files have names that are no text
        if done.returncode == 0 and _END in text and "<unknown>" not in text:
            return text
        tried.append(tool)
    of_these = f"{' and '.join(tried)} cannot read" if tried else "no llvm-objdump is found for"
    raise BadSetting(
        f"{of_these} {path}, code for {arch}; install a newer LLVM and name its tool with --objdump, or give "
        f"the assembly that Triton keeps in its cache (.amdgcn)"
    )


def parse_disassembly(text: str) -> list[Assembly]:
    """The kernels of llvm-objdump's output, each from its symbol to the next one. Raises UnknownInstruction.

    Labels are addresses here. A branch has a distance of 4-byte words from the next instruction in its lowest bits.
    """
    found: list[Assembly] = []
    name = ""
    lines: list[_Line] = []
    # Assembly written by people keeps its labels as symbols.
    labels = {*_UNTYPED.findall(text)} - {*_DESCRIBED.findall(text)}
    for line in [*text.splitlines(), "0 <end>:"]:
        symbol, code = _SYMBOL.match(line), _LINE.match(line)
        if symbol and symbol[1] not in labels:
            if any(each.text.split()[0] != "s_nop" for each in lines):  # else a linker's padding before a kernel
                found.append(_assembly(name, lines))
            name, lines = symbol[1], []
        elif code:
            lines.append(_Line(code[1], int(code[2], 16), int(code[3], 16)))
    return found


def _assembly(name: str, lines: list[_Line]) -> Assembly:
    labels = {f"{line.address:x}": index for index, line in enumerate(lines)}
    instructions: list[Instruction] = []
    used: dict[str, int] = {}
    for line in lines:
        instruction = parse_instruction(line.text)
        if instruction.name.startswith(("s_branch", "s_cbranch_")):
            words = line.word & 0xFFFF
            target = f"{line.address + 4 + 4 * (words - (words >> 15 << 16)):x}"
            if target not in labels:
                raise UnknownInstruction(f"the target of {line.text!r} in {name}")
            used[target] = labels[target]
            instruction = parse_instruction(f"{instruction.name} {target}")
        instructions.append(instruction)
    return Assembly(name, tuple(instructions), used, {}, ())

"""Reads kernels from files: the assembly that Triton keeps next to a code object, or a code object itself.

A code object is read by LLVM's llvm-objdump, which must know its arch (gfx942 since LLVM 17, gfx950 since 20); ROCm's
own is found too. Source of the numbers of archs: LLVM's "User Guide for AMDGPU Backend", e_flags.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
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
# "<kernel>:" with its address, and an instruction with the address that its comment begins with.
_SYMBOL = re.compile(r"([0-9a-f]+) <([^>]+)>:")
_LINE = re.compile(r"\s+(\S.*?)\s*// ([0-9A-F]+):")
_NAMED_TARGET = re.compile(r"(?m)^\s+s_c?branch\w*\s+([A-Za-z_.$][\w.$]*)")


@dataclass(frozen=True, slots=True)
class CodeKernel:
    """One kernel of a file.

    sha256:  of the code object; of the text, if no code object of that name lies next to it
    """

    path: Path
    arch: str
    sha256: str
    assembly: Assembly


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
        done = subprocess.run([tool, "-d", f"--mcpu={arch}", str(path)], capture_output=True, text=True, check=False)
        if done.returncode == 0 and "<unknown>" not in done.stdout:
            return done.stdout
        tried.append(tool)
    of_these = f"{' and '.join(tried)} cannot read" if tried else "no llvm-objdump is found for"
    raise BadSetting(
        f"{of_these} {path}, code for {arch}; install a newer LLVM and name its tool with --objdump, or give "
        f"the assembly that Triton keeps in its cache (.amdgcn)"
    )


def parse_disassembly(text: str) -> list[Assembly]:
    """The kernels of llvm-objdump's output, each from its symbol to the next one. Raises UnknownInstruction.

    Branches there have a distance of 4-byte words from the next instruction, or a label that is a symbol; labels are
    addresses here.
    """
    found: list[Assembly] = []
    name = ""
    lines: list[str] = []
    addresses: list[int] = []
    # Assembly written by people keeps its labels as symbols, which branches name.
    named = set(_NAMED_TARGET.findall(text))
    labels: dict[str, str] = {}
    for line in [*text.splitlines(), "0 <end>:"]:
        symbol, code = _SYMBOL.match(line), _LINE.match(line)
        if symbol and symbol[2] in named:
            labels[symbol[2]] = f"{int(symbol[1], 16):x}"
        elif symbol:
            if lines:
                found.append(_assembly(name, lines, addresses, labels))
            name, lines, addresses, labels = symbol[2], [], [], {}
        elif code:
            lines.append(code[1])
            addresses.append(int(code[2], 16))
    return found


def _assembly(name: str, lines: list[str], addresses: list[int], named: Mapping[str, str]) -> Assembly:
    labels = {f"{address:x}": index for index, address in enumerate(addresses)}
    instructions: list[Instruction] = []
    used: dict[str, int] = {}
    for line, address in zip(lines, addresses, strict=True):
        instruction = parse_instruction(line)
        if instruction.name.startswith(("s_branch", "s_cbranch_")):
            operand = instruction.operands[0]
            if operand in named:
                target = named[operand]
            else:
                words = int(operand, 0)
                target = f"{address + 4 + 4 * (words - (words >> 15 << 16)):x}"
            if target not in labels:
                raise UnknownInstruction(f"the target of {line!r} in {name}")
            used[target] = labels[target]
            instruction = parse_instruction(f"{instruction.name} {target}")
        instructions.append(instruction)
    return Assembly(name, tuple(instructions), used, {}, ())

"""Reads the text that Triton's AMD compiler passes to its assembler: instructions, labels, the kernel's descriptor.

Sources: LLVM's "User Guide for AMDGPU Backend" (kernel descriptor, initial register state, code object metadata) and
"Syntax of AMDGPU Instructions" for operands and modifiers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rocm_lab.simulator.faults import UnknownInstruction

_ENCODINGS = ("e32", "e64", "dpp", "sdwa")
# A register or literal, its brackets and bars included, or a modifier with its value.
_WORD = re.compile(r"[^\s\[\(]+(?:\[[^\]]*\]|\([^\)]*\))?\|?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    name:       mnemonic without the suffix of its encoding
    encoding:   "e32", "e64", "dpp" or "sdwa"; "" if there is only one
    operands:   registers, constants and labels, destinations first
    modifiers:  the text after the operands: name -> value, "" if there is none
    text:       the line, for messages
    """

    name: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    text: str

    def allow(self, *modifiers: str) -> None:
        """Raises UnknownInstruction for a modifier that is not among these."""
        unknown = sorted(set(self.modifiers) - set(modifiers))
        if unknown:
            raise UnknownInstruction(f"modifier {unknown[0]!r} of {self.text!r}")

    def number(self, modifier: str, default: int = 0) -> int:
        """The value of a modifier that is a number. Raises UnknownInstruction."""
        return self._whole(self.modifiers.get(modifier, str(default)))

    @property
    def count(self) -> int:
        """The number that is the first operand. Raises UnknownInstruction."""
        return self._whole("".join(self.operands[:1]))

    def _whole(self, number: str) -> int:
        try:
            return int(number, 0)
        except ValueError as error:
            raise UnknownInstruction(f"the number {number!r} of {self.text!r}") from error

    def bits(self, modifier: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The value of a modifier that is a list, such as op_sel:[0,1]."""
        if modifier not in self.modifiers:
            return default
        return tuple(int(bit) for bit in self.modifiers[modifier].strip("[]").split(","))


@dataclass(frozen=True, slots=True)
class Argument:
    """Where an argument lies in the kernel arguments, and its kind: "by_value", "global_buffer" or "hidden_..."."""

    offset: int
    num_bytes: int
    kind: str


@dataclass(frozen=True, slots=True)
class Assembly:
    """A kernel as text.

    labels:      label -> index of the instruction that follows
    descriptor:  the .amdhsa_ entries, without the prefix
    arguments:   in order: the launch's own, Triton's two scratch pointers, and hidden ones that the runtime fills
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    descriptor: Mapping[str, int]
    arguments: tuple[Argument, ...]

    @property
    def mnemonics(self) -> frozenset[str]:
        """The names of the instructions."""
        return frozenset(instruction.name for instruction in self.instructions)


def parse_assembly(text: str) -> Assembly:
    """The one kernel of an amdgcn text, not its functions. Raises UnknownInstruction for what cannot be read."""
    kernel = re.search(r"^\s*\.amdhsa_kernel (\w+)", text, re.MULTILINE)
    name = kernel[1] if kernel else r"\w+"
    found = re.search(rf"^({name}):[^\n]*; @\1\n(.*?)^\s*\.section\s+\.rodata", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise UnknownInstruction("the text has no kernel that ends at a .rodata section")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in found[2].splitlines():
        line = line.partition(";")[0].partition("//")[0].strip()
        label = re.fullmatch(r"([.\w$]+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(parse_instruction(line))
    descriptor = {name: int(value) for name, value in re.findall(r"\.amdhsa_(\w+) (\d+)", text)}
    return Assembly(found[1], tuple(instructions), labels, descriptor, _arguments(text))


def parse_instruction(line: str) -> Instruction:
    """One line without its comment."""
    mnemonic, _, rest = line.partition(" ") if "\t" not in line else line.partition("\t")
    name, _, encoding = mnemonic.rpartition("_")
    if encoding not in _ENCODINGS:
        name, encoding = mnemonic, ""
    operands: list[str] = []
    modifiers: dict[str, str] = {}
    for part in _split(rest):
        first, *others = _WORD.findall(part)
        operands.append(first)
        for word in others:
            key, _, value = word.partition(":")
            modifiers[key] = value
    if operands and name.startswith("s_waitcnt"):
        return Instruction(name, encoding, (), {}, line)
    return Instruction(name, encoding, tuple(operands), modifiers, line)


def _split(operands: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\(]*[\]\)])", operands) if part.strip()]


def _arguments(text: str) -> tuple[Argument, ...]:
    """The arguments that the code object's metadata lists."""
    _, begin, metadata = text.partition(".amdgpu_metadata")
    if not begin:
        raise UnknownInstruction("the text has no .amdgpu_metadata, which lists the kernel's arguments")
    found = re.findall(r"\.offset:\s+(\d+)\n\s+\.size:\s+(\d+)\n\s+\.value_kind:\s+(\w+)", metadata)
    return tuple(Argument(int(offset), int(size), kind) for offset, size, kind in found)

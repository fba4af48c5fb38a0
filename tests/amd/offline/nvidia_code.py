"""Machine code for NVIDIA: its instructions, the registers that each reads and writes, and what may follow each.

nvdisasm's life ranges say which registers an instruction touches. Three rules keep right code free of findings:

- A copy carries what it copies: ptxas saves and restores pairs of registers of which one half is never used.
- Code that replaces a part of a register, half a word or a bit, begins it: ptxas packs values and predicates so.
- A product whose rows are in registers reads the upper two of its four uniform registers; nvdisasm says all four.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from triton import knobs
from triton.compiler import CompiledKernel

T = TypeVar("T")

# Products of sixteen-bit rows, and of eight-bit ones.
PRODUCTS = ("HGMMA", "QGMMA")

# The kinds of registers as nvdisasm heads their columns, with the prefix of a name. Each has less than 256.
_KINDS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
_KIND_SIZE = 256
_UNIFORM = list(_KINDS).index("UGPR") * _KIND_SIZE
# The bits of registers of threads.
OF_THREADS = (1 << _KIND_SIZE) - 1

# Marks of a register, as digits: v is a read, ^ a write, x both.
_READ = defaultdict(lambda: "0", {ord("v"): "1", ord("x"): "1"})
_WRITTEN = defaultdict(lambda: "0", {ord("^"): "1", ord("x"): "1"})

_SECTION = re.compile(r"\t\.section\t\.text\.([^,]+)")
_LABEL = re.compile(r"([.$\w]+):")
_HEADS = re.compile(r"\s*// \|\s+(GPR\b.*)\|\s*$")
_NUMBERS = re.compile(r"\s*// \|(.*# 0.*)\|\s*$")
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;\s*// \|(.*)\|\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_INDIRECT_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]+)")

_COPIES = re.compile(r"(?:U?MOV|R2UR|IMAD\.MOV\.U32) |IMAD\.U32 \w+, RZ, RZ, UR\d+$")
# An operand of these is their result, of which they keep what they do not replace.
_REPLACES = re.compile(
    r"PRMT (R\d+), (?:\1(?:\.reuse)?, 0x\w+, [\w.]+|[\w.]+, 0x\w+, \1)$"
    r"|LOP3\.LUT (R\d+), \2(?:\.reuse)?, 0x\w+, RZ, 0x(?:c0|fc), !PT$"
)
_ROWS_IN_REGISTERS = re.compile(r"R\d+, R\d+, gdesc\[UR(\d+)\]")

_ENDS = {"EXIT", "RET", "KILL", "BPT"}
# Instructions that may lead elsewhere in a way that is not followed.
_NOT_FOLLOWED = {"BRXU", "JMP", "JMX", "JMXU", "RPCMOV"}

# nvdisasm of CUDA 12.8 refuses to draw life ranges of a kernel with 255 registers. It needs the number for nothing
# else, so the kernel says 254: the attribute 0x2f with eight bytes, a symbol and the number.
_255_REGISTERS = re.compile(rb"(\x04\x2f\x08\x00.{4})\xff\x00\x00\x00", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction. opcode: with its suffixes; reads, writes: a bit for each register"""

    address: str
    predicate: str
    opcode: str
    operands: str
    reads: int
    writes: int

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        return f"{self.opcode} {self.operands}"

    @property
    def is_copy(self) -> bool:
        return bool(_COPIES.match(self.text))

    def __str__(self) -> str:
        return " ".join(filter(None, (f"0x{self.address}", self.predicate, self.text)))


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel with the functions that it calls. places: those of labels"""

    name: str
    steps: list[Step] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def targets(self, place: int) -> list[int]:
        """The places that a branch or a call leads to. Raises ValueError if it does not say them."""
        step = self.steps[place]
        if step.name in _NOT_FOLLOWED:
            raise ValueError(f"where {step} leads is not followed")
        if step.name not in ("BRA", "BRX", "CALL"):
            return []
        named = _INDIRECT_TARGETS.search(step.operands) if step.name == "BRX" else _TARGET.search(step.operands)
        if named is None:
            raise ValueError(f"{step} does not say where it leads")
        return [self.places[target.strip()] for target in named[1].split(",")]

    def followers(self, place: int) -> list[int]:
        """The places that may follow one: after a call its function, and the instruction after it.

        Threads that meet again (BSYNC), or work together (WARPSYNC.COLLECTIVE), go on with the next instruction.
        """
        step, found = self.steps[place], self.targets(place)
        goes_on = bool(step.predicate) or step.name not in _ENDS
        if step.name in ("BRA", "BRX"):
            # A branch may have another condition as its first operand: a predicate, or the threads that diverge.
            goes_on = bool(step.predicate) or (step.name == "BRA" and "," in step.operands)
        if not goes_on:
            return found
        if place + 1 == len(self.steps):
            raise ValueError(f"{step} is the last instruction, and leads on")
        return [*found, place + 1]

    def before_each(
        self, first: T, after: Callable[[int, int, T], T], join: Callable[[T, T], T], begin: int = 0
    ) -> dict[int, T]:
        """Returns what holds before each instruction that a path from `begin` leads to.

        first: before `begin`; after: what holds after an instruction, from its place, the place that follows and what
        holds before it; join: of what two paths bring
        """
        before, waiting = {begin: first}, [begin]
        while waiting:
            place = waiting.pop()
            for follower in self.followers(place):
                brought = after(place, follower, before[place])
                joined = join(before[follower], brought) if follower in before else brought
                if follower not in before or before[follower] != joined:
                    before[follower] = joined
                    waiting.append(follower)
        return before


def machine_code(compiled: CompiledKernel) -> Code:
    """Returns the code of a kernel for NVIDIA. Raises ValueError for code that is not understood."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_255_REGISTERS.sub(lambda found: found[1] + b"\xfe\0\0\0", compiled.asm["cubin"]))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", "--life-range-mode", "narrow", file.name]
        (code,) = code_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return code


def code_of(listing: str) -> Iterator[Code]:
    """Yields each kernel of a listing. Raises ValueError if a part of it is not understood, or there is none.

    listing: of nvdisasm --print-code --life-range-mode narrow
    """
    code, kinds, columns = Code(""), list[str](), list[int]()
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            if code.steps:
                yield code
            code = Code(section[1])
        elif label := _LABEL.match(line):
            code.places[label[1]] = len(code.steps)
        elif heads := _HEADS.match(line):
            kinds = [each.strip() for each in heads[1].split("|")]
        elif numbers := _NUMBERS.match(line):
            columns = [each.index("#") + 2 for each in numbers[1].split("|")]
        elif match := _LINE.match(line):
            address, predicate, opcode, operands, ranges = match.groups()
            reads, writes = _marked(zip(kinds, columns, ranges.split("|"), strict=True))
            code.steps.append(_step(address, predicate or "", opcode, operands, reads, writes))
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            raise ValueError(f"this line is not understood: {line}")
    if not code.steps:
        raise ValueError("nvdisasm lists no instruction with its life ranges")
    yield code


def _step(address: str, predicate: str, opcode: str, operands: str, reads: int, writes: int) -> Step:
    if opcode.startswith(PRODUCTS) and (rows := _ROWS_IN_REGISTERS.match(operands)):
        reads &= ~(0b11 << _UNIFORM + int(rows[1]))
    if _REPLACES.match(f"{opcode} {operands}"):
        reads &= ~writes
    return Step(address, predicate, opcode, operands, reads, writes)


def _marked(cells: Iterable[tuple[str, int, str]]) -> tuple[int, int]:
    """Returns the registers that are read and those that are written."""
    reads = writes = 0
    for kind, column, cell in cells:
        first, marks = list(_KINDS).index(kind) * _KIND_SIZE, cell[: column - 1 : -1]
        reads |= int(f"0{marks.translate(_READ)}", 2) << first
        writes |= int(f"0{marks.translate(_WRITTEN)}", 2) << first
    return reads, writes


def names_of(registers: int) -> Iterator[str]:
    for index, prefix in enumerate(_KINDS.values()):
        for number in range(_KIND_SIZE):
            if registers >> index * _KIND_SIZE + number & 1:
                yield f"{prefix}{number}"

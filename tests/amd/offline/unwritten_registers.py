"""Registers that machine code for NVIDIA reads on a path on which nothing has written them: a compiler's fault.

The ptxas of CUDA 12.8, which Triton 3.6 brings, added to a uniform register that nothing had written, and the sum
described a matrix in shared memory to a product. PTX was right, and the product read memory that was not its own.

nvdisasm's life ranges say which registers each instruction reads and writes. From these follows, for each instruction,
what was written before it on every path. Four rules keep right code free of findings:

- A write under a predicate is a write. Code that reads the value under the same predicate is right, and so is a value
  that only lanes exchange which do not use it. A register that is written under a wrong predicate is not found.
- A copy carries what it copies: ptxas saves and restores pairs of registers of which one half is never used.
- Code that replaces a part of a register, half a word or a bit, begins it: ptxas packs values and predicates so.
- A product whose rows are in registers reads the upper two of its four uniform registers; nvdisasm says all four.

Memory is not followed: neither shared memory nor the stack, to which ptxas spills.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from triton import knobs
from triton.compiler import CompiledKernel

from tests.amd.offline.warpgroup_products import PRODUCTS

# The kinds of registers as nvdisasm heads their columns, with the prefix of a name. Each has less than 256.
_KINDS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
_KIND_SIZE = 256
_UNIFORM = list(_KINDS).index("UGPR") * _KIND_SIZE

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
# Code after the end of a kernel.
_PADDING = {"NOP", "BRA"}
# Instructions that may lead elsewhere in a way that is not followed.
_NOT_FOLLOWED = {"BRXU", "JMP", "JMX", "JMXU", "RPCMOV"}

# nvdisasm of CUDA 12.8 refuses to draw life ranges of a kernel with 255 registers. It needs the number for nothing
# else, so the kernel says 254: the attribute 0x2f with eight bytes, a symbol and the number.
_255_REGISTERS = re.compile(rb"(\x04\x2f\x08\x00.{4})\xff\x00\x00\x00", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction. reads, writes: a bit for each register, by _bit"""

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

    def __str__(self) -> str:
        return " ".join(filter(None, (f"0x{self.address}", self.predicate, self.text)))


@dataclass(frozen=True, slots=True)
class _Code:
    """A kernel with the functions that it calls. places: those of labels"""

    steps: list[_Step] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)


def unwritten_registers(compiled: CompiledKernel) -> list[str]:
    """Returns what a kernel for NVIDIA reads unwritten, a line each. Raises ValueError for code that is not known."""
    return reads_of_unwritten(_life_ranges(compiled.asm["cubin"]))


def reads_of_unwritten(listing: str) -> list[str]:
    """Returns the reads of registers that some path has not written, a line each.

    listing: of nvdisasm --print-code --life-range-mode narrow. Raises ValueError if a part of it is not understood
    """
    return [line for name, code in _kernels(listing) for line in _findings(name, code)]


def _life_ranges(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_255_REGISTERS.sub(lambda found: found[1] + b"\xfe\0\0\0", cubin))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", "--life-range-mode", "narrow", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _findings(name: str, code: _Code) -> Iterator[str]:
    written = _written_before(code, 0, 0)
    for place, step in enumerate(code.steps):
        if place not in written:
            if step.name not in _PADDING:
                raise ValueError(f"{name}: no path that is known leads to {step}")
        elif not _COPIES.match(step.text) and (unwritten := step.reads & ~written[place]):
            yield f"{name}: {step} reads {', '.join(_names(unwritten))}, which not every path has written"


def _written_before(code: _Code, begin: int, written: int) -> dict[int, int]:
    """Returns what every path from a place has written before each instruction, if `written` was before the first."""
    before = {begin: written}
    waiting = [begin]
    while waiting:
        place = waiting.pop()
        for follower, after in _followers(code, place, before[place]):
            joined = before.get(follower, after) & after
            if before.get(follower) != joined:
                before[follower] = joined
                waiting.append(follower)
    return before


def _followers(code: _Code, place: int, written: int) -> Iterator[tuple[int, int]]:
    """Yields the instructions that may follow one, with what is written then.

    Threads that meet again (BSYNC), or work together (WARPSYNC.COLLECTIVE), go on with the next instruction.
    """
    step = code.steps[place]
    if step.name in _NOT_FOLLOWED:
        raise ValueError(f"where {step} leads is not followed")
    if _COPIES.match(step.text) and step.reads & ~written:
        after = written if step.predicate else written & ~step.writes
    else:
        after = written | step.writes
    goes_on = bool(step.predicate) or step.name not in _ENDS
    if step.name in ("BRA", "BRX", "CALL"):
        named = _INDIRECT_TARGETS.search(step.operands) if step.name == "BRX" else _TARGET.search(step.operands)
        if named is None:
            raise ValueError(f"{step} does not say where it leads")
        targets = [code.places[target.strip()] for target in named[1].split(",")]
        yield from ((target, after) for target in targets)
        if step.name == "CALL":
            after |= _written_by(code, targets[0])
        else:
            # A branch may have another condition as its first operand: a predicate, or the threads that diverge.
            goes_on = bool(step.predicate) or (step.name == "BRA" and "," in step.operands)
    if goes_on:
        if place + 1 == len(code.steps):
            raise ValueError(f"{step} is the last instruction, and leads on")
        yield place + 1, after


def _written_by(code: _Code, function: int) -> int:
    """Returns what every path through a function writes."""
    before = _written_before(code, function, 0)
    returns = [before[place] for place in before if code.steps[place].name == "RET"]
    if not returns:
        raise ValueError(f"the function that begins with {code.steps[function]} does not return")
    written = returns[0]
    for each in returns[1:]:
        written &= each
    return written


def _kernels(listing: str) -> Iterator[tuple[str, _Code]]:
    """Yields each kernel by its name. Raises ValueError if there is none."""
    name, code, kinds, columns = "", _Code(), list[str](), list[int]()
    found = False
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            if code.steps:
                yield name, code
            name, code, found = section[1], _Code(), True
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
    if not found or not code.steps:
        raise ValueError("nvdisasm lists no instruction with its life ranges")
    yield name, code


def _step(address: str, predicate: str, opcode: str, operands: str, reads: int, writes: int) -> _Step:
    step = _Step(address, predicate, opcode, operands, reads, writes)
    if opcode.startswith(PRODUCTS) and (rows := _ROWS_IN_REGISTERS.match(operands)):
        reads &= ~(0b11 << _UNIFORM + int(rows[1]))
    if _REPLACES.match(step.text):
        reads &= ~writes
    return _Step(address, predicate, opcode, operands, reads, writes)


def _marked(cells: Iterable[tuple[str, int, str]]) -> tuple[int, int]:
    """Returns the registers that are read and those that are written."""
    reads = writes = 0
    for kind, column, cell in cells:
        first, marks = list(_KINDS).index(kind) * _KIND_SIZE, cell[: column - 1 : -1]
        reads |= int(f"0{marks.translate(_READ)}", 2) << first
        writes |= int(f"0{marks.translate(_WRITTEN)}", 2) << first
    return reads, writes


def _names(registers: int) -> Iterator[str]:
    for index, prefix in enumerate(_KINDS.values()):
        for number in range(_KIND_SIZE):
            if registers >> index * _KIND_SIZE + number & 1:
                yield f"{prefix}{number}"

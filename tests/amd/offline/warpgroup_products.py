"""Registers of Hopper's matrix products that are still running, in machine code: nothing else may touch them.

wgmma.mma_async returns before it has read its rows, if they are in registers, and before it has written its sums.
Triton waits (wgmma.wait_group) before it uses the sums. PTX does not state how long the registers of the rows are read:
ptxas keeps them. The ptxas of CUDA 12.9 may overwrite them too early, so that products of valid code are wrong, which
CUDA 13.3 fixes (github.com/triton-lang/triton/pull/11781). Triton 3.6 brings 12.8, and 3.9 has 12.9 for Hopper. So the
compiled code is checked.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"(?<![A-Za-z])R(\d+)(\.64)?")
_PREDICATE = re.compile(r"!?U?P(?:\d+|T)$")
_PRODUCT = re.compile(r"[HQ]GMMA\.64x(\d+)x\d+\.F(16|32)")
# Products of sixteen-bit rows, and of eight-bit ones.
PRODUCTS = ("HGMMA", "QGMMA")
_WAIT = re.compile(r"gsb0, (0x[0-9a-f]+)")
# Execution does not continue after these in the listing, unless they have a predicate.
_ENDS = {"EXIT", "RET", "BRX", "BRXU"}
# Their first operand is read: they write memory, or branch.
_WITHOUT_RESULT = {"BAR", "BRA", "LDGSTS", "RED", "ST", "STG", "STL", "STS", "STSM", "UTMALDG"}
# Their targets are not followed: no product may run then.
_NOT_FOLLOWED = {"BRX", "BRXU", "BSYNC", "CALL", "RET"}
# Commits after a product are counted up to this number: a wait that leaves that many running is not supported.
_MOST_COMMITS = 8


class Instruction(NamedTuple):
    """An instruction as cuobjdump lists it. opcode: with its suffixes, separated by dots"""

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.address:#x} {self.predicate} {self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True, slots=True)
class _Touched:
    """Registers that an instruction reads and writes."""

    read: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


class _Running(NamedTuple):
    """A product that no wait has ended: its place in the listing, and commits since; -1: it is in no commit yet."""

    place: int
    commits: int


@dataclass(frozen=True, slots=True)
class _Code:
    """A listing, with the registers that each instruction touches and its successors."""

    listing: Sequence[Instruction]
    touched: Sequence[_Touched]
    next_places: Sequence[tuple[int, ...]]
    found: dict[tuple[int, int], str] = field(default_factory=dict)


def instructions(listing: str) -> list[Instruction]:
    """Returns the instructions that cuobjdump -sass prints of one kernel."""
    return [
        Instruction(int(address, 16), predicate, opcode, tuple(filter(None, map(str.strip, operands.split(",")))))
        for address, predicate, opcode, operands in _LINE.findall(listing)
    ]


def touched_while_running(listing: Sequence[Instruction]) -> list[str]:
    """Lists accesses to the sums of a running product and writes to its rows, a line each; empty if there are none.

    A product that adds to the very sums of another one may do so: matrix units process them in order.
    """
    code = _Code(listing, [_touched_by(each) for each in listing], _next_places(listing))
    seen: list[frozenset[_Running] | None] = [None] * len(listing)
    # Warp groups jump to their parts by a table: a part that is no branch's target begins with nothing running.
    for begin in range(len(listing)):
        if seen[begin] is None:
            _follow(code, begin, seen)
    return [code.found[key] for key in sorted(code.found)]


def _follow(code: _Code, begin: int, seen: list[frozenset[_Running] | None]) -> None:
    """Walks every path from an instruction until nothing more is running anywhere than was seen there."""
    seen[begin] = frozenset()
    places = [begin]
    while places:
        place = places.pop()
        running = seen[place]
        assert running is not None
        after = _after(code, place, running)
        for other in code.next_places[place]:
            before = seen[other]
            if before is None or not after <= before:
                seen[other] = after | (before or frozenset())
                places.append(other)


def _after(code: _Code, place: int, running: frozenset[_Running]) -> frozenset[_Running]:
    """Returns the products that run after an instruction, and records the instruction if it disturbs one."""
    this = code.listing[place]
    for each in running:
        if _disturbs(code, place, each.place):
            code.found[each.place, place] = f"{this} while {code.listing[each.place]} runs"
    if this.name in PRODUCTS:
        running |= {_Running(place, -1)}
        if "gsb0" in this.operands:
            running = frozenset(each._replace(commits=min(each.commits + 1, _MOST_COMMITS)) for each in running)
    elif this.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(_WAIT.findall(", ".join(this.operands))[0], 16)
        assert left < _MOST_COMMITS, f"{this} leaves more products running than are told apart"
        running = frozenset(each for each in running if each.commits < left)
    return running


def _disturbs(code: _Code, place: int, running: int) -> bool:
    """True if an instruction touches registers of a running product, or leads where the code is not followed."""
    this, product = code.touched[place], code.touched[running]
    name = code.listing[place].name
    if name in _NOT_FOLLOWED:
        return True
    if name in PRODUCTS and this.written == product.written:
        return bool(this.written & product.read or this.read & product.written)
    return bool(this.written & (product.read | product.written) or this.read & product.written)


def _next_places(listing: Sequence[Instruction]) -> list[tuple[int, ...]]:
    place_of = {each.address: place for place, each in enumerate(listing)}
    return [tuple(_next_of(place, each, place_of)) for place, each in enumerate(listing)]


def _next_of(place: int, this: Instruction, place_of: dict[int, int]) -> Iterator[int]:
    goes_on = bool(this.predicate) or this.name not in _ENDS
    if this.name == "BRA":
        yield place_of[int(this.operands[-1], 16)]
        goes_on = bool(this.predicate) or len(this.operands) > 1
    if goes_on and place + 1 < len(place_of):
        yield place + 1


def _touched_by(this: Instruction) -> _Touched:
    """Returns an instruction's registers. A product reads its rows, if they are in registers, and writes its sums."""
    if this.name in PRODUCTS:
        match = _PRODUCT.match(this.opcode)
        assert match, f"{this} is of a shape that is not known"
        sums = int(match[1]) * int(match[2]) // 64
        return _Touched(_rows_of(this.operands[1]), _registers(this.operands[0], sums))
    operands = this.operands
    while operands and _PREDICATE.match(operands[0]):
        operands = operands[1:]
    result, sources = operands[:1], operands[1:]
    if this.name in _WITHOUT_RESULT or (result and "[" in result[0]):
        result, sources = (), operands
    width = _width(this.opcode)
    read: set[int] = set()
    for each in sources:
        # A stored value is as wide as the instruction.
        read |= _registers(each, width if "[" not in each and not result else 1)
    return _Touched(frozenset(read), frozenset[int]().union(*(_registers(each, width) for each in result)))


def _rows_of(operand: str) -> frozenset[int]:
    """Returns the registers of rows: four per thread hold 64 rows of 32 bytes; a descriptor has none."""
    return _registers(operand, 4) if _REGISTER.match(operand) else frozenset()


def _registers(operand: str, width: int) -> frozenset[int]:
    return frozenset(
        register
        for first, pair in _REGISTER.findall(operand)
        for register in range(int(first), int(first) + (2 if pair else width))
    )


def _width(opcode: str) -> int:
    """Returns the number of registers of a result, or of a stored value."""
    name, *parts = opcode.split(".")
    if name == "HMMA":
        return 4
    if opcode.startswith(("LDSM", "STSM")):
        return int(parts[-1]) if parts[-1].isdigit() else 1
    if "128" in parts:
        return 4
    is_pair = "64" in parts or "F64" in parts or "WIDE" in parts or name in ("CS2R", "DADD", "DMUL", "DFMA")
    return 2 if is_pair else 1

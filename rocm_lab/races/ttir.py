"""Reads a kernel's TTIR, the text that Triton keeps as `.ttir`: operations in blocks, and the values between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rocm_lab.simulator.faults import UnknownInstruction

_NAME = r"%[\w.$-]+"
_USE = re.compile(rf"({_NAME})(?:#(\d+))?")
_LOCATION = re.compile(r" ?loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_RESULTS = re.compile(rf"({_NAME}(?::\d+)?(?:, {_NAME})*) = (.*)")
_ARGUMENT = re.compile(rf"({_NAME}): (!tt\.ptr<[^>]*>|\w+) ?(\{{[^}}]*\}})?")
_HEAD = re.compile(r'"?([a-z_]+\.[\w.]+)"?')
_ITERATED = re.compile(rf"({_NAME}) = (?={_NAME})")
_ATTRIBUTES = re.compile(r"<?\{[^{}]*\}>?")
_TYPE = re.compile(r"tensor<(?:[^<>]|<[^<>]*>)*>|!tt\.ptr<[^>]*>|[a-z]\w*")
_SHAPED = re.compile(r"tensor<((?:\d+x)*)(.*)>")
# Lines of the source: what a name stands for, the name at the end of a line, and the line itself.
_PLACE = re.compile(r"(#loc\d*) = loc\((.*)\)")
_PLACE_AT_END = re.compile(r"loc\((#loc\d*)\)$")
_SOURCE_LINE = re.compile(r'/([^"/]+)":(\d+)')

AXES = ("x", "y", "z")
STORES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: the shape, () of a scalar, and the type of an element, or of what an element points to."""

    shape: tuple[int, ...]
    element: str
    is_pointer: bool = False

    @classmethod
    def of(cls, text: str) -> Kind:
        """From a type as it is written."""
        tensor = _SHAPED.fullmatch(text)
        element = tensor[2].split(", #")[0] if tensor else text
        pointer = re.match(r"!tt\.ptr<([^,>]*)", element)
        shape = tuple(int(size) for size in tensor[1].split("x")[:-1]) if tensor else ()
        return cls(shape, pointer[1] if pointer else element, pointer is not None)

    @property
    def is_number(self) -> bool:
        """True for integers and truths."""
        return not self.is_pointer and re.fullmatch(r"i\d+|index", self.element) is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of an element in memory. Raises UnknownInstruction."""
        bits = re.match(r"[a-z]+(\d+)", self.element)
        if bits is None:
            raise UnknownInstruction(f"the type {self.element}")
        return max(1, int(bits[1]) // 8)


_UNKNOWN, _INDEX, _BIT = Kind((), "?"), Kind((), "i32"), Kind((), "i1")


@dataclass(eq=False, slots=True)
class Value:
    """A value. op: which has it as a result or, if of_block, as an argument of its blocks; None: the kernel has it"""

    name: str
    kind: Kind
    op: Operation | None = None
    index: int = 0
    of_block: bool = False


@dataclass(eq=False, slots=True)
class Operation:
    """An operation.

    text:    the line without its results and locations
    parent:  the operation whose block, of this number, has it
    inner:   the values that the blocks begin with; of scf.for the counter is the first
    place:   its line in the source, by a name that the kernel knows
    """

    name: str
    text: str
    operands: list[Value]
    parent: Operation | None
    block: int
    results: list[Value] = field(default_factory=list)
    inner: list[Value] = field(default_factory=list)
    blocks: list[list[Operation]] = field(default_factory=list)
    place: str = ""

    def inside(self, other: Operation) -> bool:
        """True if it is in a block of the other one."""
        return self.parent is not None and (self.parent is other or self.parent.inside(other))


@dataclass(frozen=True, slots=True)
class Kernel:
    """divisors: of the numbers among the arguments that Triton knows to be multiples of something. places: of lines"""

    name: str
    arguments: list[Value]
    divisors: dict[str, int]
    body: list[Operation]
    places: dict[str, str]

    def operations(self) -> Iterator[Operation]:
        """All, those in blocks included."""
        waiting = list(reversed(self.body))
        while waiting:
            operation = waiting.pop()
            yield operation
            waiting += [each for block in reversed(operation.blocks) for each in reversed(block)]

    def source_line(self, operation: Operation) -> str:
        """File and line of an operation, that of the innermost function; "" if there is none."""
        waiting = [operation.place]
        while waiting:
            place = self.places.get(waiting.pop(0), "")
            if found := _SOURCE_LINE.search(place):
                return f"{found[1]}:{found[2]}"
            waiting = re.findall(r"#loc\d*", place) + waiting
        return ""


_THROUGH = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.bitcast", "tt.addptr")


def base_of(pointer: Value) -> str:
    """The argument that a pointer points into. Raises UnknownInstruction where none is known."""
    while (op := pointer.op) is not None:
        if op.name == "scf.for":
            pointer = op.operands[2 + pointer.index if pointer.of_block else 3 + pointer.index]
        elif op.name in _THROUGH:
            pointer = op.operands[0]
        elif op.name in ("arith.select", "scf.if"):
            taken, other = op.operands[1:] or [block[-1].operands[pointer.index] for block in op.blocks]
            if base_of(taken) != base_of(other):
                raise UnknownInstruction("an address is in one of two tensors")
            pointer = taken
        else:
            raise UnknownInstruction(f"an address comes from {op.name}")
    return pointer.name


def parse_ttir(text: str) -> Kernel:
    """The kernel of a module with one function. Raises UnknownInstruction."""
    reader = _Reader()
    for line in text.splitlines():
        place = _PLACE_AT_END.search(line)
        reader.read(_LOCATION.sub("", line).strip(), place[1] if place else "")
    if reader.kernel is None:
        raise UnknownInstruction("a text without tt.func is no TTIR")
    reader.kernel.places.update(_PLACE.findall(text))
    return reader.kernel


class _Reader:
    """Reads line by line; a name is known in the block that has it, and in those inside."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self._open: list[Operation] = []
        self._names: list[dict[str, list[Value]]] = []

    def read(self, line: str, place: str) -> None:
        if line.startswith("tt.func"):
            self._begin(line)
        elif self.kernel is None or not line or line.startswith("#"):
            return
        elif line.startswith("}"):
            self._close(line, place)
        elif line.startswith("^bb"):
            for name, kind in re.findall(rf"({_NAME}): ({_TYPE.pattern})", line):
                self._name_inner(self._open[-1], name, Kind.of(kind))
        else:
            self._operation(line, self.kernel.body).place = place

    def _begin(self, line: str) -> None:
        name = re.search(r"@([\w$.]+)", line)
        if self.kernel is not None or name is None:
            raise UnknownInstruction("more than one function")
        self.kernel = Kernel(name[1], [], {}, [], {})
        for argument, kind, facts in _ARGUMENT.findall(line):
            self.kernel.arguments.append(Value(argument[1:], Kind.of(kind)))
            if divisor := re.search(r"tt\.divisibility = (\d+)", facts):
                self.kernel.divisors[argument[1:]] = int(divisor[1])
        self._names.append({f"%{each.name}": [each] for each in self.kernel.arguments})

    def _close(self, line: str, place: str) -> None:
        if not self._open:
            return
        self._names.pop()
        if line.endswith("{"):  # "} else {" and "} do {"
            self._open[-1].blocks.append([])
            self._names.append({})
            return
        operation = self._open.pop()
        operation.place = place
        if "->" in line:  # the types of tt.reduce and tt.scan come last
            _set_kinds(operation, line)

    def _operation(self, line: str, body: list[Operation]) -> Operation:
        found = _RESULTS.match(line)
        names, text = (found[1].split(", "), found[2]) if found else ([], line)
        head = _HEAD.match(text)
        if head is None:
            raise UnknownInstruction(f"the line {line!r}")
        iterated = _ITERATED.findall(text) if head[1] in ("scf.for", "scf.while") else []
        used = _USE.findall(_ITERATED.sub("", text) if iterated else text)
        parent = self._open[-1] if self._open else None
        operands = [self._value(each, int(index or 0)) for each, index in used]
        operation = Operation(head[1], text, operands, parent, len(parent.blocks) - 1 if parent else 0)
        (parent.blocks[-1] if parent else body).append(operation)
        for name in names:
            first, _, count = name.partition(":")
            self._names[-1][first] = [
                Value(name, _UNKNOWN, operation, len(operation.results) + index) for index in range(int(count or 1))
            ]
            operation.results += self._names[-1][first]
        if not text.endswith("({"):
            _set_kinds(operation, text)
        if text.endswith("{"):
            operation.blocks.append([])
            self._open.append(operation)
            self._names.append({})
            # The counter of scf.for comes before what it iterates, which follows the counter's bounds and step.
            kinds = [_INDEX, *(value.kind for value in operands[3:])] if head[1] == "scf.for" else []
            for each, kind in zip(iterated, kinds or [value.kind for value in operands], strict=False):
                self._name_inner(operation, each, kind)
        return operation

    def _name_inner(self, operation: Operation, name: str, kind: Kind) -> None:
        value = Value(name, kind, operation, len(operation.inner), of_block=True)
        operation.inner.append(value)
        self._names[-1][name] = [value]

    def _value(self, name: str, index: int) -> Value:
        for names in reversed(self._names):
            if name in names:
                return names[name][index]
        raise UnknownInstruction(f"the value {name}, which no line defines")


def _set_kinds(operation: Operation, text: str) -> None:
    kinds = _result_kinds(operation, text)
    for value in operation.results:
        value.kind = kinds[min(value.index, len(kinds) - 1)]  # tt.split writes the type of both results once


def _result_kinds(operation: Operation, text: str) -> list[Kind]:
    """The types of the results, from the end of the line that has them."""
    plain = _ATTRIBUTES.sub("", text)
    for arrow in (" -> ", " to "):
        if (arrow in plain and operation.name != "scf.for") or (arrow == " -> " and arrow in plain):
            return [Kind.of(each) for each in _TYPE.findall(plain.partition(arrow)[2])][: len(operation.results)]
    kinds = [Kind.of(each) for each in _TYPE.findall(plain.rpartition(" : ")[2])]
    if operation.name in ("arith.cmpi", "arith.cmpf"):
        return [Kind(kinds[0].shape, "i1")]
    if operation.name == "tt.load":
        return [Kind(kinds[0].shape, kinds[0].element)]
    if " : " not in plain:
        return [_BIT]  # arith.constant true
    return kinds[:1] if operation.name == "tt.addptr" else kinds[-1:]

"""The addresses of a Triton kernel as functions of the program, the lane, the rounds of loops, and the arguments.

Numbers do not overflow here: a term is an integer of any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rocm_lab.races.ttir import AXES, STORES, Kernel, Kind, Operation, Value, base_of

try:
    import z3 as z3
except ImportError:
    raise ImportError("z3 proves the absence of races and is not installed; run pip install z3-solver") from None

Term = Any  # of z3, which has no types
Index = tuple[Term, ...]


class Pointer(NamedTuple):
    """An argument of the kernel, and bytes from it."""

    base: str
    offset: Term


class Launch:
    """Numbers that all programs of a launch share, of its grid and among its arguments. facts: what is known of them"""

    def __init__(self, kernel: Kernel, single: Sequence[str] = ()) -> None:
        operations = list(kernel.operations())
        asked = {each.text.split()[1] for each in operations if each.name == "tt.get_program_id"}
        self.axes = [axis for axis in AXES if axis in asked and axis not in single]
        self.assumed = [f"one program along {axis}" for axis in AXES if axis in asked and axis in single]
        self.assumed += [] if asked else ["one program"]
        self.grid = {axis: z3.Int(f"programs along {axis}") for axis in AXES}
        numbers = [each.name for each in kernel.arguments if each.kind.is_number]
        self.numbers = {name: z3.Int(name) for name in numbers}
        self.facts = [size >= 1 if axis in self.axes else size == 1 for axis, size in self.grid.items()]
        self.facts += [number >= 0 for number in self.numbers.values()]
        self.facts += [
            self.numbers[name] % divisor == 0 for name, divisor in kernel.divisors.items() if name in self.numbers
        ]
        texts = [each.text for each in operations if each.name in ("arith.constant", "tt.make_range")]
        written = {int(found) for text in texts for found in re.findall(r"(?<![\w.-])\d+(?![\w.])", text)}
        # Numbers of the kernel itself, among which are widths and counts.
        self.constants = sorted({1} | {each for each in written if 1 < each <= 1 << 20})
        self.stored = {base_of(each.operands[0]) for each in operations if each.name in STORES}


def axes_of(value: Value, stored: set[str]) -> set[str] | None:
    """The axes of the grid on which a value depends, memory being the same; None if it may depend on other programs."""
    axes: set[str] = set()
    waiting, seen = [value], set[Value]()
    while waiting:
        each = waiting.pop()
        if each in seen or (op := each.op) is None:
            continue
        seen.add(each)
        if op.name in STORES or (op.name == "tt.load" and base_of(op.operands[0]) in stored):
            return None
        if op.name == "tt.get_program_id":
            axes.add(op.text.split()[1])
        if op.name == "scf.for":
            place = each.index - each.of_block
            carried = [op.operands[3 + place], op.blocks[0][-1].operands[place]] if place >= 0 else []
            waiting += [*op.operands[:3], *carried]
        elif op.name == "scf.if":
            waiting += [op.operands[0], *(block[-1].operands[each.index] for block in op.blocks)]
        elif op.name == "scf.while":
            return None
        else:
            waiting += op.operands
    return axes


def _quotient(a: Term, b: Term) -> Term:
    """Rounded to zero. z3 rounds down if the divisor is positive."""
    return z3.If(a >= 0, a / b, -((-a) / b))


def _unsigned(compare: Callable[[Term, Term], Term]) -> Callable[[Term, Term], Term]:
    """Negative numbers are larger than others."""
    return lambda a, b: z3.If((a >= 0) == (b >= 0), compare(a, b), compare(b, a))


_COMPARED: dict[str, Callable[[Term, Term], Term]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}
_COMPARED |= {f"u{name[1:]}": _unsigned(compare) for name, compare in _COMPARED.items() if name[0] == "s"}
_COMPUTED: dict[str, Callable[[Term, Term], Term]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _quotient,
    "arith.remsi": lambda a, b: a - b * _quotient(a, b),
    "arith.maxsi": lambda a, b: z3.If(a >= b, a, b),
    "arith.minsi": lambda a, b: z3.If(a <= b, a, b),
}
_OF_TRUTHS: dict[str, Callable[[Term, Term], Term]] = {"arith.andi": z3.And, "arith.ori": z3.Or, "arith.xori": z3.Xor}
# A number and a constant.
_OF_BITS: dict[str, Callable[[Term, int], Term]] = {
    "arith.shli": lambda a, b: a * (1 << b),
    "arith.shrsi": lambda a, b: a / (1 << b),
    "arith.andi": lambda a, b: a % (b + 1),  # of ones in the lowest bits alone
}
_REORDERS = re.compile("allow_reorder").search
_AS_IT_IS = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast")
_OF_ELEMENTS = {"arith.cmpi", *_AS_IT_IS, *_COMPUTED, *_OF_TRUTHS, *_OF_BITS}


class Program:
    """One of two programs, whose place in the grid, rounds of loops and loaded values are its own.

    facts:   what is known of its terms
    causes:  where terms may have other values than in a launch, since they are loaded, for instance
    """

    def __init__(self, launch: Launch, number: int) -> None:
        self._launch, self._number = launch, number
        self.place = {axis: self._own(axis) for axis in AXES}
        self.facts = [z3.And(self.place[axis] >= 0, self.place[axis] < launch.grid[axis]) for axis in AXES]
        self.causes: dict[str, None] = {}
        self.lane: Index = ()
        self.rounds: dict[Operation, Term] = {}
        self._named: dict[Value, int] = {}
        self._seen: dict[tuple[Value, Index], Term] = {}

    def _own(self, name: str) -> Term:
        return z3.Int(f"{name} of {self._number}")

    def enter(self, shape: Sequence[int]) -> Index:
        """Chooses any element of a tensor."""
        self.lane = tuple(self._own(f"lane {axis}") for axis in range(len(shape)))
        self.facts += [z3.And(at >= 0, at < size) for at, size in zip(self.lane, shape, strict=True)]
        return self.lane

    def same_as(self, other: Program, axes: set[str]) -> Term:
        """True where both are at the same place along these axes, at the same element and in the same round."""
        mine, others = ((*each.lane, *each.rounds.values()) for each in (self, other))
        same = [one == two for one, two in zip(mine, others, strict=True)]
        return z3.And(*same, *(self.place[axis] == other.place[axis] for axis in axes))

    def reach(self, operation: Operation) -> None:
        """Notes as facts what holds where the operation is executed: counters of loops, and conditions."""
        block, parent = operation.block, operation.parent
        while parent is not None:
            if parent.name == "scf.for":
                end, step = (self.at(each, ()) for each in parent.operands[1:3])
                self.facts += [self._round(parent) >= 0, step >= 1, self.at(parent.inner[0], ()) < end]
            elif parent.name == "scf.if":
                condition = self.at(parent.operands[0], ())
                self.facts.append(z3.Not(condition) if block else condition)
            else:
                self.causes[f"{parent.name} around it"] = None
            block, parent = parent.block, parent.parent

    def at(self, value: Value, index: Index) -> Term:
        """An element of a value: a number, a truth or a Pointer. Raises UnknownInstruction."""
        key = value, index
        if key not in self._seen:
            self._seen[key] = self._element(value, index)
        return self._seen[key]

    def _element(self, value: Value, index: Index) -> Term:
        if value.op is None:
            return Pointer(value.name, z3.IntVal(0)) if value.kind.is_pointer else self._launch.numbers[value.name]
        if value.op.name == "scf.for":
            return self._of_loop(value, value.op, index)
        if value.op.name == "scf.if":
            taken, other = (block[-1].operands[value.index] for block in value.op.blocks)
            return self._choice(self.at(value.op.operands[0], ()), self.at(taken, index), self.at(other, index))
        return self._result(value, value.op, index)

    def _result(self, value: Value, op: Operation, index: Index) -> Term:
        name, operands = op.name, op.operands
        if name == "arith.constant" and (
            found := re.search(r"(?:constant |dense<)(-?\d+|true|false)\b(?!\.)", op.text)
        ):
            return z3.BoolVal(found[1] == "true") if value.kind.element == "i1" else z3.IntVal(int(found[1]))
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            return (self.place if name == "tt.get_program_id" else self._launch.grid)[op.text.split()[1]]
        if name == "tt.make_range":
            start = re.search(r"start = (\d+)", op.text)
            assert start is not None
            return index[0] + int(start[1])
        if name in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans") and not _REORDERS(op.text):
            return self.at(operands[0], _source_index(op, index))
        if name == "tt.addptr":
            pointer, offset = (self.at(each, index) for each in operands)
            return Pointer(pointer.base, pointer.offset + offset * value.kind.num_bytes)
        if name == "arith.select":
            condition = self.at(operands[0], index if operands[0].kind.shape else ())
            return self._choice(condition, *(self.at(each, index) for each in operands[1:]))
        if name == "tt.load":
            return self._loaded(value, op, index)
        if name not in _OF_ELEMENTS or not (value.kind.is_pointer or all(each.kind.is_number for each in operands)):
            return self._any(value, index, name)
        return self._of_numbers(value, op, [self.at(each, index) for each in operands], index)

    def _of_numbers(self, value: Value, op: Operation, terms: list[Term], index: Index) -> Term:
        name, kind = op.name, op.operands[0].kind
        if name == "arith.cmpi":
            if kind.element == "i1":
                terms = [z3.If(term, 1, 0) for term in terms]
            return _COMPARED[op.text.split()[1].rstrip(",")](*terms)
        if name in _AS_IT_IS:
            if kind.element == "i1" and not kind.is_pointer:
                return z3.If(terms[0], -1 if name == "arith.extsi" else 1, 0)
            if name == "arith.extui":
                return z3.If(terms[0] >= 0, terms[0], terms[0] + (1 << 8 * kind.num_bytes))
            if value.kind.element == "i1" and not kind.is_pointer:
                return terms[0] % 2 == 1
            return terms[0]
        if kind.element == "i1" and name in _OF_TRUTHS:
            return _OF_TRUTHS[name](*terms)
        if name in _COMPUTED and kind.element != "i1":
            return _COMPUTED[name](*terms)
        if name in _OF_BITS and z3.is_int_value(terms[-1]):
            constant = terms[-1].as_long()
            if constant >= 0 and (name != "arith.andi" or constant & constant + 1 == 0):
                return _OF_BITS[name](terms[0], constant)
        return self._any(value, index, name)

    def _choice(self, condition: Term, taken: Term, other: Term) -> Term:
        if isinstance(taken, Pointer):
            assert taken.base == other.base
            return Pointer(taken.base, z3.If(condition, taken.offset, other.offset))
        return z3.If(condition, taken, other)

    def _loaded(self, value: Value, op: Operation, index: Index) -> Term:
        """The same at the same address, if the kernel does not store there."""
        base = base_of(op.operands[0])
        if base in self._launch.stored or not value.kind.is_number:
            return self._any(value, index, f"`{base}`, which is loaded")
        self.causes[f"`{base}`, which is loaded"] = None
        sort = z3.BoolSort() if value.kind.element == "i1" else z3.IntSort()
        loaded = z3.Function(f"{base}, {value.kind.element}", z3.IntSort(), sort)(self.at(op.operands[0], index).offset)
        if len(op.operands) == 1:
            return loaded
        if len(op.operands) == 2:
            other = self._any(value, index, f"`{base}`, which is loaded")
        else:
            other = self.at(op.operands[2], index)
        return z3.If(self.at(op.operands[1], index), loaded, other)

    def _of_loop(self, value: Value, loop: Operation, index: Index) -> Term:
        """A counter, or what grows by the same in each round."""
        begin, end, step = (self.at(each, ()) for each in loop.operands[:3])
        if value.of_block and value.index == 0:
            return begin + self._round(loop) * step
        place = value.index - value.of_block
        first, inner, last = loop.operands[3 + place], loop.inner[1 + place], loop.blocks[0][-1].operands[place]
        grown = self._growth(inner, last, loop, index)
        if grown is None:
            return self._any(value, index, "a loop")
        rounds = self._round(loop) if value.of_block else z3.If(end > begin, (end - begin + step - 1) / step, 0)
        start = self.at(first, index)
        if isinstance(start, Pointer):
            return Pointer(start.base, start.offset + rounds * grown)
        return start + rounds * grown

    def _growth(self, inner: Value, last: Value, loop: Operation, index: Index) -> Term | None:
        """The sum of what a round adds, each from outside of the loop; None if it is not of that kind."""
        grown = z3.IntVal(0)
        while last is not inner:
            op = last.op
            if op is None or op.name not in ("arith.addi", "tt.addptr") or last.of_block:
                return None
            of_chain, added = op.operands
            if added.op is not None and (added.op is loop or added.op.inside(loop)):
                of_chain, added = added, of_chain
            if (added.op is not None and (added.op is loop or added.op.inside(loop))) or added.kind.is_pointer:
                return None
            grown += self.at(added, index) * (last.kind.num_bytes if op.name == "tt.addptr" else 1)
            last = of_chain
        return None if inner.kind.element == "i1" and not inner.kind.is_pointer else grown

    def _any(self, value: Value, index: Index, cause: str) -> Term:
        """Any value; the same for the same element."""
        self.causes[cause] = None
        name = f"{value.name}, {self._named.setdefault(value, len(self._named))} of {self._number}"
        sort = z3.BoolSort() if value.kind.element == "i1" and not value.kind.is_pointer else z3.IntSort()
        term = z3.Function(name, *[z3.IntSort()] * len(index), sort)(*index) if index else z3.Const(name, sort)
        return Pointer(base_of(value), term) if value.kind.is_pointer else term

    def _round(self, loop: Operation) -> Term:
        return self.rounds.setdefault(loop, self._own(f"round {len(self.rounds)}"))


def _source_index(op: Operation, index: Index) -> Index:
    """The element of the source that an element of a result is."""
    source: Kind = op.operands[0].kind
    if op.name == "tt.splat":
        return ()
    if op.name == "tt.broadcast":
        return tuple(z3.IntVal(0) if size == 1 else at for at, size in zip(index, source.shape, strict=True))
    if op.name == "tt.expand_dims":
        (axis,) = (int(found) for found in re.findall(r"axis = (\d+)", op.text))
        return index[:axis] + index[axis + 1 :]
    if op.name == "tt.trans":
        (order,) = re.findall(r"array<i32: ([\d, ]+)>", op.text)
        places = [int(place) for place in order.split(",")]
        return tuple(index[places.index(axis)] for axis in range(len(places)))
    at = z3.IntVal(0)
    for place, size in zip(index, op.results[0].kind.shape, strict=True):
        at = at * size + place
    steps = [math.prod(source.shape[axis + 1 :]) for axis in range(len(source.shape))]
    return tuple(at / step % size for step, size in zip(steps, source.shape, strict=True))


def by_number(term: Term, numbers: dict[str, Term]) -> dict[str, Term]:
    """The factor of each number in a term, and under "" the rest."""
    if str(term) in numbers and z3.is_const(term):
        return {str(term): z3.IntVal(1)}
    parts = [by_number(each, numbers) for each in term.children()]
    if z3.is_add(term) or z3.is_sub(term):
        total = dict(parts[0])
        for part in parts[1:]:
            for name, factor in part.items():
                signed = factor if z3.is_add(term) else -factor
                total[name] = total[name] + signed if name in total else signed
        return total
    if z3.is_mul(term):
        (one, *others) = sorted(parts, key=lambda part: part.keys() == {""})
        if all(part.keys() == {""} for part in others):
            scale = math.prod((part[""] for part in others), start=z3.IntVal(1))
            return {name: factor * scale for name, factor in one.items()}
    return {"": term}

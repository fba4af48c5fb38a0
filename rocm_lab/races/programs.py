"""Proves that the programs of a Triton kernel do not race in global memory, for every grid and all arguments.

    print(prove_apart(compiled.asm["ttir"]).line())

An SMT solver (z3) looks for two programs that access a byte, one of them with a store (addresses.py). It finds none,
which is a proof; or it finds an example. An example that needs a certain content of memory is no race yet: the kernel
is then not proved. Two stores of the same number are no race, nor are two atomics.

A proof assumes that tensors do not overlap; that numbers among the arguments are not negative, and fit their types when
computed with; that loops step forward; and one program along an axis that the kernel does not ask for. If more is
needed, such as a least stride, it is looked for among simple conditions, and stated.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rocm_lab.races.addresses import AXES, STORES, Launch, Pointer, Program, Term, axes_of, base_of, z3
from rocm_lab.races.ttir import Kernel, Operation, parse_ttir
from rocm_lab.simulator.faults import UnknownInstruction

# Operations whose effects on memory are known: none, but for those of loads, stores and atomics.
_READ = re.compile(
    r"(?:arith|math|scf)\.\w+|(?:gpu|ttg)\.barrier|llvm\.intr\.assume|tt\.(?!call|descriptor|print)[\w.]+"
)
# Steps of the solver for a query, which are the same on every machine, and queries for a kernel.
_MOST_STEPS, _MOST_QUERIES = 2_000_000, 400
_MOST, _MOST_TIMES = 1 << 20, 1 << 10


class Word(Enum):
    """The answer in a word."""

    PROVED = "proved"
    RACE = "race"
    NOT_PROVED = "not proved"


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer about one kernel.

    assumes:  what must hold for a proof, a condition each, such as "stride >= 64"
    why:      two accesses that collide, if nothing more is assumed; or why nothing is known
    """

    kernel: str
    word: Word
    assumes: tuple[str, ...] = ()
    why: str = ""

    def line(self) -> str:
        """One line for people."""
        condition = f" if {' and '.join(self.assumes)}" if self.assumes else ""
        return f"{self.kernel}: {self.word.value}{condition}{f'; {self.why}' if self.why else ''}"


def prove_apart(ttir: str) -> Proof:
    """Says if programs of a kernel, given as TTIR, keep out of each other's bytes."""
    name = "kernel"
    try:
        kernel = parse_ttir(ttir)
        name = kernel.name
        return _Prover(kernel).proof()
    except UnknownInstruction as unknown:
        return Proof(name, Word.NOT_PROVED, why=str(unknown))


@dataclass(frozen=True, slots=True)
class _Side:
    """An access of one of the two programs: its bytes, and where they and its conditions are not exact."""

    operation: Operation
    program: Program
    pointer: Pointer
    num_bytes: int
    stored: Term
    of_address: tuple[str, ...]
    of_conditions: tuple[str, ...]

    @property
    def is_atomic(self) -> bool:
        return "atomic" in self.operation.name

    @classmethod
    def of(cls, operation: Operation, launch: Launch, number: int) -> _Side:
        """Raises UnknownInstruction."""
        program, target = Program(launch, number), operation.operands[0]
        lane = program.enter(target.kind.shape)
        pointer = program.at(target, lane)
        of_address = tuple(program.causes)
        mask = operation.operands[1:2] if operation.name == "tt.load" else operation.operands[2:3]
        if operation.name != "tt.atomic_cas":
            program.facts += [program.at(each, lane) for each in mask]
        program.reach(operation)
        of_conditions = tuple(program.causes)
        stored = None
        if operation.name == "tt.store" and re.fullmatch(r"i\d+", operation.operands[1].kind.element):
            stored = program.at(operation.operands[1], lane)
        return cls(operation, program, pointer, target.kind.num_bytes, stored, of_address, of_conditions)

    def line(self, model: Any) -> str:
        """The access in an example."""
        place = ", ".join(str(model.eval(self.program.place[axis], True)) for axis in AXES)
        verb = "stores" if self.operation.name in STORES else "loads"
        return f"program ({place}) {verb}"


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition on a launch with a number in it: the stricter, the nearer to good; it says nothing at bad."""

    text: str
    term: Callable[[int], Term]
    good: int = 0
    bad: int = 0

    def weakest(self, holds: Callable[[Term], bool]) -> _Condition:
        """The weakest condition of this kind that holds."""
        good, bad = self.good, self.bad
        while abs(good - bad) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(self.term(middle)) else (good, middle)
        return _Condition(self.text, self.term, good, bad)

    @property
    def strict(self) -> Term:
        """The condition with the number good."""
        return self.term(self.good)

    def __str__(self) -> str:
        return self.text.format(self.good).replace(" 1 * ", " ")


@dataclass(frozen=True, slots=True)
class _Pair:
    first: _Side
    second: _Side

    @property
    def of_conditions(self) -> tuple[str, ...]:
        """Where conditions are not exact. Atomics may order programs, too."""
        atomics = [side.operation.name for side in (self.first, self.second) if side.is_atomic]
        return (*self.first.of_conditions, *self.second.of_conditions, *atomics)

    def reached(self) -> list[Term]:
        """What holds where two programs execute the accesses."""
        one, two = self.first.program, self.second.program
        return [z3.Or(*(one.place[axis] != two.place[axis] for axis in AXES)), *one.facts, *two.facts]

    def facts(self, stored: set[str]) -> list[Term]:
        """What holds where they race. stored: arguments that the kernel stores to"""
        a, b = self.first.pointer, self.second.pointer
        meet = [a.offset < b.offset + self.second.num_bytes, b.offset < a.offset + self.first.num_bytes]
        if self.first.stored is not None and self.second.stored is not None:
            meet.append(self.first.stored != self.second.stored)
        operation = self.first.operation
        if operation is self.second.operation and operation.name == "tt.store":
            axes = axes_of(operation.operands[1], stored)
            if axes is not None:
                meet.append(z3.Not(self.first.program.same_as(self.second.program, axes)))
        return [*self.reached(), *meet]


def _first(causes: Sequence[str]) -> str:
    """The first tensor of which contents decide, if there is one."""
    return next((cause for cause in causes if cause.startswith("`")), causes[0])


class _Prover:
    def __init__(self, kernel: Kernel) -> None:
        for each in kernel.operations():
            if not _READ.fullmatch(each.name):
                raise UnknownInstruction(f"{each.name} is not read")
        self._kernel, self._launch = kernel, Launch(kernel)
        self._assumed: dict[str, Term] = {}
        self._queries = 0

    def proof(self) -> Proof:
        """Raises UnknownInstruction."""
        example, unknown = "", ""
        for pair in self._pairs():
            model = self._model(pair)
            if isinstance(model, str):
                unknown = unknown or model
                continue
            if model is None:
                continue
            addresses, conditions = pair.first.of_address + pair.second.of_address, pair.of_conditions
            if addresses:
                unknown = unknown or f"the address depends on {_first(addresses)}"
                continue
            found = "" if conditions else self._line(pair, model)
            example = example or found
            if not self._assume(pair):
                if found:
                    return Proof(self._kernel.name, Word.RACE, why=found)
                unknown = unknown or f"a condition depends on {_first(conditions)}"
        if unknown:
            return Proof(self._kernel.name, Word.NOT_PROVED, why=unknown)
        one = () if self._launch.axes else ("the grid has one program",)
        return Proof(self._kernel.name, Word.PROVED, (*one, *self._assumed), example)

    def _pairs(self) -> Iterator[_Pair]:
        """Two accesses to an argument that the kernel stores to, by two programs."""
        accesses = [each for each in self._kernel.operations() if each.name in (*STORES, "tt.load")]
        accesses = [each for each in accesses if base_of(each.operands[0]) in self._launch.stored]
        sides = [[_Side.of(each, self._launch, number) for number in (1, 2)] for each in accesses]
        for (one, _), (_, two) in itertools.combinations_with_replacement(sides, 2):
            has_store = any(side.operation.name in STORES for side in (one, two))
            if has_store and one.pointer.base == two.pointer.base and not (one.is_atomic and two.is_atomic):
                yield _Pair(one, two)

    def _model(self, pair: _Pair, *more: Term) -> Any:
        """An example of a race, or None if there is none, or why the solver does not know."""
        self._queries += 1
        found = z3.unknown
        if self._queries <= _MOST_QUERIES:
            solver = self._solver(*pair.facts(self._launch.stored), *more)
            found = solver.check()
        if found == z3.unknown:
            return "the solver found no answer"
        return None if found == z3.unsat else solver.model()

    def _solver(self, *facts: Term) -> Any:
        solver = z3.Solver()
        solver.set("rlimit", _MOST_STEPS)
        solver.add(*self._launch.facts, *self._assumed.values(), *facts)
        return solver

    def _is_possible(self, pair: _Pair, conditions: list[Term]) -> bool:
        """True if a launch meets the conditions in which two programs execute the accesses."""
        positive = (number >= 1 for number in self._launch.numbers.values())
        return self._solver(*pair.reached(), *conditions, *positive).check() == z3.sat

    def _line(self, pair: _Pair, model: Any) -> str:
        names = {str(each): each for each in z3.z3util.get_vars(z3.And(*pair.facts(self._launch.stored)))}
        numbers = [f"{name} = {model.eval(names[name], True)}" for name in self._launch.numbers if name in names]
        byte = f"byte {model.eval(pair.first.pointer.offset, True)} of {pair.first.pointer.base}"
        given = f" with {', '.join(numbers)}" if numbers else ""
        return f"{pair.first.line(model)} and {pair.second.line(model)} {byte}{given}"

    def _assume(self, pair: _Pair) -> bool:
        """Adds conditions that rule the pair's races out, one or two; False if none are found."""
        for count in (1, 2):
            for found in itertools.combinations(self._conditions(pair), count):
                chosen = list(found)
                strict = [each.strict for each in chosen]
                if self._model(pair, *strict) is not None or not self._is_possible(pair, strict):
                    continue
                for at, each in enumerate(chosen):
                    others = [other.strict for other in chosen if other is not each]
                    chosen[at] = each.weakest(lambda term, more=others: self._model(pair, term, *more) is None)
                self._assumed |= {str(each): each.strict for each in chosen}
                return True
        return False

    def _conditions(self, pair: _Pair) -> list[_Condition]:
        used = {str(each) for each in z3.z3util.get_vars(z3.And(*pair.facts(self._launch.stored)))}
        numbers = [(name, term) for name, term in self._launch.numbers.items() if name in used]
        sizes = [self._launch.grid[axis] for axis in self._launch.axes]
        found = []
        for (name, number), (other, least) in itertools.permutations(numbers, 2):
            found.append(_Condition(f"{name} >= {{}} * {other}", lambda n, a=number, b=least: a >= n * b, _MOST_TIMES))
        for name, number in numbers:
            found.append(_Condition(f"{name} >= {{}}", lambda n, a=number: a >= n, _MOST))
        for size, (name, number) in itertools.product(sizes, numbers):
            found.append(_Condition(f"{size} <= {name}", lambda _, a=size, b=number: a <= b))
        return found + [_Condition(f"{size} <= {{}}", lambda n, a=size: a <= n, 2, _MOST) for size in sizes]

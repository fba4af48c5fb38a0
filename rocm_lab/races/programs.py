"""Proves that the programs of a Triton kernel do not race in global memory, for every grid and all arguments.

    print(prove_apart(compiled.asm["ttir"]).line())

An SMT solver (z3) looks for two programs that access a byte, one of them with a store (addresses.py). It finds none,
which is a proof; or it finds an example. An example that needs a certain content of memory is no race yet: the kernel
is then not proved. Two stores of the same number are no race, nor are two atomics.

A proof assumes that tensors do not overlap; that numbers among the arguments are not negative, and fit their types when
computed with; that loops step forward; that inline assembly stores nothing; and one program along an axis that the
kernel does not ask for. If more is needed, such as a least stride, it is looked for among simple conditions, and
stated.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from rocm_lab.races.addresses import Launch, Pointer, Program, Term, axes_of, by_number, z3
from rocm_lab.races.ttir import AXES, STORES, Kernel, Operation, base_of, parse_ttir
from rocm_lab.simulator.faults import UnknownInstruction

# Operations whose effects on memory are known: none, but for those of loads, stores and atomics.
_READ = re.compile(
    r"(?:arith|math|scf)\.\w+|(?:gpu|ttg)\.barrier|llvm\.intr\.assume|tt\.(?!call|descriptor|experimental|print)[\w.]+"
)
# Steps of the solver for a query, which are the same on every machine.
_MOST_STEPS = 1_000_000
# The largest least stride, or number of programs, that is looked for.
_MOST = 1 << 20


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


def prove_apart(ttir: str, single: Sequence[str] = ()) -> Proof:
    """Says if programs of a kernel, given as TTIR, keep out of each other's bytes.

    single: axes, "x", "y" or "z", along which a launch has one program, though the kernel asks which one it is
    """
    name = "kernel"
    try:
        kernel = parse_ttir(ttir)
        name = kernel.name
        return _Prover(kernel, single).proof()
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
        if operation.name == "tt.store" and operation.operands[1].kind.is_number:
            stored = program.at(operation.operands[1], lane)
        return cls(operation, program, pointer, target.kind.num_bytes, stored, of_address, of_conditions)

    def line(self, model: Any) -> str:
        """The access in an example."""
        place = ", ".join(str(model.eval(self.program.place[axis], True)) for axis in AXES)
        verb = "stores" if self.operation.name in STORES else "loads"
        return f"program ({place}) {verb}"


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition on a launch. choices: numbers for it, each stricter than the one before; the last is taken"""

    text: str
    of: Callable[[int], Term]
    choices: Sequence[int]

    @property
    def term(self) -> Term:
        """The strictest condition of this kind."""
        return self.of(self.choices[-1])

    def weakest(self, holds: Callable[[Term], bool]) -> _Condition:
        """The weakest condition of this kind that holds; the strictest does."""
        at = bisect.bisect_left(self.choices, True, hi=len(self.choices) - 1, key=lambda each: holds(self.of(each)))
        return _Condition(self.text, self.of, self.choices[at : at + 1])

    def __str__(self) -> str:
        return self.text.format(self.choices[-1]).replace(" 1 * ", " ")


@dataclass(frozen=True, slots=True)
class _Pair:
    first: _Side
    second: _Side

    def reached(self) -> list[Term]:
        """The facts where two programs execute the accesses."""
        one, two = self.first.program, self.second.program
        return [z3.Or(*(one.place[axis] != two.place[axis] for axis in AXES)), *one.facts, *two.facts]

    def facts(self, stored: set[str]) -> list[Term]:
        """The facts where they race, but for the addresses. stored: arguments that the kernel stores to"""
        found = self.reached()
        if self.first.stored is not None and self.second.stored is not None:
            found.append(self.first.stored != self.second.stored)
        operation = self.first.operation
        if operation is self.second.operation and operation.name == "tt.store":
            axes = axes_of(operation.operands[1], stored)
            if axes is not None:
                found.append(z3.Not(self.first.program.same_as(self.second.program, axes)))
        return found

    def meet(self) -> list[Term]:
        """The addresses overlap."""
        return self._overlap(self.first.pointer.offset - self.second.pointer.offset)

    def may_meet(self, launch: Launch) -> list[Term]:
        """The same, weaker and without products of two unknowns, for which the solver has no reliable method.

        Instead of a factor times a number it has a third unknown, and what is known of it at each constant of the
        kernel: a factor of at least 5, for example, makes it at least 5 times the number.
        """
        numbers = launch.numbers | {str(size): size for size in launch.grid.values()}
        distance = by_number(self.first.pointer.offset - self.second.pointer.offset, numbers)
        total, facts = distance.pop("", z3.IntVal(0)), []
        for name, factor in distance.items():
            product = z3.Int(f"{name} times its factor")
            total += product
            steps = [(each - less) * self.first.num_bytes for each in launch.constants for less in (0, 1)]
            around = {*steps, *(-each for each in steps)}
            for each in sorted(around):
                facts += [
                    z3.Implies(factor >= each, product >= each * numbers[name]),
                    z3.Implies(factor <= each, product <= each * numbers[name]),
                ]
        return [*facts, *self._overlap(total)]

    def _overlap(self, distance: Term) -> list[Term]:
        return [distance < self.second.num_bytes, -distance < self.first.num_bytes]


def _at_least(number: Term, unit: Term = 1) -> Callable[[int], Term]:
    return lambda count: number >= count * unit


def _at_most(number: Term) -> Callable[[int], Term]:
    return lambda count: number <= count


def _numbers(launch: Launch, term: Term) -> dict[str, Term]:
    """The numbers among the kernel's arguments that a term has."""
    used = {str(each) for each in z3.z3util.get_vars(term)}
    return {name: number for name, number in launch.numbers.items() if name in used}


def _first(causes: Sequence[str]) -> str:
    """The first tensor of which contents decide, if there is one."""
    return next((cause for cause in causes if cause.startswith("`")), causes[0])


class _Prover:
    def __init__(self, kernel: Kernel, single: Sequence[str]) -> None:
        for each in kernel.operations():
            if not _READ.fullmatch(each.name):
                raise UnknownInstruction(f"{each.name} is not read")
        self._kernel, self._launch = kernel, Launch(kernel, single)
        self._assumed: dict[str, _Condition] = {}  # by their texts: a later one is stricter
        # They may order programs.
        self._atomics = tuple({each.name: None for each in kernel.operations() if "atomic" in each.name})

    def proof(self) -> Proof:
        """Raises UnknownInstruction."""
        example, unknown = "", ""
        for pair in self._pairs():
            addresses = pair.first.of_address + pair.second.of_address
            conditions = pair.first.of_conditions + pair.second.of_conditions + self._atomics
            if unknown and (addresses or conditions):
                continue  # nothing that is found about it would change the answer
            model = self._model(pair)
            if model is None:
                continue
            if addresses or isinstance(model, str):
                unknown = f"the address depends on {_first(addresses)}" if addresses else unknown or model
                continue
            found = "" if conditions else self._line(pair, model)
            example = example or found
            if not self._assume(pair):
                if found:
                    return Proof(self._kernel.name, Word.RACE, why=found)
                unknown = unknown or f"a condition depends on {_first(conditions)}"
        if unknown:
            return Proof(self._kernel.name, Word.NOT_PROVED, why=unknown)
        return Proof(
            self._kernel.name, Word.PROVED, (*self._launch.assumed, *map(str, self._assumed.values())), example
        )

    def _pairs(self) -> Iterator[_Pair]:
        """Two accesses to an argument that the kernel stores to, by two programs."""
        accesses = [each for each in self._kernel.operations() if each.name in (*STORES, "tt.load")]
        accesses = [each for each in accesses if base_of(each.operands[0]) in self._launch.stored]
        sides = [[_Side.of(each, self._launch, number) for number in (1, 2)] for each in accesses]
        for (one, _), (_, two) in itertools.combinations_with_replacement(sides, 2):
            has_store = any(side.operation.name in STORES for side in (one, two))
            if has_store and one.pointer.base == two.pointer.base and not (one.is_atomic and two.is_atomic):
                yield _Pair(one, two)

    def _model(self, pair: _Pair) -> Any:
        """An example of a race, or None if there is none, or why the solver does not know."""
        solver = self._solver(*pair.facts(self._launch.stored), *pair.meet())
        found = solver.check()
        if found == z3.sat:
            return solver.model()
        return None if found == z3.unsat or self._is_apart(pair) else "the solver found no answer"

    def _is_apart(self, pair: _Pair, *conditions: Term) -> bool:
        """True if there is certainly no race under these conditions."""
        facts = [*pair.facts(self._launch.stored), *pair.may_meet(self._launch), *conditions]
        return bool(self._solver(*facts).check() == z3.unsat)

    def _solver(self, *facts: Term) -> Any:
        solver = z3.Solver()
        solver.set("rlimit", _MOST_STEPS)
        solver.add(*self._launch.facts, *(each.term for each in self._assumed.values()), *facts)
        return solver

    def _is_possible(self, pair: _Pair, conditions: list[Term]) -> bool:
        """True if a launch meets the conditions in which two programs execute the accesses."""
        positive = (number >= 1 for number in self._launch.numbers.values())
        return bool(self._solver(*pair.reached(), *conditions, *positive).check() == z3.sat)

    def _line(self, pair: _Pair, model: Any) -> str:
        used = _numbers(self._launch, z3.And(*pair.facts(self._launch.stored), *pair.meet()))
        numbers = [f"{name} = {model.eval(number, True)}" for name, number in used.items()]
        byte = f"byte {model.eval(pair.first.pointer.offset, True)} of {pair.first.pointer.base}"
        given = f" with {', '.join(numbers)}" if numbers else ""
        return f"{pair.first.line(model)} and {pair.second.line(model)} {byte}{given}"

    def _assume(self, pair: _Pair) -> bool:
        """Adds conditions that rule the pair's races out, one or two; False if none are found."""
        for count in (1, 2):
            for found in itertools.combinations(self._conditions(pair), count):
                chosen = list(found)
                strict = [each.term for each in chosen]
                if not self._is_apart(pair, *strict) or not self._is_possible(pair, strict):
                    continue
                for at, each in enumerate(chosen):
                    others = [other.term for other in chosen if other is not each]
                    chosen[at] = each.weakest(partial(self._is_apart, pair, *others))
                self._assumed |= {each.text: each for each in chosen}
                return True
        return False

    def _conditions(self, pair: _Pair) -> list[_Condition]:
        """Those of strides first, by which addresses grow: they are larger than others, than a number, than limits."""
        of_all = _numbers(self._launch, z3.And(*pair.facts(self._launch.stored), *pair.meet()))
        strides = _numbers(self._launch, pair.first.pointer.offset + pair.second.pointer.offset)
        sizes = [self._launch.grid[axis] for axis in self._launch.axes]
        times = [
            _Condition(f"{name} >= {{}} * {other}", _at_least(strides[name], of_all[other]), self._launch.constants)
            for name, other in itertools.product(strides, {**strides, **of_all})
            if name != other
        ]
        least = [_Condition(f"{name} >= {{}}", _at_least(number), range(_MOST)) for name, number in strides.items()]
        within = [
            _Condition(f"{size} <= {name}", _at_least(of_all[name], size), (1,))
            for size, name in itertools.product(sizes, of_all)
        ]
        most = [_Condition(f"{size} <= {{}}", _at_most(size), range(_MOST, 1, -1)) for size in sizes]
        return [*times, *least, *within, *most]

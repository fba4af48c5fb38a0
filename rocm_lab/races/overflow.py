"""Proves that the indices of a Triton kernel do not overflow 32 bits, for all arguments within stated ranges.

    print(prove_no_overflow(compiled.asm["ttir"], {"num_tokens": (0, 1 << 30)}).line())

Every integer has an interval. An operation whose result may leave its type is a fault if the result reaches an address
that is accessed, a mask or another condition. Intervals are those of the lanes that are accessed: a mask and the
conditions around an access narrow the values that they compare.

A proof assumes that 64 bits suffice, that loops step forward, and what the kernel itself states with tl.assume.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from rocm_lab.races.intervals import COMPUTED, NO_CAUSES, Causes, Growth, Range, bits_of, joined, limits_of
from rocm_lab.races.ttir import STORES, Kernel, Kind, Operation, Value, base_of, parse_ttir
from rocm_lab.simulator.faults import UnknownInstruction

# The name of an argument, of the tensor that a number is loaded from, "program_x" or "programs_x" -> (least, most);
# "blocks": a program's number times a constant; "name*": an argument times one; "kernel %name": a value that a
# kernel computes.
Ranges = Mapping[str, tuple[int, int]]
# For each axis of a value: which axis of the access it is, or -1.
Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overflows:
    """The answer about one kernel. faults: an operation each, with its line and an example; none: it is proved"""

    kernel: str
    faults: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for people."""
        return f"{self.kernel}: {'not proved: ' + '; '.join(self.faults) if self.faults else 'proved'}"


def prove_no_overflow(ttir: str, ranges: Ranges) -> Overflows:
    """Says which operations on indices of a kernel, given as TTIR, may overflow; any value of its type is else
    possible."""
    name = "kernel"
    try:
        kernel = parse_ttir(ttir)
        name = kernel.name
        return Overflows(name, tuple(_Analysis(kernel, ranges).faults()))
    except UnknownInstruction as unknown:
        return Overflows(name, (str(unknown),))


def needed_ranges(ttir: str, ranges: Ranges, among: Iterable[str]) -> list[str]:
    """Those among some of the ranges without which a kernel is not proved that is proved with them."""
    kernel = parse_ttir(ttir)
    used = {name: ranges[name] for name in sorted(_Analysis(kernel, ranges).used_by_faults())}
    needed = []
    for name in sorted(used.keys() & set(among)):
        others = {each: limits for each, limits in used.items() if each != name}
        if any(_Analysis(kernel, others).faults()):
            needed.append(name)
        else:
            used = others
    return needed


_SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "arith.index_cast")
_FOLDS = ("tt.reduce", "tt.scan")
_LOOPS = ("scf.for", "scf.while")
_FLIPPED = {"slt": "sgt", "sle": "sge", "sgt": "slt", "sge": "sle", "eq": "eq", "ne": "ne"}
_NEGATED = {"slt": "sge", "sle": "sgt", "sgt": "sle", "sge": "slt", "eq": "ne", "ne": "eq"}
_UNSIGNED = {"ult": "slt", "ule": "sle", "ugt": "sgt", "uge": "sge"}


def _axes_of(value: Value) -> Axes:
    return tuple(-1 if size == 1 else axis for axis, size in enumerate(value.kind.shape))


@dataclass(slots=True)
class _Place:
    """The facts where an operation is executed: limits of values, by value and axes. seen: ranges so far"""

    limits: dict[tuple[Value, Axes], tuple[int, int]] = field(default_factory=dict)
    seen: dict[tuple[Value, Axes], Range | None] = field(default_factory=dict)
    inner: dict[tuple[Value, Axes, bool], _Place] = field(default_factory=dict)


class _Analysis:
    """used: names of ranges that were looked up."""

    def __init__(self, kernel: Kernel, ranges: Ranges) -> None:
        self._kernel, self._ranges, self.used = kernel, ranges, set[str]()
        self._operations = list(kernel.operations())
        self._assumes = [each for each in self._operations if each.name == "llvm.intr.assume"]
        self._examples: dict[Operation, str] = {}
        self._numbers: dict[Value, int] = {}
        self._used: dict[Value, int] = {}
        self._fresh: dict[tuple[Value, Operation, Axes], int] = {}
        self._places: dict[tuple[Operation | None, int], _Place] = {}
        # Values that loops carry: their results, and those that their blocks begin with.
        self._carried: dict[Value, Range | None] = {}
        self._settle()

    def faults(self) -> Iterator[str]:
        """A line for each operation that may overflow on the way to an access or a condition."""
        causes = NO_CAUSES.union(*map(self._of_access, self._operations))
        found = [(each, (each.results or each.inner)[0].name) for each in self._operations if each in causes]
        lines = [f"{self._kernel.source_line(each)}: {_stem(name)}: {self._examples[each]}" for each, name in found]
        yield from dict.fromkeys(lines)

    def used_by_faults(self) -> set[str]:
        """The names of the ranges that were looked up."""
        list(self.faults())
        return self.used

    def _of_access(self, op: Operation) -> Causes:
        place = self._place(op)
        if op.name in (*STORES, "tt.load"):
            mask = op.operands[1:2] if op.name == "tt.load" else op.operands[2:3]
            causes = NO_CAUSES
            if mask and op.name != "tt.atomic_cas":
                causes = self._causes(place, mask[0], _axes_of(mask[0]))
                place = self._under(place, mask[0], _axes_of(mask[0]), True)
            return causes | self._causes(place, op.operands[0], _axes_of(op.operands[0]))
        if op.name in ("scf.if", "scf.condition"):
            return self._causes(place, op.operands[0], ())
        if op.name == "scf.for":
            return NO_CAUSES.union(*(self._causes(place, each, ()) for each in (*op.operands[:3], op.inner[0])))
        if "descriptor" in op.name:
            return NO_CAUSES.union(*(self._causes(place, each, _axes_of(each)) for each in op.operands))
        return NO_CAUSES

    def _causes(self, place: _Place, value: Value, axes: Axes) -> Causes:
        found = self._at(place, value, axes)
        return found.causes if found else NO_CAUSES

    # Loops

    def _settle(self) -> None:
        """Finds the ranges of what loops carry: they grow until they hold all values, and shrink again a little."""
        loops = [each for each in self._operations if each.name in _LOOPS]
        carried = [value for each in loops for value in (*each.results, *each.inner[each.name == "scf.for" :])]
        self._carried = dict.fromkeys(carried)
        growths = {value: Growth(limits_of(value.kind) if value.kind.is_number else (0, 0)) for value in carried}
        while self._round(lambda value, before, found: growths[value].after(before, found)):
            pass
        for _ in range(2):
            self._round(lambda value, before, found: joined(found))
        self._carried = {value: found and Range(*found[:2]) for value, found in self._carried.items()}

        def with_causes(value: Value, before: Range | None, found: Sequence[Range | None]) -> Range | None:
            now = joined(found)
            return before and now and Range(*before[:2], before.causes | now.causes)

        # Then with causes, which come from within these limits.
        while self._round(with_causes):
            pass
        self._places.clear()

    def _round(self, merge: Callable[[Value, Range | None, Sequence[Range | None]], Range | None]) -> bool:
        """Computes once what loops carry; true if something has changed."""
        self._places.clear()
        after = {}
        for value, before in self._carried.items():
            sources = self._sources(value)
            after[value] = merge(value, before, [self._at(at, each, _axes_of(each)) for at, each in sources])
        changed, self._carried = after != self._carried, after
        return changed

    def _sources(self, value: Value) -> Iterator[tuple[_Place, Value]]:
        """Where a value that a loop carries comes from."""
        loop = value.op
        assert loop is not None
        if loop.name == "scf.for":
            at = value.index - value.of_block
            last = loop.blocks[0][-1]
            yield self._place(loop), loop.operands[3 + at]
            yield self._place(last), last.operands[at]
            return
        condition, last = loop.blocks[0][-1], loop.blocks[1][-1]
        if value.of_block and value.index < len(loop.operands):
            yield self._place(loop), loop.operands[value.index]
            yield self._place(last), last.operands[value.index]
            return
        at = value.index - len(loop.operands) * value.of_block
        place = self._under(self._place(condition), condition.operands[0], (), value.of_block)
        yield place, condition.operands[1 + at]

    # Conditions

    def _place(self, op: Operation | None) -> _Place:
        """The facts where an operation is executed."""
        parent, block = (op.parent, op.block) if op else (None, 0)
        if (parent, block) not in self._places:
            place = self._place(parent) if parent else _Place()
            if parent and parent.name == "scf.if":
                place = self._under(place, parent.operands[0], (), block == 0)
            for each in self._assumes:
                if (each.parent, each.block) == (parent, block):
                    place = self._under(place, each.operands[0], (), True)
            self._places[parent, block] = place
        return self._places[parent, block]

    def _under(self, place: _Place, condition: Value, axes: Axes, truth: bool) -> _Place:
        """The facts, and those that follow from a condition that is so."""
        key = condition, axes, truth
        if key not in place.inner:
            inner = place.inner[key] = _Place(dict(place.limits), dict(place.seen))
            self._learn(inner, condition, axes, truth)
            if inner.limits == place.limits:
                place.inner[key] = place
        return place.inner[key]

    def _learn(self, place: _Place, condition: Value, axes: Axes, truth: bool) -> None:
        op = condition.op
        if op is None or condition.of_block:
            return
        if op.name in _SAME:
            self._learn(place, op.operands[0], self._axes(op, op.operands[0], axes), truth)
        elif op.name == ("arith.andi" if truth else "arith.ori"):
            for each in op.operands:
                self._learn(place, each, axes, truth)
        elif op.name == "arith.xori" and (other := self._at(place, op.operands[1], axes)) and other[:2] == (1, 1):
            self._learn(place, op.operands[0], axes, not truth)
        elif op.name == "arith.cmpi" and op.operands[0].kind.element != "i1":
            self._compare(place, op, axes, truth)

    def _compare(self, place: _Place, op: Operation, axes: Axes, truth: bool) -> None:
        a, b = op.operands
        one, two = self._at(place, a, axes), self._at(place, b, axes)
        word = op.text.split()[1].rstrip(",")
        if one is None or two is None:
            return
        if word in _UNSIGNED:
            if two.low < 0 or (one.low < 0 and (_UNSIGNED[word] not in ("slt", "sle") or not truth)):
                return
            if one.low < 0:
                self._limit(place, a, axes, 0, two.high)  # a negative number is larger than any other
            word = _UNSIGNED[word]
        word = word if truth else _NEGATED[word]
        for value, has, other, said in ((a, one, two, word), (b, two, one, _FLIPPED[word])):
            if said in ("slt", "sle"):
                self._limit(place, value, axes, has.low, other.high - (said == "slt"))
            elif said in ("sgt", "sge"):
                self._limit(place, value, axes, other.low + (said == "sgt"), has.high)
            elif said == "eq":
                self._limit(place, value, axes, other.low, other.high)
            elif other.low == other.high:  # "ne" a limit
                self._limit(place, value, axes, has.low + (has.low == other.low), has.high - (has.high == other.low))

    def _limit(self, place: _Place, value: Value, axes: Axes, low: int, high: int) -> None:
        """Notes limits of a value, and of what it is made of."""
        has = self._at(place, value, axes)
        if has is None or (low <= has.low and has.high <= high):
            return
        before = place.limits.get((value, axes), (low, high))
        low, high = max(low, before[0]), min(high, before[1])
        place.limits[value, axes] = low, high
        self._uses(value)
        changed = self._numbers[value]
        place.seen = {key: found for key, found in place.seen.items() if not self._uses(key[0]) >> changed & 1}
        op = value.op
        if op is None or value.of_block:
            return
        if op.name in (*_SAME, "arith.extsi"):
            self._limit(place, op.operands[0], self._axes(op, op.operands[0], axes), low, high)
        elif op.name in ("arith.addi", "arith.subi"):
            a, b = op.operands
            one, two = self._at(place, a, axes), self._at(place, b, axes)
            if one is None or two is None:
                return
            sign = 1 if op.name == "arith.addi" else -1
            if two.low == two.high:
                self._limit(place, a, axes, low - sign * two.low, high - sign * two.low)
            elif one.low == one.high and sign == 1:
                self._limit(place, b, axes, low - one.low, high - one.low)

    def _uses(self, value: Value) -> int:
        """The values that a value is computed from, itself included: a bit each."""
        if value not in self._used:
            bits, op = 1 << self._numbers.setdefault(value, len(self._numbers)), value.op
            if op and value not in self._carried:
                sources = op.operands if op.name not in _LOOPS else op.operands[:3]
                for each in (
                    *sources,
                    *(block[-1].operands[value.index] for block in op.blocks if op.name == "scf.if"),
                ):
                    bits |= self._uses(each)
            self._used[value] = bits
        return self._used[value]

    def _axes(self, op: Operation, operand: Value, axes: Axes) -> Axes:
        """The axes of an operand, for those of a result."""
        shape = operand.kind.shape
        if op.name == "tt.expand_dims":
            (axis,) = (int(found) for found in re.findall(r"axis = (\d+)", op.text))
            axes = axes[:axis] + axes[axis + 1 :]
        elif op.name == "tt.trans":
            (order,) = re.findall(r"array<i32: ([\d, ]+)>", op.text)
            places = [int(place) for place in order.split(",")]
            axes = tuple(axes[places.index(axis)] for axis in range(len(axes)))
        elif not shape:
            return ()
        elif op.name in ("tt.reshape", *_FOLDS) or len(shape) != len(axes):
            # Elements that no fact of a mask is about.
            first = -2 - 8 * self._fresh.setdefault((operand, op, axes), len(self._fresh))
            axes = tuple(first - axis for axis in range(len(shape)))
        return tuple(-1 if size == 1 else axis for axis, size in zip(axes, shape, strict=True))

    # Values

    def _at(self, place: _Place, value: Value, axes: Axes) -> Range | None:
        """The range of a value's elements at these axes; None: nothing reaches it yet."""
        key = value, axes
        if key not in place.seen:
            found = self._found(place, value, axes)
            for limits in (place.limits.get(key), self._declared(value)):
                found = found.within(*limits) if found and limits else found
            place.seen[key] = found
        return place.seen[key]

    def _named(self, name: str, kind: Kind) -> Range:
        low, high = limits_of(kind)
        for each in (f"{self._kernel.name} {name}", name):
            if each in self._ranges:
                self.used.add(each)
                return Range(*self._ranges[each]).within(low, high)
        return Range(low, high)

    def _found(self, place: _Place, value: Value, axes: Axes) -> Range | None:
        op = value.op
        if value in self._carried:
            return self._carried[value]
        if value.kind.is_pointer and (op is None or op.name not in ("tt.addptr", "arith.select", "scf.if", *_SAME)):
            return Range(0, 0, self._of_operands(place, op, axes) if op and op.name == "tt.int_to_ptr" else NO_CAUSES)
        if op is None:
            return self._named(value.name, value.kind) if value.kind.is_number else Range(0, 0)
        if value.of_block:
            return self._counter(place, op)
        if op.name == "scf.if":
            found = self._decided(
                place, op.operands[0], (), [block[-1].operands[value.index] for block in op.blocks], axes
            )
        elif op.name == "arith.select":
            of_condition = axes if op.operands[0].kind.shape else ()
            found = self._decided(place, op.operands[0], of_condition, op.operands[1:], axes)
        elif op.name in _SAME:
            found = self._at(place, op.operands[0], self._axes(op, op.operands[0], axes))
        elif op.name == "tt.addptr":
            found = Range(0, 0, self._of_operands(place, op, axes))
        elif not value.kind.is_number:
            found = Range(0, 0)
        else:
            found = self._number(place, value, op, axes)
        return found

    def _of_operands(self, place: _Place, op: Operation, axes: Axes) -> Causes:
        return NO_CAUSES.union(*(self._causes(place, each, self._axes(op, each, axes)) for each in op.operands))

    def _counter(self, place: _Place, loop: Operation) -> Range | None:
        """The counter of scf.for. Its last value may not be followed by one that is out of its type."""
        begin, end, step = (self._at(place, each, ()) for each in loop.operands[:3])
        if begin is None or end is None or step is None:
            return None
        _, most = limits_of(loop.operands[0].kind)
        causes = begin.causes | end.causes | step.causes
        if end.high - 1 + max(step.high, 1) > most and begin.low < end.high and most < 1 << 32:
            causes |= {self._noted(loop, f"a loop to {end.high} by {step.high}")}
        return Range(begin.low, max(begin.low, end.high - 1), causes)

    def _decided(
        self, place: _Place, condition: Value, of_condition: Axes, choices: Sequence[Value], axes: Axes
    ) -> Range | None:
        """One of two values, each where the condition is so."""
        decided = self._at(place, condition, of_condition)
        if decided is None:
            return None
        found = joined(
            [
                self._at(self._under(place, condition, of_condition, truth), each, axes)
                for truth, each in zip((True, False), choices, strict=True)
                if decided[:2] != (1 - truth, 1 - truth)
            ]
        )
        return found and Range(*found[:2], found.causes | decided.causes)

    def _number(self, place: _Place, value: Value, op: Operation, axes: Axes) -> Range | None:
        name, kind = op.name, value.kind
        low, high = limits_of(kind)
        if name == "arith.constant":
            texts = re.findall(
                r"(?<![\w.%])(-?\d+|true|false)\b(?!\.)", op.text.partition(" : ")[0].partition("constant")[2]
            )
            numbers = [int(text == "true") if text in ("true", "false") else int(text) for text in texts]
            return Range(min(numbers), max(numbers)) if numbers else Range(low, high)
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            return self._named(f"program{'s' * (name != 'tt.get_program_id')}_{op.text.split()[1]}", kind)
        if name == "tt.make_range":
            start, end = (int(re.findall(rf"{word} = (\d+)", op.text)[0]) for word in ("start", "end"))
            return Range(start, end - 1)
        if name in ("tt.load", "tt.atomic_rmw", "tt.atomic_cas"):
            return self._loaded(place, value, op, axes)
        if name in _FOLDS:
            return self._folded(place, value, op, axes)
        if name == "arith.cmpi":
            return self._compared(place, op, axes)
        if not all(each.kind.is_number for each in op.operands) or not op.operands:
            return Range(low, high)
        if name in ("arith.andi", "arith.ori") and kind.element == "i1":
            return self._both(place, op, axes)
        operands = [self._at(place, each, self._axes(op, each, axes)) for each in op.operands]
        if None in operands:
            return None
        known = [each for each in operands if each]
        causes = NO_CAUSES.union(*(each.causes for each in known))
        if name in COMPUTED and len(known) == 2:
            limits = COMPUTED[name](known[0], known[1])
        else:
            limits = self._converted(name, op.operands[0].kind, known[0])
        if limits is None:
            return Range(low, high, causes)
        limits = self._related(place, op, axes, limits)
        if declared := self._declared(value):
            limits = min(max(limits[0], declared[0]), declared[1]), max(min(limits[1], declared[1]), declared[0])
        if low <= limits[0] and limits[1] <= high:
            return Range(*limits, causes)
        # Words of bits are shifted, too.
        if kind.element == "i32" and not (name == "arith.shli" and known[0][:2] in ((1, 1), (low, high))):
            causes |= {self._noted(op, f"{name} of {_shown(known)} is {limits[0] if limits[1] <= high else limits[1]}")}
        return Range(low, high, causes)

    def _declared(self, value: Value) -> tuple[int, int] | None:
        names, op = [f"{self._kernel.name} {_stem(value.name)}"], value.op
        if op and op.name == "arith.muli" and op.operands[1].op and op.operands[1].op.name == "arith.constant":
            names += [f"{each.name}*" for each in op.operands if each.op is None]
        for name in names:
            if name in self._ranges:
                self.used.add(name)
                return self._ranges[name]
        return None

    def _related(self, place: _Place, op: Operation, axes: Axes, limits: tuple[int, int]) -> tuple[int, int]:
        """Narrower limits if the operands have to do with each other: a + min(b, c - a) is at most c."""
        low, high = limits
        if op.name == "arith.addi":
            for one, two in (op.operands, op.operands[::-1]):
                for each in _least_of(two):
                    if each.op and each.op.name == "arith.subi" and each.op.operands[1] is one:
                        most = self._at(place, each.op.operands[0], axes)
                        high = min(high, most.high) if most else high
        made_by = {each.op.name for each in op.operands if each.op}
        is_block = op.name == "arith.muli" and made_by == {"tt.get_program_id", "arith.constant"}
        if is_block and "blocks" in self._ranges and limits[0] >= 0:
            self.used.add("blocks")
            high = min(high, self._ranges["blocks"][1])
        return low, max(low, high)

    def _converted(self, name: str, source: Kind, has: Range) -> tuple[int, int] | None:
        """The limits of a conversion, or of an operation on one number."""
        if name in ("arith.extsi", "arith.trunci"):
            return (-has.high, -has.low) if source.element == "i1" else has[:2]
        if name == "arith.extui":
            return has[:2] if has.low >= 0 else (0, (1 << bits_of(source)) - 1)
        return (0, 64) if name in ("math.ctpop", "math.ctlz", "math.cttz") else None

    def _loaded(self, place: _Place, value: Value, op: Operation, axes: Axes) -> Range | None:
        try:
            base = base_of(op.operands[0])
        except UnknownInstruction:
            base = ""
        found = self._named(base, value.kind)
        if op.name == "tt.load" and len(op.operands) == 3:
            other = self._at(place, op.operands[2], axes)
            return found.join(Range(*other[:2])) if other else None
        return found

    def _folded(self, place: _Place, value: Value, op: Operation, axes: Axes) -> Range | None:
        """A sum, or one of the elements."""
        source = op.operands[value.index]
        found = self._at(place, source, self._axes(op, source, axes))
        if found is None:
            return None
        low, high = limits_of(value.kind)
        names = {each.name for each in op.blocks[0]}
        if "arith.muli" in names:
            return Range(low, high, found.causes)
        if "arith.addi" not in names:
            return found
        (axis,) = (int(each) for each in re.findall(r"axis = (\d+)", op.text))
        count = source.kind.shape[axis]
        least, most = min(found.low, found.low * count), max(found.high, found.high * count)
        least, most = Range(least, most).within(*(self._declared(value) or (least, most)))[:2]
        if low <= least and most <= high:
            return Range(least, most, found.causes)
        note = (
            {self._noted(op, f"a sum of {count} numbers up to {found.high} is {most}")}
            if bits_of(value.kind) == 32
            else NO_CAUSES
        )
        return Range(low, high, found.causes | note)

    def _compared(self, place: _Place, op: Operation, axes: Axes) -> Range | None:
        if not op.operands[0].kind.is_number:
            return Range(0, 1)
        a, b = (self._at(place, each, axes) for each in op.operands)
        if a is None or b is None:
            return None
        causes, word = a.causes | b.causes, op.text.split()[1].rstrip(",")
        always = {"slt": a.high < b.low, "sle": a.high <= b.low, "sgt": a.low > b.high, "sge": a.low >= b.high}
        never = {"slt": a.low >= b.high, "sle": a.low > b.high, "sgt": a.high <= b.low, "sge": a.high < b.low}
        return Range(int(always.get(word, False)), int(not never.get(word, False)), causes)

    def _both(self, place: _Place, op: Operation, axes: Axes) -> Range | None:
        """One truth counts only where the other one does not decide."""
        truth = op.name == "arith.andi"
        found = [self._at(place, each, axes) for each in op.operands]
        a, b = found
        if a is None or b is None:
            return None
        low, high = (min(a.low, b.low), min(a.high, b.high)) if truth else (max(a.low, b.low), max(a.high, b.high))
        causes = a.causes | b.causes
        for one, two in ((0, 1), (1, 0)) if causes else ():
            under = self._under(place, op.operands[one], axes, truth)
            second = self._at(under, op.operands[two], axes)
            first = found[one]
            assert first is not None
            causes = min(causes, first.causes | (second.causes if second else NO_CAUSES), key=len)
        return Range(low, high, causes)

    def _noted(self, op: Operation, example: str) -> Operation:
        self._examples[op] = example
        return op


def _least_of(value: Value) -> list[Value]:
    """The values that a value is the least of."""
    if value.op and value.op.name == "arith.minsi":
        return [found for each in value.op.operands for found in _least_of(each)]
    return [value]


def _shown(operands: Sequence[Range]) -> str:
    return " and ".join(f"{each.low}..{each.high}" for each in operands)


@cache
def _stem(name: str) -> str:
    """The name of a value in the source, such as %page; the compiler adds numbers."""
    return re.sub(r"(_\d+)?(:\d+)?$", "", name)

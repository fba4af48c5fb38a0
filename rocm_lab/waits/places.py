"""The places in LDS that loads into LDS write and reads read, as far as they follow from the code.

A load into LDS may be in flight while another part of LDS is read: the other one of two buffers, or a part of its own.
Here a read and a load are apart if their bytes never meet. Registers have bounds, of unsigned numbers of 32 bits; one
without bounds can hold anything. Paths are kept apart where registers with few values differ, as the number of a buffer
does, so that a read of one buffer meets the other one's load alone.

Bounds are of the active lanes. A vector register that is written while EXEC may be a part of the lanes has its earlier
bounds in the others, which come back when EXEC may grow. EXEC is whole at the start, and again where what
s_and_saveexec kept of it comes back.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import EXEC, LANES, M0, NUM_VECTOR
from rocm_lab.simulator.isa.global_memory import access_size
from rocm_lab.simulator.isa.local_memory import reach_of
from rocm_lab.simulator.operands import register
from rocm_lab.waits.bounds import ANYTHING, LARGEST, Bounds, exactly, hull, result_of, within
from rocm_lab.waits.counters import wait_of
from rocm_lab.waits.effects import WITH_A_CONSTANT, Effects, Unit
from rocm_lab.waits.graph import Block, Graph

# A register with more values at the start of a block is given up there, and so are the paths if they are more.
_MOST_VALUES, _MOST_PATHS = 6, 24


# In place of bounds: all lanes.
_WHOLE = Bounds(-1, -1)
_EXEC = NUM_VECTOR + EXEC
# Registers as in registers.py. After them their bounds in lanes that are not active; then, by the number of the load
# into LDS, its place, and whether that can change.
_INACTIVE, _PLACE, _SETTLED = 1_000, 10_000, 1_000_000
_ARRIVED, _SHOWN = Bounds(1, 1), Bounds(2, 2)
Values = dict[int, Bounds]


# They leave SCC, which a comparison has set, as it is.
_KEEP_SCC = ("s_mov_b32", "s_mov_b64", "s_movk_i32", "s_mul_i32", "s_cselect_b32", "s_cselect_b64")


class Places:
    """The places in LDS of one kernel."""

    def __init__(self, instructions: Sequence[Instruction], effects: Mapping[int, Effects], blocks: Graph) -> None:
        self._instructions = instructions
        self._effects = effects
        self._blocks = blocks
        self._settled = _SHOWN if any(instructions[index].name == "s_barrier" for index in effects) else _ARRIVED
        self._meetings: set[tuple[int, int]] = set()
        if any(each.to_lds for each in effects.values()):
            for first, paths in self._entries().items():
                for values in paths:
                    self._after(self._blocks[first], values)

    def may_meet(self, read: int, load: int) -> bool:
        """True if a read of LDS may read what a load into LDS writes; both by index."""
        return (read, load) in self._meetings

    def _entries(self) -> dict[int, list[Values]]:
        """The values of registers before each block, for each path that is kept apart."""
        entries: dict[int, list[Values]] = {0: [{_EXEC: _WHOLE}]}
        seen: dict[int, dict[int, set[Bounds]]] = {first: {} for first in self._blocks}
        waiting = [(0, entries[0][0])]
        while waiting:
            first, values = waiting.pop()
            if values not in entries[first]:
                continue  # given up meanwhile
            after = self._after(self._blocks[first], values)
            for follower in self._blocks[first].followers:
                paths, counted = entries.setdefault(follower, []), seen[follower]
                for name, bounds in after.items():
                    counted.setdefault(name, set()).add(bounds)
                kept = _stable(after, counted)
                if kept not in paths:
                    stable = [_stable(path, counted) for path in (*paths, kept)]
                    if len(stable) > _MOST_PATHS:
                        stable = [_hull_of_all(stable)]
                        for name in {*kept} - {*stable[0]}:
                            counted[name] = {exactly(number) for number in range(_MOST_VALUES + 1)}
                    fresh = [path for n, path in enumerate(stable) if path not in stable[:n]]
                    waiting += [(follower, path) for path in fresh if path not in paths]
                    paths[:] = fresh
        return entries

    def _after(self, block: Block, before: Values) -> Values:
        """The values at the end of a block; notes which reads and loads may meet."""
        values = dict(before)
        compared: Instruction | None = None
        for index in range(block.first, block.last):
            instruction, effects = self._instructions[index], self._effects[index]
            if effects.to_lds:
                self._place(index, values)
            elif instruction.name.startswith("ds_read"):
                self._meet(index, values)
            elif wait_of(instruction).vm == 0:
                values.update({name + _SETTLED: _ARRIVED for name in values if _PLACE <= name < _SETTLED})
            elif instruction.name == "s_barrier":
                values.update({name: _SHOWN for name in values if name >= _SETTLED})
            found = self._result(instruction, values, compared)
            if effects.unit is Unit.SCALAR and instruction.name not in _KEEP_SCC:
                compared = instruction if instruction.name.startswith("s_cmp_") else None
            self._write(instruction, effects, found, values)
            if compared is not None and _names_any(compared, effects.writes):
                compared = None
        return values

    def _place(self, index: int, values: Values) -> None:
        """Notes the place of a load into LDS: lane after lane from M0 on. An earlier one counts until all have seen it.

        Source: AMD Instinct MI300 ISA, "Memory Buffer Load to LDS".
        """
        start = values.get(NUM_VECTOR + M0, ANYTHING)
        offset = self._instructions[index].number("offset")
        place = within(start.low + offset, start.high + offset + LANES * access_size(self._instructions[index]))
        name = _PLACE + index
        if name in values and values.get(name + _SETTLED) != self._settled:
            place = hull(place, values[name])
        values[name] = place
        values.pop(name + _SETTLED, None)

    def _meet(self, index: int, values: Values) -> None:
        instruction = self._instructions[index]
        address, (first, last) = _value(instruction.operands[1], values), reach_of(instruction)
        for name, place in values.items():
            if _PLACE <= name < _SETTLED and address.low + first < place.high and address.high + last > place.low:
                self._meetings.add((index, name - _PLACE))

    def _result(self, instruction: Instruction, values: Values, compared: Instruction | None) -> Bounds:
        first_source = 0 if instruction.name in WITH_A_CONSTANT else 1
        sources = [_value(token, values) for token in instruction.operands[first_source:]]
        if instruction.name == "s_cselect_b32" and compared is not None:
            return _chosen(compared, instruction.operands[1], sources[0], sources[1], values)
        return result_of(instruction, sources)

    def _write(self, instruction: Instruction, effects: Effects, found: Bounds, values: Values) -> None:
        """Gives what an instruction writes its new bounds."""
        restored = ANYTHING
        if instruction.name in ("s_or_b64", "s_mov_b64") and instruction.operands[0] == "exec":
            kept = register(instruction.operands[-1])
            restored = values.get(NUM_VECTOR + kept.index, ANYTHING) if kept is not None else ANYTHING
        is_whole = values.get(_EXEC) == _WHOLE
        written, first = effects.writes, True
        while written:
            name = (written & -written).bit_length() - 1
            written &= written - 1
            bounds = found if first and not written else ANYTHING
            if name < NUM_VECTOR and not is_whole:
                values.setdefault(_INACTIVE + name, values.get(name, ANYTHING))
            if name == _EXEC and restored == _WHOLE:
                bounds = _WHOLE
            first = False
            if bounds == ANYTHING:
                values.pop(name, None)
            else:
                values[name] = bounds
        if effects.writes >> _EXEC & 1 and not _narrows(instruction):
            for name in [name for name in values if _INACTIVE <= name < _PLACE]:
                bounds = hull(values.pop(name), values.get(name - _INACTIVE, ANYTHING))
                values[name - _INACTIVE] = bounds
        if "_saveexec_" in instruction.name and is_whole:
            kept = register(instruction.operands[0])
            assert kept is not None
            values[NUM_VECTOR + kept.index] = _WHOLE


def _value(token: str, values: Values) -> Bounds:
    found = register(token)
    if found is not None:
        index = found.index + (0 if found.is_vector else NUM_VECTOR)
        return values.get(index, ANYTHING) if found.count == 1 and values.get(index) != _WHOLE else ANYTHING
    number = int(token, 0) & LARGEST if token.lstrip("-")[:1].isdigit() and "." not in token else None
    return ANYTHING if number is None else exactly(number)


def _chosen(compared: Instruction, token: str, if_true: Bounds, if_false: Bounds, values: Values) -> Bounds:
    """The bounds of a choice by a comparison of numbers that are not negative; "less than" is enough here."""
    a, b = (_value(each, values) for each in compared.operands)
    if not compared.name.startswith("s_cmp_lt_") or max(a.high, b.high) >= 1 << 31:
        return hull(if_true, if_false)
    if a.high < b.low:
        return if_true
    if a.low >= b.high:
        return if_false
    if compared.operands[0] == token:
        if_true = within(if_true.low, min(if_true.high, b.high - 1), if_true.ones)
    return hull(if_true, if_false)


def _names_any(compared: Instruction, written: int) -> bool:
    named = [register(token) for token in compared.operands]
    return any(found is not None and written >> (NUM_VECTOR + found.index) & 1 for found in named)


def _narrows(instruction: Instruction) -> bool:
    """True if EXEC becomes a part of what it was."""
    of_exec = instruction.operands[:2] == ("exec", "exec") and instruction.name in ("s_and_b64", "s_andn2_b64")
    return of_exec or instruction.name == "s_and_saveexec_b64" or instruction.name.startswith("v_cmpx_")


def _stable(values: Values, counted: Mapping[int, set[Bounds]]) -> Values:
    """Without bounds that change too often; of a place any is possible then."""
    stable: Values = {}
    for name, bounds in values.items():
        if len(counted[name]) <= _MOST_VALUES:
            stable[name] = bounds
        elif _INACTIVE <= name < _SETTLED:
            stable[name] = ANYTHING
    return stable


def _hull_of_all(paths: Sequence[Values]) -> Values:
    """Bounds that hold on every path; loads into LDS, and inactive lanes, of any path are those of all."""
    joined: Values = {}
    for name in {name for path in paths for name in path}:
        found = [path[name] for path in paths if name in path]
        if len(found) < len(paths) and not _INACTIVE <= name < _SETTLED:
            continue
        if len({*found}) == 1 or (name < _SETTLED and _WHOLE not in found):
            joined[name] = found[0] if len({*found}) == 1 else reduce(hull, found)
    return joined

"""A judge of waits that shares nothing with the check: kernels run in the simulator, and every result arrives late.

Data of loads, of LDS stores and of loads into LDS arrives when an s_waitcnt, or a full counter, leaves no other way.
The result of a matrix or vector instruction is hidden from the instructions that hardware does not make wait for it,
until the wait states of the ISA documents are over. Until then a reader sees poison. A kernel whose waits are
sufficient on the paths that a run takes gives the same answer; one that uses a result early gives a wrong one, or
strays.

The numbers are those of the tables in the CDNA3 and CDNA4 documents. Not judged: source C of a matrix instruction that
is overwritten early, data of wide stores, and what a mask of lanes decides.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.assembly import Assembly, Instruction
from rocm_lab.simulator.core import Core
from rocm_lab.simulator.isa.instructions import build_step
from rocm_lab.simulator.isa.step import Step
from rocm_lab.simulator.kernel import SimulatedKernel
from rocm_lab.simulator.lds import Lds

_POISON = np.uint32(0x7FFFFFFF)
_MOST_VM, _MOST_LGKM = 63, 15

# Matrix instructions: passes by their shape, then states by passes.
_PASSES = {
    "32x32x8": 8,
    "16x16x16": 4,
    "32x32x16": 8,
    "16x16x32": 4,
    "32x32x2": 16,
    "16x16x4": 8,
    "32x32x4": 8,
    "16x16x8": 4,
}
_STATES = {"gfx942": {4: 7, 8: 11, 16: 19}, "gfx950": {4: 8, 8: 12, 16: 20}}
_SINGLE_STATES = {8: 10, 16: 18}

Deliver = Callable[[], None]


@dataclass(eq=False)
class _Store:
    """A store to LDS that has not arrived; is_in_order: by an LDS instruction, and not by a load into LDS."""

    offsets: Array
    values: Array
    wave: int
    is_in_order: bool = False


class _LateLds(Lds):
    """Keeps stores back until they are delivered. A wave's reads come after its own earlier stores, as on hardware."""

    def __init__(self, real: Lds) -> None:
        self.real = real
        self.pending: list[_Store] = []

    def barrier(self) -> None:
        self.real.barrier()

    def store(self, offsets: Array, values: Array, wave: int) -> None:
        self.pending.append(_Store(offsets.copy(), values.copy(), wave))

    def load(self, offsets: Array, size: int, wave: int) -> Array:
        self.deliver([each for each in self.pending if each.wave == wave and each.is_in_order])
        return self.real.load(offsets, size, wave)

    def deliver(self, stores: list[_Store]) -> None:
        """Writes those of the stores that are still pending."""
        for each in [each for each in stores if each in self.pending]:
            self.pending.remove(each)
            self.real.store(each.offsets, each.values, each.wave)


@dataclass(slots=True)
class _Computed:
    """Rows of registers that a vector or matrix instruction wrote, which some readers do not see yet."""

    rows: list[int]
    is_vector: bool
    by: str
    age: int = 0


@dataclass(slots=True)
class _Flights:
    """Everything of one wave that has not arrived."""

    vm: list[Deliver] = field(default_factory=list)
    lds: list[Deliver] = field(default_factory=list)
    smem: list[Deliver] = field(default_factory=list)
    computed: list[_Computed] = field(default_factory=list)


class LateKernel(SimulatedKernel):
    """A kernel whose results arrive as late as its waits allow."""

    def __init__(self, assembly: Assembly, arch: str) -> None:
        super().__init__(assembly, arch)
        self._arch = arch
        self._flights: dict[int, _Flights] = {}
        self._plain = [self._late(instruction) for instruction in assembly.instructions]

    def _late(self, instruction: Instruction) -> Step:
        built: list[Step] = []

        def step() -> int | None:
            if not built:
                built.append(build_step(self._context, instruction))
            return self._run_late(instruction, built[0])

        return step

    def _run_late(self, instruction: Instruction, step: Step) -> int | None:
        core, name = self._core, instruction.name
        if not isinstance(core.lds, _LateLds):  # a new program
            core.lds = _LateLds(core.lds)
            self._flights = {}
        flights = self._flights.setdefault(core.wave_number, _Flights())
        hidden = [rows for each in flights.computed for rows in self._hidden(each, instruction)]
        run = partial(_with_poison, core, hidden, step) if hidden else step
        target = None
        if name == "s_waitcnt":
            _wait(flights, instruction.text)
        elif re.match(r"(global|buffer|scratch)_(load|atomic)", name):
            self._load(core, flights.vm, run)
        elif name.startswith("s_load"):
            self._load(core, flights.smem, run)
        elif name.startswith("ds_"):
            self._load(core, flights.lds, run)
        else:
            target = run()
        if name.startswith(("global_store", "buffer_store", "scratch_store")):
            flights.vm.append(lambda: None)
        _deliver(flights.vm, _MOST_VM)
        _deliver(flights.lds, _MOST_LGKM)
        self._note(flights, instruction)
        return target

    def _load(self, core: Core, queue: list[Deliver], step: Step) -> None:
        """Executes a load or an LDS store; the registers that it changed, and LDS, change when it is delivered."""
        vector, scalar = core.vector.copy(), core.scalar.copy()
        lds = core.lds
        assert isinstance(lds, _LateLds)
        before = len(lds.pending)
        step()
        stores = lds.pending[before:]
        for each in stores:
            each.is_in_order = queue is not self._flights[core.wave_number].vm
        changed = np.flatnonzero((vector != core.vector).any(axis=1))
        lanes = vector[changed] != core.vector[changed]
        loaded = core.vector[changed].copy()
        changed_scalars = np.flatnonzero(scalar != core.scalar)
        loaded_scalars = core.scalar[changed_scalars].copy()
        core.vector[changed] = np.where(lanes, _POISON, loaded)
        core.scalar[changed_scalars] = _POISON

        def deliver() -> None:
            now = core.vector[changed]
            core.vector[changed] = np.where(lanes, loaded, now)
            core.scalar[changed_scalars] = loaded_scalars
            lds.deliver(stores)

        queue.append(deliver)

    def _note(self, flights: _Flights, instruction: Instruction) -> None:
        """Ages what was computed, and adds what this instruction computes."""
        name = instruction.name
        states = int(instruction.operands[0], 0) + 1 if name == "s_nop" else 1
        for each in flights.computed:
            each.age += states
        flights.computed = [each for each in flights.computed if each.age < 20]
        if not name.startswith("v_") or "swap" in name:
            return
        written = [instruction.operands[0]]
        if "_co_" in name or name.startswith(("v_div_scale", "v_mad_u64", "v_mad_i64")):
            written.append(instruction.operands[1])
        for token in written:
            rows, is_vector = _rows(token)
            if name.startswith("v_mfma"):  # in order among themselves
                for each in flights.computed:
                    if each.by.startswith("v_mfma"):
                        each.rows = [row for row in each.rows if row not in rows]
            flights.computed.append(_Computed(rows, is_vector, name))

    def _hidden(self, computed: _Computed, instruction: Instruction) -> list[tuple[bool, int]]:
        """Rows that this instruction does not see yet, and for each True if it is of vector registers."""
        name = instruction.name
        rows = computed.rows
        if computed.by.startswith("v_mfma"):
            needed = self._matrix_states(computed.by)
            if name.startswith("v_mfma"):
                rows = [row for token in instruction.operands[1:3] for row in _rows(token)[0] if row in computed.rows]
            elif not name.startswith(("v_", "ds_", "global_", "buffer_", "scratch_")):
                return []
        elif not computed.is_vector:
            is_lane = name in ("v_readlane_b32", "v_writelane_b32") and instruction.operands[2].startswith("s")
            needed = 5 if name.startswith(("global_", "buffer_")) else 4 if is_lane or "div_fmas" in name else 2
            if not name.startswith(("v_", "global_", "buffer_")):
                return []
            if name.startswith(("v_cndmask", "v_addc", "v_subb")):  # a bit for each lane is forwarded
                rows = [row for row in rows if row not in _rows(instruction.operands[-1])[0]]
        elif name.startswith("v_mfma") or instruction.encoding == "dpp":
            needed = 2
        else:
            is_late = re.match(r"v_(exp|log|rcp|rsq|sqrt)", computed.by) and not re.match(
                r"v_(exp|log|rcp|rsq|sqrt)", name
            )
            is_of_lane = name.startswith(("v_readlane", "v_readfirstlane"))
            needed = int(name.startswith("v_") and (is_of_lane or (is_late is not None and bool(is_late))))
        return [(computed.is_vector, row) for row in rows] if computed.age < needed else []

    def _matrix_states(self, name: str) -> int:
        found = re.match(r"v_mfma_f32_(\w+?)_(\w+)", name)
        assert found is not None
        passes = _PASSES[found[1]]
        return _SINGLE_STATES[passes] if found[2] == "f32" else _STATES[self._arch][passes]


def _with_poison(core: Core, hidden: list[tuple[bool, int]], step: Step) -> int | None:
    """Executes an instruction that sees poison in these rows. The late result overwrites what it writes there."""
    vectors = sorted({row for is_vector, row in hidden if is_vector})
    scalars = sorted({row for is_vector, row in hidden if not is_vector})
    kept, kept_scalars = core.vector[vectors].copy(), core.scalar[scalars].copy()
    core.vector[vectors] = _POISON
    core.scalar[scalars] = ~kept_scalars
    target = step()
    core.vector[vectors] = kept
    for row, value in zip(scalars, kept_scalars, strict=True):
        if core.scalar[row] == ~value:
            core.scalar[row] = value
    core.refresh_exec()
    return target


def _rows(token: str) -> tuple[list[int], bool]:
    """The rows of an operand, and whether they are of vector registers."""
    if token == "vcc":
        return [106, 107], False
    found = re.fullmatch(r"([vas])\[?(\d+)(?::(\d+))?\]?", token)
    if found is None:
        return [], True
    first = int(found[2]) + 256 * (found[1] == "a")
    count = int(found[3]) - int(found[2]) + 1 if found[3] else 1
    return list(range(first, first + count)), found[1] != "s"


def _wait(flights: _Flights, text: str) -> None:
    counts = {name: int(count) for name, count in re.findall(r"(\w+cnt)\((\d+)\)", text)}
    _deliver(flights.vm, counts.get("vmcnt", _MOST_VM))
    left = counts.get("lgkmcnt", _MOST_LGKM)
    _deliver(flights.lds, left)
    if left == 0:
        _deliver(flights.smem, 0)


def _deliver(queue: list[Deliver], left: int) -> None:
    while len(queue) > left:
        queue.pop(0)()

"""Which lane a lane reads from under DPP; ISA section 6.8 "Data Parallel Processing (DPP)"."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import LANES
from rocm_lab.simulator.faults import UnknownInstruction

_LANE = np.arange(LANES)
_ROW, _IN_ROW = _LANE & ~15, _LANE & 15
_EVERYWHERE = np.ones(LANES, np.bool_)


@dataclass(frozen=True, slots=True)
class LanePattern:
    """source_lane: int [64]; is_inside: bool [64], whether there is a source; is_enabled: bool [64], by row and bank
    mask; reads_zero: bound_ctrl, a lane without a source reads 0 instead of being left alone."""

    source_lane: Array
    is_inside: Array
    is_enabled: Array
    reads_zero: bool


# Name of the control -> its value -> source lane and whether there is one; lanes come in rows of 16.
_CONTROLS: dict[str, Callable[[int], tuple[Array, Array]]] = {
    "row_shl": lambda n: (_LANE + n, _IN_ROW + n < 16),
    "row_shr": lambda n: (_LANE - n, n <= _IN_ROW),
    "wave_shl": lambda n: (_LANE + n, _LANE + n < LANES),
    "row_ror": lambda n: (_ROW + ((_IN_ROW - n) & 15), _EVERYWHERE),
    "row_newbcast": lambda n: (_ROW + n, _EVERYWHERE),
    "row_mirror": lambda n: (_ROW + 15 - _IN_ROW, _EVERYWHERE),
    "row_half_mirror": lambda n: (_LANE ^ 7, _EVERYWHERE),
    # The last lane of a row to the next row, or lane 31 to the upper half.
    "row_bcast": lambda n: (_ROW - 1, _LANE >= 16) if n == 15 else (np.full(LANES, 31), _LANE >= 32),
}
DPP_MODIFIERS = (*_CONTROLS, "quad_perm", "row_mask", "bank_mask", "bound_ctrl")


def lane_pattern(instruction: Instruction) -> LanePattern:
    """The pattern of a DPP instruction's modifiers. Raises UnknownInstruction."""
    controls = [name for name in instruction.modifiers if name in (*_CONTROLS, "quad_perm")]
    if len(controls) != 1:
        raise UnknownInstruction(f"the DPP control of {instruction.text!r}")
    if controls[0] == "quad_perm":
        lane, inside = (_LANE & ~3) + np.array(instruction.bits("quad_perm", ()))[_LANE & 3], _EVERYWHERE
    else:
        lane, inside = _CONTROLS[controls[0]](int(instruction.modifiers[controls[0]] or 0))
    rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
    enabled = (rows >> (_LANE // 16) & 1).astype(np.bool_) & (banks >> (_IN_ROW // 4) & 1).astype(np.bool_)
    # LLVM writes the bit as it is encoded, except that it once wrote bound_ctrl:0 for 1.
    return LanePattern(np.where(inside, lane, 0), inside, enabled, "bound_ctrl" in instruction.modifiers)

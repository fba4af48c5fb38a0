"""The order of the softmax's work between the products of extend on CDNA (extend_steps.py), by an arch's clocks.

A product of 32 rows and columns keeps the matrix unit for 32 clocks, and the vector unit is free in 24 of them
(rocm_lab/cycles/rates.py has the sources). The steps of a round are dealt out to its products in their order, as many
to each as have room. A step that takes longer ends with a later product: it waits for another lane.
"""

from enum import Enum
from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cdna.extend_layouts import ExtendGeometry, sum_tiles
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_TILES

# Eighths of a block whose weights are computed in round 2.
EIGHTHS_IN_ROUND_2 = gl.constexpr(3)
_FREE = 24
_VECTOR = 4
# Vector instructions of the largest scores of a lane, of the new maximum, and of a pair of float16.
_OF_LANE, _OF_ROW, _PAIR = 4, 5, 3


class Work(Enum):
    """The work of a step, with one of an eighth's four registers, with all of them, or with a row's maximum."""

    FMA = 0
    EXP_2 = 1
    ADD = 2
    ROUND = 3
    PACK = 4
    LARGEST = 5
    OF_LANE = 6
    OF_ROW = 7


class Step(NamedTuple):
    """A step. work: a value of Work; eighth: of those that its round works with; register: of the eighth's four"""

    work: int
    eighth: int
    register: int
    clocks: int


@constexpr_function
def _of_eighth(G: ExtendGeometry, dtype: gl.dtype, eighth: int) -> list[Step]:
    """An eighth's weights. The result of exp2 comes late: the next instruction must not use it."""

    units, adds = G.UNITS, not sum_tiles(G)

    def step(work: Work, register: int = 0, clocks: int = _VECTOR) -> Step:
        return Step(work.value, eighth, register, clocks)

    found = [step(Work.FMA)]
    for register in range(4):
        found += [step(Work.FMA, register + 1)] * (register < 3)
        found += [step(Work.EXP_2, register, units.EXP_2)]
        found += [step(Work.ADD, register - 1)] * (register > 0 and adds)
    last = [step(Work.ADD, 3)] * adds
    if units.ROUNDS_PAIRS:
        return [*found, *last, step(Work.PACK, clocks=2 * _VECTOR)]
    if dtype == gl.float16:
        return [*found, *last, step(Work.PACK, clocks=2 * _PAIR * _VECTOR)]
    found += [step(Work.ROUND, register, 2 * _VECTOR) for register in range(3)]
    return [*found, *last, step(Work.ROUND, 3, 2 * _VECTOR), step(Work.PACK, clocks=2 * _VECTOR)]


@constexpr_function
def _steps(G: ExtendGeometry, dtype: gl.dtype, number: int) -> list[Step]:
    """The steps of a round, 1 or 2."""
    eighths = EIGHTHS_IN_ROUND_2.value if number == 2 else 8 - EIGHTHS_IN_ROUND_2.value
    weights = [step for eighth in range(eighths) for step in _of_eighth(G, dtype, eighth)]
    if number == 1:
        return weights
    # Two eighths more each: four maxima of three. Those of a lane have the last eighth.
    largest = [Step(Work.LARGEST.value, eighth, 0, 4 * _VECTOR) for eighth in (0, 2, 4)]
    of_lane = Step(Work.OF_LANE.value, 0, 0, _OF_LANE * _VECTOR)
    return [*largest, of_lane, Step(Work.OF_ROW.value, 0, 0, _OF_ROW * _VECTOR + G.UNITS.EXCHANGE), *weights]


@constexpr_function
def end_of(G: ExtendGeometry, dtype: gl.dtype, number: int, product: int) -> int:
    """The number of steps that are done when a round's next product begins: those that hide next to products."""
    steps = _steps(G, dtype, number)
    done, left = 0, steps[0].clocks
    for _ in range(product + 1):
        room = _FREE
        while done < len(steps) and left <= room:
            room -= left
            done += 1
            left = steps[done].clocks if done < len(steps) else 0
        if left > _FREE:
            left -= room
    return done


@constexpr_function
def num_hidden(G: ExtendGeometry, dtype: gl.dtype, number: int) -> int:
    """The number of a round's steps that hide next to its products. The others follow without one."""
    elements = EXTEND_TILES.key_block * (G.HEADS.DIM if number == 1 else G.HEADS.V_DIM + 32 * sum_tiles(G)) // 32
    return int(end_of(G, dtype, number, elements // G.UNITS.DEPTH - 1))


@constexpr_function
def num_steps(G: ExtendGeometry, dtype: gl.dtype, number: int) -> int:
    """The number of a round's steps."""
    return len(_steps(G, dtype, number))


@constexpr_function
def step_of(G: ExtendGeometry, dtype: gl.dtype, number: int, at: int) -> Step:
    """A step of a round."""
    steps: list[Step] = _steps(G, dtype, number)
    return steps[at]

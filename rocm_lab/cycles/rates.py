"""Issue rules of a SIMD of CDNA3 (gfx942) and CDNA4 (gfx950): each constant once, with its source. Unit: clocks.

A SIMD holds the waves of one or more programs. A wave issues in order, and at most one instruction every STEP clocks.
Waves share the units of their SIMD: the matrix unit, the vector unit, the scalar unit and the memory port, which LDS
and vector memory have in common. Instructions of different waves may go to different units in the same clock.

Sources, by the names that the constants cite:

    ISA       "AMD Instinct MI300 Instruction Set Architecture" and the one of CDNA4, section 7: passes of 4 clocks
    LLVM      SISchedule.td (HWWriteRes of SIDPGFX940FullSpeedModel and SIDPGFX950FullSpeedModel; steps of 4 clocks),
              SIPreEmitPeephole.cpp (packed operations next to matrix instructions)
    fav4      ROCm/gfx950-gluon-tutorials, kernels/attention/README.md, sections 1, 2 and 7
    notes     the same repository, kernels/attention/note.md and mfma_coissue_scheduling.md
    lds       the same repository, docs/lds_throughput.md
    gemm      the same repository, kernels/gemm/intra_wave/a16w16
    CDNA4     "Introducing AMD CDNA 4 Architecture", white paper: twice the transcendental rate and twice the bandwidth
              of LDS reads of CDNA 3
"""

import re
from dataclasses import dataclass
from enum import Enum

# A SIMD has 16 lanes and takes 4 clocks to issue for the 64 of a wave (lds, 1.1).
STEP = 4
LANES = 64
SIMDS = 4
# A pass of the matrix unit (ISA 7.6). The next matrix instruction issues when the passes of this one are over.
PASS = 4
# A matrix instruction reads its sources for so long, and the vector unit issues nothing meanwhile (fav4, 2).
MATRIX_READ = 8
# A packed float32 operation issues neither with a matrix instruction nor for this number of clocks after one (notes).
PACKED_AFTER_MATRIX = 12
# A wait state of s_nop is an issue slot (ISA 4.5: the states after 8 passes are 11 and more, which cover 32 clocks).
WAIT_STATE = 4
# A branch that is taken (LLVM: 8 steps).
BRANCH = 32
# From the last wave that arrives until the others issue. No public document has it: assumed. A loop of matrix
# instructions and barriers alone takes 4,105 clocks for 4,096 of products (notes, 1.1), so its 8 hand-overs hide in the
# 28 clocks after each last matrix instruction. From 8 to 24, the counts of docs/cycles.md change by 1 to 2 %.
BARRIER = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """The rules in which the two archs differ.

    transcendental:  a wave of exp2, a reciprocal and so on: CDNA3 a quarter of the rate (ISA), CDNA4 twice that (CDNA4,
                     and fav4, 2: 8 clocks)
    lds_read:        bytes of a clock and CU: 32 banks of 4 bytes on CDNA3, 64 on CDNA4 (lds, 1.3)
    lds_write:       the same for stores, which CDNA4 did not widen
    """

    transcendental: int
    lds_read: int
    lds_write: int


RATES = {"gfx942": Rates(16, 128, 128), "gfx950": Rates(8, 256, 128)}

# 32-bit products and others of a quarter of the rate (ISA).
QUARTER = 16
# v_permlane swaps write two registers. An exchange is 5 slots (notes, 3.11), of which a move and s_nop 1 take 3.
PERMLANE_SWAP = 8
# From issue to data without others before it: 50 to 70. A pair of SIMDs has a queue of 8 requests, which makes 4 of a
# SIMD when all do the same (lds, 1.6).
LDS_LATENCY = 64
LDS_QUEUE = 4
# Vector memory delivers 64 bytes of a clock and CU: one load of 16 bytes a lane in 64 clocks of a SIMD (gemm, v5, 5.1).
VECTOR_MEMORY = 64
# A load that a cache has: about 400 (gemm, README, v4). Assumed for all loads; scalar ones: assumed.
MEMORY_LATENCY = 400
SCALAR_LATENCY = 200


class Kind(Enum):
    """The work of a vector instruction."""

    PLAIN = "plain"
    PACKED = "packed float32"
    TRANSCENDENTAL = "transcendental"
    QUARTER = "quarter rate"
    SWAP = "swap of lanes"


_KINDS = (
    (Kind.PACKED, re.compile(r"v_pk_(?:fma|mul|add)_f32|v_pk_mov_b32")),
    (Kind.TRANSCENDENTAL, re.compile(r"v_(?:exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(?:legacy_)?f(?:16|32)")),
    (Kind.QUARTER, re.compile(r"v_mul_(?:lo|hi)_[iu]32|v_mad_[iu]64_[iu]32|v_(?:exp|log|rcp|rsq|sqrt)_f64")),
    (Kind.SWAP, re.compile(r"v_permlane(?:16|32)_swap_b32")),
)


def kind_of(name: str) -> Kind:
    """The kind of a vector instruction by its mnemonic."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), Kind.PLAIN)


def vector_clocks(kind: Kind, arch: str) -> int:
    """Clocks for which a vector instruction keeps the vector unit."""
    slow = {Kind.TRANSCENDENTAL: RATES[arch].transcendental, Kind.QUARTER: QUARTER, Kind.SWAP: PERMLANE_SWAP}
    return slow.get(kind, STEP)

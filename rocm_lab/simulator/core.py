"""The registers of the running wave, and the state that a wave keeps while another one runs.

Every instruction of a kernel is built once, over the arrays of one core; a wave that gets its turn is copied into them.
Numbers of scalar registers and initial state: "AMD Instinct MI300 Instruction Set Architecture", chapter 3.
"""

from dataclasses import dataclass

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Memory

LANES = 64
VCC, M0, EXEC = 106, 124, 126
# a0 to a255 follow v0 to v255.
ACCUMULATION = 256
NUM_VECTOR, NUM_SCALAR = 512, 128

# NaN in float32, in float16 and bfloat16 (each half) and the largest int32: as an address, outside of everything.
POISON = 0x7FFFFFFF


@dataclass(slots=True, eq=False)
class Wave:
    """A wave that is not running: its number in the program and a copy of everything that an instruction can change.

    steps: instructions of turns that ended before a barrier
    """

    number: int
    vector: Array
    scalar: Array
    scratch: Array
    scc: int = 0
    pc: int = 0
    steps: int = 0


class Core:
    """The state that instructions read and write.

    vector:      uint32 [512, 64], v and then a registers by lane
    scalar:      uint32 [128]; 106 is VCC, 124 M0, 126 EXEC
    active:      bool [64], EXEC by lane; all_active and any_active summarise it
    scratch:     uint32 [words, 64], private memory of the running wave
    scc:         the scalar condition code
    wave_number: of the running wave in its program
    """

    def __init__(self, memory: Memory) -> None:
        self.vector = np.zeros((NUM_VECTOR, LANES), np.uint32)
        self.scalar = np.zeros(NUM_SCALAR, np.uint32)
        self._scalar_bytes = self.scalar.view(np.uint8)
        self.active = np.ones(LANES, np.bool_)
        self.all_active = True
        self.any_active = True
        self.scratch = np.zeros((0, LANES), np.uint32)
        self.scc = 0
        self.wave_number = 0
        self.memory = memory
        self.lds = Lds(0, POISON)

    def read_pair(self, index: int) -> int:
        """Returns two scalar registers as one number of 64 bits."""
        return int(self.scalar[index]) | int(self.scalar[index + 1]) << 32

    def write_pair(self, index: int, value: int) -> None:
        """Writes the low 64 bits of value to two scalar registers."""
        self.scalar[index] = value & 0xFFFFFFFF
        self.scalar[index + 1] = value >> 32 & 0xFFFFFFFF
        if index == EXEC:
            self.refresh_exec()

    def write_scalar(self, index: int, value: int) -> None:
        """Writes the low 32 bits of value to a scalar register."""
        self.scalar[index] = value & 0xFFFFFFFF
        if index >= EXEC:
            self.refresh_exec()

    def read_mask(self, index: int) -> Array:
        """Returns two scalar registers as bool [64]."""
        return np.unpackbits(self._scalar_bytes[4 * index : 4 * index + 8], bitorder="little").view(np.bool_)

    def write_mask(self, index: int, mask: Array) -> None:
        """Writes mask, in which inactive lanes are 0, to two scalar registers."""
        self._scalar_bytes[4 * index : 4 * index + 8] = np.packbits(mask & self.active, bitorder="little")
        if index == EXEC:
            self.refresh_exec()

    def refresh_exec(self) -> None:
        """Updates the lane masks from EXEC."""
        self.active[:] = self.read_mask(EXEC)
        lanes = self.read_pair(EXEC)
        self.all_active = lanes == (1 << LANES) - 1
        self.any_active = lanes != 0

    def resume(self, wave: Wave) -> None:
        """Makes wave the running one."""
        self.vector[: len(wave.vector)] = wave.vector
        self.scalar[:] = wave.scalar
        self.scratch = wave.scratch
        self.scc = wave.scc
        self.wave_number = wave.number
        self.refresh_exec()

    def suspend(self, wave: Wave) -> None:
        """Keeps the running wave's registers in wave."""
        wave.vector[:] = self.vector[: len(wave.vector)]
        wave.scalar[:] = self.scalar
        wave.scc = self.scc

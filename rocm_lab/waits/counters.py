"""The counters of gfx9: which operations count, and which of them an s_waitcnt proves complete.

Sources: "AMD Instinct MI300 Instruction Set Architecture" and the one of CDNA4, section 4.4 "Data Dependency
Resolution":

    vmcnt    6 bits; loads, stores, atomics and loads into LDS. "Memory reads and writes return in the order they were
             issued, including mixing reads and writes": vmcnt(N) proves all but the last N.
    lgkmcnt  4 bits; LDS, which is in order, and scalar memory, which is in any order: of scalar loads only lgkmcnt(0)
             proves anything, of LDS lgkmcnt(N) proves all but the last N operations of LDS.
    expcnt   of exports and GDS alone. A store to memory needs none: hardware locks its data until it has read them, but
             for the wait states of wide stores (hazards.py), as LLVM's vmemWriteNeedsExpWaitcnt has it since GFX8.

A counter that is full stops the next instruction, so that 63 later memory operations, or 15 later ones of LDS, prove
an operation too, and the largest count in s_waitcnt waits for nothing (ROCm/rocm-systems#11202).
"""

import re
from dataclasses import dataclass
from enum import Enum

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.effects import Effects, Unit


class Queue(Enum):
    """Operations that complete in order among themselves; of scalar memory they do not."""

    VECTOR_MEMORY = "vmcnt"
    LOCAL_MEMORY = "lgkmcnt"
    SCALAR_MEMORY = "lgkmcnt of scalar memory"


VM_MOST, LGKM_MOST = 63, 15
# Later operations of a queue that prove an earlier one without a wait.
CAPACITY = {Queue.VECTOR_MEMORY: VM_MOST, Queue.LOCAL_MEMORY: LGKM_MOST, Queue.SCALAR_MEMORY: None}

_NUMBER = r"0[xX][0-9a-fA-F]+|[0-9]+"

_QUEUES = {
    Unit.VECTOR_MEMORY: Queue.VECTOR_MEMORY,
    Unit.LOCAL_MEMORY: Queue.LOCAL_MEMORY,
    Unit.SCALAR_MEMORY: Queue.SCALAR_MEMORY,
}


def queue_of(effects: Effects) -> Queue | None:
    """The queue that an instruction joins."""
    return _QUEUES.get(effects.unit)


@dataclass(frozen=True, slots=True)
class Wait:
    """The counts of an s_waitcnt; the largest ones wait for nothing."""

    vm: int = VM_MOST
    lgkm: int = LGKM_MOST

    def left(self, queue: Queue) -> int | None:
        """The operations of the queue that may be in flight after it; None: all of them."""
        if queue is Queue.VECTOR_MEMORY:
            return self.vm if self.vm < VM_MOST else None
        if queue is Queue.SCALAR_MEMORY:
            return 0 if self.lgkm == 0 else None
        return self.lgkm if self.lgkm < LGKM_MOST else None


NO_WAIT = Wait()


def wait_of(instruction: Instruction) -> Wait:
    """The counts of an instruction; those of one that is no s_waitcnt wait for nothing.

    A number has vmcnt in bits 3:0 and 15:14, lgkmcnt in 11:8. Raises UnknownInstruction.
    """
    if instruction.name != "s_waitcnt":
        return NO_WAIT
    counts = instruction.text.removeprefix(instruction.name).strip()
    named = {name: int(count, 0) for name, count in re.findall(rf"(vmcnt|expcnt|lgkmcnt)\(({_NUMBER})\)", counts)}
    if named:
        return Wait(min(named.get("vmcnt", VM_MOST), VM_MOST), min(named.get("lgkmcnt", LGKM_MOST), LGKM_MOST))
    if not re.fullmatch(_NUMBER, counts):
        raise UnknownInstruction(f"the counts of {instruction.text!r}")
    bits = int(counts, 0)
    return Wait(bits & 15 | (bits >> 14 & 3) << 4, bits >> 8 & 15)

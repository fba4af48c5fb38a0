"""The work of a decode's hot loop for the bytes of K and V that it reads.

Decode is bound by memory, so that a loop is good if it reads many bytes with few instructions and waits, and if many
bytes are in flight. A loop reads K and V by loads of 8 bytes a lane and more, and by those into LDS; narrower ones read
page numbers and scales. The loop is the innermost one with the most matrix instructions (loops.py), so figures are of a
byte however often it is unrolled; what it loads in one iteration and uses in a later one counts once. Lanes that are
switched off, and those that read the same bytes, count as if they read others.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rocm_lab.cycles import rates
from rocm_lab.cycles.issue import lane_bytes
from rocm_lab.cycles.loops import hot_loop
from rocm_lab.simulator.assembly import Assembly, Instruction
from rocm_lab.waits.counters import VM_MOST, Queue, wait_of

_KIB = 1024
_WIDE = 8
_MATRIX = ("v_mfma_", "v_smfmac_")
_VECTOR_MEMORY = ("buffer_", "global_", "flat_", "scratch_")


@dataclass(frozen=True, slots=True)
class LoopTraffic:
    """A wave's work in an iteration.

    kv_bytes:     of K and V that it loads
    instructions: all of them; matrix, waits (s_waitcnt) and barriers are among them
    lds_bytes:    that move into and out of LDS, and between lanes by its network
    in_flight:    the most bytes of K and V that are loaded and not waited for, at any time
    """

    kv_bytes: int
    instructions: int
    matrix: int
    waits: int
    barriers: int
    lds_bytes: int
    in_flight: int

    def of_kib(self, number: int) -> float:
        """One of the numbers for a KiB of K and V."""
        return number * _KIB / self.kv_bytes


def loop_traffic(
    assembly: Assembly, kv_loads: tuple[str, ...] = _VECTOR_MEMORY, *, narrowest: int = _WIDE
) -> LoopTraffic | None:
    """The traffic of the hot loop; None if no loop has matrix instructions, or it has no such load.

    kv_loads:  what the names of loads of K and V begin with, where others are as wide
    narrowest: the fewest bytes of a lane that such a load has, if it is not into LDS
    Raises UnknownInstruction.
    """
    loop = hot_loop(assembly)
    read = [_kv_bytes(each, narrowest) if each.name.startswith(kv_loads) else 0 for each in loop.body] if loop else []
    if loop is None or not any(read):
        return None
    names = [each.name for each in loop.body]
    return LoopTraffic(
        kv_bytes=sum(read),
        instructions=len(names),
        matrix=sum(name.startswith(_MATRIX) for name in names),
        waits=names.count("s_waitcnt"),
        barriers=names.count("s_barrier"),
        lds_bytes=sum(map(_lds_bytes, loop.body)),
        in_flight=_most_in_flight(loop.body, read),
    )


def _is_into_lds(instruction: Instruction) -> bool:
    return "_load_lds_" in instruction.name or instruction.text.endswith(" lds")


def _kv_bytes(instruction: Instruction, narrowest: int) -> int:
    lane = lane_bytes(instruction.name)
    is_load = instruction.name.startswith(_VECTOR_MEMORY) and "_load_" in instruction.name
    return lane * rates.LANES if is_load and (lane >= narrowest or _is_into_lds(instruction)) else 0


def _lds_bytes(instruction: Instruction) -> int:
    is_access = instruction.name.startswith("ds_") or _is_into_lds(instruction)
    return lane_bytes(instruction.name) * rates.LANES if is_access else 0


def _most_in_flight(body: Sequence[Instruction], read: Sequence[int]) -> int:
    """The most of two iterations, so that the second one begins with what the first one left in flight.

    read: bytes of K and V that each instruction loads
    """
    flying, most = deque[int](maxlen=VM_MOST), 0
    for each, num_bytes in (*zip(body, read, strict=True), *zip(body, read, strict=True)):
        if each.name.startswith(_VECTOR_MEMORY):
            flying.append(num_bytes)
            most = max(most, sum(flying))
        left = wait_of(each).left(Queue.VECTOR_MEMORY)
        while left is not None and len(flying) > left:
            flying.popleft()
    return most

"""The hot loop of a compiled AMD kernel, and the bytes that a lane moves in an iteration of it."""

import re

from triton.compiler import CompiledKernel

from rocm_lab.cycles.loops import Loop, hot_loop
from rocm_lab.simulator.assembly import parse_assembly

# Words that a load or store of LDS moves for each lane: ds_read2st64_b64 moves two of 64 bits.
_LDS_ACCESS = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_(?:[biu])(\d+)")
_LOAD = re.compile(r"(?:buffer|global)_load_(?:lds_)?(dword(?:x(\d))?|\w+)")
_LOADS = ("buffer_load_", "global_load_")


def hot_loop_of(kernel: CompiledKernel) -> Loop:
    """Returns the innermost loop with the most matrix instructions. Raises ValueError if no loop has one."""
    loop = hot_loop(parse_assembly(kernel.asm["amdgcn"]))
    if loop is None:
        raise ValueError("no loop of the kernel has a matrix instruction")
    return loop


def lds_bytes(loop: Loop) -> int:
    """Bytes that a lane reads from and writes to LDS."""
    return sum(_lds_bytes(each.text) for each in loop.body)


def loaded_bytes(loop: Loop) -> int:
    return sum(_load_bytes(each.text) for each in loop.body if is_load(each.text))


def bytes_in_flight(loop: Loop) -> int:
    """The fewest bytes of a lane that a wait for loads leaves in flight, once the loop goes round."""
    flight: list[int] = []
    left: list[int] = []
    for each in loop.body * 2:
        if is_load(each.text):
            flight.append(_load_bytes(each.text))
        elif found := re.match(r"s_waitcnt .*vmcnt\((\d+)\)", each.text):
            flight = flight[max(len(flight) - int(found[1]), 0) :]
            left.append(sum(flight))
    return min(left[len(left) // 2 :])


def is_load(instruction: str) -> bool:
    """True if it loads from memory, into registers or LDS; scalar loads are not counted."""
    return instruction.startswith(_LOADS)


def _lds_bytes(instruction: str) -> int:
    if is_load(instruction) and re.search(r"\blds\b|_lds_", instruction):
        return _load_bytes(instruction)
    if found := _LDS_ACCESS.match(instruction):
        return int(found[2]) // 8 * (2 if found[1] else 1)
    # Exchanges between lanes go through LDS, one word each.
    return 4 if instruction.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")) else 0


def _load_bytes(instruction: str) -> int:
    found = _LOAD.match(instruction)
    assert found, instruction
    if found[1].startswith("dword"):
        return 4 * int(found[2] or 1)
    return 2 if "short" in found[1] else 1

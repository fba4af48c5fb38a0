"""Registers that machine code for NVIDIA reads on a path on which nothing has written them: a compiler's fault.

The ptxas of CUDA 12.8, which Triton 3.6 brings, added to a uniform register that nothing had written, and the sum
described a matrix in shared memory to a product. PTX was right, and the product read memory that was not its own.

From the registers that each instruction reads and writes (nvidia_code.py) follows what was written before it on every
path. A write under a predicate is a write: code that reads the value under the same predicate is right, and so is a
value that only lanes exchange which do not use it. A register that is written under a wrong predicate is not found.
Memory is not followed: neither shared memory nor the stack, to which ptxas spills.
"""

from collections.abc import Iterator
from functools import partial, reduce
from operator import and_

from tests.amd.offline.nvidia_code import Code, code_of, names_of

# Code after the end of a kernel.
_PADDING = {"NOP", "BRA"}


def reads_of_unwritten(listing: str) -> list[str]:
    """Returns what the kernels of a listing of nvdisasm read unwritten, a line each. Raises ValueError as code_of()."""
    return [line for code in code_of(listing) for line in unwritten_registers(code)]


def unwritten_registers(code: Code) -> Iterator[str]:
    """Yields the reads of registers that some path has not written. Raises ValueError for code that is not known."""
    written = _written_before(code, 0)
    for place, step in enumerate(code.steps):
        if place not in written:
            if step.name not in _PADDING:
                raise ValueError(f"{code.name}: no path that is known leads to {step}")
        elif not step.is_copy and (unwritten := step.reads & ~written[place]):
            yield f"{code.name}: {step} reads {', '.join(names_of(unwritten))}, which not every path has written"


def _written_before(code: Code, begin: int) -> dict[int, int]:
    """Returns what every path from a place has written before each instruction."""
    return code.before_each(0, partial(_after, code), and_, begin)


def _after(code: Code, place: int, follower: int, written: int) -> int:
    """Returns what is written after an instruction: what it writes, and the function that it has called, if any."""
    step = code.steps[place]
    if step.is_copy and step.reads & ~written:
        return written if step.predicate else written & ~step.writes
    if step.name == "CALL" and follower == place + 1:
        written |= _written_by(code, code.targets(place)[0])
    return written | step.writes


def _written_by(code: Code, function: int) -> int:
    """Returns what every path through a function writes."""
    before = _written_before(code, function)
    returns = [before[place] for place in before if code.steps[place].name == "RET"]
    if not returns:
        raise ValueError(f"the function that begins with {code.steps[function]} does not return")
    return reduce(and_, returns)

"""The loop in which a compiled AMD kernel spends its time, cut out of its assembly.

The loops of a kernel are the ranges of text from a label to a branch back to it. The hot loop contains no other loop
and has the most matrix instructions; among equals it has the most loads, and then the fewest instructions, which
chooses the loop without masks if a kernel also has one with masks. The text is read in order: a branch inside the loop
counts as not taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"(\.LBB\w+):")
_BRANCH = re.compile(r"\s+s_c?branch\w*\s+(\.LBB\w+)")
_INSTRUCTION = re.compile(r"[a-z]+_[a-z0-9_]+")
# Words that a load or store of LDS moves for each lane: ds_read2st64_b64 moves two of 64 bits.
_LDS_ACCESS = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_(?:[biu])(\d+)")
_LOAD = re.compile(r"(?:buffer|global)_load_(?:lds_)?(dword(?:x(\d))?|\w+)")
_MATRIX = ("v_mfma_", "v_smfmac_")
_LOADS = ("buffer_load_", "global_load_")


@dataclass(frozen=True, slots=True)
class HotLoop:
    """The instructions of one iteration, in order, without comments and labels."""

    instructions: tuple[str, ...]

    @property
    def matrix_ops(self) -> int:
        return sum(is_matrix_op(text) for text in self.instructions)

    @property
    def loads(self) -> int:
        return sum(is_load(text) for text in self.instructions)

    @property
    def lds_bytes(self) -> int:
        """Bytes that a lane reads from and writes to LDS."""
        return sum(map(_lds_bytes, self.instructions))

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a lane loads from memory."""
        return sum(_load_bytes(text) for text in self.instructions if is_load(text))


def hot_loop(assembly: str) -> HotLoop:
    """Returns the hot loop of a kernel. Raises ValueError if there is no loop."""
    lines = assembly.splitlines()
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = {}
    for place, line in enumerate(lines):
        found = _BRANCH.match(line)
        # Several branches back to one label are one loop, which ends at the last.
        if found and labels[found[1]] < place:
            loops[labels[found[1]]] = place
    innermost = [
        HotLoop(tuple(instructions(lines[first : last + 1])))
        for first, last in loops.items()
        if not any(first < other <= last for other in loops)
    ]
    if not innermost:
        raise ValueError("the assembly has no loop")
    return max(innermost, key=lambda loop: (loop.matrix_ops, loop.loads, -len(loop.instructions)))


def is_matrix_op(instruction: str) -> bool:
    """True if the matrix unit computes it."""
    return instruction.startswith(_MATRIX)


def is_load(instruction: str) -> bool:
    """True if it loads from memory, into registers or LDS; scalar loads are not counted."""
    return instruction.startswith(_LOADS)


def instructions(lines: list[str]) -> list[str]:
    """Returns the instructions in some lines of assembly, without comments and labels."""
    texts = [line.partition(";")[0].strip() for line in lines]
    return [text for text in texts if _INSTRUCTION.match(text)]


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

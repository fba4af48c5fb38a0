"""The control-flow graph of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.faults import UnknownInstruction

_BRANCHES = ("s_branch", "s_cbranch_")
_ENDS_A_BLOCK = (*_BRANCHES, "s_endpgm")
_NEVER_GO_ON = ("s_branch", "s_endpgm")


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions first to last - 1, which run one after the other, and the blocks that may follow."""

    name: str
    first: int
    last: int
    next_blocks: tuple[int, ...]


def blocks_of(assembly: Assembly) -> tuple[Block, ...]:
    """The blocks in order; the first is the entry. Raises UnknownInstruction for a branch that leads nowhere known."""
    instructions = assembly.instructions
    starts = {0}
    for index, instruction in enumerate(instructions):
        if instruction.name.startswith(_ENDS_A_BLOCK):
            starts |= {index + 1, *(assembly.labels.get(token, 0) for token in instruction.operands)}
    ordered = sorted(start for start in starts if start < len(instructions))
    number = {start: block for block, start in enumerate(ordered)}
    names = {index: label for label, index in reversed(assembly.labels.items())}
    blocks = []
    for first, last in zip(ordered, [*ordered[1:], len(instructions)], strict=True):
        ending = instructions[last - 1]
        following = []
        if ending.name.startswith(_BRANCHES):
            target = assembly.labels.get(ending.operands[0])
            if target not in number:
                raise UnknownInstruction(f"the target of {ending.text!r}")
            following.append(number[target])
        if ending.name not in _NEVER_GO_ON:
            if last not in number:
                raise UnknownInstruction(f"{assembly.name} runs past its last instruction")
            following.append(number[last])
        blocks.append(Block(names.get(first, f"instruction {first}"), first, last, tuple(dict.fromkeys(following))))
    return tuple(blocks)

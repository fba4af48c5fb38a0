"""The control-flow graph of a kernel: the code that its first instruction leads to, and no other."""

from dataclasses import dataclass

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.faults import UnknownInstruction

_BRANCHES = ("s_branch", "s_cbranch_")
_ENDS_A_BLOCK = (*_BRANCHES, "s_endpgm")
_NEVER_GO_ON = ("s_branch", "s_endpgm")


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions first to last - 1, which run one after the other, and the first ones of blocks that may follow."""

    name: str
    first: int
    last: int
    followers: tuple[int, ...]


Graph = dict[int, Block]


def blocks_of(assembly: Assembly) -> Graph:
    """The blocks by their first instruction, the entry with 0 first.

    Raises UnknownInstruction for a branch that leads nowhere known, and for code that has no end.
    """
    instructions = assembly.instructions
    starts = {0}
    for index, instruction in enumerate(instructions):
        if instruction.name.startswith(_ENDS_A_BLOCK):
            starts |= {index + 1, *(assembly.labels.get(token, 0) for token in instruction.operands)}
    ends = dict(zip(sorted(starts), [*sorted(starts)[1:], len(instructions)], strict=True))
    names = {index: label for label, index in sorted(assembly.labels.items(), reverse=True)}
    blocks: Graph = {}
    waiting = [0]
    while waiting:
        first = waiting.pop()
        if first in blocks:
            continue
        if first >= len(instructions):
            raise UnknownInstruction(f"{assembly.name} runs past its last instruction")
        last = ends[first]
        followers = _followers(assembly, last)
        blocks[first] = Block(names.get(first, f"instruction {first}"), first, last, followers)
        waiting += followers
    return blocks


def _followers(assembly: Assembly, last: int) -> tuple[int, ...]:
    ending = assembly.instructions[last - 1]
    followers = []
    if ending.name.startswith(_BRANCHES):
        target = assembly.labels.get("".join(ending.operands[:1]))
        if target is None:
            raise UnknownInstruction(f"the target of {ending.text!r}")
        followers.append(target)
    if ending.name not in _NEVER_GO_ON:
        followers.append(last)
    return tuple(dict.fromkeys(followers))

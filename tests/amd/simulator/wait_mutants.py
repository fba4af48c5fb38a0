"""Mutants of machine code: each wait and each no-op removed, and each made weaker by one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rocm_lab.simulator.assembly import Assembly, parse_instruction


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with one line changed; name says which and how."""

    name: str
    assembly: Assembly


def mutants_of(assembly: Assembly) -> Iterator[Mutant]:
    """Every mutant of a kernel."""
    for index, instruction in enumerate(assembly.instructions):
        if instruction.name not in ("s_waitcnt", "s_nop"):
            continue
        yield Mutant(f"{index}: {instruction.text!r} removed", without(assembly, index))
        for weaker in _weaker(instruction.text):
            lines = list(assembly.instructions)
            lines[index] = parse_instruction(weaker)
            yield Mutant(f"{index}: {weaker!r}", replace(assembly, instructions=tuple(lines)))


def without(assembly: Assembly, index: int) -> Assembly:
    """The kernel without an instruction."""
    instructions = (*assembly.instructions[:index], *assembly.instructions[index + 1 :])
    labels = {name: place - (place > index) for name, place in assembly.labels.items()}
    return replace(assembly, instructions=instructions, labels=labels)


def _weaker(text: str) -> Iterator[str]:
    """One count of an s_waitcnt is larger by one; an s_nop is shorter by one."""
    for found in re.finditer(r"\((\d+)\)", text):
        yield f"{text[: found.start(1)]}{int(found[1]) + 1}{text[found.end(1) :]}"
    nop = re.fullmatch(r"s_nop ([1-9]\d*)", text)
    if nop:
        yield f"s_nop {int(nop[1]) - 1}"

"""What an early launch needs to be right, in PTX and in machine code: it waits for the end of the launch before it."""

from __future__ import annotations

import re

from triton.compiler import CompiledKernel

from tests.amd.offline.code_object import machine_code


def assert_waits(kernel: CompiledKernel, *, reads_before: bool) -> None:
    """In every program: no branch leads past the wait, since what comes after shall find the launch before ended too.

    reads_before: whether it may read, before it waits, what the launch before that one has written: as a merge does,
                  which begins when all programs before it are past their own wait
    """
    assert kernel.metadata.launch_pdl
    ptx = kernel.asm["ptx"]
    assert ptx.count("griddepcontrol.launch_dependents") == ptx.count("griddepcontrol.wait") == 1
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert all(f"{label}:" in before for label in re.findall(r"\bbra[.\w]*\s+(\$\w+)", before))
    assert not re.search(r"\bret;|st\.global|atom\.global", before)
    # What ptxas adds: registers that are spilled before the wait, and read back after it. Hopper's extend did so in the
    # one commit in which it was launched early, and in which a graph ended with an illegal access; that this was the
    # cause is not known.
    code = machine_code(kernel)
    opcodes = [each.name for each in code]
    assert opcodes.count("ACQBULK") == 1
    wait = opcodes.index("ACQBULK")
    assert not {"STL", "LDL"} & set(opcodes[:wait])
    # So what is listed before it runs before it.
    targets = [(place, int(each.operands[-1], 16)) for place, each in enumerate(code) if each.name == "BRA"]
    assert all((place < wait) == (target < code[wait].address) for place, target in targets)
    if not reads_before:
        assert "ld.global" not in before
        assert "griddepcontrol.launch_dependents" not in before

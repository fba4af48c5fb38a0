"""Conditions in PTX for an early launch to be right: it waits for the end of the launch before it."""

import re

from triton.compiler import CompiledKernel


def assert_waits(kernel: CompiledKernel, *, reads_before: bool) -> None:
    """Checks that every program waits: no branch leads past the wait, since later launches rely on that end too.

    Other groups of warps, if there are any, begin at a barrier: the first group, which has waited, lets them go.

    reads_before: true if it may read, before it waits, data that the launch before the previous one has written: a
                  merge may, since it begins when all programs before it are past their own wait
    """
    assert kernel.metadata.launch_pdl
    ptx = kernel.asm["ptx"]
    assert ptx.count("griddepcontrol.launch_dependents") == ptx.count("griddepcontrol.wait") == 1
    before = ptx[: ptx.index("griddepcontrol.wait")]
    for label in re.findall(r"\bbra[.\w]*\s+(\$\w+)", before):
        if f"{label}:" not in before:
            assert "setmaxnreg" in ptx
            assert _first_of_others(ptx, label) == "barrier.sync"
    assert not re.search(r"\bret;|st\.global|atom\.global", before)
    if not reads_before:
        assert "ld.global" not in before
        assert "griddepcontrol.launch_dependents" not in before


def _first_of_others(ptx: str, label: str) -> str:
    """Returns the first event from a label on: a barrier, an access to the GPU's memory, or the end of the code."""
    code = ptx[ptx.index(f"{label}:") :]
    first = re.search(r"barrier\.sync|(?:ld|st|atom)\.global|cp\.async|bra\.uni\s+(\$\w+)|$", code)
    assert first is not None
    return _first_of_others(ptx, first[1]) if first[1] else first[0]

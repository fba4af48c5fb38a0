"""Branches, barriers, the end, and waits; ISA chapter 4 "Program Flow Control" and 12.5 "SOPP Instructions".

Waits change nothing here: every instruction is complete before the next one starts. Nor do the write back and the
invalidation of caches, of which there are none.
"""

from collections.abc import Callable

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import VCC, Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.step import AT_BARRIER, AT_END, Builder, Context, Step

# Branch -> a function that is true if it is taken.
_CONDITIONS: dict[str, Callable[[Core], bool]] = {
    "s_branch": lambda core: True,
    "s_cbranch_scc0": lambda core: not core.scc,
    "s_cbranch_scc1": lambda core: bool(core.scc),
    "s_cbranch_vccz": lambda core: core.read_pair(VCC) == 0,
    "s_cbranch_vccnz": lambda core: core.read_pair(VCC) != 0,
    "s_cbranch_execz": lambda core: not core.any_active,
    "s_cbranch_execnz": lambda core: core.any_active,
}


CACHE_CONTROLS = ("buffer_wbl2", "buffer_inv")


def _branch(context: Context, instruction: Instruction) -> Step:
    core, taken = context.core, _CONDITIONS[instruction.name]
    target = context.assembly.labels[instruction.operands[0]]
    return lambda: target if taken(core) else None


def _set_mode(context: Context, instruction: Instruction) -> Step:
    """Accepts a write of MODE.FP16_OVFL alone, which Triton sets before it converts to eight bits, and ignores it.

    The bit makes too large values the largest. No kernel converts such values, and codes() is strict: it gives NaN for
    them.
    """
    if "hwreg(HW_REG_MODE, 23, 1)" not in instruction.text:
        raise UnknownInstruction(f"{instruction.name} of {instruction.text!r}")
    return lambda: None


def _always(next_index: int | None) -> Builder:
    return lambda context, instruction: lambda: next_index


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(_CONDITIONS, _branch),
    **dict.fromkeys(("s_nop", "s_waitcnt", "s_setprio", "s_sleep", *CACHE_CONTROLS), _always(None)),
    "s_setreg_imm32_b32": _set_mode,
    "s_barrier": _always(AT_BARRIER),
    "s_endpgm": _always(AT_END),
}

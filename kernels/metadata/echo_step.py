"""Reports the previous step in the ring slot of every publication. The words: slot_layout.py."""

import triton
import triton.language as tl

from rocm_attn.kernels.metadata import error_word, slot_layout

_STEP = tl.constexpr(slot_layout.STEP)
_STEP_BEFORE = tl.constexpr(slot_layout.STEP_BEFORE)
_ECHO = tl.constexpr(slot_layout.ECHO)
_ECHOED_STEP = tl.constexpr(slot_layout.ECHOED_STEP)
_WRONG_STEP = tl.constexpr(slot_layout.WRONG_STEP)
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)


@triton.jit
def echo_step_before(slot, counts_before):
    """Writes the echo of the step before, for one program; no program reads these words of the slot.

    counts_before is mostly the counts of the step that is published: a barrier must come before they are written.
    """
    number = tl.load(counts_before + _STEP)
    is_step_before = number == tl.load(slot + _STEP_BEFORE)
    tl.store(slot + _ECHOED_STEP, number)
    tl.store(slot + _ECHO, tl.where(is_step_before, tl.load(counts_before + _ERROR_WORD), _WRONG_STEP))

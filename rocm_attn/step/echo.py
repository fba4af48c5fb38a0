"""EchoCheck: reads the error report of an earlier step, without a wait for the device.

When a step's inputs are published, the device writes its report on the step before into the same slot of the host ring.
The host reuses a slot only after its kernels are done, and then finds the report there.
"""

from collections.abc import Sequence

from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.error_word import (
    BAD_PARENT,
    BAD_SELECTION,
    ERROR_WORD,
    LENGTH_BEYOND_BOUND,
    NOT_FINITE,
    PAGE_NOT_IN_POOL,
    PAGE_TAKEN,
    ROW_NOT_IN_TABLE,
    ROW_TWICE,
    SHARED_TOKEN,
    SLOT_NOT_IN_TABLE,
    SPANS_OVERLAP,
    TOKEN_WITHOUT_PAGE,
    TOO_FEW_GIVEN,
    UNSTORED_TOKEN,
    WINDOW_WITHOUT_PAGE,
    WRONG_ENGINE_STATE,
    WRONG_STATE,
)
from rocm_attn.kernels.metadata.slot_layout import ECHO, ECHOED_STEP, STEP, STEP_BEFORE, UNREAD, WRONG_STEP

# Number of steps until the echo of a step is read. It lies in the slot of the next one, which is written again two
# steps later: the ring has two slots.
STEPS_UNTIL_ECHO = 3

_WHAT = {
    TOKEN_WITHOUT_PAGE: "a new token had no page of its own, because its row led to page 0 or to no page, and its K "
    "and V were dropped; look for code that changed the request table on the device",
    WINDOW_WITHOUT_PAGE: "the first key that a new token sees was in a page that its row no longer holds, and was "
    "read as zero; evict only up to the device's lengths, or look for code that changed the "
    "table there",
    LENGTH_BEYOND_BOUND: "a length on the device was outside of 0 <= q_len <= kv_len <= its bound and was clamped, or "
    "its sequence was treated as padding; give the batch larger bounds, or look for code that wrote the lengths",
    NOT_FINITE: "K or V of a new token was infinite or NaN and was stored as zero, because it would have spread to "
    "tokens that do not see it; look for an overflow in the model, or a position that its RopeTable "
    "does not have, or compute in a dtype with a wider range",
    SHARED_TOKEN: "lengths on the device let a step begin within the tokens that its row shares with another; it "
    "was moved to the first token after them; call truncate() and reserve() before a row goes back",
    SLOT_NOT_IN_TABLE: "a slot given for a new token differs from the table's, so its K and V would never be read "
    "there and were dropped; give the slots of the step's rows, in whole pages",
    BAD_SELECTION: "the selected units of a token are not in ascending order, each once, within the keys that it "
    "sees; units outside gave no key, and units listed twice counted twice; look for the code that "
    "selected them",
    PAGE_TAKEN: "a page that a row still names was written through another entry of the table, so the row reads KV "
    "that another sequence has stored; look for a page or slot that was freed, or given twice, while a "
    "row named it",
    ROW_NOT_IN_TABLE: "a row that was given lies outside of the table, and its sequence was treated as padding; "
    "look for code that wrote the rows",
    TOO_FEW_GIVEN: "fewer slots, positions or mask cells were given than the step has; tokens without a slot were "
    "dropped, and missing cells hide their keys; give as many as kv_len and q_len require",
    PAGE_NOT_IN_POOL: "a page in the table of a sequence's KV is negative or past the bound pages, or it is page 0 and "
    "a span needs it, and the sequence was treated as padding; look for code that wrote the table, bind all pages that "
    "it names, or keep those of spans that pass the window",
    ROW_TWICE: "two sequences with KV and new tokens have the same row of the table, and may have stored over each "
    "other; give each sequence of a step its own row",
    BAD_PARENT: "the parent of a new draft is not an earlier node of its tree, or in a round of drafts not a branch of "
    "the step before; the draft was treated as one without a parent; look for the code that chose the parents",
    SPANS_OVERLAP: "two spans of a sequence share a new token, which saw both; the other tokens of each saw one; give "
    "spans without overlaps, or one that covers both",
    UNSTORED_TOKEN: "lengths on the device let a step begin after the tokens that its row has stored; it was moved "
    "to the first token after them; look for code that wrote the lengths, or call mark_stored() for "
    "tokens that were stored in another way",
    WRONG_STATE: "the state of a row is not the one before the new tokens: it was never computed, belongs to another "
    "request, or to tokens that were taken back; its outputs are 0 and its state is as it was; look for code that "
    "wrote lengths or rows, or begin the row at a checkpoint or at token 0",
    WRONG_ENGINE_STATE: "a slot that the engine names for a sequence's recurrent state does not hold the tokens before "
    "the new ones (it was never written, is another request's, or has rejected or older tokens), or two sequences have "
    "it; layers have read it, so the sequence's text is wrong from here on; look for the code that chose, copied, "
    "freed or overwrote the slot",
}


def fault_of_counts(counts: Sequence[int], number: int) -> DeviceFault | None:
    """The fault in the counts of the step that was published last, once it is done; None if there is none.

    counts: num_seqs, num_tokens, step number and error word, as the device has them
    number: of that step, as the host has it
    """
    if counts[STEP] != number:
        return DeviceFault(
            f"the device has the counts of step {counts[STEP]} and step {number} was published last; look for code "
            "that wrote to the step's counts, or for a lost kernel launch",
            number,
        )
    return fault_of(number, counts[ERROR_WORD]) if counts[ERROR_WORD] else None


def fault_of(step: int, error_word: int) -> DeviceFault:
    """The fault of a step, in words; error_word is not 0."""
    known = [what for bit, what in _WHAT.items() if error_word & bit]
    what = f"step {step}: {'; '.join(known) or f'the error word is {error_word:#x}'}"
    # Non-finite K and V were meant for pages of their own sequence, and were stored there as zeros.
    return DeviceFault(what, step, is_contained=error_word == NOT_FINITE)


class EchoCheck:
    """Raises the fault of every echo that is not 0. Called before its slot is written again."""

    def __init__(self) -> None:
        self._lost_step = -1

    def __call__(self, words: memoryview) -> None:
        """Raises DeviceFault for the step that went wrong. The caller clears the echo afterwards."""
        echo, before, echoed = words[ECHO], words[STEP_BEFORE], words[ECHOED_STEP]
        if echo & UNREAD:
            self._lost_step = words[STEP]
            raise DeviceFault(
                f"the inputs of step {self._lost_step} never reached the device, which went on with those of an "
                "earlier step; look for a lost kernel launch",
                self._lost_step,
            )
        if echo == WRONG_STEP:
            if before == self._lost_step:  # reported already
                return
            raise DeviceFault(
                f"the device took step {before} for step {echoed}; look for code that wrote to the step's counts",
                before,
            )
        raise fault_of(before, echo)


class NoEcho(EchoCheck):
    """The check of a device that runs nothing, as kernels are compiled for another one: it writes no echo."""

    def __call__(self, words: memoryview) -> None:
        """Checks nothing."""

"""The int32 words of a ring slot; kernels, their torch twins and the host that writes a slot share this.

    [0] num_seqs  [1] num_tokens  [2] step number  [3] 1 if token ids follow, else 0
    [4] number of the step before  [5] echo of the step before  [6] its number as the device has it
    [7] runs of graphs that take inputs before the one that takes these, if word 5 says that one does
    then the parts of SlotParts, one after the other

The kernel that reads a slot writes the echo of the step before, words 5 and 6, back into it. Word 5 is that step's
error word, or one of the two words below; 0 means no error.
"""

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

COUNT_WORDS = 4  # num_seqs, num_tokens, step number, error word, as a step's counts hold them
HEADER_WORDS = 8
UPDATE_WORDS = 3  # row, column, entry of a changed cell of the request table

# Places in a slot; counts have the first three in the same places, and the error word in the fourth.
NUM_SEQS, NUM_TOKENS, STEP, HAS_IDS = 0, 1, 2, 3
STEP_BEFORE, ECHO, ECHOED_STEP, RUNS_BEFORE = 4, 5, 6, 7
WRONG_STEP = 1 << 28  # the device's counts held another number than word 4
NO_ECHO = 1 << 29  # the host's value of word 5: no kernel has read this slot
TAKEN_BY_GRAPH = 1 << 30  # the same in a slot that no launch reads, but the kernel at the head of a step's graph
UNREAD = NO_ECHO | TAKEN_BY_GRAPH
MOST_RUNS = 2**31 - 1  # word 7 goes round after it
MOST_TAKEN = 1024  # padded sequences, and tokens, of a step that a graph takes: those of one program


@lru_cache(maxsize=4096)
def slot_writer(num_bytes: int) -> Callable[..., None]:
    """Returns a function that fills a slot: (buffer, 0, all words of the header, num_bytes bytes of its parts)."""
    return Struct(f"={HEADER_WORDS}i{num_bytes}s").pack_into


class SlotParts(NamedTuple):
    """The places of a slot's parts after its header: n words each, n = num_seqs, but for token_ids.

    rows, kv_len, q_len
    token_ids:   num_token_ids words
    prefix_len, group_end: read if the step shares prefixes
    first_writable: read if the device knows lengths: the first token that the step may store in each row
    stored:      likewise: tokens of each row that are stored, at most, before the step
    """

    rows: slice
    kv_len: slice
    q_len: slice
    token_ids: slice
    prefix_len: slice
    group_end: slice
    first_writable: slice
    stored: slice


# Parts with a word for each sequence.
SEQ_PARTS = len(SlotParts._fields) - 1


@lru_cache(maxsize=4096)
def slot_parts(num_seqs: int, num_token_ids: int) -> SlotParts:
    """The parts of a slot; it is as long as the last one's end, whether a step uses all of them or not."""
    ends, end = [], HEADER_WORDS
    for field in SlotParts._fields:
        end += num_token_ids if field == "token_ids" else num_seqs
        ends.append(end)
    return SlotParts(*(slice(first, end) for first, end in zip([HEADER_WORDS, *ends], ends, strict=False)))

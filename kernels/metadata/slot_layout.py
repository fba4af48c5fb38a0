"""The int32 words of a ring slot; kernels, their torch twins and the host that writes a slot share this.

n = num_seqs:
    [0] num_seqs  [1] num_tokens  [2] step number  [3] 1 if token ids follow, else 0
    [4] number of the step before  [5] echo of the step before  [6] its number as the device has it  [7] not used
    [8, 8+n) rows   [8+n, 8+2n) kv_len   [8+2n, 8+3n) q_len   [8+3n, 8+3n+num_tokens) token ids
    behind these, where the step shares prefixes: n words of prefix_len, n of group_end
    behind these, where the device knows lengths: n words, the first token that the step may store in each row

The kernel that reads a slot writes the echo, words 5 and 6, back into it: what is known by then of the step before.
Word 5 is that step's error word, or one of the two words below; 0 says that all was well.
"""

from __future__ import annotations

COUNT_WORDS = 4  # num_seqs, num_tokens, step number, error word, as a step's counts hold them
HEADER_WORDS = 8
UPDATE_WORDS = 3  # row, column, entry of a changed cell of the request table

STEP, STEP_BEFORE, ECHO, ECHOED_STEP = 2, 4, 5, 6  # places in a slot; counts have STEP in the same place
WRONG_STEP = 1 << 16  # the device's counts held another number than word 4
NO_ECHO = 1 << 17  # what the host puts into word 5: no kernel has read this slot


def slot_words(num_seqs: int, num_tokens: int) -> int:
    """Words of a slot that carries a step of num_seqs sequences and num_tokens token ids, without prefixes."""
    return HEADER_WORDS + 3 * num_seqs + num_tokens

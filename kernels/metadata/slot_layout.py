"""The int32 words of a ring slot; kernels, their torch twins and the host that writes a slot share this.

n = num_seqs:
    [0] num_seqs  [1] num_tokens  [2] step number  [3] 1 if token ids follow, else 0
    [4, 4+n) rows   [4+n, 4+2n) kv_len   [4+2n, 4+3n) q_len   [4+3n, 4+3n+num_tokens) token ids
"""

from __future__ import annotations

HEADER_WORDS = 4
UPDATE_WORDS = 3  # row, column, entry of a changed cell of the request table


def slot_words(num_seqs: int, num_tokens: int) -> int:
    """Words of a slot that carries a step of num_seqs sequences and num_tokens token ids."""
    return HEADER_WORDS + 3 * num_seqs + num_tokens

"""Host twins of the schedule kernels in plain Python: the same words, from lists of lengths and without cleverness."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW


def decode_schedule(kv_len: Sequence[int], q_len: Sequence[int], cut: DecodeCut) -> list[int]:
    """The words that cut.build writes, see attention/decode_schedule.py.

    Of a program without work only words 3 and 4 (work and share) have a meaning; the others are 0 here.
    """
    rows: list[tuple[int, int]] = []
    starts: list[int] = []
    words_of_seqs: list[int] = []
    position = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        takes_part = cut.tokens.FEWEST <= new <= cut.tokens.MOST
        words_of_seqs += [position, length if takes_part else -1]
        for row in range(cut.rows * -(-new // cut.tokens.OF_ROW) if takes_part else 0):
            rows.append((seq, row))
            starts.append(position)
            position += len(visible_blocks(length, cut)) + cut.row_cost
    share = max(-(-position // cut.programs), 1)
    words: list[int] = []
    for program in range(cut.programs):
        start = program * share
        if start >= position:
            words += [0, 0, 0, 0, share, 0, 0, 0]
            continue
        index = bisect_right(starts, start) - 1
        seq, row = rows[index]
        work = min(share, position - start)
        words += [seq, row, start - starts[index], work, share, starts[index], kv_len[seq], 0]
    return words + words_of_seqs


def visible_blocks(kv_len: int, cut: DecodeCut) -> range:
    """The key blocks with keys that a sequence of kv_len tokens sees."""
    first_key = 0 if cut.window_left == UNLIMITED_WINDOW else max(0, kv_len - 1 - cut.window_left)
    return range(first_key // cut.key_block, -(-kv_len // cut.key_block))


def extend_schedule(kv_len: Sequence[int], q_len: Sequence[int], cut: ExtendCut, num_tokens: int) -> list[int]:
    """The words that cut.build writes for num_tokens padded tokens, see attention/extend_schedule.py."""
    block_len = cut.query_tokens
    listed: list[tuple[int, int, int, int]] = []
    token = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        for offset in range(0, new if new >= cut.min_q_len else 0, block_len):
            listed.append((seq, token + offset, min(block_len, new - offset), length - new + offset))
        token += new
    listed.sort(key=lambda block: -(block[2] + block[3]))
    max_blocks = num_tokens // block_len + len(kv_len) + 1
    while len(listed) < max_blocks:
        listed.append((-1, token, min(max(num_tokens - token, 0), block_len), 0))
        token += block_len
    return [word for block in listed for word in block]

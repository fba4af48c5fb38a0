"""Host twins of the schedule kernels in plain Python: the same words, from lists of lengths and without cleverness."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles


def decode_schedule(
    kv_len: Sequence[int],
    q_len: Sequence[int],
    *,
    window_left: int,
    num_kv_heads: int,
    num_programs: int,
    tiles: DecodeTiles,
) -> list[int]:
    """The words of launch_decode_schedule, see attention/decode_schedule.py.

    Of a program without work only words 3 and 4 (work and share) have a meaning; the others are 0 here.
    """
    rows_per_seq = tiles.rows_per_seq(num_kv_heads)
    rows: list[tuple[int, int]] = []
    starts: list[int] = []
    words_of_seqs: list[int] = []
    position = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        words_of_seqs += [position, length if new == 1 else -1]
        for row in range(rows_per_seq if new == 1 else 0):
            rows.append((seq, row))
            starts.append(position)
            position += len(visible_tiles(length, window_left, tiles)) + tiles.row_cost
    share = max(-(-position // num_programs), 1)
    words: list[int] = []
    for program in range(num_programs):
        start = program * share
        if start >= position:
            words += [0, 0, 0, 0, share, 0, 0, 0]
            continue
        index = bisect_right(starts, start) - 1
        seq, row = rows[index]
        work = min(share, position - start)
        words += [seq, row, start - starts[index], work, share, starts[index], kv_len[seq], 0]
    return words + words_of_seqs


def visible_tiles(kv_len: int, window_left: int, tiles: DecodeTiles) -> range:
    """The tiles with keys that the last of kv_len tokens sees."""
    first_key = 0 if window_left == UNLIMITED_WINDOW else max(0, kv_len - 1 - window_left)
    return range(first_key // tiles.block_n, -(-kv_len // tiles.block_n))


def extend_schedule(
    kv_len: Sequence[int],
    q_len: Sequence[int],
    *,
    min_q_len: int,
    num_tokens: int,
    gqa_ratio: int,
    tiles: ExtendTiles,
) -> list[int]:
    """The words of launch_extend_schedule, see attention/extend_schedule.py."""
    tile_len = tiles.tokens_per_tile(gqa_ratio)
    listed: list[tuple[int, int, int, int]] = []
    token = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        for offset in range(0, new if new >= min_q_len else 0, tile_len):
            listed.append((seq, token + offset, min(tile_len, new - offset), length - new + offset))
        token += new
    listed.sort(key=lambda tile: -(tile[2] + tile[3]))
    max_tiles = num_tokens // tile_len + len(kv_len) + 1
    while len(listed) < max_tiles:
        listed.append((-1, token, min(max(num_tokens - token, 0), tile_len), 0))
        token += tile_len
    return [word for tile in listed for word in tile]

"""Host twins of the schedule kernels in plain Python: the same words, from lists of lengths and without shortcuts."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from rocm_attn.kernels.attention.cuts import (
    BLOCK_WORDS,
    CLASS_BITS,
    CLASS_KEYS_LOG2,
    SHARE_WORDS,
    DecodeCut,
    ExtendCut,
    RowSharing,
)
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW


def decode_schedule(kv_len: Sequence[int], q_len: Sequence[int], cut: DecodeCut) -> list[int]:
    """The words that cut.build writes, see attention/decode_schedule.py.

    In a program without work only words 3 and 4 (work and share) have a meaning; the others are 0 here. So are
    those that align the first counter, which the kernel does not write.
    """
    fewest, most, of_row = cut.tokens
    of_axis = cut.programs // cut.axes
    rows_of = [cut.rows // cut.axes * -(-new // of_row) if fewest <= new <= most else 0 for new in q_len]
    costs = [
        len(visible_blocks(length, cut)) + cut.row_cost + cut.row_end
        for length, num_rows in zip(kv_len, rows_of, strict=True)
        for _ in range(num_rows)
    ]
    share, pad = max(-(-sum(costs) // of_axis), 1), 0
    if max(costs, default=0) <= cut.whole_blocks + cut.row_cost + cut.row_end:
        share = max(share, *costs, 1)
    if cut.is_even and (even := _even_share(costs, share, cut.row_end)) is not None:
        share, pad = even
    rows: list[tuple[int, int]] = []
    starts: list[int] = []
    words_of_seqs: list[int] = []
    position = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        words_of_seqs += [*divmod(position, share), length if fewest <= new <= most else -1]
        for row in range(rows_of[seq]):
            rows.append((seq, row))
            starts.append(position)
            position += len(visible_blocks(length, cut)) + cut.row_cost + cut.row_end + pad
    words: list[int] = []
    for program in range(cut.programs):
        axis, start = program // of_axis, program % of_axis * share
        index = bisect_right(starts, start) - 1
        end = starts[index] + costs[index] if pad > 0 else position
        if axis >= cut.axes or start >= min(end, position):
            words += [0, 0, 0, 0, share, 0, 0, 0]
            continue
        seq, row = rows[index]
        work = min(share, end - start)
        low_word, _ = _halves(starts[index])
        words += [seq, max(row, axis), start - starts[index], work, share, low_word, kv_len[seq], pad]
    words += words_of_seqs
    return words + [0] * (cut.words(len(kv_len)) - len(words))


def _even_share(costs: Sequence[int], share: int, row_end: int) -> tuple[int, int] | None:
    """The share of a program in rows with these costs, and the padding after each; None: they are not cut alike.

    share: the least it can be
    """
    if len(set(costs)) != 1:
        return None
    cost = costs[0]
    if cost <= share:
        even = next(size for size in range(cost, share + cost, cost) if size >= share)
        pad = 0
    else:
        parts = max(number for number in range(1, cost + 1) if number * share <= cost)
        even = max(-(-(cost - row_end) // parts), 1)
        pad = even * parts - cost
    return (even, pad) if 16 * (even - share) <= share else None


def visible_blocks(kv_len: int, cut: DecodeCut) -> range:
    """The key blocks with keys that a sequence of kv_len tokens sees."""
    first_key = 0 if cut.window_left == UNLIMITED_WINDOW else max(0, kv_len - 1 - cut.window_left)
    return range(first_key // cut.key_block, -(-kv_len // cut.key_block))


def as_in_the_twin(words: list[int], cut: ExtendCut) -> list[int]:
    """Returns a device's words, with 0 where those of `extend_schedule` have no meaning."""
    shares = len(words) - cut.sharing.programs * SHARE_WORDS
    for first in range(BLOCK_WORDS, shares, BLOCK_WORDS):
        words[first + 5] = 0
    for first in range(shares, len(words), SHARE_WORDS):
        if words[first + 3] == 0:
            words[first : first + 6] = [0] * 6
    return words


def extend_schedule(
    kv_len: Sequence[int], q_len: Sequence[int], cut: ExtendCut, num_tokens: int, left_out: Collection[int] = ()
) -> list[int]:
    """The words that cut.build writes for num_tokens padded tokens, see attention/extend_schedule.py.

    left_out: sequences that are not listed

    In a program without work only its work, the share and the cut have a meaning; the others are 0 here. So is the
    sixth word of a block after the first one, which the kernel does not write.
    """
    block_len, sharing = cut.query_tokens, cut.sharing
    # reach, sequence, first token, tokens, kv_index, keys
    listed: list[tuple[int, int, int, int, int, int]] = []
    token = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        for offset in range(0, new if new >= cut.min_q_len and seq not in left_out else 0, block_len):
            tokens = min(block_len, new - offset)
            reach = length - new + offset + tokens if sharing.causal else length
            window = sharing.window_left + (block_len if sharing.causal else new)
            keys = reach if sharing.window_left == UNLIMITED_WINDOW else min(reach, window)
            listed.append((reach, seq, token + offset, tokens, length - new + offset, keys))
        token += new
    listed.sort(
        key=lambda block: (-_class_of(_alike(kv_len[block[1]], q_len[block[1]], block[0])), block[1], -block[0])
    )
    words: list[int] = []
    costs = [keys + sharing.row_keys for *_, keys in listed]
    for (_, seq, first, tokens, kv_index, keys), before in zip(listed, accumulate([0, *costs]), strict=False):
        words += [seq, first, tokens, kv_index, keys, 0, *_halves(before)]
    for _ in range(num_tokens // block_len + len(kv_len) + 1 - len(listed)):
        words += [-1, token, min(max(num_tokens - token, 0), block_len), 0, 0, 0, *_halves(sum(costs))]
        token += block_len
    blocks = (words[first : first + BLOCK_WORDS] for first in range(0, len(words), BLOCK_WORDS))
    words[5] = sum(tokens > 0 for _, _, tokens, *_ in blocks)
    return words + _shares(costs, sharing)


def _alike(length: int, new: int, reach: int) -> int:
    """The reach that a block counts as: the length of its sequence, if at most 2 new tokens follow 3 keys."""
    return length if (length - new) // 3 >= new // 2 else reach


def _class_of(reach: int) -> int:
    """A number for all reaches that count as equally long, larger for longer ones."""
    units = (reach >> CLASS_KEYS_LOG2) + 1
    shift = max(units.bit_length() - 1 - CLASS_BITS, 0)
    return units >> shift << shift


def _shares(costs: Sequence[int], sharing: RowSharing) -> list[int]:
    """The words of the programs that share the longest rows. costs: of a row of each block"""
    programs, rows = sharing.programs, sharing.rows
    if not programs:
        return []
    cut_blocks = min(_cuts(len(costs)), key=lambda cut: _estimate(costs, cut, sharing))
    if parts := _parts_of_alike(costs, _estimate(costs, cut_blocks, sharing), sharing):
        return _equal_parts(costs, *parts, sharing)
    of_rows = [cost for cost in costs[:cut_blocks] for _ in range(rows)]
    starts, shared = [0, *accumulate(of_rows)], sum(of_rows)
    share = max(-(-shared // programs), sharing.least_keys)
    words: list[int] = []
    for program in range(programs):
        start = program * share
        work = max(0, min(share, shared - start))
        row = bisect_right(starts, start) - 1
        first = [row // rows, row % rows, start - starts[row]] if work else [0, 0, 0]
        words += [*first, work, *_halves(starts[row] if work else 0), share, cut_blocks, 0, 0]
    return words


def _parts_of_alike(costs: Sequence[int], estimate: int, sharing: RowSharing) -> tuple[int, int] | None:
    """The number of each row's parts and their size, if that is no worse than an estimate; None: there are none."""
    if not sharing.alike_keys or not costs:
        return None
    keys = max(costs) - sharing.row_keys
    most = sharing.programs // (len(costs) * sharing.rows)
    least = max(sharing.least_keys, 1)
    if sharing.segment_len:
        segments = -(-keys // sharing.segment_len)
        parts = min(most, segments)
        size = -(-segments // max(parts, 1)) * sharing.segment_len
    else:
        parts = min(most, max(keys // least, min(8, keys // max(least // 2, 1))))
        row_end = min(-(-keys // max(parts, 1)) // 2, sharing.row_keys)
        size = -(-(keys + row_end) // max(parts, 1))
    serves = parts > 1 and size <= sharing.most_keys and size + sharing.alike_keys <= estimate
    return (parts, size) if serves else None


def _equal_parts(costs: Sequence[int], parts: int, size: int, sharing: RowSharing) -> list[int]:
    """Like `_shares`, but for rows that have room for `parts` parts of one size; a short row does not fill it."""
    words: list[int] = []
    for program in range(sharing.programs):
        row, part = divmod(program, parts)
        block = row // sharing.rows
        keys = costs[block] - sharing.row_keys if block < len(costs) else 0
        first, end = min(part * size, keys), min((part + 1) * size, keys)
        # The cost of beginning a row is its first part's.
        done, cost = (first + sharing.row_keys, end - first) if part else (0, end + sharing.row_keys)
        if block >= len(costs) or (part and not cost):
            words += [0] * 6
        else:
            words += [block, row % sharing.rows, done, cost, *_halves(row * parts * size)]
        words += [size, len(costs), parts, 0]
    return words


def _cuts(num_blocks: int, most: int = 127) -> range:
    """The numbers of blocks that are considered, evenly spaced."""
    stride = max(1, -(-num_blocks // most))
    return range(0, num_blocks + stride, stride)


def _estimate(costs: Sequence[int], cut: int, sharing: RowSharing) -> int:
    """The time, in keys, of a step whose first `cut` blocks are shared out."""
    programs, rows = sharing.programs, sharing.rows
    shared, total = rows * sum(costs[:cut]), rows * sum(costs)
    if shared > programs * sharing.most_keys:
        return 1 << 50
    whole = [cost for cost in costs[cut:] for _ in range(rows)]
    longest = _longest_rounds(whole, programs, 0)
    if not sharing.segment_len:
        rest = max((total - shared) // programs, longest)
        price = sharing.split_keys + total // programs * sharing.gain // 16
        return rest + (max(shared // programs, sharing.least_keys) + price if cut else 0)
    if not cut:
        return longest
    share = max(-(-shared // programs), sharing.least_keys)
    taken = -(-share // sharing.segment_len) * sharing.segment_len
    price = sharing.split_keys + shared // programs * sharing.gain // 16
    if sharing.shares_first:
        return taken + max((total - shared) // programs, longest) + price
    later = _longest_rounds(whole, programs, programs - -(-shared // share))
    return max(longest, taken + later, total // programs) + price


def _longest_rounds(whole: Sequence[int], slots: int, first: int) -> int:
    """The cost of the rows of a slot, from whole rows with these costs; of 16 rounds at most.

    first: rows that rounds 0, 2, ... begin after
    """
    places = [k * slots + first * (1 - k % 2) for k in range(16)]
    return max(((k + 1) * whole[place] for k, place in enumerate(places) if place < len(whole)), default=0)


def _halves(number: int) -> tuple[int, int]:
    """A number of 64 bits as two words."""
    low, high = np.array([number], np.int64).view(np.int32).tolist()
    return low, high

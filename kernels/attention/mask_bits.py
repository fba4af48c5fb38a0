"""The keys of a block that each row of a query block sees (visible_keys.py), as one 32-bit word per row."""

import triton
import triton.language as tl

# Keys that a row's word has room for: key blocks that are read by it have no more.
MAX_MASK_BLOCK = 32
# Keys of a block that is read by two words per row.
TWO_WORDS = 64


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _load_word(words, word, first_key, end_key):
    """A word of cells for each row; 0 if the row sees no key of it. first_key: the first one that has a cell in it"""
    return tl.load(words + word, mask=first_key < end_key, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _cell_bits(words, row_cell, end_key, first_key, start):
    """A word for each row: bit n says whether cells show it key first_key + n; 1 before start, which has no cells.

    words:    of the cell that the query block counts its cells from
    row_cell: int32, the row's first cell, which is of key start, counted from the first bit of words
    end_key:  int32, the end of the keys that the row sees, of which each has a cell from start on
    start:    the first key that has cells; if the block lies before it, no word is read
    """
    before = tl.minimum(tl.maximum(start - first_key, 0), 32)
    cell = row_cell + tl.maximum(first_key - start, 0)
    key = tl.where(before < 32, first_key + before, 0x7FFFFF00)
    word = cell // 32
    shift = cell % 32
    low = _load_word(words, word, key, end_key) >> shift.to(tl.uint32)
    # In two shifts, because one by 32 is undefined.
    high = _load_word(words, word + 1, key + 32 - shift, end_key) << 1 << (31 - shift).to(tl.uint32)
    has_cells = _bits_from(before)
    return ((low | high) << tl.minimum(before, 31).to(tl.uint32)) & has_cells | ~has_cells


@triton.jit
def _bits_from(first):
    """The bits of a word from bit first on: all of them if it is 0 or less, none if it is 32 or more."""
    shift = tl.minimum(tl.maximum(first, 0), 31).to(tl.uint32)
    return tl.where(first < 32, tl.full([1], 0xFFFFFFFF, tl.uint32) << shift, 0)


@triton.jit
def seen_by_some(bits):
    """The keys that any row of a query block sees, as bits."""
    return tl.reduce(bits, 0, _either)


@triton.jit
def bit_is_set(bits, lane):
    """True if the bit of a lane is set."""
    return ((bits >> lane.to(tl.uint32)) & 1) != 0


@triton.jit
def _row_word(seen, first_key, K: tl.constexpr):
    """A word for each row: bit n says whether it sees key first_key + n. Cells hide keys of the range."""
    rows = seen.rows
    bits = ~_bits_from(rows.end_key - first_key)
    if seen.words is not None:
        bits = bits & _cell_bits(rows.words, rows.cell, rows.end_key, first_key, rows.start)
    if K.WINDOWED:
        bits = bits & _bits_from(rows.first_key - first_key)
    return bits


@triton.jit
def row_words(seen, first_key, K: tl.constexpr, KEY_BLOCK: tl.constexpr):
    """The bits of a block's keys, as one word per row, or as two if it has TWO_WORDS keys. seen: key_loop.SeenKeys"""
    low = _row_word(seen, first_key, K)
    high = _row_word(seen, first_key + 32, K) if KEY_BLOCK > 32 else low
    return low, high


@triton.jit
def is_seen(low, high, lane, KEY_BLOCK: tl.constexpr):
    """True if the key of a lane is seen, by the words of a row, or of rows [rows, 1] and lanes [1, KEY_BLOCK]."""
    return bit_is_set(tl.where(lane < 32, low, high), lane % 32) if KEY_BLOCK > 32 else bit_is_set(low, lane)

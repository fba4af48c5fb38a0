"""The rows of a program of extend for Hopper, by the words of extend_schedule.py, and the keys that they see."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_COUNT,
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_BLOCK,
    SHARE_DONE,
    SHARE_ROW,
    SHARE_WORDS,
    SHARE_WORK,
)

# Columns of a box of K or V: 128 bytes, the widest swizzle.
BOX_COLUMNS = gl.constexpr(64)
# Rows of a consumer: a warp group's tile of the matrix units.
GROUP_ROWS = gl.constexpr(64)


class RowColumns(NamedTuple):
    """The columns of a row of K, or of V, and so of q or of the output.

    HEAD_DIM: elements of the row
    DIM:      columns of the row in shared memory, a multiple of BOX_COLUMNS; those of q after HEAD_DIM are zeros
    TILE:     columns of the equal tiles that a row is cut into, a multiple of BOX_COLUMNS
    LAST:     columns of the last tile with which products are made; a power of two
    ZEROED:   whether boxes hold zeros beyond the head; else products are made with no column there
    SLOT_STRIDE, HEAD_STRIDE: elements from a slot of the pages to the next one, and from a KV head to the next one
    """

    HEAD_DIM: int
    DIM: int
    TILE: int
    LAST: int
    ZEROED: bool
    SLOT_STRIDE: int
    HEAD_STRIDE: int


class HopperGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    KV_HEADS:  KV heads; each block of a KV head's query heads counts as one
    HEADS_AT_ONCE: KV heads, counted so, whose whole rows come before those of the next ones; a divisor of KV_HEADS
    GQA_RATIO: query heads of such a block
    HEAD_BLOCKS: equal blocks that the query heads of a KV head are cut into
    TOKENS:    new tokens of a full query block
    K, V:      columns of rows of q and K, and of V and the output
    PAGE_SIZE: tokens of a page
    PAGE_SLOTS: slots from a page to the next one in memory: more than PAGE_SIZE if there are others between them
    GATHERED:  whether keys are copied one by one, because pages hold no boxes of enough keys (gather.py)
    BOX:       keys of a box, of one page each if they are not gathered
    KEY_BLOCK: keys of a step
    VALUE_BLOCK: keys of a tile of V, whole boxes
    SOFTMAX_BLOCK: keys that the softmax takes at a time: in deterministic attention a tile's of V, else a step's
    STAGES:    steps whose keys K's ring holds
    VALUE_STAGES: tiles that V's ring holds
    GROUPS:    consumers
    ROW_KEYS:  of cuts.RowSharing
    SEGMENT_STEPS: in deterministic attention, steps of a segment; 0 in other attention
    SEGMENT_SLOTS: in deterministic attention, parts of rows that a program has room for
    LEFT_IN_WORKSPACE: in it, whether everything left of a segment is in the workspace, and not in shared memory
    STRIDE_UNIT: elements that strides of q and out are counted in
    CAUSAL:    whether a row sees no key after its own, but for those of a range
    WINDOWED:  whether there is a window
    RANGED:    whether each token sees a range of keys of its own (visible_keys.py)
    OPEN_MIDDLE: whether steps that all rows of a window see have a loop of their own, without masks; otherwise one loop
               has all steps of a window, and masks those that some row does not see whole
    CAPPED:    whether scores have a cap
    BOUNDED:   whether the cap keeps exponentials within V's range: then there is no running maximum
    POWERS_BY_PRODUCTS: then, how many powers of four neighbouring scores are computed by products (powers.py)
    SCALES_SELDOM: as in the tiles: whether warps with nothing to scale skip it
    EARLY:     whether the launch may begin while the one before still runs
    OVERLAPS:  whether products with V run under the next step's products with K, which takes registers
    ENCODING, SCALES: of coding.Coding
    CODE_TILES: tiles of codes that are in shared memory at a time; 0: pages are in q's dtype
    MOVES_Q:   whether rows of q are moved into float16, which K's codes become then
    SCALES_WEIGHTS: whether a token's scale of V multiplies its weights: bfloat16 holds the products
    CONSUMER_REGISTERS, DECODER_REGISTERS, PRODUCER_REGISTERS: of a thread of each warp group
    """

    KV_HEADS: int
    HEADS_AT_ONCE: int
    GQA_RATIO: int
    HEAD_BLOCKS: int
    TOKENS: int
    K: RowColumns
    V: RowColumns
    PAGE_SIZE: int
    PAGE_SLOTS: int
    GATHERED: bool
    BOX: int
    KEY_BLOCK: int
    VALUE_BLOCK: int
    SOFTMAX_BLOCK: int
    STAGES: int
    VALUE_STAGES: int
    GROUPS: int
    ROW_KEYS: int
    SEGMENT_STEPS: int
    SEGMENT_SLOTS: int
    LEFT_IN_WORKSPACE: bool
    STRIDE_UNIT: int
    CAUSAL: bool
    WINDOWED: bool
    RANGED: bool
    OPEN_MIDDLE: bool
    CAPPED: bool
    BOUNDED: bool
    POWERS_BY_PRODUCTS: int
    SCALES_SELDOM: bool
    EARLY: bool
    OVERLAPS: bool
    ENCODING: int
    SCALES: int
    CODE_TILES: int
    MOVES_Q: bool
    SCALES_WEIGHTS: bool
    CONSUMER_REGISTERS: int
    DECODER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @property
    def query_rows(self) -> int:
        """Rows of a query block."""
        return self.GROUPS * int(GROUP_ROWS.value)


@constexpr_function
def parts_of(columns):
    """Tiles that a row is cut into."""
    return columns.DIM // columns.TILE


@constexpr_function
def width_of(part, columns):
    """Columns of a tile of a row with which products are made."""
    return columns.LAST if (part + 1) * columns.TILE == columns.DIM else columns.TILE


@gluon.jit
def columns_of(tile, part: gl.constexpr, C: gl.constexpr):
    """The columns of a tile with which products are made."""
    WIDTH: gl.constexpr = width_of(part, C)
    return tile.slice(0, WIDTH, 1) if tile.shape[1] > WIDTH else tile


@gluon.jit
def of_rows(numbers, acc):
    """A number for each row of accumulators, [64, 1]."""
    return gl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(1, acc.type.layout)), 1)


class ProgramWork(NamedTuple):
    """A program's next work: `keys` of cost, from the offset `done` of a row on.

    row:  KV head of the query block
    turn: number of whole rows that the program has begun
    """

    block: Any
    row: Any
    done: Any
    keys: Any
    turn: Any


@gluon.jit
def has_token(line, block, G: gl.constexpr):
    """True for rows of a query block that have a token. line: of the rows, counted from the block's first one"""
    return line < gl.minimum(block.tokens, G.TOKENS) * G.GQA_RATIO


class Block(NamedTuple):
    """A query block, as extend_schedule.py lists it."""

    seq: Any
    first_token: Any
    tokens: Any
    kv_index: Any
    keys: Any


class BlockKeys(NamedTuple):
    """Keys of a sequence that some row of a query block sees, [first, end); those that all rows see, [inner_first,
    inner_end), if there are any; and the end that the schedule counts the block's keys from.
    """

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any
    counted_end: Any


class TokenRanges(NamedTuple):
    """The ranges of keys that tokens see, first and end [T]. They are not read if no layer needs them."""

    first: Any
    end: Any


class RowSteps(NamedTuple):
    """A program's part of a row: cost, steps [first, end), and whether the row ends with them."""

    take: Any
    first: Any
    end: Any
    ends: Any


class HopperSchedule(NamedTuple):
    """The words of extend_schedule.py, with the number of blocks and of programs and the blocks that are shared out
    (cut); kv_len of sequences, window_left and ranges, which also decide which keys rows see.
    """

    words: Any
    max_blocks: Any
    num_programs: Any
    cut: Any
    kv_len: Any
    window_left: Any
    ranges: Any


@gluon.jit
def block_of(x, todo):
    """The query block that a program has reached; any, if there is nothing to do."""
    words = x.words + gl.where(todo.keys > 0, todo.block, 0) * BLOCK_WORDS
    return Block(
        gl.load(words + BLOCK_SEQ),
        gl.load(words + BLOCK_FIRST_TOKEN),
        gl.load(words + BLOCK_TOKENS),
        gl.load(words + BLOCK_KV_INDEX),
        gl.load(words + BLOCK_KEYS),
    )


@constexpr_function
def _places_of_tokens(G):
    """Places for the tokens of a query block: a power of two."""
    return 1 << (G.TOKENS - 1).bit_length()


@constexpr_function
def _in_each_warp(places, warps):
    """A layout of places that each warp holds all of, so that none waits for another."""
    bits = places.bit_length() - 1
    lanes = [[1 << bit] if bit < bits else [0] for bit in range(5)]
    registers = [[1 << bit] for bit in range(5, bits)]
    return gl.DistributedLinearLayout(registers, lanes, [[0]] * (warps.bit_length() - 1), [], [places])


@gluon.jit
def _ranges_of_block(x, block, counted_end, WARPS: gl.constexpr, G: gl.constexpr):
    """The keys of a query block whose tokens each see a range. WARPS: that ask for them"""
    PLACES: gl.constexpr = _places_of_tokens(G)
    layout: gl.constexpr = _in_each_warp(PLACES, WARPS)
    token = gl.arange(0, PLACES, layout=layout)
    is_token = token < gl.minimum(block.tokens, G.TOKENS)
    token_end = gl.load(x.ranges.end + block.first_token + token, mask=is_token, other=0)
    end_key = gl.max(token_end, 0)
    # Places without a token are no reason for a mask.
    inner_end = gl.min(gl.where(is_token, token_end, end_key), 0)
    first_key = gl.to_tensor(0)
    inner_first = first_key
    if G.WINDOWED:
        token_first = gl.load(x.ranges.first + block.first_token + token, mask=is_token, other=0x7FFFFFFF)
        first_key = gl.minimum(gl.min(token_first, 0), end_key)
        inner_first = gl.max(gl.where(is_token, token_first, 0), 0)
    return BlockKeys(first_key, end_key, inner_first, inner_end, counted_end)


@gluon.jit
def seen_by_block(x, block, WARPS: gl.constexpr, G: gl.constexpr):
    """The keys that a query block sees. The padded tail belongs to no sequence. WARPS: that ask for them"""
    seq = block.seq
    if G.CAUSAL:
        end_key = gl.where(seq >= 0, block.kv_index + block.tokens, 0)
    else:
        # If a step has no sequence, there is no length to read.
        end_key = gl.load(x.kv_len + seq, mask=seq >= 0, other=0)
    if G.RANGED:
        seen = _ranges_of_block(x, block, end_key, WARPS, G)
    else:
        first_key = gl.to_tensor(0)
        inner_first = first_key
        if G.WINDOWED:
            first_key = gl.maximum(block.kv_index - x.window_left, 0)
            inner_first = gl.maximum(end_key - 1 - x.window_left, 0)
        inner_end = block.kv_index + 1 if G.CAUSAL or G.WINDOWED else end_key
        seen = BlockKeys(first_key, end_key, inner_first, inner_end, end_key)
    return seen


@gluon.jit
def keys_of_rows(x, line, block, G: gl.constexpr):
    """The last key that each row of a query block sees, and the number of keys before it: of the window, or of each row
    if its token has a range. line: of the rows, counted from the block's first one
    """
    last_key = block.kv_index + line // G.GQA_RATIO
    keys_before = x.window_left
    if G.RANGED:
        token = block.first_token + line // G.GQA_RATIO
        is_row = has_token(line, block, G)
        end_key = gl.load(x.ranges.end + token, mask=is_row, other=0)
        first_key = gl.zeros_like(end_key)
        if G.WINDOWED:
            first_key = gl.load(x.ranges.first + token, mask=is_row, other=0)
            keys_before = gl.maximum(end_key - 1 - first_key, 0)
        # A row that sees nothing: no key comes that early.
        last_key = gl.where(end_key > first_key, end_key - 1, -(1 << 30))
    return last_key, keys_before


@gluon.jit
def _step_at(cost, block, seen, G: gl.constexpr):
    """The step, or the first one of the segment, that holds the key at a place of a row's cost; within those seen."""
    UNIT: gl.constexpr = G.KEY_BLOCK * max(G.SEGMENT_STEPS, 1)
    key = seen.counted_end - block.keys + gl.maximum(cost - G.ROW_KEYS, 0)
    step = key // UNIT * (UNIT // G.KEY_BLOCK)
    if G.RANGED:
        # Ranges may begin and end elsewhere than the schedule counts.
        step = gl.minimum(gl.maximum(step, seen.first // G.KEY_BLOCK), gl.cdiv(seen.end, G.KEY_BLOCK))
    return step


@gluon.jit
def steps_of(block, seen, todo, G: gl.constexpr):
    """The program's part of the row that it has reached. A step, or a segment, belongs to the share that it ends in."""
    cost = block.keys + G.ROW_KEYS
    take = gl.minimum(todo.keys, cost - todo.done)
    ends = todo.done + take == cost
    first_step = gl.maximum(_step_at(todo.done, block, seen, G), seen.first // G.KEY_BLOCK)
    if G.RANGED:
        first_step = gl.where(todo.done == 0, seen.first // G.KEY_BLOCK, first_step)
    end_step = gl.where(ends, gl.cdiv(seen.end, G.KEY_BLOCK), _step_at(todo.done + take, block, seen, G))
    return RowSteps(take, first_step, end_step, ends)


@gluon.jit
def _place_of(x, place, G: gl.constexpr):
    """Block and KV head of a place among the whole rows; a block after all others if there is no such place.

    If not all KV heads come at once, the last ones have the longest rows first, those before them last, and so on. So
    costs in order of places have no jumps, and end with the lowest: programs that take places back and forth, some one
    more than others, take about the same.
    """
    AT_ONCE: gl.constexpr = G.HEADS_AT_ONCE
    if AT_ONCE == G.KV_HEADS:
        block = x.cut + place // AT_ONCE
        row = place % AT_ONCE
    else:
        GROUPS: gl.constexpr = G.KV_HEADS // AT_ONCE
        rows = (gl.load(x.words + BLOCK_COUNT) - x.cut) * AT_ONCE
        group = place // gl.maximum(rows, 1)
        is_place = (rows > 0) & (group < GROUPS)
        index = place - group * rows
        index = gl.where((GROUPS - group) % 2 == 1, index, rows - 1 - index)
        block = gl.where(is_place, x.cut + index // AT_ONCE, x.max_blocks)
        row = group * AT_ONCE + index % AT_ONCE
    return block, row


@gluon.jit
def _whole_row(x, turn, G: gl.constexpr):
    """The program's turn-th whole row. They are dealt out back and forth.

    The last programs begin, because there may have been too few shares for them.
    """
    program = gl.program_id(0)
    place = turn * x.num_programs + gl.where(turn % 2 == 0, x.num_programs - 1 - program, program)
    block, row = _place_of(x, place, G)
    words = x.words + gl.minimum(block, x.max_blocks - 1) * BLOCK_WORDS
    is_row = (block < x.max_blocks) & (gl.load(words + BLOCK_TOKENS) > 0)
    keys = gl.where(is_row, gl.load(words + BLOCK_KEYS) + G.ROW_KEYS, 0)
    return ProgramWork(block, row, gl.to_tensor(0), keys, turn + 1)


@gluon.jit
def next_row(x, todo, take, G: gl.constexpr):
    """The work that is left after a row."""
    keys = todo.keys - take
    is_last = todo.row == G.KV_HEADS - 1
    block = gl.where(is_last, todo.block + 1, todo.block)
    row = gl.where(is_last, 0, todo.row + 1)
    turn = todo.turn
    if keys == 0:
        block, row, _, keys, turn = _whole_row(x, turn, G)
    return ProgramWork(block, row, gl.to_tensor(0), keys, turn)


@gluon.jit
def work_of_program(x, G: gl.constexpr):
    """A share of the longest rows, then whole rows; no keys if there is nothing to do."""
    share = x.words + x.max_blocks * BLOCK_WORDS + gl.program_id(0) * SHARE_WORDS
    block = gl.load(share + SHARE_BLOCK)
    row = gl.load(share + SHARE_ROW)
    done = gl.load(share + SHARE_DONE)
    keys = gl.load(share + SHARE_WORK)
    turn = gl.to_tensor(0)
    if keys == 0:
        block, row, done, keys, turn = _whole_row(x, turn, G)
    return ProgramWork(block, row, done, keys, turn)

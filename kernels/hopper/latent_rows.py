"""Rows of latent decode for Hopper: a program's part of each, and the places of its lines.

Each warp group walks the program's rows by itself (hopper/latent.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.attention.decode_schedule import (
    SEQ_KV_LEN,
    first_of_row,
    words_of_program,
    words_of_seq,
    work_at,
)
from rocm_attn.kernels.hopper.rows import GROUP_ROWS


class HopperLatentGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    rows:        how a sequence is cut into rows
    BLOCK_HEADS: query heads of a block
    HEAD_BLOCKS: blocks of query heads, which neighbouring programs take
    PAGE_SIZE:   tokens of a page
    KEY_BLOCK:   keys of a block
    STAGES:      blocks in shared memory
    CAUSAL:      whether a token sees no key after its own
    EARLY:       whether the launch may begin while the one before still runs
    VALUE_REGISTERS, SCORE_REGISTERS, LOADER_REGISTERS: registers of a thread of each warp group
    """

    rows: RowCut
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    PAGE_SIZE: int
    KEY_BLOCK: int
    STAGES: int
    CAUSAL: bool
    EARLY: bool
    VALUE_REGISTERS: int
    SCORE_REGISTERS: int
    LOADER_REGISTERS: int

    @property
    def SELECTED(self) -> bool:
        """False: keys of a row follow each other."""
        return False

    @property
    def WHOLE_ONLY(self) -> bool:
        """False: programs share rows where the schedule says so."""
        return False


class ScheduledRows(NamedTuple):
    """Values that all groups read: the schedule, its number of programs, and where sequences' new tokens begin."""

    schedule: Any
    num_programs: Any
    q_indptr: Any


class Todo(NamedTuple):
    """A program's next work: `work` positions, from the offset `done` of a row on."""

    seq: Any
    row: Any
    done: Any
    work: Any
    kv_len: Any


class RowPart(NamedTuple):
    """A program's part of a row.

    take:        positions
    first, end:  key blocks, up to the last one that a token sees
    is_whole:    whether they are all of the row's
    writes:      whether there is anything to write
    q_len:       new tokens of the sequence
    first_token: of the row, and tokens: how many it has
    first_end:   end of the keys that the first token sees, and last_end: of those that the last one sees
    part_at:     line of the workspace for the row's first query head, if the program shares the row
    """

    take: Any
    first: Any
    end: Any
    is_whole: Any
    writes: Any
    q_len: Any
    first_token: Any
    tokens: Any
    first_end: Any
    last_end: Any
    part_at: Any


@gluon.jit
def work_of_program(step, G: gl.constexpr):
    """The beginning of the program's work."""
    words = words_of_program(step.schedule, gl.program_id(0) // G.HEAD_BLOCKS)
    seq, row, done, work, kv_len = work_at(words)
    return Todo(seq, row, done, work, kv_len)


@gluon.jit
def part_of_row(step, todo, G: gl.constexpr):
    """The program's part of the row that it has reached."""
    R: gl.constexpr = G.rows
    T: gl.constexpr = R.TOKENS
    OF_ROW: gl.constexpr = T.OF_ROW
    kv_len = todo.kv_len
    num_blocks = gl.cdiv(gl.maximum(kv_len, 0), G.KEY_BLOCK)
    row_cost = gl.where(kv_len < 0, 0, num_blocks + R.ROW_COST)
    take = gl.minimum(todo.work, row_cost - todo.done)
    first = gl.maximum(todo.done - R.ROW_COST, 0)
    end = gl.maximum(todo.done + take - R.ROW_COST, first)
    # The program that begins a sequence without keys writes its zeros.
    writes = ((kv_len == 0) & (todo.done == 0)) | (end > first)
    first_of_seq = gl.load(step.q_indptr + todo.seq)
    q_len = gl.load(step.q_indptr + todo.seq + 1) - first_of_seq
    before = first_of_row(todo.row, q_len, T)
    tokens = gl.minimum(q_len - before, OF_ROW)
    first_end = kv_len - q_len + before + 1 if G.CAUSAL else kv_len
    last_end = first_end + tokens - 1 if G.CAUSAL else kv_len
    is_whole = end - first == num_blocks
    # Blocks that no token of the row sees cost nothing, and a part of no other ones adds nothing.
    end = gl.minimum(end, gl.cdiv(last_end, G.KEY_BLOCK))
    # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
    part = 2 * (gl.program_id(0) // G.HEAD_BLOCKS) + (first == 0).to(gl.int32)
    first_token = first_of_seq + before
    at = part * R.Q_ROWS
    return RowPart(take, first, end, is_whole, writes, q_len, first_token, tokens, first_end, last_end, at)


@gluon.jit
def after_row(step, todo, piece, G: gl.constexpr):
    """The work that is left after a piece."""
    work = todo.work - piece.take
    # No row is visited of a sequence that takes no part (-1).
    is_last = (todo.kv_len < 0) | ((todo.row + 1) * G.rows.TOKENS.OF_ROW >= piece.q_len)
    seq = gl.where(is_last, todo.seq + 1, todo.seq)
    row = gl.where(is_last, 0, todo.row + 1)
    kv_len = gl.load(words_of_seq(step.schedule, step.num_programs, seq) + SEQ_KV_LEN, mask=work > 0, other=-1)
    return Todo(seq, row, gl.to_tensor(0), work, kv_len)


@gluon.jit
def lines(piece, layout: gl.constexpr, G: gl.constexpr):
    """The program's rows [64]: token, counted from the first one, and query head; whether there is such a row."""
    line = gl.arange(0, GROUP_ROWS, layout=layout)
    token = line // G.BLOCK_HEADS
    head = gl.program_id(0) % G.HEAD_BLOCKS * G.BLOCK_HEADS + line % G.BLOCK_HEADS
    return token, head, (token < piece.tokens) & (head < G.rows.GQA_RATIO)


@gluon.jit
def place(rows, piece, token, head):
    """Pointers to rows in q, out or lse."""
    return rows.at + (piece.first_token + token).to(gl.int64) * rows.token + head.to(gl.int64) * rows.head


@gluon.jit
def place_of_part(piece, token, head, G: gl.constexpr):
    """Lines of the workspace for rows that the program shares."""
    return piece.part_at + token * G.rows.GQA_RATIO + head


@gluon.jit
def keys_of_range(piece, block, layout: gl.constexpr, G: gl.constexpr):
    """The keys of a block [KEY_BLOCK]; -1 for those that no token of the row sees."""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    key = block * KEY_BLOCK + gl.arange(0, KEY_BLOCK, layout=layout)
    return gl.where(key < piece.last_end, key, -1)

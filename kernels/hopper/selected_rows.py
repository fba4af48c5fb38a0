"""Parts of selections for Hopper: a program's part of each token's keys, and the keys that are listed there.

Each warp group walks the program's parts by itself (hopper/latent_groups.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.sparse.cuts import SelectedCut
from rocm_attn.kernels.sparse.places import visible_tokens
from rocm_attn.kernels.sparse.rows import SelectedGeometry, listed_keys


class HopperSelectedGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    rows: tokens and their heads
    cut:  how selections are cut; as values at run time its parts would take registers of every warp group
    LISTED: whether units are listed; else a token sees the last ones
    VALUE_REGISTERS, SCORE_REGISTERS, LOADER_REGISTERS: registers of a thread of each warp group
    """

    rows: SelectedGeometry
    cut: SelectedCut
    LISTED: bool
    VALUE_REGISTERS: int
    SCORE_REGISTERS: int
    LOADER_REGISTERS: int

    @property
    def SELECTED(self) -> bool:
        """True: keys of a row are listed."""
        return True

    @property
    def WHOLE_ONLY(self) -> bool:
        """True if a selection is one part, and programs share no row; else all rows are shared."""
        return self.cut.parts == 1

    @property
    def BLOCK_HEADS(self) -> int:
        """Query heads of a block."""
        return self.cut.row_heads

    @property
    def HEAD_BLOCKS(self) -> int:
        """Blocks of query heads, which neighbouring programs take."""
        return self.rows.HEAD_BLOCKS

    @property
    def PAGE_SIZE(self) -> int:
        """Tokens of a page."""
        return self.rows.PAGE_SIZE

    @property
    def KEY_BLOCK(self) -> int:
        """Keys of a block."""
        return self.rows.KEY_BLOCK

    @property
    def STAGES(self) -> int:
        """Blocks in shared memory."""
        return self.rows.STAGES


class ListedTokens(NamedTuple):
    """Values that all groups read: tokens' places, and their number; listed units and how many, or None; stride:
    programs with the same block of heads.
    """

    position_of_token: Any
    num_tokens: Any
    units: Any
    counts: Any
    stride: Any


class TodoParts(NamedTuple):
    """A program's next part: a token, named seq like a sequence of its own; its part; parts that are left, with it."""

    seq: Any
    part: Any
    work: Any


class SelectedPart(NamedTuple):
    """A program's part of a token's selection.

    first, end:  key blocks
    writes:      whether there is anything to write
    first_token: the token, and tokens: 1
    part_at:     line of the workspace for query head 0
    units:       the token's list
    hidden:      if there is none, the tokens before the last ones that it sees
    visible:     tokens that it sees
    end_key:     keys of the selection up to the end of the part
    """

    first: Any
    end: Any
    writes: Any
    first_token: Any
    tokens: Any
    part_at: Any
    units: Any
    hidden: Any
    visible: Any
    end_key: Any


@gluon.jit
def parts_of_program(num_items, num_programs, G: gl.constexpr):
    """The beginning of the program's work. num_items: tokens times parts, of one block of heads"""
    PARTS: gl.constexpr = G.cut.parts
    group = gl.program_id(0) // G.HEAD_BLOCKS
    stride = num_programs // G.HEAD_BLOCKS
    return TodoParts(group // PARTS, group % PARTS, gl.cdiv(num_items - group, stride))


@gluon.jit
def part_of_selection(step, todo, G: gl.constexpr):
    """The part that the program has reached."""
    R: gl.constexpr = G.rows
    C: gl.constexpr = G.cut
    token = todo.seq.to(gl.int64)
    visible = visible_tokens(step.position_of_token, step.num_tokens, todo.seq, True)
    if G.LISTED:
        num_keys, selection = listed_keys(step.counts, token, 0, R)
        listed = step.units + selection * R.WIDTH
        hidden = 0
    else:
        num_keys = gl.minimum(visible, R.WIDTH)
        listed = step.position_of_token  # not read
        hidden = visible - num_keys
    first_key = todo.part * C.part_keys
    end_key = gl.minimum(first_key + C.part_keys, num_keys)
    first = first_key // R.KEY_BLOCK
    end = gl.maximum(gl.cdiv(end_key, R.KEY_BLOCK), first)
    row = gl.program_id(0) % G.HEAD_BLOCKS
    # Query head h of a block is line h - row * row_heads of the block's part.
    part_at = ((token * C.rows + row) * C.parts + todo.part - row) * C.row_heads
    # Zeros are written for a token without keys.
    writes = end >= first if C.parts == 1 else end > first
    return SelectedPart(first, end, writes, token, 1, part_at, listed, hidden, visible, end_key)


@gluon.jit
def after_part(step, todo, G: gl.constexpr):
    """The part that comes next."""
    PARTS: gl.constexpr = G.cut.parts
    item = todo.seq * PARTS + todo.part + step.stride
    return TodoParts(item // PARTS, item % PARTS, todo.work - 1)


@gluon.jit
def keys_of_listing(piece, block, layout: gl.constexpr, G: gl.constexpr):
    """The places of a block's keys in their sequence [KEY_BLOCK]; -1 for those that the token does not see."""
    R: gl.constexpr = G.rows
    KEY_BLOCK: gl.constexpr = R.KEY_BLOCK
    index = block * KEY_BLOCK + gl.arange(0, KEY_BLOCK, layout=layout)
    unit = index // R.UNIT_TOKENS
    if G.LISTED:
        unit = gl.load(piece.units + unit, mask=index < piece.end_key, other=-1)
    else:
        unit += piece.hidden
    # Units are tested first: a number far outside would come back into the KV when it is multiplied.
    is_seen = (index < piece.end_key) & (unit >= 0) & (unit < gl.cdiv(piece.visible, R.UNIT_TOKENS))
    key = unit * R.UNIT_TOKENS + index % R.UNIT_TOKENS
    return gl.where(is_seen & (key < piece.visible), key, -1)

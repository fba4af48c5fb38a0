"""K and V on their way through shared memory: rings of stages that one warp fills by TMA, box by box.

Where pages hold no such boxes, four warps fill them, key by key (gather.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from rocm_attn.kernels.attention.extend_schedule import BLOCK_WORDS
from rocm_attn.kernels.hopper.rows import BOX_COLUMNS, next_row, piece_rows, seen_by_block, steps_of
from rocm_attn.kernels.hopper.warp_groups import leave

# Of those that gather keys (gather.py), each arrives at a barrier.
GATHERING_THREADS = gl.constexpr(128)


class Ring(NamedTuple):
    """K or V in shared memory: the same as boxes, as pieces and as tiles; barriers that a step is there."""

    boxes: Any
    pieces: Any
    tiles: Any
    full: Any


class Rings(NamedTuple):
    """Those of K and of V; barriers that consumers have read the keys of a step, and the values of the one before."""

    k: Any
    v: Any
    free: Any


class Cache(NamedTuple):
    """Where pages are: descriptors of K and V, or pointers where keys are gathered; the number of slots, the table, and
    the sequences' rows in it.
    """

    k: Any
    v: Any
    num_slots: Any
    table: Any
    table_row: Any
    width: Any
    row_of_seq: Any


class Source(NamedTuple):
    """Where a sequence's keys are: slots in all; its pages, and how many to read."""

    num_slots: Any
    pages: Any
    width: Any


@gluon.jit
def _new_ring(DTYPE: gl.constexpr, TILE_KEYS: gl.constexpr, G: gl.constexpr):
    """A ring with nothing in it, whose tiles have so many keys. Boxes, one after the other, are in memory what a
    swizzled tile is.
    """
    STAGES: gl.constexpr = G.STAGES
    BOX: gl.constexpr = G.BOX
    BOXES: gl.constexpr = G.STAGES * (G.DIM // BOX_COLUMNS) * (G.KEY_BLOCK // G.BOX)
    PIECE: gl.constexpr = piece_rows(G)
    PIECES: gl.constexpr = G.STAGES * (G.DIM // BOX_COLUMNS) * G.KEY_BLOCK // PIECE
    TILES: gl.constexpr = G.STAGES * (G.DIM // G.COLUMNS) * (G.KEY_BLOCK // TILE_KEYS)
    COLUMNS: gl.constexpr = G.COLUMNS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(DTYPE, [BOXES, BOX, BOX_COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=GATHERING_THREADS if G.GATHERED else 1)
    pieces = boxes._reinterpret(DTYPE, [PIECES, PIECE, BOX_COLUMNS], layout)
    return Ring(boxes, pieces, boxes._reinterpret(DTYPE, [TILES, TILE_KEYS, COLUMNS], layout), full)


@gluon.jit
def new_rings(K_DTYPE: gl.constexpr, V_DTYPE: gl.constexpr, G: gl.constexpr):
    """Both rings."""
    STAGES: gl.constexpr = G.STAGES
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(free.index(i), count=G.GROUPS)
    return Rings(_new_ring(K_DTYPE, G.KEY_BLOCK, G), _new_ring(V_DTYPE, G.VALUE_BLOCK, G), free)


@gluon.jit
def source_of(cache, seq):
    """The source of a sequence; of no sequence, whose keys nothing loads, any."""
    pages = cache.table + gl.load(cache.row_of_seq + gl.maximum(seq, 0)).to(gl.int64) * cache.table_row
    return Source(cache.num_slots, pages, cache.width)


@gluon.jit
def slots_of_step(source, step, seen, G: gl.constexpr):
    """First slot of each box of a step; that after the last slot of all for a box of which no row sees a key."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    slots = ()
    for i in gl.static_range(BOXES):
        key = step * G.KEY_BLOCK + i * G.BOX
        page = gl.load(source.pages + gl.minimum(key // G.PAGE_SIZE, source.width - 1))
        is_seen = (key < seen.end) & (key + G.BOX > seen.first)
        slots += (gl.where(is_seen, page * G.PAGE_SIZE + key % G.PAGE_SIZE, source.num_slots),)  # type: ignore[assignment]
    return slots


@gluon.jit
def box_of(ring, stage, column: gl.constexpr, at, TILE_KEYS: gl.constexpr, G: gl.constexpr):
    """A step's box, by its columns and its keys. Tiles lie one after the other, and in each its columns' boxes."""
    BOXES: gl.constexpr = TILE_KEYS // G.BOX
    TILES: gl.constexpr = G.KEY_BLOCK // TILE_KEYS
    PARTS: gl.constexpr = G.DIM // BOX_COLUMNS
    return ring.boxes.index(((stage * TILES + at // BOXES) * PARTS + column) * BOXES + at % BOXES)


@gluon.jit
def _load_box(desc, row, slot, column, full, box, G: gl.constexpr):
    """A box of a KV head by TMA. Of heads that fill no tile its columns beyond the head are zeros."""
    if G.HEAD_DIM < G.DIM:
        BOX: gl.constexpr = G.BOX
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
        of_head = box._reinterpret(box.dtype, [1, BOX, BOX_COLUMNS], layout)
        tma.async_copy_global_to_shared(desc, [row, slot, column], full, of_head)
    else:
        tma.async_copy_global_to_shared(desc, [slot, row * G.DIM + column], full, box)


@gluon.jit
def _load_step(desc, row, ring, stage, slots, TILE_KEYS: gl.constexpr, G: gl.constexpr):
    """K or V of a step to a stage, box by box."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    PARTS: gl.constexpr = G.DIM // BOX_COLUMNS
    full = ring.full.index(stage)
    mbarrier.expect(full, G.KEY_BLOCK * G.DIM * 2)
    for i in gl.static_range(BOXES):
        for c in gl.static_range(PARTS):
            box = box_of(ring, stage, c, i, TILE_KEYS, G)
            _load_box(desc, row, slots[i], c * BOX_COLUMNS, full, box, G)


@gluon.jit
def wait_until_full(ring, n, G: gl.constexpr):
    """Until K or V of the n-th step is there, and matrix units may read it."""
    mbarrier.wait(ring.full.index(n % G.STAGES), (n // G.STAGES) & 1)
    if G.GATHERED:
        fence_async_shared()


@gluon.jit
def wait_until_read(rings, n, G: gl.constexpr):
    """Until the n-th step may take the place of the keys that are in its stage, and the step before that of values."""
    mbarrier.wait(rings.free.index(n % G.STAGES), ((n // G.STAGES) & 1) ^ 1)


@gluon.jit
def produce(x, cache, rings, todo, G: gl.constexpr):
    """Load the keys of all the program's rows."""
    n = 0
    while todo.keys > 0:
        words = x.words + todo.block * BLOCK_WORDS
        seq, seen = seen_by_block(x, words, G)
        steps = steps_of(words, seen, todo, G)
        source = source_of(cache, seq)
        for step in range(steps.first, steps.end):
            slots = slots_of_step(source, step, seen, G)
            stage = n % G.STAGES
            wait_until_read(rings, n, G)
            _load_step(cache.k, todo.row, rings.k, stage, slots, G.KEY_BLOCK, G)
            wait_until_read(rings, n + 1, G)
            _load_step(cache.v, todo.row, rings.v, stage, slots, G.VALUE_BLOCK, G)
            n += 1
        todo = next_row(x, todo, steps.take, G)
    leave()


@gluon.jit
def _zero_in_box(ring, stage, at, first, end, G: gl.constexpr):
    """Zero the values of a box's keys, counted from its step, that are not in [first, end)."""
    PARTS: gl.constexpr = G.DIM // BOX_COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.expand_dims(at * G.BOX + gl.arange(0, G.BOX, layout=gl.SliceLayout(1, layout)), 1)
    for c in gl.static_range(PARTS):
        box = box_of(ring, stage, c, at, G.VALUE_BLOCK, G)
        values = box.load(layout)
        box.store(gl.where((key >= first) & (key < end), values, gl.zeros_like(values)))


@gluon.jit
def zero_unseen(ring, stage, step, seen, G: gl.constexpr):
    """Zero what no row sees in the boxes that lie across an edge.

    Each consumer does it, and all of them write the same, in whatever order: none waits for another.
    """
    first = seen.first - step * G.KEY_BLOCK
    end = seen.end - step * G.KEY_BLOCK
    if (first > 0) | (end < G.KEY_BLOCK):
        if (end < G.KEY_BLOCK) & (end % G.BOX != 0):
            _zero_in_box(ring, stage, end // G.BOX, first, end, G)
        if G.WINDOWED:
            is_cut_before = (first > 0) & (first % G.BOX != 0)
            if is_cut_before:
                _zero_in_box(ring, stage, first // G.BOX, first, end, G)
        fence_async_shared()
        gl.thread_barrier()

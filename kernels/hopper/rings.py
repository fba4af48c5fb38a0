"""K and V on their way through shared memory: rings of stages that one warp each fills by TMA, box by box.

If pages hold no such boxes, four warps fill them, key by key (gather.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.hopper.rows import (
    BOX_COLUMNS,
    block_of,
    next_row,
    parts_of,
    seen_by_block,
    steps_of,
)
from rocm_attn.kernels.hopper.warp_groups import leave

# Each thread of the warps that gather keys (gather.py) arrives at a barrier.
GATHERING_THREADS = gl.constexpr(128)


class Ring(NamedTuple):
    """K or V in shared memory: the same memory as boxes, as pieces and as tiles; barriers of tiles that are loaded."""

    boxes: Any
    pieces: Any
    tiles: Any
    full: Any


class Rings(NamedTuple):
    """The rings of K and V; barriers of steps whose keys consumers have read, and the values of the step before."""

    k: Any
    v: Any
    free: Any


class Cache(NamedTuple):
    """The pages: descriptors of K and V, or pointers if keys are gathered; the number of slots, the table, and
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
    """The place of a sequence's keys: slots in all; its pages, and how many to read."""

    num_slots: Any
    pages: Any
    width: Any


class Loaded(NamedTuple):
    """A row whose keys are loaded: their source, its KV head, and the keys that it sees."""

    source: Any
    head: Any
    seen: Any


@gluon.jit
def _new_ring(DTYPE: gl.constexpr, STAGES: gl.constexpr, TILE_KEYS: gl.constexpr, C: gl.constexpr, G: gl.constexpr):
    """An empty ring of STAGES stages, each a tile of TILE_KEYS keys with columns C.

    Boxes, one after the other, have the layout of a swizzled tile in memory.
    """
    BOX: gl.constexpr = G.BOX
    BOXES: gl.constexpr = STAGES * (C.DIM // BOX_COLUMNS) * (TILE_KEYS // G.BOX)
    TILES: gl.constexpr = STAGES * parts_of(C)
    COLUMNS: gl.constexpr = C.TILE
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(DTYPE, [BOXES, BOX, BOX_COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=GATHERING_THREADS if G.GATHERED else 1)
    pieces = boxes
    if G.CODE_TILES > 0:
        PIECES: gl.constexpr = STAGES * (C.DIM // BOX_COLUMNS)
        pieces = boxes._reinterpret(DTYPE, [PIECES, TILE_KEYS, BOX_COLUMNS], layout)
    return Ring(boxes, pieces, boxes._reinterpret(DTYPE, [TILES, TILE_KEYS, COLUMNS], layout), full)


@gluon.jit
def new_rings(K_DTYPE: gl.constexpr, V_DTYPE: gl.constexpr, G: gl.constexpr):
    """Both rings."""
    STAGES: gl.constexpr = G.STAGES
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(free.index(i), count=G.GROUPS)
    OF_K: gl.constexpr = G.K
    OF_V: gl.constexpr = G.V
    k = _new_ring(K_DTYPE, G.STAGES, G.KEY_BLOCK, OF_K, G)
    return Rings(k, _new_ring(V_DTYPE, G.VALUE_STAGES, G.VALUE_BLOCK, OF_V, G), free)


@gluon.jit
def source_of(cache, seq):
    """The source of a sequence; for no sequence, whose keys nothing loads, any."""
    # If a step has no sequence there is no memory either.
    row = gl.load(cache.row_of_seq + seq, mask=seq >= 0, other=0)
    pages = cache.table + row.to(gl.int64) * cache.table_row
    return Source(cache.num_slots, pages, cache.width)


@gluon.jit
def slots_of_step(source, step, seen, G: gl.constexpr):
    """First slot of each box of a step; the slot after the last of all for a box of which no row sees a key."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    slots = ()
    for i in gl.static_range(BOXES):
        key = step * G.KEY_BLOCK + i * G.BOX
        page = gl.load(source.pages + gl.minimum(key // G.PAGE_SIZE, source.width - 1))
        is_seen = (key < seen.end) & (key + G.BOX > seen.first)
        slots += (gl.where(is_seen, page * G.PAGE_SLOTS + key % G.PAGE_SIZE, source.num_slots),)  # type: ignore[assignment]
    return slots


@gluon.jit
def box_of(ring, stage, column: gl.constexpr, at, TILE_KEYS: gl.constexpr, C: gl.constexpr, G: gl.constexpr):
    """A box of a stage's tile, by its columns and its keys: those of the first columns lie before those of others."""
    BOXES: gl.constexpr = TILE_KEYS // G.BOX
    PARTS: gl.constexpr = C.DIM // BOX_COLUMNS
    return ring.boxes.index((stage * PARTS + column) * BOXES + at)


@constexpr_function
def value_tiles(G):
    """The number of tiles of V of a step."""
    return G.KEY_BLOCK // G.VALUE_BLOCK


@gluon.jit
def load_box(desc, row, slot, column, full, box, BITS: gl.constexpr, C: gl.constexpr, G: gl.constexpr):
    """Loads a box of a KV head by TMA. Columns beyond the head are zeros, or the next head's if nothing reads them.

    BITS: of an element
    """
    if C.ZEROED:
        BOX: gl.constexpr = G.BOX
        layout: gl.constexpr = gl.NVMMASharedLayout(BOX_COLUMNS * BITS // 8, BITS, rank=3)
        of_head = box._reinterpret(box.dtype, [1, BOX, BOX_COLUMNS], layout)
        tma.async_copy_global_to_shared(desc, [row, slot, column], full, of_head)
    else:
        tma.async_copy_global_to_shared(desc, [slot, row * C.HEAD_STRIDE + column], full, box)


@gluon.jit
def _load_tile(
    desc, row, ring, stage, slots, FIRST: gl.constexpr, TILE_KEYS: gl.constexpr, C: gl.constexpr, G: gl.constexpr
):
    """Loads a tile of K or V to a stage, box by box. FIRST: its first box of its step"""
    PARTS: gl.constexpr = C.DIM // BOX_COLUMNS
    full = ring.full.index(stage)
    mbarrier.expect(full, TILE_KEYS * C.DIM * 2)
    for i in gl.static_range(TILE_KEYS // G.BOX):
        for c in gl.static_range(PARTS):
            box = box_of(ring, stage, c, i, TILE_KEYS, C, G)
            load_box(desc, row, slots[FIRST + i], c * BOX_COLUMNS, full, box, 16, C, G)


@gluon.jit
def _wait_until_full(ring, n, STAGES: gl.constexpr, G: gl.constexpr):
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)
    if G.GATHERED:
        fence_async_shared()


@gluon.jit
def wait_for_keys(rings, n, G: gl.constexpr):
    """Waits until the keys of the n-th step are loaded, and matrix units may read them."""
    _wait_until_full(rings.k, n, G.STAGES, G)


@gluon.jit
def value_stage(n, tile, G: gl.constexpr):
    """The stage of a tile of V of the n-th step."""
    return (n * value_tiles(G) + tile) % G.VALUE_STAGES


@gluon.jit
def wait_for_values(rings, n, FIRST: gl.constexpr, END: gl.constexpr, G: gl.constexpr):
    """Waits until tiles [FIRST, END) of V of the n-th step are loaded, and matrix units may read them."""
    for tile in gl.static_range(FIRST, END):
        _wait_until_full(rings.v, n * value_tiles(G) + tile, G.VALUE_STAGES, G)


@gluon.jit
def wait_for_place(rings, n, G: gl.constexpr):
    """Waits until the keys in the place of the n-th step's keys are read."""
    mbarrier.wait(rings.free.index(n % G.STAGES), ((n // G.STAGES) & 1) ^ 1)


@gluon.jit
def wait_for_place_of_values(rings, n, tile: gl.constexpr, G: gl.constexpr):
    """Waits until the values in the place of a tile of V of the n-th step are read.

    Consumers have read the values of a step when they arrive for the keys of the next one.
    """
    STEPS_BEFORE: gl.constexpr = (G.VALUE_STAGES - tile + value_tiles(G) - 1) // value_tiles(G)
    wait_for_place(rings, n + 1 + G.STAGES - STEPS_BEFORE, G)


@gluon.jit
def of_all_steps(BEGIN: gl.constexpr, LOAD: gl.constexpr, WARPS: gl.constexpr, x, cache, task, todo, G: gl.constexpr):
    """Loads the data for the steps of all the program's rows, and ends.

    ahead = BEGIN(task, row, first step, G) for a row (Loaded), and ahead = LOAD(task, row, step, n, ahead, G) for each
    of its steps; n of them came before. WARPS: that load
    """
    n = 0
    while todo.keys > 0:
        block = block_of(x, todo)
        seen = seen_by_block(x, block, WARPS, G)
        steps = steps_of(block, seen, todo, G)
        row = Loaded(source_of(cache, block.seq), todo.row // G.HEAD_BLOCKS, seen)
        ahead = BEGIN(task, row, steps.first, G)
        for step in range(steps.first, steps.end):
            ahead = LOAD(task, row, step, n, ahead, G)
            n += 1
        todo = next_row(x, todo, steps.take, G)


@gluon.jit
def nothing_ahead(task, row, step, G: gl.constexpr):
    """Used as BEGIN by loads that do not wait for others."""
    return ()


@gluon.jit
def _load_keys(task, row, step, n, ahead, G: gl.constexpr):
    cache, rings = task
    OF_K: gl.constexpr = G.K
    slots = slots_of_step(row.source, step, row.seen, G)
    wait_for_place(rings, n, G)
    _load_tile(cache.k, row.head, rings.k, n % G.STAGES, slots, 0, G.KEY_BLOCK, OF_K, G)
    return ahead


@gluon.jit
def _load_values(task, row, step, n, ahead, G: gl.constexpr):
    cache, rings = task
    slots = slots_of_step(row.source, step, row.seen, G)
    BOXES: gl.constexpr = G.VALUE_BLOCK // G.BOX
    OF_V: gl.constexpr = G.V
    for tile in gl.static_range(value_tiles(G)):
        wait_for_place_of_values(rings, n, tile, G)
        _load_tile(cache.v, row.head, rings.v, value_stage(n, tile, G), slots, tile * BOXES, G.VALUE_BLOCK, OF_V, G)
    return ahead


@gluon.jit
def produce_keys(x, cache, rings, todo, G: gl.constexpr):
    """Loads K of all the program's rows."""
    of_all_steps(nothing_ahead, _load_keys, 1, x, cache, (cache, rings), todo, G)
    leave()


@gluon.jit
def produce_values(x, cache, rings, todo, G: gl.constexpr):
    """Loads V of all the program's rows: by a warp of its own, because it waits when K need not."""
    of_all_steps(nothing_ahead, _load_values, 1, x, cache, (cache, rings), todo, G)
    leave()


@gluon.jit
def _zero_in_box(ring, n, at, first, end, G: gl.constexpr):
    """Zeroes the values of a box's keys, counted from the n-th step, that are not in [first, end)."""
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = G.V.DIM // BOX_COLUMNS
    BOXES: gl.constexpr = G.VALUE_BLOCK // G.BOX
    stage = value_stage(n, at // BOXES, G)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.expand_dims(at * G.BOX + gl.arange(0, G.BOX, layout=gl.SliceLayout(1, layout)), 1)
    for c in gl.static_range(PARTS):
        box = box_of(ring, stage, c, at % BOXES, G.VALUE_BLOCK, OF_V, G)
        values = box.load(layout)
        box.store(gl.where((key >= first) & (key < end), values, gl.zeros_like(values)))


@gluon.jit
def zero_unseen(ring, n, step, seen, G: gl.constexpr):
    """Zeroes the values that no row sees in the boxes of V of the n-th step that lie across an edge.

    Each consumer does it, and all of them write the same, in any order: none waits for another.
    """
    first = seen.first - step * G.KEY_BLOCK
    end = seen.end - step * G.KEY_BLOCK
    if (first > 0) | (end < G.KEY_BLOCK):
        if (end < G.KEY_BLOCK) & (end % G.BOX != 0):
            _zero_in_box(ring, n, end // G.BOX, first, end, G)
        if G.WINDOWED:
            is_cut_before = (first > 0) & (first % G.BOX != 0)
            if is_cut_before:
                _zero_in_box(ring, n, first // G.BOX, first, end, G)
        fence_async_shared()
        gl.thread_barrier()

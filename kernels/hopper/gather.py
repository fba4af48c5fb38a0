"""Moves keys to the rings one by one, by copies of 16 bytes per lane.

It is for pages that hold no box of 16 keys: a TMA instruction would load few of them.

Four warps load. A thread does not wait for its copies: they arrive at the barrier of the step's K or V when they are
done. Matrix units read shared memory outside the order of ordinary writes, so consumers put a fence between that
barrier and their products (rings.wait_for_keys).

Keys that no row sees are not read: their places in shared memory are zeroed, and so are columns beyond a head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rocm_attn.kernels.hopper.query_rows import is_column
from rocm_attn.kernels.hopper.rings import (
    box_of,
    of_all_steps,
    value_stage,
    value_tiles,
    wait_for_place,
    wait_for_place_of_values,
)
from rocm_attn.kernels.hopper.rows import BOX_COLUMNS
from rocm_attn.kernels.hopper.warp_groups import leave

_WARPS = gl.constexpr(4)
# Lanes of eight elements: a warp has four keys' 128 bytes.
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _places_of_step(source, step, seen, G: gl.constexpr):
    """The slots of the keys [BOX] of each box of a step; -1 for keys that no row sees."""
    BOX: gl.constexpr = G.BOX
    places = ()
    for i in gl.static_range(G.KEY_BLOCK // G.BOX):
        key = step * G.KEY_BLOCK + i * BOX + gl.arange(0, BOX, layout=gl.SliceLayout(1, _LAYOUT))
        is_seen = (key >= seen.first) & (key < seen.end)
        page = gl.load(source.pages + gl.minimum(key // G.PAGE_SIZE, source.width - 1), mask=is_seen, other=0)
        places += (gl.where(is_seen, page * G.PAGE_SLOTS + key % G.PAGE_SIZE, -1),)  # type: ignore[assignment]
    return places


@gluon.jit
def _copy_tile(
    pages, row, ring, stage, places, FIRST: gl.constexpr, TILE_KEYS: gl.constexpr, C: gl.constexpr, G: gl.constexpr
):
    """Begins the copies of a tile of K or V to a stage. FIRST: its first box of its step"""
    column = gl.expand_dims(gl.arange(0, BOX_COLUMNS, layout=gl.SliceLayout(0, _LAYOUT)), 0)
    for i in gl.static_range(TILE_KEYS // G.BOX):
        slot = gl.expand_dims(places[FIRST + i], 1)
        keys = pages + (slot.to(gl.int64) * C.SLOT_STRIDE + row * C.HEAD_STRIDE)
        for c in gl.static_range(C.DIM // BOX_COLUMNS):
            is_there = (slot >= 0) & is_column(c * BOX_COLUMNS + column, C)
            box = box_of(ring, stage, c, i, TILE_KEYS, C, G)
            async_copy.async_copy_global_to_shared(box, keys + (c * BOX_COLUMNS + column), mask=is_there)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


@gluon.jit
def _first_places(task, row, step, G: gl.constexpr):
    return _places_of_step(row.source, step, row.seen, G)


@gluon.jit
def _gather_step(task, row, step, n, places, G: gl.constexpr):
    cache, rings = task
    OF_K: gl.constexpr = G.K
    # A load of a place is under way during a step.
    after = _places_of_step(row.source, step + 1, row.seen, G)
    wait_for_place(rings, n, G)
    _copy_tile(cache.k, row.head, rings.k, n % G.STAGES, places, 0, G.KEY_BLOCK, OF_K, G)
    BOXES: gl.constexpr = G.VALUE_BLOCK // G.BOX
    OF_V: gl.constexpr = G.V
    for tile in gl.static_range(value_tiles(G)):
        wait_for_place_of_values(rings, n, tile, G)
        _copy_tile(cache.v, row.head, rings.v, value_stage(n, tile, G), places, tile * BOXES, G.VALUE_BLOCK, OF_V, G)
    return after


@gluon.jit
def gather(x, cache, rings, todo, G: gl.constexpr):
    """Loads the keys of all the program's rows."""
    of_all_steps(_first_places, _gather_step, _WARPS, x, cache, (cache, rings), todo, G)
    # No thread ends before its copies do.
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave()

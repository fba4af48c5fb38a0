"""Moves records of latents to shared memory: four warps load codes, and write values in q's dtype.

A warp has 128 codes of a record, which share a scale, in eight lanes. Loads of a half of a block, and of its scales,
are under way while the half before is decoded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rocm_attn.kernels.cache.codes import group_of
from rocm_attn.kernels.hopper.codes import as_half
from rocm_attn.kernels.hopper.latent_groups import (
    HALF,
    REST,
    V_DIM,
    after_piece,
    columns_of,
    keys_of_block,
    line_of_table,
    piece_of,
    slots_of_keys,
    wait_until_free,
)
from rocm_attn.kernels.hopper.warp_groups import leave

_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _LAYOUT.value))
_REST = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Bytes of a record.
_RECORD = gl.constexpr(V_DIM.value + 4 * (V_DIM.value // 128) + 2 * REST.value)


@gluon.jit
def _load_half(record, slot, half: gl.constexpr, G: gl.constexpr):
    """Codes of a half of a block, by groups [KEY_BLOCK, GROUP], and their scales [KEY_BLOCK]."""
    GROUP: gl.constexpr = group_of(G.rows.coding.SCALES)
    at = slot.to(gl.int64) * _RECORD
    is_there = slot >= 0
    loaded = ()
    for group in gl.static_range(HALF // GROUP):
        first = half * HALF + group * GROUP
        places = record.codes + gl.expand_dims(at, 1) + columns_of(first, GROUP, _LAYOUT)
        codes = gl.load(places, mask=gl.expand_dims(is_there, 1), other=0)
        scale = gl.load(record.scales + at // 4 + first // GROUP, mask=is_there, other=0.0)
        loaded += (codes, scale)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _put_half(loaded, shared, stage, half: gl.constexpr, G: gl.constexpr):
    """Decodes a half of a block to a stage."""
    GROUP: gl.constexpr = group_of(G.rows.coding.SCALES)
    ASSEMBLY: gl.constexpr = as_half(G.rows.coding.ENCODING)
    place = shared.halves.index(stage * 2 + half)
    for group in gl.static_range(HALF // GROUP):
        numbers = gl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [loaded[2 * group]], dtype=gl.float16, is_pure=True, pack=4
        )
        values = numbers.to(gl.float32) * gl.expand_dims(loaded[2 * group + 1], 1)
        place.slice(group * GROUP, GROUP, 1).store(values.to(place.dtype))


@gluon.jit
def _load_rest(record, slot):
    """Columns after V's, [KEY_BLOCK, REST]."""
    at = slot.to(gl.int64) * (_RECORD // 2)
    return gl.load(
        record.rest + gl.expand_dims(at, 1) + columns_of(0, REST, _REST), mask=gl.expand_dims(slot >= 0, 1), other=0.0
    )


@gluon.jit
def gather_records(step, latents, record, shared, todo, G: gl.constexpr):
    """Loads all records that the program takes."""
    n = 0
    while todo.work > 0:
        piece = piece_of(step, todo, G)
        if piece.end > piece.first:
            line = line_of_table(latents, todo)
            slot = slots_of_keys(latents, line, keys_of_block(piece, piece.first, _ROWS, G), G)
            loaded = _load_half(record, slot, 0, G)
            for block in range(piece.first, piece.end):
                stage = n % G.STAGES
                after = slots_of_keys(latents, line, keys_of_block(piece, block + 1, _ROWS, G), G)
                rest = _load_rest(record, gl.convert_layout(slot, gl.SliceLayout(1, _REST)))
                second = _load_half(record, slot, 1, G)
                wait_until_free(shared, n, 0, G)
                shared.rest.index(stage).store(rest.to(shared.rest.dtype))
                _put_half(loaded, shared, stage, 0, G)
                _pass_on(shared, stage * 2)
                loaded = _load_half(record, after, 0, G)
                wait_until_free(shared, n, 1, G)
                _put_half(second, shared, stage, 1, G)
                _pass_on(shared, stage * 2 + 1)
                slot = after
                n += 1
        todo = after_piece(step, todo, piece, G)
    leave()


@gluon.jit
def _pass_on(shared, half):
    """Reports that a half is full."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(shared.full.index(half), count=1)

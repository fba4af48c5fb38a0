"""Moves records of latents to shared memory: four warps load codes, and write values in bfloat16.

A warp has 128 codes of a record, which share a scale, in eight lanes. Loads of a half of a block, and of its scales,
are under way while the half before is decoded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rocm_attn.kernels.cache.codes import group_of
from rocm_attn.kernels.hopper.latent_groups import (
    HALF,
    REST,
    V_DIM,
    after_piece,
    columns_of,
    keys_of_block,
    line_of_table,
    piece_of,
    put_hidden,
    slots_of_keys,
    wait_until_free,
)
from rocm_attn.kernels.hopper.warp_groups import leave

# Words of four codes: lanes of 16 bytes.
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _LAYOUT.value))
_REST = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Two elements of sixteen bits a word, in the order of NVMMASharedLayout(128, 16, rank=2).
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
# Bytes of a record (cache/records.py).
RECORD_BYTES = gl.constexpr(V_DIM.value + 4 * (V_DIM.value // 128) + 2 * REST.value)
# A word of four codes times a scale, as two words of bfloat16.
_DECODE = gl.constexpr("""{
    .reg .b16 low, high, a, b;
    .reg .b32 pair;
    .reg .f32 first, second;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 first, a;
    cvt.f32.f16 second, b;
    mul.f32 first, first, $3;
    mul.f32 second, second, $3;
    cvt.rn.bf16x2.f32 $0, second, first;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 first, a;
    cvt.f32.f16 second, b;
    mul.f32 first, first, $3;
    mul.f32 second, second, $3;
    cvt.rn.bf16x2.f32 $1, second, first;
}""")


@gluon.jit
def _load_half(record, slot, half: gl.constexpr, G: gl.constexpr):
    """Codes of a half of a block, by groups, int32 [KEY_BLOCK, GROUP / 4], and their scales [KEY_BLOCK]."""
    GROUP: gl.constexpr = group_of(G.rows.coding.SCALES)
    words = record.codes.to(gl.pointer_type(gl.int32), bitcast=True)
    at = slot.to(gl.int64) * (RECORD_BYTES // 4)
    is_there = slot >= 0
    loaded = ()
    for group in gl.static_range(HALF // GROUP):
        first = (half * HALF + group * GROUP) // 4
        places = words + gl.expand_dims(at, 1) + columns_of(first, GROUP // 4, _LAYOUT)
        codes = gl.load(places, mask=gl.expand_dims(is_there, 1), other=0)
        scale = gl.load(record.scales + at + (half * HALF // GROUP + group), mask=is_there, other=0.0)
        loaded += (codes, scale)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _put_half(loaded, shared, stage, half: gl.constexpr, G: gl.constexpr):
    """Decodes a half of a block to a stage."""
    GROUP: gl.constexpr = group_of(G.rows.coding.SCALES)
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    place = shared.halves.index(stage * 2 + half)
    words = place._reinterpret(gl.int32, [KEY_BLOCK, HALF // 2], _WORDS)
    for group in gl.static_range(HALF // GROUP):
        codes = loaded[2 * group]
        scale = gl.expand_dims(loaded[2 * group + 1], 1) + gl.zeros_like(codes).to(gl.float32)
        pairs = gl.inline_asm_elementwise(
            _DECODE, "=r,=r,r,f", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        values = gl.join(pairs[0], pairs[1]).reshape([KEY_BLOCK, GROUP // 2])
        words.slice(group * (GROUP // 2), GROUP // 2, 1).store(values)


@gluon.jit
def _copy_rest(record, slot, shared, stage):
    """Begins the copies of the columns after V's."""
    slot = gl.expand_dims(gl.convert_layout(slot, gl.SliceLayout(1, _REST)), 1)
    rest = record.rest + slot.to(gl.int64) * (RECORD_BYTES // 2) + columns_of(0, REST, _REST)
    async_copy.async_copy_global_to_shared(shared.rest.index(stage), rest, mask=slot >= 0)
    async_copy.commit_group()


@gluon.jit
def gather_records(step, latents, shared, todo, G: gl.constexpr):
    """Loads all records that the program takes."""
    record = latents.record
    n = 0
    while todo.work > 0:
        piece = piece_of(step, todo, G)
        if piece.end > piece.first:
            line = line_of_table(latents, todo)
            slot = slots_of_keys(latents, line, keys_of_block(piece, piece.first, _ROWS, G), G)
            key = keys_of_block(piece, piece.first + 1, _ROWS, G)
            loaded = _load_half(record, slot, 0, G)
            for block in range(piece.first, piece.end):
                stage = n % G.STAGES
                second = _load_half(record, slot, 1, G)
                # Loads of page numbers, and of listed keys, are under way during a block.
                after = slots_of_keys(latents, line, key, G)
                key = keys_of_block(piece, block + 2, _ROWS, G)
                wait_until_free(shared, n, 0, G)
                put_hidden(slot, shared, stage)
                _copy_rest(record, slot, shared, stage)
                _put_half(loaded, shared, stage, 0, G)
                async_copy.wait_group(0)
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

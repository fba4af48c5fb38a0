"""Eight-bit pages on their way through shared memory: codes arrive by TMA, and a warp group of its own decodes them.

    pages -> ring of codes -> ring of K and ring of V, in sixteen bits -> matrix units

A code is exact in sixteen bits. Scales of the layer or of a head are multiplied in where they belong to rows
(coded.py). A token's scale of K multiplies its column of the scores, and its scale of V its column of the weights;
float16 holds few scales, so there it multiplies the row of V, which is then rounded.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cache.codes import HEAD_SCALES, LAYER_SCALES, TOKEN_SCALES
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.hopper.rings import (
    load_box,
    nothing_ahead,
    of_all_steps,
    slots_of_step,
    value_stage,
    wait_for_place,
    wait_for_place_of_values,
    zero_unseen,
)
from rocm_attn.kernels.hopper.rows import BOX_COLUMNS
from rocm_attn.kernels.hopper.warp_groups import leave

_WARPS = gl.constexpr(4)

# Four codes of a word as four float16: for E4M3FN an instruction per pair; for E5M2 a code is a float16's upper byte.
_AS_HALF = {
    Encoding.E4M3FN.number: """{
        .reg .b16 first, second;
        mov.b32 {first, second}, $2;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
    }""",
    Encoding.E5M2.number: """{
        prmt.b32 $0, $2, 0, 0x1404;
        prmt.b32 $1, $2, 0, 0x3424;
    }""",
}


@constexpr_function
def as_half(encoding: int) -> str:
    """PTX for four codes of an encoding: two words of float16."""
    return _AS_HALF[encoding]


class TokenScales(NamedTuple):
    """Scales of the keys in the rings of K and of V: float32 [stages, KEY_BLOCK]."""

    k: Any
    v: Any


class CodeTiles(NamedTuple):
    """A ring of tiles of codes, K and V in turn.

    boxes, pieces: the ring as boxes of a page, and as pieces that are decoded at a time
    full, free:         barriers for a tile being loaded, and for its being decoded
    scales:             of tokens (TokenScales)
    """

    boxes: Any
    pieces: Any
    full: Any
    free: Any
    scales: Any


class ProductScales(NamedTuple):
    """Factors of products of q and K, and of the tanh of a cap: numbers; scales of K and of V: pointers, or None."""

    products: Any
    cap: Any
    k: Any
    v: Any


@gluon.jit
def row_scale(scale, head, G: gl.constexpr):
    """The scale of the layer or of a head; 1 if there is none, or if each token has one."""
    scale_value = 1.0
    if G.SCALES == LAYER_SCALES:
        scale_value = gl.load(scale)
    elif G.SCALES == HEAD_SCALES:
        scale_value = gl.load(scale + head)
    return scale_value


@constexpr_function
def _parts_of_place(G):
    """Parts of BOX_COLUMNS that a tile of codes, of K or of V, has room for."""
    return max(G.K.DIM, G.V.DIM) // BOX_COLUMNS.value


@gluon.jit
def new_codes(G: gl.constexpr):
    """An empty ring."""
    TILES: gl.constexpr = G.CODE_TILES
    BOX: gl.constexpr = G.BOX
    PARTS: gl.constexpr = G.CODE_TILES * _parts_of_place(G)
    BOXES: gl.constexpr = PARTS * (G.KEY_BLOCK // G.BOX)
    layout: gl.constexpr = gl.NVMMASharedLayout(64, 8, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(gl.uint8, [BOXES, BOX, BOX_COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], bars)
    free = gl.allocate_shared_memory(gl.int64, [TILES, 1], bars)
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    pieces = boxes._reinterpret(gl.uint8, [PARTS, KEY_BLOCK, BOX_COLUMNS], layout)
    STAGES: gl.constexpr = G.STAGES
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_k = gl.allocate_shared_memory(gl.float32, [STAGES, KEY_BLOCK], line)
    of_v = gl.allocate_shared_memory(gl.float32, [STAGES, KEY_BLOCK], line)
    return CodeTiles(boxes, pieces, full, free, TokenScales(of_k, of_v))


@gluon.jit
def _load_codes(desc, head, codes, n, slots, C: gl.constexpr, G: gl.constexpr):
    """Loads the n-th tile of codes, box by box."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    PARTS: gl.constexpr = _parts_of_place(G)
    place = n % G.CODE_TILES
    mbarrier.wait(codes.free.index(place), ((n // G.CODE_TILES) & 1) ^ 1)
    full = codes.full.index(place)
    mbarrier.expect(full, G.KEY_BLOCK * C.DIM)
    for i in gl.static_range(BOXES):
        for c in gl.static_range(C.DIM // BOX_COLUMNS):
            box = codes.boxes.index((place * PARTS + c) * BOXES + i)
            load_box(desc, head, slots[i], c * BOX_COLUMNS, full, box, 8, C, G)


@gluon.jit
def _load_step(task, row, step, n, ahead, G: gl.constexpr):
    cache, codes = task
    slots = slots_of_step(row.source, step, row.seen, G)
    OF_K: gl.constexpr = G.K
    OF_V: gl.constexpr = G.V
    _load_codes(cache.k, row.head, codes, 2 * n, slots, OF_K, G)
    _load_codes(cache.v, row.head, codes, 2 * n + 1, slots, OF_V, G)
    return ahead


@gluon.jit
def produce_codes(x, cache, codes, todo, G: gl.constexpr):
    """Loads the codes of all the program's rows."""
    of_all_steps(nothing_ahead, _load_step, 1, x, cache, (cache, codes), todo, G)
    leave()


@gluon.jit
def _pages_of_keys(source, step, seen, G: gl.constexpr):
    """The places of the scales of a step's keys: page [KEY_BLOCK], offset in it, and whether some row sees the key."""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key = step * KEY_BLOCK + gl.arange(0, KEY_BLOCK, layout=layout)
    live = (key >= seen.first) & (key < seen.end)
    page = gl.load(source.pages + gl.minimum(key // G.PAGE_SIZE, source.width - 1), mask=live, other=0)
    return page, key % G.PAGE_SIZE, live


@gluon.jit
def _scales_of_keys(scale_values, row, at, G: gl.constexpr):
    """Scales of K and of V; 0 for keys that no row sees."""
    page, offset, live = at
    place = (page.to(gl.int64) * (G.KV_HEADS // G.HEAD_BLOCKS) + row) * G.PAGE_SIZE + offset
    return gl.load(scale_values.k + place, mask=live, other=0.0), gl.load(scale_values.v + place, mask=live, other=0.0)


@gluon.jit
def _decode_tile(codes, n, ring, stage, SCALED: gl.constexpr, C: gl.constexpr, G: gl.constexpr):
    """Decodes the n-th tile of codes to a stage, without zeroing anything else. SCALED: with scales of V"""
    PIECES: gl.constexpr = C.DIM // BOX_COLUMNS
    ASSEMBLY: gl.constexpr = as_half(G.ENCODING)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = n % G.CODE_TILES
    if SCALED:
        scale_value = gl.expand_dims(codes.scales.v.index(stage).load(gl.SliceLayout(1, layout)), 1)
    for i in gl.static_range(PIECES):
        piece = codes.pieces.index(place * _parts_of_place(G) + i).load(layout)
        numbers = gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [piece], dtype=gl.float16, is_pure=True, pack=4)
        if SCALED:
            numbers = numbers.to(gl.float32) * scale_value
        ring.pieces.index(stage * PIECES + i).store(numbers.to(ring.pieces.dtype))


@gluon.jit
def _pass_on(codes, n, ring, stage, G: gl.constexpr):
    """Reports that a tile is decoded: its codes' place is free, and its stage is full."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(codes.free.index(n % G.CODE_TILES), count=1)
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _wait_for_codes(codes, n, G: gl.constexpr):
    mbarrier.wait(codes.full.index(n % G.CODE_TILES), (n // G.CODE_TILES) & 1)


@gluon.jit
def _first_scales(task, row, step, G: gl.constexpr):
    """Scales of a step's keys, if tokens have them, and the places of the next step's scales."""
    ahead = ()
    if G.SCALES == TOKEN_SCALES:
        scale_values, _, _ = task
        k_scale_value, v_scale_value = _scales_of_keys(
            scale_values, row.head, _pages_of_keys(row.source, step, row.seen, G), G
        )
        ahead = (k_scale_value, v_scale_value, _pages_of_keys(row.source, step + 1, row.seen, G))  # type: ignore[assignment]
    return ahead


@gluon.jit
def _decode_step(task, row, step, n, ahead, G: gl.constexpr):
    BY_TOKEN: gl.constexpr = G.SCALES == TOKEN_SCALES
    OF_K: gl.constexpr = G.K
    OF_V: gl.constexpr = G.V
    scale_values, codes, rings = task
    stage, v_stage = n % G.STAGES, value_stage(n, 0, G)
    _wait_for_codes(codes, 2 * n, G)
    wait_for_place(rings, n, G)
    if BY_TOKEN:
        k_scale_value, v_scale_value, at = ahead
        codes.scales.k.index(stage).store(k_scale_value)
        # Two steps ahead, and one: a load of a scale waits for that of its page.
        next_k, next_v = _scales_of_keys(scale_values, row.head, at, G)
        ahead = (next_k, next_v, _pages_of_keys(row.source, step + 2, row.seen, G))
    _decode_tile(codes, 2 * n, rings.k, stage, False, OF_K, G)
    _pass_on(codes, 2 * n, rings.k, stage, G)
    _wait_for_codes(codes, 2 * n + 1, G)
    wait_for_place_of_values(rings, n, 0, G)
    SCALED: gl.constexpr = BY_TOKEN and not G.SCALES_WEIGHTS
    if BY_TOKEN:
        codes.scales.v.index(v_stage).store(v_scale_value)
    if SCALED:
        gl.thread_barrier()
    _decode_tile(codes, 2 * n + 1, rings.v, v_stage, SCALED, OF_V, G)
    zero_unseen(rings.v, n, step, row.seen, G)
    _pass_on(codes, 2 * n + 1, rings.v, v_stage, G)
    return ahead


@gluon.jit
def decode(x, cache, scale_values, codes, rings, todo, G: gl.constexpr):
    """Decodes the codes of all the program's rows."""
    of_all_steps(_first_scales, _decode_step, _WARPS, x, cache, (scale_values, codes, rings), todo, G)
    leave()

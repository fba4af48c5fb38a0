"""Reads a consumer's rows of a query block, and writes their results, for extend on Hopper."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.coded import exponent_to_move, moved_to_half, scale_of_moved
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E
from rocm_attn.kernels.hopper.rows import GROUP_ROWS, columns_of, has_token, of_rows, parts_of


class QueryOutputs(NamedTuple):
    """Rows of q, out and lse (bundles.HeadRows); sinks; accumulators and sums of parts of rows."""

    q: Any
    out: Any
    lse: Any
    sinks: Any
    partials: Any
    sums: Any


@gluon.jit
def lines_of_group(GROUP: gl.constexpr, layout: gl.constexpr):
    """The group's rows, counted from the query block's first one."""
    return GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=layout)


@gluon.jit
def _place(rows, line, block, kv_head, G: gl.constexpr):
    """Pointers to rows of a query block in q, out or lse."""
    token = (block.first_token + line // G.GQA_RATIO).to(gl.int64)
    head = (kv_head * G.GQA_RATIO + line % G.GQA_RATIO).to(gl.int64)
    return rows.at + token * rows.token + head * rows.head


@gluon.jit
def is_column(column, C: gl.constexpr):
    """A mask of the columns [1, TILE] that a row has."""
    return column < C.HEAD_DIM if C.HEAD_DIM < C.DIM else True


@constexpr_function
def _in_memory(columns):
    """The layout of a tile's rows that moves 16 bytes of each lane."""
    return gl.BlockedLayout([1, 8], [256 // columns.TILE, columns.TILE // 8], [4, 1], [1, 0])


@gluon.jit
def fetch_queries(GROUP: gl.constexpr, q, block, todo, G: gl.constexpr):
    """The group's rows of q, on their way to registers; 0 for rows without a token, and if there is nothing to do."""
    OF_K: gl.constexpr = G.K
    COLUMNS: gl.constexpr = G.K.TILE
    PARTS: gl.constexpr = parts_of(OF_K)
    layout: gl.constexpr = _in_memory(OF_K)
    line = lines_of_group(GROUP, gl.SliceLayout(1, layout))
    rows = gl.expand_dims(_place(q, line, block, todo.row, G), 1)
    is_row = gl.expand_dims(has_token(line, block, G) & (todo.keys > 0), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    fetched = ()
    for i in gl.static_range(PARTS):
        is_there = is_row & is_column(i * COLUMNS + column, OF_K)
        fetched += (gl.load(rows + (i * COLUMNS + column), mask=is_there, other=0.0),)  # type: ignore[assignment]
    return fetched


@gluon.jit
def put_queries(fetched, tiles, qk_scale, LAYOUT: gl.constexpr, G: gl.constexpr):
    """Writes rows of q to shared memory, and returns the factor for products with them: qk_scale of any row.

    If K is in float16, rows of bfloat16 are moved there, each by a power of two of its own: see coded.half_query. The
    factor then has LAYOUT, [64].
    """
    OF_K: gl.constexpr = G.K
    PARTS: gl.constexpr = parts_of(OF_K)
    if G.MOVES_Q:
        largest = gl.max(gl.abs(fetched[0].to(gl.float32)), 1)
        for i in gl.static_range(1, PARTS):
            largest = gl.maximum(largest, gl.max(gl.abs(fetched[i].to(gl.float32)), 1))
        exponent = exponent_to_move(largest)
        moved = ()
        for i in gl.static_range(PARTS):
            moved += (moved_to_half(fetched[i], gl.expand_dims(exponent, 1)),)  # type: ignore[assignment]
        fetched = moved
        qk_scale = gl.convert_layout(scale_of_moved(exponent), LAYOUT) * qk_scale
    # All warps must have read the row before.
    gl.thread_barrier()
    for i in gl.static_range(PARTS):
        tiles.index(i).store(fetched[i])
    fence_async_shared()
    gl.thread_barrier()
    return qk_scale


@gluon.jit
def _with_sinks(softmax, sinks, line, block, kv_head, G: gl.constexpr):
    """A softmax with the sinks of its rows; softmax.add_sink has the formula."""
    _, maximum, total = softmax
    head = kv_head * G.GQA_RATIO + line % G.GQA_RATIO
    sink = gl.load(sinks + head, mask=has_token(line, block, G), other=float("-inf")) * LOG2_E
    new_maximum = gl.where(total > 0.0, gl.maximum(maximum, sink), maximum)
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = gl.exp2(maximum - base)
    total = total * decay + gl.where(total > 0.0, gl.exp2(sink - base), 0.0)
    return new_maximum, total, decay


@gluon.jit
def _places_of_part(GROUP: gl.constexpr, part: gl.constexpr, acc, block, G: gl.constexpr):
    """The places of a part of the accumulators: lines [64] and columns [1, width] of a row; which have a token."""
    OF_V: gl.constexpr = G.V
    WIDTH: gl.constexpr = acc.shape[1]
    line = lines_of_group(GROUP, gl.SliceLayout(1, acc.type.layout))
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc.type.layout)), 0) + part * G.V.TILE
    return (line, column), gl.expand_dims(has_token(line, block, G), 1) & is_column(column, OF_V)


@gluon.jit
def store_results(GROUP: gl.constexpr, softmax, to, tiles, block, kv_head, G: gl.constexpr):
    """Stores the results of a whole row, by way of the tiles of its queries: accumulators lie in pairs of columns, of
    which a warp would write eight rows at a time.
    """
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    COLUMNS: gl.constexpr = G.V.TILE
    DTYPE: gl.constexpr = to.out.at.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    layout: gl.constexpr = _in_memory(OF_V)
    # All warps' products with the queries are done: attend_steps has a barrier after those of each step.
    tiles = tiles._reinterpret(DTYPE, [PARTS, GROUP_ROWS, COLUMNS], tile_layout)
    acc, maximum, total = softmax
    S_ROW: gl.constexpr = maximum.type.layout
    line = lines_of_group(GROUP, S_ROW)
    decay = gl.full_like(total, 1.0)
    if to.sinks is not None:
        maximum, total, decay = _with_sinks(softmax, to.sinks, line, block, kv_head, G)
    # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
    total = gl.where(total == 0.0, 1.0, total)
    if to.lse.at is not None:
        rows = _place(to.lse, line, block, kv_head, G)
        gl.store(rows, (maximum + gl.log2(total)) * LN_2, mask=has_token(line, block, G))
    for i in gl.static_range(PARTS):
        if G.SEGMENT_STEPS > 0:
            # Rounded as in decode.
            values = acc[i] * of_rows(decay, acc[i]) / of_rows(total, acc[i])
        else:
            values = acc[i] * of_rows(decay / total, acc[i])
        columns_of(tiles.index(i), i, OF_V).store(values.to(DTYPE))
    gl.thread_barrier()
    line = lines_of_group(GROUP, gl.SliceLayout(1, layout))
    rows = gl.expand_dims(_place(to.out, line, block, kv_head, G), 1)
    is_row = gl.expand_dims(has_token(line, block, G), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    for i in gl.static_range(PARTS):
        is_there = is_row & is_column(i * COLUMNS + column, OF_V)
        gl.store(rows + (i * COLUMNS + column), tiles.index(i).load(layout), mask=is_there)


@gluon.jit
def store_part(GROUP: gl.constexpr, softmax, to, block, part, G: gl.constexpr):
    """Stores the program's part of a row that it shares. part: its place in the workspace"""
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    acc, maximum, total = softmax
    S_ROW: gl.constexpr = maximum.type.layout
    first = part * (G.GROUPS * GROUP_ROWS)
    sums = to.sums + (first + lines_of_group(GROUP, S_ROW)) * 2
    gl.store(sums, maximum)
    gl.store(sums + 1, total)
    for i in gl.static_range(PARTS):
        places, is_there = _places_of_part(GROUP, i, acc[i], block, G)
        rows = to.partials + gl.expand_dims((first + places[0]) * G.V.HEAD_DIM, 1)
        gl.store(rows + places[1], acc[i], mask=is_there)

"""Paged extend for Hopper, in Gluon: extend.py's results by warp groups of which each has one task.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program is one warp that loads pages by TMA, and consumers: groups of four warps, 64 rows of a query block each. Tiles
of K and of V pass through two rings in shared memory, which run on from row to row, so that the next row's keys arrive
while results are written. Each warp group walks the program's rows by itself; they meet at the rings' barriers alone.

Rows, and how the longest are shared out, are those of extend_schedule.py; extend_merge.py adds up what several programs
hold of a row. Programs with shares come first in the grid, unless nothing is shared: then the rows do.

What no row sees may be NaN. A box of keys of which no row sees one is loaded from beyond the pages: TMA fills it with
zeros. In a box that lies across the edge V is zeroed in shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Rows, Softmax, Span
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_merge import launch_extend_merge
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_BLOCK,
    SHARE_CUT,
    SHARE_DONE,
    SHARE_ROW,
    SHARE_WORDS,
    SHARE_WORK,
)
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E
from rocm_attn.kernels.hopper.even_groups import even_warp_specialize
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles

# Columns of a box of K or V: 128 bytes, the widest swizzle.
BOX_COLUMNS = gl.constexpr(64)
# Rows of a consumer: a warp group's tile of the matrix units.
GROUP_ROWS = gl.constexpr(64)


class HopperGeometry(NamedTuple):
    """What the kernel is compiled for.

    KV_HEADS:  KV heads
    GQA_RATIO: query heads that share a KV head
    TOKENS:    new tokens of a full query block
    DIM:       elements of a q, K, V and output row
    COLUMNS:   columns of the equal tiles that a row is cut into, a multiple of BOX_COLUMNS
    PAGE_SIZE: tokens of a page
    BOX:       keys of a box, of one page each
    KEY_BLOCK: keys of a step, whole boxes
    STAGES:    steps that a ring holds
    GROUPS:    consumers
    ROW_KEYS:  of cuts.Sharing
    CAUSAL:    whether a row sees no key after its own
    WINDOWED:  whether there is a window
    OVERLAPS:  whether products with V run under the next step's products with K, which takes registers
    """

    KV_HEADS: int
    GQA_RATIO: int
    TOKENS: int
    DIM: int
    COLUMNS: int
    PAGE_SIZE: int
    BOX: int
    KEY_BLOCK: int
    STAGES: int
    GROUPS: int
    ROW_KEYS: int
    CAUSAL: bool
    WINDOWED: bool
    OVERLAPS: bool

    @property
    def query_rows(self) -> int:
        """Rows of a query block."""
        return self.GROUPS * int(GROUP_ROWS.value)


class Work(NamedTuple):
    """What a program does: `keys` of cost, from the offset `done` of a row on. row: KV head of the query block"""

    block: Any
    row: Any
    done: Any
    keys: Any


class Seen(NamedTuple):
    """Keys of a sequence that some row of a query block sees, [first, end), and of each row's window."""

    first: Any
    end: Any
    window_left: Any


class Steps(NamedTuple):
    """What a program takes of a row: cost, steps [first, end), and whether the row ends with them."""

    take: Any
    first: Any
    end: Any
    ends: Any


class Schedule(NamedTuple):
    """The words of extend_schedule.py, and what else says which keys rows see: kv_len of sequences, window_left."""

    words: Any
    kv_len: Any
    window_left: Any


class Ring(NamedTuple):
    """K or V in shared memory: the same as boxes and as tiles; barriers that a step is loaded, and that it was read."""

    boxes: Any
    tiles: Any
    full: Any
    free: Any


class Rings(NamedTuple):
    """Those of K and of V."""

    k: Any
    v: Any


class Cache(NamedTuple):
    """Where pages are: descriptors of K and V with their number of slots, the table, and the sequences' rows in it."""

    k: Any
    v: Any
    num_slots: Any
    table: Any
    table_row: Any
    width: Any
    row_of_seq: Any


class Source(NamedTuple):
    """K or V of one KV head of a sequence: descriptor and first column, slots in all; pages, and how many to read."""

    desc: Any
    column: Any
    num_slots: Any
    pages: Any
    width: Any


class Results(NamedTuple):
    """Rows of q, out and lse (bundles.Rows); sinks; accumulators and sums of parts of rows."""

    q: Any
    out: Any
    lse: Any
    sinks: Any
    partials: Any
    sums: Any


class Query(NamedTuple):
    """A consumer's rows: tiles of q in shared memory, kv_index [64] of each row, factor of the scores in base 2."""

    tiles: Any
    kv_index: Any
    qk_scale: Any


@gluon.jit
def _seen_by_block(x, words, G: gl.constexpr):
    """Sequence of a query block, or -1, and the keys that it sees. The padded tail belongs to no sequence."""
    seq = gl.load(words + BLOCK_SEQ)
    first_kv_index = gl.load(words + BLOCK_KV_INDEX)
    end_key = first_kv_index + gl.load(words + BLOCK_TOKENS) if G.CAUSAL else gl.load(x.kv_len + gl.maximum(seq, 0))
    end_key = gl.where(seq >= 0, end_key, 0)
    first_key = gl.to_tensor(0)
    if G.WINDOWED:
        first_key = gl.maximum(first_kv_index - x.window_left, 0)
    return seq, Seen(first_key, end_key, x.window_left)


@gluon.jit
def _steps_of(words, seen, todo, G: gl.constexpr):
    """What is taken of the row at which a program is. Steps belong to the share in which they begin."""
    num_keys = gl.load(words + BLOCK_KEYS)
    cost = num_keys + G.ROW_KEYS
    take = gl.minimum(todo.keys, cost - todo.done)
    first_cost_key = seen.end - num_keys
    first_key = first_cost_key + gl.maximum(todo.done - G.ROW_KEYS, 0)
    end_key = first_cost_key + gl.maximum(todo.done + take - G.ROW_KEYS, 0)
    ends = todo.done + take == cost
    end_step = gl.where(ends, gl.cdiv(seen.end, G.KEY_BLOCK), end_key // G.KEY_BLOCK)
    return Steps(take, gl.maximum(first_key, seen.first) // G.KEY_BLOCK, end_step, ends)


@gluon.jit
def _next_row(todo, take, G: gl.constexpr):
    """What is left to do after a row."""
    is_last = todo.row == G.KV_HEADS - 1
    block = gl.where(is_last, todo.block + 1, todo.block)
    return Work(block, gl.where(is_last, 0, todo.row + 1), gl.to_tensor(0), todo.keys - take)


@gluon.jit
def _load_step(source, ring, n, step, seen, G: gl.constexpr):
    """The keys of a step to the n-th stage, box by box, as soon as it is free."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    PARTS: gl.constexpr = G.DIM // BOX_COLUMNS
    stage = n % G.STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.free.index(stage), ((n // G.STAGES) & 1) ^ 1)
    mbarrier.expect(full, G.KEY_BLOCK * G.DIM * 2)
    for i in gl.static_range(BOXES):
        key = step * G.KEY_BLOCK + i * G.BOX
        page = gl.load(source.pages + gl.minimum(key // G.PAGE_SIZE, source.width - 1))
        is_seen = (key < seen.end) & (key + G.BOX > seen.first)
        slot = gl.where(is_seen, page * G.PAGE_SIZE + key % G.PAGE_SIZE, source.num_slots)
        for c in gl.static_range(PARTS):
            box = ring.boxes.index((stage * PARTS + c) * BOXES + i)
            tma.async_copy_global_to_shared(source.desc, [slot, source.column + c * BOX_COLUMNS], full, box)


@gluon.jit
def _produce(x, cache, rings, todo, G: gl.constexpr):
    """Load the keys of all the program's rows."""
    n = 0
    while todo.keys > 0:
        words = x.words + todo.block * BLOCK_WORDS
        seq, seen = _seen_by_block(x, words, G)
        steps = _steps_of(words, seen, todo, G)
        pages = cache.table + gl.load(cache.row_of_seq + gl.maximum(seq, 0)).to(gl.int64) * cache.table_row
        k_source = Source(cache.k, todo.row * G.DIM, cache.num_slots, pages, cache.width)
        v_source = Source(cache.v, todo.row * G.DIM, cache.num_slots, pages, cache.width)
        for step in range(steps.first, steps.end):
            _load_step(k_source, rings.k, n, step, seen, G)
            _load_step(v_source, rings.v, n, step, seen, G)
            n += 1
        todo = _next_row(todo, steps.take, G)


@gluon.jit
def _zero_in_box(ring, stage, at, first, end, G: gl.constexpr):
    """Zero the keys of a box, counted from its step, that are not in [first, end)."""
    BOXES: gl.constexpr = G.KEY_BLOCK // G.BOX
    PARTS: gl.constexpr = G.DIM // BOX_COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.expand_dims(at * G.BOX + gl.arange(0, G.BOX, layout=gl.SliceLayout(1, layout)), 1)
    for c in gl.static_range(PARTS):
        box = ring.boxes.index((stage * PARTS + c) * BOXES + at)
        values = box.load(layout)
        box.store(gl.where((key >= first) & (key < end), values, gl.zeros_like(values)))


@gluon.jit
def _zero_unseen(ring, stage, step, seen, G: gl.constexpr):
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


@gluon.jit
def _visible(own, key, seen, G: gl.constexpr):
    """Which keys [1, KEY_BLOCK] rows see. own: kv_index [64, 1] of the rows"""
    if G.WINDOWED:
        # 0 <= own - key <= window_left by one comparison.
        visible = (own - key).to(gl.uint32, bitcast=True) <= seen.window_left.to(gl.uint32, bitcast=True)
    elif G.CAUSAL:
        visible = key <= own
    else:
        visible = key < seen.end
    return visible


@gluon.jit
def _waited(products):
    """The accumulators of products that are in flight."""
    return (warpgroup_mma_wait(0, deps=products),) if len(products) == 1 else warpgroup_mma_wait(0, deps=products)


@gluon.jit
def _attend_steps(softmax, n, query, rings, span, seen, G: gl.constexpr, MASKED: gl.constexpr):
    """Steps of a span added to a softmax; n: steps that have passed through the rings before.

    If G.OVERLAPS, the products with V of one step run under those with K of the next one, up to the wait for both: a
    wait for one of two products in flight makes ptxas wait for each.
    """
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.KEY_BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.COLUMNS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    lane = gl.arange(0, KEY_BLOCK, layout=gl.SliceLayout(0, s_layout))
    zero = gl.zeros([GROUP_ROWS, KEY_BLOCK], gl.float32, layout=s_layout)
    k, v = rings
    acc, maximum, total = softmax
    if G.OVERLAPS:
        products = ()
        for i in gl.static_range(PARTS):
            products += (warpgroup_mma_init(acc[i]),)  # type: ignore[assignment]
    for step in range(span.first, span.end):
        stage = n % G.STAGES
        phase = (n // G.STAGES) & 1
        mbarrier.wait(k.full.index(stage), phase)
        pending = (zero,)
        for i in gl.static_range(PARTS):
            k_tile = k.tiles.index(stage * PARTS + i).permute((1, 0))
            pending = (warpgroup_mma(query.tiles.index(i), k_tile, pending[0], use_acc=i > 0, is_async=True),)
        if G.OVERLAPS:
            waited = warpgroup_mma_wait(0, deps=pending + products)
            scores, acc = waited[0], waited[1:]
        else:
            scores = warpgroup_mma_wait(0, deps=pending)
        gl.thread_barrier()
        mbarrier.arrive(k.free.index(stage), count=1)
        if G.OVERLAPS:
            mbarrier.arrive(v.free.index((n + G.STAGES - 1) % G.STAGES), count=1, pred=step > span.first)
        if MASKED:
            key = gl.expand_dims(step * KEY_BLOCK + lane, 0)
            visible = _visible(gl.expand_dims(query.kv_index, 1), key, seen, G)
            scores = gl.where(visible, scores, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(scores, 1) * query.qk_scale)
        # A row of a masked step may have seen no key yet; the subtractions below must not be inf - inf.
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        decay = gl.exp2(maximum - base)
        weights = gl.exp2(scores * query.qk_scale - gl.expand_dims(base, 1))
        total = total * decay + gl.sum(weights, 1)
        maximum = new_maximum
        p = gl.convert_layout(weights.to(query.tiles.dtype), p_layout)
        decay = gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, o_layout)), 1)
        mbarrier.wait(v.full.index(stage), phase)
        if MASKED:
            _zero_unseen(v, stage, step, seen, G)
        products = ()
        for i in gl.static_range(PARTS):
            v_tile = v.tiles.index(stage * PARTS + i)
            products += (warpgroup_mma(p, v_tile, acc[i] * decay, is_async=True),)  # type: ignore[assignment]
        if not G.OVERLAPS:
            acc = _waited(products)
            gl.thread_barrier()
            mbarrier.arrive(v.free.index(stage), count=1)
        n += 1
    if G.OVERLAPS:
        acc = _waited(products)
        gl.thread_barrier()
        mbarrier.arrive(v.free.index((n + G.STAGES - 1) % G.STAGES), count=1, pred=span.end > span.first)
    return Softmax(acc, maximum, total), n


@gluon.jit
def _lines(GROUP: gl.constexpr, layout: gl.constexpr):
    """The group's rows, counted from the query block's first one."""
    return GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=layout)


@gluon.jit
def _is_row(line, words, G: gl.constexpr):
    """Whether rows of a query block have a token."""
    return line < gl.minimum(gl.load(words + BLOCK_TOKENS), G.TOKENS) * G.GQA_RATIO


@gluon.jit
def _place(rows, line, words, kv_head, G: gl.constexpr):
    """Where rows of a query block lie in q, out or lse."""
    token = (gl.load(words + BLOCK_FIRST_TOKEN) + line // G.GQA_RATIO).to(gl.int64)
    head = (kv_head * G.GQA_RATIO + line % G.GQA_RATIO).to(gl.int64)
    return rows.at + token * rows.token + head * rows.head


@gluon.jit
def _load_queries(GROUP: gl.constexpr, q, tiles, words, kv_head, G: gl.constexpr):
    """The group's rows of q to shared memory; 0 of rows without a token."""
    COLUMNS: gl.constexpr = G.COLUMNS
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, layout)
    line = _lines(GROUP, ROW)
    rows = gl.expand_dims(_place(q, line, words, kv_head, G), 1)
    is_row = gl.expand_dims(_is_row(line, words, G), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    # All warps have read the row before.
    gl.thread_barrier()
    for i in gl.static_range(PARTS):
        tiles.index(i).store(gl.load(rows + (i * COLUMNS + column), mask=is_row, other=0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _with_sinks(softmax, sinks, line, words, kv_head, G: gl.constexpr):
    """A softmax with the sinks of its rows; softmax.add_sink has the formula."""
    _, maximum, total = softmax
    head = kv_head * G.GQA_RATIO + line % G.GQA_RATIO
    sink = gl.load(sinks + head, mask=_is_row(line, words, G), other=float("-inf")) * LOG2_E
    new_maximum = gl.where(total > 0.0, gl.maximum(maximum, sink), maximum)
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = gl.exp2(maximum - base)
    total = total * decay + gl.where(total > 0.0, gl.exp2(sink - base), 0.0)
    return new_maximum, total, decay


@gluon.jit
def _store(GROUP: gl.constexpr, softmax, to, words, kv_head, G: gl.constexpr):
    """The results of a whole row."""
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    acc, maximum, total = softmax
    o_layout: gl.constexpr = acc[0].type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, o_layout)
    S_ROW: gl.constexpr = maximum.type.layout
    line = _lines(GROUP, S_ROW)
    decay = gl.full_like(total, 1.0)
    if to.sinks is not None:
        maximum, total, decay = _with_sinks(softmax, to.sinks, line, words, kv_head, G)
    # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
    total = gl.where(total == 0.0, 1.0, total)
    if to.lse.at is not None:
        rows = _place(to.lse, line, words, kv_head, G)
        gl.store(rows, (maximum + gl.log2(total)) * LN_2, mask=_is_row(line, words, G))
    share = gl.expand_dims(gl.convert_layout(decay / total, gl.SliceLayout(1, o_layout)), 1)
    line = _lines(GROUP, O_ROW)
    rows = gl.expand_dims(_place(to.out, line, words, kv_head, G), 1)
    is_row = gl.expand_dims(_is_row(line, words, G), 1)
    COLUMNS: gl.constexpr = G.COLUMNS
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, o_layout)), 0)
    for i in gl.static_range(PARTS):
        gl.store(rows + (i * COLUMNS + column), (acc[i] * share).to(to.out.at.dtype.element_ty), mask=is_row)


@gluon.jit
def _store_part(GROUP: gl.constexpr, softmax, to, words, done, G: gl.constexpr):
    """Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on."""
    COLUMNS: gl.constexpr = G.COLUMNS
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    acc, maximum, total = softmax
    o_layout: gl.constexpr = acc[0].type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, o_layout)
    S_ROW: gl.constexpr = maximum.type.layout
    part = 2 * gl.program_id(0) + (done == 0).to(gl.int32)
    first = part * (G.GROUPS * GROUP_ROWS)
    sums = to.sums + (first + _lines(GROUP, S_ROW)) * 2
    gl.store(sums, maximum)
    gl.store(sums + 1, total)
    line = _lines(GROUP, O_ROW)
    rows = to.partials + gl.expand_dims((first + line) * G.DIM, 1)
    is_row = gl.expand_dims(_is_row(line, words, G), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, o_layout)), 0)
    for i in gl.static_range(PARTS):
        gl.store(rows + (i * COLUMNS + column), acc[i], mask=is_row)


@gluon.jit
def _nothing_seen(G: gl.constexpr):
    """The softmax of no key."""
    COLUMNS: gl.constexpr = G.COLUMNS
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.KEY_BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.COLUMNS, 16])
    acc = ()
    for _ in gl.static_range(PARTS):
        acc += (gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, layout=o_layout),)  # type: ignore[assignment]
    maximum = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    return Softmax(acc, maximum, gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, s_layout)))


@gluon.jit
def _consume(GROUP: gl.constexpr, x, tiles, rings, to, qk_scale, todo, G: gl.constexpr):
    """64 rows of each of the program's query blocks."""
    n = 0
    while todo.keys > 0:
        words = x.words + todo.block * BLOCK_WORDS
        _, seen = _seen_by_block(x, words, G)
        steps = _steps_of(words, seen, todo, G)
        _load_queries(GROUP, to.q, tiles, words, todo.row, G)
        softmax = _nothing_seen(G)
        first_kv_index = gl.load(words + BLOCK_KV_INDEX)
        S_ROW: gl.constexpr = softmax.maximum.type.layout
        line = _lines(GROUP, S_ROW)
        query = Query(tiles, first_kv_index + line // G.GQA_RATIO, qk_scale)
        edge_step = steps.first
        if not G.WINDOWED:
            # Steps before it are seen whole by every row. With a window a loop of its own for them does not pay.
            edge_step = (first_kv_index + 1 if G.CAUSAL else seen.end) // G.KEY_BLOCK
            open_steps = Span(steps.first, gl.minimum(edge_step, steps.end))
            softmax, n = _attend_steps(softmax, n, query, rings, open_steps, seen, G, False)
        edge = Span(gl.maximum(edge_step, steps.first), steps.end)
        softmax, n = _attend_steps(softmax, n, query, rings, edge, seen, G, True)
        if steps.ends & (todo.done == 0):
            _store(GROUP, softmax, to, words, todo.row, G)
        else:
            _store_part(GROUP, softmax, to, words, todo.done, G)
        todo = _next_row(todo, steps.take, G)


@gluon.jit
def _work_of_program(schedule, max_blocks, num_programs, G: gl.constexpr):
    """A share of the longest rows, or one row of the others; no keys where there is nothing to do."""
    program = gl.program_id(0)
    shares = schedule + max_blocks * BLOCK_WORDS
    cut = gl.load(shares + SHARE_CUT)
    if (cut > 0) & (program < num_programs):
        share = shares + program * SHARE_WORDS
        block = gl.load(share + SHARE_BLOCK)
        row = gl.load(share + SHARE_ROW)
        done = gl.load(share + SHARE_DONE)
        keys = gl.load(share + SHARE_WORK)
    else:
        index = gl.where(cut > 0, program - num_programs, program)
        block = index // G.KV_HEADS
        row = index % G.KV_HEADS
        done = 0
        keys = 0
        if (block >= cut) & (block < max_blocks):
            words = schedule + block * BLOCK_WORDS
            if gl.load(words + BLOCK_TOKENS) > 0:
                keys = gl.load(words + BLOCK_KEYS) + G.ROW_KEYS
    return Work(block, row, done, keys)


@gluon.jit
def _new_ring(DTYPE: gl.constexpr, G: gl.constexpr):
    """A ring with nothing in it. Boxes, one after the other, are in memory what a swizzled tile is."""
    STAGES: gl.constexpr = G.STAGES
    BOX: gl.constexpr = G.BOX
    BOXES: gl.constexpr = G.STAGES * (G.DIM // BOX_COLUMNS) * (G.KEY_BLOCK // G.BOX)
    TILES: gl.constexpr = G.STAGES * (G.DIM // G.COLUMNS)
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    COLUMNS: gl.constexpr = G.COLUMNS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(DTYPE, [BOXES, BOX, BOX_COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=G.GROUPS)
    return Ring(boxes, boxes._reinterpret(DTYPE, [TILES, KEY_BLOCK, COLUMNS], layout), full, free)


@gluon.jit(do_not_specialize=["num_programs", "max_blocks", "width", "num_slots", "window_left"])
def _hopper_extend_kernel(
    q,
    k_desc,
    v_desc,
    table,
    row_of_seq,
    kv_len,
    schedule,
    partials,
    out,
    lse,
    sinks,
    qk_scale,
    window_left,
    num_programs,
    max_blocks,
    width,
    num_slots,
    q_token,
    q_head,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
):
    todo = _work_of_program(schedule, max_blocks, num_programs, G)
    if todo.keys > 0:
        DTYPE: gl.constexpr = q.dtype.element_ty
        PARTS: gl.constexpr = G.DIM // G.COLUMNS
        COLUMNS: gl.constexpr = G.COLUMNS
        rings = Rings(_new_ring(DTYPE, G), _new_ring(DTYPE, G))
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        first_q = gl.allocate_shared_memory(DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        second_q = gl.allocate_shared_memory(DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        fence_async_shared()
        gl.thread_barrier()
        x = Schedule(schedule, kv_len, window_left)
        cache = Cache(k_desc, v_desc, num_slots, table, table_row, width, row_of_seq)
        sums = partials + num_programs * (2 * G.GROUPS * GROUP_ROWS * G.DIM)
        q_rows, out_rows = Rows(q, q_token, q_head), Rows(out, out_token, out_head)
        to = Results(q_rows, out_rows, Rows(lse, lse_token, lse_head), sinks, partials, sums)
        even_warp_specialize(
            [
                (_consume, (0, x, first_q, rings, to, qk_scale, todo, G)),
                (_consume, (1, x, second_q, rings, to, qk_scale, todo, G)),
                (_produce, (x, cache, rings, todo, G)),
            ],
            [4, 1],
        )


def launch_hopper_extend(args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: HopperTiles) -> None:
    """As launch_paged_extend, without masks, caps and slopes, over contiguous pages of `PAGE_SIZES` tokens.

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("extend on Hopper")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles)
    programs, max_blocks = cut.sharing.programs, cut.max_blocks(queries.num_tokens, queries.num_seqs)
    k, v = _described(pages.k, geometry), _described(pages.v, geometry)
    launch(
        _hopper_extend_kernel,
        (programs + max_blocks * geometry.KV_HEADS,),
        args.q,
        k,
        v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        scores.base_2_scale,
        scores.window_left,
        programs,
        max_blocks,
        table.shape[1],
        k.shape[0],
        args.q.stride(0),
        args.q.stride(1),
        table.stride(0),
        *args.written_strides,
        G=geometry,
        num_warps=4,
    )
    launch_extend_merge(args, cut, _merged_geometry(geometry), tiles.extend.merge_stages)


def _geometry(args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: HopperTiles) -> HopperGeometry:
    """What the launch is compiled for; the schedule is checked."""
    num_kv_heads, gqa_ratio = args.heads
    queries, sharing, page_size = args.queries, cut.sharing, args.pages.format.page_size
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    of_layer = (num_kv_heads, scores.causal, scores.window_left)
    assert (sharing.rows, sharing.causal, sharing.window_left) == of_layer, "the schedule was cut for another launch"
    assert cut.query_tokens == tiles.extend.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    assert args.workspace.numel() >= cut.partials_words(
        query_rows=tiles.extend.query_rows, v_head_dim=args.out.shape[2]
    )
    return HopperGeometry(
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        TOKENS=cut.query_tokens,
        DIM=args.q.shape[2],
        COLUMNS=tiles.extend.columns(args.q.shape[2]),
        PAGE_SIZE=page_size,
        BOX=min(page_size, tiles.extend.key_block),
        KEY_BLOCK=tiles.extend.key_block,
        STAGES=tiles.extend.num_stages,
        GROUPS=tiles.extend.query_rows // GROUP_ROWS.value,
        ROW_KEYS=sharing.row_keys,
        CAUSAL=scores.causal,
        WINDOWED=scores.windowed,
        OVERLAPS=tiles.overlaps,
    )


def _described(pages: torch.Tensor, geometry: HopperGeometry) -> TensorDescriptor:
    """Contiguous pages as rows of slots, of which TMA loads boxes."""
    num_pages, page_size, num_heads, dim = pages.shape
    assert pages.is_contiguous()
    return TensorDescriptor(
        pages,
        [num_pages * page_size, num_heads * dim],
        [num_heads * dim, 1],
        [geometry.BOX, BOX_COLUMNS.value],
        gl.NVMMASharedLayout(128, 16, rank=2),
    )


def _merged_geometry(geometry: HopperGeometry) -> BlockGeometry:
    """The geometry of query blocks as the merge reads it."""
    return BlockGeometry(
        keys=None,
        KV_HEADS=geometry.KV_HEADS,
        GQA_RATIO=geometry.GQA_RATIO,
        BLOCK_HEADS=geometry.GQA_RATIO,
        HEAD_BLOCKS=1,
        QUERY_ROWS=geometry.query_rows,
        ROW_KEYS=geometry.ROW_KEYS,
        SHARES=True,
        WHOLE_ROWS=True,
        SEGMENT_LEN=0,
        STAGES=geometry.STAGES,
        EDGE_STAGES=geometry.STAGES,
    )

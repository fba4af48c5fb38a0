"""The warp groups of attention over latent pages for Hopper: one task each (latent.py, selected.py).

One gathers blocks of latents into shared memory. One multiplies q with them, and turns the scores into weights. Two add
up values, one half of V's columns each, since no group has registers for all accumulators. So both kinds of products
run at the same time, together with loads and softmax. The groups pass each other values in shared memory: a block,
which is K for one of them and V for two; its weights; and the factors that scale accumulators before they are added.

Each group walks the program's pieces of rows by itself (latent_rows.py, selected_rows.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.softmax import LN_2, raised_seldom
from rocm_attn.kernels.hopper.latent_rows import (
    after_row,
    keys_of_range,
    lines,
    part_of_row,
    place,
    place_of_part,
)
from rocm_attn.kernels.hopper.rows import GROUP_ROWS
from rocm_attn.kernels.hopper.scaling import times_if_any
from rocm_attn.kernels.hopper.selected_rows import after_part, keys_of_listing, part_of_selection
from rocm_attn.kernels.hopper.warp_groups import leave

# Elements of a latent: V's, those of one group, and K's after V's.
V_DIM = gl.constexpr(512)
HALF = gl.constexpr(256)
REST = gl.constexpr(64)
# Lanes of eight elements: a warp has 128 bytes of four rows.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, _COPIED.value))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Latents(NamedTuple):
    """Latent pages, and the parts of records (RecordParts) or None; the table, and the sequences' rows in it."""

    at: Any
    record: Any
    table: Any
    table_row: Any
    width: Any
    row_of_seq: Any


class LatentOutputs(NamedTuple):
    """Rows of q, out and lse (bundles.HeadRows); accumulators and sums of parts of rows; the factor of q . k."""

    q: Any
    out: Any
    lse: Any
    partials: Any
    sums: Any
    qk_scale: Any


class Shared(NamedTuple):
    """Shared memory: q and latents, each as halves of V's columns and the columns after them; latents by stages. For
    one block: weights, the scales of accumulators, and sums of weights up to it. hidden: summands of scores, by stages,
    where keys are listed

    full, free: barriers of a stage's halves: loaded, and their values added up; weighed: barrier of stored weights
    """

    q: Any
    q_rest: Any
    halves: Any
    rest: Any
    weights: Any
    decays: Any
    totals: Any
    hidden: Any
    full: Any
    free: Any
    weighed: Any


@constexpr_function
def _layout_of_scores(G):
    """The layout of scores [64, KEY_BLOCK]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.KEY_BLOCK, 16])


@gluon.jit
def _wait_until_full(shared, n, half: gl.constexpr, G: gl.constexpr):
    """Waits until a half of the n-th block is loaded, and matrix units may read it."""
    mbarrier.wait(shared.full.index(n % G.STAGES * 2 + half), (n // G.STAGES) & 1)
    fence_async_shared()


@gluon.jit
def wait_until_free(shared, n, half: gl.constexpr, G: gl.constexpr):
    """Waits until the previous content of the place of a half of the n-th block is read."""
    mbarrier.wait(shared.free.index(n % G.STAGES * 2 + half), ((n // G.STAGES) & 1) ^ 1)


@gluon.jit
def piece_of(step, todo, G: gl.constexpr):
    """The program's part of the row, or of the selection, that it has reached."""
    return part_of_selection(step, todo, G) if G.SELECTED else part_of_row(step, todo, G)


@gluon.jit
def after_piece(step, todo, piece, G: gl.constexpr):
    """The work that is left after a piece."""
    return after_part(step, todo, G) if G.SELECTED else after_row(step, todo, piece, G)


@gluon.jit
def keys_of_block(piece, block, layout: gl.constexpr, G: gl.constexpr):
    """The places of a block's keys in their sequence [KEY_BLOCK]; -1 for those that no token of the piece sees."""
    return keys_of_listing(piece, block, layout, G) if G.SELECTED else keys_of_range(piece, block, layout, G)


@gluon.jit
def slots_of_keys(latents, line, key, G: gl.constexpr):
    """Slots of keys; -1 for -1. line: the sequence's in the table"""
    page = gl.load(line + gl.minimum(key // G.PAGE_SIZE, latents.width - 1), mask=key >= 0, other=0)
    return gl.where(key >= 0, page * G.PAGE_SIZE + key % G.PAGE_SIZE, -1)


@gluon.jit
def put_hidden(slot, shared, stage):
    """Writes what is added to the scores of a block's keys: -inf for those that are not there."""
    shared.hidden.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))


@gluon.jit
def columns_of(FIRST: gl.constexpr, MANY: gl.constexpr, layout: gl.constexpr):
    """Columns [FIRST, FIRST + MANY) of rows in a layout, [1, MANY]."""
    return FIRST + gl.expand_dims(gl.arange(0, MANY, layout=gl.SliceLayout(0, layout)), 0)


@gluon.jit
def line_of_table(latents, todo):
    """The sequence's line of the table."""
    return latents.table + gl.load(latents.row_of_seq + todo.seq).to(gl.int64) * latents.table_row


@gluon.jit
def gather(step, latents, shared, todo, G: gl.constexpr):
    """Loads all latents that the program takes."""
    n = 0
    while todo.work > 0:
        piece = piece_of(step, todo, G)
        if piece.end > piece.first:
            line = line_of_table(latents, todo)
            slot = slots_of_keys(latents, line, keys_of_block(piece, piece.first, _COPIED_ROWS, G), G)
            key = keys_of_block(piece, piece.first + 1, _COPIED_ROWS, G)
            for block in range(piece.first, piece.end):
                stage = n % G.STAGES
                rows = latents.at + gl.expand_dims(slot.to(gl.int64) * (V_DIM + REST), 1)
                is_there = gl.expand_dims(slot >= 0, 1)
                wait_until_free(shared, n, 0, G)
                if G.SELECTED:
                    put_hidden(slot, shared, stage)
                    gl.thread_barrier()
                    mbarrier.arrive(shared.full.index(stage * 2), count=1)
                # Loads of page numbers, and of listed keys, are under way during a block.
                slot = slots_of_keys(latents, line, key, G)
                key = keys_of_block(piece, block + 2, _COPIED_ROWS, G)
                for half in gl.static_range(2):
                    if half == 0:
                        rest = rows + columns_of(V_DIM, REST, _COPIED)
                        async_copy.async_copy_global_to_shared(shared.rest.index(stage), rest, mask=is_there)
                    else:
                        wait_until_free(shared, n, half, G)
                    columns = rows + columns_of(half * HALF, HALF, _COPIED)
                    of_half = shared.halves.index(stage * 2 + half)
                    async_copy.async_copy_global_to_shared(of_half, columns, mask=is_there)
                    async_copy.mbarrier_arrive(shared.full.index(stage * 2 + half), increment_count=False)
                n += 1
        todo = after_piece(step, todo, piece, G)
    # No thread ends before its copies do.
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave()


@gluon.jit
def _put_queries(q, piece, shared, G: gl.constexpr):
    """Writes rows of q to shared memory; 0 for rows that do not exist."""
    # All warps must have read the rows before.
    gl.thread_barrier()
    token, head, is_row = lines(piece, gl.SliceLayout(1, _COPIED), G)
    rows = gl.expand_dims(place(q, piece, token, head), 1)
    is_there = gl.expand_dims(is_row, 1)
    for half in gl.static_range(2):
        shared.q.index(half).store(gl.load(rows + columns_of(half * HALF, HALF, _COPIED), mask=is_there, other=0.0))
    shared.q_rest.store(gl.load(rows + columns_of(V_DIM, REST, _COPIED), mask=is_there, other=0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _begin_scores(shared, n, G: gl.constexpr):
    """Begins the products of q and the n-th block [64, KEY_BLOCK]. First columns are multiplied while others arrive."""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    layout: gl.constexpr = _layout_of_scores(G)
    stage = n % G.STAGES
    scores = gl.zeros([GROUP_ROWS, KEY_BLOCK], gl.float32, layout=layout)
    _wait_until_full(shared, n, 0, G)
    rest = shared.rest.index(stage).permute((1, 0))
    scores = warpgroup_mma(shared.q_rest, rest, scores, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        if half > 0:
            _wait_until_full(shared, n, half, G)
        columns = shared.halves.index(stage * 2 + half).permute((1, 0))
        scores = warpgroup_mma(shared.q.index(half), columns, scores, is_async=True)
    return scores


@gluon.jit
def _is_visible(piece, key, layout: gl.constexpr, G: gl.constexpr):
    """A mask of the keys [1, KEY_BLOCK] that rows see."""
    if G.CAUSAL:
        token, _, _ = lines(piece, layout, G)
        visible = (key >= 0) & (key < gl.expand_dims(piece.first_end + token, 1))
    else:
        visible = key >= 0
    return visible


@gluon.jit
def _weigh_block(scores, maximum, total, piece, block, n, shared, to, G: gl.constexpr):
    """Writes weights of the n-th block. Returns the rows' maxima and sums up to it."""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    layout: gl.constexpr = _layout_of_scores(G)
    key_layout: gl.constexpr = gl.SliceLayout(0, layout)
    if G.SELECTED:
        scores += gl.expand_dims(shared.hidden.index(n % G.STAGES).load(key_layout), 0)
    elif (block + 1) * KEY_BLOCK > piece.first_end:
        key = gl.expand_dims(keys_of_block(piece, block, key_layout, G), 0)
        scores = gl.where(_is_visible(piece, key, gl.SliceLayout(1, layout), G), scores, float("-inf"))
    new_maximum = raised_seldom(maximum, gl.maximum(maximum, gl.max(scores, 1) * to.qk_scale))
    # A row may have seen no key yet; the subtractions below must not be inf - inf.
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = gl.exp2(maximum - base)
    weights = gl.exp2(scores * to.qk_scale - gl.expand_dims(base, 1))
    total = total * decay + gl.sum(weights, 1)
    # Waits until the values of the block before are added up, by the weights whose place these take.
    for half in gl.static_range(2):
        wait_until_free(shared, n + G.STAGES - 1, half, G)
    shared.weights.store(weights.to(shared.weights.dtype))
    shared.decays.store(decay)
    shared.totals.store(total)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(shared.weighed, count=1)
    return new_maximum, total


@gluon.jit
def weigh(step, shared, to, todo, G: gl.constexpr):
    """Computes weights of all keys that the program takes; log-sum-exps, or sums of rows that it shares."""
    row_layout: gl.constexpr = gl.SliceLayout(1, _layout_of_scores(G))
    n = 0
    while todo.work > 0:
        piece = piece_of(step, todo, G)
        maximum = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=row_layout)
        total = gl.zeros([GROUP_ROWS], gl.float32, layout=row_layout)
        if piece.end > piece.first:
            _put_queries(to.q, piece, shared, G)
        # Products of the next block begun before this one is weighed take 1.2 to 1.5 times as long: a warp that begins
        # them waits until the matrix units take them.
        for block in range(piece.first, piece.end):
            scores = warpgroup_mma_wait(0, deps=(_begin_scores(shared, n, G),))
            maximum, total = _weigh_block(scores, maximum, total, piece, block, n, shared, to, G)
            n += 1
        if piece.writes:
            if G.WHOLE_ONLY:
                _store_lse(maximum, total, piece, to, G)
            elif G.SELECTED:
                _store_sums(maximum, total, piece, to, G)
            elif piece.is_whole:
                _store_lse(maximum, total, piece, to, G)
            else:
                _store_sums(maximum, total, piece, to, G)
        todo = after_piece(step, todo, piece, G)
    leave()


@gluon.jit
def _store_lse(maximum, total, piece, to, G: gl.constexpr):
    """Stores log-sum-exps of a whole row, if requested. Without keys: -inf + log2(1)"""
    if to.lse.at is not None:
        LAYOUT: gl.constexpr = total.type.layout
        token, head, is_row = lines(piece, LAYOUT, G)
        logs = maximum + gl.log2(gl.where(total == 0.0, 1.0, total))
        gl.store(place(to.lse, piece, token, head), logs * LN_2, mask=is_row)


@gluon.jit
def _store_sums(maximum, total, piece, to, G: gl.constexpr):
    """Stores maxima and sums of the program's part of a row that it shares."""
    LAYOUT: gl.constexpr = total.type.layout
    token, head, is_row = lines(piece, LAYOUT, G)
    sums = to.sums + place_of_part(piece, token, head, G) * 2
    gl.store(sums, maximum, mask=is_row)
    gl.store(sums + 1, total, mask=is_row)


@gluon.jit
def add_values(PART: gl.constexpr, step, shared, to, todo, G: gl.constexpr):
    """Adds up values of one half of V's columns, of all keys that the program takes, by their weights."""
    # For products with all columns at once ptxas wants more registers than a thread of so large a program begins with.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    n = 0
    while todo.work > 0:
        piece = piece_of(step, todo, G)
        acc = gl.zeros([GROUP_ROWS, HALF], gl.float32, layout=layout)
        total = gl.zeros([GROUP_ROWS], gl.float32, layout=row_layout)
        for _ in range(piece.first, piece.end):
            half = n % G.STAGES * 2 + PART
            _wait_until_full(shared, n, PART, G)
            mbarrier.wait(shared.weighed, n & 1)
            total = shared.totals.load(row_layout)
            acc = times_if_any(acc, gl.expand_dims(shared.decays.load(row_layout), 1))
            acc = warpgroup_mma(shared.weights, shared.halves.index(half), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(shared.free.index(half), count=1)
            n += 1
        if piece.writes:
            if G.WHOLE_ONLY:
                _store_values(PART, acc, total, piece, to, G)
            elif G.SELECTED:
                _store_part(PART, acc, piece, to, G)
            elif piece.is_whole:
                _store_values(PART, acc, total, piece, to, G)
            else:
                _store_part(PART, acc, piece, to, G)
        todo = after_piece(step, todo, piece, G)
    leave()


@gluon.jit
def _columns_of_half(PART: gl.constexpr, acc):
    """Columns [1, HALF] of V of a half's accumulators."""
    return PART * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, acc.type.layout)), 0)


@gluon.jit
def _store_values(PART: gl.constexpr, acc, total, piece, to, G: gl.constexpr):
    """Stores the results of a whole row. Without keys: 0 / 1"""
    LAYOUT: gl.constexpr = total.type.layout
    token, head, is_row = lines(piece, LAYOUT, G)
    values = acc * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
    places = gl.expand_dims(place(to.out, piece, token, head), 1) + _columns_of_half(PART, acc)
    gl.store(places, values.to(to.out.at.dtype.element_ty), mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _store_part(PART: gl.constexpr, acc, piece, to, G: gl.constexpr):
    """Stores the program's part of a row that it shares."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    token, head, is_row = lines(piece, LAYOUT, G)
    rows = to.partials + place_of_part(piece, token, head, G) * V_DIM
    places = gl.expand_dims(rows, 1) + _columns_of_half(PART, acc)
    gl.store(places, acc, mask=gl.expand_dims(is_row, 1))


@gluon.jit
def new_shared(DTYPE: gl.constexpr, ARRIVALS: gl.constexpr, G: gl.constexpr):
    """Empty shared memory. ARRIVALS: of those that load, for a half of a block"""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    HALVES: gl.constexpr = G.STAGES * 2
    STAGES: gl.constexpr = G.STAGES
    layout: gl.constexpr = _SWIZZLED
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], bars)
    free = gl.allocate_shared_memory(gl.int64, [HALVES, 1], bars)
    weighed = gl.allocate_shared_memory(gl.int64, [1], bars)
    for half in gl.static_range(HALVES):
        # The first half is full when it is known, too, which of listed keys are hidden.
        mbarrier.init(full.index(half), count=ARRIVALS + (1 if G.SELECTED and ARRIVALS > 1 and half % 2 == 0 else 0))
        mbarrier.init(free.index(half), count=1)
    mbarrier.init(weighed, count=1)
    return Shared(
        gl.allocate_shared_memory(DTYPE, [2, GROUP_ROWS, HALF], layout),
        gl.allocate_shared_memory(DTYPE, [GROUP_ROWS, REST], layout),
        gl.allocate_shared_memory(DTYPE, [HALVES, KEY_BLOCK, HALF], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEY_BLOCK, REST], layout),
        gl.allocate_shared_memory(DTYPE, [GROUP_ROWS, KEY_BLOCK], gl.NVMMASharedLayout(KEY_BLOCK * 2, 16, rank=2)),
        gl.allocate_shared_memory(gl.float32, [GROUP_ROWS], _LINEAR),
        gl.allocate_shared_memory(gl.float32, [GROUP_ROWS], _LINEAR),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEY_BLOCK], _LINEAR),
        full,
        free,
        weighed,
    )


@gluon.jit
def _load(load: gl.constexpr, step, latents, shared, todo, G: gl.constexpr):
    load(step, latents, shared, todo, G)


@gluon.jit
def run_groups(load: gl.constexpr, latents, step, shared, to, todo, G: gl.constexpr):
    """Runs the program's warp groups. load: the one that loads latents"""
    VALUES: gl.constexpr = G.VALUE_REGISTERS
    SCORES: gl.constexpr = G.SCORE_REGISTERS
    LOADER: gl.constexpr = G.LOADER_REGISTERS
    # The first warp group has the registers that the others leave.
    gl.warp_specialize(
        [
            (add_values, (0, step, shared, to, todo, G)),
            (add_values, (1, step, shared, to, todo, G)),
            (weigh, (step, shared, to, todo, G)),
            (_load, (load, step, latents, shared, todo, G)),
        ],
        [4, 4, 4],
        [VALUES, SCORES, LOADER],
    )

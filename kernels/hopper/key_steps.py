"""The loop over keys of extend for Hopper: steps added to a running softmax; key_loop.py has the formula."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.coded import scaled_value_parts
from rocm_attn.kernels.attention.softmax import capped_at_once, raised_seldom
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.hopper.powers import scaled_powers
from rocm_attn.kernels.hopper.rings import value_stage, value_tiles, wait_for_keys, wait_for_values, zero_unseen
from rocm_attn.kernels.hopper.rows import GROUP_ROWS, columns_of, of_rows, parts_of, width_of
from rocm_attn.kernels.hopper.scaling import times_if_any


class ConsumerQuery(NamedTuple):
    """A consumer's rows: tiles of q in shared memory; the last key [64] that each row sees, and with a window how many
    before it, for all or [64]; the factor of products with K, for all or [64], and with a cap the factor of their tanh.
    In shared memory: scales of keys, if tokens have them; room for everything left of a segment, or in the workspace.
    """

    tiles: Any
    last_key: Any
    keys_before: Any
    product_scale: Any
    cap_scale: Any
    scales: Any
    left: Any


class Progress(NamedTuple):
    """A consumer's state within a row: the softmax of its keys, or of a segment of them; n, steps that have passed
    through the rings before.
    """

    softmax: Any
    n: Any


@gluon.jit
def is_visible(query, key, seen, G: gl.constexpr):
    """A mask of the keys [1, KEY_BLOCK] that rows see."""
    last_key = gl.expand_dims(query.last_key, 1)
    if G.WINDOWED:
        # 0 <= last_key - key <= keys_before by one comparison.
        before = query.keys_before.to(gl.uint32, bitcast=True)
        if G.RANGED:
            before = gl.expand_dims(before, 1)
        visible = (last_key - key).to(gl.uint32, bitcast=True) <= before
    elif G.CAUSAL or G.RANGED:
        visible = key <= last_key
    else:
        visible = key < seen.end
    return visible


@gluon.jit
def is_masked(step, seen, G: gl.constexpr, MASKED: gl.constexpr):
    """True if the keys of a step are masked. MASKED: whether the loop has masks

    A loop over all steps of a window masks those alone that some row does not see whole.
    """
    masked = MASKED
    if MASKED and G.WINDOWED and not G.OPEN_MIDDLE:
        first_key = step * G.KEY_BLOCK
        masked = (first_key < seen.inner_first) | (seen.inner_end - first_key < G.KEY_BLOCK)
    return masked


@gluon.jit
def waited_for(products):
    """The accumulators of products that are in flight."""
    return (warpgroup_mma_wait(0, deps=products),) if len(products) == 1 else warpgroup_mma_wait(0, deps=products)


@gluon.jit
def _sums_of_lanes(weights, G: gl.constexpr):
    """Sums [64, 4] of rows: over the columns of each of the four lanes that hold a row. No lane needs another."""
    ROWS: gl.constexpr = GROUP_ROWS
    BLOCKS: gl.constexpr = G.VALUE_BLOCK // 8
    return gl.sum(gl.sum(weights.reshape([ROWS, BLOCKS, 4, 2]), 3), 1)


@constexpr_function
def rows_of_scores(G):
    """The layout of a number for each row of a consumer."""
    return gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.SOFTMAX_BLOCK, 16]))


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    """Accumulators of WIDTH columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([GROUP_ROWS, WIDTH], gl.float32, layout=layout)


@gluon.jit
def blocks_of(numbers, G: gl.constexpr):
    """Numbers of a step's keys by tiles of V, [64, VALUE_BLOCK] each: one, or two."""
    VALUE_BLOCK: gl.constexpr = G.VALUE_BLOCK
    blocks = (numbers,)
    if G.VALUE_BLOCK < G.KEY_BLOCK:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.VALUE_BLOCK, 16])
        first, second = gl.split(gl.permute(numbers.reshape([GROUP_ROWS, 2, VALUE_BLOCK]), (0, 2, 1)))
        blocks = (  # type: ignore[assignment]
            gl.convert_layout(first, layout, assert_trivial=True),
            gl.convert_layout(second, layout, assert_trivial=True),
        )
    return blocks


@gluon.jit
def scaled_by_rows(acc, scale_value, G: gl.constexpr):
    """Accumulators times a number for each row, which is 1 for most if G.SCALES_SELDOM."""
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    scaled = ()
    for i in gl.static_range(PARTS):
        by_row = of_rows(scale_value, acc[i])
        scaled += (times_if_any(acc[i], by_row) if G.SCALES_SELDOM else acc[i] * by_row,)  # type: ignore[assignment]
    return scaled


@gluon.jit
def _as_operand(weights, part: gl.constexpr, G: gl.constexpr):
    """Weights laid out for products with a part's columns of V."""
    OF_V: gl.constexpr = G.V
    WIDTH: gl.constexpr = width_of(part, OF_V)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def add_products(acc, weights, v, stage, G: gl.constexpr):
    """Adds products of weights with a tile of V, in flight, to accumulators."""
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    products = ()
    for i in gl.static_range(PARTS):
        v_tile = columns_of(v.tiles.index(stage * PARTS + i), i, OF_V)
        products += (warpgroup_mma(_as_operand(weights, i, G), v_tile, acc[i], is_async=True),)  # type: ignore[assignment]
    return products


@gluon.jit
def nothing_seen(G: gl.constexpr):
    """The softmax state before any key, with sums of lanes; in deterministic attention with sums of rows."""
    VALUE_BLOCK: gl.constexpr = G.VALUE_BLOCK
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.SOFTMAX_BLOCK, 16])
    b_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.VALUE_BLOCK, 16])
    acc = ()
    for i in gl.static_range(PARTS):
        acc += (_zeros(width_of(i, OF_V)),)  # type: ignore[assignment]
    maximum = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, s_layout))
    if G.SEGMENT_STEPS == 0:
        total = _sums_of_lanes(gl.zeros([GROUP_ROWS, VALUE_BLOCK], gl.float32, layout=b_layout), G)
    return Softmax(acc, maximum, total)


@gluon.jit
def ended(softmax, v_scale_value, G: gl.constexpr):
    """A softmax state with the sums of rows instead of those of lanes. v_scale_value: scale of V's codes"""
    acc, maximum, total = scaled_value_parts(softmax, v_scale_value, G)
    total = gl.convert_layout(gl.sum(total, 1), maximum.type.layout)
    return with_bound(Softmax(acc, maximum, total), G)


@gluon.jit
def with_bound(softmax, G: gl.constexpr):
    """A softmax state with the maximum of its rows. If G.BOUNDED it was not kept: 0, or none for rows without a key."""
    acc, maximum, total = softmax
    if G.BOUNDED:
        maximum = gl.where(total > 0.0, 0.0, maximum)
    return Softmax(acc, maximum, total)


@gluon.jit
def scores_of_step(acc, products, query, rings, n, G: gl.constexpr):
    """Products of q and the keys of the n-th step [64, KEY_BLOCK], without their factor; and accumulators.

    products: that are in flight if G.OVERLAPS, and then waited for too; otherwise not read
    """
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    OF_K: gl.constexpr = G.K
    K_PARTS: gl.constexpr = parts_of(OF_K)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.KEY_BLOCK, 16])
    stage = n % G.STAGES
    wait_for_keys(rings, n, G)
    pending = (gl.zeros([GROUP_ROWS, KEY_BLOCK], gl.float32, layout=layout),)
    for i in gl.static_range(K_PARTS):
        q_tile = columns_of(query.tiles.index(i), i, OF_K)
        k_tile = columns_of(rings.k.tiles.index(stage * K_PARTS + i), i, OF_K).permute((1, 0))
        pending = (warpgroup_mma(q_tile, k_tile, pending[0], use_acc=i > 0, is_async=True),)
    if G.OVERLAPS:
        waited = warpgroup_mma_wait(0, deps=pending + products)
        scores, acc = waited[0], waited[1:]
    else:
        scores = warpgroup_mma_wait(0, deps=pending)
    return scores, acc


@gluon.jit
def attend_steps(progress, query, rings, span, seen, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds steps of a span to a softmax state.

    If G.OVERLAPS, the products with V of one step run under those with K of the next one, up to the wait for both: a
    wait for one of two products in flight makes ptxas wait for each. ptxas mixes the code between two waits, but moves
    none across a wait: V is waited for before the exponentials, so that the accumulators are scaled among them.

    If G.BOUNDED, the maximum stays unchanged, nothing is scaled, and exponentials wait for no reduction. If
    G.SCALES_SELDOM, it is raised seldom, so that after a row's first steps most warps have nothing to scale.
    """
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    OF_V: gl.constexpr = G.V
    V_PARTS: gl.constexpr = parts_of(OF_V)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.KEY_BLOCK, 16])
    lane = gl.arange(0, KEY_BLOCK, layout=gl.SliceLayout(0, s_layout))
    # Powers computed by products would not become 0 for keys that are not seen.
    BY_PRODUCTS: gl.constexpr = 0 if MASKED else G.POWERS_BY_PRODUCTS
    v = rings.v
    by_row = gl.expand_dims(query.product_scale, 1) if G.MOVES_Q else query.product_scale
    row_scale = query.cap_scale if G.CAPPED else query.product_scale
    by_score = query.cap_scale if G.CAPPED else by_row
    softmax, n = progress
    acc, maximum, total = softmax
    if G.OVERLAPS:
        products = ()
        for i in gl.static_range(V_PARTS):
            products += (warpgroup_mma_init(acc[i]),)  # type: ignore[assignment]
    for step in range(span.first, span.end):
        scores, acc = scores_of_step(acc, products if G.OVERLAPS else acc, query, rings, n, G)
        if G.SCALES == TOKEN_SCALES:
            k_scale_value = query.scales.k.index(n % G.STAGES).load(gl.SliceLayout(0, s_layout))
        gl.thread_barrier()
        mbarrier.arrive(rings.free.index(n % G.STAGES), count=1)
        wait_for_values(rings, n, 0, 1, G)
        if G.SCALES == TOKEN_SCALES:
            scores = scores * gl.expand_dims(k_scale_value, 0)
        if G.CAPPED:
            scores = capped_at_once(scores, by_row)
        masked = is_masked(step, seen, G, MASKED)
        if masked:
            key = gl.expand_dims(step * KEY_BLOCK + lane, 0)
            scores = gl.where(is_visible(query, key, seen, G), scores, float("-inf"))
        decay = 1.0
        base = gl.zeros_like(maximum)
        if not G.BOUNDED:
            new_maximum = gl.maximum(maximum, gl.max(scores, 1) * row_scale)
            if G.SCALES_SELDOM:
                new_maximum = raised_seldom(maximum, new_maximum)
            # A row of a masked step may have seen no key yet; the subtractions below must not be inf - inf.
            base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
            decay = gl.exp2(maximum - base)
            total = total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout)), 1)
            maximum = new_maximum
        blocks = blocks_of(scores, G)
        for tile in gl.static_range(value_tiles(G)):
            if G.BOUNDED:
                weights = scaled_powers(blocks[tile], by_score, BY_PRODUCTS)
            else:
                weights = gl.exp2(blocks[tile] * by_score - of_rows(base, blocks[tile]))
            total += _sums_of_lanes(weights, G)
            if G.SCALES_WEIGHTS:
                of_keys = query.scales.v.index(value_stage(n, tile, G))
                v_scale_value = of_keys.load(gl.SliceLayout(0, weights.type.layout))
                weights = weights * gl.expand_dims(v_scale_value, 0)
            weights = weights.to(v.tiles.dtype)
            if tile == 0:
                if G.CODE_TILES == 0 and not G.GATHERED and masked:
                    wait_for_values(rings, n, 1, value_tiles(G), G)
                    zero_unseen(v, n, step, seen, G)
                if not G.BOUNDED:
                    acc = scaled_by_rows(acc, decay, G)
            else:
                wait_for_values(rings, n, tile, tile + 1, G)
                acc = waited_for(products)
            products = add_products(acc, weights, v, value_stage(n, tile, G), G)
        if not G.OVERLAPS:
            acc = waited_for(products)
        n += 1
    if G.OVERLAPS:
        acc = waited_for(products)
    return Progress(Softmax(acc, maximum, total), n)


@gluon.jit
def pass_steps(n, rings, span, G: gl.constexpr):
    """Passes over the steps of a span that a consumer has no rows for; returns n after them.

    It waits for keys and values all the same: barriers count in turns of two, so that no wait may be left out. It
    arrives before it waits for values, like attend_steps: the loader of values may wait for both consumers to arrive.
    """
    for _ in range(span.first, span.end):
        wait_for_keys(rings, n, G)
        gl.thread_barrier()
        mbarrier.arrive(rings.free.index(n % G.STAGES), count=1)
        wait_for_values(rings, n, 0, value_tiles(G), G)
        n += 1
    return n

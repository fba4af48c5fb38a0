"""The loop over keys of deterministic extend for Hopper: steps added to a running softmax, with the bits of decode.

A step's products with K are made at once, by instructions as wide as the step: narrower ones each read q anew, and
shared memory is too slow. The softmax goes on block by block like decode's, and the exponentials of the second block
run under the products of the first one with V.

Every sum of products is an explicit fma (kernels/attention/segments.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_init,
)

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.softmax import capped_at_once, exact_maximum
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.hopper.key_steps import (
    Progress,
    add_products,
    blocks_of,
    is_masked,
    is_visible,
    scaled_by_rows,
    scores_of_step,
    waited_for,
)
from rocm_attn.kernels.hopper.rings import value_stage, wait_for_values, zero_unseen
from rocm_attn.kernels.hopper.rows import parts_of


@gluon.jit
def _scored(scores, query, key, masked, seen, G: gl.constexpr):
    """Products of a block with a cap, and -inf for keys that a row does not see. key: [1, VALUE_BLOCK]"""
    if G.CAPPED:
        scores = capped_at_once(scores, query.product_scale)
    if masked:
        scores = gl.where(is_visible(query, key, seen, G), scores, float("-inf"))
    return scores


@gluon.jit
def attend_segment_steps(progress, query, rings, span, seen, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds steps of a span to a softmax state; key_steps.attend_steps describes G.OVERLAPS."""
    KEY_BLOCK: gl.constexpr = G.KEY_BLOCK
    VALUE_BLOCK: gl.constexpr = G.VALUE_BLOCK
    BLOCKS: gl.constexpr = G.KEY_BLOCK // G.VALUE_BLOCK
    OF_V: gl.constexpr = G.V
    V_PARTS: gl.constexpr = parts_of(OF_V)
    b_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.VALUE_BLOCK, 16])
    of_keys: gl.constexpr = gl.SliceLayout(0, b_layout)
    lane = gl.expand_dims(gl.arange(0, VALUE_BLOCK, layout=of_keys), 0)
    scale = query.cap_scale if G.CAPPED else query.product_scale
    v = rings.v
    softmax, n = progress
    acc, maximum, total = softmax
    if G.OVERLAPS:
        products = ()
        for i in gl.static_range(V_PARTS):
            products += (warpgroup_mma_init(acc[i]),)  # type: ignore[assignment]
    for step in range(span.first, span.end):
        scores, acc = scores_of_step(acc, products if G.OVERLAPS else acc, query, rings, n, G)
        if G.SCALES == TOKEN_SCALES:
            # Codes have tiles of V as long as a step.
            scores = scores * gl.expand_dims(query.scales.k.index(n % G.STAGES).load(of_keys), 0)
        gl.thread_barrier()
        mbarrier.arrive(rings.free.index(n % G.STAGES), count=1)
        wait_for_values(rings, n, 0, BLOCKS, G)
        masked = is_masked(step, seen, G, MASKED)
        if G.CODE_TILES == 0 and not G.GATHERED and masked:
            zero_unseen(v, n, step, seen, G)
        blocks = blocks_of(scores, G)
        scored, largest = (), ()
        for block in gl.static_range(BLOCKS):
            key = step * KEY_BLOCK + block * VALUE_BLOCK + lane
            scored += (_scored(blocks[block], query, key, masked, seen, G),)  # type: ignore[assignment]
            if not G.BOUNDED:
                # Lanes exchange the maxima of both blocks at once: a warp waits for each exchange.
                largest += (gl.max(scored[block], 1) * scale,)  # type: ignore[assignment]
        for block in gl.static_range(BLOCKS):
            if G.BOUNDED:
                weights = gl.exp2(scored[block] * scale)
                acc = products if block > 0 else acc
            else:
                new_maximum = exact_maximum(maximum, gl.maximum(maximum, largest[block]))
                # A row of a masked step may have seen no key yet; the subtractions below must not be inf - inf.
                base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
                decay = gl.exp2(maximum - base)
                weights = gl.exp2(gl.fma(scored[block], scale, gl.expand_dims(-base, 1)))
                acc = scaled_by_rows(waited_for(products) if block > 0 else acc, decay, G)
                maximum = new_maximum
            shares = weights
            if G.SCALES_WEIGHTS:
                v_scale_value = query.scales.v.index(value_stage(n, block, G)).load(of_keys)
                shares = weights * gl.expand_dims(v_scale_value, 0)
            products = add_products(acc, shares.to(v.tiles.dtype), v, value_stage(n, block, G), G)
            # Added up while the products run.
            total = total + gl.sum(weights, 1) if G.BOUNDED else gl.fma(total, decay, gl.sum(weights, 1))
        if not G.OVERLAPS:
            acc = waited_for(products)
        n += 1
    if G.OVERLAPS:
        acc = waited_for(products)
    return Progress(Softmax(acc, maximum, total), n)

"""Accepts drafts that were drawn by probabilities of their own, so that the result is drawn by the target's.

It is rejection sampling over several drafts of a node in turn, drawn by q without replacement (Jeon et al., Recursive
Speculative Decoding, 2024); with one draft it is that of Leviathan et al. (2023). With p of the target, at a node whose
drafts x_1, x_2, ... are tried:

    q_j = q without x_1 .. x_j-1, normalised
    r_0 = p                                 x_j is accepted if u_j < r_j-1(x_j) / q_j(x_j), both of sum 1
    r_j = max(r_j-1 - q_j, 0), normalised   if x_j was not; after the last one the next token is drawn by r

The remainder is a difference at every time: r_j is max(p - w_j q, 0) divided by its sum, w_0 is 0, and w_j+1 is w_j
plus that sum divided by the part of q that was not drawn. This holds for drawn tokens too: a refused one had less than
q_j, so nothing of it is left. So nothing is written between passes, and an accepted draft costs two numbers.

Drafts that were chosen and not drawn, the most likely ones or those of a look-up, are for accept_drawn.py.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch, repeated_launches
from rocm_attn.kernels.speculative.accept_drawn import (
    SequenceOutcome,
    load_tree,
    next_child,
    store_accepted,
)
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, Verified, check_trees
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_BLOCK = 4096
# The least part of q that earlier drafts leave to the next one; the code that draws them stops before.
_LEAST_REST = tl.constexpr(2.0**-24)


@triton.jit
def _left(target, draft, taken, token, end):
    """The rest of the target's probabilities of tokens; 0 from the end on."""
    p = tl.load(target + token, mask=token < end, other=0.0)
    # If a node has no drafts, the draft's row holds anything.
    q = tl.load(draft + token, mask=token < tl.where(taken > 0, end, 0), other=0.0)
    left = p - taken * q
    # Not tl.maximum: on a device it gives 0 if one of both is NaN, and the row would look like a distribution.
    return tl.where(left < 0.0, 0.0, left)


@triton.jit
def _sum_of_left(target, draft, taken, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, end, BLOCK):
        total += _left(target, draft, taken, begin + tl.arange(0, BLOCK), end)
    return tl.sum(total, 0)


@at_any_alignment
@triton.jit(do_not_specialize=["parents_row", "num_trees", "num_nodes", "target_row", "draft_row", "vocab"])
def _accept_sampled_kernel(
    target,
    draft,
    accept_uniform,
    draw_uniform,
    token_ids,
    q_indptr,
    kv_len,
    parents,
    to_count,
    to_path,
    to_ids,
    to_next,
    to_kv_len,
    parents_row,
    num_trees,
    num_nodes,
    target_row,
    draft_row,
    vocab,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    first, nodes, parent = load_tree(parents, parents_row, num_trees, q_indptr, seq, num_nodes, NODES)
    lane = tl.arange(0, NODES)
    path = tl.where((lane == 0) & (nodes > 0), 0, -1)
    ids = tl.zeros([NODES], tl.int32) - 1
    count = 0
    node = 0
    taken = (nodes * 0).to(tl.float32)
    left = taken + 1.0
    rest = left
    child = next_child(parent, node, 0, nodes, NODES)
    while child < NODES:
        token = tl.load(token_ids + first + child)
        row = (first + node).to(tl.int64)
        is_token = (token >= 0) & (token < vocab)
        p = tl.load(target + row * target_row + token, mask=is_token, other=0.0)
        q = tl.load(draft + row * draft_row + token, mask=is_token, other=0.0)
        u = tl.load(accept_uniform + first + child)
        # A number, because the interpreter joins no two comparisons of single floats.
        accepted = tl.where(tl.where(q > 0, u * left * q / rest, float("inf")) < p - taken * q, 1, 0)
        is_accepted = accepted > 0
        count += accepted
        path = tl.where(is_accepted & (lane == count), child, path)
        ids = tl.where(is_accepted & (lane == count - 1), token, ids)
        # After an accepted draft it begins anew; a refused one takes its share.
        taken = tl.where(is_accepted, 0.0, taken + left / rest)
        rest = tl.where(is_accepted, 1.0, tl.maximum(rest - q, _LEAST_REST))
        end = tl.where(is_accepted, 0, vocab)
        left_now = _sum_of_left(target + row * target_row, draft + row * draft_row, taken, end, BLOCK)
        left = tl.where(is_accepted, 1.0, left_now)
        node = tl.where(is_accepted, child, node)
        child = next_child(parent, node, child, nodes, NODES)
    row = (first + node).to(tl.int64)
    end = tl.where(nodes > 0, vocab, 0)
    total = _sum_of_left(target + row * target_row, draft + row * draft_row, taken, end, BLOCK)
    # Nothing is left if both rows are the same except for rounding.
    again = tl.where(total > 0, 0, end)
    taken = tl.where(total > 0, taken, 0.0)
    whole = _sum_of_left(target + row * target_row, draft + row * draft_row, taken, again, BLOCK)
    total = tl.where(total > 0, total, whole)
    limit = tl.load(draw_uniform + first + node, mask=nodes > 0, other=0.0) * total
    before = 0.0
    drawn = vocab
    last = -1
    for begin in range(0, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        share = _left(target + row * target_row, draft + row * draft_row, taken, token, end)
        reached = before + tl.cumsum(share, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((reached > limit) & (share > 0), token, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(share > 0, token, -1), 0))
        before += tl.sum(share, 0)
    # By rounding the last sum may stay below the limit.
    next_token = tl.where(drawn < vocab, drawn, last)
    # A sum that is NaN has no order.
    is_number = tl.where(total > 0, total, float("inf")) < float("inf")
    next_token = tl.where(nodes > 0, tl.where(is_number, next_token, -1), -1)
    ids = tl.where((lane == count) & (nodes > 0), next_token, ids)
    outcome = SequenceOutcome(count, path, ids, next_token)
    to = Accepted(to_count, to_path, to_ids, to_next, to_kv_len)
    store_accepted(seq, nodes, kv_len, outcome, to, num_nodes, NODES)


_variant = repeated_launches(_accept_sampled_kernel)


def launch_accept_sampled(probabilities: Probabilities, given: Verified, to: Accepted) -> None:
    """Accepts drafts by their probabilities, and draws each sequence's next token."""
    check_trees(given, to)
    target, draft = probabilities.target, probabilities.draft
    num_nodes, vocab = to.path.shape[1], target.shape[1]
    assert draft.shape[1] == vocab
    assert target.stride(1) == draft.stride(1) == 1
    nodes = max(16, next_power_of_2(num_nodes))
    launch: RepeatedLaunch = _variant(nodes)
    launch(
        to.num_accepted.device,
        (given.num_seqs, 1, 1),
        *probabilities,
        *given,
        *to,
        given.parents.stride(0),
        given.parents.shape[0],
        num_nodes,
        target.stride(0),
        draft.stride(0),
        vocab,
        nodes,
        _BLOCK,
        num_warps=8,
    )

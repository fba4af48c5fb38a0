"""Accepts the drafts that a model would have chosen by itself.

    drawn[t] = the token that the model chooses after token t: the most likely one, or one that it draws

From node 0 on the first child whose token is the one drawn at its parent is accepted, and so on from that child. If
there is none the path ends, and the token drawn there comes next. So a sequence gets exactly the tokens that steps of
one token each would have given it, if the draw at a place follows from its probabilities and the place alone. Drafts
may come from anywhere.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch, repeated_launches
from rocm_attn.kernels.metadata.step_tensors import BRINGS_PROMPT
from rocm_attn.kernels.speculative.arguments import Accepted, Verified, check_trees
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_BRINGS_PROMPT = tl.constexpr(BRINGS_PROMPT)


class SequenceOutcome(NamedTuple):
    """The outcome of a sequence. count, next_token: scalars; path, token_ids: [NODES]"""

    count: tl.tensor
    path: tl.tensor
    token_ids: tl.tensor
    next_token: tl.tensor


@triton.jit
def load_tree(parents, parents_row, num_trees, q_indptr, seq, num_nodes, NODES: tl.constexpr):
    """A sequence's first node, its number of nodes, and their parents [NODES]; -1 for missing nodes.

    The one node of a sequence that brings a prompt is its last token.
    """
    first = tl.load(q_indptr + seq)
    end = tl.load(q_indptr + seq + 1)
    nodes = tl.where(seq < num_trees, end - first, 0)
    root = tl.load(parents + seq.to(tl.int64) * parents_row, mask=nodes > 0, other=-1)
    if (nodes > num_nodes) | (root == _BRINGS_PROMPT):
        first = end - 1
        nodes = nodes * 0 + 1
    lane = tl.arange(0, NODES)
    parent = tl.load(parents + seq.to(tl.int64) * parents_row + lane, mask=lane < nodes, other=-1)
    return first, nodes, parent


@triton.jit
def next_child(parent, node, tried, nodes, NODES: tl.constexpr):
    """The first child of a node after the one that was tried last; NODES if there is none."""
    lane = tl.arange(0, NODES)
    is_child = (parent == node) & (lane > node) & (lane > tried) & (lane < nodes)
    return tl.min(tl.where(is_child, lane, NODES), 0)


@triton.jit
def store_accepted(seq, nodes, kv_len, outcome, to, num_nodes, NODES: tl.constexpr):
    """Writes the outcome of a sequence with `nodes` nodes. to: an Accepted of pointers, with rows of num_nodes"""
    lane = tl.arange(0, NODES)
    row = seq.to(tl.int64) * num_nodes + lane
    tl.store(to.path + row, outcome.path, mask=lane < num_nodes)
    tl.store(to.token_ids + row, outcome.token_ids, mask=lane < num_nodes)
    tl.store(to.num_accepted + seq, outcome.count)
    tl.store(to.next_token + seq, outcome.next_token)
    length = tl.load(kv_len + seq)
    tl.store(to.kv_len + seq, tl.where(nodes > 0, length - nodes + 1 + outcome.count, length))


@at_any_alignment
@triton.jit(do_not_specialize=["parents_row", "num_trees", "num_nodes"])
def _accept_drawn_kernel(
    drawn,
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
    NODES: tl.constexpr,
):
    seq = tl.program_id(0)
    first, nodes, parent = load_tree(parents, parents_row, num_trees, q_indptr, seq, num_nodes, NODES)
    lane = tl.arange(0, NODES)
    token_id = tl.load(token_ids + first + lane, mask=lane < nodes, other=-1)
    path = tl.where((lane == 0) & (nodes > 0), 0, -1)
    ids = tl.zeros([NODES], tl.int32) - 1
    count = 0
    node = tl.where(nodes > 0, 0, NODES)
    next_token = -1
    while node < NODES:
        next_token = tl.load(drawn + first + node)
        ids = tl.where(lane == count, next_token, ids)
        is_next = (parent == node) & (lane > node) & (lane < nodes) & (token_id == next_token)
        node = tl.min(tl.where(is_next, lane, NODES), 0)
        count += (node < NODES).to(tl.int32)
        path = tl.where((lane == count) & (node < NODES), node, path)
    outcome = SequenceOutcome(count, path, ids, next_token)
    to = Accepted(to_count, to_path, to_ids, to_next, to_kv_len)
    store_accepted(seq, nodes, kv_len, outcome, to, num_nodes, NODES)


_variant = repeated_launches(_accept_drawn_kernel)


def launch_accept_drawn(drawn: Tensor, given: Verified, to: Accepted) -> None:
    """Follows the drawn tokens down each sequence's tree.

    drawn: int32 [T], contiguous
    """
    check_trees(given, to)
    num_nodes = to.path.shape[1]
    nodes = max(16, next_power_of_2(num_nodes))
    launch: RepeatedLaunch = _variant(nodes)
    launch(
        to.num_accepted.device,
        (given.num_seqs, 1, 1),
        drawn,
        *given,
        *to,
        given.parents.stride(0),
        given.parents.shape[0],
        num_nodes,
        nodes,
        num_warps=1 if nodes <= 64 else 4,
    )

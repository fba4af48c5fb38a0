"""Computes the mask and the positions of a step whose new tokens are nodes of trees of drafts.

The last nodes_before + q_len keys of each sequence are the nodes 0, 1, ... of a tree, of which the last q_len are new.
A node sees itself, the nodes that it descends from, and every key before the tree:

    start[i]              = kv_len[i] - q_len[i] - nodes_before
    bit of (t, start + n) = whether n == nodes_before + t, or n is one of its ancestors
    position of (i, t)    = start[i] + ancestors of node nodes_before + t
    window_start of (i, t) = position - window_left, or if that is in the tree, the place of the ancestor that is so
                             many nodes up: nodes of one depth lie side by side, so places in a tree are not depths

parents[i, n] is the number of node n's parent, or negative if it has none. In a tree it is below n. In a round of
drafts, `branches` in each step, it is one of the step before, and the first step's have none. A node with another one
counts as a node without a parent; if the node is new, BAD_PARENT in the step's error word reports it.
Tokens at or past num_tokens receive position 0. Words hold the cells of all sequences without gaps, so two sequences
may share one: each writes its own bits, by an atomic and and an atomic or.

The launch runs after publish and device_inputs, which write the lengths; it may be captured, and run twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_WORDS = 16  # of 32 cells
_TOKENS = 128
_SEQS = 256
# Programs of a sequence, which take its words in turn.
_SHARES = 4
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_BAD_PARENT = tl.constexpr(error_word.BAD_PARENT)


@triton.jit
def _cells(kv_len, q_len, seq, is_seq, nodes_before):
    """New tokens, nodes and mask cells of sequences; fewer nodes if lengths leave no room for the nodes before.

    This loses no node: a round's drafts make its lengths, and no kernel reads cells of pads.
    """
    new = tl.load(q_len + seq, mask=is_seq, other=0)
    older = tl.load(kv_len + seq, mask=is_seq, other=0) - new
    nodes = new + tl.minimum(tl.maximum(older, 0), nodes_before)
    return new, nodes, new.to(tl.int64) * nodes


@triton.jit
def _may_not_be(given, node, branches):
    """True for a node whose given parent is none of its possible ones."""
    # Nodes before this one may be parents, but none of the same step, if there are steps.
    end = node // tl.maximum(branches, 1) * tl.maximum(branches, 1)
    first = tl.where(branches > 0, tl.maximum(end - branches, 0), 0)
    # A tree may have several nodes without a parent; among drafts only those of the first step have none.
    is_lost = (given < 0) & (end * branches > 0)
    return (given >= end) | ((given >= 0) & (given < first)) | is_lost


@triton.jit
def _parents(line, node, branches):
    """The parents of nodes; negative if there is none, or if it is not a possible one."""
    given = tl.load(line + tl.maximum(node, 0))
    return tl.where(_may_not_be(given, node, branches), -1, given)


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "parents_row",
        "nodes_before",
        "branches",
        "window_left",
        "num_seqs_padded",
        "num_tokens_padded",
        "num_window_starts",
    ]
)
def _place_trees_kernel(
    parents,
    counts,
    kv_len,
    q_len,
    start,
    words,
    position_of_token,
    window_start,
    parents_row,
    nodes_before,
    branches,
    window_left,
    num_seqs_padded,
    num_tokens_padded,
    num_window_starts,
    SHARES: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
):
    seq = tl.program_id(0) // SHARES
    share = tl.program_id(0) % SHARES
    num_seqs = tl.load(counts)
    num_tokens = tl.load(counts + 1)
    tokens_before = tl.zeros([SEQS], tl.int32)
    cells_before = tl.zeros([SEQS], tl.int64)
    for first in range(0, seq, SEQS):
        other = first + tl.arange(0, SEQS)
        new, nodes, cells = _cells(kv_len, q_len, other, other < seq, nodes_before)
        tokens_before += new
        cells_before += cells
    first_token = tl.sum(tokens_before, 0)
    first_cell = tl.sum(cells_before, 0)
    new, nodes, cells = _cells(kv_len, q_len, seq, True, nodes_before)
    before = nodes - new
    tree_start = tl.load(kv_len + seq) - nodes
    if share == 0:
        # It is below 0 only for a pad, whose length is shorter than its new tokens.
        tl.store(start + seq, tl.maximum(tree_start, 0))
    num_reported = tl.where(seq < num_seqs, new, 0)
    # The caller's rows are those of real sequences.
    line = parents + tl.where(seq < num_seqs, seq, 0).to(tl.int64) * parents_row
    for at in range(share * TOKENS, new, SHARES * TOKENS):
        token = at + tl.arange(0, TOKENS)
        is_token = token < new
        node = tl.where(is_token, before + token, -1)
        depth = tl.zeros([TOKENS], tl.int32) - 1
        oldest = tl.zeros([TOKENS], tl.int32) - 1
        wrong = _may_not_be(tl.load(line + tl.maximum(node, 0)), node, branches)
        error = counts + _ERROR_WORD + tl.zeros([TOKENS], tl.int32)
        tl.atomic_or(error, _BAD_PARENT, mask=wrong & (token < num_reported), sem="relaxed")
        while tl.max(node, 0) >= 0:
            depth += (node >= 0).to(tl.int32)
            oldest = tl.where((node >= 0) & (depth == window_left), node, oldest)
            parent = _parents(line, node, branches)
            node = tl.where(node >= 0, parent, -1)
        place = first_token + token
        position = tl.where(place < num_tokens, tree_start + depth, 0)
        tl.store(position_of_token + place, position, mask=is_token & (place < num_tokens_padded))
        first_key = tl.where(oldest >= 0, tree_start + oldest, tree_start + depth - window_left)
        first_key = tl.where(place < num_tokens, first_key, 0)
        tl.store(window_start + place, first_key, mask=is_token & (place < num_window_starts))
    for at in range(num_tokens + tl.program_id(0) * TOKENS, num_tokens_padded, num_seqs_padded * SHARES * TOKENS):
        place = at + tl.arange(0, TOKENS)
        tl.store(position_of_token + place, tl.zeros([TOKENS], tl.int32), mask=place < num_tokens_padded)
        tl.store(window_start + place, tl.zeros([TOKENS], tl.int32), mask=place < num_window_starts)
    # Cells are counted from the first bit of the sequence's first word, and fit 32 bits.
    shift = (first_cell % 32).to(tl.int32)
    end = shift + cells.to(tl.int32)
    at_words = words + first_cell // 32
    for at in range(share * WORDS, tl.cdiv(end, 32), SHARES * WORDS):
        word = at + tl.arange(0, WORDS)
        place = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        is_cell = (place >= shift) & (place < end)
        cell = tl.where(is_cell, place - shift, 0)
        key = cell % tl.maximum(nodes, 1)
        node = tl.where(is_cell, before + cell // tl.maximum(nodes, 1), -1)
        # Up the branch until it has passed the key's node.
        while tl.max(tl.max(node - key, 1), 0) > 0:
            up = node > key
            parent = _parents(line, node, branches)
            node = tl.where(up, parent, node)
        lane = tl.arange(0, 32)[None, :]
        own = tl.sum(is_cell.to(tl.int32) << lane, 1)
        seen = tl.sum((is_cell & (node == key)).to(tl.int32) << lane, 1)
        has_cells = word * 32 < end
        tl.atomic_and(at_words + word, ~own, mask=has_cells, sem="relaxed")
        tl.atomic_or(at_words + word, seen, mask=has_cells, sem="relaxed")


_place = RepeatedLaunch(_place_trees_kernel)


def launch_place_trees(parents: Tensor, nodes_before: int, branches: int, window_left: int, to: StepTensors) -> None:
    """Writes a step's mask and positions.

    parents:      int32 [num_seqs, n], rows contiguous at any stride; read only. n is at least nodes_before and the most
                  new tokens of a sequence together
    nodes_before: nodes of each tree that are older than the step
    branches:     in a round of drafts, nodes of a tree in each of its steps; 0 for trees of any shape
    window_left:  nodes and keys before its own that a window holds, below 2**31
    to:           counts, kv_len and q_len are read; counts[3] receives an error bit; mask_words, mask_positions and
                  mask_start are written, and window_start if it is not empty
    """
    num_seqs_padded = to.kv_len.shape[0]
    _place(
        to.counts.device,
        (num_seqs_padded * _SHARES, 1, 1),
        parents,
        to.counts,
        to.kv_len,
        to.q_len,
        to.mask_start,
        to.mask_words,
        to.mask_positions,
        to.window_start,
        parents.stride(0),
        nodes_before,
        branches,
        window_left,
        num_seqs_padded,
        to.mask_positions.shape[0],
        to.window_start.shape[0],
        _SHARES,
        _WORDS,
        _TOKENS,
        _SEQS,
        num_warps=4,
    )

"""The inputs and outputs of draft token acceptance: the draft trees that a step has verified, and their outcome.

The new tokens of a sequence are the nodes 0, 1, ... of a tree. Node 0 is the sequence's last token, which is no draft:
no step has stored it before. Every other node is a draft and descends from it; a parent comes before its children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.speculative.limits import MOST_NODES


class Verified(NamedTuple):
    """A step of S sequences and T tokens, in which sequence i has q_indptr[i + 1] - q_indptr[i] nodes.

    token_ids: int32 [T]
    q_indptr:  int32 [S + 1]
    kv_len:    int32 [S]    tokens, nodes included
    parents:   int32 [n, W] node -> its parent, rows contiguous at any stride; a node that does not come after its
               parent has no descendants. Entries after a sequence's nodes are not read. Sequences from n on have none

    A sequence of more than W new tokens, or whose first parent is BRINGS_PROMPT, brings a part of its prompt: none of
    its tokens is a draft, and the token that is chosen after its last one comes next.
    """

    token_ids: Tensor
    q_indptr: Tensor
    kv_len: Tensor
    parents: Tensor

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.kv_len.shape[0]


class Accepted(NamedTuple):
    """The accepted draft tokens of each sequence, and the next token; all contiguous.

    num_accepted: int32 [S]     accepted drafts
    path:         int32 [S, W]  node 0, then the nodes of the accepted drafts in order, then -1
    token_ids:    int32 [S, W]  ids of the accepted drafts, then the next token, then -1
    next_token:   int32 [S]     -1 if a sequence has no node, or no token can be drawn
    kv_len:       int32 [S]     KV length with the accepted drafts, without the next token
    """

    num_accepted: Tensor
    path: Tensor
    token_ids: Tensor
    next_token: Tensor
    kv_len: Tensor

    @classmethod
    def empty(cls, num_seqs: int, num_nodes: int, device: torch.device) -> Accepted:
        """Room for the outcome of trees of up to num_nodes nodes."""

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(ints(num_seqs), ints(num_seqs, num_nodes), ints(num_seqs, num_nodes), ints(num_seqs), ints(num_seqs))


class Probabilities(NamedTuple):
    """The inputs of rejection sampling, float32, rows contiguous at any stride.

    target:         [T, V]  node -> the verifying model's probability of each token to come after it
    draft:          [T, V]  node -> the probabilities by which its children were drawn, in order and no token twice:
                            each by those that earlier ones leave; not read for a node without any
    accept_uniform: [T]     draft -> a number of [0, 1) that decides whether it is accepted
    draw_uniform:   [T]     node -> a number of [0, 1) that decides on the next token if the path ends there
    """

    target: Tensor
    draft: Tensor
    accept_uniform: Tensor
    draw_uniform: Tensor


def check_trees(given: Verified, to: Accepted) -> None:
    """Asserts dtypes, shapes and contiguity."""
    num_nodes = to.path.shape[1]
    assert 1 <= num_nodes <= MOST_NODES
    assert given.parents.shape[1] >= num_nodes
    assert given.parents.dtype == given.token_ids.dtype == given.q_indptr.dtype == torch.int32
    assert given.parents.shape[1] == 1 or given.parents.stride(1) == 1
    assert to.token_ids.shape == to.path.shape
    assert all(each.is_contiguous() and each.dtype == torch.int32 for each in to)
    assert all(each.shape[0] == given.num_seqs for each in to)


# Words of SpeculativeStep.emitted for each sequence.
EMITTED_WORDS = 3


class SpeculativeStep(NamedTuple):
    """A step of n sequences with W new tokens each, all of them drafts but the first, and the texts that it continues.

    counts:     int32 [4]  of the step; the last one is its error word
    row_of_seq: int32 [S]  sequence -> row; S is n or more
    kv_len:     int32 [S]  tokens, new ones included
    token_ids:  int32 [T]  W for each sequence; T is n * W or more
    texts:      int32 [rows, most], contiguous: row -> the tokens of its sequence. most is W + 1 more than any limit
    limit:      int32 [n]  bounds of kv_len, W or more: as many tokens have pages
    emitted:    int32 [n, EMITTED_WORDS]  receives the number of tokens that a sequence got; the number of tokens
                before the next drafts by which the text finds them, 0 if it does not; the error word
    """

    counts: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    token_ids: Tensor
    texts: Tensor
    limit: Tensor
    emitted: Tensor

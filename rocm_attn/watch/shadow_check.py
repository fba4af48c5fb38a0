"""shadow_check: one layer of one step over an engine's storage against the oracle, on demand.

The pages are looked up in the table that the layer's kernel has read, so a table or a slot that is wrong shows as well
as a kernel that is.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rocm_attn.external import ExternalAttention
from rocm_attn.oracle.reference import attend_paged
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.watch.sampled_check import within_bounds

# The oracle works in float64: 4 sequences of 32k tokens and 32 heads take some 0.3 GB.
MOST_SEQS = 4
MOST_TOKENS = 16


def shadow_check(
    attention: ExternalAttention,
    layer: int,
    q: Tensor,
    out: Tensor,
    *,
    most_seqs: int = MOST_SEQS,
    most_tokens: int = MOST_TOKENS,
    seed: int = 0,
) -> list[int]:
    """Sequences of the step that is running, among a few, whose last new tokens are not the oracle's in a layer.

    For after attend(layer, q, out), outside of graphs: it waits for the device. Not for masked steps.

    most_seqs:   sequences that are looked at, chosen by seed
    most_tokens: of each, so many of its last new tokens
    Raises WrongState, BadTensor.
    """
    view = attention.shadow_view(layer)
    problem, pages = view.problem, view.pages
    q_len, kv_len = view.q_len.tolist(), view.kv_len.tolist()
    ends = np.cumsum(q_len)
    wrong = []
    for seq in np.random.default_rng(seed).permutation(view.num_seqs)[:most_seqs].tolist():
        new, length = min(q_len[seq], most_tokens), kv_len[seq]
        if new == 0:
            continue
        tokens = slice(int(ends[seq]) - new, int(ends[seq]))
        num_pages = -(-length // problem.page_size)
        held = view.table[int(view.row_of_seq[seq]), :num_pages].long()
        want, _ = attend_paged(q[tokens], pages, [held.tolist()], [length], [new], problem, view.weights)
        # What no token sees may be of others by now, or no number.
        first = 0 if problem.window_left == UNLIMITED_WINDOW else max(0, length - new - problem.window_left)
        k, v = (side.read(held).flatten(0, 1)[first:length] for side in (pages.keys, pages.values))
        is_right = bool((out[tokens] == 0).all())
        if length:
            is_right = within_bounds(out[tokens], want, q[tokens], k, v, problem)
        if not is_right:
            wrong.append(seq)
    return sorted(wrong)

"""Compares a few sequences of a step with the reference in one layer: for the sampled check and the shadow check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.oracle.numerics import BOUNDS, EIGHT_BIT_PRODUCTS, Bound, eight_bit_queries, error_parts, sum_error
from rocm_attn.oracle.reference import attend_paged
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.head_weights import HeadWeights

# The reference works in float64: 4 sequences of 32k tokens and 32 heads take some 0.3 GB.
MOST_SEQS = 4
MOST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LayerOfStep:
    """The data of one layer of a step that the comparison needs.

    q_len, kv_len: of each sequence
    pages_of:      sequence -> int64 [n], the pages of its KV in order, on the pages' device
    window_left:   previous keys that the bounds are computed from: cells before the layer's window may hold NaN or
                   other sequences by now; UNLIMITED_WINDOW if all cells of the pages are the sequence's
    """

    problem: Problem
    pages: LayerPages
    weights: HeadWeights
    q_len: Sequence[int]
    kv_len: Sequence[int]
    pages_of: Callable[[int], Tensor]
    window_left: int
    eight_bit_products: bool

    def wrong_seqs(self, q: Tensor, out: Tensor, seqs: Sequence[int], most_tokens: int = MOST_TOKENS) -> list[int]:
        """Those of seqs whose last new tokens differ from the reference; q, out: of the layer in this step."""
        ends = np.cumsum(self.q_len)
        return [
            seq
            for seq in seqs
            if (new := min(self.q_len[seq], most_tokens)) and not self._is_right(q, out, seq, int(ends[seq]), new)
        ]

    def _is_right(self, q: Tensor, out: Tensor, seq: int, end: int, new: int) -> bool:
        """True if the last `new` tokens of a sequence, whose tokens end at `end`, agree with the reference.

        True for NaN or infinity in q: they are the request's own, and no output of them is wrong.
        """
        return not q[end - new : end].isfinite().all() or any(
            each.allows(out[end - new : end]) for each in self.allowed(q, seq, end, new)
        )

    def allowed(self, q: Tensor, seq: int, end: int, new: int) -> Iterator[AllowedOutputs]:
        """Yields the outputs that are right for the last `new` tokens of a sequence, whose tokens end at `end`."""
        tokens, length = slice(end - new, end), self.kv_len[seq]
        if not length:  # without keys the output is zero
            zeros = q.new_zeros(new, q.shape[1], self.problem.v_head_dim, dtype=torch.float64)
            yield AllowedOutputs(zeros, Bound(0.0, 0.0), 1.0)
            return
        held, pages = self.pages_of(seq), self.pages
        first = 0 if self.window_left == UNLIMITED_WINDOW else max(0, length - new - self.window_left)
        k, v = (side.flatten(0, 1)[first:length] for side in pages.read(held))
        requested = [(q[tokens], BOUNDS[self.problem.dtype].out)]
        if self.eight_bit_products:
            rounded = eight_bit_queries(q[tokens], self.problem.page_format.encoding.dtype)
            requested.append((rounded, EIGHT_BIT_PRODUCTS.out))
        for rows, bound in requested:
            want, _ = attend_paged(rows, pages, [held.tolist()], [length], [new], self.problem, self.weights)
            yield AllowedOutputs.around(want, rows, k, v, self.problem, bound)


@dataclass(frozen=True, slots=True, eq=False)
class AllowedOutputs:
    """Outputs that are close enough to the reference.

    want: float64 [T, q_heads, v_head_dim]
    size: the value in units of which the bound's atol is
    """

    want: Tensor
    bound: Bound
    size: float

    @classmethod
    def around(cls, want: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, bound: Bound) -> AllowedOutputs:
        """Those of bounds that are made for values and scores of standard deviation 1.

        An output is no larger than the values that it averages. A score is no larger than the product of the lengths of
        its query and its key. Kernels that multiply in float32 may change a score by its rounding error, and the shares
        with it, in the numerator and in the denominator.
        """
        size = max(1.0, float(v.abs().amax()))
        longest_q, longest_k = (rows.double().norm(dim=-1).amax() for rows in (q, k))
        score_error = float(sum_error(problem.head_dim, abs(problem.scale) * longest_q * longest_k))
        return cls(want, bound.widened(2 * score_error), size)

    def error(self, out: Tensor) -> float:
        """The largest error of out relative to its bound; inf for NaN."""
        return float(error_parts(out, self.want, self.bound, size=self.size).max())

    def allows(self, out: Tensor) -> bool:
        return self.error(out) <= 1

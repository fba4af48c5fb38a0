"""A runtime whose attention is a kernel of AITER's own, checked against the formula."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.padding import StepKind
from rocm_attn.plan import LayerKernel
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter.rows import ROWS
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.runtime import Step
from rocm_attn.step_batch import StepBatch
from rocm_attn.target import Target, known_target
from tests.amd.aiter_source.dense import dense_attention
from tests.amd.runtime.stepping import Request, World
from tests.amd.tolerances import assert_attention_close

# Logits of planted keys; those of others are at most a hundredth of that.
_PLANTED_LOGIT = 12.0


def selection_of(
    name: str, kinds: Collection[StepKind], problem: Problem, target: Target, pool: PoolSize
) -> Selection:
    """The kernel of this name in steps of these kinds where its rows serve them, and torch's in all others.

    Raises LookupError where a row of it refuses the problem.
    """
    kernels = dict(select(problem, known_target("cpu"), "torch").kernels)
    rows = [row for row in ROWS if row.name == name and row.kind in kinds]
    assert rows, f"no row is called {name}"
    for row in rows:
        refusals = row.refusals(problem, target, pool)
        if refusals:
            raise LookupError(f"{name} refuses {problem}: {'; '.join(refusals)}")
        kernels[row.kind] = LayerKernel(row, row.bind(problem, target, pool))
    return Selection(problem, target, kernels, ())


@dataclass
class SourceWorld(World):
    """A World that compares with the formula instead of the project's oracle.

    planted: for each request, places whose keys dominate every softmax that sees them; None: all keys are random.
    Among many random keys one too few or too many changes an output by less than the rounding does.
    """

    planted: Sequence[frozenset[int]] | None = None
    _is_planted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    def batch(self, requests: Sequence[Request], q_len: Sequence[int]) -> StepBatch:
        if self.planted is not None:
            planted = [self.planted[self.requests.index(request)] for request in requests]
            self._is_planted = torch.tensor(
                [
                    place in places
                    for request, new, places in zip(requests, q_len, planted, strict=True)
                    for place in range(request.kv_len, request.kv_len + new)
                ]
            )
        return super().batch(requests, q_len)

    def qkv(self, problem: Problem, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(problem, step)
        if self.planted is not None:
            num_tokens = len(self._is_planted)
            # One query for all tokens and heads, and planted keys along it.
            q[:num_tokens] = 1.0
            k[:num_tokens] = k[:num_tokens].clamp(-1, 1) * (_PLANTED_LOGIT / 100 / problem.head_dim / problem.scale)
            k[:num_tokens][self._is_planted] = _PLANTED_LOGIT / problem.head_dim / problem.scale
        return q, k, v

    def check(
        self,
        layer: int,
        requests: Sequence[Request],
        q_len: Sequence[int],
        q: Tensor,
        out: Tensor,
        lse: Tensor | None,
        visible: Sequence[Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        problem, weights = self.problems[layer], self.runtime.head_weights.of(layer)
        first = 0
        for request, new in zip(requests, q_len, strict=True):
            rows = slice(first, first + new)
            want = dense_attention(q[rows], request.k[layer], request.v[layer], problem, weights)
            if new:
                self.largest_error = max(self.largest_error, float((out[rows].double() - want).abs().max()))
            assert_attention_close(out[rows], want, problem.dtype)
            first += new
        assert torch.equal(out[first:], torch.zeros_like(out[first:])), "a padded token got something else than zero"

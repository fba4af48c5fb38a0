"""A runtime whose attention is a kernel of AITER's own, checked against the formula."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.attention.limits import MAX_PAGE_SIZE
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import KernelEntry, LayerKernel, PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.step.step import Part
from tests.amd.aiter.eight_bit_world import EightBitWorld
from tests.amd.aiter_source.dense import dense_attention
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import Request

# Distance of planted keys above the others, whose logits differ by a hundredth of that at most.
_PLANTED_LOGIT = 12.0


def selection_of(rows: Collection[KernelEntry], problem: Problem, target: Target, pool: PoolSize) -> Selection:
    """Selects the kernel of these rows for the steps that they serve, and torch's for all others.

    Torch's kernels read pages of any size here, which a runtime without AITER does not offer.
    """
    cpu = known_target("cpu")
    of_torch = select(replace(problem, page_size=min(problem.page_size, MAX_PAGE_SIZE)), cpu, "torch").kernels
    kernels = {kind: LayerKernel(each.entry, each.entry.bind(problem, cpu, pool)) for kind, each in of_torch.items()}
    kernels.update({row.kind: LayerKernel(row, row.bind(problem, target, pool)) for row in rows})
    return Selection(problem, target, kernels, ())


@dataclass
class SourceWorld(EightBitWorld):
    """A World that compares with the formula instead of the project's reference.

    planted:  for each request, places whose keys dominate every softmax that sees them; None: all keys are random.
              Among many random keys one too few or too many changes an output by less than the rounding does.
    far_logit: approximate logits of all other keys, if some are planted
    attended: number of steps in which AITER's kernel attended; the largest error is of these
    """

    planted: Sequence[frozenset[int]] | None = None
    far_logit: float = 0.0
    attended: int = 0
    _is_aiters: bool = False
    _is_planted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    def batch(self, requests: Sequence[Request], q_len: Sequence[int], *, reserve: bool = True) -> StepBatch:
        if self.planted is not None:
            planted = [self.planted[self.requests.index(request)] for request in requests]
            self._is_planted = torch.tensor(
                [
                    place in places
                    for request, new, places in zip(requests, q_len, planted, strict=True)
                    for place in range(request.kv_len, request.kv_len + new)
                ]
            )
        return super().batch(requests, q_len, reserve=reserve)

    def _lse_rows(self, layer: int, step: Part, q: Tensor) -> Tensor | None:
        self._is_aiters = step.plan.kernels[0].entry.provider == "aiter"
        self.attended += self._is_aiters
        return super()._lse_rows(layer, step, q)

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.planted is not None:
            num_tokens = len(self._is_planted)
            # One query for all tokens and heads, and keys in its direction.
            q[:num_tokens] = 1.0
            logits = self.far_logit + _PLANTED_LOGIT * (
                self._is_planted + k[:num_tokens, 0, 0].clamp(-1, 1).float() / 100
            )
            k[:num_tokens] = (logits / problem.head_dim / problem.scale).to(k.dtype)[:, None, None]
        return super()._held(problem, q, k, v)

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
            if new and self._is_aiters:
                self.largest_error = max(self.largest_error, float((out[rows].double() - want).abs().max()))
            assert_attention_close(out[rows], want, problem.dtype)
            first += new
        assert torch.equal(out[first:], torch.zeros_like(out[first:])), "a padded token got something else than zero"

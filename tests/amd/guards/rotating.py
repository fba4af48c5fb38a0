"""Serving with calls that normalise and rotate rows before attention, and gate and rotate back its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.cache.row_work import QkvWork, RopePairs
from rocm_attn.problem import Problem
from rocm_attn.step.step import Part
from tests.amd.guards.serving import Serving
from tests.amd.kernels.rope_cases import normalised, random_norm, random_rope, turned
from tests.amd.runtime.stepping import Request, small_problem

MAX_KV_LEN = 64
LAYER = small_problem(v_head_dim=24)


class Rotating(Serving):
    """A layer with normalised and partly rotated q and k, normalised V, and a gated output.

    problem: with rows of 16 and 24 elements; max_kv_len: at most MAX_KV_LEN
    """

    def __init__(
        self, device: torch.device, *, problem: Problem = LAYER, max_kv_len: int = MAX_KV_LEN, **more: Any
    ) -> None:
        super().__init__(device, problem=problem, max_kv_len=max_kv_len, **more)
        device = self.runtime.device
        rope = random_rope(8, MAX_KV_LEN, RopePairs.NEIGHBOURS, at_end=True, device=device)
        norms = [random_norm(dim, 1.0, torch.float32, device) for dim in (16, 16, 24)]
        self.work = QkvWork(rope, *norms)
        self.undo = random_rope(16, MAX_KV_LEN, RopePairs.HALVES, at_end=True, device=device)
        self.gate = torch.randn(self.out.shape[:2], generator=torch.Generator().manual_seed(1)).to(device)
        self.q_out, self.finished = torch.full_like(self.q, float("nan")), torch.full_like(self.out, float("nan"))

    def run_batch(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        batch: StepBatch,
        pad_to: int | None = None,
        *,
        halves: bool = False,
    ) -> None:
        """Like Serving's, but the world's stored rows, and q, become the inputs that attention should have got."""
        super().run_batch(requests, q_len, batch, pad_to, halves=halves)
        positions = [torch.arange(one.kv_len - new, one.kv_len) for one, new in zip(requests, q_len, strict=True)]
        for request, where in zip(requests, positions, strict=True):
            where = where.to(self.runtime.device)
            k, v = request.k[0][where], request.v[0][where]
            request.k[0][where] = turned(normalised(k, self.work.k_norm), where, self.work.rope).float()
            request.v[0][where] = normalised(v, self.work.v_norm).float()
        real = torch.from_numpy(self.places[: sum(q_len)]).to(self.runtime.device)
        self._positions = torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(self.runtime.device)
        self.q[real] = turned(normalised(self.q[real], self.work.q_norm), self._positions, self.work.rope).float()

    def check(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Like Serving's, but for outputs that are gated and rotated back; padded ones are zero."""
        super().check(requests, q_len)
        used = torch.from_numpy(self.places).to(self.runtime.device)
        real, pads = used[: sum(q_len)], used[sum(q_len) :]
        want = turned(self.out[real].double(), self._positions, self.undo, back=True)
        want = want * self.gate[real].double().sigmoid()[..., None]
        torch.testing.assert_close(self.finished[real], want.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.q_out[real], self.q[real], rtol=1e-4, atol=1e-5)
        assert not self.finished[pads].any()

    def _forward(self, step: Part) -> Tensor:
        used = step.tokens
        q, k, v, q_out = (side[used] for side in (self.q, self.k, self.v, self.q_out))
        step.layers.rope_and_store(0, q, k, v, q_out, self.work)
        step.layers.attend(0, q_out, self.out[used], self.lse[used])
        again = torch.empty_like(q_out)
        step.layers.rope_queries(0, q, again, self.work)
        self.finished[used].copy_(self.out[used])
        step.layers.finish(0, self.finished[used], gate=self.gate[used], undo=self.undo)
        return (self.finished[used] + 0 * again[..., :1])[step.last_token_of_seq.long()]

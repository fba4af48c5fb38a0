"""A world whose calls normalise and rotate rows before attention, and gate and rotate back its output."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.cache.row_work import QkvWork, RopePairs
from rocm_attn.step.step import Part
from tests.amd.kernels.rope_cases import normalised, random_norm, random_rope, turned
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import NAN, Request, World

MAX_KV_LEN = 64
LAYER = small_problem(v_head_dim=24)


@dataclass
class Rotating(World):
    """One layer with normalised and partly rotated q and k of 16 elements, normalised V of 24, and a gated output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.runtime.device
        rope = random_rope(8, MAX_KV_LEN, RopePairs.NEIGHBOURS, at_end=True, device=device)
        self.work = QkvWork(rope, *(random_norm(dim, 1.0, torch.float32, device) for dim in (16, 16, 24)))
        self.undo = random_rope(16, MAX_KV_LEN, RopePairs.HALVES, at_end=True, device=device)
        self.gate = torch.randn(self.rows[0].out.shape[:2], generator=torch.Generator().manual_seed(1)).to(device)
        self.q_out, self.finished = torch.full_like(self.rows[0].q, NAN), torch.full_like(self.rows[0].out, NAN)

    def run_batch(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        batch: StepBatch,
        pad_to: int | PadTo | None = None,
        *,
        halves: bool = False,
    ) -> None:
        """The requests' stored rows, and q, become the inputs that attention should have got."""
        super().run_batch(requests, q_len, batch, pad_to, halves=halves)
        positions = [torch.arange(one.kv_len - new, one.kv_len) for one, new in zip(requests, q_len, strict=True)]
        for request, where in zip(requests, positions, strict=True):
            where = where.to(self.runtime.device)
            k, v = request.k[0][where], request.v[0][where]
            request.k[0][where] = turned(normalised(k, self.work.k_norm), where, self.work.rope).float()
            request.v[0][where] = normalised(v, self.work.v_norm).float()
        real = torch.from_numpy(self.places[: sum(q_len)]).to(self.runtime.device)
        self._positions = torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(self.runtime.device)
        self.rows[0].q[real] = turned(
            normalised(self.rows[0].q[real], self.work.q_norm), self._positions, self.work.rope
        ).float()

    def check_step(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Outputs are gated and rotated back, too; padded ones are zero."""
        super().check_step(requests, q_len)
        used = torch.from_numpy(self.places).to(self.runtime.device)
        real, pads = used[: sum(q_len)], used[sum(q_len) :]
        want = turned(self.rows[0].out[real].double(), self._positions, self.undo, back=True)
        want = want * self.gate[real].double().sigmoid()[..., None]
        torch.testing.assert_close(self.finished[real], want.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.q_out[real], self.rows[0].q[real], rtol=1e-4, atol=1e-5)
        assert not self.finished[pads].any()

    def forward(self, step: Part) -> Tensor:
        used, rows, layers = step.tokens, self.rows[0], step.layers
        q, q_out = rows.q[used], self.q_out[used]
        layers.rope_and_store(0, q, rows.k[used], rows.v[used], q_out, self.work)
        layers.attend(0, q_out, rows.out[used], rows.lse[used])
        again = torch.empty_like(q_out)
        layers.rope_queries(0, q, again, self.work)
        finished = self.finished[used]
        finished.copy_(rows.out[used])
        layers.finish(0, finished, gate=self.gate[used], undo=self.undo)
        return (finished + 0 * again[..., :1])[step.last_token_of_seq.long()]

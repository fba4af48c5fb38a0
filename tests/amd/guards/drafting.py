"""One layer of attention that runs rounds of drafts, eagerly or as graphs, with or without a guard."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import HOST_INPUTS, Inputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part, Series
from tests.amd.guards.serving import ALL_ON
from tests.amd.runtime.drafting import visible_drafts
from tests.amd.runtime.stepping import Request, World, small_problem, take_back


def _no_step(step: Part) -> Tensor:
    raise AssertionError("rounds alone are run")


class Drafting:
    """Requests with prompts, and rounds of drafts after them with random K, V and q.

    q, k, v, out: of the last round, [draft steps][most tokens, heads, dim]
    parents:      of the last round, int32 [draft steps, most sequences, branches] on the device
    """

    def __init__(
        self,
        device: torch.device,
        guards: Guards = ALL_ON,
        *,
        drafts: Drafts,
        graphs: bool,
        provider: str = "torch",
        page_size: int = 4,
        max_num_seqs: int = 5,
        num_pages: int = 64,
        max_kv_len: int = 64,
        capture_sizes: Sequence[int] = (8,),
        split_steps: bool = False,
    ) -> None:
        self.drafts = drafts
        self.problem = problem = small_problem(page_size, custom_mask=drafts.branches > 1)
        self.runtime = runtime = build_runtime(
            [problem],
            RuntimeOptions(
                num_pages=num_pages,
                max_num_seqs=max_num_seqs,
                max_kv_len=max_kv_len,
                provider=provider,
                capture_sizes=capture_sizes,
                split_steps=split_steps,
                drafts=(drafts,),
            ),
            device=device,
            guards=guards,
        )
        self.world = World(runtime, [problem], torch.Generator().manual_seed(0))
        self._draw = random.Random(0)
        most = max(capture_sizes)

        def rows(heads: int, dim: int) -> list[Tensor]:
            shape = most * drafts.branches, heads, dim
            return [torch.full(shape, float("nan"), dtype=problem.dtype, device=device) for _ in range(drafts.steps)]

        self.q, self.out = (rows(problem.num_q_heads, problem.head_dim) for _ in range(2))
        self.k, self.v = (rows(problem.num_kv_heads, problem.head_dim) for _ in range(2))
        self.parents = torch.zeros(drafts.steps, most, drafts.branches, dtype=torch.int32, device=device)
        recorder = recorder_for(runtime.device) if graphs else None
        # Unchecked, as in Serving: these tests examine the results of wrong graphs.
        self.runner = StepRunner(runtime, _no_step, recorder, draft=self._draft_steps, check=NO_CHECK)
        self._prefix: list[int] = []

    def admit(self, lengths: Sequence[int]) -> list[Request]:
        """Returns fresh requests with prompts of these lengths."""
        requests = [self.world.admit() for _ in lengths]
        for request, length in zip(requests, lengths, strict=True):
            step = self.runtime.step(self.world.batch([request], [length])).parts[0]
            q, k, v = self.world.qkv(self.problem, step)
            step.layers.store_and_attend(0, q, k, v, torch.empty_like(q))
            self.world.remember(0, [request], [length], k, v)
            self.runtime.end_step()
        return requests

    def free(self, *requests: Request) -> None:
        """Frees rows and pages."""
        for request in requests:
            self.world.free(request)

    def batch(self, requests: Sequence[Request], inputs: Inputs = HOST_INPUTS) -> StepBatch:
        """Returns a round of drafts for which nothing is reserved."""
        rows = np.array([request.row for request in requests], np.int32)
        return draft_batch(rows, [request.kv_len for request in requests], self.drafts, NO_TOKEN_IDS, inputs=inputs)

    def run(self, requests: Sequence[Request], pad_to: int | None = None, *, halves: bool = False) -> None:
        """Runs a round after the requests' tokens, after reserving pages."""
        for request in requests:
            self.runtime.table.reserve(request.row, request.kv_len + self.drafts.tokens)
        self.run_batch(requests, self.batch(requests), pad_to, halves=halves)

    def run_batch(
        self, requests: Sequence[Request], batch: StepBatch, pad_to: int | None = None, *, halves: bool = False
    ) -> None:
        """Runs the round of a batch."""
        num_fed = len(requests) * self.drafts.branches
        for step in range(self.drafts.steps):
            for rows, pad in ((self.q, 0.0), (self.k, float("nan")), (self.v, float("nan"))):
                rows[step].fill_(pad)
                rows[step][:num_fed] = self.world.random(num_fed, *rows[step].shape[1:])
            self.out[step].fill_(float("nan"))
        drawn = [
            [[self._draw.randrange(self.drafts.branches) for _ in branches] for branches in step]
            for step in self.parents
        ]
        self.parents.copy_(torch.tensor(drawn, dtype=torch.int32))
        run = partial(self.runner.run, halves=2) if halves else self.runner.run
        run(batch, None if pad_to is None else PadTo(pad_to))

    def is_right(self, requests: Sequence[Request]) -> bool:
        """True if the last round, of these requests, equals the reference."""
        try:
            self.check(requests)
        except AssertionError:
            return False
        return True

    def check(self, requests: Sequence[Request]) -> None:
        """Checks that every draft of the last round saw its prefix, its ancestors and itself."""
        branches = self.drafts.branches
        q_len, num_fed = [branches] * len(requests), branches * len(requests)
        prefix = [request.kv_len for request in requests]
        parents = self.parents.tolist()
        try:
            for step in range(self.drafts.steps):
                self.world.remember(0, requests, q_len, self.k[step][:num_fed], self.v[step][:num_fed])
                visible = [
                    visible_drafts(p, step, branches, parents, seq, UNLIMITED_WINDOW) for seq, p in enumerate(prefix)
                ]
                positions = [p + step for p in prefix for _ in range(branches)]
                at = torch.tensor(positions, dtype=torch.int32, device=self.runtime.device)
                q, out = self.q[step][:num_fed], self.out[step][:num_fed]
                self.world.check(0, requests, q_len, q, out, None, visible, at)
        finally:
            for request, length in zip(requests, prefix, strict=True):
                take_back(request, request.kv_len - length)

    def _draft_steps(self, drafts: Series) -> Tensor:
        """Runs each draft step on its part of the tensors. The second half's sequences follow the first one's pads."""
        for number, step in enumerate(drafts):
            at = step.tokens
            num_seqs = step.row_of_seq.shape[0]
            if number:
                seqs = slice(step.half * num_seqs, (step.half + 1) * num_seqs)
                step.set_parents(self.parents[number, seqs])
            step.layers.store_and_attend(
                0, self.q[number][at], self.k[number][at], self.v[number][at], self.out[number][at]
            )
        return self.out[-1][at][: drafts[0].row_of_seq.shape[0]]

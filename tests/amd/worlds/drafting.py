"""A world that also runs rounds of drafts, each of which is compared with the reference."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.split_forward import DraftForward
from rocm_attn.guards.registry import Guards
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.step.step import Series
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON, Request, Rows, World, passes, poison_free_pages, take_back


@dataclass
class DraftWorld(World):
    """A world with rounds of drafts of random rows and parents.

    drafts:  of the last round
    rounds:  its rows, by draft step and layer
    parents: int32 [draft steps, most sequences, branches] on the device
    """

    def __post_init__(self) -> None:
        self.rounds: list[list[Rows]] = []
        self.drafts = Drafts(1, 1)
        self.parents, self._parent_draw = torch.zeros(0), random.Random(0)
        super().__post_init__()

    def prompted(self, lengths: Sequence[int]) -> list[Request]:
        requests = self.admit_all(len(lengths))
        for request, length in zip(requests, lengths, strict=True):
            with self.runtime.step(self.batch([request], [length])) as step:
                q, k, v = self.qkv(self.problems[0], step.parts[0])
                step.parts[0].layers.store_and_attend(0, q, k, v, torch.empty_like(q))
            self.remember(0, [request], [length], k, v)
        return requests

    def _drafts(self) -> DraftForward[Tensor] | None:
        return self._draft_steps

    def round_batch(self, requests: Sequence[Request], drafts: Drafts, *, reserve: bool = True) -> StepBatch:
        if reserve:
            for request in requests:
                self.runtime.table.reserve(request.row, request.kv_len + drafts.tokens)
        rows, prefix = ([getattr(request, name) for request in requests] for name in ("row", "kv_len"))
        return draft_batch(np.array(rows, np.int32), np.array(prefix, np.int32), drafts, NO_TOKEN_IDS)

    def step_round(self, requests: Sequence[Request], drafts: Drafts, *, halves: bool = False) -> None:
        """Runs a round of random drafts and checks it; then all drafts are rejected."""
        self.run_round(requests, self.round_batch(requests, drafts), halves=halves)
        self.check_round(requests)

    def run_round(self, requests: Sequence[Request], batch: StepBatch | None = None, *, halves: bool = False) -> None:
        """Runs the round of a batch, or one of `drafts`, with random rows and parents."""
        batch = self.round_batch(requests, self.drafts) if batch is None else batch
        drafts = batch.drafts
        assert isinstance(drafts, Drafts)
        shape = self.runtime.plan(batch, halves=1 + halves).shape
        first_seqs, cut = shape.num_seqs // shape.num_halves, -(-len(requests) // shape.num_halves)
        seqs = [seq if seq < cut else first_seqs + seq - cut for seq in range(len(requests))]
        if not self.rounds or not self.graphs:
            most = self.max_tokens // drafts.branches if self.graphs else shape.num_seqs
            self.rounds = [
                [Rows.of(problem, most * drafts.branches, self.runtime.device) for problem in self.problems]
                for _ in range(drafts.steps)
            ]
            self.parents = self.parents.new_zeros(drafts.steps, most, drafts.branches).int().to(self.runtime.device)
        self.drafts, self._seqs = drafts, seqs
        self.places = np.array([seq * drafts.branches + b for seq in seqs for b in range(drafts.branches)], np.int64)
        for rows in self.rounds:
            self._draw(rows, torch.from_numpy(self.places).to(self.runtime.device))
        drawn = [self._parent_draw.randrange(drafts.branches) for _ in range(self.parents.numel())]
        self.parents.copy_(torch.tensor(drawn, dtype=torch.int32).view_as(self.parents))
        self.runner.run(batch, halves=1 + halves)

    def round_is_right(self, requests: Sequence[Request]) -> bool:
        """True if check_round passes."""
        return passes(partial(self.check_round, requests))

    def check_round(self, requests: Sequence[Request]) -> None:
        """Checks that every draft of the last round saw its prefix, its ancestors and itself."""
        branches, prefix = self.drafts.branches, [request.kv_len for request in requests]
        q_len = [branches] * len(requests)
        parents = self.parents[:, self._seqs].tolist()
        real = torch.from_numpy(self.places).to(self.runtime.device)
        try:
            for number, of_layers in enumerate(self.rounds):
                self._remember(of_layers, requests, q_len, real)
                positions = torch.tensor([p + number for p in prefix for _ in range(branches)], dtype=torch.int32)
                for layer, rows in enumerate(of_layers):
                    window = self.problems[layer].window_left
                    visible = [
                        visible_drafts(p, number, branches, parents, seq, window) for seq, p in enumerate(prefix)
                    ]
                    lse = rows.lse[real] if self._gives_lse[layer] else None
                    at = positions.to(self.runtime.device)
                    self.check(layer, requests, q_len, rows.q[real], rows.out[real], lse, visible, at)
        finally:
            for request, length in zip(requests, prefix, strict=True):
                take_back(request, request.kv_len - length)

    def _draft_steps(self, drafts: Series) -> Tensor:
        """Runs each draft step on its part of the rows. The second half's sequences follow the first one's pads."""
        num_seqs = drafts[0].row_of_seq.shape[0]
        for number, step in enumerate(drafts):
            if number:
                step.set_parents(self.parents[number, step.half * num_seqs : (step.half + 1) * num_seqs])
            if self.poisons and not self.graphs:
                poison_free_pages(self.runtime)
            self._attend(step, self.rounds[number])
        return self.rounds[-1][0].out[step.tokens][:num_seqs]


def visible_drafts(
    prefix: int, number: int, branches: int, parents: list[list[list[int]]], seq: int, window_left: int
) -> Tensor:
    """bool [branches, tokens so far]: the prefix, and each draft's own line up to itself; a window counts depths."""
    visible = torch.zeros(branches, prefix + (number + 1) * branches, dtype=torch.bool)
    last = prefix + number
    first = 0 if window_left == UNLIMITED_WINDOW else max(0, last - window_left)  # depths that the window holds
    visible[:, first:prefix] = True
    for branch in range(branches):
        at = branch
        for step in range(number, -1, -1):
            visible[branch, prefix + step * branches + at] = prefix + step >= first
            at = parents[step][seq][at]
    return visible


def drafting(
    device: torch.device,
    guards: Guards = ALL_ON,
    *,
    drafts: Drafts,
    graphs: bool,
    provider: str = "torch",
    page_size: int = 4,
    **more: Any,
) -> DraftWorld:
    """Returns a world of one layer with rounds of these drafts, whose guards a test switches off."""
    given = {"max_num_seqs": 5, "capture_sizes": (8,), **more}
    problem = small_problem(page_size, custom_mask=drafts.branches > 1)
    sizes = {"max_tokens": max(given["capture_sizes"]) * drafts.branches, "poisons": False, "pad_q": 0.0}
    world = DraftWorld.build(
        [problem], device, provider, guards=guards, graphs=graphs, drafts=(drafts,), **{**sizes, **given}
    )
    world.drafts = drafts
    return world

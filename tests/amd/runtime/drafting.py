"""Rounds of drafts in a World: each draft step has random q, k and v, and is checked against the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.step.step import Series
from tests.amd.runtime.stepping import Request, World, poison_free_pages, take_back


@dataclass
class Round:
    """The inputs of a round of drafts.

    parents: [draft step][sequence][branch] -> branch of the step before; nothing for the first step
    room:    tokens by which the host's bounds exceed the lengths, which the device then knows; None: the host knows
    halves:  true if it runs as two halves
    """

    drafts: Drafts
    parents: list[list[list[int]]]
    room: list[int] | None = None
    pad_to: int | None = None
    halves: bool = False

    @classmethod
    def drawn(cls, drafts: Drafts, num_seqs: int, seed: int) -> Round:
        """Returns a round with random parents."""
        draw = random.Random(seed)
        branches = range(drafts.branches)
        parents = [[[draw.choice(branches) for _ in branches] for _ in range(num_seqs)] for _ in range(drafts.steps)]
        return cls(drafts, parents)


def begin_round(world: World, requests: Sequence[Request], round_: Round) -> StepBatch:
    """Returns the batch of a round; pages are reserved for all drafts."""
    drafts, table = round_.drafts, world.runtime.table
    room = round_.room or [0] * len(requests)
    bounds = [request.kv_len + more for request, more in zip(requests, room, strict=True)]
    for request, bound in zip(requests, bounds, strict=True):
        table.reserve(request.row, bound + drafts.tokens)
    rows = np.array([request.row for request in requests], np.int32)
    if round_.room is None:
        return draft_batch(rows, np.array(bounds, np.int32), drafts, NO_TOKEN_IDS)
    prefix = torch.tensor([r.kv_len for r in requests], dtype=torch.int32, device=world.runtime.device)
    inputs = DeviceInputs(kv_len=prefix, ahead=drafts.tokens)
    return draft_batch(rows, np.array(bounds, np.int32), drafts, NO_TOKEN_IDS, inputs=inputs)


def run_round(world: World, requests: Sequence[Request], round_: Round) -> None:
    """Runs a round of drafts in every layer and checks each output; then all drafts are rejected."""
    batch = begin_round(world, requests, round_)
    pad_to = None if round_.pad_to is None else PadTo(round_.pad_to)
    runtime = world.runtime
    try:
        if round_.halves:
            halves = runtime.step(batch, runtime.plan(batch, pad_to, halves=2)).halves
            cut = halves[0][0].num_seqs
        else:
            cut, halves = len(requests), runtime.step(batch, runtime.plan(batch, pad_to)).halves
        poison_free_pages(runtime)
        of_halves = [requests[:cut], requests[cut:]]
        for step in range(round_.drafts.steps):
            for half, drafts in enumerate(halves):
                of_half = slice(0, cut) if half == 0 else slice(cut, None)
                _run_step(world, of_halves[half], drafts, step, [p[of_half] for p in round_.parents])
    finally:
        runtime.end_step()
    for request in requests:
        take_back(request, round_.drafts.tokens)


def _run_step(
    world: World, requests: Sequence[Request], drafts: Series, number: int, parents: list[list[list[int]]]
) -> None:
    step, branches = drafts[number], drafts[0].branches
    num_padded = step.row_of_seq.shape[0]
    if number:
        given = torch.zeros(num_padded, branches, dtype=torch.int32, device=world.runtime.device)
        given[: len(requests)] = torch.tensor(parents[number], dtype=torch.int32).view(len(requests), branches)
        step.set_parents(given)
    q_len = [branches] * len(requests)
    prefix = [request.kv_len - number * branches for request in requests]
    positions = torch.tensor([p + number for p in prefix for _ in range(branches)], dtype=torch.int32)
    assert step.positions[: len(positions)].tolist() == positions.tolist()
    assert step.token_ids.any() == 0
    for layer, problem in enumerate(world.problems):
        q, k, v = world.qkv(problem, step)
        world.remember(layer, requests, q_len, k, v)
        out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
        lse = world.lse_rows(layer, step, q)
        step.layers.store_and_attend(layer, q, k, v, out, lse)
        window = problem.window_left
        visible = [visible_drafts(p, number, branches, parents, seq, window) for seq, p in enumerate(prefix)]
        world.check(layer, requests, q_len, q, out, lse, visible, positions.to(q.device))


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

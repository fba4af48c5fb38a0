"""A model of attention layers, and of recurrent ones: what a token asks and stores is looked up by its id and position.

Everything that a layer gives, and what the step says of its tokens, is also written to fixed memory, pads included:
the tester looks at every row of it after the step, whether it ran eagerly or as a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.problem import PoolKind, Problem
from rocm_attn.recurrence import Recurrence
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.step import Part
from rocm_lab.soak.oracle import Layer, OracleLayer
from rocm_lab.soak.recurrences import RecurrentRows

VOCABULARY = 12  # ids 1 up to, but not including, this one are tokens; graphs are checked on them
NOT_FINITE_ID = VOCABULARY  # its V holds an infinity and a NaN
PLACES = 5  # positions that differ by a multiple of this look the same
MAX_TOKENS = 512


def looked_up(token_id: int, position: int) -> int:
    """The entry of the tables that a token with this id and position takes."""
    return token_id * PLACES + position % PLACES


@dataclass(frozen=True, slots=True)
class LayerTables:
    """One layer's tables [entries, heads, dim] in its dtype, and where it writes what it gives.

    out: [MAX_TOKENS, q_heads, v_head_dim]; lse: float32 [MAX_TOKENS, q_heads]
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def random(cls, problem: Problem, generator: torch.Generator, device: torch.device) -> LayerTables:
        """Tables whose entries of id 0, a pad's, are NaN, and whose V of NOT_FINITE_ID is not finite."""
        entries = (VOCABULARY + 1) * PLACES

        def draw(heads: int, dim: int) -> Tensor:
            table = torch.randn(entries, heads, dim, generator=generator).to(problem.dtype)
            table[:PLACES] = float("nan")
            return table

        q, k = draw(problem.num_q_heads, problem.head_dim), draw(problem.num_kv_heads, problem.head_dim)
        v = draw(problem.num_kv_heads, problem.v_head_dim)
        if problem.pool is PoolKind.LATENT:
            v = k[..., : problem.v_head_dim]
        v[NOT_FINITE_ID * PLACES :, 0, 0] = float("inf")
        v[NOT_FINITE_ID * PLACES :, -1, -1] = float("nan")
        k = k.to(device)
        v = k[..., : problem.v_head_dim] if problem.pool is PoolKind.LATENT else v.to(device)
        out = torch.zeros(MAX_TOKENS, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype, device=device)
        lse = torch.zeros(MAX_TOKENS, problem.num_q_heads, device=device)
        return cls(problem, q.to(device), k, v, out, lse)

    @property
    def wants_lse(self) -> bool:
        """True if the layer gives the LSE too."""
        return self.problem.wants_lse

    def of(self, entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of tokens that take these entries."""
        k = self.k[entry]
        v = k[..., : self.problem.v_head_dim] if self.problem.pool is PoolKind.LATENT else self.v[entry]
        return self.q[entry], k, v

    def room(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """out and lse for these queries, not yet written."""
        out = torch.empty(q.shape[0], *self.out.shape[1:], dtype=q.dtype, device=q.device)
        return out, torch.empty(q.shape[0], self.lse.shape[1], device=q.device) if self.problem.wants_lse else None

    def keep(self, step: Part, out: Tensor, lse: Tensor | None) -> Tensor:
        """Keep what a step gave; float32 [S, ...] of it, each sequence's last token."""
        self.out[step.tokens] = out
        if lse is not None:
            self.lse[step.tokens] = lse
        return out[step.last_token_of_seq.long()].flatten(1).float()

    def for_oracle(self, weights: HeadWeights) -> Layer:
        """The layer as the oracle knows it."""
        problem = self.problem
        heads = np.zeros(problem.num_q_heads)
        return Layer(
            queries=self.q.double().cpu().numpy(),
            keys=self.k.double().cpu().numpy(),
            values=self.v.double().cpu().numpy(),
            scale=problem.scale,
            window_left=problem.window_left,
            window_right=problem.window_right,
            cap=problem.logits_soft_cap,
            takes_masks=problem.custom_mask,
            sinks=heads - np.inf if weights.sinks is None else weights.sinks.double().cpu().numpy(),
            slopes=heads if weights.alibi_slopes is None else weights.alibi_slopes.double().cpu().numpy(),
            rounding=torch.finfo(problem.dtype).eps / 2,
        )


class HalfWay(Exception):
    """A forward was to raise half way."""


class Model:
    """Layers over one another's heads: none reads another's output.

    layers:    those that attend; recurrent: those that keep a state
    breaks_before: the recurrent layer before which forward() raises HalfWay; -1: none
    token_ids, positions, last_token_of_seq: int32 [MAX_TOKENS], as the step gave them
    """

    def __init__(
        self, problems: list[Problem], seed: int, device: torch.device, recurrent: Sequence[Recurrence] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = [LayerTables.random(problem, generator, device) for problem in problems]
        self.breaks_before = -1
        entries = (VOCABULARY + 1) * PLACES
        drawn = [RecurrentRows.random(form, entries, PLACES, MAX_TOKENS, generator) for form in recurrent]
        for each in drawn:
            each.x[NOT_FINITE_ID * PLACES :, -1] = float("inf")
        self.recurrent = [each.to(device) for each in drawn]
        self.token_ids, self.positions, self.last_token_of_seq = torch.zeros(
            3, MAX_TOKENS, dtype=torch.int32, device=device
        )

    @property
    def outputs(self) -> list[LayerTables | RecurrentRows]:
        """All layers, in the order of what a forward returns."""
        return [*self.layers, *self.recurrent]

    def renew_weights(self, rng: random.Random, take: Callable[[int, HeadWeights], None]) -> list[OracleLayer]:
        """Gives every layer that has sinks or slopes new ones, others none. Returns the layers for the oracle."""
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        layers: list[OracleLayer] = []
        for number, layer in enumerate(self.layers):
            weights = HeadWeights.random(layer.problem, generator)
            take(number, weights.to(layer.q.device))
            layers.append(layer.for_oracle(weights))
        return [*layers, *(each.for_oracle() for each in self.recurrent)]

    def forget(self) -> None:
        """Put what no step writes in the place of everything that was written."""
        for layer in self.layers:
            layer.out.fill_(float("nan"))
            layer.lse.fill_(float("nan"))
        for each in self.recurrent:
            each.out.fill_(float("nan"))
        for tensor in (self.token_ids, self.positions, self.last_token_of_seq):
            tensor.fill_(-9)

    def forward(self, step: Part) -> Tensor:
        """float32 [S, everything that the last token of a sequence gets]."""
        entry = self.begin(step)
        rows = []
        for number, layer in enumerate(self.layers):
            q, k, v = layer.of(entry)
            out, lse = layer.room(q)
            step.layers.store_and_attend(number, q, k, v, out, lse)
            rows.append(layer.keep(step, out, lse))
        return torch.cat([*rows, *self.recur(step, entry)], 1)

    def recur(self, step: Part, entry: Tensor) -> list[Tensor]:
        """Runs the recurrent layers. Returns their rows, float32 [S, ...] each: those of each sequence's last token."""
        rows = []
        for number, each in enumerate(self.recurrent):
            if number == self.breaks_before:
                raise HalfWay
            rows.append(each.run(step, number, entry))
        return rows

    def forward_apart(self, steps: list[Part]) -> list[Tensor]:
        """The same for steps that run at once: layer by layer in turn, and every layer stores before it attends."""
        entries = [self.begin(step) for step in steps]
        rows: list[list[Tensor]] = [[] for _ in steps]
        for number, layer in enumerate(self.layers):
            for step, entry in zip(steps, entries, strict=True):
                _, k, v = layer.of(entry)
                step.layers.store(number, k, v)
            for step, entry, kept in zip(steps, entries, rows, strict=True):
                q, _, _ = layer.of(entry)
                out, lse = layer.room(q)
                step.layers.attend(number, q, out, lse)
                kept.append(layer.keep(step, out, lse))
        for number, each in enumerate(self.recurrent):
            for step, entry, kept in zip(steps, entries, rows, strict=True):
                kept.append(each.run(step, number, entry))
        return [torch.cat(kept, 1) for kept in rows]

    def begin(self, step: Part) -> Tensor:
        """Note what the step says of its tokens; the entry that each takes."""
        num_seqs = step.last_token_of_seq.shape[0]
        self.token_ids[step.tokens] = step.token_ids
        self.positions[step.tokens] = step.positions
        self.last_token_of_seq[step.half * num_seqs : (step.half + 1) * num_seqs] = step.last_token_of_seq
        return self.entries(step)

    def entries(self, step: Part) -> Tensor:
        """Returns the entry that each token of a step looks up, int64 [T]."""
        return step.token_ids.long() * PLACES + step.positions.remainder(PLACES)

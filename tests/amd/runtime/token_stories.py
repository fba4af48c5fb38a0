"""Stories: sequences whose q, k and v are fixed token by token, served in many ways, to compare the results' bits.

A story is served in chunks. The results of its tokens are kept, for any place in a step and any other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.padding import token_places
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards
from rocm_attn.machine.target import Target
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.worlds.world import padded_to

ALL_ON = Guards()


@dataclass(frozen=True, slots=True)
class Story:
    """Tokens of a sequence: q [n, q_heads, dim], k and v [n, kv_heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, problem: Problem, num_tokens: int, seed: int) -> Story:
        """Returns tokens that depend on the seed alone."""
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int, dim: int) -> Tensor:
            return torch.randn(num_tokens, heads, dim, generator=generator).to(problem.dtype)

        kv_heads = problem.num_kv_heads
        return cls(
            rows(problem.num_q_heads, problem.head_dim),
            rows(kv_heads, problem.head_dim),
            rows(kv_heads, problem.v_head_dim),
        )


@dataclass(slots=True, eq=False)
class Told:
    """A story while it is served: its row of the table, the number of tokens served so far, and their results."""

    story: Story
    row: int
    out: Tensor
    lse: Tensor
    num_reported: int = 0

    @property
    def bits(self) -> tuple[Tensor, Tensor]:
        """out and lse of the tokens served so far."""
        return self.out[: self.num_reported], self.lse[: self.num_reported]


class Teller:
    """A deterministic runtime of one layer that serves stories; pages and pads are NaN until they are written."""

    def __init__(
        self,
        device: torch.device,
        provider: str,
        problem: Problem,
        *,
        graphs: bool = False,
        guards: Guards = ALL_ON,
        max_tokens: int = 512,
        target: Target | None = None,
        **options: Any,
    ) -> None:
        """options: of the runtime"""
        self.problem = problem
        given: dict[str, Any] = {"num_pages": 1500, "max_kv_len": 512, "deterministic": True, **options}
        given.setdefault("capture_tokens", (16, 64, 512))
        made = RuntimeOptions(provider=provider, max_num_seqs=6, capture_sizes=(1, 4, 8), split_steps=True, **given)
        self.runtime = build_runtime([problem], made, device=device, target=target, guards=guards)
        pages = self.runtime.pool.layer(0)
        pages.k[1:] = pages.v[1:] = float("nan")
        self.weights = HeadWeights.random(problem, torch.Generator().manual_seed(1)).to(self.runtime.device)
        self.runtime.head_weights.set(0, self.weights)

        def rows(heads: int, dim: int) -> Tensor:
            return torch.full((max_tokens, heads, dim), float("nan"), dtype=problem.dtype, device=self.runtime.device)

        self._q = rows(problem.num_q_heads, problem.head_dim)
        self._k = rows(problem.num_kv_heads, problem.head_dim)
        self._v = rows(problem.num_kv_heads, problem.v_head_dim)
        self._out = rows(problem.num_q_heads, problem.v_head_dim)
        self._lse = torch.full(self._out.shape[:2], float("nan"), device=self.runtime.device)
        recorder = recorder_for(self.runtime.device) if graphs else None
        # No checks in the runtime: every token is compared here.
        self.runner = StepRunner(self.runtime, self._forward, recorder, check=NO_CHECK)

    def begin(self, story: Story) -> Told:
        """Returns a story of which no token was served."""
        row = self.runtime.table.admit()
        return self._told(story, row)

    def fork(self, reported: Told, num_tokens: int) -> Told:
        """Returns the same story, served up to num_tokens through the first one's pages."""
        child = self._told(reported.story, self.runtime.table.fork(reported.row, num_tokens))
        child.out[:num_tokens], child.lse[:num_tokens] = reported.out[:num_tokens], reported.lse[:num_tokens]
        child.num_reported = num_tokens
        return child

    def free(self, reported: Told) -> None:
        """Gives row and pages back."""
        self.runtime.table.free(reported.row)

    def step(self, turns: Sequence[tuple[Told, int]], pad_to: int | None = None, *, halves: bool = False) -> None:
        """Serves the given numbers of further tokens of each story, in one step."""
        kv_len = [reported.num_reported + new for reported, new in turns]
        for (reported, _), length in zip(turns, kv_len, strict=True):
            self.runtime.table.reserve(reported.row, length)
        rows, q_len = [reported.row for reported, _ in turns], [new for _, new in turns]
        batch = StepBatch(np.array(rows, np.int32), np.array(kv_len, np.int32), np.array(q_len, np.int32), NO_TOKEN_IDS)
        padding = self.runtime.padding
        shape = (padding.split_shape if halves else padding.shape)(batch, padded_to(pad_to))
        places = torch.from_numpy(token_places(batch, shape)[: batch.num_tokens]).to(self.runtime.device)
        for tensor, name in ((self._q, "q"), (self._k, "k"), (self._v, "v")):
            tensor.fill_(float("nan"))
            parts = [
                getattr(reported.story, name)[reported.num_reported : reported.num_reported + new]
                for reported, new in turns
            ]
            tensor[places] = torch.cat(parts).to(tensor.device)
        self._out.fill_(float("nan"))
        self._lse.fill_(float("nan"))
        self.runner.run(batch, shape)
        first = 0
        for reported, new in turns:
            mine, here = places[first : first + new], slice(reported.num_reported, reported.num_reported + new)
            reported.out[here], reported.lse[here] = self._out[mine], self._lse[mine]
            reported.num_reported += new
            first += new

    def tell(self, reported: Told, chunks: Sequence[int]) -> Told:
        """Serves a story alone, chunk by chunk."""
        for chunk in chunks:
            self.step([(reported, chunk)])
        return reported

    def check(self, reported: Told) -> None:
        """Checks that every token has the reference's result."""
        n, story, device = reported.num_reported, reported.story, reported.out.device
        q, k, v = (part[:n].to(device) for part in (story.q, story.k, story.v))
        want, want_lse = attend_sequence(q, k, v, self.problem, self.weights)
        assert_attention_close(reported.out[:n], want, self.problem.dtype)
        assert_lse_close(reported.lse[:n], want_lse, self.problem.dtype)

    def _told(self, story: Story, row: int) -> Told:
        out = torch.full((len(story.q), *self._out.shape[1:]), float("nan"), dtype=self._out.dtype)
        device = self.runtime.device
        return Told(story, row, out.to(device), torch.full(out.shape[:2], float("nan"), device=device))

    def _forward(self, step: Part) -> Tensor:
        used = step.tokens
        step.layers.store_and_attend(0, self._q[used], self._k[used], self._v[used], self._out[used], self._lse[used])
        return self._out[used][step.last_token_of_seq.long()]


def same_bits(one: Told, other: Told) -> bool:
    """True if every token got the same bits in both servings of a story."""
    return one.num_reported == other.num_reported and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one.bits, other.bits, strict=True)
    )

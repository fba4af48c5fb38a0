"""Stories: sequences whose q, k and v are fixed token by token, served in many ways, to compare the results' bits.

A story is served in chunks. The results of its tokens are kept, for any place in a step and any other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rocm_attn.problem import Problem
from tests.amd.worlds.world import ALL_ON, Request, World


@dataclass(frozen=True, slots=True)
class Story:
    """Tokens of a sequence: q [n, q_heads, dim], k and v [n, kv_heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, problem: Problem, num_tokens: int, seed: int) -> Story:
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int, dim: int) -> Tensor:
            return torch.randn(num_tokens, heads, dim, generator=generator).to(problem.dtype)

        kv_heads = problem.num_kv_heads
        return cls(
            rows(problem.num_q_heads, problem.head_dim),
            rows(kv_heads, problem.head_dim),
            rows(kv_heads, problem.v_head_dim),
        )


@dataclass(kw_only=True)
class Told(Request):
    """A story while it is served, and the results of its tokens so far."""

    story: Story
    out: Tensor
    lse: Tensor

    def first(self, row: int, kv_len: int) -> Told:
        return replace(super().first(row, kv_len), out=self.out[:kv_len], lse=self.lse[:kv_len])

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds the results of further tokens."""
        self.out, self.lse = torch.cat([self.out, out]), torch.cat([self.lse, lse])


class Teller(World):
    """A world of one layer, deterministic unless a test says otherwise, whose requests are stories."""

    _turns: Sequence[tuple[Told, int]] = ()

    @classmethod
    def of(cls, device: torch.device, provider: str, problem: Problem, **more: Any) -> Teller:
        """more: as World.build() takes it"""
        sizes: dict[str, Any] = {"num_pages": 1500, "max_num_seqs": 6, "max_kv_len": 512, "max_tokens": 512}
        captured = {"capture_sizes": (1, 4, 8), "capture_tokens": (16, 64, 512)}
        given = {**sizes, **captured, "deterministic": True, "split_steps": True, "guards": ALL_ON, "poisons": False}
        return cls.build([problem], device, provider, **{**given, **more})

    def begin(self, story: Story) -> Told:
        """Returns a story of which no token was served."""
        row, nothing, results = self.runtime.table.admit(), self._nothing(), self.rows[0]
        return self._begun(Told(row, *nothing, story=story, out=results.out[:0], lse=results.lse[:0]))

    def serve(self, turns: Sequence[tuple[Told, int]], pad_to: int | None = None, *, halves: bool = False) -> None:
        """Serves the given numbers of further tokens of each story, in one step."""
        told, q_len = [each for each, _ in turns], [new for _, new in turns]
        self._turns = turns
        self.run(told, q_len, pad_to, halves=halves)
        real = torch.from_numpy(self.places[: sum(q_len)]).to(self.runtime.device)
        results = (torch.split(side[real], q_len) for side in (self.rows[0].out, self.rows[0].lse))
        for each, out, lse in zip(told, *results, strict=True):
            each.add(out, lse)

    def tell(self, told: Told, chunks: Sequence[int]) -> Told:
        """Serves a story alone, chunk by chunk."""
        for chunk in chunks:
            self.serve([(told, chunk)])
        return told

    def check_told(self, told: Told) -> None:
        """Checks that every token has the reference's result."""
        q = told.story.q[: told.kv_len].to(told.out.device)
        self.check(0, [told], [told.kv_len], q, told.out, told.lse)

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stories' next tokens."""

        def next_rows(name: str) -> Tensor:
            rows = [getattr(told.story, name)[told.kv_len : told.kv_len + new] for told, new in self._turns]
            return torch.cat(rows).to(q.device)

        return next_rows("q"), next_rows("k"), next_rows("v")


def same_bits(one: Told, other: Told) -> bool:
    """True if every token got the same bits in both servings of a story."""
    return one.kv_len == other.kv_len and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in ((one.out, other.out), (one.lse, other.lse))
    )

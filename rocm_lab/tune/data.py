"""A step of one layer with random pages, on which candidates are judged and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.oracle.numerics import ErrorBounds, bounds_of, error_parts
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.step.head_weights import HeadWeights
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.prepared import PreparedLayer, bounds_of_step, step_of
from rocm_lab.bench.step_data import random_pages
from rocm_lab.cost.cost import CostShape

# The number of last new tokens per sequence that are compared: the reference takes float64 for each and each key.
_MOST_TOKENS = 8
# The largest scale of codes in random pages.
_LARGEST_SCALE = 1.5


# Sequences that are alike, or any.
TimedShape = CostShape | BatchSpec


@dataclass(frozen=True, slots=True)
class StepLengths:
    """kv_len and q_len of each sequence of a step."""

    kv_len: tuple[int, ...]
    q_len: tuple[int, ...]

    @classmethod
    def of(cls, shape: TimedShape) -> StepLengths:
        """The lengths of a shape that is timed."""
        if isinstance(shape, BatchSpec):
            return cls(shape.kv_len, shape.q_len)
        return cls((shape.kv_len,) * shape.num_seqs, (shape.q_len,) * shape.num_seqs)

    @property
    def kind(self) -> StepKind:
        """The kind of the step."""
        if max(self.q_len) == 1:
            return StepKind.DECODE
        return StepKind.MIXED if min(self.q_len) == 1 else StepKind.EXTEND


@dataclass(frozen=True, slots=True, eq=False)
class TuneData:
    """Inputs and outputs of steps of one shape, over several sets of pages of one pool.

    tables: int32 [sets, sequences, pages of the longest]
    lse:    float32 [tokens, q_heads]; None if it is not requested
    """

    problem: Problem
    lengths: StepLengths
    step: StepTensors
    tables: Tensor
    pages: LayerPages
    weights: HeadWeights
    q: Tensor
    out: Tensor
    lse: Tensor | None

    @classmethod
    def empty(cls, problem: Problem, lengths: StepLengths, *, sets: int, device: torch.device, lse: bool) -> TuneData:
        """A step with the sizes of random(), without data: to compile for."""
        num_pages = [-(-length // problem.page_size) for length in lengths.kv_len]
        tables = torch.zeros(sets, len(num_pages), max(num_pages), dtype=torch.int32, device=device)
        num_tokens = sum(lengths.q_len)
        pool = KVPool([problem], num_pages=1 + sets * sum(num_pages), page_size=problem.page_size, device=device)

        step = step_of(lengths.kv_len, lengths.q_len, tables[0])
        q = torch.empty(num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype, device=device)
        out = q.new_empty(num_tokens, problem.num_q_heads, problem.v_head_dim)
        of_lse = torch.empty(out.shape[:2], device=device) if lse else None
        weights = HeadWeights.random(problem, torch.Generator().manual_seed(0)).to(device)
        return cls(problem, lengths, step, tables, pool.layers[0], weights, q, out, of_lse)

    @classmethod
    def random(cls, problem: Problem, lengths: StepLengths, *, sets: int, device: torch.device, lse: bool) -> TuneData:
        """A step of normal random numbers; pages hold NaN after the end of their sequence."""
        generator = torch.Generator(device).manual_seed(0)
        data = cls.empty(problem, lengths, sets=sets, device=device, lse=lse)
        data = replace(data, pages=random_pages(problem, len(data.pages.raw_k), generator))
        num_pages = [-(-length // problem.page_size) for length in lengths.kv_len]
        order = torch.randperm(sets * sum(num_pages), generator=generator, device=device).int() + 1
        for number, ids in enumerate(torch.split(order, num_pages * sets)):
            data.tables[number // len(num_pages), number % len(num_pages), : len(ids)] = ids
        for of_set in data.tables:
            _end_in_nan(data.pages, of_set, lengths.kv_len)
        data.q.copy_(torch.randn(data.q.shape, generator=generator, device=device))
        data.out.fill_(float("nan"))
        return data

    @property
    def bounds(self) -> StepBounds:
        """The bounds of the step that the host knows."""
        return bounds_of_step(self.lengths.kv_len, self.lengths.q_len, self.lengths.kind)

    def runs(self, kernel: BoundKernel) -> list[PreparedLayer]:
        """The layer over each set of pages."""
        steps = (replace(self.step, table=table) for table in self.tables)
        rows = self.q, self.out
        return [PreparedLayer.of(kernel, step, self.bounds, rows, self.pages, self.weights, self.lse) for step in steps]

    def wrong(self, seqs: Sequence[int]) -> str:
        """Describes the first error of these sequences in the output of the first set; empty if there is none."""
        bounds = bounds_of(self.problem.dtype, eight_bit_products=False)
        for seq in seqs:
            for head in sorted({0, self.problem.num_kv_heads - 1}):
                worst = self._worst(seq, head, bounds)
                if not worst <= 1:
                    lengths = f"{self.lengths.kv_len[seq]} tokens, {self.lengths.q_len[seq]} of them new"
                    return f"wrong: a sequence of {lengths} is off by {worst:.1f} times the tolerance"
        return ""

    def _worst(self, seq: int, head: int, bounds: ErrorBounds) -> float:
        """The error of a sequence's results in one KV head, relative to the bound; at most 1 is right."""
        problem, kv_len, q_len = self.problem, self.lengths.kv_len[seq], self.lengths.q_len[seq]
        end = sum(self.lengths.q_len[: seq + 1])
        tokens = slice(end - min(q_len, _MOST_TOKENS), end)
        heads = slice(head * problem.gqa_ratio, (head + 1) * problem.gqa_ratio)
        ids = self.tables[0, seq, : -(-kv_len // problem.page_size)].long()
        k, v = (side.flatten(0, 1)[:kv_len, head : head + 1] for side in self.pages.read(ids))
        alone = replace(problem, num_q_heads=problem.gqa_ratio, num_kv_heads=1)
        weights = HeadWeights(*(w if w is None else w[heads] for w in (self.weights.sinks, self.weights.alibi_slopes)))
        want, want_lse = attend_sequence(self.q[tokens, heads], k, v, alone, weights)
        worst = float(error_parts(self.out[tokens, heads], want, bounds.out, size=_LARGEST_SCALE).max())
        if self.lse is None:
            return worst
        return max(worst, float(error_parts(self.lse[tokens, heads], want_lse, bounds.lse, size=_LARGEST_SCALE).max()))


def _end_in_nan(pages: LayerPages, table: Tensor, kv_len: Sequence[int]) -> None:
    """Writes NaN after each sequence's last token, in its last page: a kernel must not let it through."""
    page_size = pages.format.page_size
    if pages.format.encoding.is_fp8:
        return
    for seq, length in enumerate(kv_len):
        if length % page_size:
            last = int(table[seq, length // page_size])
            pages.k[last, length % page_size :] = float("nan")
            pages.v[last, length % page_size :] = float("nan")

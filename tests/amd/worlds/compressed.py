"""A world of DeepSeek-V4's layers: a window, and rows of several tokens that an indexer chooses or that are all read.

The reference is written from the formulas of the paper (sections 2.3.1 and 2.3.2) in float64, token by token. It shares
no code with the kernels, and knows no pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import Indexer, Indexing, LastUnit, PoolKind, Problem, Row
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.merging import merge_states
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.coded import kept
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import poison_free_pages

# Elements of a row: enough for 64 codes and 64 elements without.
HEADS, DIM, INDEX_HEADS, INDEX_DIM = 4, 128, 2, 16
CHOSEN = Row(4, overlaps=True, also=INDEX_DIM)
HEAVY = Row(8)
INDEXING = Indexing(0.25, top=2, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
WINDOW, SPARSE, ALL = range(3)


def layers(page_size: int = 8, dtype: torch.dtype = torch.float32, **coded: Any) -> list[Problem]:
    """The window, the rows that are chosen from, and those that are all read. coded: the encoding of all three"""
    plain: dict[str, Any] = {"v_head_dim": DIM, "scale": DIM**-0.5, "pool": PoolKind.LATENT, "wants_lse": True, **coded}
    indexer = Indexer(INDEX_HEADS, INDEX_DIM, INDEXING)
    return [
        Problem(HEADS, 1, DIM, dtype, page_size, window_left=6, has_sinks=True, **plain),
        Problem(HEADS, 1, DIM, dtype, page_size, row=CHOSEN, indexer=indexer, **plain),
        Problem(HEADS, 1, DIM, dtype, page_size, row=HEAVY, **plain),
    ]


@dataclass
class Drawn:
    """Random inputs of tokens: latents, queries, values and gates of both kinds of rows, and what the indexer takes."""

    q: Tensor
    k: Tensor
    values: dict[int, Tensor]
    gates: dict[int, Tensor]
    index_q: Tensor
    weights: Tensor

    @classmethod
    def of(cls, count: int, generator: torch.Generator) -> Drawn:
        def rows(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator)

        widths = {SPARSE: 2 * (DIM + INDEX_DIM), ALL: DIM}
        return cls(
            rows(HEADS, DIM),
            rows(1, DIM),
            {layer: rows(width) for layer, width in widths.items()},
            {layer: 2 * rows(width) for layer, width in widths.items()},
            rows(INDEX_HEADS, INDEX_DIM),
            rows(INDEX_HEADS),
        )

    def parts(self) -> list[Tensor]:
        return [self.q, self.k, *self.values.values(), *self.gates.values(), self.index_q, self.weights]

    def first(self, count: int) -> Drawn:
        return self.part(0, count)

    def part(self, first: int, end: int) -> Drawn:
        return self.like([part[first:end] for part in self.parts()])

    def and_then(self, other: Drawn) -> Drawn:
        return self.like([torch.cat(pair) for pair in zip(self.parts(), other.parts(), strict=True)])

    def like(self, parts: Sequence[Tensor]) -> Drawn:
        q, k, of_sparse, of_all, gates_of_sparse, gates_of_all, index_q, weights = parts
        values, gates = {SPARSE: of_sparse, ALL: of_all}, {SPARSE: gates_of_sparse, ALL: gates_of_all}
        return Drawn(q, k, values, gates, index_q, weights)


def folded(values: Tensor, gates: Tensor, row: Row) -> list[Tensor]:
    """Rows of a sequence, float64: in each column the mean of values, weighted by the softmax of gates."""
    values, gates = values.double(), gates.double()
    columns = values.shape[1] // (1 + row.overlaps)
    rows = []
    for number in range(len(values) // row.tokens):
        own = range(number * row.tokens, (number + 1) * row.tokens)
        before = range((number - 1) * row.tokens, number * row.tokens) if row.overlaps and number else range(0)
        last = slice(-columns, None)
        pairs = [(values[t, :columns], gates[t, :columns]) for t in before] + [
            (values[t, last], gates[t, last]) for t in own
        ]
        weights = torch.stack([gate for _, gate in pairs]).softmax(0)
        rows.append(sum((w * v for w, (v, _) in zip(weights, pairs, strict=True)), torch.zeros(columns).double()))
    return rows


def wanted(drawn: Drawn, position: int, layer: int, sinks: Tensor, window: Problem) -> Tensor:
    """float64 [heads, dim]: the output of a token, over its window and its rows with one softmax and one sink."""
    seen, row = drawn.first(position + 1), {SPARSE: CHOSEN, ALL: HEAVY}[layer]
    rows = folded(seen.values[layer], seen.gates[layer], row)
    if layer == SPARSE:
        q, weights = drawn.index_q[position].double(), drawn.weights[position].double()
        scores = [
            float(
                sum(w * max(0.0, float(one @ each[DIM:]) * INDEXING.scale) for one, w in zip(q, weights, strict=True))
            )
            for each in rows
        ]
        best = sorted(range(len(rows)), key=lambda number: (-scores[number], number))[: INDEXING.top]
        rows = [rows[number] for number in best]
    near = [k.double()[0] for k in seen.k[max(0, position - window.window_left) :]]
    keys = list(kept(torch.stack(near + [each[:DIM] for each in rows])[:, None], window, None)[:, 0].double())
    out = []
    for head in range(HEADS):
        q = drawn.q[position, head].double()
        logits = [float(q @ key) * DIM**-0.5 for key in keys]
        largest = max([*logits, float(sinks[head])])
        shares = [math.exp(logit - largest) for logit in logits]
        total = sum(shares) + math.exp(float(sinks[head]) - largest)
        out.append(
            sum((share / total * key for share, key in zip(shares, keys, strict=True)), torch.zeros(DIM).double())
        )
    return torch.stack(out)


@dataclass
class Served:
    """A request's row, and the inputs of its tokens."""

    row: int
    drawn: Drawn

    @property
    def kv_len(self) -> int:
        return len(self.drawn.q)


def batch_of(requests: Sequence[Served], q_len: Sequence[int]) -> StepBatch:
    """A step of the last q_len tokens of each request."""
    return StepBatch([each.row for each in requests], [each.kv_len for each in requests], q_len, NO_TOKEN_IDS)


@dataclass
class CompressedWorld:
    """Requests over the three layers; every output of a step is compared with the reference."""

    runtime: AttentionRuntime
    runner: StepRunner[Any] = field(init=False)
    generator: torch.Generator
    graphs: bool
    num_tokens: int = 64

    def __post_init__(self) -> None:
        device = self.runtime.device
        recorder = recorder_for(device) if self.graphs else None
        self.inputs = Drawn.of(self.num_tokens, self.generator)
        self.inputs = self.inputs.like([part.to(device) for part in self.inputs.parts()])
        self.out = {layer: torch.zeros(self.num_tokens, HEADS, DIM, device=device) for layer in (SPARSE, ALL)}
        self.runner = StepRunner(self.runtime, self.forward, recorder, check=NO_CHECK)
        self.largest_error = 0.0

    @classmethod
    def build(
        cls,
        device: torch.device,
        provider: str,
        *,
        graphs: bool = False,
        page_size: int = 8,
        coded: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> CompressedWorld:
        problems, generator = layers(page_size, **coded), torch.Generator().manual_seed(0)
        sizes: dict[str, Any] = {"num_pages": 40, "max_num_seqs": 4, "max_kv_len": 64, "capture_sizes": (4,), **options}
        runtime = build_runtime(problems, RuntimeOptions(provider=provider, **sizes), device=device)
        for layer, problem in enumerate(problems):
            for pages in (runtime.pool.layer(layer), *([runtime.pool.state(layer)] if layer else [])):
                pages.fill_nan(slice(1, None))
            runtime.head_weights.set(layer, HeadWeights.random(problem, generator).to(runtime.device))
        runtime.pool.index(SPARSE).fill_nan(slice(1, None))
        return cls(runtime, generator, graphs)

    def forward(self, step: Part) -> Tensor:
        """Attends in both kinds of layer; their windows are those of one layer, which differ in nothing here."""
        if not self.graphs:
            poison_free_pages(self.runtime)
        at, calls, given = step.tokens, step.layers, self.inputs
        q, k = given.q[at], given.k[at]
        near, near_lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        calls.store(WINDOW, k, k)
        calls.attend(WINDOW, q, near, near_lse)
        for layer in (SPARSE, ALL):
            rows = q.new_empty(len(q), DIM + INDEX_DIM * (layer == SPARSE))
            calls.fold(layer, given.values[layer][at], given.gates[layer][at], rows)
            row = rows[:, None, :DIM]
            calls.store(layer, row, row)
            far, far_lse = torch.empty_like(q), q.new_empty(q.shape[:2])
            if layer == SPARSE:
                calls.store_index(layer, rows[:, DIM:])
                calls.select(layer, given.index_q[at], given.weights[at])
                calls.attend_selected(layer, q, far, far_lse)
            else:
                calls.attend(layer, q, far, far_lse)
            self.out[layer][at] = merge_states([(near, near_lse), (far, far_lse)])[0]
        return self.out[ALL][at][step.last_token_of_seq.long()]

    def admit(self) -> Served:
        return Served(self.runtime.table.admit(), Drawn.of(0, self.generator))

    def fork(self, request: Served, kv_len: int) -> Served:
        return Served(self.runtime.table.fork(request.row, kv_len), request.drawn.first(kv_len))

    def take_back(self, request: Served, kv_len: int) -> None:
        """Rejects the tokens from kv_len on."""
        request.drawn = request.drawn.first(kv_len)

    def truncate(self, request: Served, kv_len: int) -> None:
        self.runtime.table.truncate(request.row, kv_len)
        self.take_back(request, kv_len)

    def step(self, requests: Sequence[Served], q_len: Sequence[int], drawn: Sequence[Drawn] = ()) -> None:
        """Runs a step of new tokens and checks every output. drawn: of each request's new tokens; else random ones"""
        drawn = drawn or [Drawn.of(new, self.generator) for new in q_len]
        for request, new in zip(requests, drawn, strict=True):
            if len(self.runtime.table.spaces) > 1:
                self.runtime.table.evict([request.row], [request.kv_len])
            request.drawn = request.drawn.and_then(new)
            self.runtime.table.reserve(request.row, request.kv_len)
        news = [
            torch.cat(parts)
            for parts in zip(
                *(
                    [part[part.shape[0] - new :] for part in each.drawn.parts()]
                    for each, new in zip(requests, q_len, strict=True)
                ),
                strict=True,
            )
        ]
        for rows, given in zip(self.inputs.parts(), news, strict=True):
            rows.fill_(float("nan"))
            rows[: len(given)] = given.to(rows)
        self.runner.run(batch_of(requests, q_len))
        self._check(requests, q_len)

    def _check(self, requests: Sequence[Served], q_len: Sequence[int]) -> None:
        sinks, window = self.runtime.head_weights.of(WINDOW).sinks, self.runtime.kinds.problems[WINDOW]
        assert sinks is not None
        for layer in (SPARSE, ALL):
            first = 0
            for request, new in zip(requests, q_len, strict=True):
                places = range(request.kv_len - new, request.kv_len)
                want = torch.stack([wanted(request.drawn, place, layer, sinks, window) for place in places])
                found = self.out[layer][first : first + new].cpu()
                self.largest_error = max(self.largest_error, float((found.double() - want).abs().max()))
                assert_attention_close(found, want, torch.float32)
                first += new
        self.runtime.check_device()

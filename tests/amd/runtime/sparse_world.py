"""Requests over a runtime whose layers select keys: stored tokens are also kept densely, and every step is compared.

Index queries and keys are whole numbers, and their scales powers of two. So scores are exact in any order of sums, and
rounding never decides which units are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import ALL_KEYS, AllKeys, EarlierSelection, Indexer, Indexing, Pooling, PoolKind, Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.kernels.sparse_cases import best_units
from tests.amd.tolerances import assert_attention_close

NAN = float("nan")


def indexer(indexing: Indexing, heads: int = 4, dim: int = 16) -> Indexer:
    """Four heads of 16, unless specified otherwise."""
    return Indexer(heads, dim, indexing)


def layer(attends: AllKeys | Indexer | EarlierSelection = ALL_KEYS, *, page_size: int = 4) -> Problem:
    """Four query heads over two KV heads of 16."""
    return Problem(4, 2, 16, torch.float32, page_size, v_head_dim=16, scale=0.3, indexer=attends)


def latent_layer(attends: AllKeys | Indexer | EarlierSelection = ALL_KEYS, *, page_size: int = 4) -> Problem:
    """Four heads over latents of 16 in rows of 24."""
    return Problem(4, 1, 24, torch.float32, page_size, v_head_dim=16, scale=0.3, pool=PoolKind.LATENT, indexer=attends)


@dataclass
class Stored:
    """The stored tensors of a request in one layer: [kv_len, kv_heads, dim], and of an indexer [kv_len, dim]."""

    k: Tensor
    v: Tensor
    index: Tensor


@dataclass
class SparseRequest:
    """A request's row, and its stored tensors."""

    row: int
    layers: list[Stored]

    @property
    def kv_len(self) -> int:
        return self.layers[0].k.shape[0]


@dataclass
class Asked:
    """The inputs and outputs of one layer's steps: tensors at fixed addresses."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    index_k: Tensor
    index_q: Tensor
    weights: Tensor


@dataclass
class SparseWorld:
    """A runtime, its requests, and the runner of a forward that stores, selects and attends in every layer."""

    problems: Sequence[Problem]
    device: torch.device
    provider: str = "torch"
    guards: Guards = field(default_factory=Guards)
    graphs: bool = False
    max_kv_len: int = 64
    max_tokens: int = 64
    capture_tokens: Sequence[int] = (1,)
    deterministic: bool = False
    split_steps: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        options = RuntimeOptions(
            num_pages=96,
            max_num_seqs=4,
            max_num_rows=8,
            max_kv_len=self.max_kv_len,
            provider=self.provider,
            capture_sizes=(4,),
            capture_tokens=self.capture_tokens,
            deterministic=self.deterministic,
            split_steps=self.split_steps,
        )
        self.runtime = build_runtime(self.problems, options, device=self.device, guards=self.guards)
        for number, problem in enumerate(self.problems):
            pages = [self.runtime.pool.layer(number)]
            pages += [self.runtime.pool.index(number)] if isinstance(problem.indexer, Indexer) else []
            for each in pages:
                each.k[1:] = each.v[1:] = NAN
        self.asked = [self._asked(problem) for problem in self.problems]
        recorder = recorder_for(self.device) if self.graphs else None
        self.runner = StepRunner(self.runtime, self.forward, recorder, check=NO_CHECK)

    def _asked(self, problem: Problem) -> Asked:
        def rows(*shape: int) -> Tensor:
            return torch.full((self.max_tokens, *shape), NAN, device=self.device)

        selects = problem.indexer
        heads, dim = (selects.num_heads, selects.head_dim) if isinstance(selects, Indexer) else (1, 1)
        k = rows(problem.num_kv_heads, problem.head_dim)
        is_latent = problem.pool is PoolKind.LATENT
        return Asked(
            rows(problem.num_q_heads, problem.head_dim),
            k,
            k[..., : problem.v_head_dim] if is_latent else rows(problem.num_kv_heads, problem.v_head_dim),
            rows(problem.num_q_heads, problem.v_head_dim),
            rows(dim),
            rows(heads, dim),
            rows(heads),
        )

    def admit(self) -> SparseRequest:
        """Returns a request that holds nothing."""
        layers = [Stored(asked.k[:0].clone(), asked.v[:0].clone(), asked.index_k[:0].clone()) for asked in self.asked]
        return SparseRequest(self.runtime.table.admit(), layers)

    def fork(self, request: SparseRequest, kv_len: int) -> SparseRequest:
        """Returns a request that shares the first tokens of another one."""
        row = self.runtime.table.fork(request.row, kv_len)
        return SparseRequest(
            row, [Stored(each.k[:kv_len], each.v[:kv_len], each.index[:kv_len]) for each in request.layers]
        )

    def draw(self, num_tokens: int) -> None:
        """Fills the first num_tokens rows with random numbers, and all others with NaN."""
        at = slice(0, num_tokens)
        for problem, asked in zip(self.problems, self.asked, strict=True):
            for name in ("q", "k", "v", "index_k", "index_q", "weights", "out"):
                getattr(asked, name).fill_(NAN)
            asked.q[at] = self._normal(asked.q[at])
            asked.k[at] = self._normal(asked.k[at])
            if problem.pool is not PoolKind.LATENT:
                asked.v[at] = self._normal(asked.v[at])
            asked.index_q[at] = self._whole(asked.index_q[at], 2)
            asked.index_k[at] = self._whole(asked.index_k[at], 2)
            asked.weights[at] = self._whole(asked.weights[at], 3) / 4

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator).to(self.device)

    def _whole(self, like: Tensor, most: int) -> Tensor:
        return torch.randint(-most, most + 1, like.shape, generator=self.generator).float().to(self.device)

    def batch(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> StepBatch:
        """Returns a step of new tokens; pages are reserved."""
        kv_len = [request.kv_len + new for request, new in zip(requests, q_len, strict=True)]
        for request, length in zip(requests, kv_len, strict=True):
            self.runtime.table.reserve(request.row, length)
        return StepBatch(
            np.array([request.row for request in requests]), np.array(kv_len), np.array(q_len), NO_TOKEN_IDS
        )

    def step(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> None:
        """Runs a step with random new tokens and compares it."""
        self.run(requests, q_len)
        self.check(requests, q_len)

    def run(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> None:
        """Runs a step with random new tokens, which the requests have afterwards."""
        self.draw(sum(q_len))
        self.runner.run(self.batch(requests, q_len))
        self.remember(requests, q_len)

    def remember(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> None:
        """Adds the new tokens of the last step to the requests."""
        first = 0
        for request, new in zip(requests, q_len, strict=True):
            at = slice(first, first + new)
            for stored, asked in zip(request.layers, self.asked, strict=True):
                stored.k = torch.cat([stored.k, asked.k[at]])
                stored.v = torch.cat([stored.v, asked.v[at]])
                stored.index = torch.cat([stored.index, asked.index_k[at]])
            first += new

    def forward(self, step: Part) -> Tensor:
        """Runs every layer in order."""
        at = step.tokens
        for number, (problem, asked) in enumerate(zip(self.problems, self.asked, strict=True)):
            layers = step.layers
            layers.store(number, asked.k[at], asked.v[at])
            if isinstance(problem.indexer, AllKeys):
                layers.attend(number, asked.q[at], asked.out[at])
                continue
            if isinstance(problem.indexer, Indexer):
                layers.store_index(number, asked.index_k[at])
                layers.select(number, asked.index_q[at], asked.weights[at])
            layers.attend_selected(number, asked.q[at], asked.out[at])
        return self.asked[-1].out[at][step.last_token_of_seq.long()]

    def check(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> None:
        """Checks that every layer's output of the last step equals the reference's, and padded tokens are zero."""
        first = 0
        for seq, new in enumerate(q_len):
            at = slice(first, first + new)
            source = 0
            for number, (problem, asked) in enumerate(zip(self.problems, self.asked, strict=True)):
                source = number if isinstance(problem.indexer, Indexer) else source
                want = self.expected(requests[seq], number, source, at)
                assert_attention_close(asked.out[at].cpu(), want, problem.dtype)
            first += new
        for asked in self.asked:
            pads = asked.out[first:]
            assert ((pads == 0) | pads.isnan()).all()

    def is_right(self, requests: Sequence[SparseRequest], q_len: Sequence[int]) -> bool:
        """True if check passes."""
        try:
            self.check(requests, q_len)
        except AssertionError:
            return False
        return True

    def expected(self, request: SparseRequest, number: int, source: int, at: slice) -> Tensor:
        """float64 [n, q_heads, v_head_dim]. source: the layer whose indexer selects; at: the request's new tokens

        It runs on the CPU: a GPU would need a launch for each of many small steps.
        """
        problem, stored, q = self.problems[number], request.layers[number], self.asked[number].q[at].cpu()
        stored_k, stored_v = stored.k.cpu(), stored.v.cpu()
        dense = replace(problem, indexer=ALL_KEYS)
        if isinstance(problem.indexer, AllKeys):
            return attend_sequence(q, stored_k, stored_v, dense)[0]
        asked, ratio = self.asked[source], problem.gqa_ratio
        index_q, weights, index = asked.index_q[at], asked.weights[at], request.layers[source].index
        cells = chosen_cells(index_q.cpu(), weights.cpu(), index.cpu(), problem.indexer.indexing)
        one = replace(dense, num_q_heads=ratio, num_kv_heads=1)
        outs = []
        for head in range(problem.num_kv_heads):
            seen = cells[:, head if cells.shape[1] > 1 else 0]
            heads = slice(head * ratio, (head + 1) * ratio)
            k, v = stored_k[:, head : head + 1], stored_v[:, head : head + 1]
            outs.append(attend_sequence(q[:, heads], k, v, one, visible=seen)[0])
        return torch.cat(outs, 1)


def chosen_cells(q: Tensor, weights: Tensor, keys: Tensor, indexing: Indexing) -> Tensor:
    """bool [n, sets, kv_len]: the keys that each of a sequence's last n tokens attends to, as Indexing defines."""
    num_new, kv_len, sets = len(q), len(keys), indexing.sets
    ends = torch.arange(indexing.key_tokens - 1, kv_len, indexing.key_tokens)
    pooled = keys[ends.to(keys.device)].double()
    products = torch.einsum("nhd,kd->nhk", q.double(), pooled) * indexing.scale
    products = products.clamp(min=0) if indexing.rectified else products
    # A context that is shorter than a pool has no keys.
    by_set = (products * weights.double()[..., None]).reshape(num_new, sets, q.shape[1] // sets, len(pooled))
    scores = by_set.sum(2).cpu()
    cells = torch.zeros(num_new, sets, kv_len, dtype=torch.bool)
    for token in range(num_new):
        visible = kv_len - num_new + token + 1
        for index_set in range(sets):
            seen = scores[token, index_set, : visible // indexing.key_tokens]
            parts = torch.split(seen, indexing.unit_keys) if len(seen) else ()
            of_units = [float(part.max() if indexing.pooling is Pooling.MAX else part.mean()) for part in parts]
            for unit in best_units(of_units, visible, indexing):
                first = unit * indexing.unit_tokens
                cells[token, index_set, first : min(first + indexing.unit_tokens, visible)] = True
    return cells.to(q.device)

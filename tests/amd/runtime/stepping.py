"""A runtime with requests whose K and V are also kept densely, so that every step is checked against the reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.mask import StepMask, kv_positions
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.machine.target import Target
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kept_pages import KeptIds
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.coded import kept
from tests.amd.tolerances import assert_attention_close, assert_lse_close


def providers() -> list[str]:
    """The providers that can run in this process; under Triton's interpreter, only the one that needs it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ["triton"]
    return ["torch", "triton"] if torch.cuda.is_available() else ["torch"]


def deterministic_providers() -> list[str]:
    """Those of them that have deterministic kernels here: torch has none on a GPU."""
    return [provider for provider in providers() if provider != "torch" or not torch.cuda.is_available()]


def small_problem(
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int = 16,
    window_left: int = UNLIMITED_WINDOW,
    logits_soft_cap: float = 0.0,
    has_sinks: bool = False,
    has_alibi_slopes: bool = False,
    custom_mask: bool = False,
    kv_encoding: KVEncoding = KVEncoding.LIKE_Q,
    kv_scales: Scales = Scales.NONE,
) -> Problem:
    """Six query heads over two KV heads, with rows of 16 and plain scores, unless specified otherwise."""
    return Problem(
        num_q_heads,
        num_kv_heads,
        head_dim,
        dtype,
        page_size,
        v_head_dim=v_head_dim,
        scale=0.3,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        has_sinks=has_sinks,
        has_alibi_slopes=has_alibi_slopes,
        custom_mask=custom_mask,
        kv_encoding=kv_encoding,
        kv_scales=kv_scales,
    )


def packed(visible: Sequence[Tensor], device: torch.device) -> Tensor:
    """uint8: the cells of masks [q_len, kv_len], sequence after sequence; bits after the last one are set."""
    cells = np.concatenate([np.empty(0, bool), *(mask.numpy().flatten() for mask in visible)])
    cells = np.concatenate([cells, np.ones(-len(cells) % 8, bool)])
    return torch.from_numpy(np.packbits(cells, bitorder="little")).to(device)


@dataclass
class Request:
    """A request's row and everything that was stored for it, layer by layer: [kv_len, kv_heads, dim]."""

    row: int
    k: list[Tensor]
    v: list[Tensor]

    @property
    def kv_len(self) -> int:
        return self.k[0].shape[0]


def padded_to(pad_to: int | PadTo | None) -> PadTo | None:
    """Converts a number of sequences to PadTo and returns other values unchanged; None lets the ladder decide."""
    return PadTo(pad_to) if isinstance(pad_to, int) else pad_to


def take_back(request: Request, tokens: int) -> None:
    """Rejects the last tokens of a request."""
    keep = request.kv_len - tokens
    request.k = [k[:keep] for k in request.k]
    request.v = [v[:keep] for v in request.v]


W = TypeVar("W", bound="World")


@dataclass
class World:
    """A runtime, its requests and the numbers that they stored.

    Every page starts as NaN, so that a read of data that was not stored shows.

    largest_error: of all outputs that were checked
    """

    runtime: AttentionRuntime
    problems: Sequence[Problem]
    generator: torch.Generator
    requests: list[Request] = field(default_factory=list)
    largest_error: float = 0.0

    @classmethod
    def build(
        cls: type[W],
        problems: Sequence[Problem],
        device: torch.device,
        provider: str,
        *,
        num_pages: int = 64,
        swa_pages: int = 0,
        swa_kept: int = 0,
        max_num_seqs: int = 8,
        max_kv_len: int = 64,
        capture_sizes: Sequence[int] | None = None,
        capture_tokens: Sequence[int] = (1,),
        target: Target | None = None,
        selections: Sequence[Selection] | None = None,
        seed: int = 0,
    ) -> W:
        options = RuntimeOptions(
            num_pages=num_pages,
            swa_pages=swa_pages and num_pages + swa_pages,
            first_swa_page=first_swa_page(num_pages, swa_pages),
            swa_kept=swa_kept,
            max_num_seqs=max_num_seqs,
            max_kv_len=max_kv_len,
            provider=provider,
            capture_sizes=capture_sizes,
            capture_tokens=capture_tokens,
        )
        runtime = runtime_of(problems, options, device, target, selections)
        generator = torch.Generator().manual_seed(seed)
        for layer, problem in enumerate(problems):
            runtime.pool.layer(layer).fill_nan(slice(1, None))
            runtime.head_weights.set(layer, HeadWeights.random(problem, generator).to(runtime.device))
        return cls(runtime, problems, generator)

    def random(self, *shape: int) -> Tensor:
        dtype = self.problems[0].dtype
        return torch.randn(*shape, generator=self.generator).to(self.runtime.device, dtype)

    def admit(self) -> Request:
        empty_k = [self.random(0, p.num_kv_heads, p.head_dim) for p in self.problems]
        empty_v = [self.random(0, p.num_kv_heads, p.v_head_dim) for p in self.problems]
        request = Request(self.runtime.table.admit(), empty_k, empty_v)
        self.requests.append(request)
        return request

    def free(self, request: Request) -> None:
        self.runtime.table.free(request.row)
        self.requests.remove(request)

    def fork(self, request: Request, kv_len: int) -> Request:
        row = self.runtime.table.fork(request.row, kv_len)
        child = Request(row, [k[:kv_len] for k in request.k], [v[:kv_len] for v in request.v])
        self.requests.append(child)
        return child

    def begin_over(self, kept: Request, ids: KeptIds, kv_len: int) -> Request:
        """Returns a request over kept pages with the first tokens of another one."""
        row = self.runtime.table.kept.admit_over(ids, kv_len)
        request = Request(row, [k[:kv_len] for k in kept.k], [v[:kv_len] for v in kept.v])
        self.requests.append(request)
        return request

    def batch(self, requests: Sequence[Request], q_len: Sequence[int]) -> StepBatch:
        """Returns a step in which each request gets q_len new tokens; pages are reserved."""
        kv_len = [r.kv_len + new for r, new in zip(requests, q_len, strict=True)]
        for request, length in zip(requests, kv_len, strict=True):
            self.runtime.table.reserve(request.row, length)
        return StepBatch(
            np.array([r.row for r in requests], np.int32),
            np.array(kv_len, np.int32),
            np.array(q_len, np.int32),
            NO_TOKEN_IDS,
        )

    def step(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        pad_to: int | PadTo | None = None,
        visible: Sequence[Tensor] | None = None,
        positions: Tensor | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> None:
        """Runs a step with random q, k and v in every layer and NaN in the pads, and checks it against the reference.

        visible:   bool [q_len, kv_len] per request: the step's mask
        positions: int32 [num_tokens], of the mask; not given: each token's place
        """
        batch, counted_from = replace(self.batch(requests, q_len), prefixes=prefixes), positions
        if visible is not None:
            places = kv_positions(batch.kv_len, batch.q_len, self.runtime.device)
            positions = places if positions is None else positions
            # No window of a StepMask reaches further back than that of the sequence's first new token.
            first_place = torch.from_numpy(np.repeat(batch.kv_len - batch.q_len, batch.q_len)).to(positions.device)
            counted_from = torch.maximum(positions, first_place)
            batch = replace(batch, mask=StepMask(packed(visible, self.runtime.device), positions))
        step = self.runtime.step(batch, self.runtime.plan(batch, padded_to(pad_to))).parts[0]
        poison_free_pages(self.runtime)
        try:
            for layer, problem in enumerate(self.problems):
                q, k, v = self.qkv(problem, step)
                self.remember(layer, requests, q_len, k, v)
                out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
                lse = self.lse_rows(layer, step, q)
                step.layers.store_and_attend(layer, q, k, v, out, lse)
                self.check(layer, requests, q_len, q, out, lse, visible, counted_from)
        finally:
            self.runtime.end_step()

    def lse_rows(self, layer: int, step: Part, q: Tensor) -> Tensor | None:
        """Returns rows for the log-sum-exp, if the step's kernel gives it."""
        problem = self.problems[layer]
        limits = step.plan.kernels[list(dict.fromkeys(self.problems)).index(problem)].row.limits
        return torch.full(q.shape[:2], float("nan"), device=q.device) if limits.gives_lse(problem) else None

    def qkv(self, problem: Problem, step: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random rows for the real tokens of a step and NaN for the padded ones."""
        num_padded = step.token_ids.shape[0]
        rows = []
        for heads, dim in (
            (problem.num_q_heads, problem.head_dim),
            (problem.num_kv_heads, problem.head_dim),
            (problem.num_kv_heads, problem.v_head_dim),
        ):
            row = self.random(num_padded, heads, dim)
            row[step.num_tokens :] = float("nan")
            rows.append(row)
        q, k, v = rows
        return q, k, k[..., : problem.v_head_dim] if problem.pool is PoolKind.LATENT else v

    def remember(self, layer: int, requests: Sequence[Request], q_len: Sequence[int], k: Tensor, v: Tensor) -> None:
        pages, problem = self.runtime.pool.layer(layer), self.problems[layer]
        k, v = (kept(rows, problem, scale) for rows, scale in ((k, pages.k_scale), (v, pages.v_scale)))
        if problem.pool is PoolKind.LATENT:  # its tokens have one scale, for V and for the rest of the row
            v = k[..., : problem.v_head_dim]
        first = 0
        for request, new in zip(requests, q_len, strict=True):
            request.k[layer] = torch.cat([request.k[layer], k[first : first + new]])
            request.v[layer] = torch.cat([request.v[layer], v[first : first + new]])
            first += new

    def check(
        self,
        layer: int,
        requests: Sequence[Request],
        q_len: Sequence[int],
        q: Tensor,
        out: Tensor,
        lse: Tensor | None,
        visible: Sequence[Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Checks out and, if given, lse of real tokens against the reference; padded tokens are zero and -inf."""
        problem = self.problems[layer]
        first = 0
        for seq, (request, new) in enumerate(zip(requests, q_len, strict=True)):
            rows = slice(first, first + new)
            weights = self.runtime.head_weights.of(layer)
            masked = visible is not None and problem.custom_mask
            mask = visible[seq].to(q.device) if visible is not None and masked else None
            at = positions[rows] if positions is not None and masked else None
            want, want_lse = attend_sequence(q[rows], request.k[layer], request.v[layer], problem, weights, mask, at)
            if new:
                self.largest_error = max(self.largest_error, float((out[rows].double() - want).abs().max()))
            self.assert_close(out[rows], want, problem)
            if lse is not None:
                assert_lse_close(lse[rows], want_lse, problem.dtype)
            first += new
        assert torch.equal(out[first:], torch.zeros_like(out[first:])), "a padded token got something else than zero"
        if lse is not None:
            assert torch.equal(lse[first:], torch.full_like(lse[first:], float("-inf")))

    def assert_close(self, out: Tensor, want: Tensor, problem: Problem) -> None:
        """Checks that out is as close to the float64 reference as the problem's kernels must be."""
        assert_attention_close(out, want, problem.dtype)

    def page_zero_is_zero(self) -> bool:
        """True if the reserved page is still all zero, in every layer."""
        layers = (self.runtime.pool.layer(layer) for layer in range(len(self.problems)))
        return all(not pages.raw_k[0].any() and not pages.raw_v[0].any() for pages in layers)


def runtime_of(
    problems: Sequence[Problem],
    options: RuntimeOptions,
    device: torch.device,
    target: Target | None,
    selections: Sequence[Selection] | None,
) -> AttentionRuntime:
    """Returns a runtime with these selections; None: with those that are chosen for the target."""
    if selections is None:
        return build_runtime(problems, options, device=device, target=target)
    kinds = LayerKinds.of(problems, options.spaces(problems), selections)
    return AttentionRuntime(kinds, options, device=device, guards=guards_from_settings())


def first_swa_page(num_pages: int, swa_pages: int) -> int:
    """The first id of an SWA space with that many pages to hand out: none of them is an id of the full space."""
    return num_pages if swa_pages else 1


def free_pages(runtime: AttentionRuntime, space: Space) -> list[int]:
    """The pages of a space that no row holds, including those that are never handed out."""
    held = set(np.unique(runtime.table.space(space).entries_host).tolist())
    return [page for page in range(1, runtime.pool.in_space(space).num_pages) if page not in held]


def poison_free_pages(runtime: AttentionRuntime) -> None:
    """Writes NaN to all pages that no row holds: a staged step reads none of them, including evicted pages."""
    for table in runtime.table.spaces:
        free = torch.tensor(free_pages(runtime, table.space), dtype=torch.long, device=runtime.device)
        for pages in runtime.pool.in_space(table.space).layers:
            pages.fill_nan(free)

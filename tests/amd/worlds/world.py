"""A world: a runtime of any layers, requests whose K and V are also kept densely, and steps that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.mask import StepMask, kv_positions
from rocm_attn.batch.padding import PadTo, token_places
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.split_forward import DraftForward
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards, guards_from_settings
from rocm_attn.machine.target import Target
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import ALL_KEYS, AllKeys, Indexer, Indexing, Pooling, PoolKind, Problem
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.coded import kept
from tests.amd.kernels.sparse_cases import best_units
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.worlds.problems import small_problem

NAN = float("nan")


def packed(visible: Sequence[Tensor], device: torch.device) -> Tensor:
    """uint8: the cells of masks [q_len, kv_len], sequence after sequence; bits after the last one are set."""
    cells = np.concatenate([np.empty(0, bool), *(mask.numpy().flatten() for mask in visible)])
    cells = np.concatenate([cells, np.ones(-len(cells) % 8, bool)])
    return torch.from_numpy(np.packbits(cells, bitorder="little")).to(device)


R = TypeVar("R", bound="Request")


@dataclass
class Request:
    """A request's row and everything that was stored for it, by layer: [kv_len, heads, dim]; index: [kv_len, dim]."""

    row: int
    k: list[Tensor]
    v: list[Tensor]
    index: list[Tensor] = field(default_factory=list)

    @property
    def kv_len(self) -> int:
        return self.k[0].shape[0]

    def first(self: R, row: int, kv_len: int) -> R:
        """Returns a request in another row with the first tokens of this one."""
        k, v, index = ([side[:kv_len] for side in sides] for sides in (self.k, self.v, self.index))
        return replace(self, row=row, k=k, v=v, index=index)


@dataclass
class Rows:
    """The inputs and outputs of a layer's steps, at fixed addresses; those of the index if it has an indexer."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    index_q: Tensor
    index_k: Tensor
    weights: Tensor

    @classmethod
    def of(cls, problem: Problem, num_tokens: int, device: torch.device) -> Rows:
        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_tokens, *shape), NAN, dtype=dtype, device=device)

        q_heads, kv_heads, dtype = problem.num_q_heads, problem.num_kv_heads, problem.dtype
        k = rows(kv_heads, problem.head_dim, dtype=dtype)
        is_latent = problem.pool is PoolKind.LATENT
        selects = problem.indexer
        heads, dim = (selects.num_heads, selects.head_dim) if isinstance(selects, Indexer) else (1, 1)
        return cls(
            rows(q_heads, problem.head_dim, dtype=dtype),
            k,
            k[..., : problem.v_head_dim] if is_latent else rows(kv_heads, problem.v_head_dim, dtype=dtype),
            rows(q_heads, problem.v_head_dim, dtype=dtype),
            rows(q_heads),
            rows(heads, dim, dtype=dtype),
            rows(dim, dtype=dtype),
            rows(heads),
        )

    def fill_nan(self) -> None:
        for rows in vars(self).values():
            rows.fill_(NAN)


def padded_to(pad_to: int | PadTo | None) -> PadTo | None:
    """Converts a number of sequences to PadTo and returns other values unchanged; None lets the ladder decide."""
    return PadTo(pad_to) if isinstance(pad_to, int) else pad_to


def take_back(request: Request, tokens: int) -> None:
    """Rejects the last tokens of a request."""
    kept = request.first(request.row, request.kv_len - tokens)
    request.k, request.v, request.index = kept.k, kept.v, kept.index


@dataclass
class Masked:
    """The mask of the last step: bool [q_len, kv_len] of each request, and the places that windows are counted from."""

    visible: Sequence[Tensor] | None = None
    counted_from: Tensor | None = None


W = TypeVar("W", bound="World")


@dataclass
class World:
    """Requests over a runtime of any layers; each output of a step is compared with the float64 reference.

    A step runs every layer on random rows, eagerly or through graphs. Memory that was not written is NaN: in pages, in
    padded rows, and in outputs before each step. poisons: eager steps write NaN to all pages that no row holds by then

    largest_error: of all outputs that were checked
    rows:          of the last step, by layer
    places:        of the last step's tokens among the padded ones, the real tokens' first
    """

    runtime: AttentionRuntime
    problems: Sequence[Problem]
    generator: torch.Generator
    graphs: bool = False
    poisons: bool = True
    pad_q: float = NAN
    max_tokens: int = 256
    requests: list[Request] = field(default_factory=list)
    largest_error: float = 0.0

    def __post_init__(self) -> None:
        self.places = np.arange(0)
        self.rows = [Rows.of(problem, self.max_tokens, self.runtime.device) for problem in self.problems]
        self._gives_lse = [True] * len(self.problems)
        self._masked = Masked()
        # Unchecked: some tests examine the results of wrong graphs, and all compare every step.
        recorder = recorder_for(self.runtime.device) if self.graphs else None
        self.runner = StepRunner(self.runtime, self.forward, recorder, draft=self._drafts(), check=NO_CHECK)

    @classmethod
    def build(
        cls: type[W],
        problems: Sequence[Problem],
        device: torch.device,
        provider: str,
        *,
        guards: Guards | None = None,
        target: Target | None = None,
        selections: Sequence[Selection] | None = None,
        graphs: bool = False,
        poisons: bool = True,
        pad_q: float = NAN,
        max_tokens: int = 256,
        seed: int = 0,
        **options: Any,
    ) -> W:
        """options: of the runtime; swa_pages: of a space whose ids are none of the full space's"""
        given: dict[str, Any] = {"num_pages": 64, "max_num_seqs": 8, "max_kv_len": 64, **options}
        if given.get("swa_pages"):
            given["first_swa_page"] = given["num_pages"]
            given["swa_pages"] += given["num_pages"]
        runtime = runtime_of(problems, RuntimeOptions(provider=provider, **given), device, target, selections, guards)
        generator = torch.Generator().manual_seed(seed)
        for layer, problem in enumerate(problems):
            runtime.pool.layer(layer).fill_nan(slice(1, None))
            if isinstance(problem.indexer, Indexer):
                runtime.pool.index(layer).fill_nan(slice(1, None))
            runtime.head_weights.set(layer, HeadWeights.random(problem, generator).to(runtime.device))
        return cls(runtime, problems, generator, graphs, poisons, pad_q, max_tokens)

    @classmethod
    def one_layer(
        cls: type[W],
        device: torch.device,
        guards: Guards | None = None,
        *,
        graphs: bool,
        provider: str = "torch",
        problem: Problem | None = None,
        **more: Any,
    ) -> W:
        """Builds a world of one layer, whose guards a test switches off; a graph is padded to eight sequences."""
        given = {"max_num_seqs": 5, "capture_sizes": (8,), "poisons": False, **more}
        problems = [problem if problem is not None else small_problem()]
        return cls.build(problems, device, provider, guards=guards, graphs=graphs, **given)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.runtime.device, self.problems[0].dtype)

    def _whole(self, like: Tensor, most: int) -> Tensor:
        """Whole numbers: scores of an indexer are exact then, and no rounding decides which units are chosen."""
        return torch.randint(-most, most + 1, like.shape, generator=self.generator).to(like)

    def admit(self) -> Request:
        return self._begun(Request(self.runtime.table.admit(), *self._nothing()))

    def admit_all(self, count: int) -> list[Request]:
        return [self.admit() for _ in range(count)]

    def begun(self, *q_len: int) -> list[Request]:
        """Admits a request for each number of new tokens, and gives them these tokens in one step, which is checked."""
        return self.served(q_len)

    def served(self, *steps: Sequence[int], pad_to: int | None = None) -> list[Request]:
        """Admits requests, and gives them the tokens of each step, which is checked."""
        requests = self.admit_all(len(steps[0]))
        for q_len in steps:
            self.step(requests, q_len, pad_to)
        return requests

    def _nothing(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return tuple([getattr(rows, name)[:0].clone() for rows in self.rows] for name in ("k", "v", "index_k"))  # type: ignore[return-value]

    def _begun(self, request: R) -> R:
        self.requests.append(request)
        return request

    def free(self, *requests: Request) -> None:
        """Frees rows and pages."""
        for request in requests:
            self.runtime.table.free(request.row)
            self.requests.remove(request)

    def fork(self, request: R, kv_len: int) -> R:
        return self._begun(request.first(self.runtime.table.fork(request.row, kv_len), kv_len))

    def batch(self, requests: Sequence[Request], q_len: Sequence[int], *, reserve: bool = True) -> StepBatch:
        """Returns a step in which each request gets q_len new tokens. reserve: true if pages are reserved for them"""
        kv_len = [r.kv_len + new for r, new in zip(requests, q_len, strict=True)]
        for request, length in zip(requests, kv_len, strict=True):
            if reserve:
                self.runtime.table.reserve(request.row, length)
        return StepBatch(
            np.array([request.row for request in requests], np.int32),
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
        *,
        halves: bool = False,
    ) -> None:
        """Runs a step of new tokens and checks it.

        visible:   bool [q_len, kv_len] per request: the step's mask
        positions: int32 [num_tokens], of the mask; not given: each token's place
        halves:    true if the step is split in two
        """
        batch = replace(self.batch(requests, q_len), prefixes=prefixes)
        masked = Masked(visible, positions)
        if visible is not None:
            places = kv_positions(batch.kv_len, batch.q_len, self.runtime.device)
            positions = places if positions is None else positions
            # No window of a StepMask reaches further back than that of the sequence's first new token.
            first_place = torch.from_numpy(np.repeat(batch.kv_len - batch.q_len, batch.q_len)).to(positions.device)
            masked.counted_from = torch.maximum(positions, first_place)
            batch = replace(batch, mask=StepMask(packed(visible, self.runtime.device), positions))
        self.run_batch(requests, q_len, batch, pad_to, halves=halves)
        self._masked = masked
        self.check_step(requests, q_len)

    def run(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        pad_to: int | PadTo | None = None,
        *,
        reserve: bool = True,
        halves: bool = False,
    ) -> None:
        """Runs a step of new tokens."""
        self.run_batch(requests, q_len, self.batch(requests, q_len, reserve=reserve), pad_to, halves=halves)

    def run_batch(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        batch: StepBatch,
        pad_to: int | PadTo | None = None,
        *,
        halves: bool = False,
    ) -> None:
        """Runs one step as described by a batch; it gives the requests q_len new tokens."""
        padding = self.runtime.padding
        shape = (padding.split_shape if halves else padding.shape)(batch, padded_to(pad_to))
        self.places, self._masked = token_places(batch, shape), Masked()
        if not self.graphs and len(self.places) > len(self.rows[0].out):
            self.rows = [Rows.of(problem, len(self.places), self.runtime.device) for problem in self.problems]
        real = torch.from_numpy(self.places[: sum(q_len)]).to(self.runtime.device)
        self._draw(self.rows, real)
        self.runner.run(batch, pad_to if isinstance(pad_to, PadTo) else shape)
        self._remember(self.rows, requests, q_len, real)

    def draw(self, num_tokens: int) -> None:
        """Fills the first num_tokens rows of every layer, and all others with NaN, for a step that is run by hand."""
        self.places, self._masked = np.arange(num_tokens), Masked()
        self._draw(self.rows, torch.arange(num_tokens, device=self.runtime.device))

    def keep(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Adds the rows of draw() to the requests, which have stored them."""
        self._remember(self.rows, requests, q_len, torch.arange(sum(q_len), device=self.runtime.device))

    def _draw(self, layers: Sequence[Rows], real: Tensor) -> None:
        for problem, rows in zip(self.problems, layers, strict=True):
            rows.fill_nan()
            rows.q.fill_(self.pad_q)
            q, k, v = (self.random(len(real), *side.shape[1:]) for side in (rows.q, rows.k, rows.v))
            is_latent = problem.pool is PoolKind.LATENT
            q, k, v = self._held(problem, q, k, k[..., : problem.v_head_dim] if is_latent else v)
            rows.q[real], rows.k[real], rows.v[real] = q, k, v
            if isinstance(problem.indexer, Indexer):
                rows.index_q[real] = self._whole(rows.index_q[real], 2)
                rows.index_k[real] = self._whole(rows.index_k[real], 2)
                rows.weights[real] = self._whole(rows.weights[real], 3) / 4

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what a layer gets in place of these random rows: the same, but in a subclass."""
        return q, k, v

    def _remember(
        self, layers: Sequence[Rows], requests: Sequence[Request], q_len: Sequence[int], real: Tensor
    ) -> None:
        for layer, rows in enumerate(layers):
            self.remember(layer, requests, q_len, rows.k[real], rows.v[real])
            news = torch.split(rows.index_k[real], list(q_len))
            for request, new in zip(requests, news, strict=True):
                request.index[layer] = torch.cat([request.index[layer], new])

    def forward(self, step: Part) -> Tensor:
        """Stores, selects and attends in every layer."""
        if self.poisons and not self.graphs:
            poison_free_pages(self.runtime)
        self._attend(step, self.rows)
        return self.rows[-1].out[step.tokens][step.last_token_of_seq.long()]

    def _attend(self, step: Part, rows_of_layers: Sequence[Rows]) -> None:
        at, layers = step.tokens, step.layers
        for layer, (problem, rows) in enumerate(zip(self.problems, rows_of_layers, strict=True)):
            q, out = rows.q[at], rows.out[at]
            if isinstance(problem.indexer, AllKeys):
                self._gives_lse[layer] = self._lse_rows(layer, step, q) is not None
                lse = rows.lse[at] if self._gives_lse[layer] else None
                layers.store_and_attend(layer, q, rows.k[at], rows.v[at], out, lse)
                continue
            layers.store(layer, rows.k[at], rows.v[at])
            if isinstance(problem.indexer, Indexer):
                layers.store_index(layer, rows.index_k[at])
                layers.select(layer, rows.index_q[at], rows.weights[at])
            layers.attend_selected(layer, q, out)

    def _drafts(self) -> DraftForward[Tensor] | None:
        """Returns the forward of rounds of drafts, in a world that has them."""
        return None

    def _lse_rows(self, layer: int, step: Part, q: Tensor) -> Tensor | None:
        """Returns rows for the log-sum-exp, if the step's kernel gives it."""
        problem = self.problems[layer]
        limits = step.plan.kernels[list(dict.fromkeys(self.problems)).index(problem)].entry.limits
        return torch.full(q.shape[:2], NAN, device=q.device) if limits.gives_lse(problem) else None

    def qkv(self, problem: Problem, step: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random rows for the real tokens of a step that a test runs by hand, and NaN for the padded ones."""
        num_padded = step.token_ids.shape[0]
        kv_heads = problem.num_kv_heads
        q = self.random(num_padded, problem.num_q_heads, problem.head_dim)
        k, v = (self.random(num_padded, kv_heads, dim) for dim in (problem.head_dim, problem.v_head_dim))
        for rows in (q, k, v):
            rows[step.num_tokens :] = NAN
        return self._held(problem, q, k, k[..., : problem.v_head_dim] if problem.pool is PoolKind.LATENT else v)

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

    def check_step(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Checks that the last step equals the reference in every layer, and that page 0 is zero."""
        used, source = torch.from_numpy(self.places).to(self.runtime.device), 0
        for layer, (problem, rows) in enumerate(zip(self.problems, self.rows, strict=True)):
            source = layer if isinstance(problem.indexer, Indexer) else source
            if isinstance(problem.indexer, AllKeys):
                lse = rows.lse[used] if self._gives_lse[layer] else None
                masked = self._masked
                self.check(
                    layer, requests, q_len, rows.q[used], rows.out[used], lse, masked.visible, masked.counted_from
                )
            else:
                self._check_selected(layer, source, requests, q_len, used)
        assert page_zero_is_zero(self)

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
            masked = visible is not None and problem.custom_mask
            mask = visible[seq].to(q.device) if visible is not None and masked else None
            at = positions[rows] if positions is not None and masked else None
            want, want_lse = self._reference(layer, request, q[rows], mask, at)
            if new:
                self.largest_error = max(self.largest_error, float((out[rows].double() - want).abs().max()))
            self._assert_close(out[rows], want, problem)
            if lse is not None:
                assert_lse_close(lse[rows], want_lse, problem.dtype)
            first += new
        assert torch.equal(out[first:], torch.zeros_like(out[first:])), "a padded token got something else than zero"
        if lse is not None:
            assert torch.equal(lse[first:], torch.full_like(lse[first:], float("-inf")))

    def _reference(
        self, layer: int, request: Request, q: Tensor, visible: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns attention of a request's last tokens, and its log-sum-exp, in float64."""
        k, v, weights = request.k[layer], request.v[layer], self.runtime.head_weights.of(layer)
        return attend_sequence(q, k, v, self.problems[layer], weights, visible, positions)

    def _assert_close(self, out: Tensor, want: Tensor, problem: Problem) -> None:
        """Checks that out is as close to the float64 reference as the problem's kernels must be."""
        assert_attention_close(out, want, problem.dtype)

    def _check_selected(
        self, layer: int, source: int, requests: Sequence[Request], q_len: Sequence[int], used: Tensor
    ) -> None:
        """Checks a layer that attends to what the indexer of the layer `source` selects. It runs on the CPU."""
        problem, rows, selecting = self.problems[layer], self.rows[layer], self.rows[source]
        assert not isinstance(problem.indexer, AllKeys)
        ratio, first = problem.gqa_ratio, 0
        one = replace(problem, indexer=ALL_KEYS, num_q_heads=ratio, num_kv_heads=1)
        for request, new in zip(requests, q_len, strict=True):
            at = used[first : first + new]
            q, out, index_q, weights = (
                side[at].cpu() for side in (rows.q, rows.out, selecting.index_q, selecting.weights)
            )
            k, v, index = request.k[layer].cpu(), request.v[layer].cpu(), request.index[source].cpu()
            cells = chosen_cells(index_q, weights, index, problem.indexer.indexing)
            for head in range(problem.num_kv_heads):
                seen, heads = cells[:, head if cells.shape[1] > 1 else 0], slice(head * ratio, (head + 1) * ratio)
                k_of_head, v_of_head = (side[:, head : head + 1] for side in (k, v))
                want, _ = attend_sequence(q[:, heads], k_of_head, v_of_head, one, visible=seen)
                self._assert_close(out[:, heads], want, problem)
            first += new
        assert not rows.out[used[first:]].any()


def is_right(world: World, requests: Sequence[Request], q_len: Sequence[int]) -> bool:
    """True if the last step equals the reference."""
    return passes(partial(world.check_step, requests, q_len))


def page_zero_is_zero(world: World) -> bool:
    """True if the reserved page is still all zero, in every layer."""
    pages = map(world.runtime.pool.layer, range(len(world.problems)))
    return not any(part.any() for each in pages for part in each.of_page(0))


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


ALL_ON = Guards()


def runtime_of(
    problems: Sequence[Problem],
    options: RuntimeOptions,
    device: torch.device,
    target: Target | None,
    selections: Sequence[Selection] | None,
    guards: Guards | None = None,
) -> AttentionRuntime:
    """Returns a runtime with these selections; None: with those that are chosen for the target."""
    if selections is None:
        return build_runtime(problems, options, device=device, target=target, guards=guards)
    kinds = LayerKinds.of(problems, options.spaces(problems), selections)
    return AttentionRuntime(kinds, options, device=device, guards=guards or guards_from_settings())


SELECTING: Mapping[str, Any] = MappingProxyType(
    {"num_pages": 96, "max_num_seqs": 4, "max_num_rows": 8, "capture_sizes": (4,), "max_tokens": 64}
)


def selecting(problems: Sequence[Problem], device: torch.device, provider: str = "torch", **more: Any) -> World:
    """Returns a world of layers that select keys."""
    return World.build(problems, device, provider, **{**SELECTING, **more})


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

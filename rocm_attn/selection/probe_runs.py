"""The runs of the probe: steps of a small runtime over one kind of layer, each compared with the reference.

random_run: random rows, as a model has them. Several sequences, prompts, chunks over a prefix, mixed and padded steps,
            NaN wherever nothing was stored. Errors of a whole tile, head or sequence show.
edge_run:   rows in which the keys at the edges of a query's visible keys decide its result (probe_edges.py), at lengths
            at which kernels change their method. An error of one key shows, even among 4,096 others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import RocmAttnError
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.sparse.arguments import NO_UNIT, SelectedArgs, SelectedKeys, SparseTokens
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.oracle.numerics import Bound, bounds_of, eight_bit_queries, error_parts
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import ALL_KEYS, EarlierSelection, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import BoundKernel, LayerKernel, PoolSize
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.probe_edges import (
    EDGE_STEPS,
    LENGTHS,
    NUM_EDGE_ROWS,
    EdgeRows,
    cached_lengths,
    gentle_weights,
    prompt_lengths,
)
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part

# New tokens of three sequences, step by step. Together they cross pages, tiles and partitions of 256 keys, and have
# every kind of step twice: with short and with long sequences.
_STEPS: tuple[tuple[int, ...], ...] = (
    (5, 2, 17),
    (4, 1, 2),
    (1, 1, 1),
    (3, 2, 9),
    (1, 0, 5),
    (70, 2, 251),
    (1, 1, 1),
    (1, 33, 1),
    (4, 3, 0),
)
_PAD_TO = 4
# A large batch: kernels cut its sequences into fewer parts, or into none, which is another code path.
_MANY = 512
# The longest sequence gets 287 tokens in these steps.
_MAX_KV_LEN = 512

# The number of last new tokens that are compared: the reference takes float64 for each of them and each key.
_MOST_COMPARED = 96

# The scales of K and of V in eight bits.
_K_FACTOR, _V_FACTOR = 0.5, 0.25

# Tokens that are stored at once in steps without attention.
_CHUNK = 4096

# The place of each token of a step over selections, and the keys that it selects of those before it and its own.
_SELECTED = ((299, 300), (299, 150), (70, 40), (16, 17), (0, 1), (40, 0))

# The inputs of a verdict, in addition to the machine and the kernels.
ALL_OF_IT = [_STEPS, _MAX_KV_LEN, EDGE_STEPS, LENGTHS, _MANY, _K_FACTOR, _V_FACTOR, _SELECTED]


@dataclass(frozen=True, slots=True)
class FailedProbe:
    """The first probed kernel that is wrong, with its fault. lacks_memory: True if it failed for lack of memory"""

    kernel: str
    what: str
    lacks_memory: bool = False


@dataclass
class _Failed(Exception):
    """A probed kernel, or its schedule, raised an exception."""

    fault: FailedProbe


@dataclass(frozen=True, slots=True)
class _Rows:
    """The inputs of a step: q, k and v of its padded tokens, each [tokens, heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class _Run:
    """A small runtime, and all rows that its sequences have stored, in order: [tokens, kv_heads, dim]."""

    runtime: AttentionRuntime
    problem: Problem
    weights: HeadWeights
    rows: list[int]
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        selection: Selection,
        device: torch.device,
        *,
        max_kv_len: int,
        num_seqs: int,
        weights: HeadWeights,
    ) -> _Run:
        num_pages = 1 + num_seqs * -(-max_kv_len // selection.problem.page_size)
        fitting = _for_a_pool_of(selection, PoolSize(num_pages, max_kv_len, _PAD_TO))
        problem = fitting.problem
        runtime = AttentionRuntime(
            LayerKinds((fitting,), (Space.FULL,), (0,)),
            RuntimeOptions(num_pages, num_seqs, max_kv_len, capture_sizes=(_PAD_TO,)),
            device=device,
            guards=guards_from_settings(),
        )
        pages = runtime.pool.layer(0)
        pages.fill_nan(slice(1, None))
        if problem.kv_scales in (Scales.LAYER, Scales.HEAD):
            # They differ from 1, and from each other except for latent pages, so that a missing scale shows.
            for scale, scale_value in ((pages.v_scale, _V_FACTOR), (pages.k_scale, _K_FACTOR)):
                assert scale is not None
                scale.fill_(scale_value)
        runtime.head_weights.set(0, weights.to(runtime.device))
        run = cls(runtime, problem, weights.to(runtime.device), [])
        run.admit(num_seqs)
        return run

    def admit(self, num_seqs: int) -> None:
        """Begins num_seqs sequences, which replace the earlier ones."""
        for row in self.rows:
            self.runtime.table.free(row)
        problem = self.problem
        self.rows = [self.runtime.table.admit() for _ in range(num_seqs)]
        empty = torch.empty(0, problem.num_kv_heads, problem.head_dim, dtype=problem.dtype, device=self.runtime.device)
        self.k = [empty for _ in self.rows]
        self.v = [empty[..., : problem.v_head_dim] for _ in self.rows]

    @property
    def kv_len(self) -> list[int]:
        """Tokens in the KV of each sequence."""
        return [len(k) for k in self.k]

    def store(self, q_len: Sequence[int], k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Appends rows to each sequence without attention, a chunk at a time."""
        for first in range(0, max(q_len), _CHUNK):
            new = [max(0, min(length - first, _CHUNK)) for length in q_len]
            with self._step(new) as step:
                chunks = (
                    self._packed([rows[first : first + n] for rows, n in zip(each, new, strict=True)], step)
                    for each in (k, v)
                )
                brought = self._rows(torch.empty(0), *chunks)
                step.layers.store(0, brought.k, brought.v)
            self._remember(brought.k, brought.v, new)

    def wrong(
        self, q_len: Sequence[int], rows_of: Callable[[Part], _Rows], pad_to: int = _PAD_TO
    ) -> FailedProbe | None:
        """The fault of a step with q_len new tokens; None if there is none, or if the kernel is not probed.

        rows_of: returns the rows of the running step
        """
        with self._step(q_len, pad_to) as step:
            row = step.plan.kernels[0].entry
            rows = rows_of(step)
            step.layers.store(0, rows.k, rows.v)
            self._remember(rows.k, rows.v, q_len)
            if not row.is_probed:
                return None
            where = _where(step.plan.shape.kind, self.kv_len)
            what = self._difference(step, q_len, rows.q, where)
            return FailedProbe(row.name, f"{what} {where}") if what else None

    @contextmanager
    def _step(self, q_len: Sequence[int], pad_to: int = _PAD_TO) -> Iterator[Part]:
        kv_len = [had + new for had, new in zip(self.kv_len, q_len, strict=True)]
        for row, length in zip(self.rows, kv_len, strict=True):
            self.runtime.table.reserve(row, length)
        as_int32 = (np.array(each, np.int32) for each in (self.rows, kv_len, q_len))
        batch = StepBatch(*as_int32)
        plan = self.runtime.plan(batch, PadTo(pad_to))
        entry = plan.kernels[0].entry
        with ExitStack() as stack:
            # Its schedule is made here.
            with _foreign_failures(entry.name, _where(plan.shape.kind, kv_len)) if entry.is_probed else nullcontext():
                step = stack.enter_context(self.runtime.step(batch, plan))
            yield step.parts[0]

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> _Rows:
        """The inputs of a step; in a latent pool, V is a part of K."""
        return _Rows(q, k, k[..., : self.problem.v_head_dim] if self.problem.pool is PoolKind.LATENT else v)

    def _packed(self, rows: Sequence[Tensor], step: Part) -> Tensor:
        """Packs the rows of sequences into those of a step: one after the other, NaN in padded tokens."""
        packed = torch.cat(list(rows))
        padded = packed.new_full((step.token_ids.shape[0], *packed.shape[1:]), float("nan"))
        padded[: len(packed)] = packed
        return padded

    def _remember(self, k: Tensor, v: Tensor, q_len: Sequence[int]) -> None:
        """Keeps the stored rows; for eight-bit pages their decoded content, so that only attention is compared."""
        if self.problem.kv_encoding is not KVEncoding.LIKE_Q:
            self._read_back(q_len)
            return
        first = 0
        for seq, new in enumerate(q_len):
            token = slice(first, first + new)
            self.k[seq], self.v[seq] = torch.cat([self.k[seq], k[token]]), torch.cat([self.v[seq], v[token]])
            first += new

    def _read_back(self, q_len: Sequence[int]) -> None:
        pages = self.runtime.pool.layer(0)
        for seq, (row, had, new) in enumerate(zip(self.rows, self.kv_len, q_len, strict=True)):
            ids = self.runtime.table.pages_of(row, Space.FULL)[: -(-(had + new) // self.problem.page_size)]
            held = pages.read(torch.tensor(ids.tolist(), dtype=torch.long, device=self.runtime.device))
            self.k[seq], self.v[seq] = (side.flatten(0, 1)[: had + new] for side in held)

    def wrong_at_edges(
        self, cached: Sequence[int], steps: Sequence[Sequence[int]], last_pad_to: int = _PAD_TO
    ) -> FailedProbe | None:
        """The first fault at the edges in these steps of new sequences, with `cached` tokens in the cache.

        last_pad_to: the size that the last step is padded to
        """
        self.admit(len(cached))
        of_seq = list(zip(*steps, strict=True))
        edges = [
            EdgeRows.of(self.problem, length, q_len, seed).to(self.runtime.device)
            for seed, (length, q_len) in enumerate(zip(cached, of_seq, strict=True))
        ]
        self.store(cached, [rows.k for rows in edges], [rows.v for rows in edges])
        for number, q_len in enumerate(steps, 1):
            new = [slice(had, had + n) for had, n in zip(self.kv_len, q_len, strict=True)]

            def rows_of(step: Part, new: Sequence[slice] = new) -> _Rows:
                q, k, v = (
                    self._packed([getattr(rows, name)[span] for rows, span in zip(edges, new, strict=True)], step)
                    for name in ("q", "k", "v")
                )
                return self._rows(q, k, v)

            wrong = self.wrong(q_len, rows_of, last_pad_to if number == len(steps) else _PAD_TO)
            if wrong is not None:
                return wrong
        return None

    def _difference(self, step: Part, q_len: Sequence[int], q: Tensor, where: str) -> str:
        """Describes the error of a running step's output; empty if there is none. Raises _Failed."""
        problem = self.problem
        out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if problem.wants_lse else None
        row, first = step.plan.kernels[0].entry, 0
        with _foreign_failures(row.name, where):
            step.layers.attend(0, q, out, lse)
            out, lse = out.clone(), None if lse is None else lse.clone()
            wait_for_device(out.device)  # a kernel fails when it runs, not when it is launched
        if row.rounds_queries:
            q = eight_bit_queries(q, problem.page_format.encoding.dtype)
        bound = bounds_of(problem.dtype, eight_bit_products=row.rounds_products).out
        for seq, new in enumerate(q_len):
            token = slice(max(first, first + new - _MOST_COMPARED), first + new)
            want, want_lse = attend_sequence(q[token], self.k[seq], self.v[seq], problem, self.weights)
            if not _close(out[token], want, bound) or not (lse is None or _close(lse[token], want_lse, bound)):
                return f"sequence {seq} of {len(q_len)} is wrong"
            first += new
        return "" if bool((out[first:] == 0).all()) else "a padded token is not zero"


def _close(result: Tensor, reference: Tensor, bound: Bound) -> bool:
    return bool((error_parts(result, reference, bound) <= 1).all())


def outcome(
    run: Callable[[Selection, torch.device], FailedProbe | None], selection: Selection, device: torch.device
) -> FailedProbe | None:
    """The fault that a run finds, or with which a probed kernel ends it; None if there is none."""
    try:
        return run(selection, device)
    except _Failed as failed:
        return failed.fault


def random_run(selection: Selection, device: torch.device) -> FailedProbe | None:
    """The first kernel that is wrong on random rows; later kernels are not checked before it is replaced."""
    problem, generator = selection.problem, torch.Generator().manual_seed(0)
    run = _Run.of(
        selection,
        device,
        max_kv_len=_MAX_KV_LEN,
        num_seqs=len(_STEPS[0]),
        weights=HeadWeights.random(problem, generator),
    )

    def rows_of(step: Part) -> _Rows:
        def random(num_heads: int, dim: int) -> Tensor:
            rows = torch.randn(step.token_ids.shape[0], num_heads, dim, generator=generator)
            rows[step.num_tokens :] = float("nan")
            return rows.to(run.runtime.device, problem.dtype)

        heads = (problem.num_q_heads, problem.head_dim), (problem.num_kv_heads, problem.head_dim)
        return run._rows(*(random(*each) for each in (*heads, (problem.num_kv_heads, problem.v_head_dim))))

    found = (run.wrong(q_len, rows_of) for q_len in _STEPS)
    return next((wrong for wrong in found if wrong is not None), None)


def edge_run(selection: Selection, device: torch.device) -> FailedProbe | None:
    """The first kernel that sees a key too few or too many; later kernels are not checked before it is replaced.

    Runs a step with nothing in the cache, then one of each kind over rows that were stored without attention.
    """
    problem = selection.problem
    prompt, cached = prompt_lengths(problem), cached_lengths(problem)
    max_kv_len = max(*prompt, *cached) + NUM_EDGE_ROWS
    run = _Run.of(
        selection,
        device,
        max_kv_len=max_kv_len,
        num_seqs=len(cached),
        weights=gentle_weights(problem, max_kv_len),
    )
    wrong = run.wrong_at_edges((0,) * len(prompt), (prompt,)) or run.wrong_at_edges(
        cached, EDGE_STEPS, last_pad_to=_MANY
    )
    return wrong and replace(wrong, what=f"by a key at an edge: {wrong.what}")


def selected_run(selection: Selection, device: torch.device) -> FailedProbe | None:
    """The fault of a latent layer's attention over selections of single tokens; None if it is right.

    The tokens of a sequence select random keys in random pages, one of them a single key, one none, and the last one is
    padded. Rows that no token selects are NaN.
    """
    problem, sparse = replace(selection.problem, indexer=ALL_KEYS), selection.sparse
    assert sparse is not None
    assert isinstance(selection.problem.indexer, Indexer | EarlierSelection)
    width, generator = selection.problem.indexer.indexing.width, torch.Generator().manual_seed(0)
    num_keys = max(_SELECTED)[0] + 1
    num_pages, num_tokens = 2 + num_keys // problem.page_size, len(_SELECTED) + 1
    q = torch.randn(num_tokens, problem.num_q_heads, problem.head_dim, generator=generator).to(problem.dtype)
    page_of = 1 + torch.randperm(num_pages - 1, generator=generator)
    places = page_of[:, None] * problem.page_size + torch.arange(problem.page_size)
    picked = [
        torch.randperm(position + 1, generator=generator)[: min(count, width)].sort()[0]
        for position, count in _SELECTED
    ]
    units = torch.full((num_tokens, 1, width), NO_UNIT, dtype=torch.int32)
    for token, chosen in enumerate(picked):
        units[token, 0, : len(chosen)] = chosen
    q[-1] = float("nan")
    stored = torch.zeros(places.numel(), dtype=torch.bool)
    stored[torch.cat(picked)] = True
    pages = _random_latents(problem, num_pages, places.flatten()[stored], generator, device)
    # Read back as they were stored, so that only attention is compared.
    rows = pages.read(torch.arange(num_pages, device=device))[0].flatten(0, 1)

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    tokens = SparseTokens(
        int32(*[0] * num_tokens), int32(*(at for at, _ in _SELECTED), 0), int32(num_tokens - 1), num_keys, num_keys
    )
    selected = SelectedKeys(units.to(device), (units >= 0).sum(2, dtype=torch.int32).to(device), 1)
    q = q.to(device)
    out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
    workspace = torch.empty(sparse.selected.workspace_words(PaddedShape(StepKind.MIXED, num_tokens, num_tokens)))
    table = page_of[None].to(device, torch.int32)
    args = SelectedArgs(q, pages, table, tokens, selected, out, None, None, workspace.to(device))

    name, where = sparse.entries[0], "over a selection"
    with _foreign_failures(name, where):
        sparse.selected.attend(args)
        wait_for_device(out.device)
    bound = bounds_of(problem.dtype, eight_bit_products=False).out
    for token, chosen in enumerate(picked):
        seen = rows[places.flatten()[chosen].to(device)]
        visible = torch.ones(1, len(chosen), dtype=torch.bool, device=device)
        one = slice(token, token + 1)
        want, _ = attend_sequence(q[one], seen, seen[..., : problem.v_head_dim], problem, visible=visible)
        if not _close(out[one], want, bound):
            return FailedProbe(name, f"token {token} of {num_tokens} is wrong {where}")
    return None if bool((out[-1] == 0).all()) else FailedProbe(name, f"a padded token is not zero {where}")


def _random_latents(
    problem: Problem, num_pages: int, places: Tensor, generator: torch.Generator, device: torch.device
) -> LayerPages:
    """Pages of a latent layer with random rows in some places, and NaN in others."""
    form = problem.page_format
    pages = LayerPages.latent(torch.empty(num_pages, form.line, dtype=form.encoding.dtype, device=device), form)
    pages.fill_nan(slice(None))
    rows = torch.randn(len(places), 1, problem.head_dim, generator=generator).to(device, problem.dtype)
    at = (places // problem.page_size).to(device), (places % problem.page_size).to(device)
    if pages.record is None:
        pages.raw_k[at] = rows
    else:
        pages.record.put(at, RecordParts.of_rows(rows, form))
    return pages


@contextmanager
def _foreign_failures(kernel: str, where: str) -> Iterator[None]:
    """Turns any exception of a probed kernel into _Failed. where: a clause, the step or selection of the kernel

    Failing compilers, tiles that do not fit, lack of memory, missing modules, assertions: none of them is a reason to
    stop a model that another kernel can serve. A build that fails may raise SystemExit. Errors
    of this project are passed on, and so is KeyboardInterrupt.
    """
    try:
        yield
    except RocmAttnError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error).strip()
        what = f"it raised {text.splitlines()[0]!r}" if text else f"it raised {type(error).__name__}"
        lacks_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        raise _Failed(FailedProbe(kernel, f"{what} {where}", lacks_memory)) from error


def _for_a_pool_of(selection: Selection, pool: PoolSize) -> Selection:
    """The same kernels, bound for a pool of another size; those of steps that attend to all keys."""
    problem = replace(selection.problem, indexer=ALL_KEYS)
    kernels = {
        kind: LayerKernel(kernel.entry, kernel.entry.bind(problem, selection.target, pool))
        for kind, kernel in selection.kernels.items()
    }
    probed = {
        kind: replace(kernel, bound=_of_large_steps(kernel.bound)) if kernel.entry.is_probed else kernel
        for kind, kernel in kernels.items()
    }
    return replace(selection, problem=problem, kernels=probed, sparse=None)


def _of_large_steps(bound: BoundKernel) -> BoundKernel:
    """The kernel of a row's largest steps, for steps of any size: the probe's are too small for it to be chosen.

    Kernels that a probed row leaves small steps to are those that serve without it.
    """
    if isinstance(bound, TritonMixed):
        return replace(bound, extend=_of_large_steps(bound.extend))
    return bound.other if isinstance(bound, KernelByTokens) else bound


def _where(kind: StepKind, kv_len: Sequence[int]) -> str:
    return f"in {_named(kind)} of lengths {', '.join(map(str, kv_len))}"


def _named(kind: StepKind) -> str:
    return f"{'an' if kind is StepKind.EXTEND else 'a'} {kind.value} step"

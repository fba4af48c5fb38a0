"""Random data for a layer's step: random pages of a pool, and the step's tensors in every form that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind, Scales
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.step.head_weights import HeadWeights
from rocm_lab.bench.batch_spec import BatchSpec

# Entries after the last page of a list or a table row, for kernels that read ahead. They name page 0.
_READ_AHEAD = 256


@dataclass(frozen=True, slots=True)
class StepData:
    """A layer and a step of it, on a device; S sequences, T new tokens.

    step:         with page list and block table in addition to the tensors of every step
    bounds:       of the step
    q, out:       [T, q_heads, head_dim | v_head_dim]; out is NaN until a kernel writes it
    pages:        of the layer; several steps may share them, each with pages of its own. Page 0 is zero
    weights:      of the query heads
    pages_of_seq: pages of each sequence, in order, int64 on the device
    lse:          float32 [T, q_heads]; None if a kernel is not to give it
    """

    problem: Problem
    batch: BatchSpec
    step: StepTensors
    bounds: StepBounds
    q: Tensor
    out: Tensor
    pages: LayerPages
    weights: HeadWeights
    pages_of_seq: tuple[Tensor, ...]
    lse: Tensor | None = None

    @property
    def kind(self) -> StepKind:
        """The kind of the step."""
        return self.bounds.shape.kind

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.q.device

    def layer(self, kernel: BoundKernel) -> Callable[[], None]:
        """Returns the launch of the layer by a kernel, with memory of its own, after the work that a step does once."""
        step, bounds, queries = self.step, self.bounds, self.bounds.queries(self.step)
        schedule = torch.empty(kernel.schedule.words(bounds.shape), dtype=torch.int32, device=self.device)
        args = AttendArgs(
            q=self.q,
            pages=self.pages,
            table=step.table,
            queries=queries,
            out=self.out,
            lse=self.lse,
            sinks=self.weights.sinks,
            slopes=self.weights.alibi_slopes,
            schedule=schedule,
            workspace=torch.empty(kernel.workspace_words(bounds.shape), dtype=torch.float32, device=self.device),
        )
        kernel.schedule.build(queries, step, bounds, schedule)
        return partial(kernel.attend, args, step, bounds)

    def with_lse(self) -> StepData:
        """The same, with memory for the log-sum-exp."""
        return replace(self, lse=self.q.new_full(self.out.shape[:2], float("nan"), dtype=torch.float32))


def random_steps(problem: Problem, batch: BatchSpec, count: int, device: torch.device, seed: int) -> list[StepData]:
    """Returns `count` steps over separate pages of one pool; the same ones for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    num_pages = [-(-kv_len // problem.page_size) for kv_len in batch.kv_len]
    pages = random_pages(problem, sum(num_pages) * count + 1, generator)
    order = torch.randperm(sum(num_pages) * count, device=device, generator=generator) + 1
    weights = HeadWeights.random(problem, torch.Generator().manual_seed(seed)).to(device)
    steps = []
    for mine in order.view(count, -1):
        q = torch.randn(
            batch.num_tokens,
            problem.num_q_heads,
            problem.head_dim,
            device=device,
            generator=generator,
            dtype=problem.dtype,
        )
        steps.append(_step_over(problem, batch, q, pages, weights, mine.split(num_pages)))
    return steps


def empty_step(problem: Problem, batch: BatchSpec, count: int) -> StepData:
    """Returns the first of random_steps() on the CPU, without data in its pages: to compile for."""
    num_pages = [-(-kv_len // problem.page_size) for kv_len in batch.kv_len]
    device = torch.device("cpu")
    pool = KVPool([problem], num_pages=sum(num_pages) * count + 1, page_size=problem.page_size, device=device)
    q = torch.empty(batch.num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype)
    weights = HeadWeights.random(problem, torch.Generator().manual_seed(0))
    pages_of_seq = torch.split(torch.arange(1, sum(num_pages) + 1), num_pages)
    return _step_over(problem, batch, q, pool.layers[0], weights, pages_of_seq)


def _step_over(
    problem: Problem,
    batch: BatchSpec,
    q: Tensor,
    pages: LayerPages,
    weights: HeadWeights,
    pages_of_seq: Sequence[Tensor],
) -> StepData:
    """Returns a step of these queries over these pages. pages_of_seq: integer, on q's device"""
    device = q.device
    num_seqs, num_tokens, kv_len, q_len = batch.num_seqs, batch.num_tokens, batch.kv_len, batch.q_len
    num_pages = [len(mine) for mine in pages_of_seq]
    masked = problem.custom_mask and any(batch.spans)
    table = torch.zeros(num_seqs, max(num_pages) + _READ_AHEAD, dtype=torch.int32, device=device)
    is_page = torch.arange(table.shape[1], device=device) < ints(num_pages, device)[:, None]
    table[is_page] = torch.cat(list(pages_of_seq)).int()
    indptr = torch.tensor([0, *num_pages]).cumsum(0).int().to(device)
    page_list = torch.zeros(sum(num_pages) + _READ_AHEAD, dtype=torch.int32, device=device)
    page_list[: sum(num_pages)] = torch.cat(list(pages_of_seq)).int()
    lengths = ints(kv_len, device)
    in_page = torch.arange(problem.page_size, device=device)
    slots = [(mine[:, None] * problem.page_size + in_page).flatten() for mine in pages_of_seq]
    new_slots = [each[end - new : end] for each, end, new in zip(slots, kv_len, q_len, strict=True)]
    places_of_seq = [range(end - new, end) for end, new in zip(kv_len, q_len, strict=True)]
    step = StepTensors.of(
        ints([], device),
        counts=ints([num_seqs, num_tokens, 1, 0], device),
        kv_len=lengths,
        q_len=ints(q_len, device),
        q_indptr=ints(accumulate(q_len, initial=0), device),
        table=table,
        row_of_seq=ints(range(num_seqs), device),
        kv_len_int64=lengths.long(),
        slot_of_token=torch.cat(new_slots).int(),
        block_table=table,
        page_indptr=indptr,
        page_list=page_list,
        last_page_len=(lengths - 1) % problem.page_size + 1,
        seq_of_token=ints(np.repeat(range(num_seqs), q_len), device),
        position_of_token=ints(chain(*places_of_seq), device),
        **(_mask_tensors(batch, device) if masked else {}),
    )
    bounds = StepBounds(
        PaddedShape(StepKind.MASKED if masked else batch.kind, num_seqs, num_tokens), max(q_len), max(kv_len)
    )
    out = q.new_full((num_tokens, problem.num_q_heads, problem.v_head_dim), float("nan"))
    of_seq = tuple(mine.long() for mine in pages_of_seq)
    return StepData(problem, batch, step, bounds, q, out, pages, weights, of_seq)


def _mask_tensors(batch: BatchSpec, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a step whose mask is the spans of its images: no key has cells, and no window is read."""
    begin, end = np.zeros((2, batch.num_tokens), np.int32)
    first = 0
    for spans, kv_len, q_len in zip(batch.spans, batch.kv_len, batch.q_len, strict=True):
        for span in spans:
            of_span = slice(first + span.start - (kv_len - q_len), first + span.stop - (kv_len - q_len))
            begin[of_span], end[of_span] = span.start, span.stop
        first += q_len
    return {
        "mask_start": ints(batch.kv_len, device),
        "mask_words": ints([0], device),
        "mask_indptr": torch.zeros(batch.num_seqs + 1, dtype=torch.int64, device=device),
        "window_start": ints([0] * batch.num_tokens, device),
        "span_begin": ints(begin, device),
        "span_end": ints(end, device),
    }


def ints(values: Iterable[int], device: torch.device) -> Tensor:
    """Returns int32 on the device."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def random_pages(problem: Problem, num_pages: int, generator: torch.Generator) -> LayerPages:
    """Returns a layer's pages on the generator's device: normal numbers in their encoding, and scales about 1.

    Page 0 is zero.
    """
    form, device = problem.page_format, generator.device

    def rows(dim: int) -> Tensor:
        sizes = num_pages, form.page_size, form.num_kv_heads, dim
        dtype = form.encoding.dtype if form.encoding.dtype.itemsize > 1 else torch.bfloat16
        numbers = torch.randn(*sizes, device=device, generator=generator, dtype=dtype)
        numbers[0] = 0
        return numbers.to(form.encoding.dtype)

    if form.record is not None:
        pages = LayerPages.latent(torch.zeros(num_pages, form.line, dtype=form.encoding.dtype, device=device), form)
        assert pages.record is not None
        size, ids = (num_pages - 1, form.page_size, 1, form.head_dim), torch.arange(1, num_pages, device=device)
        parts = RecordParts.of_rows(torch.randn(*size, device=device, generator=generator), form)
        pages.record.put((ids,), parts)
        return pages

    def scale_values() -> Tensor | None:
        if form.scales is Scales.NONE:
            return None
        sizes = (num_pages, *form.scale_shape) if form.scales is Scales.TOKEN else form.scale_shape
        return torch.rand(sizes, device=device, generator=generator) + 0.5

    k, k_scale = rows(form.head_dim), scale_values()
    if form.kind is PoolKind.LATENT:
        return LayerPages(k, k[..., : form.v_head_dim], form, k_scale, k_scale)
    return LayerPages(k, rows(form.v_head_dim), form, k_scale, scale_values())

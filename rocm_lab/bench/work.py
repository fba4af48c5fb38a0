"""The least that a layer of a step must read, write and multiply."""

from dataclasses import dataclass

import numpy as np

from rocm_attn.kernels.cache.page_format import PoolKind, Scales
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_lab.bench.batch_spec import BatchSpec, Group

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one layer.

    kv_bytes:   keys that a token sees, their values and scales, each read once; for a latent layer, its rows
    num_bytes:  those, queries read and results written, once each
    flops:      of products for pairs of a token and a key that it sees; nothing else is counted
    """

    kv_bytes: int
    num_bytes: int
    flops: int

    def lower_bound_us(self, *, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns the microseconds of the slower one of memory and products."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s) * 1e6


def work_of(problem: Problem, batch: BatchSpec) -> LayerWork:
    """Returns the least work that the layer needs for the step."""
    kv_bytes = sum(group.num_seqs * _rows(problem, group) for group in batch.groups) * _row_bytes(problem)
    dims = problem.head_dim + problem.v_head_dim
    of_tokens = batch.num_tokens * problem.num_q_heads * dims * problem.dtype.itemsize
    pairs = sum(group.num_seqs * _pairs(problem, group) for group in batch.groups)
    return LayerWork(kv_bytes, kv_bytes + of_tokens, 2 * problem.num_q_heads * dims * pairs)


def _row_bytes(problem: Problem) -> int:
    """Returns the bytes of a token's K and V, with scales per token."""
    form = problem.page_format
    elements = sum(form.side_elements) // form.num_kv_heads + (form.record.footer if form.record is not None else 0)
    sides = 1 if form.kind is PoolKind.LATENT else 2
    scales = sides * _SCALE_BYTES * (form.scales is Scales.TOKEN)
    return form.num_kv_heads * (elements * form.encoding.dtype.itemsize + scales)


def _rows(problem: Problem, group: Group) -> int:
    """Returns the number of keys of a sequence that any of its new tokens sees."""
    if problem.window_left == UNLIMITED_WINDOW:
        return group.kv_len
    first = max(0, group.stored - problem.window_left)
    return group.kv_len - (max(first, group.stored // problem.chunk * problem.chunk) if problem.chunk else first)


def _pairs(problem: Problem, group: Group) -> int:
    """Returns the number of pairs of a new token and a key that it sees, per sequence."""
    place = np.arange(group.stored, group.kv_len)
    first, end = np.zeros_like(place), np.full_like(place, group.kv_len)
    if problem.window_left != UNLIMITED_WINDOW:
        first = np.maximum(first, place - problem.window_left)
    if problem.chunk:
        first = np.maximum(first, place // problem.chunk * problem.chunk)
    if problem.window_right != UNLIMITED_WINDOW:
        end = np.minimum(end, place + problem.window_right + 1)
    if problem.custom_mask:
        for span in group.spans:
            of_span = end[span.start - group.stored : span.stop - group.stored]
            np.maximum(of_span, span.stop, out=of_span)
    return int((end - first).sum())

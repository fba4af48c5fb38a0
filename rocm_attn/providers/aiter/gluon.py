"""aiter.ops.triton.gluon.pa_decode_gluon: decode and verify steps over vectorised pools, sequences split into parts.

It takes one scale for a layer, or one for each token and KV head, which it finds by strides: a scale of each head is a
row of a page's tokens with a stride of 0 from page to page.

With several queries in a sequence, equal parts lose keys: query j of n reads keys from first - (n - 1 - j) on in each
part, and a part loads blocks of 256 keys from first on. Parts of a window are whole blocks and lose none, so a verify
step has a window that is wider than any sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import FEW_TOKENS
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.eight_bits import scale_rows, scales_of_tokens
from rocm_attn.providers.aiter.few_tokens import LastRows
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, rows_of_heads

# Keys that a program reads per iteration.
_PARTITION_KEYS = 256

# Programs that a compute unit holds at a time, and the most parts of a sequence. They are those of its own
# get_recommended_splits, which asks the device and is therefore not called.
_PROGRAMS_PER_UNIT, _MOST_PARTS = 2, 8

# Its tiles have at least 4 rows, and 3 heads fill as many.
_FEWEST_HEADS_ON_ONE = 3

# A window that no sequence fills.
_WIDER_THAN_ANY = 1 << 30


@dataclass(frozen=True)
class GluonDecode(AiterKernel):
    """One new token in each sequence, through the dense block table.

    compute_units: of the target
    """

    compute_units: int
    name = "pa_decode_gluon"
    query_length: ClassVar[int] = 1

    @classmethod
    def bind(cls, problem: Problem, target: Target, pool: PoolSize) -> GluonDecode:
        if problem.gqa_ratio < _FEWEST_HEADS_ON_ONE:
            raise LookupError(
                f"it needs {_FEWEST_HEADS_ON_ONE} or more query heads per KV head, and this layer has "
                f"{problem.gqa_ratio}"
            )
        if problem.window_left != UNLIMITED_WINDOW and problem.page_size > _PARTITION_KEYS:
            raise LookupError(
                f"with a window (window_left {problem.window_left}) it needs pages of up to {_PARTITION_KEYS} tokens, "
                f"and page_size is {problem.page_size}"
            )
        return cls(problem, target.compute_units)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.call(args, step, cut(args.workspace, self.parts(bounds.shape)), args.q, args.out)

    def call(
        self, args: AttendArgs, step: StepTensors, scratch: Sequence[Tensor], query: Tensor, output: Tensor
    ) -> None:
        """Calls the function. scratch: parts() of its rows; query, output: query_length rows of each sequence"""
        problem, num_pages = self.problem, len(args.pages.k)
        exp_sums, max_logits, temporary_output, *scales = scratch
        library.pa_decode_gluon()(
            query=query,
            output=output,
            query_length=self.query_length,
            key_cache=args.pages.k,
            value_cache=args.pages.v,
            context_lengths=step.kv_len,
            block_tables=step.block_table,
            softmax_scale=problem.scale,
            max_context_partition_num=exp_sums.shape[2],
            context_partition_size=_PARTITION_KEYS,
            compute_type=problem.dtype,
            # q is unchanged: codes of eight-bit pages get q's dtype, and scales multiply the products.
            query_scale=None,
            key_scale=self._scale(args.pages.k_scale, scales[0], num_pages),
            value_scale=self._scale(args.pages.v_scale, scales[1], num_pages),
            exp_sums=exp_sums,
            max_logits=max_logits,
            temporary_output=temporary_output,
            alibi_slopes=None,
            sinks=args.sinks,
            sliding_window=_sliding_window(problem.window_left, self.query_length),
            # Cuts each sequence into parts by its own length. Without it, a part is 256 keys and the number of parts is
            # frozen.
            ps=True,
        )

    def num_parts(self, num_seqs: int) -> int:
        """Parts that each sequence of a step is cut into: enough to fill the device, depending on the shape alone."""
        if self.problem.window_left != UNLIMITED_WINDOW:
            return 1  # a window is short
        rows = max(1, num_seqs) * self.problem.num_kv_heads * self._on_one_page
        parts = -(-self.compute_units * _PROGRAMS_PER_UNIT // rows) * self._on_one_page
        return min(parts, _MOST_PARTS)

    @property
    def _on_one_page(self) -> int:
        """Programs that share a page, if it is larger than the keys of one iteration."""
        return -(-self.problem.page_size // _PARTITION_KEYS)

    def _scale(self, scale: Tensor | None, rows: Tensor, num_pages: int) -> Tensor | None:
        """The scales in the form that the function takes: [1], or [pages, kv_heads, page_size, 1]."""
        if scale is None or self.problem.kv_scales is Scales.LAYER:
            return scale
        return scales_of_tokens(scale, self.problem, rows, num_pages)[..., None]

    def parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """For each row and part: an exp sum and a maximum in float32, and a partial output; and rows of scales."""
        return self._partials(shape.num_seqs, self.num_parts(shape.num_seqs))

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """Room for parts() of this shape and of every smaller one, whose fewer sequences may have more parts."""
        programs = -(-self.compute_units * _PROGRAMS_PER_UNIT // self.problem.num_kv_heads)
        most = min(shape.num_seqs * self._on_one_page + programs, shape.num_seqs * _MOST_PARTS)
        return self._partials(most, 1)

    def _partials(self, num_seqs: int, num_parts: int) -> tuple[ScratchTensor, ...]:
        problem = self.problem
        rows = (num_seqs, problem.num_kv_heads, num_parts, self.query_length * problem.gqa_ratio)
        return (
            ScratchTensor(rows, torch.float32),
            ScratchTensor(rows, torch.float32),
            ScratchTensor((*rows, problem.v_head_dim), problem.dtype),
            scale_rows(problem),
            scale_rows(problem),
        )


class GluonVerify(GluonDecode):
    """Up to FEW_TOKENS new tokens in each sequence, each of which has as many rows."""

    name = "pa_decode_gluon[verify]"
    query_length = FEW_TOKENS

    @property
    def schedule(self) -> LastRows:
        return LastRows()

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return (*self._rows(shape), *super().room(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        query, output, *scratch = cut(args.workspace, (*self._rows(bounds.shape), *self.parts(bounds.shape)))
        self.schedule.spread(args.q, query, args.schedule)
        self.call(args, step, scratch, query, output)
        self.schedule.collect(output, args.out, args.schedule)

    def _rows(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor]:
        return rows_of_heads(self.problem, shape.num_seqs * FEW_TOKENS, self.problem.num_q_heads)


def _sliding_window(window_left: int, query_length: int) -> int:
    """The window in the function's terms: the last query sees query_length keys less; 0 means no window."""
    if window_left == UNLIMITED_WINDOW:
        return 0 if query_length == 1 else _WIDER_THAN_ANY
    return window_left + 1 + query_length

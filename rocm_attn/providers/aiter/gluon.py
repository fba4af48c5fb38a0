"""aiter.ops.triton.gluon.pa_decode_gluon: decode over vectorised pools, each sequence split into equal parts.

It takes one scale for a layer, or one for each token and KV head, which it finds by strides: a scale of each head is a
row of a page's tokens with a stride of 0 from page to page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.eight_bits import scale_rows, scales_of_tokens
from rocm_attn.providers.contract import NO_SCHEDULE, PoolSize, Schedule, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, num_words

# Keys that a program reads per iteration.
_PARTITION_KEYS = 256

# Programs that a compute unit holds at a time, and the most parts of a sequence. They are those of its own
# get_recommended_splits, which asks the device and is therefore not called.
_PROGRAMS_PER_UNIT, _MOST_PARTS = 2, 8

# Its tiles have at least 4 rows, and 3 heads fill as many.
_FEWEST_HEADS_ON_ONE = 3


@dataclass(frozen=True, slots=True)
class GluonDecode:
    """One new token in each sequence, through the dense block table.

    compute_units: of the target
    """

    problem: Problem
    compute_units: int
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"aiter.pa_decode_gluon({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        problem, num_pages = self.problem, len(args.pages.k)
        exp_sums, max_logits, temporary_output, *scales = cut(args.workspace, self._parts(bounds.shape))
        library.pa_decode_gluon()(
            output=args.out,
            query=args.q,
            key_cache=args.pages.k,
            value_cache=args.pages.v,
            context_lengths=step.kv_len,
            block_tables=step.block_table,
            softmax_scale=problem.scale,
            query_length=1,
            max_context_partition_num=self.num_parts(bounds.shape),
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
            sliding_window=_sliding_window(problem.window_left),
            # Cuts each sequence into parts by its own length. Without it, a part is 256 keys and the number of parts is
            # frozen.
            ps=True,
        )

    def num_parts(self, shape: PaddedShape) -> int:
        """Parts that each sequence of a step is cut into: enough to fill the device, depending on the shape alone."""
        if self.problem.window_left != UNLIMITED_WINDOW:
            return 1  # older releases give a window to one program, for any number of parts
        # Several programs share a page that is larger than the keys of one iteration.
        on_one_page = -(-self.problem.page_size // _PARTITION_KEYS)
        rows = max(1, shape.num_seqs) * self.problem.num_kv_heads * on_one_page
        parts = -(-self.compute_units * _PROGRAMS_PER_UNIT // rows) * on_one_page
        return min(parts, _MOST_PARTS)

    def _scale(self, scale: Tensor | None, rows: Tensor, num_pages: int) -> Tensor | None:
        """The scales in the form that the function takes: [1], or [pages, kv_heads, page_size, 1]."""
        if scale is None or self.problem.kv_scales is Scales.LAYER:
            return scale
        return scales_of_tokens(scale, self.problem, rows, num_pages)[..., None]

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """For each row and part: an exp sum and a maximum in float32, and a partial output; and rows of scales."""
        problem = self.problem
        rows = (shape.num_seqs, problem.num_kv_heads, self.num_parts(shape), problem.gqa_ratio)
        return (
            ScratchTensor(rows, torch.float32),
            ScratchTensor(rows, torch.float32),
            ScratchTensor((*rows, problem.v_head_dim), problem.dtype),
            scale_rows(problem),
            scale_rows(problem),
        )


def _sliding_window(window_left: int) -> int:
    """The window in the function's terms: it sees one key less than the number, its own included; 0 means no window."""
    return 0 if window_left == UNLIMITED_WINDOW else window_left + 2


def bind_gluon(problem: Problem, target: Target, pool: PoolSize) -> GluonDecode:
    """Binds the kernel, which chooses its own tiles. Raises LookupError for layers that it cannot serve."""
    if problem.gqa_ratio < _FEWEST_HEADS_ON_ONE:
        raise LookupError(
            f"it needs {_FEWEST_HEADS_ON_ONE} or more query heads per KV head, and this layer has {problem.gqa_ratio}"
        )
    if problem.window_left != UNLIMITED_WINDOW and problem.page_size > _PARTITION_KEYS:
        raise LookupError(
            f"with a window (window_left {problem.window_left}) it needs pages of up to {_PARTITION_KEYS} tokens, "
            f"and page_size is {problem.page_size}"
        )
    return GluonDecode(problem, target.compute_units)

"""aiter.pa_fwd_asm: decode over vectorised pools in assembly, a program for each sequence and KV head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.contract import NO_SCHEDULE, PoolSize, Schedule, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, num_words, room_for, whole_rows

# Query heads per KV head for which it has kernels in bfloat16 and float16.
_HEADS_ON_ONE = (8, 16)
_SCALE = 128**-0.5


@dataclass(frozen=True, slots=True)
class AssembledDecode:
    """One new token in each sequence, through the dense block table. Its scale is not a parameter."""

    problem: Problem
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"aiter.pa_fwd_asm({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        # For q, the function reads only the stride between tokens; for out, no stride.
        q_rows, out_rows = cut(args.workspace, self._parts(bounds.shape))
        out = room_for(args.out, out_rows)
        library.pa_fwd_asm()(
            Q=whole_rows(args.q, q_rows),
            K=args.pages.k,
            V=args.pages.v,
            block_tables=step.block_table,
            context_lens=step.kv_len,
            block_tables_stride0=step.block_table.stride(0),
            max_qlen=1,
            K_QScale=None,
            V_QScale=None,
            out_=out,
            qo_indptr=None,
            high_precision=1,
            kernelName=None,
        )
        keep_rows(args.out, out)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor]:
        """Room for q and out if their rows are not contiguous."""
        rows = (shape.num_tokens, self.problem.num_q_heads, self.problem.head_dim)
        return ScratchTensor(rows, self.problem.dtype), ScratchTensor(rows, self.problem.dtype)


def bind_asm(problem: Problem, target: Target, pool: PoolSize) -> AssembledDecode:
    """Binds the kernel. Raises LookupError for another scale, and for counts of heads that no kernel was built for."""
    # Compared at the precision of float32, in which it multiplies.
    if not math.isclose(problem.scale, _SCALE, rel_tol=2**-24):
        raise LookupError(f"its scale is 1/sqrt(128), {_SCALE:.9g}, and this layer's is {problem.scale:.9g}")
    if problem.gqa_ratio not in _HEADS_ON_ONE:
        raise LookupError(
            f"it needs {' or '.join(map(str, _HEADS_ON_ONE))} query heads per KV head, and this layer has "
            f"{problem.gqa_ratio}"
        )
    return AssembledDecode(problem)

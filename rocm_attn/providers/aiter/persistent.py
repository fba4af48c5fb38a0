"""aiter.pa_persistent_fwd: decode over vectorised pages of 1024 tokens in eight bits, in assembly, by a schedule.

Its kernels take a scale for each token, and find those of a page and of a KV head by strides that they are given. A
stride of 0 shows them the same 1024 scales in every page, so the scale of a layer or of a head needs one row. The
kernels for a scale of each page ignore those strides, and the scale of the logits is not a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.eight_bits import scale_rows, scales_of_tokens
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, num_words, room_for, whole_rows

PAGE_TOKENS = 1024
_SCALE = 128**-0.5

# Counts of query heads for which it can combine partial results of 128 elements.
_REDUCED_HEADS = (1, 2, 4, 8, 10, 16, 32, 40, 64, 128)


@dataclass(frozen=True, slots=True)
class PageShares:
    """A share of all pages for each compute unit; each KV head gets a part of the units.

    compute_units: of the device, a multiple of num_kv_heads; AITER makes this number of shares
    """

    compute_units: int
    num_kv_heads: int
    gqa_ratio: int

    def words(self, shape: PaddedShape) -> int:
        return num_words(self.parts(shape))

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        addresses, indptr, work, reduce_indptr, final_map, partial_map = cut(words, self.parts(bounds.shape))
        library.get_pa_metadata_v1()(
            seqlens_qo_indptr=step.q_indptr,
            pages_kv_indptr=step.page_indptr,
            context_lens=step.kv_len,
            num_heads_per_head_k=self.gqa_ratio,
            num_heads_k=self.num_kv_heads,
            is_causal=True,
            work_metadata_ptrs=addresses,
            work_indptr=indptr,
            work_info=work,
            reduce_indptr=reduce_indptr,
            reduce_final_map=final_map,
            reduce_partial_map=partial_map,
            kv_granularity=PAGE_TOKENS,
            block_size=PAGE_TOKENS,
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
            fast_mode=True,
            max_split_per_batch=-1,
        )

    def parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """The schedule's buffers, with the sizes that get_pa_metadata_info_v1 gives."""
        num_seqs, units = shape.num_seqs, self.compute_units
        shares = num_seqs + units - 1
        return (
            ScratchTensor((2,), torch.uint64),
            ScratchTensor((units + 1,), torch.int32),
            ScratchTensor((shares * self.num_kv_heads, 8), torch.int32),
            ScratchTensor((num_seqs + 1,), torch.int32),
            ScratchTensor((num_seqs, 2), torch.int32),
            ScratchTensor((min(shares, 2 * (units - 1)),), torch.int32),
        )


@dataclass(frozen=True, slots=True)
class PersistentDecode:
    """One new token in each sequence, through a CSR page list."""

    problem: Problem
    compute_units: int

    @property
    def schedule(self) -> PageShares:
        return PageShares(self.compute_units, self.problem.num_kv_heads, self.problem.gqa_ratio)

    def describe(self) -> str:
        return f"aiter.pa_persistent_fwd({self.problem}, compute_units={self.compute_units})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        problem, k_scale, v_scale = self.problem, args.pages.k_scale, args.pages.v_scale
        assert k_scale is not None
        assert v_scale is not None
        q_rows, out_rows, k_scale_rows, v_scale_rows = cut(args.workspace, self._parts(bounds.shape))
        _, indptr, work, reduce_indptr, final_map, partial_map = cut(args.schedule, self.schedule.parts(bounds.shape))
        out = room_for(args.out, out_rows)
        library.pa_persistent_fwd()(
            Q=whole_rows(args.q, q_rows),
            K=args.pages.k,
            V=args.pages.v,
            output=out,
            max_qlen=1,
            qo_indptr=step.q_indptr,
            kv_indptr=step.page_indptr,
            kv_indices=step.page_list,
            context_lens=step.kv_len,
            work_indptr=indptr,
            work_info=work,
            reduce_indptr=reduce_indptr,
            reduce_final_map=final_map,
            reduce_partial_map=partial_map,
            K_QScale=scales_of_tokens(k_scale, problem, k_scale_rows, len(args.pages.k)),
            V_QScale=scales_of_tokens(v_scale, problem, v_scale_rows, len(args.pages.v)),
            softmax_scale=problem.scale,
            # It has only causal kernels; the only new token of a sequence sees all keys in both cases.
            mask=1,
        )
        keep_rows(args.out, out)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor, ScratchTensor, ScratchTensor]:
        """Room for q and out if their rows are not contiguous, and for scales of K and V of one page."""
        problem = self.problem
        rows = ScratchTensor((shape.num_tokens, problem.num_q_heads, problem.head_dim), problem.dtype)
        return rows, rows, scale_rows(problem), scale_rows(problem)


def bind_persistent(problem: Problem, target: Target, pool: PoolSize) -> PersistentDecode:
    """Binds the kernel, with shares for the target's compute units.

    Raises LookupError for another scale, and for counts of heads whose partial results it cannot combine, or that share
    the units unevenly.
    """
    # Compared at the precision of float32, in which it multiplies.
    if not math.isclose(problem.scale, _SCALE, rel_tol=2**-24):
        raise LookupError(f"its scale is 1/sqrt(128), {_SCALE:.9g}, and this layer's is {problem.scale:.9g}")
    if problem.num_q_heads not in _REDUCED_HEADS:
        raise LookupError(
            f"its reduction needs {', '.join(map(str, _REDUCED_HEADS))} query heads, and this layer has "
            f"{problem.num_q_heads}"
        )
    if target.compute_units % problem.num_kv_heads:
        raise LookupError(
            f"{problem.num_kv_heads} KV heads do not divide {target.compute_units} compute units evenly, as it requires"
        )
    return PersistentDecode(problem, target.compute_units)

"""aiter.mla.mla_decode_fwd over latent pages in eight bits, always by a schedule, as SGLang calls it.

The kernels multiply codes of q with codes of the latent rows. gfx942 has them for 16 and for 128 heads in every
release. A count in between runs as groups of 16 that each read the rows, which is less work than 128 heads of which
most are zero. Releases from v0.1.18 on take 64 heads unchanged, and on gfx950 32 too. Earlier releases differ in how
they group heads on gfx950, so only 16 are taken there (faults.py). 16 heads also have a kernel for four new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import FEW_TOKENS
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter.eight_bits import ScaleOfOne, query_codes, query_parts
from rocm_attn.providers.aiter.few_tokens import LastRows
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.aiter.mla import FEW_HEADS, LatentQueries, decode_latents
from rocm_attn.providers.aiter.mla_persistent import LatentShares
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.schedules import Schedules
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, room_for, rows_of_heads

_LAST_ROWS = LastRows()


@dataclass(frozen=True)
class EightBitLatentDecode(AiterKernel):
    """One new token in each sequence. Heads are padded with zeros to a multiple of 16."""

    shares: LatentShares
    name = "mla_decode_fwd[fp8]"
    num_rows: ClassVar[int] = 1

    @classmethod
    def bind(cls, problem: Problem, target: Target, pool: PoolSize) -> EightBitLatentDecode:
        num_heads, dtype = round_up(problem.num_q_heads, FEW_HEADS), problem.page_format.encoding.dtype
        return cls(problem, LatentShares(target.compute_units, dtype, num_heads, cls.num_rows))

    @property
    def schedule(self) -> Schedules:
        return Schedules((self.shares, ScaleOfOne()))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        *query_rows, out_rows = cut(args.workspace, self.room(bounds.shape))
        out, q = room_for(args.out, out_rows), query_codes(args.q, query_rows)
        self.decode(args, step, bounds.shape, LatentQueries(q, out, step.q_indptr, 1))
        keep_rows(args.out, out)

    def decode(self, args: AttendArgs, step: StepTensors, shape: PaddedShape, rows: LatentQueries) -> None:
        """Calls the function with its schedule and scales."""
        shares, scale_word, *_ = self.schedule.split(shape, args.schedule)
        scales = {"q_scale": scale_word.view(torch.float32), "kv_scale": args.pages.k_scale}
        decode_latents(self.problem, args, step, rows, **scales, **self.shares.as_arguments(shape, shares))

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """Room for queries, saturated and in eight bits, and for out if its rows cannot be written directly."""
        rows = (shape.num_tokens, self.shares.num_heads, self.problem.v_head_dim)
        codes = query_parts(self.problem, shape.num_tokens, self.shares.num_heads)
        return (*codes, ScratchTensor(rows, self.problem.dtype))


class EightBitLatentVerify(EightBitLatentDecode):
    """Up to FEW_TOKENS new tokens in each sequence, by the kernel of 16 heads and as many rows."""

    name = "mla_decode_fwd[fp8, verify]"
    num_rows = FEW_TOKENS

    @property
    def schedule(self) -> Schedules:
        return Schedules((self.shares, ScaleOfOne(), _LAST_ROWS))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q, codes, out = cut(args.workspace, self.room(bounds.shape))
        shares, _, rows = self.schedule.split(bounds.shape, args.schedule)
        *_, starts = cut(shares, self.shares.parts(bounds.shape))
        codes = query_codes(_LAST_ROWS.spread(args.q, q, rows), (q, codes))
        self.decode(args, step, bounds.shape, LatentQueries(codes, out, starts, FEW_TOKENS))
        _LAST_ROWS.collect(out, args.out, rows)

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """Room for rows of q, saturated and in eight bits, and for rows of out."""
        q, out = rows_of_heads(self.problem, shape.num_seqs * FEW_TOKENS, FEW_HEADS)
        return q, ScratchTensor(q.shape, self.problem.page_format.encoding.dtype), out

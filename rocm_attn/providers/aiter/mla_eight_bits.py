"""aiter.mla.mla_decode_fwd over latent pages in eight bits, always by a schedule, as SGLang calls it.

The kernels multiply codes of q with codes of the latent rows. gfx942 has them for 16 and for 128 heads in every
release. A count in between runs as groups of 16 that each read the rows, which is less work than 128 heads of which
most are zero. Releases from v0.1.18 on take 64 heads unchanged, and on gfx950 32 too. Earlier releases differ in how
they group heads on gfx950, so only 16 are taken there (faults.py). 16 heads also have a kernel for four new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import FEW_TOKENS
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter.eight_bits import ScaleOfOne, query_codes, query_parts
from rocm_attn.providers.aiter.few_tokens import LastRows
from rocm_attn.providers.aiter.mla import FEW_HEADS, decode_latents, padded_rows
from rocm_attn.providers.aiter.mla_persistent import LatentShares
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.schedules import Schedules
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, num_words, room_for

_LAST_ROWS = LastRows()


@dataclass(frozen=True, slots=True)
class EightBitLatentDecode:
    """One new token in each sequence. Heads are padded with zeros to a multiple of 16."""

    problem: Problem
    compute_units: int

    @property
    def schedule(self) -> Schedules:
        return Schedules((self._shares, ScaleOfOne()))

    @property
    def _shares(self) -> LatentShares:
        return LatentShares(self.compute_units, self.problem.page_format.encoding.dtype, self._num_heads)

    def describe(self) -> str:
        return f"aiter.mla_decode_fwd({self.problem}, compute_units={self.compute_units}) + aiter.get_mla_metadata_v1"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        *query_rows, out_rows = cut(args.workspace, self._parts(bounds.shape))
        shares, scale_word = self.schedule.split(bounds.shape, args.schedule)
        out = room_for(args.out, out_rows)
        decode_latents(
            self.problem,
            args,
            step,
            q=query_codes(args.q, query_rows),
            out=out,
            qo_indptr=step.q_indptr,
            max_seqlen_q=1,
            q_scale=scale_word.view(torch.float32),
            kv_scale=args.pages.k_scale,
            **self._shares.as_arguments(bounds.shape, shares),
        )
        keep_rows(args.out, out)

    @property
    def _num_heads(self) -> int:
        return -(-self.problem.num_q_heads // FEW_HEADS) * FEW_HEADS

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor, ScratchTensor]:
        """Room for queries, saturated and in eight bits, and for out if its rows cannot be written directly."""
        rows = (shape.num_tokens, self._num_heads, self.problem.v_head_dim)
        return (*query_parts(self.problem, shape.num_tokens, self._num_heads), ScratchTensor(rows, self.problem.dtype))


@dataclass(frozen=True, slots=True)
class EightBitLatentVerify:
    """Up to FEW_TOKENS new tokens in each sequence, by the kernel of 16 heads and as many rows."""

    problem: Problem
    compute_units: int

    @property
    def schedule(self) -> Schedules:
        return Schedules((self._shares, ScaleOfOne(), _LAST_ROWS))

    @property
    def _shares(self) -> LatentShares:
        return LatentShares(self.compute_units, self.problem.page_format.encoding.dtype, num_rows=FEW_TOKENS)

    def describe(self) -> str:
        called = f"aiter.mla_decode_fwd({self.problem}, compute_units={self.compute_units}) of {FEW_TOKENS} rows each"
        return f"{called} + aiter.get_mla_metadata_v1"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape))

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        q, codes, out = cut(args.workspace, self._parts(bounds.shape))
        shares, scale_word, rows = self.schedule.split(bounds.shape, args.schedule)
        decode_latents(
            self.problem,
            args,
            step,
            q=query_codes(_LAST_ROWS.spread(args.q, q, rows), (q, codes)),
            out=out,
            qo_indptr=self._shares.row_starts(bounds.shape, shares),
            max_seqlen_q=FEW_TOKENS,
            q_scale=scale_word.view(torch.float32),
            kv_scale=args.pages.k_scale,
            **self._shares.as_arguments(bounds.shape, shares),
        )
        _LAST_ROWS.collect(out, args.out, rows)

    def _parts(self, shape: PaddedShape) -> tuple[ScratchTensor, ScratchTensor, ScratchTensor]:
        """Room for rows of q, saturated and in eight bits, and for rows of out."""
        q, out = padded_rows(self.problem, shape.num_seqs * FEW_TOKENS, FEW_HEADS)
        return q, ScratchTensor(q.shape, self.problem.page_format.encoding.dtype), out


def bind_eight_bit_latent_decode(problem: Problem, target: Target, pool: PoolSize) -> EightBitLatentDecode:
    """Binds the kernel, with shares for the target's compute units."""
    return EightBitLatentDecode(problem, target.compute_units)


def bind_eight_bit_latent_verify(problem: Problem, target: Target, pool: PoolSize) -> EightBitLatentVerify:
    """Binds the kernel, with shares for the target's compute units."""
    return EightBitLatentVerify(problem, target.compute_units)

"""The triton provider's deterministic kernels: KV is cut at absolute places, see kernels/attention/segments.py."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import AttendArgs, PoolSize, StepBounds
from rocm_attn.providers.scores import scores_of

if TYPE_CHECKING:
    from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles

# Triton is imported when a kernel is bound, as in triton.py.


@dataclass(frozen=True, slots=True)
class SegmentDecode:
    """Decode of sequences with one new token; others are left alone.

    most_segments: that a token may see; the workspace has a slot for each
    """

    problem: Problem
    tiles: SegmentTiles
    num_programs: int
    most_segments: int

    def describe(self) -> str:
        return (
            f"triton.segment_decode({self.problem}, {self.tiles}, programs={self.num_programs}, "
            f"segments={self.most_segments})"
        )

    def schedule_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.decode_schedule import decode_schedule_words

        return decode_schedule_words(self.num_programs, shape.num_seqs)

    def workspace_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.segment_decode import segment_parts_words, segment_slots

        problem, ratio = self.problem, self.problem.gqa_ratio
        slots = segment_slots(
            shape.num_seqs,
            self.most_segments,
            gqa_ratio=ratio,
            num_kv_heads=problem.num_kv_heads,
            tiles=self.tiles,
        )
        return sum(segment_parts_words(slots, gqa_ratio=ratio, v_head_dim=problem.v_head_dim, tiles=self.tiles))

    def schedule_key(self) -> Hashable:
        tiles = self.tiles.decode(self.problem.gqa_ratio)
        rows = tiles.rows_per_seq(self.problem.num_kv_heads)
        return "decode", rows, tiles.block_n, tiles.row_cost, self.num_programs, self.problem.window_left

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule

        launch_decode_schedule(
            step.kv_len,
            step.q_len,
            schedule,
            window_left=self.problem.window_left,
            num_kv_heads=self.problem.num_kv_heads,
            num_programs=self.num_programs,
            tiles=self.tiles.decode(self.problem.gqa_ratio),
        )

    def attend(self, args: AttendArgs) -> None:
        from rocm_attn.kernels.attention.segment_decode import launch_segment_decode

        step = args.step
        launch_segment_decode(
            args.q,
            args.k_pages,
            args.v_pages,
            step.table,
            step.row_of_seq,
            step.kv_len,
            step.q_indptr,
            args.schedule,
            args.workspace,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            most_segments=self.most_segments,
            num_programs=self.num_programs,
            tiles=self.tiles,
        )


@dataclass(frozen=True, slots=True)
class SegmentExtend:
    """Ragged extend over a cached prefix, for sequences with min_q_len new tokens or more."""

    problem: Problem
    tiles: SegmentTiles
    min_q_len: int = 1

    def describe(self) -> str:
        return f"triton.segment_extend({self.problem}, {self.tiles}, min_q_len={self.min_q_len})"

    def schedule_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.extend_schedule import extend_schedule_words

        return extend_schedule_words(
            shape.num_tokens, shape.num_seqs, gqa_ratio=self.problem.gqa_ratio, tiles=self.tiles.extend
        )

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def schedule_key(self) -> Hashable:
        return "extend", self.tiles.extend.tokens_per_tile(self.problem.gqa_ratio), self.min_q_len

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule

        launch_extend_schedule(
            step.kv_len,
            step.q_indptr,
            schedule,
            min_q_len=self.min_q_len,
            num_tokens=bounds.shape.num_tokens,
            gqa_ratio=self.problem.gqa_ratio,
            tiles=self.tiles.extend,
        )

    def attend(self, args: AttendArgs) -> None:
        from rocm_attn.kernels.attention.segment_extend import launch_segment_extend

        step = args.step
        launch_segment_extend(
            args.q,
            args.k_pages,
            args.v_pages,
            step.table,
            step.row_of_seq,
            step.kv_len,
            step.q_indptr,
            args.schedule,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            max_q_len=args.bounds.max_q_len,
            tiles=self.tiles,
        )


def bind_decode(problem: Problem, target: Target, pool: PoolSize) -> SegmentDecode:
    """Deterministic decode. Raises NoTiles."""
    tiles = _tiles(problem, target)
    return SegmentDecode(
        problem,
        tiles,
        num_programs=target.compute_units * tiles.programs_per_cu,
        most_segments=tiles.most_segments(pool.max_kv_len, problem.window_left),
    )


def bind_extend(problem: Problem, target: Target, pool: PoolSize) -> SegmentExtend:
    """Deterministic extend. Raises NoTiles."""
    return SegmentExtend(problem, _tiles(problem, target))


def _tiles(problem: Problem, target: Target) -> SegmentTiles:
    from rocm_attn.kernels.tuning.segment_tiles import segment_tiles

    return segment_tiles(target.arch, head_dim=problem.head_dim, v_head_dim=problem.v_head_dim, dtype=problem.dtype)

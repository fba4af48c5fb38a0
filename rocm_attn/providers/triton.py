"""The triton provider: binds the project's kernels. Reads tables through TableView, so it needs no CSR."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers import triton_segments
from rocm_attn.providers.contract import (
    AttendArgs,
    Bind,
    BoundKernel,
    KernelRow,
    Limits,
    PoolSize,
    Provider,
    StepBounds,
    StepOps,
    aligned_words,
)
from rocm_attn.providers.scores import packed_mask, scores_of
from rocm_attn.providers.shared_prefix import SharedPrefixKernel, limits_of_shared_prefix, problem_of_prefixes

if TYPE_CHECKING:
    from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles

# Triton is imported when a kernel is bound: choosing one, or explaining the choice, needs no Triton.

_LIMITS = Limits(
    archs=("gfx942", "gfx950", "sm_*", "interpreter"),
    dtypes=limits.DTYPES,
    head_dim=(1, limits.MAX_HEAD_DIM),
    v_head_dim=(1, limits.MAX_HEAD_DIM),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_GQA_RATIO,
    window=True,
    soft_cap=True,
    sinks=True,
    alibi=True,
    non_causal=True,
    page_strides=True,
    short_kv=True,
)


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """Split-KV decode of sequences with one new token; others are left alone."""

    problem: Problem
    tiles: DecodeTiles
    num_programs: int

    def describe(self) -> str:
        return f"triton.decode({self.problem}, {self.tiles}, programs={self.num_programs})"

    def schedule_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.decode_schedule import decode_schedule_words

        return decode_schedule_words(self.num_programs, shape.num_seqs)

    def workspace_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.decode import decode_partials_words

        return decode_partials_words(
            self.num_programs,
            num_q_heads=self.problem.num_q_heads,
            num_kv_heads=self.problem.num_kv_heads,
            v_head_dim=self.problem.v_head_dim,
            tiles=self.tiles,
        )

    def schedule_key(self) -> Hashable:
        rows = self.tiles.rows_per_seq(self.problem.num_kv_heads)
        return "decode", rows, self.tiles.block_n, self.tiles.row_cost, self.num_programs, self.problem.window_left

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule

        launch_decode_schedule(
            step.kv_len,
            step.q_len,
            schedule,
            window_left=self.problem.window_left,
            num_kv_heads=self.problem.num_kv_heads,
            num_programs=self.num_programs,
            tiles=self.tiles,
        )

    def attend(self, args: AttendArgs, first_page: Tensor | None = None) -> None:
        from rocm_attn.kernels.attention.decode import launch_paged_decode

        step = args.step
        launch_paged_decode(
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
            num_programs=self.num_programs,
            tiles=self.tiles,
            first_page=first_page,
        )


@dataclass(frozen=True, slots=True)
class TritonExtend:
    """Ragged extend over a cached prefix, for sequences with min_q_len new tokens or more."""

    problem: Problem
    tiles: ExtendTiles
    min_q_len: int = 1

    def describe(self) -> str:
        return f"triton.extend({self.problem}, {self.tiles}, min_q_len={self.min_q_len})"

    def schedule_words(self, shape: PaddedShape) -> int:
        from rocm_attn.kernels.attention.extend_schedule import extend_schedule_words

        return extend_schedule_words(
            shape.num_tokens, shape.num_seqs, gqa_ratio=self.problem.gqa_ratio, tiles=self.tiles
        )

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def schedule_key(self) -> Hashable:
        return "extend", self.tiles.tokens_per_tile(self.problem.gqa_ratio), self.min_q_len

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule

        launch_extend_schedule(
            step.kv_len,
            step.q_indptr,
            schedule,
            min_q_len=self.min_q_len,
            num_tokens=bounds.shape.num_tokens,
            gqa_ratio=self.problem.gqa_ratio,
            tiles=self.tiles,
        )

    def attend(self, args: AttendArgs, mask: PackedMask | None = None) -> None:
        from rocm_attn.kernels.attention.extend import launch_paged_extend

        step = args.step
        launch_paged_extend(
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
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class TritonMasked:
    """Extend by a packed mask, for any number of new tokens."""

    extend: TritonExtend

    def describe(self) -> str:
        return f"{self.extend.describe()} by mask"

    def schedule_words(self, shape: PaddedShape) -> int:
        return self.extend.schedule_words(shape)

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def schedule_key(self) -> Hashable:
        return self.extend.schedule_key()

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        self.extend.build_schedule(step, bounds, schedule)

    def attend(self, args: AttendArgs) -> None:
        self.extend.attend(args, packed_mask(args.step))


@dataclass(frozen=True, slots=True)
class TritonMixed:
    """Decode for the sequences with one new token, extend for the longer ones; both write disjoint tokens of out."""

    decode: BoundKernel
    extend: BoundKernel

    def describe(self) -> str:
        return f"{self.extend.describe()} + {self.decode.describe()}"

    def schedule_words(self, shape: PaddedShape) -> int:
        return self._extend_words(shape) + self.decode.schedule_words(shape)

    def _extend_words(self, shape: PaddedShape) -> int:
        return aligned_words(self.extend.schedule_words(shape))

    def workspace_words(self, shape: PaddedShape) -> int:
        return max(self.extend.workspace_words(shape), self.decode.workspace_words(shape))

    def schedule_key(self) -> Hashable:
        return self.extend.schedule_key(), self.decode.schedule_key()

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        words = self._extend_words(bounds.shape)
        self.extend.build_schedule(step, bounds, schedule[:words])
        self.decode.build_schedule(step, bounds, schedule[words:])

    def attend(self, args: AttendArgs) -> None:
        words = self._extend_words(args.bounds.shape)
        self.extend.attend(replace(args, schedule=args.schedule[:words]))
        self.decode.attend(replace(args, schedule=args.schedule[words:]))


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> TritonDecode:
    from rocm_attn.kernels.tuning.tiles import decode_tiles

    tiles = decode_tiles(
        target.arch,
        gqa_ratio=problem.gqa_ratio,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
    )
    return TritonDecode(problem, tiles, target.compute_units * tiles.programs_per_cu)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize) -> TritonExtend:
    from rocm_attn.kernels.tuning.tiles import extend_tiles

    tiles = extend_tiles(
        target.arch,
        gqa_ratio=problem.gqa_ratio,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
    )
    return TritonExtend(problem, tiles)


def _bind_mixed(problem: Problem, target: Target, pool: PoolSize) -> TritonMixed:
    return TritonMixed(_bind_decode(problem, target, pool), replace(_bind_extend(problem, target, pool), min_q_len=2))


def _bind_masked(problem: Problem, target: Target, pool: PoolSize) -> TritonMasked:
    extend = _bind_extend(problem, target, pool)
    return TritonMasked(replace(extend, tiles=extend.tiles.of_masked_steps()))


def _bind_shared(problem: Problem, target: Target, pool: PoolSize) -> SharedPrefixKernel:
    prefix = _bind_extend(problem_of_prefixes(problem), target, pool)
    return SharedPrefixKernel(problem, prefix, _bind_decode(problem, target, pool), _merge_states)


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    from rocm_attn.kernels.attention.merge_states import launch_merge_states

    launch_merge_states(out_a, lse_a, out_b, lse_b, out, lse)


def _bind_mixed_segments(problem: Problem, target: Target, pool: PoolSize) -> TritonMixed:
    extend = replace(triton_segments.bind_extend(problem, target, pool), min_q_len=2)
    return TritonMixed(triton_segments.bind_decode(problem, target, pool), extend)


def _row(name: str, kind: StepKind, bind: Bind, *needs: Need, batch_invariant: bool = False) -> KernelRow:
    return KernelRow(
        provider="triton",
        name=name,
        kind=kind,
        limits=_LIMITS,
        min_kv_len=0,
        masks_v=True,
        graph_safe=True,
        batch_invariant=batch_invariant,
        needs=frozenset(needs),
        bakes=frozenset(),
        needs_host_lengths=False,
        bind=bind,
    )


def _shared_row() -> KernelRow:
    row = _row("triton.shared_prefix", StepKind.SHARED, _bind_shared, Need.PREFIXES)
    return replace(row, limits=limits_of_shared_prefix(_LIMITS))


def _ops() -> StepOps:
    from rocm_attn.kernels.attention.pads import launch_clear_pads
    from rocm_attn.kernels.cache.store import launch_store_kv
    from rocm_attn.kernels.cache.tails import launch_zero_tails
    from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
    from rocm_attn.kernels.metadata.fill import launch_fill
    from rocm_attn.kernels.metadata.gather_table import launch_gather_table
    from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
    from rocm_attn.kernels.metadata.place_mask import launch_place_mask
    from rocm_attn.kernels.metadata.publish import launch_publish
    from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
    from rocm_attn.kernels.metadata.table_update import launch_table_update
    from rocm_attn.kernels.metadata.take_slots import launch_take_slots

    return StepOps(
        publish=launch_publish,
        device_inputs=launch_device_inputs,
        place_mask=launch_place_mask,
        table_update=launch_table_update,
        fill=launch_fill,
        store_kv=launch_store_kv,
        zero_tails=launch_zero_tails,
        clear_pads=launch_clear_pads,
        publish_engine=launch_publish_engine,
        gather_table=launch_gather_table,
        take_slots=launch_take_slots,
        pack_mask=launch_pack_mask,
    )


TRITON = Provider(
    name="triton",
    rows=(
        _row("triton.decode", StepKind.DECODE, _bind_decode),
        _row("triton.extend", StepKind.EXTEND, _bind_extend),
        _row("triton.extend+decode", StepKind.MIXED, _bind_mixed),
        _row("triton.masked", StepKind.MASKED, _bind_masked, Need.MASK_INDPTR, Need.MASK_WORDS),
        _shared_row(),
        _row("triton.segment_decode", StepKind.DECODE, triton_segments.bind_decode, batch_invariant=True),
        _row("triton.segment_extend", StepKind.EXTEND, triton_segments.bind_extend, batch_invariant=True),
        _row("triton.segment_extend+decode", StepKind.MIXED, _bind_mixed_segments, batch_invariant=True),
    ),
    ops=_ops,
)

"""The torch provider: the readable kernels. It serves CPUs, and any device when asked for by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.metadata.step_tensors import Need
from rocm_attn.kernels.refs import attention, cache, engine_metadata, merge_states, metadata, pads
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers import torch_segments
from rocm_attn.providers.contract import (
    AttendArgs,
    Baked,
    Bind,
    KernelRow,
    Limits,
    PoolSize,
    Provider,
    StepOps,
    Unscheduled,
)
from rocm_attn.providers.scores import packed_mask, scores_of
from rocm_attn.providers.shared_prefix import SharedPrefixKernel, limits_of_shared_prefix, problem_of_prefixes

# Plain torch has no limits of its own; these bound what makes sense.
_LIMITS = Limits(
    archs=("*",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dim=(1, 4096),
    v_head_dim=(1, 4096),
    page_size=(1, 4096),
    max_gqa_ratio=4096,
    window=True,
    soft_cap=True,
    sinks=True,
    pools=(PoolKind.SPLIT, PoolKind.LATENT),
    alibi=True,
    non_causal=True,
    page_strides=True,
    short_kv=True,
)
# Vectorised pools are there for kernels of AITER's, none of which takes a mask.
_ANY_POOL = replace(_LIMITS, pools=tuple(PoolKind))


@dataclass(frozen=True, slots=True)
class _TorchKernel(Unscheduled):
    """What all of them share: work proportional to the table's width."""

    problem: Problem


def _table(problem: Problem, args: AttendArgs) -> Tensor:
    """The table, cut to the pages that the step's longest sequence needs."""
    return args.step.table[:, : -(-args.bounds.max_kv_len // problem.page_size)]


@dataclass(frozen=True, slots=True)
class TorchDecode(_TorchKernel):
    """One new token in each sequence."""

    def describe(self) -> str:
        return f"torch.decode({self.problem})"

    def attend(self, args: AttendArgs, first_page: Tensor | None = None) -> None:
        step = args.step
        attention.paged_decode(
            args.q,
            args.k_pages,
            args.v_pages,
            _table(self.problem, args),
            step.row_of_seq,
            step.kv_len,
            step.q_indptr,
            None,
            None,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            num_programs=1,
            tiles=None,
            first_page=first_page,
        )


@dataclass(frozen=True, slots=True)
class TorchExtend(_TorchKernel):
    """Any number of new tokens in each sequence, one included."""

    def describe(self) -> str:
        return f"torch.extend({self.problem})"

    def attend(self, args: AttendArgs, mask: PackedMask | None = None) -> None:
        step = args.step
        attention.paged_extend(
            args.q,
            args.k_pages,
            args.v_pages,
            _table(self.problem, args),
            step.row_of_seq,
            step.kv_len,
            step.q_indptr,
            None,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            max_q_len=args.bounds.max_q_len,
            tiles=None,
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class TorchMasked(_TorchKernel):
    """Any number of new tokens in each sequence, which see what a packed mask says."""

    def describe(self) -> str:
        return f"torch.masked({self.problem})"

    def attend(self, args: AttendArgs) -> None:
        TorchExtend(self.problem).attend(args, packed_mask(args.step))


def _bind_decode(problem: Problem, target: Target, pool: PoolSize) -> TorchDecode:
    return TorchDecode(problem)


def _bind_extend(problem: Problem, target: Target, pool: PoolSize) -> TorchExtend:
    return TorchExtend(problem)


def _bind_masked(problem: Problem, target: Target, pool: PoolSize) -> TorchMasked:
    return TorchMasked(problem)


def _bind_shared(problem: Problem, target: Target, pool: PoolSize) -> SharedPrefixKernel:
    prefix = TorchExtend(problem_of_prefixes(problem))
    return SharedPrefixKernel(problem, prefix, TorchDecode(problem), merge_states.merge_states)


def _row(
    name: str,
    kind: StepKind,
    bind: Bind,
    *bakes: Baked,
    needs: frozenset[Need] = frozenset(),
    limits: Limits = _ANY_POOL,
) -> KernelRow:
    return KernelRow(
        provider="torch",
        name=name,
        kind=kind,
        limits=limits,
        min_kv_len=0,
        masks_v=True,
        graph_safe=True,
        batch_invariant=False,
        needs=needs,
        bakes=frozenset(bakes),
        needs_host_lengths=False,
        bind=bind,
    )


def _segments_row(kind: StepKind) -> KernelRow:
    row = _row("torch.segments", kind, torch_segments.bind, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN)
    return replace(row, limits=replace(_LIMITS, archs=("cpu", "interpreter")), batch_invariant=True)


def _shared_row() -> KernelRow:
    needs = frozenset({Need.PREFIXES})
    row = _row("torch.shared_prefix", StepKind.SHARED, _bind_shared, Baked.MAX_KV_LEN, needs=needs)
    return replace(row, limits=limits_of_shared_prefix(_LIMITS))


def _ops() -> StepOps:
    return StepOps(
        publish=metadata.publish,
        device_inputs=metadata.device_inputs,
        place_mask=metadata.place_mask,
        table_update=metadata.table_update,
        fill=metadata.fill,
        store_kv=cache.store_kv,
        zero_tails=cache.zero_tails,
        clear_pads=pads.clear_pads,
        publish_engine=engine_metadata.publish_engine,
        gather_table=engine_metadata.gather_table,
        take_slots=engine_metadata.take_slots,
        pack_mask=engine_metadata.pack_mask,
    )


TORCH = Provider(
    name="torch",
    rows=(
        _row("torch.decode", StepKind.DECODE, _bind_decode, Baked.MAX_KV_LEN),
        _row("torch.extend", StepKind.EXTEND, _bind_extend, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN),
        _row("torch.extend", StepKind.MIXED, _bind_extend, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN),
        _row(
            "torch.masked",
            StepKind.MASKED,
            _bind_masked,
            Baked.MAX_KV_LEN,
            Baked.MAX_Q_LEN,
            needs=frozenset({Need.MASK_INDPTR, Need.MASK_WORDS}),
            limits=_LIMITS,
        ),
        _shared_row(),
        *map(_segments_row, (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)),
    ),
    ops=_ops,
)

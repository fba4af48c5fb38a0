"""The torch provider: readable kernels in torch. It serves CPUs, and any device if it is requested by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.kernels.refs import (
    attention,
    cache,
    engine_metadata,
    merge_states,
    metadata,
    pads,
    page_watch,
    rope,
    sampling,
    segments,
    sparse,
    speculative,
    state_places,
    states,
)
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import (
    NO_SCHEDULE,
    Baked,
    Bind,
    KernelEntry,
    Limits,
    PoolSize,
    Provider,
    Schedule,
    StepBounds,
)
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.scores import scores_of, visible_keys
from rocm_attn.providers.shared_prefix import bind_shared, limits_of_shared_prefix
from rocm_attn.providers.sparse import every_row

# Plain torch has no limits of its own; these bound sensible values.
_LIMITS = Limits(
    archs=("*",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dim=(1, 4096),
    v_head_dim=(1, 4096),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=4096,
    window=True,
    soft_cap=True,
    sinks=True,
    pools=(PoolKind.SPLIT, PoolKind.LATENT),
    alibi=True,
    non_causal=True,
    page_strides=True,
    short_kv=True,
    ranges=True,
    encodings=tuple(KVEncoding),
    scales=tuple(Scales),
)
# Vectorised pools exist for AITER's kernels, none of which takes a mask.
_ANY_POOL = replace(_LIMITS, pools=tuple(PoolKind))


@dataclass(frozen=True)
class TorchKernel(ABC):
    """A kernel that torch runs: without a schedule, and without memory of its own."""

    problem: Problem
    scores: Scores = field(init=False, repr=False)
    name: ClassVar[str]
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", scores_of(self.problem))

    @classmethod
    def bind(cls, problem: Problem, target: Target, pool: PoolSize) -> TorchKernel:
        """Binds the kernel: it has no tiles."""
        return cls(problem)

    def describe(self) -> str:
        return f"{self.name}({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    @abstractmethod
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        """See `BoundKernel.attend`."""

    def mask_of(self, step: StepTensors) -> VisibleKeys:
        """The keys that the tokens of a step with a mask see."""
        visibility = self.scores.visibility
        first, end = metadata.visible_ranges(step, visibility)
        return visible_keys(step, first, end, reads_cells=visibility.masked)


class TorchDecode(TorchKernel):
    """One new token in each sequence."""

    name = "torch.decode"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_decode(args, scores=self.scores)


class TorchExtend(TorchKernel):
    """Any number of new tokens in each sequence, one included."""

    name = "torch.extend"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_extend(args, scores=self.scores)


class TorchMasked(TorchKernel):
    """Any number of new tokens in each sequence; the step's mask says which keys they see."""

    name = "torch.masked"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        attention.paged_extend(args, scores=self.scores, mask=self.mask_of(step))


class TorchSegments(TorchKernel):
    """Like `TorchExtend`, but deterministic. On CPUs only: a GPU's BLAS may depend on the batch in unknown ways."""

    name = "torch.segments"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        segments.segment_extend(args, scores=self.scores)


class TorchMaskedSegments(TorchKernel):
    """Like `TorchMasked`, but deterministic."""

    name = "torch.masked_segments"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        segments.segment_extend(args, scores=self.scores, mask=self.mask_of(step))


class TorchEveryRow(TorchKernel):
    """Attention of every kind of step to all rows that a token sees, if rows stand for several tokens."""

    name = "torch.rows"

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        every = every_row(args, step, bounds, max(1, bounds.max_kv_len // self.problem.row.tokens))
        sparse.selected_attention(every, scale=self.problem.scale)


def torch_entry(
    name: str, kind: StepKind, bind: Bind, *bakes: Baked, needs: Iterable[Need] = (), limits: Limits = _ANY_POOL
) -> KernelEntry:
    """Returns a row of kernels that torch runs."""
    return KernelEntry(name, kind, limits, bind, needs=frozenset(needs), bakes=frozenset(bakes))


def _rows_entry(kind: StepKind) -> KernelEntry:
    row = torch_entry("torch.rows", kind, TorchEveryRow.bind, Baked.MAX_KV_LEN)
    of_rows = {"pools": (PoolKind.LATENT,), "row_tokens": (2, limits.MAX_PAGE_SIZE)}
    off = {"window": False, "soft_cap": False, "alibi": False, "non_causal": False}
    return replace(row, limits=replace(_LIMITS, **of_rows, **off))  # type: ignore[arg-type]


def _segments_entry(
    kind: StepKind, kernel: type[TorchKernel] = TorchSegments, needs: Iterable[Need] = ()
) -> KernelEntry:
    row = torch_entry(kernel.name, kind, kernel.bind, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN, needs=needs)
    return replace(row, limits=replace(_LIMITS, archs=("cpu", "interpreter")), batch_invariant=True)


def _shared_entry() -> KernelEntry:
    needs = [Need.PREFIXES]
    bind = bind_shared(TorchExtend.bind, TorchDecode.bind, _ops)
    row = torch_entry("torch.shared_prefix", StepKind.SHARED, bind, Baked.MAX_KV_LEN, needs=needs)
    return replace(row, limits=limits_of_shared_prefix(_LIMITS))


def _ops() -> StepOps:
    return StepOps(
        publish=metadata.publish,
        take_inputs=metadata.take_inputs,
        device_inputs=metadata.device_inputs,
        place_mask=metadata.place_mask,
        draft_steps=metadata.draft_steps,
        place_trees=metadata.place_trees,
        place_spans=metadata.place_spans,
        table_update=metadata.table_update,
        fill=metadata.fill,
        # If a K with gradients joined the pages, or slots, to its graph, they would keep the graph alive for good.
        store_kv=torch.no_grad()(cache.store_kv),
        rope_store=torch.no_grad()(rope.rope_store),
        rope_queries=rope.rope_queries,
        finish=rope.finish,
        zero_tails=cache.zero_tails,
        fold_rows=cache.fold_rows,
        state_places=state_places.state_places,
        convolve=torch.no_grad()(states.convolve),
        recur=torch.no_grad()(states.recur),
        clear_pads=pads.clear_pads,
        merge_states=merge_states.merge_states,
        publish_engine=engine_metadata.publish_engine,
        gather_table=engine_metadata.gather_table,
        check_pages=engine_metadata.check_pages,
        take_slots=engine_metadata.take_slots,
        pack_mask=engine_metadata.pack_mask,
        watch_pages=page_watch.watch_pages,
        export_rows=cache.export_rows,
        accept_drawn=speculative.accept_drawn,
        accept_sampled=speculative.accept_sampled,
        move_paths=speculative.move_paths,
        next_step=speculative.next_step,
        import_rows=cache.import_rows,
        check_selection=sparse.check_selection,
        pick_rows=sampling.pick_rows,
        shape_rows=sampling.shape_rows,
        cut_rows=sampling.cut_rows,
        likeliest=sampling.likeliest,
    )


TORCH = Provider(
    name="torch",
    entries=(
        torch_entry("torch.decode", StepKind.DECODE, TorchDecode.bind, Baked.MAX_KV_LEN),
        torch_entry("torch.extend", StepKind.EXTEND, TorchExtend.bind, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN),
        torch_entry("torch.extend", StepKind.MIXED, TorchExtend.bind, Baked.MAX_KV_LEN, Baked.MAX_Q_LEN),
        torch_entry(
            "torch.masked",
            StepKind.MASKED,
            TorchMasked.bind,
            Baked.MAX_KV_LEN,
            Baked.MAX_Q_LEN,
            needs=[Need.MASK],
            limits=_LIMITS,
        ),
        *map(_rows_entry, (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)),
        _shared_entry(),
        *map(_segments_entry, (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)),
        _segments_entry(StepKind.MASKED, TorchMaskedSegments, needs=[Need.MASK]),
    ),
    ops=_ops,
)

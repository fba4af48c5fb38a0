"""AttentionRuntime: the only file that knows the order of a step.

begin_step   host: check, pad, plan, grow buffers;  device: page copies, table updates, publish, fill
per layer    store, attend, or both in one call
end_step     host only
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.guards import Guards, guards_from_settings
from rocm_attn.hip_graphs.errors import BadLadder
from rocm_attn.hip_graphs.size_ladder import SizeLadder, default_ladder
from rocm_attn.kv_pool import KVPool
from rocm_attn.padding import PaddedShape, PaddingPolicy, StepKind
from rocm_attn.plan import GraphKey, StepPlan, kv_len_bucket, make_plan, q_len_bucket
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import AttendArgs, Baked, Need, StepMetadata, StepOps
from rocm_attn.providers.select import Selection, select
from rocm_attn.publisher import Publisher
from rocm_attn.request_table import RequestTable
from rocm_attn.step_batch import StepBatch
from rocm_attn.step_memory import DeviceStep, StepMemory
from rocm_attn.target import Target, detect_target

# Programs that share a sequence's pages when the CSR list is written: fixed, so that a graph serves every length.
_PAGE_LIST_PROGRAMS = 8


class _State(enum.Enum):
    IDLE = "no step was begun"
    STAGED = "a step was staged and its metadata is not filled yet"
    RUNNING = "a step is running"


@dataclass(frozen=True, slots=True)
class Step:
    """What a model's forward gets. Device tensors at padded sizes: S sequences, T tokens.

    num_seqs, num_tokens: real ones, on the host; a forward that is captured must not use them
    token_ids:            int32 [T], pads 0
    positions:            int32 [T], rope positions, pads 0
    last_token_of_seq:    int32 [S], the token whose hidden state predicts the next one; 0 for pads
    plan:                 how the step runs
    """

    num_seqs: int
    num_tokens: int
    token_ids: Tensor
    positions: Tensor
    last_token_of_seq: Tensor
    plan: StepPlan


class AttentionRuntime:
    """Paged attention for all layers of a model.

    problems:      one for each layer; layers with equal problems share a plan
    num_pages:     pages of the KV pool, the reserved page 0 included
    max_num_seqs:  requests that can be admitted at a time; a padded step may be larger
    max_kv_len:    tokens of the longest sequence
    provider:      "auto", "torch", "triton" or "aiter"
    target:        the hardware; detected when not given
    capture_sizes: sequence counts that decode steps are padded to and may be captured at;
                   not given: a ladder up to max_num_seqs
    capture_tokens: token counts that steps with more than one new token a sequence are padded to and may be
                   captured at; such steps run eagerly above the largest, and by default that is all of them
    guards:        the safeguards; not given: all, less those that the environment switches off (settings.py)

    Raises Unsupported when no kernel serves a layer, BadProblem and CapacityExceeded for a pool that cannot be.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        device: torch.device,
        num_pages: int,
        max_num_seqs: int,
        max_kv_len: int,
        provider: str = "auto",
        target: Target | None = None,
        capture_sizes: Sequence[int] | None = None,
        capture_tokens: Sequence[int] = (1,),
        guards: Guards | None = None,
    ) -> None:
        self.guards = guards = guards if guards is not None else guards_from_settings()
        if guards.off:
            logging.getLogger(__name__).warning("safeguards are switched off: %s", ", ".join(guards.off))
        self.device = _with_index(device)
        self.target = target if target is not None else detect_target(self.device)
        kinds = list(dict.fromkeys(problems))
        self._kind_of_layer = [kinds.index(problem) for problem in problems]
        self.selections = tuple(guards.v_mask(select(kind, self.target, provider)) for kind in kinds)
        self.pool = KVPool(problems, num_pages=num_pages, device=self.device)
        self._ops = guards.change_ops(_ops_of(self.selections))
        self.table = RequestTable(
            max_num_seqs=max_num_seqs,
            max_kv_len=max_kv_len,
            num_pages=num_pages,
            page_size=self.pool.page_size,
            device=self.device,
            row_width=guards.row_width,
            is_shared=guards.copy_on_write,
        )
        self._check_batch = guards.batch_check(self.table)
        seqs = default_ladder(max_num_seqs).sizes if capture_sizes is None else capture_sizes
        self.padding = PaddingPolicy(_ladder("capture_sizes", seqs), _ladder("capture_tokens", capture_tokens))
        self._memory = StepMemory(
            self.selections,
            self.table,
            self.device,
            capacity=guards.capacity(max_num_seqs),
            sealed_growth=guards.sealed_growth,
        )
        self._publisher = Publisher(
            self._ops, self.table, self.pool, ring_wait=guards.ring_wait, deliver=guards.pending_changes
        )
        self._longest = guards.planner_inputs(self._memory.sealed_tensors)
        self._plan_of_key: dict[GraphKey, StepPlan] = {}
        self._plan_of_sizes: dict[tuple[int | None, ...], StepPlan] = {}
        self._baked = frozenset(b for s in self.selections for kernel in s.kernels.values() for b in kernel.row.bakes)
        self._state = _State.IDLE
        self._plan: StepPlan | None = None
        self._step: DeviceStep | None = None
        self._stream: torch.cuda.Stream | None = None
        self._stream_handle = -1

    @property
    def max_kv_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.table.max_kv_len

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Everything that a graph reads and the runtime owns, by name: buffers, workspace, table and pages."""
        pages = {
            f"{side}_pages_{layer}": getattr(self.pool.layer(layer), side)
            for layer in range(len(self._kind_of_layer))
            for side in ("k", "v")
        }
        return {**self._memory.sealed_tensors(), "table": self.table.entries, **pages}

    def begin_step(self, batch: StepBatch, pad_to: int | None = None) -> Step:
        """Stage a step and fill its metadata; then store and attend layer by layer.

        pad_to: sequences to pad to, where ranks must agree; not given: the ladder decides
        Raises BadBatch, CapacityExceeded, WrongState; no step is begun then.
        """
        step = self.stage(batch, pad_to)
        try:
            self.fill()
        except BaseException:
            self.end_step()
            raise
        return step

    def stage(self, batch: StepBatch, pad_to: int | None = None) -> Step:
        """The part of begin_step that runs before a graph: check, plan, update the table, publish the inputs."""
        if self._state is not _State.IDLE:
            raise WrongState(f"a step cannot begin, because {self._state.value}; call end_step() first")
        self._check_batch(batch)
        plan = self._plan_for(batch, pad_to)
        with self._on_device():
            self._follow_stream()
            step = self._memory.device_step(plan)
            self._publisher.apply_table_changes()
            self._publisher.publish(batch, plan, step)
        self._plan, self._step, self._state = plan, step, _State.STAGED
        return Step(
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_tokens,
            token_ids=step.token_ids,
            positions=step.position_of_token,
            last_token_of_seq=step.last_token_of_seq,
            plan=plan,
        )

    def fill(self) -> None:
        """Derive the step's metadata on the device; captured where a step is. Running it twice is harmless."""
        if self._step is None or self._plan is None:
            raise WrongState("there is no step to fill; call begin_step() first")
        step, metadata = self._step, self._step.metadata
        with self._on_device():
            self._ops.fill(
                metadata.counts,
                metadata.table.row_of_seq,
                metadata.kv_len,
                metadata.q_len,
                metadata.table.entries,
                metadata.q_indptr,
                step.last_token_of_seq,
                step.position_of_token,
                step.slot_of_token,
                page_size=self.pool.page_size,
            )
            _fill_needs(self._ops, self._memory.needs, metadata, self.pool.page_size)
            for kernel, schedule in zip(self._plan.kernels, step.schedules, strict=True):
                kernel.bound.build_schedule(metadata, schedule)
        self._state = _State.RUNNING

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer to their slots; padded tokens are dropped.

        k, v: [T, kv_heads, head_dim | v_head_dim]; any strides but the last. Raises BadTensor, WrongState.
        """
        step, _ = self._running()
        problem = self._problem(layer)
        num_tokens = step.slot_of_token.shape[0]
        self._check("k", k, (num_tokens, problem.num_kv_heads, problem.head_dim), problem.dtype)
        self._check("v", v, (num_tokens, problem.num_kv_heads, problem.v_head_dim), problem.dtype)
        pages = self.pool.layer(layer)
        with self._on_device():
            self._ops.store_kv(k, v, step.slot_of_token, step.metadata.counts, pages.k, pages.v)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the step's new tokens over everything that is stored for their sequences.

        q, out: [T, q_heads, head_dim | v_head_dim]; any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; when given, receives the natural log of the softmax denominator, -inf for pads
        Raises BadTensor, WrongState.
        """
        step, plan = self._running()
        problem = self._problem(layer)
        num_tokens = step.slot_of_token.shape[0]
        self._check("q", q, (num_tokens, problem.num_q_heads, problem.head_dim), problem.dtype)
        self._check("out", out, (num_tokens, problem.num_q_heads, problem.v_head_dim), problem.dtype)
        if lse is not None:
            self._check("lse", lse, (num_tokens, problem.num_q_heads), torch.float32)
        kind = self._kind_of_layer[layer]
        pages = self.pool.layer(layer)
        args = AttendArgs(
            step=step.metadata,
            schedule=step.schedules[kind],
            workspace=step.workspace,
            q=q,
            k_pages=pages.k,
            v_pages=pages.v,
            out=out,
            lse=lse,
        )
        with self._on_device():
            plan.kernels[kind].bound.attend(args)

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """store, then attend."""
        self.store(layer, k, v)
        self.attend(layer, q, out, lse)

    def end_step(self) -> None:
        """Close the step, so that the next one may begin. Also the way back after an exception inside a step."""
        self._state = _State.IDLE
        self._plan = self._step = None

    def seal(self) -> None:
        """Fix the addresses that graphs read, at the size of the largest capture. Growing them raises afterwards."""
        if self._state is not _State.IDLE:
            raise WrongState(f"addresses cannot be sealed, because {self._state.value}; call end_step() first")
        with self._on_device():
            self._memory.seal(self.padding.largest_shapes())

    def unseal(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Give up the sealed addresses and take other capture sizes. Every graph of the runtime is void afterwards.

        Raises BadSetting, WrongState; nothing has changed then.
        """
        if self._state is not _State.IDLE:
            raise WrongState(f"addresses cannot be given up, because {self._state.value}; call end_step() first")
        padding = PaddingPolicy(_ladder("capture_sizes", capture_sizes), _ladder("capture_tokens", capture_tokens))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.padding = padding
        self._plan_of_key.clear()
        self._plan_of_sizes.clear()
        self._memory.unseal()

    def _plan_for(self, batch: StepBatch, pad_to: int | None) -> StepPlan:
        max_kv_len = self.table.width * self.pool.page_size
        if Baked.MAX_KV_LEN in self._baked:
            max_kv_len = kv_len_bucket(self._longest(batch), max_kv_len)
        # All that a plan depends on, so that a step of known sizes costs one look-up.
        key = (batch.num_seqs, batch.num_tokens, batch.min_q_len, batch.max_q_len, max_kv_len, pad_to)
        plan = self._plan_of_sizes.get(key)
        if plan is None:
            plan = self._make_plan(self.padding.shape(batch, pad_to), batch, max_kv_len)
            if plan.replayable and plan.shape.kind is StepKind.DECODE:  # ragged sizes are too many to keep
                self._plan_of_sizes[key] = plan
        return plan

    def _make_plan(self, shape: PaddedShape, batch: StepBatch, max_kv_len: int) -> StepPlan:
        may_capture = self.padding.captures(shape)
        max_q_len = 1 if shape.kind is StepKind.DECODE else shape.num_tokens
        if Baked.MAX_Q_LEN in self._baked:
            max_q_len = q_len_bucket(batch.max_q_len) if may_capture else max(1, batch.max_q_len)
        plan = make_plan(
            shape,
            [selection.kernels[shape.kind] for selection in self.selections],
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            may_capture=may_capture,
        )
        # Sizes that are padded to the same shape share a plan, and so a graph and the views of its buffers.
        return self._plan_of_key.setdefault(self.guards.graph_key(plan.key), plan) if plan.replayable else plan

    def _on_device(self) -> AbstractContextManager[object]:
        """Launches go to the runtime's device, whichever is current for the caller."""
        # torch._C: the public functions cost more than a step has to spend.
        if self.device.type == "cpu" or torch._C._cuda_getDevice() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _follow_stream(self) -> None:
        """A step on another stream than the last one starts after it: both use the same buffers and pages."""
        if self.device.type == "cpu":
            return
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle != self._stream_handle:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._stream_handle = stream, handle

    def _running(self) -> tuple[DeviceStep, StepPlan]:
        if self._step is None or self._plan is None or self._state is not _State.RUNNING:
            raise WrongState(f"store and attend need a running step, but {self._state.value}; call begin_step() first")
        return self._step, self._plan

    def _problem(self, layer: int) -> Problem:
        if not 0 <= layer < len(self._kind_of_layer):
            raise BadTensor(f"layer {layer} does not exist; the runtime has layers 0 to {len(self._kind_of_layer) - 1}")
        return self.selections[self._kind_of_layer[layer]].problem

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape:
            raise BadTensor(f"{name} has shape {list(tensor.shape)}; this step and layer need {list(shape)}")
        if tensor.dtype != dtype:
            raise BadTensor(f"{name} is {tensor.dtype}; the layer works in {dtype}")
        if tensor.device != self.device:
            raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self.device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise BadTensor(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")


def _fill_needs(ops: StepOps, needs: frozenset[Need], step: StepMetadata, page_size: int) -> None:
    """The forms of the table that kernels asked for; one fill serves all kinds of layer."""
    rows, entries = step.table.row_of_seq, step.table.entries
    if needs & {Need.PAGE_LIST, Need.KV_LEN_INT64}:
        ops.page_indptr(step.kv_len, step.page_indptr, step.last_page_len, step.kv_len_int64, page_size=page_size)
    if Need.PAGE_LIST in needs:
        ops.page_list(
            rows, step.kv_len, entries, step.page_list, page_size=page_size, programs_per_seq=_PAGE_LIST_PROGRAMS
        )
    if Need.BLOCK_TABLE in needs:
        ops.block_table(rows, step.kv_len, entries, step.block_table, page_size=page_size)


def _ladder(name: str, sizes: Sequence[int]) -> SizeLadder:
    try:
        return SizeLadder(tuple(sizes))
    except BadLadder as bad:
        raise BadSetting(f"{name}: {bad}") from bad


def _with_index(device: torch.device) -> torch.device:
    """cuda -> cuda:N, so that the device compares equal to those of tensors."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _ops_of(selections: Sequence[Selection]) -> StepOps:
    """The metadata and store launches of the one provider that serves the model."""
    names = sorted({selection.provider.name for selection in selections})
    if len(names) > 1:
        raise Unsupported(f"the layers' kernels come from {' and '.join(names)}; name one provider for all of them")
    return selections[0].provider.ops()

"""Layers: what a forward asks for in each layer, checked and launched for a step or for one half of a split one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, TokenPlaces
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.storage import Pool
from rocm_attn.paging.stored_tokens import StepStores
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.contract import StepOps
from rocm_attn.step.head_weights import LayerHeadWeights, NewHeadWeights, written_in_place
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.row_work import check_rope, check_work

# step, kind of layer -> the step in the space that the layer reads in
ReadBy = Callable[[DeviceStep, int], StepTensors]


def by_space_of_layer(step: DeviceStep, kind: int) -> StepTensors:
    """A layer reads where it writes."""
    return step.of_kind[kind]


@dataclass(frozen=True, slots=True)
class LayerGuards:
    """The safeguards of layers.

    read_by:          the space that a layer reads in is the one that it writes in
    new_head_weights: how a layer that has head weights gets others
    """

    read_by: ReadBy = by_space_of_layer
    new_head_weights: NewHeadWeights = written_in_place


class Layers:
    """The layers of a model over their pools of pages."""

    def __init__(
        self,
        kinds: LayerKinds,
        pool: Pool,
        head_weights: LayerHeadWeights,
        ops: StepOps,
        guards: LayerGuards,
    ) -> None:
        self._read_by = guards.read_by
        self._selections = kinds.selections
        self._kind_of_layer = kinds.of_layer
        self._pool = pool
        self._head_weights = head_weights
        self._ops = ops
        self._device = pool.device
        self._work_of_layer: dict[int, QkvWork] = {}

    def __len__(self) -> int:
        return len(self._kind_of_layer)

    def store(self, step: DeviceStep, plan: StepPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """As LayerCalls.store, for the tokens of step, which has the plan. Raises BadTensor."""
        tensors = step.of_kind[self._kind_of(layer)]
        self._check_kv(layer, k, v, tensors.slot_of_token.shape[0])
        pages, null_page = self._pool.layer(layer), tensors.terms.null_page
        with on_device(self._device):
            self._ops.store_kv(k, v, tensors.slot_of_token, tensors.counts, pages, null_page=null_page)
            self._after_store(plan, layer, tensors)

    def rope_and_store(self, step: DeviceStep, plan: StepPlan, layer: int, given: Projected, work: QkvWork) -> None:
        """As LayerCalls.rope_and_store, for the tokens of step, which has the plan. Raises BadTensor."""
        tensors = step.of_kind[self._kind_of(layer)]
        self._check_kv(layer, given.k, given.v, tensors.slot_of_token.shape[0])
        self._check_queries(layer, given.q, given.q_out, work, tensors.slot_of_token.shape[0])
        tokens = TokenPlaces(tensors.positions, tensors.slot_of_token, tensors.counts)
        with on_device(self._device):
            self._ops.rope_store(given, tokens, work, self._pool.layer(layer), null_page=tensors.terms.null_page)
            self._after_store(plan, layer, tensors)

    def rope_queries(self, step: DeviceStep, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_queries, for the tokens of step. Raises BadTensor."""
        tensors = step.of_kind[self._kind_of(layer)]
        self._check_queries(layer, q, q_out, work, tensors.slot_of_token.shape[0])
        with on_device(self._device):
            self._ops.rope_queries(q, q_out, tensors.positions, work)

    def finish(self, step: DeviceStep, layer: int, out: Tensor, gate: Tensor | None, undo: RopeTable | None) -> None:
        """As LayerCalls.finish, for the tokens of step. Raises BadTensor."""
        problem, tensors = self.problem(layer), step.of_kind[self._kind_of(layer)]
        shape = tensors.slot_of_token.shape[0], problem.num_q_heads, problem.v_head_dim
        self._check("out", out, shape, problem.dtype)
        if gate is not None:
            self._check_gate(gate, shape)
        if undo is not None:
            check_rope("undo", undo, problem.v_head_dim, self._device)
        if gate is not None or undo is not None:
            with on_device(self._device):
                self._ops.finish(out, gate, undo, tensors.positions, tensors.counts)

    def attend(self, step: DeviceStep, plan: StepPlan, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """As LayerCalls.attend, for the tokens of step, which has the plan. Raises BadTensor, WrongState."""
        problem = self.problem(layer)
        kind = self._kind_of_layer[layer]
        tensors = self._read_by(step, kind)
        num_tokens = tensors.slot_of_token.shape[0]
        self._check("q", q, (num_tokens, problem.num_q_heads, problem.head_dim), problem.dtype)
        self._check("out", out, (num_tokens, problem.num_q_heads, problem.v_head_dim), problem.dtype)
        kernel = plan.kernels[kind]
        if lse is not None:
            self._check("lse", lse, (num_tokens, problem.num_q_heads), torch.float32)
            if not kernel.row.limits.gives_lse(problem):
                raise BadTensor(f"{kernel.row.name} gives no lse; build the runtime of problems with wants_lse=True")
        weights = self._head_weights.of(layer)
        pages = self._pool.layer(layer)
        # By position: names cost a tenth of the call.
        own = lse, weights.sinks, weights.alibi_slopes
        args = AttendArgs(q, pages, tensors.table, step.queries, out, *own, step.schedules[kind], step.workspace)
        with on_device(self._device):
            kernel.bound.attend(args, tensors, plan.bounds)
            if not kernel.row.clears_pads:
                self._ops.clear_pads(tensors.counts, out, lse)

    def problem(self, layer: int) -> Problem:
        """A layer's problem. Raises BadTensor for a layer that does not exist."""
        return self._selections[self._kind_of(layer)].problem

    def _kind_of(self, layer: int) -> int:
        """The kind of a layer. Raises BadTensor for a layer that does not exist."""
        if not 0 <= layer < len(self._kind_of_layer):
            raise BadTensor(f"layer {layer} does not exist; the runtime has layers 0 to {len(self._kind_of_layer) - 1}")
        return self._kind_of_layer[layer]

    def _after_store(self, plan: StepPlan, layer: int, tensors: StepTensors) -> None:
        """What a kernel that multiplies V after a sequence's end needs of its last page."""
        if not plan.kernels[self._kind_of_layer[layer]].row.masks_v:
            of_seqs = tensors.table, tensors.row_of_seq, tensors.kv_len, tensors.q_len
            self._ops.zero_tails(*of_seqs, self._pool.layer(layer), null_page=tensors.terms.null_page)

    def _check_kv(self, layer: int, k: Tensor, v: Tensor, num_tokens: int) -> None:
        problem = self.problem(layer)
        self._check("k", k, (num_tokens, problem.num_kv_heads, problem.head_dim), problem.dtype)
        self._check("v", v, (num_tokens, problem.num_kv_heads, problem.v_head_dim), problem.dtype)
        if problem.pool is PoolKind.LATENT and (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
            raise BadTensor(
                f"layer {layer} is latent and keeps one row a token: pass k[..., :{problem.v_head_dim}] as v"
            )

    def _check_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork, num_tokens: int) -> None:
        problem, dim = self.problem(layer), q.shape[-1]
        if self._work_of_layer.get(layer) is not work:
            check_work(problem, work, self._device)
            self._work_of_layer[layer] = work
        if problem.pool is not PoolKind.LATENT or work.rope is None or dim != work.rope.dim:
            dim = problem.head_dim
        self._check("q", q, (num_tokens, problem.num_q_heads, dim), problem.dtype)
        self._check("q_out", q_out, (num_tokens, problem.num_q_heads, dim), problem.dtype)
        if work.q_norm is not None and work.q_norm.dim != dim:
            raise BadTensor(f"q_norm has {work.q_norm.dim} weights; rows of q have {dim} elements")

    def _check_gate(self, gate: Tensor, shape: tuple[int, int, int]) -> None:
        if not gate.is_floating_point():
            raise BadTensor(f"gate is {gate.dtype}; it must be floating point")
        if tuple(gate.shape) not in (shape, shape[:2]):
            raise BadTensor(f"gate has shape {list(gate.shape)}; it must be {list(shape)} or {list(shape[:2])}")
        if gate.dim() == 2:
            gate, shape = gate[..., None], (*shape[:2], 1)
        self._check("gate", gate, shape, gate.dtype)

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        # One look where all is well, which is at every layer of every step.
        is_right = tensor.shape == shape and tensor.dtype is dtype and tensor.stride(-1) == 1
        if is_right and tensor.device == self._device:
            return
        if tuple(tensor.shape) != shape:
            raise BadTensor(f"{name} has shape {list(tensor.shape)}; this step and layer need {list(shape)}")
        if tensor.dtype != dtype:
            raise BadTensor(f"{name} is {tensor.dtype}; the layer works in {dtype}")
        if tensor.device != self._device:
            raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self._device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise BadTensor(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")


class StepLayers:
    """The layer calls of a step, or of one half of a split one, for as long as that step runs.

    require_running: raises WrongState when the step does not run
    stores:          what the step has stored, both halves of a split one
    half:            which half it is, 0 or 1; 0 for a step that is not split
    """

    __slots__ = ("_half", "_layers", "_plan", "_require_running", "_step", "_stores")

    def __init__(
        self,
        layers: Layers,
        step: DeviceStep,
        plan: StepPlan,
        require_running: Callable[[], None],
        stores: StepStores,
        half: int,
    ) -> None:
        self._stores = stores
        self._half = half
        self._layers = layers
        self._step = step
        self._plan = plan
        self._require_running = require_running

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As LayerCalls.store."""
        self._require_running()
        self._stores.before_store()
        self._layers.store(self._step, self._plan, layer, k, v)
        self._stores.after_store(self._half, layer)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As LayerCalls.attend."""
        self._require_running()
        self._stores.before_attend(self._half, layer)
        self._layers.attend(self._step, self._plan, layer, q, out, lse)

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """store, then attend."""
        self.store(layer, k, v)
        self.attend(layer, q, out, lse)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_and_store."""
        self._require_running()
        self._stores.before_store()
        self._layers.rope_and_store(self._step, self._plan, layer, Projected(q, k, v, q_out), work)
        self._stores.after_store(self._half, layer)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_queries."""
        self._require_running()
        self._layers.rope_queries(self._step, layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """As LayerCalls.finish."""
        self._require_running()
        self._layers.finish(self._step, layer, out, gate, undo)

"""Layers: store, attend and the other layer calls of a forward: checks their tensors and launches their kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, no_such_layer
from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.launch import does_only_launch, observers
from rocm_attn.kernels.metadata.error_word import BAD_SELECTION, ERROR_WORD
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.sparse.arguments import IndexArgs, IndexPages, SelectedArgs, SelectedKeys
from rocm_attn.machine.devices import is_current, on_device, require_tensor
from rocm_attn.machine.settings import require_kind, settings
from rocm_attn.paging.storage import PagePool
from rocm_attn.paging.stored_tokens import Sides, StepStores
from rocm_attn.problem import Indexer, PoolKind, Problem, Scales
from rocm_attn.providers.contract import StoringKernel
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.mixed import MixedAtOnce, is_capturing
from rocm_attn.providers.sparse import Selecting
from rocm_attn.step.head_weights import LayerHeadWeights, NewHeadWeights, written_in_place
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.prepared import AddressedCall, LayerForms, stream_of
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.selections import Require, StepSelections, refuse_stale
from rocm_attn.step.tensor_checks import TensorChecks, may_overlap, require_apart


@dataclass(frozen=True, slots=True)
class LayerGuards:
    """The safeguards of layers.

    read_by:          step, kind of layer -> the step in the space that the layer reads and writes in
    new_head_weights: how a layer that has head weights gets new ones
    new_kv_scales:    how a layer of eight-bit K and V gets new scales
    selection_of:     layer, layer whose selection it attends to, layer whose selection is there: raises unless the last
                      two are equal
    """

    read_by: Callable[[DeviceStep, int], StepTensors] = lambda step, kind: step.of_kind[kind]
    new_head_weights: NewHeadWeights = written_in_place
    new_kv_scales: NewHeadWeights = written_in_place
    selection_of: Require = refuse_stale


class Layers(TensorChecks):
    """The layers of a model over their pools of pages: LayerCalls, for the tokens of a step that has a plan.

    Arguments of a call are checked here; its caller checks that the call may come now. Each call raises BadTensor, and
    attend raises WrongState for a layer that lacks head weights.

    longest:   tokens of the longest sequence
    of_states: what recurrent layers store; see Sides
    forms:     of calls that are prepared

    Raises BadTensor if a pool has another format than the kernels of a layer: both must use one layout.
    """

    def __init__(
        self,
        kinds: LayerKinds,
        pool: PagePool,
        head_weights: LayerHeadWeights,
        ops: StepOps,
        guards: LayerGuards,
        longest: int,
        of_states: tuple[tuple[int, str], ...] = (),
    ) -> None:
        self._read_by = guards.read_by
        self._selections, self._kind_of_layer, self.selecting = kinds.selections, kinds.of_layer, kinds.selecting
        self._pool, self._head_weights, self._ops, self._longest = pool, head_weights, ops, longest
        folding = tuple(layer for layer, problem in enumerate(kinds.problems) if problem.state_format is not None)
        self.sides = Sides(len(kinds.of_layer), kinds.selecting.indexed, folding, of_states)
        super().__init__(pool.device)
        for layer, problem in enumerate(kinds.problems):
            if pool.format(layer) != problem.page_format:
                raise BadTensor(
                    f"the pages of layer {layer} hold {pool.format(layer)}; its kernels need {problem.page_format}"
                )
        self._work_of_layer: dict[int, QkvWork] = {}
        # On a CPU there are no launches to prepare.
        on_gpu = pool.device.type == "cuda"
        self._stream = stream_of(pool.device) or _no_stream
        self.forms = LayerForms(self._kind_of_layer, pool, head_weights, self._stream)
        around = ops.store_kv, ops.rope_store, ops.zero_tails, ops.clear_pads
        self._launches_alone = on_gpu and all(does_only_launch(launcher) for launcher in around)
        kernels = [kernel for selection in kinds.selections for kernel in selection.kernels.values()]
        self._storing_kernels = frozenset(id(kernel) for kernel in kernels if isinstance(kernel.bound, StoringKernel))
        self._checks_selections = settings().debug
        self._selection_faults = torch.zeros(1, dtype=torch.int32, device=pool.device)

    def __len__(self) -> int:
        return len(self._kind_of_layer)

    def store(self, step: DeviceStep, plan: StepPlan, layer: int, k: Tensor, v: Tensor) -> None:
        kind = self._kind_of(layer)
        call = self.forms.store(step.prepared, layer, k, v) if self.prepares() else _AS_IT_IS
        if call is None:
            return
        problem, tensors = self._selections[kind].problem, step.of_kind[kind]
        self._check_kv(layer, problem, k, v, tensors.slot_of_token.shape[0])
        pages, null_page = self._pool.layer(layer), tensors.terms.null_page
        with self._noting(step, call):
            self._ops.store_kv(k, v, tensors.slot_of_token, tensors.counts, pages, null_page=null_page)
            self._after_store(plan, layer, problem, tensors)

    def rope_and_store(self, step: DeviceStep, plan: StepPlan, layer: int, given: Projected, work: QkvWork) -> None:
        kind = self._kind_of(layer)
        call = self.forms.rope_and_store(step.prepared, layer, given, work) if self.prepares() else _AS_IT_IS
        if call is None:  # this and later checks were passed by a call of the same form
            return
        problem, tensors = self._selections[kind].problem, step.of_kind[kind]
        _require_rows_of_one(layer, problem)
        num_tokens = tensors.slot_of_token.shape[0]
        self._check_kv(layer, problem, given.k, given.v, num_tokens)
        self._check_queries(layer, problem, given.q, given.q_out, work, num_tokens)
        tokens = TokenPlaces(tensors.positions, tensors.slot_of_token, tensors.counts)
        with self._noting(step, call):
            self._ops.rope_store(given, tokens, work, self._pool.layer(layer), null_page=tensors.terms.null_page)
            self._after_store(plan, layer, problem, tensors)

    def rope_queries(self, step: DeviceStep, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        tensors = step.tensors
        self._check_queries(layer, self.problem(layer), q, q_out, work, tensors.slot_of_token.shape[0])
        with on_device(self._device):
            self._ops.rope_queries(q, q_out, tensors.positions, work)

    def finish(self, step: DeviceStep, layer: int, out: Tensor, gate: Tensor | None, undo: RopeTable | None) -> None:
        kind = self._kind_of(layer)
        problem, tensors = self._selections[kind].problem, step.tensors
        shape = tensors.slot_of_token.shape[0], problem.num_q_heads, problem.v_head_dim
        self._check_written("out", out, shape, problem.dtype)
        if gate is not None:
            self._check_gate(gate, shape)
            require_apart("out", out, "gate", gate)
        if undo is not None:
            _check_rope("undo", undo, problem.v_head_dim, self._longest, self._device)
        if gate is not None or undo is not None:
            with on_device(self._device):
                self._ops.finish(out, gate, undo, tensors.positions, tensors.counts)

    def attend(self, step: DeviceStep, plan: StepPlan, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        kind = self._kind_of(layer)
        kernel = plan.kernels[kind]
        prepares = plan.prepared_of_kind[kind] and self.prepares()
        if prepares and isinstance(kernel.bound, MixedAtOnce):
            # In a graph decode and extend run at the same time, which launches alone do not express.
            prepares = not is_capturing(self._device)
        call = self.forms.attend(step.prepared, layer, q, out, lse) if prepares else _AS_IT_IS
        if call is None:
            return
        tensors = self._read_by(step, kind)
        args = self._attend_args(step, tensors, plan, layer, q, out, lse)
        with self._noting(step, call):
            kernel.bound.attend(args, tensors, plan.bounds)
            if not kernel.entry.clears_pads:
                # Where pads have KV, a sequence that became one has read it. Row 0 belongs to no other then.
                self._ops.clear_pads(tensors.counts, out, lse, tensors.row_of_token if tensors.pads.kv_len else None)

    def stores_within(self, plan: StepPlan, layer: int) -> bool:
        """True if the layer's kernel stores the new K and V itself, so that store_and_attend() does both."""
        # A store that does not consist of the kernels alone is called by itself.
        return id(plan.kernels[self._kind_of(layer)]) in self._storing_kernels and does_only_launch(self._ops.store_kv)

    def store_and_attend(
        self,
        step: DeviceStep,
        plan: StepPlan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Stores and attends by one kernel; see stores_within()."""
        kind = self._kind_of(layer)
        bound: Any = plan.kernels[kind].bound  # a StoringKernel, see stores_within; a check would take microseconds
        call = self.forms.store_and_attend(step.prepared, layer, q, k, v, out, lse) if self.prepares() else _AS_IT_IS
        if call is None:
            return
        tensors = step.of_kind[kind]
        self._check_kv(layer, self._selections[kind].problem, k, v, tensors.slot_of_token.shape[0])
        new = NewRows(k, v, tensors.slot_of_token, tensors.counts, tensors.terms.null_page)
        read = self._read_by(step, kind)
        args = self._attend_args(step, read, plan, layer, q, out, lse)
        with self._noting(step, call):
            bound.store_and_attend(args, new, read, plan.bounds)

    def join(self, step: DeviceStep, plan: StepPlan, layer: int) -> None:
        """Notes that the layer has stored and attended in one call."""
        # A joined call is launched without a check whether a graph is captured: see attend.
        bound = plan.kernels[self._kind_of_layer[layer]].bound
        if not isinstance(bound, MixedAtOnce) and self._launches_alone:
            self.forms.join(step.prepared, layer)

    def store_index(self, step: DeviceStep, layer: int, k: Tensor) -> None:
        problem, indexer = self._indexer(layer)
        kind = self._kind_of_layer[layer]
        tensors = step.of_kind[kind]
        self._check("index k", k, (tensors.slot_of_token.shape[0], indexer.head_dim), problem.dtype)
        rows, slots = k.unsqueeze(1), step.index_slots[kind]
        pages, null_page = self._pool.index(layer), tensors.terms.null_page
        with on_device(self._device):
            self._ops.store_kv(rows, rows, slots, tensors.counts, pages, null_page=null_page)

    def fold(self, step: DeviceStep, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        problem, state = self.problem(layer), step.of_state
        num_tokens = state.slot_of_token.shape[0]
        pages = self.state(layer)
        for name, given in (("values", values), ("gates", gates)):
            self._check(name, given, (num_tokens, pages.format.head_dim), problem.row.state_dtype)
        self._check_written("rows", rows, (num_tokens, problem.fold_columns), torch.float32)
        require_apart("rows", rows, "values", values)
        require_apart("rows", rows, "gates", gates)
        null_page, row = state.terms.null_page, problem.row
        with on_device(self._device):
            self._ops.store_kv(
                values[:, None], gates[:, None], state.slot_of_token, state.counts, pages, null_page=null_page
            )
            self._ops.fold_rows(pages, state, rows, tokens=row.tokens, overlaps=row.overlaps)

    def state(self, layer: int) -> LayerPages:
        """The pages of a layer's state. Raises BadTensor for a layer without one."""
        if layer not in self.sides.folding:
            named = ", ".join(map(str, self.sides.folding)) or "none"
            raise BadTensor(f"layer {layer} has rows of one token and no state; the layers with one are {named}")
        return self._pool.state(layer)

    def select(self, step: DeviceStep, layer: int, q: Tensor, weights: Tensor | None) -> None:
        """Selects, and leaves blocks for a later choice if the layer's indexing says so."""
        args = self._select(step, layer, q, weights, among=None)
        kind = self._kind_of_layer[layer]
        left, blocks = step.left[kind], self._selecting(kind).blocks
        if left is not None and blocks is not None:
            with on_device(self._device):
                blocks.select(args, left, step.workspace)

    def select_among(self, step: DeviceStep, layer: int, q: Tensor, weights: Tensor | None) -> None:
        """Selects among the blocks that the layer's last select() has left."""
        self._select(step, layer, q, weights, among=step.left[self._kind_of(layer)])

    def _select(
        self, step: DeviceStep, layer: int, q: Tensor, weights: Tensor | None, among: SelectedKeys | None
    ) -> IndexArgs:
        problem, indexer = self._indexer(layer)
        kind = self._kind_of_layer[layer]
        tensors, selected = step.of_kind[kind], step.selected[kind]
        assert selected is not None
        pages = self._pool.index(layer)
        scale = pages.k_scale
        if scale is not None and pages.format.scales is Scales.TOKEN:
            scale = scale[:, 0]
        require_tensor("index q", q)
        coded = pages.format.encoding.is_fp8 and q.dtype == pages.format.encoding.dtype
        shape = tensors.slot_of_token.shape[0], indexer.num_heads, indexer.head_dim
        self._check("index q", q, shape, q.dtype if coded else problem.dtype)
        if weights is not None:
            self._check("weights of index heads", weights, shape[:2], torch.float32)
        args = IndexArgs(q, weights, IndexPages(pages.k[:, :, 0], scale), tensors.table, step.places, among)
        with on_device(self._device):
            self._selecting(kind).keys.select(args, selected, step.workspace)
            if self._checks_selections:
                self._check_selection(step, selected, tensors)
        return args

    def _selecting(self, kind: int) -> Selecting:
        sparse = self._selections[kind].sparse
        assert sparse is not None
        assert sparse.selecting is not None
        return sparse.selecting

    def give_selection(self, step: DeviceStep, layer: int, units: Tensor, counts: Tensor) -> None:
        self._indexer(layer)
        kind = self._kind_of_layer[layer]
        tensors, selected = step.of_kind[kind], step.selected[kind]
        assert selected is not None
        self._check("units", units, tuple(selected.units.shape), torch.int32)
        self._check("counts", counts, tuple(selected.counts.shape), torch.int32)
        with on_device(self._device):
            selected.units.copy_(units)
            selected.counts.copy_(counts)
            self._check_selection(step, selected, tensors)

    def _attend_args(
        self,
        step: DeviceStep,
        tensors: StepTensors,
        plan: StepPlan,
        layer: int,
        q: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> AttendArgs:
        """Arguments of the layer's kernel. tensors: of the space that the layer reads in"""
        kind = self._kind_of_layer[layer]
        row, problem = plan.kernels[kind].entry, self._selections[kind].problem
        self.check_rows(problem, tensors.slot_of_token.shape[0], q, out, lse)
        if lse is not None and not row.limits.gives_lse(problem):
            raise BadTensor(f"{row.name} returns no lse; build the runtime of problems with wants_lse=True")
        weights = self._head_weights.of(layer)
        # Passed by position, because names cost a tenth of the call.
        own = lse, weights.sinks, weights.alibi_slopes
        pages, schedule = self._pool.layer(layer), step.schedules[kind]
        return AttendArgs(q, pages, tensors.table, step.queries, out, *own, schedule, step.workspace)

    def _check_selection(self, step: DeviceStep, selected: SelectedKeys, tensors: StepTensors) -> None:
        """Sets a bit of the step's error word if a selection is not valid for attention over it."""
        faults = self._selection_faults.zero_()
        self._ops.check_selection(selected, step.places, faults)
        tensors.counts[ERROR_WORD : ERROR_WORD + 1].bitwise_or_((faults != 0).int() * BAD_SELECTION)

    def attend_selected(self, step: DeviceStep, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        kind = self._kind_of(layer)
        selection, tensors, (places, selected) = self._selections[kind], self._read_by(step, kind), step.attended[kind]
        assert selected is not None
        assert selection.sparse is not None
        self.check_rows(selection.problem, tensors.slot_of_token.shape[0], q, out, lse)
        if lse is not None and not selection.sparse.gives_lse:
            name = selection.sparse.entries[0]
            raise BadTensor(f"{name} returns no lse; build the runtime of problems with wants_lse=True")
        sinks, pages = self._head_weights.of(layer).sinks, self._pool.layer(layer)
        args = SelectedArgs(q, pages, tensors.table, places, selected, out, lse, sinks, step.workspace)
        with on_device(self._device):
            selection.sparse.selected.attend(args)

    def fill_again(self, step: DeviceStep) -> bool:
        """Derives a step's metadata by the launches that were prepared for it; returns whether there are any."""
        return self.prepares() and step.prepared.fill.again(self._stream())

    def noting_fill(self, step: DeviceStep) -> AbstractContextManager[None]:
        """Prepares the launches that derive a step's metadata inside this context."""
        return step.prepared.fill.noting(step) if self.prepares() else nullcontext()

    def prepares(self) -> bool:
        """True if calls are prepared, and repeated by their prepared launches."""
        # A call for a device that is not the current one is not prepared.
        return self._launches_alone and is_current(self._device) and not observers

    def _noting(self, step: DeviceStep, call: AddressedCall) -> AbstractContextManager[object]:
        """A context in which a call is made on the device, and its form is prepared: then the device is current."""
        return on_device(self._device) if call is _AS_IT_IS else step.prepared.noting(call, step)

    def problem(self, layer: int) -> Problem:
        """A layer's problem. Raises BadTensor for a layer that does not exist."""
        return self._selections[self._kind_of(layer)].problem

    def _kind_of(self, layer: int) -> int:
        """The kind of a layer. Raises BadTensor for a layer that does not exist."""
        try:
            if layer >= 0:
                return self._kind_of_layer[layer]
        except (TypeError, ValueError, IndexError):  # it is not a number, or too large
            pass
        raise no_such_layer(layer, len(self._kind_of_layer))

    def _after_store(self, plan: StepPlan, layer: int, problem: Problem, tensors: StepTensors) -> None:
        """Zeroes the rest of a sequence's last page for kernels that multiply V after its end."""
        entry = plan.kernels[self._kind_of_layer[layer]].entry
        # Most kernels mask V, and this runs for each layer of each step: the method is called for the others.
        if not entry.masks_v and entry.needs_zeroed_tails(problem):
            self._ops.zero_tails(tensors, self._pool.layer(layer))

    def _check_kv(self, layer: int, problem: Problem, k: Tensor, v: Tensor, num_tokens: int) -> None:
        self._check("k", k, (num_tokens, problem.num_kv_heads, problem.head_dim), problem.dtype)
        self._check("v", v, (num_tokens, problem.num_kv_heads, problem.v_head_dim), problem.dtype)
        if problem.pool is PoolKind.LATENT and (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
            raise BadTensor(
                f"layer {layer} is latent and keeps one row per token: pass k[..., :{problem.v_head_dim}] as v"
            )

    def _check_queries(
        self, layer: int, problem: Problem, q: Tensor, q_out: Tensor, work: QkvWork, num_tokens: int
    ) -> None:
        try:
            dim = q.shape[-1]
        except (AttributeError, IndexError):  # it is no tensor, or a single number, which its check refuses
            dim = problem.head_dim
        if self._work_of_layer.get(layer, _UNCHECKED) is not work:
            _check_work(problem, work, self._longest, self._device)
            self._work_of_layer[layer] = work
        if problem.pool is not PoolKind.LATENT or work.rope is None or dim != work.rope.dim:
            dim = problem.head_dim
        self._check("q", q, (num_tokens, problem.num_q_heads, dim), problem.dtype)
        if q_out is not q:
            self._check_written("q_out", q_out, (num_tokens, problem.num_q_heads, dim), problem.dtype)
            if (q_out.data_ptr(), q_out.stride()) != (q.data_ptr(), q.stride()):
                require_apart("q_out", q_out, "q", q)
        if work.q_norm is not None and work.q_norm.dim != dim:
            raise BadTensor(f"q_norm has {work.q_norm.dim} weights; rows of q have {dim} elements")

    def _check_gate(self, gate: Tensor, shape: tuple[int, int, int]) -> None:
        require_tensor("gate", gate)
        if not gate.is_floating_point():
            raise BadTensor(f"gate is {gate.dtype}; it must be floating point")
        if tuple(gate.shape) not in (shape, shape[:2]):
            raise BadTensor(f"gate has shape {list(gate.shape)}; it must be {list(shape)} or {list(shape[:2])}")
        rows = gate if gate.dim() == 3 else gate[..., None]
        self._check("gate", rows, tuple(rows.shape), gate.dtype)

    def _indexer(self, layer: int) -> tuple[Problem, Indexer]:
        """A layer's problem and its indexer. Raises BadTensor for a layer that does not exist or has none."""
        problem = self.problem(layer)
        self.selecting.place_of(layer)
        assert isinstance(problem.indexer, Indexer)
        return problem, problem.indexer

    def check_rows(self, problem: Problem, num_tokens: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Raises BadTensor for rows that attend() does not take."""
        self._check("q", q, (num_tokens, problem.num_q_heads, problem.head_dim), problem.dtype)
        self._check_written("out", out, (num_tokens, problem.num_q_heads, problem.v_head_dim), problem.dtype)
        require_apart("out", out, "q", q)
        if lse is not None:
            self._check_written("lse", lse, (num_tokens, problem.num_q_heads), torch.float32)
            require_apart("lse", lse, "q", q)
            require_apart("lse", lse, "out", out)


# The work of a layer that has had none.
_UNCHECKED = QkvWork()
# A call that is not prepared.
_AS_IT_IS = AddressedCall(None, (), 0)


def _no_stream() -> int:
    raise AssertionError("a CPU has no streams")


def _require_rows_of_one(layer: int, problem: Problem) -> None:
    """Raises BadTensor for a layer whose rows stand for several tokens: they have places of their own."""
    tokens = problem.row.tokens
    if tokens > 1:
        raise BadTensor(
            f"a row of layer {layer} stands for {tokens} tokens, and rope turns by the places of tokens; turn what "
            f"fold() gives by the place of its first token, positions // {tokens} * {tokens}, then call store()"
        )


def _check_work(problem: Problem, work: QkvWork, longest: int, device: torch.device) -> None:
    """Raises BadTensor for a rope or norms that do not fit the problem's rows, or are on another device."""
    require_kind("work", work, QkvWork, BadTensor)
    is_latent = problem.pool is PoolKind.LATENT
    if work.rope is not None:
        _check_rope("rope", work.rope, problem.head_dim, longest, device)
        if is_latent and not work.rope.at_end:
            raise BadTensor(
                "rope rotates the first elements of a latent layer's rows, and must rotate the last; make the "
                "table with at_end=True"
            )
    form = problem.page_format
    turned, rest = 0 if work.rope is None else work.rope.dim, form.head_dim - form.coded
    if form.record is not None and turned != rest:
        raise BadTensor(
            f"rope rotates {turned} elements of rows that are stored as records, and must rotate the {rest} that "
            "have no codes; give such a table, or rotate before store()"
        )
    if is_latent and work.v_norm is not None:
        raise BadTensor("v_norm was given for a latent layer, whose V is part of K; normalise it with k_norm")
    of_q, of_k, of_v = (
        (work.q_norm, problem.head_dim),
        (work.k_norm, problem.head_dim),
        (work.v_norm, problem.v_head_dim),
    )
    for name, (norm, dim) in {"q_norm": of_q, "k_norm": of_k, "v_norm": of_v}.items():
        if norm is None:
            continue
        require_kind(name, norm, RowNorm, BadTensor)
        # In a latent layer the first elements of rows may be normalised alone.
        if norm.dim > dim or (norm.dim < dim and not is_latent):
            raise BadTensor(f"{name} has {norm.dim} weights; rows have {dim} elements")
        _check_device(name, norm.weight, device)


def _check_rope(name: str, rope: RopeTable, dim: int, longest: int, device: torch.device) -> None:
    """Raises BadTensor for no table, one that is too short, of more elements than a row has, or on another device."""
    require_kind(name, rope, RopeTable, BadTensor)
    if rope.num_positions < longest:
        raise BadTensor(
            f"{name} has {rope.num_positions} positions, and sequences may have {longest} tokens; make its table for "
            "all of them, or lower max_kv_len, or kv_len of Bounds"
        )
    if rope.dim > dim:
        raise BadTensor(f"{name} rotates {rope.dim} elements; rows have {dim}")
    _check_device(name, rope.cos_sin, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {device}")


@dataclass(slots=True, eq=False)
class StepLayers(LayerCalls):
    """The layer calls of a part of a step, for as long as that step runs.

    require_running: raises WrongState if the step does not run
    stores:          the layers that each part of the step has stored in
    selections:      the layer whose selection each part has at the moment
    part:            Part.number
    """

    _layers: Layers
    _step: DeviceStep
    _plan: StepPlan
    _require_running: Callable[[], None]
    _stores: StepStores
    _selections: StepSelections
    _part: int

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._require_running()
        self._stores.before_store(self._part, layer)
        self._layers.store(self._step, self._plan, layer, k, v)
        self._stores.after_store(self._part, layer)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        self._require_running()
        self._layers._kind_of(layer)  # raises for a layer that does not exist
        self._stores.before_attend(self._part, layer)
        self._layers.attend(self._step, self._plan, layer, q, out, lse)

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        self._require_running()
        self._stores.before_store(self._part, layer)
        layers, step = self._layers, self._step
        # A joined call was prepared for these views, and so for their plan's kernels.
        if lse is None and layers.prepares() and layers.forms.both_again(step.prepared, layer, q, k, v, out):
            self._stores.after_store(self._part, layer)
        elif layers.stores_within(self._plan, layer) and not (may_overlap(out, k) or may_overlap(out, v)):
            # In one launch a program may write to out before another one has read its rows there.
            layers.store_and_attend(step, self._plan, layer, q, k, v, out, lse)
            self._stores.after_store(self._part, layer)
        else:
            layers.store(step, self._plan, layer, k, v)
            self._stores.after_store(self._part, layer)
            layers.attend(step, self._plan, layer, q, out, lse)
            if lse is None:
                layers.join(step, self._plan, layer)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._require_running()
        self._stores.before_store(self._part, layer)
        self._layers.rope_and_store(self._step, self._plan, layer, Projected(q, k, v, q_out), work)
        self._stores.after_store(self._part, layer)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._require_running()
        self._layers.rope_queries(self._step, layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        self._require_running()
        self._layers.finish(self._step, layer, out, gate, undo)

    def store_index(self, layer: int, k: Tensor) -> None:
        self._require_running()
        self._stores.before_store(self._part, self._index_of(layer))
        self._layers.store_index(self._step, layer, k)
        self._stores.after_store(self._part, self._index_of(layer))

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        self._require_running()
        self._stores.before_attend(self._part, self._index_of(layer))
        self._layers.select(self._step, layer, q, weights)
        self._selections.after_select(self._part, layer)

    def select_among(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        self._require_running()
        self._stores.before_attend(self._part, self._index_of(layer))
        self._selections.before_select_among(self._part, layer)
        self._layers.select_among(self._step, layer, q, weights)
        self._selections.after_choice(self._part, layer)

    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        self._require_running()
        self._layers.give_selection(self._step, layer, units, counts)
        self._selections.after_choice(self._part, layer)

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        self._require_running()
        self._layers.problem(layer)
        self._selections.before_attend(self._part, layer)
        self._stores.before_attend(self._part, layer)
        self._layers.attend_selected(self._step, layer, q, out, lse)

    def fold(self, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        self._require_running()
        self._layers.state(layer)
        state = self._layers.sides.state(layer)
        self._stores.before_store(self._part, state)
        self._layers.fold(self._step, layer, values, gates, rows)
        self._stores.after_store(self._part, state)

    def _index_of(self, layer: int) -> int:
        """The number of a layer's index keys among all that a step stores. Raises BadTensor for a layer without any."""
        self._layers.selecting.place_of(layer)
        return self._layers.sides.index(layer)

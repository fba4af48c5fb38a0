"""ExternalAttention: attention over pages, tables, lengths, slots and graphs that an engine owns.

begin            outside of graphs, one launch: plan at the engine's padded shape, publish its lengths
fill             may be captured: gather tables where they cannot be read where they lie, derive, check slots, schedules
store, attend    may be captured, for each layer

The engine pads and keys its graphs; a captured step is planned at the longest length, so that its graph serves any.
What is stored and how steps run is as in AttentionRuntime: the same kernels, launches, safeguards and error word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadProblem, BadSetting, BadTensor, DeviceFault, NeverFits, Unsupported, WrongState
from rocm_attn.guards.registry import Guards, guards_from_settings
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.kernels.cache.page_format import PageFormat
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable
from rocm_attn.kernels.metadata.engine_tensors import LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.agreement import Agree, alone
from rocm_attn.machine.devices import on_device, wait_for_device, with_index
from rocm_attn.machine.settings import whole_number
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.paging.adopted import AdoptedPages, AdoptedTables, EnginePages, Source, layer_pages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.storage import Pool
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.contract import Baked, PoolSize, PoolTerms, StepOps
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.step.core import StepCore
from rocm_attn.step.engine_publisher import EnginePublisher
from rocm_attn.step.external_step import BoolCells, Causality, ExternalStep, NoCells
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan, kv_len_bucket, q_len_bucket
from rocm_attn.step.protocols import StoreAndAttend
from rocm_attn.step.selections import StepSelections
from rocm_attn.step.shadow_view import ShadowView

# Runs of steps that are not captured are kept for so many shapes.
_MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One attention layer of an engine's model.

    space:        where its pages lie; of its own KV cache group, for instance
    head_weights: what its problem says that it has; may be given later, by set_head_weights()
    """

    problem: Problem
    space: Space = Space.FULL
    head_weights: HeadWeights = NO_HEAD_WEIGHTS


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest step.

    num_seqs, num_tokens: padded ones
    kv_len:               tokens of the longest sequence
    num_pages:            pages of a layer, page 0 included
    """

    num_seqs: int
    num_tokens: int
    kv_len: int
    num_pages: int

    def __post_init__(self) -> None:
        for name in ("num_seqs", "num_tokens", "kv_len", "num_pages"):
            value = whole_number(name, getattr(self, name))
            if not 1 <= value <= INT32_MAX:
                raise BadSetting(f"{name} is {value}; it is at least 1 and at most {INT32_MAX}")
            object.__setattr__(self, name, value)


FaultPolicy = Callable[[DeviceFault], None]


def raise_fault(fault: DeviceFault) -> None:
    """The step that hears of a fault is not begun; it may be begun again."""
    raise fault


class LogAndCount:
    """Faults are logged and counted, and serving goes on.

    log:   where each is a line; not given: this package's own logger
    count: the faults so far
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self.log = log if log is not None else logging.getLogger(__name__)
        self.count = 0

    def __call__(self, fault: DeviceFault) -> None:
        """Log a fault."""
        self.count += len(fault.each)
        self.log.error("%s", fault)


@dataclass(frozen=True, slots=True)
class ExternalOptions:
    """How kernels are chosen, and what they may do to the engine's pages.

    provider:      "auto", "torch", "triton" or "aiter"
    deterministic: whether a sequence's results must be bitwise the same in any batch
    page_strides:  whether pages have strides of their own, as where K and V are packed into one tensor
    unaligned_rows: whether K and V, and their rows, may begin anywhere in memory. Else K and V that kernels read fast
                   begin at multiples of 16 bytes, or rows at multiples of 16 elements, less than 2^20 apart in a page,
                   or bind() refuses them
    zero_tails:    whether what follows a sequence in its last page may be zeroed, which some kernels need. If not,
                   nothing is written but K and V of new tokens, to their slots
    short_kv:      whether sequences may have fewer tokens in their KV than new ones; in steps that are not causal
    causalities:   what steps may say of causality; kernels are chosen for each
    binds_calls:   whether a layer may have other pages at each call, also after seal(): bind() comes before the call,
                   and the caller keeps the pages of captured calls where they are
    on_fault:      called with what went wrong on the device in an earlier step
    """

    provider: str = "auto"
    deterministic: bool = False
    page_strides: bool = False
    unaligned_rows: bool = False
    zero_tails: bool = False
    short_kv: bool = False
    causalities: Sequence[Causality] = (Causality.OF_LAYERS,)
    binds_calls: bool = False
    on_fault: FaultPolicy = raise_fault

    def problem(self, problem: Problem, causality: Causality) -> Problem:
        """A layer's problem in steps of a causality. Raises BadProblem for a window without one."""
        if causality is Causality.OF_LAYERS:
            return problem
        return replace(problem, causal=causality is Causality.CAUSAL)

    def pool_size(self, bounds: Bounds) -> PoolSize:
        """What kernels are chosen for."""
        terms = PoolTerms(self.page_strides, not self.zero_tails, self.short_kv, self.unaligned_rows)
        return PoolSize(bounds.num_pages, bounds.kv_len, bounds.num_seqs, terms)


@dataclass(frozen=True, slots=True)
class _Run:
    """How steps of one shape run, and where."""

    core: StepCore
    plan: StepPlan
    children: tuple[DeviceStep]
    to: PublishedLengths
    bounds: LengthBounds

    @property
    def step(self) -> DeviceStep:
        return self.children[0]


@dataclass(frozen=True, slots=True)
class RecordedFill:
    """A fill() as a graph, of the steps that run as the one did for which it was recorded."""

    run: _Run
    recording: Recording


class ExternalAttention(StoreAndAttend):
    """Paged attention for the layers of an engine's model, over what the engine owns.

    One thread at a time, and everything on the current stream.

    layers:  of the model, in order; all pages have one size
    tables:  space -> the engine's table, for every space that layers live in; a table alone is the full space's
    bounds:  of the largest step
    target:  the hardware; detected when not given
    guards:  the safeguards; not given: all, less those that the environment switches off
    agree:   how ranks agree on kernels

    Raises Unsupported with every reason when no kernel serves a layer, BadProblem, BadTensor, BadSetting.
    """

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def __init__(
        self,
        layers: Sequence[LayerSource],
        tables: Mapping[Space, Source] | Source,
        *,
        device: torch.device | str,
        bounds: Bounds,
        options: ExternalOptions | None = None,
        target: Target | None = None,
        guards: Guards | None = None,
        agree: Agree = alone,
    ) -> None:
        self.device, self.bounds = with_index(device), bounds
        self.options = options = options if options is not None else ExternalOptions()
        self.guards = guards = guards if guards is not None else guards_from_settings()
        if guards.off:
            logging.getLogger(__name__).warning("safeguards are switched off: %s", ", ".join(guards.off))
        problems, spaces = [layer.problem for layer in layers], [layer.space for layer in layers]
        page_size = _page_size(problems)
        tables = tables if isinstance(tables, Mapping) else {Space.FULL: tables}
        _check_spaces(spaces, tables)
        self._tables = AdoptedTables(
            tables,
            {space: _window([p for p, its in zip(problems, spaces, strict=True) if its == space]) for space in tables},
            page_size=page_size,
            max_kv_len=bounds.kv_len,
            num_seqs=bounds.num_seqs,
            short_kv=options.short_kv,
            device=self.device,
            guards=guards.adopted,
        )
        self._pages = AdoptedPages(
            problems,
            spaces,
            num_pages=bounds.num_pages,
            page_strides=options.page_strides,
            binds_calls=options.binds_calls,
            device=self.device,
            guards=guards.adopted,
        )
        target = target if target is not None else detect_target(self.device)
        self._cores = {
            causality: self._new_core([options.problem(p, causality) for p in problems], spaces, target, agree)
            for causality in options.causalities
        }
        self._ops = next(iter(self._cores.values())).ops
        self._publisher = EnginePublisher(self._ops, self.device, guards.publishing)
        self._engine_row = torch.zeros(bounds.num_seqs, dtype=torch.int32, device=self.device)
        self._captured: dict[tuple[object, ...], _Run] = {}
        self._kept: dict[tuple[object, ...], _Run] = {}
        self._kept_at: tuple[object, ...] = ()
        self._is_sealed = self._is_filled = False
        self._selections = StepSelections(self._first_core.layers.selecting, guards.step.layers.selection_of)
        self._run: _Run | None = None
        self._step: ExternalStep | None = None
        for layer, source in enumerate(layers):
            if source.head_weights != NO_HEAD_WEIGHTS:
                self.set_head_weights(layer, source.head_weights)

    @property
    def max_kv_len(self) -> int:
        """Tokens of the longest sequence."""
        return self._tables.max_kv_len

    @property
    def pool(self) -> Pool:
        """The pages that were bound."""
        return self._pages

    @property
    def null_pages(self) -> Mapping[Space, bool]:
        """Whether page 0 of a space belongs to no one."""
        return {space.space: space.terms.null_page for space in self._tables.spaces}

    @property
    def ops(self) -> StepOps:
        """The launches around attention."""
        return self._ops

    @property
    def step_number(self) -> int:
        """The number of the step that was begun last, from 1 on; a DeviceFault names its step by it."""
        return self._publisher.step_number

    def kernels(self, causality: Causality = Causality.OF_LAYERS) -> LayerKinds:
        """The kernels of steps of a causality."""
        return self._core(causality).kinds

    def set_head_weights(self, layer: int, weights: HeadWeights) -> None:
        """Give a layer its sinks or ALiBi slopes, which are copied; graphs read the new ones too. Raises BadTensor."""
        for core in self._cores.values():
            core.head_weights.set(layer, weights)

    def bind(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None = None) -> None:
        """Use these pages for a layer, from now on.

        k, v:  [pages, page_size, kv_heads, head_dim | v_head_dim], views of any kind whose last stride is 1; contiguous
               unless the options say page_strides. Of a latent layer, v is the first part of k. Eight-bit ones in their
               encoding's dtype, or as bytes (uint8). Their rows as the options say
        coded: of eight-bit pages, their factors and what the engine says that they hold; of others it may be said too
        Raises BadTensor, NeverFits, and WrongState where graphs read others.
        """
        self._require_layer(layer)
        self._pages.bind(layer, k, v, coded)

    def bind_index(
        self, layer: int, keys: Tensor, scale: Tensor | None = None, declared: PageFormat | None = None
    ) -> None:
        """Use these index pages for a layer whose problem has an Indexer, from now on.

        keys:     [pages, page_size / key_tokens, head_dim of the indexer], with the page ids of the layer's own pages
        scale:    float32 [1] or [pages, page_size / key_tokens], as the indexer's key_scales says
        declared: what the engine says that they hold: latent rows of one head, as Problem.index_format; of eight bits
                  it must be said, and keys may be bytes (uint8)
        Raises BadTensor, and WrongState where graphs read others.
        """
        self._require_layer(layer)
        self._pages.bind_index(layer, keys, scale, declared)

    def bind_all(
        self, kv: Tensor | Sequence[Tensor], axes: str, coded: Sequence[EnginePages | None] | None = None
    ) -> None:
        """Use an engine's KV cache for all layers, from now on: bind() of views of it, layer after layer.

        kv:   one tensor for all layers, or one for each, in order
        axes: what the dimensions of a tensor are, in order: kv (K, then V), page, token, head and dim, each once, and
              layer where one tensor has all of them. "kv layer page token head dim" is nano-vllm's, "kv page token head
              dim" and "page kv token head dim" are vLLM's for each layer, "page kv head token dim" is FlashInfer's HND
        coded: for each layer, as bind() takes it; None: no layer is in eight bits, and nothing is said of any
        Raises as bind() does, and BadTensor for other axes, or another number of layers; nothing has changed then,
        unless a layer's pages are refused: those before it are bound.
        """
        layers = layer_pages(kv, axes)
        if len(layers) != len(self._first_core.layers):
            raise BadTensor(f"the KV cache has {len(layers)} layers, the model {len(self._first_core.layers)}")
        coded = [None] * len(layers) if coded is None else coded
        if len(coded) != len(layers):
            raise BadTensor(f"coded has {len(coded)} entries, the model {len(layers)} layers")
        for layer, (k, v) in enumerate(layers):
            self.bind(layer, k, v, coded[layer])

    def write_table(self, pages: Sequence[Sequence[int]], space: Space = Space.FULL) -> None:
        """Write the pages of sequences into the rows of the engine's table, from row 0 on: pages[i] begins row i.

        What a row has after them stays; no step reads it. One copy to the device, on the current stream, without a
        wait. Raises BadTensor for more rows or pages than the table has, for a table of slots, and for lists of pages;
        nothing is written then.
        """
        self._tables.write(space, pages)

    def use_table(self, source: Source | Tensor, space: Space = Space.FULL) -> None:
        """Read another table, or the same one with other rows, in a space from now on.

        source: a tensor takes the place of the entries of the table that there is
        Raises BadTensor, NeverFits, and WrongState where graphs read another.
        """
        if self._tables.use(space, source) and not self._is_sealed:
            self._captured.clear()
        self._kept.clear()

    def seal(self, bounds: Bounds | None = None) -> None:
        """Fix the addresses that graphs read, with room for steps of these bounds and smaller ones.

        Before the engine's first capture, and after every layer has its pages. From then on tables and pages stay where
        they are. bounds: not given: of the largest step
        Raises WrongState, NeverFits.
        """
        bounds = self.bounds if bounds is None else bounds
        if self._is_sealed:
            raise WrongState("addresses are sealed already; build anew for other sizes")
        if bounds.num_seqs > self.bounds.num_seqs:
            raise NeverFits(
                f"{bounds.num_seqs} sequences are to be captured, built for {self.bounds.num_seqs}; raise num_seqs"
            )
        if not self.options.binds_calls:
            for layer in range(len(self._first_core.layers)):
                self._pages.layer(layer)
            for layer in self._first_core.layers.selecting.indexed:
                self._pages.index(layer)
        num_seqs, num_tokens = bounds.num_seqs, max(bounds.num_seqs, bounds.num_tokens)
        for core in self._cores.values():
            kinds = [StepKind.EXTEND, StepKind.MIXED]
            if any(problem.custom_mask for problem in core.kinds.problems):
                kinds.append(StepKind.MASKED)
            shapes = [PaddedShape(kind, num_seqs, num_tokens) for kind in kinds]
            with on_device(self.device):
                core.seal([PaddedShape(StepKind.DECODE, num_seqs, num_seqs), *shapes])
        if not self.options.binds_calls:
            self._pages.seal()
        self._tables.seal()
        self._is_sealed = True

    def begin(self, step: ExternalStep) -> StepPlan:
        """Plan a step and publish its lengths: one launch, outside of graphs.

        Raises BadBatch, NeverFits, WrongState, and what on_fault raises of an earlier step; no step is begun
        then.
        """
        run = self._run_of(step)
        with on_device(self.device):
            publisher = self._publisher
            slot = publisher.hear()
            if publisher.found:
                self.options.on_fault(publisher.take_found())
            self._is_filled = False
            publisher.publish(slot, step.num_seqs, step.lengths, run.bounds, run.to)
        self._run, self._step = run, step
        self._selections.begin(1)
        return run.plan

    def fill(self, slots: Tensor | None = None) -> None:
        """Derive the step's metadata on the device. May be captured; running it twice is harmless.

        slots: int32 or int64 [n], any stride, on the device: where the engine wants each new token's K and V, in the
               space of the table's entries; a negative one, or one of page 0 where that belongs to no one: nowhere.
               Each must be the one that the table gives. Not given: the table's
        Raises WrongState, BadTensor.
        """
        run, step = self._run, self._step
        if run is None or step is None:
            raise WrongState("there is no step to fill; call begin() first")
        tables, device_step = self._tables, run.step
        with on_device(self.device):
            if tables.gathered:
                rows, kv_len = run.to.engine_row, run.to.kv_len
                for table in tables.spaces:
                    self._ops.gather_table(table.gather, rows, kv_len, table.entries, page_size=tables.page_size)
            for table, tensors in zip(tables.spaces, device_step.spaces, strict=True):
                num_pages = self._pages.in_every_layer(table.space)
                self._ops.check_pages(tensors, num_pages, page_size=tables.page_size, window_left=table.window_left)
            run.core.fill(run.children, run.plan)
            if slots is not None:
                _check_slots(slots)
                for table, tensors in zip(tables.spaces, device_step.spaces, strict=True):
                    self._ops.take_slots(
                        slots,
                        table.source.slot_map,
                        tensors.counts,
                        tensors.slot_of_token,
                        page_size=tables.page_size,
                        null_page=table.terms.null_page,
                    )
            if isinstance(step.mask, BoolCells):
                for tensors, window_left in device_step.windows:
                    self._ops.pack_mask(step.mask.cells, step.mask.positions, window_left, tensors)
        self._is_filled = True

    def record_fill(self, recorder: Recorder, slots: Tensor | None = None) -> RecordedFill:
        """Fill the captured step that has begun, and record that, for replay_fill() in later steps of its shape.

        Outside of captures. slots: as of fill(); they are read where they are now
        Raises what fill() raises, WrongState, and RecordingRefused.
        """
        run, step = self._run, self._step
        if run is None or step is None or not step.captured or not isinstance(step.mask, NoCells):
            raise WrongState("only the fill of a captured step without a mask can be recorded; begin one")
        recording, _ = recorder.record(lambda: self.fill(slots))
        return RecordedFill(run, recording)

    def replay_fill(self, fill: RecordedFill) -> None:
        """Do what fill() does, by a graph of record_fill(). Raises WrongState for one of steps of another shape."""
        if fill.run is not self._run:
            raise WrongState("this graph fills steps of another shape than the one that has begun; call fill()")
        with on_device(self.device):
            fill.recording.replay()
        self._is_filled = True

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer to their slots.

        k, v: [T, kv_heads, head_dim | v_head_dim], any strides but the last
        Raises BadTensor, WrongState.
        """
        run = self._running()
        run.core.layers.store(run.step, run.plan, layer, k, v)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_and_store. Positions are places in the KV, or came with the step's mask.

        Raises BadTensor, WrongState.
        """
        run = self._running()
        run.core.layers.rope_and_store(run.step, run.plan, layer, Projected(q, k, v, q_out), work)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_queries. Raises BadTensor, WrongState."""
        run = self._running()
        run.core.layers.rope_queries(run.step, layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """As LayerCalls.finish. Raises BadTensor, WrongState."""
        run = self._running()
        run.core.layers.finish(run.step, layer, out, gate, undo)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the step's new tokens over their sequences' KV.

        q, out: [T, q_heads, head_dim | v_head_dim], any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; when given, receives the natural log of the softmax denominator, -inf for pads
        Raises BadTensor, WrongState.
        """
        run = self._running()
        run.core.layers.attend(run.step, run.plan, layer, q, out, lse)

    def store_index(self, layer: int, k: Tensor) -> None:
        """Write the step's new index keys of a layer that has an Indexer. As LayerCalls.store_index."""
        run = self._running()
        run.core.layers.store_index(run.step, layer, k)

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Choose the keys that the step's new tokens attend to, by a layer's Indexer. As LayerCalls.select."""
        run = self._running()
        run.core.layers.select(run.step, layer, q, weights)
        self._selections.after_select(0, layer)

    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """In place of select(): what the caller has chosen. As LayerCalls.give_selection."""
        run = self._running()
        run.core.layers.give_selection(run.step, layer, units, counts)
        self._selections.after_select(0, layer)

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As attend, over the keys that were chosen since begin(). As LayerCalls.attend_selected."""
        run = self._running()
        self._require_layer(layer)
        self._selections.before_attend(0, layer)
        run.core.layers.attend_selected(run.step, layer, q, out, lse)

    def check_device(self) -> None:
        """Wait for the device, and give on_fault what went wrong in steps and was not reported yet."""
        wait_for_device(self.device)
        self._publisher.find_faults()
        if self._publisher.found:
            self.options.on_fault(self._publisher.take_found())

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Everything that a graph reads and that is not an engine's, by name."""
        return {
            f"{causality.name.lower()} {name}": tensor
            for causality, core in self._cores.items()
            for name, tensor in {**core.memory.sealed_tensors(), **core.head_weights.tensors()}.items()
        }

    def shadow_view(self, layer: int) -> ShadowView:
        """What a check of the step that is running needs in a layer; waits for the device.

        Raises WrongState, and BadTensor for a layer that does not exist.
        """
        run = self._running()
        self._require_layer(layer)
        if run.plan.shape.kind is StepKind.MASKED:
            raise WrongState("the step has a mask, which only its engine can compare; look at another step")
        kind = run.core.kinds.of_layer[layer]
        tensors = run.step.of_kind[kind]
        return ShadowView(
            run.core.layers.problem(layer),
            self._pages.layer(layer),
            run.core.head_weights.of(layer),
            int(tensors.counts[0]),
            tensors.row_of_seq,
            tensors.kv_len,
            tensors.q_len,
            tensors.table,
            run.plan.kernels[kind].row.rounds_products,
        )

    def _new_core(self, problems: Sequence[Problem], spaces: Sequence[Space], target: Target, agree: Agree) -> StepCore:
        """What runs the steps of a causality."""
        selections = choose_kernels(
            list(dict.fromkeys(problems)),
            target,
            self.options.provider,
            self.options.pool_size(self.bounds),
            deterministic=self.options.deterministic,
            device=self.device,
            agree=agree,
        )
        kinds = LayerKinds.of(problems, spaces, selections)
        self._pages.read_aligned(
            sides=kinds.reading_alone(lambda limits: limits.aligned_sides),
            rows=kinds.reading_alone(lambda limits: limits.aligned_rows),
        )
        return StepCore(kinds, self._tables, self._pages, self.guards.step)

    @property
    def _first_core(self) -> StepCore:
        return next(iter(self._cores.values()))

    def _core(self, causality: Causality) -> StepCore:
        core = self._cores.get(causality)
        if core is None:
            named = ", ".join(each.name for each in self._cores)
            raise WrongState(
                f"no kernels were chosen for steps that say {causality.name}; build with causalities=..., which has "
                f"{named} now"
            )
        return core

    def _running(self) -> _Run:
        if self._run is None or not self._is_filled:
            raise WrongState("store and attend need a step that was begun and filled; call begin() and fill() first")
        return self._run

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self._first_core.layers):
            raise BadTensor(f"layer {layer} does not exist; there are layers 0 to {len(self._first_core.layers) - 1}")

    def _run_of(self, step: ExternalStep) -> _Run:
        """How a step runs: kept for captured ones, and for the latest of others."""
        max_kv_len = 0 if step.captured else kv_len_bucket(step.max_kv_len, self.max_kv_len)
        key = step.shape, step.min_q_len, step.max_q_len, max_kv_len, step.causality
        kept = self._captured if step.captured else self._kept
        run = kept.get(key)
        if run is None or (not step.captured and self._kept_at != run.core.memory.epochs):
            run = self._new_run(step, max_kv_len)
            if not step.captured and (len(kept) >= _MOST_KEPT or self._kept_at != run.core.memory.epochs):
                kept.clear()
                self._kept_at = run.core.memory.epochs
            kept[key] = run
        return run

    def _new_run(self, step: ExternalStep, max_kv_len: int) -> _Run:
        core, shape = self._core(step.causality), step.shape
        self._check(step, core)
        bakes = {baked for selection in core.selections for baked in selection.kernel(shape.kind).row.bakes}
        if step.captured or Baked.MAX_KV_LEN not in bakes:
            max_kv_len = self.max_kv_len
        max_q_len = 1 if shape.kind.decodes else min(step.max_q_len, shape.num_tokens)
        if Baked.MAX_Q_LEN in bakes:
            max_q_len = q_len_bucket(max_q_len)
        plan = core.plan(shape, max_q_len=max_q_len, max_kv_len=max_kv_len, may_capture=step.captured)
        if step.captured and not plan.replayable:
            names = sorted({kernel.row.name for kernel in plan.kernels if not kernel.row.graph_safe})
            raise WrongState(f"{', '.join(names)} cannot be captured; run such steps eagerly, or choose a provider")
        needy = sorted({kernel.row.name for kernel in plan.kernels if kernel.row.needs_host_lengths})
        if needy:
            raise Unsupported(
                f"{', '.join(needy)} must know the lengths on the host, and an engine's are on the device"
            )
        (device_step,) = core.memory.new_device_steps(plan)
        tensors, tables = device_step.tensors, self._tables
        to = PublishedLengths(
            counts=tensors.counts,
            engine_row=self._engine_row[: shape.num_seqs],
            row_of_seq=tensors.row_of_seq,
            kv_len=tensors.kv_len,
            q_len=tensors.q_len,
            pad_kv_len=plan.pads.kv_len,
            pad_q_len=plan.pads.q_len,
            gathered=tables.gathered,
        )
        bounds = LengthBounds(
            rows=tables.rows,
            kv_len=max_kv_len,
            min_q_len=step.min_q_len,
            max_q_len=min(step.max_q_len, max_q_len),
            num_tokens=shape.num_tokens,
            page_size=tables.page_size,
            causal=not self.options.short_kv or any(problem.causal for problem in core.kinds.problems),
            csr_indptr=tables.csr_indptr,
        )
        return _Run(core, plan, (device_step,), to, bounds)

    def _check(self, step: ExternalStep, core: StepCore) -> None:
        """Refuse a step that was not built for."""
        if step.shape.num_seqs > self.bounds.num_seqs:
            raise NeverFits(
                f"the step is padded to {step.shape.num_seqs} sequences, built for {self.bounds.num_seqs}; "
                "raise num_seqs of the bounds"
            )
        if step.captured and not self._is_sealed:
            raise WrongState("graphs would read memory that may move; call seal() before the first captured step")
        if not isinstance(step.mask, NoCells) and not any(p.custom_mask for p in core.kinds.problems):
            raise WrongState("the step has a mask and no layer looks at it; build with problems of custom_mask")
        if step.lengths.kv_len.device != self.device:
            raise BadTensor(f"kv_len is on {step.lengths.kv_len.device}, not on {self.device}")


def _page_size(problems: Sequence[Problem]) -> int:
    """Of all layers. Raises BadProblem."""
    if not problems:
        raise BadProblem("no layers: pass one LayerSource for each attention layer of the model")
    sizes = sorted({problem.page_size for problem in problems})
    if len(sizes) > 1:
        raise BadProblem(f"layers disagree on the page size ({sizes}); build an ExternalAttention for each")
    return sizes[0]


def _check_spaces(spaces: Sequence[Space], tables: Mapping[Space, Source]) -> None:
    """Every space of a layer has a table, and every table a layer. Raises BadProblem."""
    if set(spaces) != set(tables):
        of_layers, of_tables = (sorted(space.name for space in each) for each in (set(spaces), tables))
        raise BadProblem(f"layers live in the spaces {of_layers} and there are tables of {of_tables}; give one of each")


def _window(problems: Sequence[Problem]) -> int:
    """Previous keys that the furthest-looking of a space's layers sees."""
    windows = [problem.window_left for problem in problems]
    return ALL_KEYS if UNLIMITED_WINDOW in windows else max(windows)


def _check_slots(slots: Tensor) -> None:
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.numel():
        raise BadTensor(f"slots are {slots.dtype} {list(slots.shape)}; they must be int32 or int64 in one dimension")

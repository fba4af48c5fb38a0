"""ExternalAttention: attention over KV pages, block tables, lengths, slots and graphs that an engine owns.

begin            outside of graphs, one launch: plan at the engine's padded shape, publish its lengths
fill             may be captured: gather tables that cannot be read in place, derive metadata, check slots, schedule
store, attend    may be captured, for each layer

The engine pads its steps and chooses its graphs. A captured step is planned at the longest KV length, so that its graph
serves any length.
Kernels, launches, safeguards and the error word are those of AttentionRuntime.
"""

from __future__ import annotations  # check_fields() reads types as texts

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import get_ident

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, MOST_TOKENS
from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, DeviceFault, NeverFits, WrongState
from rocm_attn.guards.registry import Guards, guards_from_settings
from rocm_attn.hip_graphs.record_guard import guard_here
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.machine.agreement import Agree, alone
from rocm_attn.machine.devices import on_device, require_tensor, wait_for_device, with_index
from rocm_attn.machine.settings import check_fields, require_kind
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.paging.adopted import AdoptedSpace, AdoptedTables, Reach, Source
from rocm_attn.paging.adopted_pages import AdoptedPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.state_pool import StatePool
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize, PoolTerms
from rocm_attn.providers.launches import StepOps
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.step.core import StepCore
from rocm_attn.step.external_layers import ExternalGate, ExternalLayers
from rocm_attn.step.external_runs import EnginePublisher, ExternalRun, ExternalRuns
from rocm_attn.step.external_step import BoolCells, Causality, DeviceSpans, ExternalStep
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights, LayerHeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.selections import StepSelections


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One attention layer of an engine's model.

    space:        the index space of its KV cache group
    head_weights: sinks or ALiBi slopes, if its problem has them; may be set later, by set_head_weights()

    Raises BadSetting for values of another kind.
    """

    problem: Problem
    space: Space = Space.FULL
    head_weights: HeadWeights = NO_HEAD_WEIGHTS

    def __post_init__(self) -> None:
        for name, kind in (("problem", Problem), ("space", Space), ("head_weights", HeadWeights)):
            require_kind(f"{name} of a layer", getattr(self, name), kind, BadSetting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest step that an ExternalAttention accepts. Larger ones are refused.

    num_seqs:   padded sequences
    num_tokens: padded tokens; default: any number, and seal() makes room for one token in each sequence
    kv_len:     tokens of the longest sequence
    num_pages:  pages of a layer, page 0 included
    """

    num_seqs: int
    num_tokens: int = INT32_MAX
    kv_len: int
    num_pages: int

    def __post_init__(self) -> None:
        check_fields(self, BadSetting)
        for name in ("num_seqs", "num_tokens", "kv_len", "num_pages"):
            value, most = getattr(self, name), MOST_TOKENS if name == "kv_len" else INT32_MAX
            if not 1 <= value <= most:
                raise BadSetting(f"{name} is {value}; it must be from 1 to {most}")


FaultPolicy = Callable[[DeviceFault], None]


def raise_fault(fault: DeviceFault) -> None:
    """Raises the fault. The step that it is reported to is not begun; it may be begun again."""
    raise fault


class LogAndCount:
    """A fault policy that logs and counts device faults, and lets serving continue.

    log:   default: this package's own logger
    count: faults so far

    Raises BadSetting for a log of another kind.
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self.log = log if log is not None else logging.getLogger(__name__)
        require_kind("log", self.log, logging.Logger, BadSetting)
        self.count = 0

    def __call__(self, fault: DeviceFault) -> None:
        self.count += len(fault.each)
        self.log.error("%s", fault)


@dataclass(frozen=True, slots=True)
class ExternalOptions:
    """How kernels are chosen, and what they may do to the engine's pages.

    provider:      "auto", "cpu", "torch", "triton" or "aiter"
    deterministic: whether a sequence's results must be bitwise the same in any batch
    page_strides:  whether pages may be strided, as when K and V are packed into one tensor
    even_slots:    whether all slots of strided pages lie at equal distances, which more kernels support. pages.bind()
                   then refuses other pages
    unaligned_rows: whether K and V, and their rows, may begin anywhere in memory. If not, pages.bind() refuses K and V
                    that do not begin at a multiple of 16 bytes, and rows off multiples of 16 elements
    zero_tails:    whether the unused slots of a sequence's last page may be zeroed. Some kernels need it, unless a page
                   has one token. If not, only K and V of new tokens are written, to their slots
    short_kv:      whether a sequence may have fewer tokens in its KV than new tokens; only in non-causal steps
    causalities:   the causalities that steps may have; kernels are chosen for each
    mask_cells:    whether steps may have bit masks (BoolCells), for which memory is kept; if not, only DeviceSpans
    binds_calls:   whether a layer's pages may change before each call, also after seal(): call pages.bind() before the
                   layer, and do not move the pages of captured calls
    watches_pages: whether to report PAGE_TAKEN if a page is written through another table entry while a row still names
                   it, also before a window: an engine that frees pages there must write 0 over their entries. It takes
                   8 bytes per page of a row, and per page of the pool
    on_fault:      called with the DeviceFault of an earlier step

    Raises BadSetting.
    """

    provider: str = "auto"
    deterministic: bool = False
    page_strides: bool = False
    even_slots: bool = False
    unaligned_rows: bool = False
    zero_tails: bool = False
    short_kv: bool = False
    causalities: Sequence[Causality] = (Causality.OF_LAYERS,)
    mask_cells: bool = True
    binds_calls: bool = False
    watches_pages: bool = False
    on_fault: FaultPolicy = raise_fault

    def __post_init__(self) -> None:
        check_fields(self, BadSetting)
        require_kind("causalities", self.causalities, Sequence, BadSetting)
        if not self.causalities:
            raise BadSetting("causalities is empty, so no step could run; give those that steps may have")
        for causality in self.causalities:
            require_kind("one of causalities", causality, Causality, BadSetting)
        if not callable(self.on_fault):
            raise BadSetting(f"on_fault is {self.on_fault!r}; give a callable, such as LogAndCount()")

    def problem(self, problem: Problem, causality: Causality) -> Problem:
        """A layer's problem in steps of this causality.

        Raises BadProblem for chunks with a non-causal one, and BadSetting.
        """
        require_kind("causality", causality, Causality, BadSetting)
        if causality is Causality.OF_LAYERS:
            return problem
        right = 0 if causality is Causality.CAUSAL else problem.window_left
        return replace(problem, window_right=right)

    def pool_size(self, bounds: Bounds) -> PoolSize:
        """The pool that kernels are chosen for."""
        terms = PoolTerms(self.page_strides, not self.zero_tails, self.short_kv, self.unaligned_rows, self.even_slots)
        return PoolSize(bounds.num_pages, bounds.kv_len, bounds.num_seqs, terms)


@dataclass(frozen=True, slots=True)
class RecordedFill:
    """A fill() recorded as a graph, for steps with the same ExternalRun."""

    run: ExternalRun
    recording: Recording


class ExternalAttention:
    """Paged attention for the layers of an engine's model, over pages, tables and lengths that the engine owns.

    Everything is launched on the current stream. `tables` and `layers` are attributes too: the engine's tables, and the
    layer calls of the running step.

    layers:  the model's attention layers, in order; all have the same page size
    tables:  space -> the engine's block table, for every space that a layer uses; a single table is that of Space.FULL
    bounds:  the largest step
    target:  the device; detected if not given
    guards:  the safeguards; default: all but those that the environment switches off
    agree:   how ranks agree on kernels

    pages: the pages of each layer
    gate:  which thread has the step
    ops:   the kernel launches around attention

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
        require_kind("bounds", bounds, Bounds, BadSetting)
        require_kind("options", options, ExternalOptions, BadSetting)
        require_kind("layers", layers, Sequence, BadSetting)
        for source in layers:
            require_kind("a layer", source, LayerSource, BadSetting)
        self.guards = guards = guards_from_settings() if guards is None else guards
        target = target if target is not None else detect_target(self.device)
        require_kind("guards", guards, Guards, BadSetting)
        require_kind("target", target, Target, BadSetting)
        guards.warn()
        problems, spaces = [layer.problem for layer in layers], [layer.space for layer in layers]
        tables = tables if isinstance(tables, Mapping) else {Space.FULL: tables}
        _check_layers(problems, spaces, tables)
        self.gate = gate = ExternalGate(guards.adopted)
        kinds_of = {
            causality: self._choose([options.problem(p, causality) for p in problems], spaces, target, agree)
            for causality in options.causalities
        }
        kernels = [each for kinds in kinds_of.values() for s in kinds.selections for each in s.kernels.values()]
        self.tables = AdoptedTables(
            tables,
            {space: Reach.of([p for p, its in zip(problems, spaces, strict=True) if its == space]) for space in tables},
            page_size=problems[0].page_size,
            max_kv_len=bounds.kv_len,
            num_seqs=bounds.num_seqs,
            short_kv=options.short_kv,
            pads_have_kv=any(kernel.entry.min_kv_len for kernel in kernels),
            device=self.device,
            gate=gate,
        )
        self.pages = AdoptedPages(
            problems,
            spaces,
            num_pages=bounds.num_pages,
            page_strides=options.page_strides,
            even_slots=options.even_slots,
            binds_calls=options.binds_calls,
            device=self.device,
            gate=gate,
        )
        self._head_weights = LayerHeadWeights(problems, self.device, guards.step.layers.new_head_weights)
        self.cores = {causality: self._new_core(kinds) for causality, kinds in kinds_of.items()}
        first_core = next(iter(self.cores.values()))
        selecting = first_core.layers.selecting
        self._selects = bool(selecting.indexed)
        self._selections = StepSelections(selecting, guards.step.layers.selection_of)
        self._runs = ExternalRuns(
            self.cores,
            self.tables,
            self._selections,
            bounds.num_seqs,
            bounds.num_tokens,
            has_cells=options.mask_cells,
        )
        self.ops: StepOps = first_core.ops
        self._publisher = EnginePublisher(self.ops, self.device, guards.publishing, options.on_fault)
        self._pages_of_spaces = tuple(self.pages.in_every_layer[table.space] for table in self.tables.spaces)
        self._watches: tuple[PageWatch, ...] = ()
        if options.watches_pages:
            rows = self.tables.most_rows = self.tables.rows.num
            self._watches = tuple(PageWatch.of(rows, self.tables.width, bounds.num_pages, self.device) for _ in tables)
        self.layers = ExternalLayers(gate)
        for layer, source in enumerate(layers):
            if source.head_weights != NO_HEAD_WEIGHTS:
                self.set_head_weights(layer, source.head_weights)

    @property
    def step_number(self) -> int:
        """The number of the step that was begun last, from 1 on; a DeviceFault names its step by it."""
        return self._publisher.line.number

    def kernels(self, causality: Causality = Causality.OF_LAYERS) -> LayerKinds:
        """The kernels of steps of a causality. Raises BadSetting, and WrongState for one that steps may not have."""
        require_kind("causality", causality, Causality, BadSetting)
        return self._runs.core(causality).kinds

    def set_head_weights(self, layer: int, weights: HeadWeights) -> None:
        """Sets a layer's sinks or ALiBi slopes. They are copied; captured graphs read the new ones too.

        Raises BadTensor, and WrongState while another thread has a step.
        """
        self.gate.change("set_head_weights()")
        self._head_weights.set(layer, weights)

    def take_over(self) -> None:
        """Makes this thread the owner of the step that was begun last, for engines that change threads between steps.

        The thread that owned the step must be done with it, and is refused from then on.
        """
        self.gate.take_over()

    def seal(self, bounds: Bounds | None = None) -> None:
        """Fixes the addresses that graphs read, with room for steps of these bounds and smaller ones.

        Call it before the first capture, after every layer has its pages. From then on tables and pages must not move.
        bounds: if not given, those of the largest step
        Raises WrongState, NeverFits.
        """
        bounds, gate = self.bounds if bounds is None else bounds, self.gate
        require_kind("bounds", bounds, Bounds, BadSetting)
        gate.change("seal()")
        if gate.is_sealed:
            raise WrongState("addresses are sealed already; build another ExternalAttention for other sizes")
        if bounds.num_seqs > self.bounds.num_seqs:
            raise NeverFits(
                f"{bounds.num_seqs} sequences are to be captured and the most is {self.bounds.num_seqs}; raise num_seqs"
            )
        if not self.options.binds_calls:
            self.pages.require_bound()
        num_tokens = 0 if bounds.num_tokens == INT32_MAX else bounds.num_tokens
        self._runs.seal(bounds.num_seqs, max(bounds.num_seqs, num_tokens))
        gate.is_sealed = True

    def begin(self, step: ExternalStep) -> StepPlan:
        """Plans a step and publishes its lengths to the device. Call it outside of graphs.

        It makes one launch, one more for each copied table, and one for a mask of spans.
        Raises BadBatch, NeverFits, WrongState, and what on_fault raises for an earlier step; there is no step to fill
        or run then.
        """
        require_kind("the step", step, ExternalStep, BadBatch)
        if guard_here() is not None:
            raise WrongState("begin() was called in a capture; call it before the capture, and before each replay")
        gate, tables, publisher = self.gate, self.tables, self._publisher
        had_step = gate.enter()
        gate.run = None  # a step that is refused, or breaks off, leaves none that fill() would take for it
        try:
            run = self._runs.of(step)
            with on_device(self.device):
                slot = publisher.hear()
                gate.is_filled = False
                publisher.publish(slot, step, run)
                if publisher.line.number == 1:
                    # Numbers begin again after 2**31 - 1, and a watch knows a page's writer by the larger one.
                    for watch in self._watches:
                        watch.clear()
                if isinstance(step.mask, DeviceSpans):
                    self.ops.place_spans(step.mask.of_step, run.step.tensors)
                if tables.gathered_in_begin:
                    self._gather(tables.gathered_in_begin, run)
                    tables.note_copies()
        except BaseException:
            if not had_step:
                gate.leave()
            raise
        gate.run, gate.mask, gate.thread = run, step.mask, get_ident()
        if self._selects:
            self._selections.begin(1)
        return run.plan

    def fill(self, slots: Tensor | None = None) -> None:
        """Computes the step's metadata on the device. May be captured; running it twice is harmless.

        slots: int32 or int64 [n], any stride, on the device: the slot of each new token's K and V (slot mapping), in
               the space of the table's entries. K and V of a token are dropped if its slot is negative, or in page 0
               of a table with null_page; any other slot must be the one that the table gives. Default: the table's
        Raises WrongState, BadTensor.
        """
        gate, tables = self.gate, self.tables
        run, page_size = gate.begun(), tables.page_size
        gate.is_filled = False  # a second fill that is refused, or breaks off, leaves no step to run
        spaces, mask = run.step.spaces, gate.mask
        with on_device(self.device):
            if tables.gathered_in_fill:
                self._gather(tables.gathered_in_fill, run)
            for table, tensors, num_pages in zip(tables.spaces, spaces, self._pages_of_spaces, strict=True):
                self.ops.check_pages(
                    tensors,
                    num_pages,
                    page_size=page_size,
                    window_left=table.window_left,
                    spans_pass=table.spans_pass and isinstance(mask, DeviceSpans),
                    chunk=table.chunk,
                )
            if isinstance(mask, BoolCells):
                # A sequence that became a pad keeps its cells: those of the next one follow.
                torch.sub(run.step.tensors.kv_len, run.to.keys_of_cells, out=run.step.tensors.mask_start)
            run.core.fill((run.step,), run.plan)
            if slots is not None:
                _check_integers("slots", slots, self.device, 1)
                for table, tensors in zip(tables.spaces, spaces, strict=True):
                    self.ops.take_slots(slots, table.gather.slot_map, tensors, page_size=page_size)
            if isinstance(mask, BoolCells):
                for tensors, window_left in run.step.windows:
                    self.ops.pack_mask(mask.cells, mask.positions, window_left, tensors)
                run.core.build_ranges(run.step, run.plan)
            if self._watches:
                for tensors, watch in zip(spaces, self._watches, strict=True):
                    self.ops.watch_pages(tensors, run.to.engine_row, watch, page_size=page_size)
        gate.is_filled = True

    def forget(self, rows: Tensor) -> None:
        """Resets the page watch for these table rows, because they go to other requests.

        Needed if watches_pages is set and the next request begins with as many cached tokens as the last one had.
        rows: int32 or int64 [n], on the device; nothing happens for those that the tables do not have
        Raises BadTensor.
        """
        _check_integers("rows", rows, self.device)
        for watch in self._watches:
            row = torch.arange(len(watch.rows), device=self.device)
            # An index outside of a tensor would end a GPU's process.
            watch.rows.masked_fill_((row[:, None] == rows).any(1, keepdim=True), 0)

    def record_fill(self, recorder: Recorder, slots: Tensor | None = None) -> RecordedFill:
        """Fills the captured step that has begun, outside of captures; records the fill as a graph for replay_fill().

        slots: see fill(); replays read them at the same addresses
        Raises WrongState, BadTensor, RecordingRefused.
        """
        run = self.gate.begun()
        if not run.plan.replayable or isinstance(self.gate.mask, BoolCells):
            raise WrongState("only a captured step without a mask can have its fill recorded; begin one first")
        recording, _ = recorder.record(lambda: self.fill(slots))
        return RecordedFill(run, recording)

    def replay_fill(self, fill: RecordedFill) -> None:
        """Replays a graph of record_fill() in place of fill(). Raises WrongState if it is of another step's shape."""
        if fill.run is not self.gate.begun():
            raise WrongState("this graph fills steps of another shape than the running one; call fill()")
        with on_device(self.device):
            fill.recording.replay()
        self.gate.is_filled = True

    def check_device(self) -> None:
        """Waits for the device, and calls on_fault for each step's fault that was not reported yet.

        Raises WrongState while another thread has a step, and what on_fault raises.
        """
        self.gate.change("check_device()")
        wait_for_device(self.device)
        self._publisher.find_faults()

    def _choose(self, problems: Sequence[Problem], spaces: Sequence[Space], target: Target, agree: Agree) -> LayerKinds:
        """Returns the kernels of steps of a causality."""
        selections = choose_kernels(
            list(dict.fromkeys(problems)),
            target,
            self.options.provider,
            self.options.pool_size(self.bounds),
            deterministic=self.options.deterministic,
            device=self.device,
            agree=agree,
        )
        return LayerKinds.of(problems, spaces, selections)

    def _new_core(self, kinds: LayerKinds) -> StepCore:
        """Returns the core that runs the steps of a causality."""
        guards = self.guards.step
        if not self.options.mask_cells:
            # The cells of one word, which no token reads.
            guards = replace(guards, memory=replace(guards.memory, mask_room=lambda shape, mask_keys: 32))
        self.pages.aligned_sides |= kinds.reading_alone(lambda limits: limits.aligned_sides)
        self.pages.aligned_rows |= kinds.reading_alone(lambda limits: limits.aligned_rows)
        return StepCore(kinds, self.tables, self.pages, guards, StatePool.none(self.device), self._head_weights)

    def _gather(self, tables: Sequence[AdoptedSpace], run: ExternalRun) -> None:
        """Copies the entries that a step needs from the engine's tables into those that kernels read."""
        rows, kv_len = run.to.engine_row, run.to.kv_len
        for table in tables:
            self.ops.gather_table(table.gather, rows, kv_len, table.entries, page_size=self.tables.page_size)


def _check_layers(problems: Sequence[Problem], spaces: Sequence[Space], tables: Mapping[Space, Source]) -> None:
    """Layers must have one page size, every space of a layer a table, and every table a layer.

    Raises BadProblem, and BadTensor for a table that is given without its source.
    """
    for source in tables.values():
        if not isinstance(source, Source):
            raise BadTensor(f"a table is a {type(source).__name__}; give a TableSource or a CsrSource of it")
    if not problems:
        raise BadProblem("there are no layers; give one LayerSource for each attention layer of the model")
    if any(problem.row.tokens > 1 for problem in problems):
        raise BadProblem(
            "a layer has rows of several tokens, whose state no engine's pages hold here; build a runtime with pages "
            "of its own"
        )
    sizes = sorted({problem.page_size for problem in problems})
    if len(sizes) > 1:
        raise BadProblem(f"layers disagree on the page size ({sizes}); build an ExternalAttention for each")
    if set(spaces) != set(tables):
        of_layers, of_tables = (sorted(space.name for space in each) for each in (set(spaces), tables))
        raise BadProblem(
            f"layers live in the spaces {of_layers} and tables are given for {of_tables}; give one table for each space"
        )


def _check_integers(name: str, given: Tensor, device: torch.device, at_least: int = 0) -> None:
    require_tensor(name, given)
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64) or given.numel() < at_least:
        raise BadTensor(
            f"{name} are {given.dtype} {list(given.shape)}; they must be int32 or int64 in one dimension, at least "
            f"{at_least}"
        )
    if given.device != device:
        raise BadTensor(f"{name} are on {given.device}, not on {device}")

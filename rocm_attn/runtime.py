"""AttentionRuntime: the order of a step. How a whole one is published, and most begin, is in step/at_once.py.

begin_step   host: check, pad, plan, grow buffers;  device: page copies, table updates, publish, fill
             begin_split_step: the same in two halves, each published and filled for itself
             begin_drafts: a round of drafts, published once and filled for each of its steps
per layer    the step's layers: store, attend, or both in one call
end_step     host only
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS, Drafts
from rocm_attn.batch.halves import HALVES, split_batch
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, PadTo, fits
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, DeviceFault, NeverFits, NotCopied, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.machine.agreement import Agree, Agreement, alone
from rocm_attn.machine.devices import StreamOrder, is_current, on_device, wait_for_device, with_index
from rocm_attn.machine.target import Target
from rocm_attn.paging.canary import what_was_written
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.stored_tokens import StepStores
from rocm_attn.providers.select import Selection
from rocm_attn.step.at_once import StepsAtOnce
from rocm_attn.step.core import StepCore
from rocm_attn.step.drafts import DraftSteps, SplitDrafts, Turns
from rocm_attn.step.echo import STEPS_UNTIL_ECHO
from rocm_attn.step.expanded import ExpandedPrefill
from rocm_attn.step.head_weights import LayerHeadWeights
from rocm_attn.step.holder import IDLE, StepHolder, StepState
from rocm_attn.step.kv_scales import KVScales, written_pages
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.layers import StepLayers
from rocm_attn.step.memory import DeviceStep, StepPart
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.repeatable import Repeatable
from rocm_attn.step.selections import StepSelections
from rocm_attn.step.step import SplitStep, Step

# What staging a step gives.
Staged = Step | SplitStep | DraftSteps | SplitDrafts
_Begun = TypeVar("_Begun", Step, SplitStep, DraftSteps, SplitDrafts)
_Stage = Callable[[StepBatch, StepPlan, str], _Begun]

_NO_STEP = "the batch is a round of drafts; call begin_drafts(), or run it by a DraftRunner"
_NO_ROUND = "the batch has no drafts; make it by draft_batch(), or call begin_step()"


class AttentionRuntime:
    """Paged attention for all layers of a model.

    One thread at a time: a step is begun and ended by one thread, and a call of another one in between raises
    WrongState. Layers may be called from other threads while the step runs. A runtime cannot be copied or pickled.

    kinds:   the layers, with the kernels that were chosen for them
    options: its sizes, and which steps may be captured
    guards:  the safeguards
    agree:   how ranks that share a model's layers agree on graphs and faults; see selection/build.py

    Raises BadProblem and CapacityExceeded for a pool that cannot be.
    """

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def __init__(
        self,
        kinds: LayerKinds,
        options: RuntimeOptions,
        *,
        device: torch.device | str,
        guards: Guards,
        agree: Agreement = alone,
    ) -> None:
        guards.warn()
        self.guards, self.options = guards, options
        self.agree: Agree = agree
        self.meetings = agree.new_meetings()
        self.repeatable: Repeatable | None = None  # what stage_again() stages
        self.device = with_index(device)
        problems, spaces = kinds.problems, kinds.spaces_of_layers
        windows = options.windows(problems)
        num_pages = {Space.FULL: options.num_pages, **{pages.space: pages.num_pages for pages in windows}}
        self.pool = HybridKVPool(problems, spaces, num_pages=num_pages, device=self.device)
        self.table = RequestTable(
            max_num_seqs=options.max_num_seqs,
            max_kv_len=options.max_kv_len,
            num_pages=options.num_pages,
            page_size=self.pool.page_size,
            device=self.device,
            windows=windows,
            max_num_rows=options.max_num_rows,
            guards=guards.table,
        )
        self.core = core = StepCore(kinds, self.table, self.pool, guards.step, mask_keys=options.mask_keys)
        self._check_batch = guards.batch.check(self.table)
        self._check_stored, require_stored = guards.batch.stored(self.table)
        selecting = core.layers.selecting
        self._stores = StepStores(len(problems) + len(selecting.indexed), self.table.tokens, require_stored)
        # (layers): the staged step is about to be run by a graph that stores in these; raises as store and attend do.
        self.begin_replay = self._stores.before_replay
        self._selections = StepSelections(selecting, guards.step.layers.selection_of)
        self._selects = bool(selecting.indexed)
        self._evict = guards.batch.evict(self.table) if windows else None
        self._publisher = Publisher(
            core.ops, self.table, self.pool, guards.publishing, holds_faults=self.meetings.holds_faults
        )
        self.graph_runs = self._publisher.runs
        self._planner = core.new_planner(options.padding(problems))
        self.graph_users: weakref.WeakSet[object] = weakref.WeakSet()  # those that make graphs of its steps
        self._holder = StepHolder()
        # The number of the seal on the addresses that graphs read; 0 while there is none. Every seal has another one:
        # what was captured under one is void under the next.
        self._num_seals = self.seal_number = 0
        self._plan: StepPlan | None = None
        self._children: tuple[DeviceStep, ...] = ()
        self._layers: tuple[LayerCalls, ...] = ()
        self._rounds: tuple[DraftSteps, ...] = ()
        self._last_step: Step | None = None
        self._last_drafts: DraftSteps | None = None
        # Whose layers may be called: a whole step's views, or what stands for one split step.
        self._who_runs: object = None
        self._streams = StreamOrder(self.device)
        checks = self.device, self._holder, self._check_batch, self._evict, self.table.tokens, self._stores
        self.at_once = StepsAtOnce(*checks, self._planner, core.memory, self._publisher, self._streams)

    @property
    def kinds(self) -> LayerKinds:
        """Which layers are alike, with their kernels and spaces."""
        return self.core.kinds

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The kernels, per kind of layer."""
        return self.core.selections

    @property
    def target(self) -> Target:
        """The hardware that the kernels were chosen for."""
        return self.core.target

    @property
    def head_weights(self) -> LayerHeadWeights:
        """What a model has learned for each query head's softmax, layer by layer."""
        return self.core.head_weights

    def set_kv_scales(self, layer: int, scales: KVScales) -> None:
        """Give a layer of eight-bit K and V its factors, which are 1 until then. Graphs use the new ones too.

        Values are copied, to the place that graphs read. Only while no request is admitted and no page is kept: codes
        that are stored would be worth something else. Raises BadTensor, WrongState; nothing has changed then.
        """
        with self._holder.idle("factors of K and V cannot change"), on_device(self.device):
            k, v = scales.of(layer, self.core.layers.problem(layer))
            if not self.table.is_empty:
                raise WrongState(
                    "factors of K and V cannot change while requests are admitted or pages are kept, whose codes would "
                    "be worth something else; free them first"
                )
            renew = self.guards.step.layers.new_kv_scales
            self.pool.take(layer, written_pages(self.pool.layer(layer), k, v, renew))

    def expanded_prefill(self, layer: int) -> ExpandedPrefill:
        """Non-absorbed attention of a latent layer. Raises BadProblem for one that is not latent, or has a window."""
        terms = self.target, self.options.provider, self.head_weights.of(layer).sinks
        return ExpandedPrefill.of(self.core.layers.problem(layer), self.pool.layer(layer), self.table.entries, *terms)

    @property
    def padding(self) -> PaddingPolicy:
        """What steps are padded to, and which of them may be captured."""
        return self._planner.padding

    @property
    def max_kv_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.table.max_kv_len

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's results are bitwise the same in any batch, in every layer."""
        return all(selection.deterministic for selection in self.selections)

    @property
    def step_number(self) -> int:
        """The number of the step that was staged last, from 1 on; a DeviceFault names its step by it."""
        return self._publisher.step_number

    @property
    def steps_until_known(self) -> int:
        """What went wrong in a step is raised by the step that comes so many steps after it, at the latest."""
        return STEPS_UNTIL_ECHO + self.meetings.steps_late

    def check_device(self) -> None:
        """Wait for the device, and raise DeviceFault if steps went wrong that no later stage() has reported.

        Also if something was written to row 0 of the table or to page 0 of a layer. Ranks that share the layers
        (`agree`) call it together, and raise what any of them has found. For tests, debugging, and whenever serving
        goes idle: while steps run, stage() or meet() reports a fault some steps later by itself, but no step comes to
        report the last ones. One DeviceFault names all faults. Raises WrongState where a step was staged and the graph
        that takes its inputs was not launched yet.
        """
        with self._holder.alone("the device cannot be asked"):
            self._find_faults()
            found = list(self._publisher.found)
            written = what_was_written(self.table, self.pool, range(len(self.core.layers)))
        if written:
            found.append(DeviceFault(f"{written}; padded sequences read it, so every later step may be wrong"))
        self._publisher.report(self.meetings.all_faults(self.step_number, found))

    def meet(self) -> None:
        """Before a step is staged, where ranks share the model's layers (`agree`): hear what the others have found.

        Ranks that call begin_step(), or run steps by a StepRunner, meet there. Raises DeviceFault for an earlier step,
        on all ranks alike, and RanksDiverged.
        """
        if self.agree is not alone:  # a rank alone has none to hear of
            self._publisher.report(self.meetings.before_step(self.step_number, self._publisher.found))

    def report_faults(self) -> None:
        """As check_device, of steps alone: what padded sequences read is not looked at."""
        with self._holder.alone("the device cannot be asked"):
            self._find_faults()
        self._publisher.report(self.meetings.all_faults(self.step_number, self._publisher.found))

    def report_own_faults(self) -> None:
        """As report_faults, of this rank alone: for steps that were tried out, which ranks may break off apart."""
        with self._holder.alone("the device cannot be asked"):
            self._find_faults()
        self._publisher.report(self._publisher.found)

    def forget_faults(self) -> None:
        """Wait for the device; what went wrong in steps and was not reported yet never is.

        For after steps that were tried out.
        """
        with self._holder.alone("the device cannot be asked"):
            self._find_faults()
            self._publisher.forget_faults()

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Everything that a graph reads and the runtime owns, by name: buffers, workspace, table and pages."""
        return self.core.sealed_tensors()

    def begin_step(self, batch: StepBatch, pad_to: PadTo | None = None) -> Step:
        """Stage a step and fill what follows from its inputs; then call its `layers`, one layer after the other.

        pad_to: what to pad to, where ranks must agree; not given: the ladders decide
        Raises BadBatch, CapacityExceeded, WrongState, and DeviceFault for an earlier step, once; no step is begun then.
        """
        return self._begun(partial(self.stage, batch, pad_to))

    def move_accepted(self, accepted: Accepted, row_of_seq: Tensor) -> None:
        """Move the K and V of accepted drafts to the places of their tokens, in all layers; see step/accepting.py.

        To be called once after a verify step of trees has stored, in its forward or after it, and before its rows are
        forked, kept, cut or freed and before the next step. Chains need none.
        row_of_seq: int32 [S], as the step has it
        Raises BadTensor; BadBatch where the step may not store, because other rows hold its pages too; Unsupported for
        layers whose index keys stand for several tokens.
        """
        self.before_move()
        self.core.moves.move(accepted, row_of_seq)

    def before_move(self) -> None:
        """What move_accepted() does first, as a graph of core.moves.move() must have it done. Raises as that."""
        self._stores.before_move()
        with on_device(self.device):
            # After its step a move follows all of it, and the next step follows the move.
            (self._streams.follow if self._holder.state is StepState.IDLE else self._streams.join)()

    def begin_split_step(self, batch: StepBatch, pad_to: PadTo | None = None) -> SplitStep:
        """As begin_step, in two halves; store and attend with their `layers`, in any order of the two.

        pad_to: of both halves together; even
        """
        return self._begun(partial(self.stage_split, batch, pad_to))

    def begin_drafts(self, batch: StepBatch, pad_to: PadTo | None = None) -> DraftSteps:
        """As begin_step, of a round of drafts (draft_batch()): its `steps` are run one after the other.

        Raises also Unsupported for several branches where a layer's problem has no custom_mask.
        """
        return self._begun(partial(self.stage_drafts, batch, pad_to))

    def begin_split_drafts(self, batch: StepBatch, pad_to: PadTo | None = None) -> SplitDrafts:
        """As begin_drafts, in two halves, each of which has all draft steps. pad_to: of both together; even."""
        return self._begun(partial(self.stage_split_drafts, batch, pad_to))

    def _begun(self, stage: Callable[[], _Begun]) -> _Begun:
        """What stage() gives, filled; no step is begun where that raises."""
        self.require_idle()
        try:
            self.meet()
            staged = stage()
            self.fill()
            return staged
        except BaseException:
            self.end_step()
            raise

    def stage(self, batch: StepBatch, pad_to: PadTo | None = None, takers: Collection[StepPlan] = ()) -> Step:
        """The part of begin_step that runs before a graph: check, plan, update the table, publish the inputs.

        takers: plans whose graphs take the inputs where nothing publishes them, and are what is run then
        """
        self._holder.begin("a step cannot begin")
        try:
            if batch.drafts is not NO_DRAFTS:
                raise BadBatch(_NO_STEP)
            refusal = self._checked(batch)
            return self._stage_whole(batch, self._planner.plan(batch, pad_to, 1), refusal, takers)
        except BaseException:
            self.end_step()
            raise

    def take_inputs(self) -> None:
        """The head of a graph of the whole step that was staged: it takes the inputs that stage() leaves to it."""
        with on_device(self.device):
            self._streams.join()
            self._publisher.take_inputs(self._children[0])

    def end_replay(self, layers: int) -> None:
        """The graph of the staged step was launched; it has stored in these layers."""
        self._stores.after_replay(layers)
        self._publisher.taken()

    def stage_again(self) -> Step:
        """As stage(), of the whole step that was staged last, with its number: it runs on what its inputs hold by now.

        Only changes of the table are published, and no page is given back. The step's error word stays: its next
        publication tells of all of these steps. What they store counts as stored once mark_stored() of the table says
        so.
        Raises WrongState where no such step was staged last, or its addresses were given up.
        """
        self._holder.begin("a step cannot begin")
        try:
            again = self._begun_again()
            self._stores.begin(again[0], 1, "")
            return self._staged_whole(*again)
        except BaseException:
            self.end_step()
            raise

    def replay_again(self, replay: Callable[[], object]) -> None:
        """As stage_again() and the rest of its step, where a graph that replay() launches is all of that.

        The graph has stored what it stores in the same step before: nothing of that is looked at again.
        """
        self._holder.begin("a step cannot begin")
        try:
            self._begun_again()
            replay()
            self.end_step()
        except BaseException:
            self.end_step()  # an interrupt may have come in its place
            raise

    def _begun_again(self) -> Repeatable:
        """The step that was staged last, which may run now. Raises WrongState where there is none."""
        if self.repeatable is None:
            raise WrongState("no whole step was staged last that could run again; stage one first")
        self._holder.state = StepState.STAGED
        with on_device(self.device):
            self._streams.follow()
            self._publisher.apply_table_changes()
        return self.repeatable

    def stage_split(self, batch: StepBatch, pad_to: PadTo | None = None) -> SplitStep:
        """The part of begin_split_step that runs before a graph."""
        return self._planned(self._stage_halves, batch, pad_to, HALVES, of_drafts=False)

    def stage_drafts(self, batch: StepBatch, pad_to: PadTo | None = None) -> DraftSteps:
        """The part of begin_drafts that runs before a graph."""
        return self._planned(self._stage_round, batch, pad_to, 1, of_drafts=True)

    def stage_split_drafts(self, batch: StepBatch, pad_to: PadTo | None = None) -> SplitDrafts:
        """The part of begin_split_drafts that runs before a graph."""
        return self._planned(self._stage_split_round, batch, pad_to, HALVES, of_drafts=True)

    def _planned(
        self, stage: _Stage[_Begun], batch: StepBatch, pad_to: PadTo | None, num: int, *, of_drafts: bool
    ) -> _Begun:
        """A batch staged by the plan that it has. num: of its children. Raises BadBatch for a batch of the other kind.

        of_drafts: whether it is a round of drafts
        """
        self._holder.begin("a step cannot begin")
        try:
            if (batch.drafts is not NO_DRAFTS) is not of_drafts:
                raise BadBatch(_NO_ROUND if of_drafts else _NO_STEP)
            refusal = self._checked(batch)
            return stage(batch, self._planner.plan(batch, pad_to, num), refusal)
        except BaseException:
            self.end_step()
            raise

    def stage_as(self, shape: PaddedShape, batch: StepBatch, takers: Collection[StepPlan] = ()) -> Staged:
        """As stage(), whole or split, at a padded shape. Raises NeverFits where the batch does not fit that."""
        return self._stage(batch, shape, lambda: self._planner.plan_as(batch, shape), takers)

    def stage_like(self, plan: StepPlan, batch: StepBatch) -> Staged:
        """As stage_as, by the plan of another step, whose bounds on lengths the batch is within."""
        return self._stage(batch, plan.shape, lambda: plan)

    def _stage(
        self,
        batch: StepBatch,
        shape: PaddedShape,
        plan_of_step: Callable[[], StepPlan],
        takers: Collection[StepPlan] = (),
    ) -> Staged:
        self._holder.begin("a step cannot begin")
        try:
            if not fits(batch, shape):
                raise NeverFits(
                    f"{batch.num_seqs} sequences with {batch.num_tokens} new tokens do not fit {shape}; "
                    "take the shape that runtime.padding gives for them"
                )
            refusal = self._checked(batch)
            plan = plan_of_step()
            return self._staged_by(plan, takers)(batch, plan, refusal)
        except BaseException:
            self.end_step()
            raise

    def _staged_by(self, plan: StepPlan, takers: Collection[StepPlan]) -> Callable[[StepBatch, StepPlan, str], Staged]:
        """What stages the steps of a plan."""
        if plan.shape.drafts is NO_DRAFTS:
            return partial(self._stage_whole, takers=takers) if plan.shape.num_halves == 1 else self._stage_halves
        return self._stage_round if plan.shape.num_halves == 1 else self._stage_split_round

    def _checked(self, batch: StepBatch) -> str:
        """Why a step of the batch may not store, or nothing. Raises BadBatch."""
        self._check_batch(batch)
        if self.table.tokens.goes_on(batch):
            return ""
        self._check_stored(batch)
        return self.table.why_no_store(batch)

    def _stage_whole(self, batch: StepBatch, plan: StepPlan, refusal: str, takers: Collection[StepPlan] = ()) -> Step:
        if not is_current(self.device):
            with on_device(self.device):
                return self._stage_whole(batch, plan, refusal, takers)
        child = self.at_once.publish(self, batch, plan, refusal, to_graph=plan in takers and not refusal)
        return self._staged_whole(batch, plan, child)

    def _staged_whole(self, batch: StepBatch, plan: StepPlan, child: DeviceStep) -> Step:
        """The step whose inputs are where the device reads them."""
        self._plan, self._children = plan, (child,)
        if self._selects:
            self._selections.begin(1)
        # Steps of equal sizes that graphs replay are equal, and a server decodes many in a row. Others end as they are.
        step, self._who_runs = (self._last_step, child) if plan.replayable else (None, object())
        if step is None or not step.is_for(batch, child, plan):
            layers = self._step_layers(child, plan, self._who_runs, 0)
            step = self._last_step = Step.of(batch, child, plan, layers, 0)
        self._layers = (step.layers,)
        return step

    def _stage_halves(self, batch: StepBatch, plan: StepPlan, refusal: str) -> SplitStep:
        batches = split_batch(batch, plan.shape.child.num_seqs)
        children = self._publish_parts(batch, batches, plan, refusal)
        # Not its views, which a later step of equal sizes has too: a half does not outlive its step.
        self._who_runs = object()
        first, second = (
            Step.of(batches[half], child, plan, self._step_layers(child, plan, self._who_runs, half), half)
            for half, child in enumerate(children)
        )
        self._layers = first.layers, second.layers
        num_first, num_first_tokens = children[0].tensors.counts[:2].unbind()
        return SplitStep((first, second), num_first, num_first_tokens, plan)

    def _stage_round(self, batch: StepBatch, plan: StepPlan, refusal: str) -> DraftSteps:
        children = self._publish_parts(batch, (batch,), plan, refusal)
        # As in _staged_whole: the same views are those of many rounds in a row.
        drafts, self._who_runs = (self._last_drafts, children[0]) if plan.replayable else (None, object())
        if drafts is None or not drafts.is_for(batch, children, plan):
            drafts = self._last_drafts = self._draft_steps(batch, children, plan, 0)
        self._layers, self._rounds = tuple(step.layers for step in drafts.steps), (drafts,)
        return drafts

    def _stage_split_round(self, batch: StepBatch, plan: StepPlan, refusal: str) -> SplitDrafts:
        batches = split_batch(batch, plan.shape.child.num_seqs)
        children = self._publish_parts(batch, batches, plan, refusal)
        self._who_runs = object()
        first, second = (self._draft_steps(batches[half], children, plan, half) for half in range(HALVES))
        self._rounds = first, second
        self._layers = tuple(step.layers for half in self._rounds for step in half.steps)
        num_first, num_first_tokens = children[0].tensors.counts[:2].unbind()
        return SplitDrafts((first, second), num_first, num_first_tokens, plan)

    def _publish_parts(
        self, batch: StepBatch, batches: Sequence[StepBatch], plan: StepPlan, refusal: str
    ) -> tuple[DeviceStep, ...]:
        """Publish a step in halves, or a round of drafts: only what the first draft step of each half starts from."""
        self.repeatable = None
        if self._evict is not None:
            self._evict(batch)
        with on_device(self.device):
            self._streams.follow()
            children = self.core.memory.device_steps(plan)
            self._publisher.apply_table_changes()
            if len(batches) == 1:
                self._publisher.publish_whole(batch, children[0])
            else:
                for half, part in enumerate(batches):
                    self._publisher.publish(part, children[half * len(children) // len(batches)], half)
        self._plan, self._children, self._holder.state = plan, children, StepState.STAGED
        self._stores.begin(batch, len(children), refusal)
        self._selections.begin(len(children))
        return children

    def _draft_steps(self, batch: StepBatch, children: Sequence[DeviceStep], plan: StepPlan, half: int) -> DraftSteps:
        """The draft steps of a round, or of a half of one. batch: its sequences; children: those of all halves"""
        drafts, who = plan.shape.drafts, self._who_runs
        assert isinstance(drafts, Drafts)
        first = half * drafts.steps

        def layers(number: int, child: DeviceStep, turns: Turns) -> StepLayers:
            require = partial(self._require_turn, who, turns, number)
            calls = self.core.layers, child, plan, require, self._stores, self._selections
            return StepLayers(*calls, first + number)

        place_mask = partial(self.core.place_draft_mask, drafts)
        return DraftSteps.of(batch, children[first : first + drafts.steps], plan, half, layers, place_mask)

    def fill(self) -> None:
        """Derive the step's metadata on the device; captured where a step is. Running it twice is harmless."""
        if self._plan is None:
            raise WrongState("there is no step to fill; call begin_step() first")
        with on_device(self.device):
            self._streams.join()
            self.core.fill(self._children, self._plan)
        for drafts in self._rounds:
            drafts.begin()
        self._holder.state = StepState.RUNNING

    def running(self, half: int) -> LayerCalls:
        """The `layers` of the step that was begun, or of a half of it (0 or 1). Raises WrongState."""
        if half < len(self._layers):
            return self._layers[half]
        raise WrongState(
            "the step has no second half; begin it with begin_split_step()"
            if self._layers
            else f"store and attend need a running step, but {self._holder.state.value}; call begin_step() first"
        )

    def end_step(self) -> None:
        """Close the step, so that the next one may begin. Also the way back after an exception inside a step.

        The step's tokens count as stored if it has stored in every layer. Does nothing in a thread that has begun no
        step: that of another thread goes on.
        """
        if self._holder.is_mine:
            if self._publisher.launching is not None:
                self.repeatable = None  # its inputs may not be there
            self._stores.end()
            self._holder.state = IDLE
            self._plan, self._children, self._layers, self._rounds, self._who_runs = None, (), (), (), None
            self._holder.give_back()

    def abandon_step(self) -> None:
        """Close a step that was staged and is not run. A fault in its inputs is reported when they come again."""
        if self._holder.is_mine and self._holder.state is StepState.STAGED:
            with on_device(self.device):
                assert self._plan is not None
                self._publisher.disregard(self._plan.shape.num_halves)
        self.end_step()

    def require_idle(self) -> None:
        """Raise WrongState if a step is begun, here or in another thread."""
        self._holder.require_free("a step cannot begin")

    def seal(self) -> None:
        """Fix the addresses that graphs read, at the size of the largest capture. Growing them raises afterwards."""
        with self._holder.idle("addresses cannot be sealed"), on_device(self.device):
            if self.seal_number == 0:
                self._seal()

    def unseal(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Give up the sealed addresses and take other capture sizes. Every graph of the runtime is void afterwards.

        Raises BadSetting, WrongState, and DeviceFault as check_device(); nothing has changed then.
        """
        with self._holder.idle("addresses cannot be given up"), on_device(self.device):
            padding = self._padding_for(capture_sizes, capture_tokens)
            self.check_device()
            self._change(padding, self.core.memory.new_part())

    def give_up_seal(self) -> None:
        """As unseal, for the same capture sizes, and without asking the device: later steps report its faults."""
        with self._holder.idle("addresses cannot be given up"), on_device(self.device):
            self._change(self.padding, self.core.memory.new_part())

    def reseal(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """unseal, then seal; or neither.

        The new memory is taken before the old one is given up: where it does not fit, and where one of several ranks
        (agree) has no room, nothing has changed. An interrupt may leave the addresses unsealed.
        Raises BadSetting, WrongState, DeviceFault as check_device(), CapacityExceeded for another rank, and what the
        device raises when its memory is short.
        """
        with self._holder.idle("addresses cannot be sealed again"), on_device(self.device):
            padding = self._padding_for(capture_sizes, capture_tokens)
            try:
                self.check_device()
                part = self.core.memory.part_for(padding.largest_shapes())
            except BaseException as error:
                self.agree({"reopen": f"{type(error).__name__}: {error}"})
                raise
            found = self.agree({})
            if found:
                raise NeverFits(
                    f"capture sizes were not changed, because a rank could not: {found['reopen']}; "
                    "go on with those that there are, or choose smaller ones on all ranks"
                )
            self._change(padding, part)
            self._seal()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopied(
            "a runtime cannot be copied or pickled: it owns a device's memory, which graphs and requests refer to by "
            "address; build another one with the same arguments"
        )

    def _seal(self) -> None:
        self.core.seal(self.padding.largest_shapes())
        # One statement, and the last one: what is sealed halfway has no number.
        self._num_seals, self.seal_number = self._num_seals + 1, self._num_seals + 1

    def _change(self, padding: PaddingPolicy, part: StepPart) -> None:
        """Void every graph, and use another memory and policy from now on. Nothing here takes memory of the device.

        In this order an interrupt leaves no graph, and steps that are right: the memory grows until it is sealed.
        """
        wait_for_device(self.device)
        self._publisher.let_go()
        self.seal_number = 0
        self.core.memory.take(part)
        self._planner.start_over(padding)
        self._last_step = self._last_drafts = self.repeatable = None

    @property
    def stored_layers(self) -> int:
        """Bit i: the step that runs has stored in layer i, both halves if it is split; index keys after all layers."""
        return self._stores.layers

    @property
    def may_store(self) -> bool:
        """Whether the step that was staged begins after all tokens that its rows share."""
        return not self._stores.refusal

    def _find_faults(self) -> None:
        if self._publisher.launching is not None and self._holder.state is not StepState.IDLE:
            # Looking at the slot, whose graph comes, would take the step for one that was abandoned.
            raise WrongState("the device cannot be asked, because a step was staged; ask when its graph was launched")
        wait_for_device(self.device)
        self._publisher.find_faults()

    def _padding_for(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int]) -> PaddingPolicy:
        options = replace(self.options, capture_sizes=capture_sizes, capture_tokens=capture_tokens)
        return options.padding(self.kinds.problems)

    def _step_layers(self, views: DeviceStep, plan: StepPlan, who: object, half: int) -> StepLayers:
        require = partial(self._require_running, who)
        return StepLayers(self.core.layers, views, plan, require, self._stores, self._selections, half)

    def _require_turn(self, who: object, turns: Turns, number: int) -> None:
        """As _require_running, of a draft step. Raises WrongState also where its drafts have no parents."""
        self._require_running(who)
        turns.require(number)

    def _require_running(self, who: object) -> None:
        """The layers of this step, or of a half of it, may store and attend now. Raises WrongState."""
        if self._holder.state is not StepState.RUNNING:
            raise WrongState(
                f"store and attend need a running step, but {self._holder.state.value}; call begin_step() first"
            )
        if who is not self._who_runs:
            raise WrongState("the step of these layers is over; call the `layers` of the step that runs")
        self._streams.join()

"""StepGate: the one way into a step, and the one place that says what may touch its rows, pages and graphs.

    stage    host: check, pad, plan, grow buffers;  device: page copies, table updates, publish
    fill     device: derive metadata; captured where a step is
    layers   store and attend, or the replay of a graph that is all of the step
    end      host only

A step has one part for each half or draft step (Step.parts). Eager steps, graphs and steps that run again come through
here alike. A step remembers the number of the last change of its rows: whatever comes later and reads or writes
through it asks whether they have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from types import MethodType
from typing import Final, NamedTuple

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.halves import HALVES, split_batch
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import WrongState
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.devices import StreamOrder, is_current, on_device
from rocm_attn.paging.batch_checks import BatchGuards
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.stored_tokens import StepStores
from rocm_attn.step.core import StepCore
from rocm_attn.step.drafts import RoundTree
from rocm_attn.step.holder import IDLE, STAGED, StepHolder, StepState
from rocm_attn.step.layers import StepLayers
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import Planner
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.selections import Require, StepSelections
from rocm_attn.step.step import Part, Step


class Again(Enum):
    """The plan of the step that was staged last: it runs once more, on inputs that the device has written over its own.

    Only changes of the table are published, and no page is given back. The error word is kept, so the next publication
    reports the faults of all these runs. What they store counts once mark_stored() of the table says so.
    """

    AGAIN = "again"


AGAIN: Final = Again.AGAIN
AnyPlan = StepPlan | Again


class RanStep(NamedTuple):
    """A whole step that was staged, and may run again on inputs that the device has written over its own.

    views:  where its inputs are
    change: the table's last change when it was staged
    """

    batch: StepBatch
    plan: StepPlan
    views: DeviceStep
    change: int

    @property
    def inputs(self) -> StepTensors:
        """Its inputs in the full space.

        The device may write those of another step there, of the same rows and sizes, and with lengths for which the
        host has reserved pages.
        """
        return self.views.spaces[0]


class Effects(NamedTuple):
    """What a graph of steps does, as the host has seen when it was recorded.

    layers: bit i: it stores in layer i; see StepStores.layers
    moves:  whether it moves what it accepts
    """

    layers: int
    moves: bool


class StepGate:
    """The gate of one runtime.

    holder:  which thread has the step, and how far that has come
    planner: plans what is staged without a plan
    stores:  which layers the step has stored in
    """

    def __init__(
        self,
        core: StepCore,
        table: RequestTable,
        publisher: Publisher,
        planner: Planner,
        guards: BatchGuards,
        selection_of: Require,
    ) -> None:
        self.device = core.device
        self.holder = StepHolder()
        self.planner = planner
        self._core, self._table, self._publisher = core, table, publisher
        self._generations = table.generations
        self._tokens = table.tokens
        self._check_batch = MethodType(guards.check, table.checks)
        self._check_stored = MethodType(guards.stored, table.checks)
        self._changed, self._in_turn = MethodType(guards.changed, table.generations), guards.in_turn
        self._has_windows, self._evict_before = len(table.spaces) > 1, guards.evict
        selecting = core.layers.selecting
        self.stores = StepStores(len(core.layers) + len(selecting.indexed), table.tokens, self._check_stored)
        self._selections = StepSelections(selecting, selection_of)
        self._selects = bool(selecting.indexed)
        self._streams = StreamOrder(self.device)
        # The step that runs, or None; and the last one whose views later steps of its size share.
        self._step: Step | None = None
        self._children: tuple[DeviceStep, ...] = ()
        self._kept: Step | None = None
        self._kept_children: tuple[DeviceStep, ...] = ()
        # The step that was staged last, and what may still come of it.
        self._staged: tuple[StepBatch, StepPlan, tuple[DeviceStep, ...], int] | None = None
        self._ran: RanStep | None = None
        self._may_repeat = self._may_move = False
        # Whose layers may be called: the views of a step that graphs replay, or what stands for one step.
        self._who_runs: object = None

    def stage(self, batch: StepBatch, plan: AnyPlan | None = None, takers: Collection[StepPlan] = ()) -> Step:
        """Check a step, and publish its inputs.

        plan:   not given: the planner's for this batch, whole
        takers: plans whose graphs take the inputs where nothing publishes them, and are what is run then

        Raises BadBatch, CapacityExceeded, NeverFits, WrongState, and DeviceFault for an earlier step, once. No step is
        begun then.
        """
        self.holder.begin("a step cannot begin")
        try:
            if plan is AGAIN:
                return self._stage_again(batch)
            self._check_batch(batch)
            # A step that goes on from the last one has rows that were neither forked nor cut.
            refusal = "" if self._tokens.goes_on(batch) else self._checked(batch)
            plan = self.planner.plan(batch, None, 1) if plan is None else self.planner.admit(batch, plan)
            if is_current(self.device):
                return self._publish(batch, plan, refusal, takers)
            with on_device(self.device):
                return self._publish(batch, plan, refusal, takers)
        except BaseException:
            self.end()
            raise

    def _checked(self, batch: StepBatch) -> str:
        """Why a step of the batch may not store, or nothing. Raises BadBatch."""
        self._check_stored(batch, batch.kv_len - batch.q_len)
        return self._table.checks.why_no_store(batch)

    def _publish(self, batch: StepBatch, plan: StepPlan, refusal: str, takers: Collection[StepPlan]) -> Step:
        """Bring a checked step to where the device reads it. The gate's device is the current one."""
        batches = (batch,) if plan.num_halves == 1 else split_batch(batch, plan.shape.child.num_seqs)
        # From here on the step runs: a log, a signal handler or a finalizer begins no other one within it.
        self.holder.state = STAGED
        # Before pages leave the windows of the step that might run again.
        self._ran, self._may_repeat = None, False
        # A length that only the device knows may be shorter than its bound: such a step gives nothing back by itself.
        if self._has_windows and batch.inputs.kv_len_on_host:
            self._table.evict(batch.rows, self._evict_before(batch))
        self._streams.follow()
        children = self._core.memory.device_steps(plan)
        publisher = self._publisher
        publisher.apply_table_changes()
        if len(batches) == 1:
            publisher.publish_whole(batch, children[0], to_graph=plan in takers and not refusal)
        else:
            for half, part in enumerate(batches):
                publisher.publish(part, children[half * len(children) // HALVES], half)
        self._staged = batch, plan, children, self._generations.last_change
        # The device can run a whole step again, if that may store.
        self._may_repeat = not refusal and len(children) == 1 and batch.drafts is NO_DRAFTS
        return self._begun(batch, plan, batches, children, refusal)

    def _begun(
        self,
        batch: StepBatch,
        plan: StepPlan,
        batches: Sequence[StepBatch],
        children: tuple[DeviceStep, ...],
        refusal: str,
    ) -> Step:
        """The step whose inputs lie where the device reads them. batches: of its halves"""
        self._children, self._may_move = children, True
        steps = plan.draft_steps
        self.stores.begin(batch, len(children), refusal, steps if steps == 1 else min(steps, self._in_turn))
        if self._selects:
            self._selections.begin(len(children))
        if not plan.replayable or len(batches) > 1:  # a half does not outlive its step
            self._who_runs = object()
            self._step = self._new_step(batches, plan, children)
            return self._step
        # Steps of equal sizes that graphs replay are equal, and a server decodes many in a row.
        self._who_runs, kept = children[0], self._kept
        if kept is None or self._kept_children is not children or not kept.parts[0].is_for(batch):
            kept = self._kept = self._new_step(batches, plan, children)
            self._kept_children = children
        self._step = kept
        return kept

    def _new_step(self, batches: Sequence[StepBatch], plan: StepPlan, children: tuple[DeviceStep, ...]) -> Step:
        drafts, parts = plan.shape.drafts, list[Part]()
        for half, batch in enumerate(batches):
            views = children[half * drafts.steps : (half + 1) * drafts.steps]
            tree = RoundTree(drafts, views, self._core.place_draft_mask)
            for step, child in enumerate(views):
                number = half * drafts.steps + step
                is_draft = drafts is not NO_DRAFTS
                who = self._who_runs
                require = partial(self._require_turn, who, tree, step) if is_draft else partial(self._require, who)
                calls = StepLayers(self._core.layers, child, plan, require, self.stores, self._selections, number)
                parts.append(Part.of(batch, child, plan, calls, number, tree))
        num_first, num_first_tokens = children[0].tensors.counts[:2].unbind()
        return Step(tuple(parts), num_first, num_first_tokens, plan, self)

    def _stage_again(self, batch: StepBatch) -> Step:
        last = self._begin_again()
        if last.batch is not batch:
            raise WrongState("AGAIN was given with another batch than the step that was staged last; give that one")
        self._may_repeat = True
        return self._begun(batch, last.plan, (batch,), (last.views,), "")

    def replay_again(self, replay: Callable[[], object]) -> None:
        """Run the last step again by a graph that is all of it: stage() with AGAIN, the rest of the step, and its end.

        The graph stores what it has stored in the same step before. Raises WrongState.
        """
        self.holder.begin("a step cannot begin")
        try:
            self._begin_again()
            replay()
            self.end()
        except BaseException:
            self.end()  # an interrupt may have come in its place
            raise

    def _begin_again(self) -> RanStep:
        """The step that was staged last, which may run now. Raises WrongState where there is none."""
        last = self.last
        if last is None:
            raise WrongState("no whole step was staged last that could run again; stage one first")
        self._require_rows(last, "the step cannot run again")
        self.holder.state = STAGED
        with on_device(self.device):
            self._streams.follow()
            self._publisher.apply_table_changes()
        self._may_move = True
        return last

    @property
    def last(self) -> RanStep | None:
        """The step that AGAIN runs; None where none was staged last, or it may not store."""
        return self._ran_step() if self._may_repeat else None

    def _ran_step(self) -> RanStep | None:
        """The step that was staged last, as one value for as long as it is the last one."""
        ran, staged = self._ran, self._staged
        if staged is not None and (ran is None):
            batch, plan, children, change = staged
            ran = self._ran = RanStep(batch, plan, children[0], change)
        return ran

    @property
    def may_go_again(self) -> RanStep | None:
        """The step that AGAIN would run now; None where there is none, or one of its rows has changed."""
        last = self.last
        if last is None or self._changed(last.change, last.batch.rows):
            return None
        return last

    def resume(self, step: RanStep) -> None:
        """Have AGAIN run this step, after which only steps of its own round were staged. Raises WrongState."""
        self._require_rows(step, "the step cannot run again")
        self._staged = step.batch, step.plan, (step.views,), step.change
        self._ran, self._may_repeat = step, True

    def _require_rows(self, step: RanStep, refused: str) -> None:
        """Raise WrongState where a row of a step was freed, cut, forked or kept since that step was staged."""
        changed = self._changed(step.change, step.batch.rows)
        if changed:
            raise WrongState(
                f"{refused}: row {changed[0]} was freed, cut, forked or kept since it was staged; stage a step anew"
            )

    def before_move(self) -> None:
        """Ask whether the last verify step may move what was accepted, once. Raises WrongState, BadBatch."""
        step = self._ran_step()
        if step is None or not self._may_move:
            raise WrongState("no step has stored draft tokens to move, or they were moved already; move once a step")
        self._require_rows(step, "accepted tokens cannot be moved")
        self.stores.before_move()
        self._may_move = False
        with on_device(self.device):
            # After its step a move follows all of it, and the next step follows the move.
            (self._streams.follow if self.holder.state is StepState.IDLE else self._streams.join)()

    def take_inputs(self) -> None:
        """Record the head of a whole step's graph, which takes the inputs that stage() leaves to it."""
        with on_device(self.device):
            self._streams.join()
            self._publisher.take_inputs(self._children[0])

    @property
    def effects(self) -> Effects:
        """The effects of the step that runs, so far."""
        return Effects(self.stores.layers, not self._may_move)

    def before_replay(self, effects: Effects) -> None:
        """Ask whether a graph with these effects may run the staged step. Raises as store and attend do."""
        self.stores.before_replay(effects[0])

    def after_replay(self, effects: Effects) -> None:
        """The graph of the staged step was launched."""
        layers, moves = effects
        self.stores.after_replay(layers)
        self._may_move = not moves
        self._publisher.taken()

    def fill(self) -> None:
        """Derive the step's metadata on the device; captured where a step is. Running it twice is harmless."""
        step = self._step
        if step is None:
            raise WrongState("there is no step to fill; call runtime.stage() or runtime.step() first")
        with on_device(self.device):
            self._streams.join()
            self._core.fill(self._children, step.plan)
        if step.plan.shape.drafts is not NO_DRAFTS:
            for half in step.halves:
                half[0].tree.begin()
        self._may_move = True  # a capture runs its step several times
        self.holder.state = StepState.RUNNING

    def running(self, number: int) -> LayerCalls:
        """The layers of a part of the step that runs. number: Part.number. Raises WrongState."""
        step = self._step
        if step is not None and number < len(step.parts):
            return step.parts[number].layers
        raise WrongState(
            f"the step that runs has {len(step.parts)} parts, and there is no part {number}"
            if step is not None
            else f"store and attend need a running step, but {self.holder.state.value}; call runtime.step() first"
        )

    def running_batch(self) -> StepBatch:
        """The batch of the step that runs. Raises WrongState."""
        if self.holder.state is not StepState.RUNNING or self._staged is None:
            raise WrongState(f"this needs a running step, but {self.holder.state.value}; call runtime.step() first")
        return self._staged[0]

    def end(self) -> None:
        """Close the step; see AttentionRuntime.end_step."""
        if self.holder.is_mine:
            if self._publisher.launching is not None:
                self._may_repeat = False  # its inputs may not be there
            self.stores.end()
            self.holder.state = IDLE
            self._step, self._children, self._who_runs = None, (), None
            self.holder.give_back()

    def abandon(self) -> None:
        """Close a step that was staged and is not run. A fault in its inputs is reported when they come again."""
        step = self._step
        if self.holder.is_mine and self.holder.state is STAGED and step is not None:
            with on_device(self.device):
                self._publisher.disregard(step.plan.num_halves)
        self.end()

    def forget(self) -> None:
        """Keep nothing that refers to the memory of steps."""
        self._kept, self._kept_children, self._children = None, (), ()
        self._staged, self._ran, self._may_repeat = None, None, False

    @property
    def may_store(self) -> bool:
        """Whether the step that was staged begins after all tokens that its rows share."""
        return not self.stores.refusal

    def _require_turn(self, who: object, tree: RoundTree, step: int) -> None:
        """_require() of a draft step. Raises WrongState also where its drafts have no parents."""
        self._require(who)
        tree.require(step)

    def _require(self, who: object) -> None:
        """Raise WrongState unless the layers of this step may store and attend now."""
        if self.holder.state is not StepState.RUNNING:
            raise WrongState(
                f"store and attend need a running step, but {self.holder.state.value}; call runtime.step() first"
            )
        if who is not self._who_runs:
            raise WrongState("the step of these layers is over; call the layers of the step that runs")
        self._streams.join()

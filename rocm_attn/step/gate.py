"""StepGate: begins and ends every step, and is the one place that allows access to a step's rows, pages and graphs.

    stage    host: check, pad, plan, grow buffers;  device: page copies, block table updates, publication of the inputs
    fill     device: compute metadata; part of the graph in a captured step
    layers   store and attend, or the replay of a graph that contains the whole step
    end      host only

Eager steps, replayed graphs and repeated steps all go through here. A step remembers the table's change count when it
was staged; every later read or write through the step checks that its rows have not changed since.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any, Final, NamedTuple, NewType

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.halves import HALVES, split_batch
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.padding import PaddingPolicy
from rocm_attn.batch.step_batch import Int32Array, Integers, StepBatch, as_int32, has_repeats
from rocm_attn.errors import BadBatch, WrongState
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.kernels.launch import observers
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.devices import StreamOrder, is_current, on_device
from rocm_attn.paging.batch_checks import BatchGuards
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.stored_tokens import StepStores
from rocm_attn.step.core import StepCore
from rocm_attn.step.layers import StepLayers
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import Planner
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.selections import StepSelections
from rocm_attn.step.state_layers import StepStates
from rocm_attn.step.step import VIEWS_OF_PART, Part, RoundTree, Series, Step


class Again(Enum):
    """A plan that runs the last staged step once more, on inputs that the device has written in place of the old ones.

    Only changes of the block table are published, and no page is freed. The error word is kept, so the next published
    step reports the faults of all these runs. Tokens that they store count as stored after the table's mark_stored().
    """

    AGAIN = "again"


AGAIN: Final = Again.AGAIN
AnyPlan = StepPlan | Again
Children = tuple[DeviceStep, ...]  # the memory of a step's inputs, for each half or draft step


class RanStep(NamedTuple):
    """The step that was staged last.

    change:   the table's last change when it was staged
    repeats:  True if it may run again: it is a whole step that may store
    """

    batch: StepBatch
    plan: StepPlan
    children: Children
    change: int
    repeats: bool

    @property
    def inputs(self) -> StepTensors:
        """The step's input tensors in the full space.

        The device may write the inputs of the next step there, if that has the same rows and sizes, and lengths for
        which the host has reserved pages.
        """
        return self.children[0].spaces[0]


_NOTHING_KEPT = (), 0, 0, None
# The fields of a RanStep, which is built on request; in place of the last one, the reason why it may not store.
_Staged = tuple[StepBatch, StepPlan, Children, int, str]


class Effects(NamedTuple):
    """The changes that a captured graph makes to the host's bookkeeping, noted when it was recorded.

    layers: bit i is set if it stores in layer i; see StepStores.layers
    moves:  True if it moves K and V of accepted drafts
    """

    layers: int
    moves: bool


# The progress of a step, in the words of errors that refuse a call meanwhile.
StepState = NewType("StepState", str)
IDLE = StepState("no step was begun")
STAGED = StepState("a step was staged and its metadata is not filled yet")
RUNNING = StepState("a step is running")
RECORDED = StepState("a step is recorded on a CPU, thread by thread")
_STEP = "step"


class StepHolder:
    """Which thread has begun a step, if any; other threads are refused. state: of that step"""

    __slots__ = ("_taking_over", "_thread_of", "state")

    def __init__(self) -> None:
        self.state = IDLE
        self._thread_of: dict[str, int] = {}
        self._taking_over = threading.Lock()

    @property
    def is_mine(self) -> bool:
        """True if the current thread has the step."""
        return self._thread_of.get(_STEP) == get_ident()

    def begin(self, what_fails: str) -> None:
        """Makes the current thread the owner. Raises WrongState if another thread is, or this one has begun a step.

        Repeating it is harmless, so an interrupt right after it leaves nothing to clean up. A thread that has ended
        owns no step.
        """
        me = get_ident()
        # setdefault reads and writes atomically, whatever other threads do.
        if self._thread_of.setdefault(_STEP, me) != me and not self._take_over(me):
            raise WrongState(
                f"{what_fails}, because another thread has begun a step and not ended it; "
                "a runtime is used by one thread at a time"
            )
        if self.state is not IDLE:
            raise WrongState(f"{what_fails}, because {self.state}; call end_step() first")

    def require_free(self, what_fails: str) -> None:
        """Raises WrongState if a thread has begun a step, this one or another."""
        if self._thread_of:
            self.begin(what_fails)
            self.give_back()

    @contextmanager
    def idle(self, what_fails: str) -> Iterator[None]:
        """Returns a context in which no step may begin and none runs. Raises WrongState."""
        self.begin(what_fails)
        try:
            yield
        finally:
            self.give_back()

    def alone(self, what_fails: str) -> AbstractContextManager[None]:
        """Returns a context in which only the current thread may use the step, begun or not. Raises WrongState."""
        return nullcontext() if self.is_mine else self.idle(what_fails)

    def give_back(self) -> None:
        """Gives up the current thread's ownership, after its step has ended."""
        self.state = IDLE
        self._thread_of.clear()

    def _take_over(self, me: int) -> bool:
        with self._taking_over:
            holder = self._thread_of.get(_STEP)
            if holder is not None and any(thread.ident == holder for thread in threading.enumerate()):
                return False
            self._thread_of.pop(_STEP, None)
            return self._thread_of.setdefault(_STEP, me) == me


class StepGate:
    """The gate of one runtime.

    holder:  the thread that has the step, and the step's progress
    planner: plans steps that are staged without a plan
    stores:  the layers that the step has stored in
    """

    def __init__(
        self, core: StepCore, table: RequestTable, publisher: Publisher, planner: Planner, guards: BatchGuards
    ) -> None:
        self.device, self.planner, self.holder = core.device, planner, StepHolder()
        self._core, self._table, self._publisher = core, table, publisher
        self._generations, self._tokens = table.generations, table.tokens
        self._check_batch = MethodType(guards.check, table.checks)
        self._check_stored = MethodType(guards.stored, table.checks)
        self._changed, self._in_turn = MethodType(guards.changed, table.checks), guards.in_turn
        self._has_windows, self._evict_before = len(table.spaces) > 1, guards.evict
        self._has_states = not table.states.is_empty
        selecting = core.layers.selecting
        self.stores = StepStores(core.layers.sides, table.tokens, self._check_stored)
        self._selections = StepSelections(selecting, core.guards.layers.selection_of)
        self._selects = bool(selecting.indexed)
        self._streams = StreamOrder(self.device)
        # The step that runs, and the last step that graphs replay, with its memory, sequences and tokens: later steps
        # of these sizes in the same memory are equal to it.
        self._step: Step | None = None
        self._kept: tuple[Children, int, int, Step | None] = _NOTHING_KEPT
        self._staged: _Staged | RanStep | None = None
        self._may_move = self._moves_on = False

    def stage(self, batch: StepBatch, plan: AnyPlan | None = None, input_plans: Collection[StepPlan] = ()) -> Step:
        """Checks a step and publishes its inputs; see AttentionRuntime.step.

        input_plans: plans whose graphs take the inputs if nothing publishes them; these graphs run the step then
        """
        self.holder.begin("a step cannot begin")
        try:
            if plan is AGAIN:
                last = self._begin_again()
                if last.batch is not batch:
                    raise WrongState("AGAIN was given with another batch than the last staged step; give that batch")
                self._lose_track(last)
                self.stores.begin(batch, 1, "", 1)
                return self._begun(batch, (batch,), last.plan, last.children)
            self._check_batch(batch)
            refusal = ""
            if batch.before != self._tokens.last:  # else its rows were neither forked nor cut since the last step
                self._check_stored(batch, batch.start)
                refusal = self._table.checks.why_no_store(batch)
                # Such a step may attend, but fill would give it the states that its rows go on from.
                if refusal and self._has_states:
                    raise BadBatch(refusal)
            plan = self.planner.plan(batch) if plan is None else self.planner.admit(batch, plan)
            if is_current(self.device):
                return self._publish(batch, plan, refusal, input_plans)
            with on_device(self.device):
                return self._publish(batch, plan, refusal, input_plans)
        except BaseException:
            self.end()
            raise

    def _publish(self, batch: StepBatch, plan: StepPlan, refusal: str, input_plans: Collection[StepPlan]) -> Step:
        """Brings a checked step to the memory that the device reads. The gate's device is the current one."""
        # From here on the step runs, so that a log, a signal handler or a finalizer cannot begin another one within it.
        self.holder.state = STAGED
        # Reset before pages leave the windows of the step that might run again.
        self._staged, self._moves_on = None, False
        # A length that only the device knows may be shorter than its bound, so such a step gives no pages back.
        if self._has_windows and batch.inputs.kv_len_on_host:
            self._table.evict(batch.rows, self._evict_before(batch))
        self._streams.follow()
        children, publisher = self._core.memory.device_steps(plan), self._publisher
        publisher.apply_table_changes()
        batches: Sequence[StepBatch] = (batch,)
        if plan.num_halves == 1:
            if publisher.steps_to_answer:
                publisher.hear_of_the_second_half()
            publisher.publish(batch, children[0], 0, to_graph=plan in input_plans and not refusal)
        else:
            batches = split_batch(batch, plan.shape.child.num_seqs)
            for half, part in enumerate(batches):
                publisher.publish(part, children[half * len(children) // HALVES], half)
        if self._has_states:  # an earlier step's fault may have been raised instead
            self._table.states.note(batch)
        self._staged = batch, plan, children, self._generations.last_change, refusal
        steps = plan.draft_steps
        self.stores.begin(batch, len(children), refusal, steps if steps == 1 else min(steps, self._in_turn))
        return self._begun(batch, batches, plan, children)

    def _begun(self, batch: StepBatch, batches: Sequence[StepBatch], plan: StepPlan, children: Children) -> Step:
        """Returns the step whose inputs are published. batches: of its halves"""
        if self._selects:
            self._selections.begin(len(children))
        self._may_move = True
        # A server decodes many steps of equal sizes in a row.
        memory, num_seqs, num_fed, step = self._kept
        if step is None or memory is not children or num_seqs != batch.num_seqs or num_fed != batch.num_fed:
            make_parts = partial(self._parts, plan, [(each.num_seqs, each.num_fed) for each in batches])
            # A tuple of its own, by which the step's layers know whether it still runs.
            step = Step(plan, (*children,), self.fill, self.end, make_parts)
            if plan.replayable and plan.num_halves == 1:
                self._kept = children, batch.num_seqs, batch.num_fed, step
        self._step = step
        return step

    def _parts(self, plan: StepPlan, sizes: Sequence[tuple[int, int]], children: Children) -> Series:
        """The parts of a step. sizes: sequences of each half, and tokens that its forward is given at a time"""
        drafts, parts = plan.shape.drafts, list[Part]()
        for half, of_half in enumerate(sizes):
            views = children[half * drafts.steps : (half + 1) * drafts.steps]
            tree = RoundTree(drafts, views, partial(self._core.place_draft_mask, plan))
            for step, child in enumerate(views):
                number = half * drafts.steps + step
                require: Callable[[], None] = partial(self._require, children)
                if drafts is not NO_DRAFTS:
                    require = partial(tree.require, require, step)
                states = StepStates(self._core.states, child, require, self.stores, number)
                calls = StepLayers(self._core.layers, child, plan, require, self.stores, self._selections, number)
                views_of_part: dict[str, Any] = {name: getattr(child.tensors, name) for name in VIEWS_OF_PART}
                parts.append(
                    Part(*of_half, layers=calls, states=states, plan=plan, number=number, tree=tree, **views_of_part)
                )
        return tuple(parts)

    def replay_again(self, replay: Callable[[], object]) -> None:
        """Runs the last step again by a graph that contains all of it: does stage() with AGAIN, the replay, and end().

        The graph stores the same tokens as the step did before. Raises WrongState.
        """
        self.holder.begin("a step cannot begin")
        try:
            self._lose_track(self._begin_again())
            replay()
            self._close()
        except BaseException:
            self.end()  # an interrupt may have prevented the call above
            raise

    def _lose_track(self, last: RanStep) -> None:
        """Notes that only the device knows the states of a step's rows: it may have written lengths of its own."""
        if self._has_states:
            self._table.states.lose_track(last.batch.rows)

    def _begin_again(self) -> RanStep:
        """Returns the step that was staged last, if it may run now. Raises WrongState."""
        last = self.last
        if last is None:
            raise WrongState("no whole step that can run again was staged last; stage one first")
        self._require_rows(last, "the step cannot run again", last.batch.rows)
        self.holder.state = STAGED
        with on_device(self.device):
            self._streams.follow()
            self._publisher.apply_table_changes()
        self._may_move = True
        return last

    @property
    def last(self) -> RanStep | None:
        """The step that AGAIN would run; None if there is none, or it may not store."""
        staged = self._staged
        ran = staged if type(staged) is RanStep else self._ran()
        return ran if ran is not None and ran.repeats else None

    def _ran(self) -> RanStep | None:
        """The step that was staged last, as one object for as long as it is the last one."""
        staged = self._staged
        if staged is None or type(staged) is RanStep:
            return staged
        batch, plan, children, change, refusal = staged
        repeats = not refusal and len(children) == 1 and batch.drafts is NO_DRAFTS
        self._staged = ran = RanStep(batch, plan, children, change, repeats)
        return ran

    @property
    def may_go_again(self) -> RanStep | None:
        """Like last(), but also None if one of its rows has changed since."""
        last = self.last
        return None if last is None or self._changed_rows(last, 0) else last

    def move_on(self) -> None:
        """Declares that each AGAIN stores later tokens; the caller makes sure that no other row shares them."""
        self._moves_on = True

    def _changed_rows(self, step: RanStep, staying: int) -> list[int]:
        """The rows of a step that were freed, cut, forked or kept since it was staged; see BatchGuards.changed."""
        now = self._generations.last_change
        if step.change == now:
            return []
        # A step that moves on writes none of the tokens that the host knows.
        staying = step.batch.max_q_len if self._moves_on else staying
        changed: list[int] = self._changed(step.change, step.batch, staying)
        # Rounds of drafts call this often. If nothing has changed for the strictest `staying` that can come, later
        # calls look at later changes alone.
        if not changed and step is self._staged and (self._moves_on or not staying):
            self._staged = step._replace(change=now)
        return changed

    def _require_rows(self, step: RanStep, refused: str, rows: Int32Array, *, staying: int = 0) -> None:
        """Raises WrongState if one of these rows of a step was freed, cut, forked or kept since that step was staged.

        staying: new tokens of a sequence that are not written
        """
        for row in self._changed_rows(step, staying):
            if row in rows:
                raise WrongState(
                    f"{refused}: row {row} was freed, cut, forked or kept since it was staged; stage a new step"
                )

    def before_paths(self, num_paths: int, seqs: Integers | None) -> Tensor:
        """Checks that the last verify step may move these accepted drafts, once.

        Returns their rows, int32 [num_paths] on the device. seqs: see AttentionRuntime.move_accepted
        Raises WrongState, BadBatch.
        """
        step = self._ran()
        if step is None or not self._may_move or step.batch.mask is NO_MASK:
            raise WrongState(
                "the last step has stored no trees of drafts, or they were moved already; move once per step"
            )
        batch, with_pads = step.batch, step.inputs.row_of_seq
        if seqs is None and len(step.children) == 1 and num_paths == len(with_pads):
            self._allow_move(step, batch.rows)
            return with_pads
        places = np.arange(batch.num_seqs) if seqs is None else as_int32("seqs", seqs)
        if len(places) != num_paths:
            raise BadBatch(f"{num_paths} accepted paths for {len(places)} sequences; give one each")
        if has_repeats(places) or (num_paths and not 0 <= places.min() <= places.max() < batch.num_seqs):
            raise BadBatch(
                f"seqs is {places}; it must name sequences of the step, 0 to {batch.num_seqs - 1}, each once"
            )
        rows = batch.rows[places]
        self._allow_move(step, rows)
        return torch.from_numpy(rows).to(self.device)

    def _allow_move(self, step: RanStep, rows: Int32Array) -> None:
        # The first node of a tree is accepted in place.
        self._require_rows(step, "accepted tokens cannot be moved", rows, staying=1)
        self.stores.before_move()
        self._may_move = False
        with on_device(self.device):
            # After its step a move follows all of it, and the next step follows the move.
            (self._streams.follow if self.holder.state is IDLE else self._streams.join)()

    def take_inputs(self, step: Step) -> None:
        """Records the beginning of a whole step's graph, which reads the inputs that stage() has left to the graph."""
        with on_device(self.device):
            self._streams.join()
            self._publisher.take_inputs(step.children[0])

    @property
    def effects(self) -> Effects:
        """The effects of the step that runs, so far."""
        return Effects(self.stores.layers, not self._may_move)

    def replay(self, replay: Callable[[], object], effects: Effects) -> None:
        """Launches the graph of the staged step, and ends the step. Raises what its layers would."""
        layers, moves = effects
        self.stores.replay(replay, layers)
        self._may_move = not moves
        self._publisher.taken()
        self._step = None
        self.holder.give_back()

    def fill(self) -> None:
        """Derives the step's metadata on the device; captured with the step. Running it twice is harmless."""
        step = self._step
        if step is None:
            raise WrongState("there is no step to fill; call runtime.stage() or runtime.step() first")
        self.stores.note_fill()
        with on_device(self.device):
            self._streams.join()
            self._core.fill(step.children, step.plan)
        if step.plan.shape.drafts is not NO_DRAFTS:
            for part in step.parts:
                part.tree.begin()
        self._may_move = True  # a capture runs its step several times
        self.holder.state = RECORDED if get_ident() in observers else RUNNING

    def running(self, number: int) -> LayerCalls:
        """The layers of a part of the running step. number: Part.number. Raises WrongState."""
        step = self._step
        if step is None:
            raise self._not_running("store and attend need")
        if number >= len(step.parts):
            raise WrongState(f"the running step has {len(step.parts)} parts, and there is no part {number}")
        return step.parts[number].layers

    def running_batch(self) -> StepBatch:
        """The batch of the step that runs. Raises WrongState."""
        if self.holder.state not in (RUNNING, RECORDED) or self._staged is None:
            raise self._not_running("this needs")
        return self._staged[0]

    def stored_now(self, row: int, layers: Collection[int]) -> int:
        """Tokens of a row once the running step has ended, if it has stored in all of these layers; else 0."""
        step, staged = self._step, self._staged
        if step is None or staged is None:
            return 0
        sides = [side for layer in layers for side in self._core.layers.sides.of_layer(layer)]
        done, batch = self.stores.layers, staged[0]
        return max(batch.kv_len[batch.rows == row], default=0) if all(done >> side & 1 for side in sides) else 0

    def _not_running(self, what: str) -> WrongState:
        return WrongState(f"{what} a running step, but {self.holder.state}; call runtime.step() first")

    def end(self) -> None:
        """Closes the step; see AttentionRuntime.end_step."""
        if self.holder.is_mine:
            self._close()

    def _close(self) -> None:
        if self._publisher.launching is not None:
            self._staged = None  # its inputs may not have been published
        self.stores.end()
        self._step = None
        self.holder.give_back()

    def abandon(self) -> None:
        """Closes a step that was staged and will not run. A fault in its inputs is reported by the next such step."""
        step = self._step
        if self.holder.is_mine and self.holder.state is STAGED and step is not None:
            with on_device(self.device):
                self._publisher.disregard(step.plan.num_halves)
        self.end()

    def start_over(self, padding: PaddingPolicy) -> None:
        """Drops all references to the memory of steps, and uses another padding policy from now on."""
        self.planner.start_over(padding)
        self._kept, self._staged = _NOTHING_KEPT, None

    def _require(self, children: object) -> None:
        """Raises WrongState unless the layers of the step with these children may store and attend now."""
        if self.holder.state is not RUNNING:
            self._require_recorded()
        if self._step is None or children is not self._step.children:
            raise WrongState("the step of these layers has ended; call the layers of the running step")
        self._streams.join()

    def _require_recorded(self) -> None:
        """Raises WrongState unless the step is recorded, and RecordingRefused in another thread than its own."""
        if self.holder.state is not RECORDED:
            raise self._not_running("store and attend need")
        if observers and not self.holder.is_mine:
            raise RecordingRefused(
                "a layer was called from another thread than the one that records the step, so replays would lack it; "
                "on a CPU call layers from the thread that forward runs in, or build the StepRunner without a recorder"
            )

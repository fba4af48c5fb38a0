"""StepsAtOnce: a whole step that a graph is all of, staged, launched and ended in one call.

Most steps of a server are such: the rows of the step before with their next tokens, and a graph that takes its inputs.
What is asked and done here is what AttentionRuntime.stage(), begin_replay(), end_replay() and end_step() ask and do of
it, by the same parts in the same order. No layer of it is called, so nothing is handed out and taken back for them. Any
other step is left to those, before anything was done for it: they also say what is wrong with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.machine.devices import StreamOrder, is_current
from rocm_attn.paging.stored_tokens import StepStores, StoredTokens
from rocm_attn.step.holder import StepHolder
from rocm_attn.step.memory import StepMemory
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import Planner
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.repeatable import Repeatable


class OneGraph(Protocol):
    """A graph that is all of a step.

    stored_layers: as AttentionRuntime.stored_layers, of each step that it runs
    """

    stored_layers: int

    def launch(self, batch: StepBatch) -> None:
        """Launch it, for a step whose inputs are there."""
        ...


_Graph = TypeVar("_Graph", bound=OneGraph)


class Owner(Protocol):
    """The runtime."""

    repeatable: Repeatable | None

    def end_step(self) -> None:
        """As AttentionRuntime.end_step."""
        ...


@dataclass(frozen=True, slots=True)
class StepsAtOnce:
    """The parts of a runtime that have to do with such a step.

    check: as of BatchGuards
    evict: likewise; None where no pages leave a window
    """

    device: torch.device
    holder: StepHolder
    check: Callable[[StepBatch], None]
    evict: Callable[[StepBatch], None] | None
    tokens: StoredTokens
    stores: StepStores
    planner: Planner
    memory: StepMemory
    publisher: Publisher
    streams: StreamOrder

    def run(self, owner: Owner, batch: StepBatch, graphs: Mapping[StepPlan, _Graph]) -> tuple[StepPlan, _Graph] | None:
        """Run a step of a batch without drafts by its graph. None: nothing was done, and another call has to run it.

        graphs: by the plan of their steps; they take inputs where nothing else publishes them
        Raises as stage() and begin_replay() of the runtime, and what launches a graph raises. The step is ended then,
        unless it is WrongState: that is another one, which goes on.
        """
        holder = self.holder
        holder.begin("a step cannot begin")
        try:
            self.check(batch)
            # What goes on may store: none of its rows was forked or cut.
            plan = self.planner.plan(batch, None, 1) if self.tokens.goes_on(batch) else None
            graph = graphs.get(plan) if plan is not None and is_current(self.device) else None
            if plan is None or graph is None:
                holder.give_back()
                return None
            if self.evict is not None:
                self.evict(batch)
            self.streams.follow()
            owner.repeatable = None
            (child,) = self.memory.device_steps(plan)
            publisher, stores, layers = self.publisher, self.stores, graph.stored_layers
            publisher.apply_table_changes()
            publisher.publish_whole(batch, child, to_graph=True)
            owner.repeatable = batch, plan, child
            stores.begin(batch, 1, "")
            stores.before_replay(layers)
            graph.launch(batch)
            stores.after_replay(layers)
            publisher.taken()
            stores.end()
            holder.give_back()  # its state was idle all the time, and nothing of it is the owner's
            return plan, graph
        except BaseException:
            owner.end_step()
            raise

"""StepsAtOnce: whole steps from their plan to where the device reads them; of most steps, from their batch on.

Most steps of a server have the rows of the step before with their next tokens, and a graph that takes its inputs is all
of them. Those are checked, planned and published in one call. No layer of them is called, so nothing is handed out for
them. Any other step is left to AttentionRuntime.stage(), before anything was done for it: that also says what is wrong
with one. Both publish by publish(), and so in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.machine.devices import StreamOrder, is_current
from rocm_attn.paging.stored_tokens import StepStores, StoredTokens
from rocm_attn.step.holder import STAGED, StepHolder
from rocm_attn.step.memory import DeviceStep, StepMemory
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import Planner
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.repeatable import Repeatable


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

    def stage(self, owner: Owner, batch: StepBatch, takers: Collection[StepPlan]) -> StepPlan | None:
        """Stage a step of a batch without drafts for its graph, which is all of it. None: nothing was done.

        takers: plans whose graphs take the inputs where nothing publishes them
        What follows is begin_replay(), the graph's launch, end_replay() and end_step() of the runtime.
        Raises as its stage(); no step is begun then.
        """
        self.holder.begin("a step cannot begin")
        try:
            self.check(batch)
            # What goes on may store: none of its rows was forked or cut.
            plan = self.planner.plan(batch, None, 1) if self.tokens.goes_on(batch) else None
            if plan is None or plan not in takers or not is_current(self.device):
                self.holder.give_back()
                return None
            self.publish(owner, batch, plan, "", to_graph=True)
            return plan
        except BaseException:
            owner.end_step()
            raise

    def publish(self, owner: Owner, batch: StepBatch, plan: StepPlan, refusal: str, *, to_graph: bool) -> DeviceStep:
        """Publish a checked step, and begin what it stores. The runtime's device is the current one.

        refusal:  why the step may not store, or nothing
        to_graph: whether a graph comes that takes the inputs if nothing publishes them
        """
        # From here on the step runs: a log, a signal handler or a finalizer begins no other one within it.
        self.holder.state = STAGED
        # Before pages leave the windows of the step that might run again.
        owner.repeatable = None
        if self.evict is not None:
            self.evict(batch)
        self.streams.follow()
        (child,) = self.memory.device_steps(plan)
        self.publisher.apply_table_changes()
        self.publisher.publish_whole(batch, child, to_graph=to_graph)
        # What may not store does not go on without the host. Pages that leave a window meanwhile stay with their rows.
        owner.repeatable = (batch, plan, child) if not refusal else None
        self.stores.begin(batch, 1, refusal)
        return child

"""StepCore: what every step needs, whether a runtime or an engine owns the pages and tables.

AttentionRuntime is one user of it, with a pool and a request table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.kernels.cache.pool_slots import write_pool_slots
from rocm_attn.kernels.launch import does_only_launch
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.devices import on_device
from rocm_attn.machine.target import Target
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.storage import Pool, Table
from rocm_attn.providers.select import Selection, ops_for
from rocm_attn.step.accepting import AcceptedMoves
from rocm_attn.step.buffers import name_in
from rocm_attn.step.guards import StepGuards
from rocm_attn.step.head_weights import LayerHeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.layers import Layers
from rocm_attn.step.memory import DeviceStep, StepMemory, pools_of
from rocm_attn.step.plan import StepPlan, make_plan
from rocm_attn.step.planner import Planner
from rocm_attn.step.prepared import works_by_launches


class StepCore:
    """Kernels, launches, memory and layers for the steps of a model.

    kinds: the layers, with the kernels that were chosen for them
    table: the rows that sequences read, in every space that a kind of layer lives in
    pool:  the pages of every layer
    mask_keys: as StepMemory's
    """

    def __init__(
        self, kinds: LayerKinds, table: Table, pool: Pool, guards: StepGuards, *, mask_keys: int = ALL_KEYS
    ) -> None:
        self.device = pool.device
        self.kinds = kinds = kinds.of_kernels(guards.launches.selection)
        self.head_weights = LayerHeadWeights(kinds.problems, self.device, guards.layers.new_head_weights)
        self.ops = guards.launches.ops(ops_for(kinds.selections, self.device))
        self.layers = Layers(kinds, pool, self.head_weights, self.ops, guards.layers)
        self.memory = StepMemory(kinds, table, self.device, guards.memory, mask_keys=mask_keys)
        self.moves = AcceptedMoves(kinds, table, pool, self.ops)
        self._pools = pools_of(kinds)
        self._table = table
        self._pool = pool
        self._guards = guards

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The kernels, per kind of layer."""
        return self.kinds.selections

    @property
    def target(self) -> Target:
        """The hardware that the kernels were chosen for."""
        return self.selections[0].target

    @property
    def max_kv_len(self) -> int:
        """Tokens that a row of the table has room for."""
        return self._table.width * self._table.page_size

    def new_planner(self, padding: PaddingPolicy) -> Planner:
        """Plans steps of StepBatches that are padded by a policy."""
        return Planner(
            self.selections,
            padding,
            self.device,
            max_kv_len=self.max_kv_len,
            sealed_tensors=self.memory.sealed_tensors,
            guards=self._guards.planning,
        )

    def plan(self, shape: PaddedShape, *, max_q_len: int, max_kv_len: int, may_capture: bool) -> StepPlan:
        """A plan of steps that are padded already; a new one each time. See make_plan."""
        kernels = [selection.kernel(shape.kind) for selection in self.selections]
        return make_plan(shape, kernels, max_q_len=max_q_len, max_kv_len=max_kv_len, may_capture=may_capture)

    def fill(self, children: Sequence[DeviceStep], plan: StepPlan) -> None:
        """Derive the metadata of a step's children on the device; captured where a step is.

        Running it twice is harmless.
        """
        with on_device(self.device):
            if isinstance(plan.shape.drafts, Drafts):
                self._derive_drafts(children, plan.shape.drafts)
            for step in children:
                if not self.layers.fill_again(step):
                    with self.layers.noting_fill(step, partial(self._fills_by_launches, plan)):
                        self._derive(step, plan)

    def _derive_drafts(self, children: Sequence[DeviceStep], drafts: Drafts) -> None:
        """What the steps of a round of drafts start from, in each half of it."""
        for first in range(0, len(children), drafts.steps):
            half = children[first : first + drafts.steps]
            self.ops.draft_steps([step.tensors for step in half], half[0].parents, drafts.branches)
            if drafts.branches > 1:
                self.place_draft_mask(drafts.branches, 0, half[0])

    def place_draft_mask(self, branches: int, number: int, step: DeviceStep) -> None:
        """Derive the mask of a draft step from the parents of all drafts up to it. branches: of the round"""
        with on_device(self.device):
            for tensors, window_left in step.windows:
                self.ops.place_trees(step.parents, number * branches, branches, window_left, tensors)

    def _fills_by_launches(self, plan: StepPlan) -> bool:
        """Whether all that derives the metadata of steps of a plan is launches."""
        schedules = all(works_by_launches(kernel.bound.schedule, "build", plan.shape.child) for kernel in plan.kernels)
        return schedules and does_only_launch(self.ops.fill) and all(tokens == 1 for _, tokens in self._pools)

    def _derive(self, step: DeviceStep, plan: StepPlan) -> None:
        """Launch all that derives the metadata of a step of a plan."""
        for tensors, table in zip(step.spaces, self._table.spaces, strict=True):
            self.ops.fill(tensors, page_size=self._pool.page_size, window_left=table.window_left)
        for (space, tokens), slots in dict(zip(self._pools, step.index_slots, strict=True)).items():
            if tokens > 1:
                self._fill_pool_slots(step, space, tokens, slots)
        for kind in sorted(set(plan.schedule_of_kind)):
            tensors, schedule = step.of_kind[kind], plan.kernels[kind].bound.schedule
            schedule.build(step.queries, tensors, plan.bounds, step.schedules[kind])

    def _fill_pool_slots(self, step: DeviceStep, space: Space, key_tokens: int, slots: Tensor) -> None:
        tensors = step.of_kind[self.kinds.spaces.index(space)]
        write_pool_slots(
            tensors.slot_of_token,
            tensors.position_of_token,
            slots,
            key_tokens=key_tokens,
            null_page=tensors.terms.null_page,
        )

    def seal(self, shapes: Sequence[PaddedShape]) -> None:
        """Fix the addresses that graphs read, with room for steps of all these shapes and smaller ones."""
        self.memory.seal(shapes)

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Everything that a graph reads, by name: the memory of steps, tables, pages and head weights."""
        pages = {
            f"{name}_{layer}": tensor
            for layer in range(len(self.layers))
            for name, tensor in self._pool.layer(layer).tensors().items()
        }
        for layer in self.kinds.selecting.indexed:
            pages[f"index_pages_{layer}"] = self._pool.index(layer).k
        tables = {name_in(table.space, "table"): table.entries for table in self._table.spaces}
        return {**self.memory.sealed_tensors(), **tables, **pages, **self.head_weights.tensors()}

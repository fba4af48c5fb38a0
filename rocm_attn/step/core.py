"""StepCore: the layers, memory and launches of steps, shared by AttentionRuntime and ExternalAttention.

StepGuards are its safeguards (guards/registry.py).
"""

from __future__ import annotations  # LaunchGuards.ops() reads types as texts

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TypeVar

from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.kernels.cache.pool_slots import write_last_rows, write_pool_slots
from rocm_attn.kernels.launch import does_only_launch
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.state_pool import StatePool
from rocm_attn.paging.storage import PagePool, RowTable
from rocm_attn.providers.contract import RangedSchedule
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.select import Selection, ops_for
from rocm_attn.step.accepting import AcceptedMoves
from rocm_attn.step.buffers import MemoryGuards, name_in
from rocm_attn.step.head_weights import LayerHeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.layers import LayerGuards, Layers
from rocm_attn.step.memory import DeviceStep, StepMemory, pools_of
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import PlanningGuards
from rocm_attn.step.state_layers import StateLayers

_T = TypeVar("_T")
OpsChange = Callable[[StepOps], StepOps]
SelectionChange = Callable[[Selection], Selection]


def unchanged(provided: _T) -> _T:
    """Returns its argument: the provider's launches and kernels guard by themselves."""
    return provided


@dataclass(frozen=True, slots=True)
class LaunchGuards:
    """The safeguards of the launches around attention, applied in this order, then those of the kernels."""

    pads: OpsChange = unchanged
    store_drops: OpsChange = unchanged
    finite_kv: OpsChange = unchanged
    row_zero: OpsChange = unchanged
    table_first: OpsChange = unchanged
    table_tails: OpsChange = unchanged
    slot_in_row: OpsChange = unchanged
    draft_lengths: OpsChange = unchanged
    path_pages: OpsChange = unchanged
    full_refresh: OpsChange = unchanged
    state_lineage: OpsChange = unchanged
    length_bounds: OpsChange = unchanged
    slots_in_table: OpsChange = unchanged
    v_mask: SelectionChange = unchanged
    cut_points: SelectionChange = unchanged

    def ops(self, ops: StepOps) -> StepOps:
        """Applies the safeguards to a provider's launches."""
        changes = (getattr(self, each.name) for each in fields(self) if each.type == "OpsChange")
        return reduce(lambda changed, change: change(changed), changes, ops)

    def selection(self, selection: Selection) -> Selection:
        """Applies the safeguards to the kernels of a kind of layer."""
        return self.v_mask(self.cut_points(selection))


@dataclass(frozen=True, slots=True)
class StepGuards:
    """The safeguards of a step, whether a runtime or an engine owns the pages and tables."""

    launches: LaunchGuards = field(default_factory=LaunchGuards)
    memory: MemoryGuards = field(default_factory=MemoryGuards)
    layers: LayerGuards = field(default_factory=LayerGuards)
    planning: PlanningGuards = field(default_factory=PlanningGuards)


class StepCore:
    """Kernels, launches, memory and layers for the steps of a model.

    kinds: the layers, with the kernels that were chosen for them
    table: the rows that sequences read, in every space that a kind of layer lives in
    pool:  the pages of every layer
    mask_keys: see StepMemory
    states:    the slots of recurrent layers
    head_weights: of the layers
    """

    def __init__(
        self,
        kinds: LayerKinds,
        table: RowTable,
        pool: PagePool,
        guards: StepGuards,
        states: StatePool,
        head_weights: LayerHeadWeights,
        *,
        mask_keys: int = ALL_KEYS,
    ) -> None:
        self.device, self.guards, self.head_weights = pool.device, guards, head_weights
        self.kinds = kinds = kinds.of_kernels(guards.launches.selection)
        self.selections = kinds.selections
        self.ops = guards.launches.ops(ops_for(self.selections, self.device))
        self.layers = Layers(kinds, pool, head_weights, self.ops, guards.layers, table.max_kv_len, states.stored)
        self.states = StateLayers(states, self.ops, self.layers.sides, deterministic=kinds.deterministic)
        self.memory = StepMemory(kinds, table, self.device, guards.memory, states, mask_keys=mask_keys)
        self.moves = AcceptedMoves(kinds, table, pool, self.ops)
        self._table, self._pool, self._state_pool = table, pool, states
        self._page_size = pool.page_size
        self._reaches = tuple((space.window_left, space.chunk) for space in table.spaces)
        has_pools = any(tokens > 1 for _, tokens in pools_of(kinds))
        self._fills_by_launches = does_only_launch(self.ops.fill) and not has_pools

    def fill(self, children: Sequence[DeviceStep], plan: StepPlan) -> None:
        """Derives the metadata of a step's children on the device, which is the current one. Captured with the step.

        Running it twice is harmless.
        """
        drafts = plan.shape.drafts
        if isinstance(drafts, Drafts):
            for first in range(0, len(children), drafts.steps):  # of each half
                half = children[first : first + drafts.steps]
                self.ops.draft_steps([step.tensors for step in half], half[0].parents, drafts.branches)
                if drafts.branches > 1:
                    self._place_trees(drafts.branches, 0, half[0])
        may_note = plan.builds_by_launches and self._fills_by_launches
        for step in children:
            if not self.layers.fill_again(step):
                with self.layers.noting_fill(step) if may_note else nullcontext():
                    self._derive(step, plan)

    def place_draft_mask(self, plan: StepPlan, branches: int, number: int, step: DeviceStep) -> None:
        """Derives the mask of a draft step from the parents of all drafts up to it, after fill.

        branches: of the plan's round
        """
        with on_device(self.device):
            self._place_trees(branches, number, step)
            self.build_ranges(step, plan)

    def _place_trees(self, branches: int, number: int, step: DeviceStep) -> None:
        for tensors, window_left in step.windows:
            self.ops.place_trees(step.parents, number * branches, branches, window_left, tensors)

    def _derive(self, step: DeviceStep, plan: StepPlan) -> None:
        """Launches all kernels that derive the metadata of a step of a plan."""
        for tensors, (window_left, chunk) in zip(step.spaces, self._reaches, strict=True):
            self.ops.fill(tensors, page_size=self._page_size, window_left=window_left, chunk=chunk)
        for tokens, of_space, slots, rows in step.pools:
            at = of_space.slot_of_token, of_space.position_of_token
            write_pool_slots(*at, slots, key_tokens=tokens, null_page=of_space.terms.null_page)
            if len(rows):
                write_last_rows(of_space.position_of_token, rows, tokens=tokens)
        if not self._state_pool.is_empty:
            pool = self._state_pool
            self.ops.state_places(step.tensors, pool.tags, pool.headers, step.states, kept=pool.recurrent.kept)
        for kind in plan.built_kinds:
            schedule = plan.kernels[kind].bound.schedule
            schedule.build(step.queries, step.of_kind[kind], plan.bounds, step.schedules[kind])

    def build_ranges(self, step: DeviceStep, plan: StepPlan) -> None:
        """Builds ranges of keys again after a step's mask, which came after fill: windows begin at keys that it says.

        The rest of the schedules follows from lengths alone, and is as fill has built it.
        """
        for kind in plan.built_kinds:
            schedule = plan.kernels[kind].bound.schedule
            if isinstance(schedule, RangedSchedule):
                schedule.build_ranges(step.of_kind[kind], plan.bounds, step.schedules[kind])

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Everything that a graph reads, by name: the memory of steps, tables, pages and head weights."""
        pages = {
            f"{name}_{layer}": tensor
            for layer in range(len(self.layers))
            for name, tensor in self._pool.layer(layer).tensors().items()
        }
        for layer in self.kinds.selecting.indexed:
            pages[f"index_pages_{layer}"] = self._pool.index(layer).k
        for layer in self.layers.sides.folding:
            pages[f"state_values_{layer}"], pages[f"state_gates_{layer}"] = self._pool.state(layer).tensors().values()
        states = self._state_pool
        if not states.is_empty:
            pages |= {"states": states.memory, "state_headers": states.headers, "state_tags": states.tags}
        tables = {name_in(table.space, "table"): table.entries for table in self._table.spaces}
        return {**self.memory.sealed_tensors(), **tables, **pages, **self.head_weights.tensors()}

"""StepGuards: the safeguards of what every step needs, part by part. guards/registry.py says what each prevents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import reduce

from rocm_attn.providers.contract import StepOps
from rocm_attn.providers.select import Selection
from rocm_attn.step.buffers import MemoryGuards
from rocm_attn.step.layers import LayerGuards
from rocm_attn.step.planner import PlanningGuards

OpsChange = Callable[[StepOps], StepOps]
SelectionChange = Callable[[Selection], Selection]


def unchanged_ops(ops: StepOps) -> StepOps:
    """The provider's launches guard by themselves."""
    return ops


def unchanged_selection(selection: Selection) -> Selection:
    """The provider's kernels guard by themselves."""
    return selection


@dataclass(frozen=True, slots=True)
class LaunchGuards:
    """The safeguards of the launches around attention, applied in this order, then those of the kernels."""

    pads: OpsChange = unchanged_ops
    store_drops: OpsChange = unchanged_ops
    finite_kv: OpsChange = unchanged_ops
    row_zero: OpsChange = unchanged_ops
    table_first: OpsChange = unchanged_ops
    table_tails: OpsChange = unchanged_ops
    slot_in_row: OpsChange = unchanged_ops
    draft_lengths: OpsChange = unchanged_ops
    path_pages: OpsChange = unchanged_ops
    full_refresh: OpsChange = unchanged_ops
    length_bounds: OpsChange = unchanged_ops
    slots_in_table: OpsChange = unchanged_ops
    v_mask: SelectionChange = unchanged_selection
    cut_points: SelectionChange = unchanged_selection

    def ops(self, ops: StepOps) -> StepOps:
        """A provider's launches, as the safeguards leave them."""
        changes = (getattr(self, each.name) for each in fields(self) if each.default is unchanged_ops)
        return reduce(lambda changed, change: change(changed), changes, ops)

    def selection(self, selection: Selection) -> Selection:
        """The kernels of a kind of layer, likewise."""
        return self.v_mask(self.cut_points(selection))


@dataclass(frozen=True, slots=True)
class StepGuards:
    """The safeguards of a step, whether a runtime or an engine owns the pages and tables."""

    launches: LaunchGuards = field(default_factory=LaunchGuards)
    memory: MemoryGuards = field(default_factory=MemoryGuards)
    layers: LayerGuards = field(default_factory=LayerGuards)
    planning: PlanningGuards = field(default_factory=PlanningGuards)

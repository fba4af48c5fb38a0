"""Guards: the safeguards against silent corruption, as values that a runtime is built from.

A safeguard is a field of Guards. Its default is the value that guards; debugging puts the value of unguarded.py in its
place, one at a time: ROCM_ATTN_DEBUG=1 ROCM_ATTN_DISABLE_GUARDS=id. Nothing on the way of a step asks which of the two
it has. docs/guards.md is the list for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import attrgetter
from typing import Any

from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadSetting
from rocm_attn.guards import unguarded
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.machine.settings import Settings, settings
from rocm_attn.paging.page_table import (
    WITHIN_THE_ROW,
    IsShared,
    IsSource,
    RowWidth,
    held_by_several,
    still_to_be_copied,
)
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.stored_tokens import SharedFloor, behind_what_is_shared
from rocm_attn.providers.contract import StepOps
from rocm_attn.providers.select import Selection
from rocm_attn.step.buffers import (
    Capacity,
    FirstOfChild,
    SealedGrowth,
    one_after_another,
    refuse_growth,
)
from rocm_attn.step.core import LongestOf, StepGuards
from rocm_attn.step.echo import EchoCheck, fault_of_counts
from rocm_attn.step.head_weights import refuse_new_weights
from rocm_attn.step.host_ring import Fence, wait_for
from rocm_attn.step.layers import ReadBy, by_space_of_layer
from rocm_attn.step.memory import MemoryGuards, by_padded_batch
from rocm_attn.step.plan import GraphKey
from rocm_attn.step.publisher import Deliver, OfLastStep, launch_then_forget

OpsChange = Callable[[StepOps], StepOps]
CheckBatch = Callable[[StepBatch], None]


def unchanged_ops(ops: StepOps) -> StepOps:
    """The provider's launches guard by themselves."""
    return ops


def unchanged_selection(selection: Selection) -> Selection:
    """The provider's kernels guard by themselves."""
    return selection


def checked_batch(table: RequestTable) -> Callable[[StepBatch], None]:
    """Batches that the table has no rows or no room for are refused."""
    return table.check_batch


def stored_before_it_is_read(table: RequestTable) -> tuple[CheckBatch, CheckBatch]:
    """What refuses a step that begins behind what is stored, and one that stores nothing and needs more than that."""
    return table.check_stored, table.require_stored


def before_the_steps_windows(table: RequestTable) -> Callable[[StepBatch], None]:
    """What a step's first new tokens do not see any more is given back, and nothing else.

    A length that only the device knows may be shorter than its bound: such a step gives nothing back by itself.
    """

    def evict(batch: StepBatch) -> None:
        if batch.inputs.kv_len_on_host:
            table.evict(batch.rows, batch.kv_len - batch.q_len)

    return evict


def lengths_on_the_host(sealed_tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[StepBatch], int]:
    """A step is planned for the longest sequence of its batch."""
    longest: Callable[[StepBatch], int] = attrgetter("max_kv_len")
    return longest


def whole_key(key: GraphKey) -> GraphKey:
    """Steps share a graph when everything that it froze is equal."""
    return key


def where_sealed(seal_number: int) -> bool:
    """Graphs are made of memory that cannot move; 0 is no seal's number."""
    return seal_number > 0


@dataclass(frozen=True, slots=True)
class Guards:
    """The safeguards of a runtime. A default is on; GUARDS says what each prevents."""

    # Of the launches around attention; applied in this order.
    pads: OpsChange = unchanged_ops
    store_drops: OpsChange = unchanged_ops
    finite_kv: OpsChange = unchanged_ops
    row_zero: OpsChange = unchanged_ops
    table_first: OpsChange = unchanged_ops
    table_tails: OpsChange = unchanged_ops
    slot_in_row: OpsChange = unchanged_ops
    full_refresh: OpsChange = unchanged_ops
    length_bounds: OpsChange = unchanged_ops
    # Of the kernels, the memory, the table, the plan and the graphs.
    v_mask: Callable[[Selection], Selection] = unchanged_selection
    cut_points: Callable[[Selection], Selection] = unchanged_selection
    capacity: Callable[[int], Capacity] = by_padded_batch
    child_ranges: FirstOfChild = one_after_another
    sealed_growth: SealedGrowth = refuse_growth
    head_weights: Callable[[int], None] = refuse_new_weights
    row_width: RowWidth = WITHIN_THE_ROW
    copy_on_write: IsShared = held_by_several
    shared_floor: SharedFloor = behind_what_is_shared
    stored_tokens: Callable[[RequestTable], tuple[CheckBatch, CheckBatch]] = stored_before_it_is_read
    copy_sources: IsSource = still_to_be_copied
    batch_check: Callable[[RequestTable], Callable[[StepBatch], None]] = checked_batch
    layer_space: ReadBy = by_space_of_layer
    window_reach: Callable[[RequestTable], Callable[[StepBatch], None]] = before_the_steps_windows
    planner_inputs: LongestOf = lengths_on_the_host
    graph_key: Callable[[GraphKey], GraphKey] = whole_key
    graph_epoch: Callable[[], PinnedTensors] = PinnedTensors
    sealed_capture: Callable[[int], bool] = where_sealed
    ring_wait: Callable[[Fence], None] = wait_for
    pending_changes: Deliver = launch_then_forget
    echo_check: Callable[[], Callable[[Int32Array], None]] = EchoCheck
    last_steps: OfLastStep = fault_of_counts

    @property
    def off(self) -> tuple[str, ...]:
        """Ids of the safeguards that are switched off."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not field.default)

    def without(self, *ids: str) -> Guards:
        """These guards with some more switched off. Raises BadSetting for an id that does not exist."""
        known = {guard.id: guard for guard in GUARDS}
        for id_ in ids:
            if id_ not in known:
                raise BadSetting(f"no safeguard has the id {id_!r}; the ids are {', '.join(known)}")
        return replace(self, **{id_: known[id_].value_when_off for id_ in ids})

    @property
    def step(self) -> StepGuards:
        """Those of a step, whoever owns its pages and tables."""
        return StepGuards(
            selection=lambda selection: self.v_mask(self.cut_points(selection)),
            ops=self.change_ops,
            memory=MemoryGuards(self.capacity, self.child_ranges, self.sealed_growth),
            read_by=self.layer_space,
            new_head_weights=self.head_weights,
            longest=self.planner_inputs,
            graph_key=self.graph_key,
        )

    def change_ops(self, ops: StepOps) -> StepOps:
        """A provider's launches, as the safeguards leave them."""
        changes = (
            self.pads,
            self.store_drops,
            self.finite_kv,
            self.row_zero,
            self.table_first,
            self.table_tails,
            self.slot_in_row,
            self.full_refresh,
            self.length_bounds,
        )
        return reduce(lambda changed, change: change(changed), changes, ops)


@dataclass(frozen=True, slots=True)
class Guard:
    """One safeguard.

    id:             its field of Guards
    prevents:       what goes wrong without it
    report:         where that went wrong: seed n, a founding report; Hn, a hazard of SGLang's AITER backend; Gn, the
                    promise that it keeps
    value_when_off: takes its place when it is switched off
    test:           goes wrong without it and right with it: file::function
    """

    id: str
    prevents: str
    report: str
    value_when_off: Any
    test: str


def _guard(id_: str, prevents: str, report: str, value_when_off: Any, test: str) -> Guard:
    return Guard(id_, prevents, report, value_when_off, f"tests/amd/guards/{test}")


GUARDS: tuple[Guard, ...] = (
    _guard(
        "pads",
        "a padded sequence reads the row and the KV of a request that sat in its place in an earlier step",
        "seed 001, H19, H21, G3",
        unguarded.leave_pads,
        "test_pads.py::test_padded_sequences_are_rewritten_every_step",
    ),
    _guard(
        "store_drops",
        "padded tokens, whose K and V may be NaN, are stored to page 0, which every padded sequence reads",
        "H23, H24, G4",
        unguarded.store_everything,
        "test_pads.py::test_padded_tokens_are_never_stored",
    ),
    _guard(
        "finite_kv",
        "an infinite V reaches tokens that do not see it, in their chunk or beside them in a tree: 0 * inf is NaN",
        "G4, G14",
        unguarded.store_as_it_comes,
        "test_pads.py::test_a_v_that_is_no_number_stays_with_the_tokens_that_see_it",
    ),
    _guard(
        "row_zero",
        "the reserved row of the table leads padded sequences to a request's pages",
        "seed 001, G4",
        unguarded.write_row_zero,
        "test_pads.py::test_the_reserved_row_is_never_written",
    ),
    _guard(
        "table_tails",
        "a kernel that reads ahead of a sequence's last page meets a page of another request",
        "H20, G3",
        unguarded.leave_tails,
        "test_pads.py::test_nothing_of_an_earlier_step_stays_behind_the_last_page",
    ),
    _guard(
        "v_mask",
        "NaN in a page's unused tail reaches the output: 0 * NaN is NaN",
        "vllm#53856, aiter#5401, G4",
        unguarded.unmasked_v,
        "test_pads.py::test_what_lies_behind_a_sequence_in_its_page_is_not_read",
    ),
    _guard(
        "cut_points",
        "a deterministic runtime sums up a sequence's KV in an order that depends on the batch",
        "seed 003, H33, G14",
        unguarded.cut_by_work,
        "test_cut_points.py::test_a_sequence_gives_the_same_bits_beside_a_longer_one",
    ),
    _guard(
        "capacity",
        "a batch padded beyond the request pool is cut short, or read past the end of its buffers",
        "seed 004, H1, H2, H6, G1",
        unguarded.by_request_rows,
        "test_capacity.py::test_a_batch_padded_beyond_the_pool_keeps_all_of_its_sequences",
    ),
    _guard(
        "child_ranges",
        "the halves of a split step use one set of lengths and schedules: the first half runs with the second one's",
        "H26, G9",
        unguarded.all_in_one_place,
        "test_halves.py::test_each_half_of_a_step_has_memory_of_its_own",
    ),
    _guard(
        "sealed_growth",
        "buffers move while graphs go on reading the memory that was given up: a replay repeats an old step",
        "H25, G2",
        unguarded.let_sealed_memory_move,
        "test_capacity.py::test_sealed_buffers_do_not_move_under_a_graph",
    ),
    _guard(
        "head_weights",
        "a graph goes on with sinks or ALiBi slopes that were replaced, and eager steps use the new ones",
        "G2",
        unguarded.let_weights_move,
        "test_capacity.py::test_head_weights_are_not_replaced_under_a_graph",
    ),
    _guard(
        "row_width",
        "pages that a row has no room for land in the row of another request",
        "seed 002, H4, G1",
        unguarded.PAST_THE_ROW,
        "test_rows.py::test_a_row_filled_past_its_width_stays_out_of_the_next_row",
    ),
    _guard(
        "slot_in_row",
        "a length on the device beyond a row's width sends a token's K and V to a page of the next row",
        "seed 002, H17, G4",
        unguarded.slots_past_the_row,
        "test_rows.py::test_a_length_beyond_the_row_writes_no_other_requests_page",
    ),
    _guard(
        "copy_on_write",
        "requests that share a partly filled page overwrite each other's tokens",
        "prefix sharing, G4",
        unguarded.never_shared,
        "test_rows.py::test_requests_that_share_a_page_do_not_write_to_it",
    ),
    _guard(
        "shared_floor",
        "a row that goes back and stores again overwrites tokens that another row shares with it",
        "prefix sharing, G4",
        unguarded.no_floor,
        "test_shared_rows.py::test_a_row_that_goes_back_leaves_its_forks_alone",
    ),
    _guard(
        "stored_tokens",
        "a step attends to tokens that were never stored, and what an earlier request left there is taken for theirs",
        "G1",
        unguarded.whatever_was_stored,
        "test_shared_rows.py::test_tokens_that_were_never_stored_are_not_read",
    ),
    _guard(
        "copy_sources",
        "a copy whose launch failed half way is launched again from a page that another copy has overwritten",
        "G9",
        unguarded.free_at_once,
        "test_publication.py::test_copies_that_failed_half_way_are_made_again_from_the_same_pages",
    ),
    _guard(
        "batch_check",
        "tokens without a reserved page are dropped, rows that nobody holds are read, and nobody is told",
        "H17, H18, G1",
        unguarded.any_batch,
        "test_rows.py::test_a_step_beyond_what_was_reserved_is_refused",
    ),
    _guard(
        "layer_space",
        "a layer with a window writes to its own pool and reads by ids of the full one: others' KV, or none",
        "seed 003, G5",
        unguarded.full_space,
        "test_spaces.py::test_a_layer_reads_in_the_space_that_it_writes_in",
    ),
    _guard(
        "window_reach",
        "pages leave the window of a step's last token while its first tokens still see them",
        "G5",
        unguarded.before_the_last_window,
        "test_spaces.py::test_a_step_gives_back_no_page_that_its_first_token_sees",
    ),
    _guard(
        "planner_inputs",
        "a step is planned from lengths that a captured kernel of the last step has overwritten",
        "seed 000, G2",
        unguarded.lengths_on_the_device,
        "test_plans.py::test_a_plan_reads_nothing_that_a_captured_kernel_writes",
    ),
    _guard(
        "graph_key",
        "a graph captured for short sequences is replayed for long ones and misses their last keys",
        "H33, G13",
        unguarded.key_without_length,
        "test_plans.py::test_a_longer_step_takes_another_graph",
    ),
    _guard(
        "full_refresh",
        "positions, slots and indptr of an earlier step serve a later one",
        "H7, H20, G3",
        unguarded.fill_once,
        "test_plans.py::test_derived_tensors_are_filled_by_every_step",
    ),
    _guard(
        "graph_epoch",
        "a graph of memory that was given up is replayed",
        "H25, G2",
        unguarded.EpochlessPins,
        "test_plans.py::test_a_graph_of_memory_that_moved_is_refused",
    ),
    _guard(
        "sealed_capture",
        "after a reopen that was broken off, graphs are made of memory that may move, and replay old steps",
        "H25, G2",
        unguarded.sealed_or_not,
        "test_reopening.py::test_no_graph_is_made_of_memory_that_may_move",
    ),
    _guard(
        "table_first",
        "a step runs before the device knows the pages that its tokens go to",
        "hip#3902, G9",
        unguarded.table_one_update_late,
        "test_publication.py::test_pages_reach_the_device_before_the_step_that_uses_them",
    ),
    _guard(
        "pending_changes",
        "a launch that fails loses the changes of the table that it carried",
        "G9",
        unguarded.forget_then_launch,
        "test_publication.py::test_changes_survive_a_launch_that_fails",
    ),
    _guard(
        "ring_wait",
        "the host writes a later step's inputs over those that the device has yet to read",
        "H26, G9",
        unguarded.wait_for_nothing,
        "test_publication.py::test_a_late_device_still_reads_its_own_steps_inputs",
    ),
    _guard(
        "echo_check",
        "a step that went wrong on the device, or whose inputs never got there, is taken for a right one",
        "H17, G9",
        unguarded.EchoIgnored,
        "test_publication.py::test_a_fault_on_the_device_is_told_once_and_later_steps_are_right",
    ),
    _guard(
        "last_steps",
        "a fault in the last steps before serving ends is never reported: no later step echoes them",
        "H17, G9",
        unguarded.last_step_unseen,
        "test_last_steps.py::test_a_fault_of_the_last_step_is_reported_when_serving_ends",
    ),
    _guard(
        "length_bounds",
        "a length that only the device knows leads a step beyond the pages reserved for it",
        "H17, G9",
        unguarded.lengths_as_they_come,
        "test_rows.py::test_a_length_beyond_its_bound_touches_no_other_request",
    ),
)


def guards_from_settings(chosen: Settings | None = None) -> Guards:
    """All safeguards, less those that the settings switch off; the process's settings when none are given.

    Raises BadSetting for an id that does not exist.
    """
    return Guards().without(*(chosen if chosen is not None else settings()).disable_guards)

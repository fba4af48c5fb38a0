"""Guards: the safeguards against silent corruption, as values from which a runtime is built.

Each part that has safeguards has one frozen value of them: TableGuards with the request table, MemoryGuards with the
memory of steps, and so on. Guards is composed of these. A field's default is the value that guards. Debugging replaces
it by a wrong twin, one at a time: ROCM_ATTN_DEBUG=1 ROCM_ATTN_DISABLE_GUARDS=id. Wrong twins are in rocm-lab, which
registers them by an entry point of the group WRONG_TWINS. The code of a step never checks which of the two it has.
docs/guards.md is the list for readers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.metadata import entry_points
from typing import Any, TypeVar

from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.machine.distributions import installing
from rocm_attn.machine.settings import Settings, settings
from rocm_attn.paging.adopted import AdoptedGuards
from rocm_attn.paging.batch_checks import BatchGuards
from rocm_attn.paging.page_table import TableGuards
from rocm_attn.step.core import StepGuards
from rocm_attn.step.echo import NoEcho
from rocm_attn.step.publisher import PublishingGuards

# The group of the entry point of WRONG_TWINS: a mapping of every safeguard's id to its wrong twin.
WRONG_TWINS = "rocm_attn.wrong_twins"


def where_sealed(seal_number: int) -> bool:
    """True under a seal, whose memory cannot move; 0 is not the number of a seal."""
    return seal_number > 0


@dataclass(frozen=True, slots=True)
class CaptureGuards:
    """The safeguards of a StepRunner's graphs.

    new_pins:    makes the check whether the memory that graphs read has moved
    may_capture: the number of the seal, 0 without one -> whether graphs may be made now
    """

    new_pins: Callable[[], PinnedTensors] = PinnedTensors
    may_capture: Callable[[int], bool] = where_sealed


@dataclass(frozen=True, slots=True)
class Guards:
    """The safeguards of a runtime, one value for each part that has some. All are on by default."""

    step: StepGuards = field(default_factory=StepGuards)
    table: TableGuards = field(default_factory=TableGuards)
    batch: BatchGuards = field(default_factory=BatchGuards)
    publishing: PublishingGuards = field(default_factory=PublishingGuards)
    capture: CaptureGuards = field(default_factory=CaptureGuards)
    adopted: AdoptedGuards = field(default_factory=AdoptedGuards)

    @property
    def off(self) -> tuple[str, ...]:
        """Ids of the safeguards that are switched off, in the order of GUARDS."""
        return tuple(guard.id for guard in GUARDS if guard.is_off(self))

    def warn(self) -> None:
        """Logs the safeguards that are switched off, if any are."""
        if self.off:
            logging.getLogger(__name__).warning("safeguards are switched off: %s", ", ".join(self.off))

    def without(self, *ids: str) -> Guards:
        """These guards with some more switched off.

        Raises BadSetting for an id that does not exist, and where rocm-lab, which has the wrong twins, is not
        installed.
        """
        known = {guard.id: guard for guard in GUARDS}
        guards = self
        for id_ in ids:
            if id_ not in known:
                raise BadSetting(f"no safeguard has the id {id_!r}; the ids are {', '.join(known)}")
            guards = known[id_].put_in(guards, _wrong_twins()[id_])
        return guards


_ALL_ON = Guards()


@dataclass(frozen=True, slots=True)
class Guard:
    """One safeguard.

    id:       its name in the environment
    place:    its field of Guards: names of parts and of a part's field, from the outside in
    prevents: the fault that occurs without it
    report:   where that fault occurred: seed n, a founding report; Hn, a hazard of SGLang's AITER backend; Gn,
              the promise that it keeps
    test:     fails without it and passes with it: file::function
    """

    id: str
    place: tuple[str, ...]
    prevents: str
    report: str
    test: str

    def value_in(self, guards: Guards) -> Any:
        """The value at its place."""
        return reduce(getattr, self.place, guards)

    def is_off(self, guards: Guards) -> bool:
        """True if another value is at its place, except for one that stands for a device that runs nothing."""
        value = self.value_in(guards)
        return value is not self.value_in(_ALL_ON) and value is not NoEcho

    def put_in(self, guards: Guards, value: Any) -> Guards:
        """The same guards with another value at its place."""
        return _put(guards, self.place, value)


@cache
def _wrong_twins() -> Mapping[str, Any]:
    """Returns id -> the value of a safeguard that is switched off. Raises BadSetting."""
    for entry_point in entry_points(group=WRONG_TWINS):
        twins: Mapping[str, Any] = entry_point.load()
        return twins
    raise BadSetting(
        f"safeguards can only be switched off if rocm-lab is installed, and it is not; {installing('rocm_lab')}"
    )


_T = TypeVar("_T")


def _put(part: _T, place: Sequence[str], value: Any) -> _T:
    """A copy of a part with a value at a place in it."""
    name, rest = place[0], place[1:]
    return replace(part, **{name: _put(getattr(part, name), rest, value) if rest else value})  # type: ignore[type-var]


def _guard(id_: str, place: str, prevents: str, report: str, test: str) -> Guard:
    return Guard(id_, tuple(place.split(".")), prevents, report, f"tests/amd/guards/{test}")


GUARDS: tuple[Guard, ...] = (
    _guard(
        "pads",
        "step.launches.pads",
        "a padded sequence reads the row and the KV of a request that was at its place in an earlier step",
        "seed 001, H19, H21, G3",
        "test_pads.py::test_padded_sequences_are_rewritten_every_step",
    ),
    _guard(
        "store_drops",
        "step.launches.store_drops",
        "padded tokens, whose K and V may be NaN, are stored to page 0, which every padded sequence reads",
        "H23, H24, G4",
        "test_pads.py::test_padded_tokens_are_never_stored",
    ),
    _guard(
        "finite_kv",
        "step.launches.finite_kv",
        "an infinite V reaches tokens that do not see it, in their chunk or in another branch of a tree: 0 * inf is "
        "NaN",
        "G4, G14",
        "test_pads.py::test_a_v_that_is_no_number_stays_with_the_tokens_that_see_it",
    ),
    _guard(
        "row_zero",
        "step.launches.row_zero",
        "the reserved row of the table leads padded sequences to a request's pages",
        "seed 001, G4",
        "test_pads.py::test_the_reserved_row_is_never_written",
    ),
    _guard(
        "table_tails",
        "step.launches.table_tails",
        "a kernel that reads past a sequence's last page meets a page of another request",
        "H20, G3",
        "test_pads.py::test_nothing_of_an_earlier_step_stays_after_the_last_page",
    ),
    _guard(
        "v_mask",
        "step.launches.v_mask",
        "NaN in a page's unused tail reaches the output: 0 * NaN is NaN",
        "vllm#53856, aiter#5401, G4",
        "test_pads.py::test_what_lies_after_a_sequence_in_its_page_is_not_read",
    ),
    _guard(
        "cut_points",
        "step.launches.cut_points",
        "a deterministic runtime sums up a sequence's KV in an order that depends on the batch",
        "seed 003, H33, G14",
        "test_cut_points.py::test_a_sequence_gives_the_same_bits_beside_a_longer_one",
    ),
    _guard(
        "capacity",
        "step.memory.capacity",
        "a batch padded beyond the request pool is cut short, or read past the end of its buffers",
        "seed 004, H1, H2, H6, G1",
        "test_capacity.py::test_a_batch_padded_beyond_the_pool_keeps_all_of_its_sequences",
    ),
    _guard(
        "child_ranges",
        "step.memory.first_of_child",
        "the halves of a split step share one set of lengths and schedules: the first half runs with those of the "
        "second",
        "H26, G9",
        "test_halves.py::test_each_half_of_a_step_has_memory_of_its_own",
    ),
    _guard(
        "mask_room",
        "step.memory.mask_room",
        "the mask of drafts is written past the end of its buffer, which has room only for the keys before them",
        "H16, G1, G12",
        "test_drafts.py::test_the_mask_of_drafts_has_room_for_the_drafts",
    ),
    _guard(
        "sealed_growth",
        "step.memory.sealed_growth",
        "buffers move while graphs still read the freed memory: a replay repeats an old step",
        "H25, G2",
        "test_capacity.py::test_sealed_buffers_do_not_move_under_a_graph",
    ),
    _guard(
        "head_weights",
        "step.layers.new_head_weights",
        "a graph keeps the sinks or ALiBi slopes that were replaced, and eager steps use the new ones",
        "G2",
        "test_capacity.py::test_head_weights_are_not_replaced_under_a_graph",
    ),
    _guard(
        "kv_scales",
        "step.layers.new_kv_scales",
        "a graph reads eight-bit K and V with scales that were replaced, and the store of eager steps uses the new "
        "ones",
        "G2, G11",
        "test_formats.py::test_scales_are_not_replaced_under_a_graph",
    ),
    _guard(
        "fresh_selection",
        "step.layers.selection_of",
        "a layer attends to keys that were selected for another layer or in an earlier step",
        "vllm#52109, G3",
        "test_selections.py::test_a_layer_attends_to_no_other_selection_than_its_own",
    ),
    _guard(
        "selection_place",
        "step.memory.selection_place",
        "units selected on the device are counted in the memory of a step's boundaries, which later layers and "
        "plans read",
        "seed 000, G2",
        "test_selections.py::test_boundaries_stay_monotone_whatever_is_selected",
    ),
    _guard(
        "row_width",
        "table.row_width",
        "pages beyond a row's width land in the row of another request",
        "seed 002, H4, G1",
        "test_rows.py::test_a_row_filled_past_its_width_stays_out_of_the_next_row",
    ),
    _guard(
        "slot_in_row",
        "step.launches.slot_in_row",
        "a length on the device beyond a row's width sends a token's K and V to a page of the next row",
        "seed 002, H17, G4",
        "test_rows.py::test_a_length_beyond_the_row_writes_no_other_requests_page",
    ),
    _guard(
        "draft_lengths",
        "step.launches.draft_lengths",
        "the lengths of a round's later draft steps leave out its drafts: they overwrite each other, and none sees any",
        "H8, G12",
        "test_drafts.py::test_every_draft_step_sees_the_drafts_before_it",
    ),
    _guard(
        "path_pages",
        "step.launches.path_pages",
        "an accepted path that leads past its row's pages overwrites a token of the row with page 0",
        "G4, G12",
        "test_drafts.py::test_a_path_past_the_rows_pages_moves_nothing",
    ),
    _guard(
        "copy_on_write",
        "table.writers",
        "requests that share a partly filled page overwrite each other's tokens",
        "prefix sharing, G4",
        "test_rows.py::test_requests_that_share_a_page_do_not_write_to_it",
    ),
    _guard(
        "shared_floor",
        "table.new_tokens",
        "a row that goes back and stores again overwrites tokens that another row shares with it",
        "prefix sharing, G4",
        "test_shared_rows.py::test_a_row_that_goes_back_leaves_its_forks_alone",
    ),
    _guard(
        "kept_ids",
        "table.is_kept",
        "an id of dropped kept pages leads to another request's pages, which are reused or dropped",
        "prefix sharing, G1",
        "test_shared_rows.py::test_dropped_pages_are_not_begun_over",
    ),
    _guard(
        "stored_tokens",
        "batch.stored",
        "a step attends to tokens that were never stored, and reads the KV that an earlier request left there",
        "G1",
        "test_shared_rows.py::test_tokens_that_were_never_stored_are_not_read",
    ),
    _guard(
        "copy_sources",
        "table.sources",
        "a copy whose launch failed half way is launched again from a page that another copy has overwritten",
        "G9",
        "test_publication.py::test_copies_that_failed_half_way_are_made_again_from_the_same_pages",
    ),
    _guard(
        "batch_check",
        "batch.check",
        "tokens without a reserved page are dropped, and rows of no request are read, without an error",
        "H17, H18, G1",
        "test_rows.py::test_a_step_beyond_what_was_reserved_is_refused",
    ),
    _guard(
        "same_rows",
        "batch.changed",
        "a step that runs again, or moves accepted tokens, writes to rows that now belong to other requests",
        "G1, G4",
        "test_same_rows.py::test_a_step_runs_again_while_its_rows_are_its_own",
    ),
    _guard(
        "draft_order",
        "batch.in_turn",
        "a draft step attends to drafts that no step has stored",
        "G1, G12",
        "test_same_rows.py::test_draft_steps_store_one_after_the_other",
    ),
    _guard(
        "layer_space",
        "step.layers.read_by",
        "a layer with a window writes to its own pool and reads with page ids of the full one: KV of others, or none",
        "seed 003, G5",
        "test_spaces.py::test_a_layer_reads_in_the_space_that_it_writes_in",
    ),
    _guard(
        "window_reach",
        "batch.evict",
        "pages leave the window of a step's last token while its first tokens still see them",
        "G5",
        "test_spaces.py::test_a_step_gives_back_no_page_that_its_first_token_sees",
    ),
    _guard(
        "planner_inputs",
        "step.planning.longest",
        "a step is planned from lengths that a captured kernel of the last step has overwritten",
        "seed 000, G2",
        "test_plans.py::test_a_plan_reads_nothing_that_a_captured_kernel_writes",
    ),
    _guard(
        "graph_key",
        "step.planning.graph_key",
        "a graph captured for short sequences is replayed for long ones and misses their last keys",
        "H33, G13",
        "test_plans.py::test_a_longer_step_takes_another_graph",
    ),
    _guard(
        "full_refresh",
        "step.launches.full_refresh",
        "positions, slots and indptr of an earlier step are used in a later one",
        "H7, H20, G3",
        "test_plans.py::test_derived_tensors_are_filled_by_every_step",
    ),
    _guard(
        "graph_epoch",
        "capture.new_pins",
        "a graph whose memory was freed is replayed",
        "H25, G2",
        "test_plans.py::test_a_graph_of_memory_that_moved_is_refused",
    ),
    _guard(
        "sealed_capture",
        "capture.may_capture",
        "after an interrupted reopen, graphs are made of memory that may move, and replay old steps",
        "H25, G2",
        "test_reopening.py::test_no_graph_is_made_of_memory_that_may_move",
    ),
    _guard(
        "table_first",
        "step.launches.table_first",
        "a step runs before the device knows the pages of its tokens",
        "hip#3902, G9",
        "test_publication.py::test_pages_reach_the_device_before_the_step_that_uses_them",
    ),
    _guard(
        "pending_changes",
        "publishing.deliver",
        "a launch that fails loses the changes of the table that it carried",
        "G9",
        "test_publication.py::test_changes_survive_a_launch_that_fails",
    ),
    _guard(
        "ring_wait",
        "publishing.ring_wait",
        "the host overwrites inputs that the device has yet to read with those of a later step",
        "H26, G9",
        "test_publication.py::test_a_late_device_still_reads_its_own_steps_inputs",
    ),
    _guard(
        "echo_check",
        "publishing.new_echo_check",
        "a step that went wrong on the device, or whose inputs never arrived, is taken as correct",
        "H17, G9",
        "test_publication.py::test_a_fault_on_the_device_is_reported_once_and_later_steps_are_right",
    ),
    _guard(
        "last_steps",
        "publishing.of_last_step",
        "a fault in the last steps before serving ends is never reported, because no later step echoes them",
        "H17, G9",
        "test_last_steps.py::test_a_fault_of_the_last_step_is_reported_when_serving_ends",
    ),
    _guard(
        "length_bounds",
        "step.launches.length_bounds",
        "a length that only the device knows leads a step beyond the pages reserved for it",
        "H17, G9",
        "test_rows.py::test_a_length_beyond_its_bound_touches_no_other_request",
    ),
    _guard(
        "slots_in_table",
        "step.launches.slots_in_table",
        "a slot given by an engine that differs from its table puts a token's K and V into another request's page",
        "engine storage, G4",
        "test_adopted.py::test_a_slot_that_the_table_does_not_give_is_not_written",
    ),
    _guard(
        "null_page",
        "adopted.terms",
        "page 0 of an engine that uses it like any other page is treated as reserved: tokens stored there are lost",
        "engine storage, G1",
        "test_adopted.py::test_what_an_engine_keeps_in_page_0_is_stored",
    ),
    _guard(
        "page_format",
        "adopted.formats",
        "pages that an engine wrote in one encoding or layout are read in another: finite, wrong KV",
        "vllm#52109, vllm#45562, G11",
        "test_formats.py::test_pages_of_another_format_are_not_adopted",
    ),
    _guard(
        "table_moved",
        "adopted.moved",
        "a graph keeps a table or pages that the engine has replaced, and eager steps use the new ones",
        "engine storage, G2",
        "test_adopted.py::test_a_table_is_not_replaced_under_a_graph",
    ),
)


def guards_from_settings(chosen: Settings | None = None) -> Guards:
    """All safeguards but those that the settings switch off; the process's settings if none are given.

    Raises BadSetting for an id that does not exist.
    """
    return Guards().without(*(chosen if chosen is not None else settings()).disable_guards)

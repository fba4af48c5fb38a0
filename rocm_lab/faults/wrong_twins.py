"""Replacements of safeguards that are switched off: the faults that the safeguards prevent.

Debugging selects them by the safeguard's id (rocm_attn/guards/registry.py), one at a time, to see whether a fault
changes. Each does what a plain implementation would do. None is meant to be fast: some of them wait for the device.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, StepBatch
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages
from rocm_attn.kernels.cache.page_format import PageFormat
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, TokenPlaces
from rocm_attn.kernels.metadata.engine_tensors import EngineLengths, LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.slot_layout import UPDATE_WORDS
from rocm_attn.kernels.metadata.step_tensors import StepTensors, TableTerms
from rocm_attn.kernels.refs import segments
from rocm_attn.kernels.refs.rope import rope_queries, stored_rows
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from rocm_attn.kernels.states.arguments import BEGINS, LEFT_OUT, StatePlaces
from rocm_attn.paging.batch_checks import BatchChecks
from rocm_attn.paging.kept_pages import KeptIds
from rocm_attn.paging.state_record import RecordHead
from rocm_attn.paging.stored_tokens import StoredTokens
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import BoundKernel, LayerKernel, Schedule, StepBounds
from rocm_attn.providers.launches import RopeStore, StepOps, StoreKV
from rocm_attn.providers.select import Selection, select
from rocm_attn.providers.torch_ref import TorchSegments
from rocm_attn.step.buffers import PADDED_BATCH, BufferSpec, Capacity
from rocm_attn.step.host_ring import Fence
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import GraphKey

# Tensors of a step's inputs that have a value for each sequence.
_OF_SEQS = ("row_of_seq", "kv_len", "q_len", "prefix_len", "group_end")


def leave_pads(ops: StepOps) -> StepOps:
    """Publishing writes only the real sequences and tokens; the rest keeps the values of the last step."""

    def publish(slot: Tensor, counts_before: Tensor, to: StepTensors) -> None:
        seqs, tokens = slot[:2].tolist()
        real = {name: getattr(to, name)[:seqs] for name in _OF_SEQS}
        ops.publish(slot, counts_before, replace(to, **real, token_ids=to.token_ids[:tokens]))

    def take_inputs(slots: Tensor, runs: Tensor, to: StepTensors) -> None:
        held = {name: getattr(to, name).clone() for name in (*_OF_SEQS, "token_ids")}
        ops.take_inputs(slots, runs, to)
        for name, before in held.items():
            place, real = torch.arange(len(before), device=before.device), to.counts[int(name == "token_ids")]
            getattr(to, name).copy_(torch.where(place < real, getattr(to, name), before))

    def publish_engine(
        slot: Tensor, counts_before: Tensor, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
    ) -> None:
        seqs = int(slot[0])
        real = {name: getattr(to, name)[:seqs] for name in ("engine_row", "row_of_seq", "kv_len", "q_len")}
        ops.publish_engine(slot, counts_before, given, bounds, replace(to, **real))

    return replace(ops, publish=publish, take_inputs=take_inputs, publish_engine=publish_engine)


def store_everything(ops: StepOps) -> StepOps:
    """Every token is stored to its slot, including padded ones, whose slot is 0 or -1."""

    def store_kv(
        k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool
    ) -> None:
        keys, values = pages.keys, pages.values
        page, offset = slot_of_token // keys.page_size, slot_of_token % keys.page_size
        keys.write_tokens(page, offset, k)
        values.write_tokens(page, offset, v)

    return replace(ops, store_kv=store_kv, rope_store=_rope_then(store_kv))


def store_as_it_comes(ops: StepOps) -> StepOps:
    """Infinite values and NaN are stored like any other K and V."""

    def store_kv(
        k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool
    ) -> None:
        keys, values = pages.keys, pages.values
        token = torch.arange(len(k), device=k.device)
        live = (token < counts[1]) & (slot_of_token >= (keys.page_size if null_page else 0))
        # Like the twin: a dropped token writes the same as a live one, or the present content.
        any_live, source = live.any(), torch.where(live, token, live.int().argmax())
        slot = torch.where(any_live, slot_of_token[source], 0)
        page, offset = slot // keys.page_size, slot % keys.page_size
        for side, rows in ((keys, k), (values, v)):
            held = torch.empty_like(rows)
            side.read_tokens(page, offset, held)
            side.write_tokens(page, offset, torch.where(any_live, rows[source], held))

    return replace(ops, store_kv=store_kv, rope_store=_rope_then(store_kv))


def _rope_then(store_kv: StoreKV) -> RopeStore:
    """A fused store that stores by another store."""

    def rope_store(given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages, *, null_page: bool) -> None:
        rope_queries(given.q, given.q_out, tokens.positions, work)
        k, v = stored_rows(given, tokens, work, pages)
        store_kv(k, v, tokens.slot_of_token, tokens.counts, pages, null_page=null_page)

    return rope_store


def fill_once(ops: StepOps) -> StepOps:
    """Derived tensors are filled the first time that a step uses them, and kept."""
    filled: set[tuple[int, int]] = set()

    def fill(step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None:
        key = step.slot_of_token.data_ptr(), step.slot_of_token.numel()
        if key not in filled:
            filled.add(key)
            ops.fill(step, page_size=page_size, window_left=window_left, chunk=chunk)

    return replace(ops, fill=fill)


def states_as_they_come(ops: StepOps) -> StepOps:
    """A step goes on from the last state in its row's slots, of any request and after any token."""

    def state_places(step: StepTensors, tags: Tensor, headers: Tensor, places: StatePlaces, *, kept: int) -> None:
        row, start = step.row_of_seq.long(), step.kv_len - step.q_len
        seq = torch.arange(len(row), device=row.device)
        is_live, begins = (seq < step.counts[0]) & (step.q_len > 0), start <= 0
        last = (headers[2 * row + 1, 1] > headers[2 * row, 1]).long()
        target = torch.where(is_live, 2 * row + torch.where(begins, 0, 1 - last), 0)
        before = (start - headers[2 * row + last, 2]).clamp(0, kept)
        places.source.copy_(torch.where(is_live, torch.where(begins, BEGINS, 2 * row + last), LEFT_OUT))
        places.target.copy_(target)
        places.pending.copy_(torch.where(is_live & ~begins, before, 0))
        first = torch.where(step.q_len <= kept, start, step.kv_len)
        written = torch.stack([tags[row, 0], start, first, step.kv_len], 1)
        headers[target] = torch.where(is_live[:, None], written, headers[target])

    return replace(ops, state_places=state_places)


def lengths_of_the_first_step(ops: StepOps) -> StepOps:
    """A step of a round of drafts does not count the lengths of the steps before it."""

    def draft_steps(steps: Sequence[StepTensors], parents: Tensor, branches: int) -> None:
        ops.draft_steps(steps, parents, branches)
        for step in steps[1:]:
            step.kv_len.copy_(steps[0].kv_len)

    return replace(ops, draft_steps=draft_steps)


def paths_through_page_zero(ops: StepOps) -> StepOps:
    """Accepted paths treat page 0 as a page like any other."""

    def move_paths(pages: AlikePages, paths: AcceptedPaths) -> None:
        ops.move_paths(pages, paths._replace(no_page=-1))

    return replace(ops, move_paths=move_paths)


def slots_past_the_row(ops: StepOps) -> StepOps:
    """The slot of a token beyond its row's last page is looked up where the row would continue: in the next row."""

    def fill(step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None:
        ops.fill(step, page_size=page_size, window_left=window_left, chunk=chunk)
        position = step.position_of_token
        token = torch.arange(len(position), device=position.device)
        cell = step.row_of_token.long() * step.table.shape[1] + position // page_size
        page = step.table.reshape(-1)[cell.clamp(max=step.table.numel() - 1)]
        slot = page * page_size + position % page_size
        step.slot_of_token.copy_(torch.where(token < step.counts[1], slot, 0))

    return replace(ops, fill=fill)


def lengths_as_they_come(ops: StepOps) -> StepOps:
    """Lengths on the device are used without a check against the host's reservations."""

    def device_inputs(slot: Tensor, given: GivenInputs, to: StepTensors) -> None:
        ops.device_inputs(slot, given, to)
        seqs = int(slot[0])
        to.kv_len[:seqs].copy_(given.kv_len[:seqs] + given.ahead)
        to.q_len[:seqs].copy_(given.q_len[:seqs])
        to.counts[1], to.counts[3] = to.q_len[:seqs].sum(), 0

    def publish_engine(
        slot: Tensor, counts_before: Tensor, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
    ) -> None:
        ops.publish_engine(slot, counts_before, given, bounds, to)
        seqs = int(slot[0])
        to.kv_len[:seqs].copy_(given.kv_len[:seqs])
        to.counts[3] = 0

    return replace(ops, device_inputs=device_inputs, publish_engine=publish_engine)


def slots_as_given(ops: StepOps) -> StepOps:
    """New tokens go to the slots that the engine gives, without a check against its table."""

    def take_slots(given: Tensor, slot_map: Tensor | None, to: StepTensors, *, page_size: int) -> None:
        counts, slot_of_token, null_page = to.counts, to.slot_of_token, to.terms.null_page
        num_given = min(len(given), len(slot_of_token))
        slot = given[:num_given].long()
        slot = slot if slot_map is None else slot_map[slot.clamp(0, len(slot_map) - 1)].long()
        live = torch.arange(num_given, device=counts.device) < counts[1]
        slot_of_token[:num_given].copy_(torch.where(live, slot, 0 if null_page else -1))

    return replace(ops, take_slots=take_slots)


def write_row_zero(ops: StepOps) -> StepOps:
    """An update of the reserved row is written like any other."""

    def table_update(updates: Tensor, table: Tensor, *, num_updates: int) -> None:
        words = updates[: UPDATE_WORDS * num_updates].to(table.device).view(-1, UPDATE_WORDS)
        row, column, entry = words.unbind(1)
        table[row.long(), column.long()] = entry

    return replace(ops, table_update=table_update)


def table_one_update_late(ops: StepOps) -> StepOps:
    """Changes of the table reach the device with the next changes, like a copy that is not ordered before the step."""
    late: list[Callable[[], None]] = []

    def table_update(updates: Tensor, table: Tensor, *, num_updates: int) -> None:
        kept = updates.to(table.device, copy=True)  # the ring slot is written again before it is read
        late.append(partial(ops.table_update, kept, table, num_updates=num_updates))
        for update in late[:-1]:
            update()
        del late[:-1]

    return replace(ops, table_update=table_update)


def leave_tails(ops: StepOps) -> StepOps:
    """After a sequence's last page, page lists and dense tables keep the entries of an earlier step."""

    def fill(step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None:
        list_before, rows_before = step.page_list.clone(), step.block_table.clone()
        ops.fill(step, page_size=page_size, window_left=window_left, chunk=chunk)
        pages = (step.kv_len + page_size - 1) // page_size
        entry = torch.arange(len(step.page_list), device=pages.device)
        step.page_list.copy_(torch.where(entry < pages.sum(), step.page_list, list_before))
        if step.block_table.numel():
            page_no = torch.arange(step.block_table.shape[1], device=pages.device)
            step.block_table.copy_(torch.where(page_no < pages[:, None], step.block_table, rows_before))

    return replace(ops, fill=fill)


@dataclass(frozen=True, slots=True)
class _ReadsDeadV:
    """A kernel that multiplies the V rows after a sequence's end, in its last page, by a probability of 0."""

    inner: BoundKernel
    problem: Problem

    def describe(self) -> str:
        return f"{self.inner.describe()} without V mask"

    @property
    def schedule(self) -> Schedule:
        return self.inner.schedule

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.inner.workspace_words(shape)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.inner.attend(args, step, bounds)
        page_size = self.problem.page_size
        page_no = (step.kv_len - 1).clamp(min=0) // page_size
        page = step.table[step.row_of_seq.long(), page_no.long()]
        live = torch.arange(page_size, device=page.device) < (step.kv_len - page_no * page_size)[:, None]
        dead = args.pages.values.read(page).masked_fill(live[:, :, None, None], 0)
        product = (0 * dead).sum(1).repeat_interleave(self.problem.gqa_ratio, 1)
        token = torch.arange(args.out.shape[0], device=page.device)
        args.out.add_(torch.where((token < step.counts[1])[:, None, None], product[step.seq_of_token], 0))


def unmasked_v(selection: Selection) -> Selection:
    """The same kernels without a mask on the V rows of a sequence's last page."""
    kernels = {
        kind: LayerKernel(kernel.entry, _ReadsDeadV(kernel.bound, selection.problem))
        for kind, kernel in selection.kernels.items()
    }
    return replace(selection, kernels=kernels)


def cut_by_work(selection: Selection) -> Selection:
    """Replaces deterministic kernels by kernels whose cuts depend on how the work of the batch is shared out."""
    if not selection.deterministic:
        return selection
    if selection.provider == "torch":
        kernels = {
            kind: LayerKernel(kernel.entry, _SharesOfTheStep(selection.problem))
            for kind, kernel in selection.kernels.items()
        }
        return replace(selection, kernels=kernels)
    return select(selection.problem, selection.target, selection.provider)


class _SharesOfTheStep(TorchSegments):
    """Torch's kernel, with three workers that share the KV of the step's longest sequence."""

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        segments.segment_extend(args, scores=self.scores, segment_len=-(-bounds.max_kv_len // 3))


@dataclass(frozen=True, slots=True)
class _RequestRows(Capacity):
    """Sizes that count sequences are those of the request pool, and a view past its end is cut short."""

    max_num_seqs: int = 0

    def of_table(self, num_rows: int) -> Capacity:
        return _RequestRows(num_rows)

    def elements(self, spec: BufferSpec, shape: PaddedShape) -> int:
        if spec.exact:  # the workspace, whose words count no sequences
            return PADDED_BATCH.elements(spec, shape)
        num_seqs = min(shape.num_seqs, self.max_num_seqs)
        shape = replace(shape, num_seqs=num_seqs)
        if isinstance(shape.drafts, Drafts):  # one row per request, and none for its other branches
            shape = replace(shape, num_tokens=num_seqs * shape.drafts.steps)
        return PADDED_BATCH.elements(spec, shape)

    def allocated(self, elements: int) -> int:
        return elements

    def view(self, name: str, tensor: Tensor, first: int, elements: int) -> Tensor:
        return tensor[first : first + elements]


# Buffers with the size of the request pool, for a batch of any padded size.
BY_REQUEST_ROWS = _RequestRows()


def all_in_one_place(child: int, elements: int) -> int:
    """The children of a split step use the same words, like backends that keep their state in one place."""
    return 0


def room_for_older_keys(shape: PaddedShape, mask_keys: int) -> int:
    """The mask of a step has room for the cells of keys before its new tokens, and none for those of the new ones."""
    if isinstance(shape.drafts, Drafts):
        return shape.num_tokens * (shape.drafts.tokens - shape.drafts.branches)
    return shape.num_tokens * mask_keys


def let_sealed_memory_move(reason: str) -> None:
    """Growth continues, although graphs read the memory that is given up."""


def let_weights_move(owned: Tensor, given: Tensor) -> Tensor:
    """A layer's weights move to other tensors, although graphs read the old ones."""
    return torch.empty_like(owned).copy_(given)


def read_any_format(pages: str, declared: PageFormat, wanted: PageFormat) -> None:
    """Bytes are read in the kernels' format, without a check of the declared one."""


def past_the_row(max_kv_len: int, kv_len: int) -> None:
    """Pages are put where they would lie if the row had no end: in the rows after it."""


# Every row writes to the pages that it holds, with any number of other holders.
ANY_WRITERS = INT32_MAX


class NoFirstWritable(StoredTokens):
    """A row and its forks store wherever their steps begin."""

    def raise_first_writable(self, rows: Int32Array | int, kv_len: Int32Array | int) -> None:
        pass


def whatever_is_kept_there(given: KeptIds, there: KeptIds) -> npt.NDArray[np.bool_]:
    """An id stands for the present content of its place."""
    return np.ones(len(given), np.bool_)


def whatever_was_stored(checks: BatchChecks, batch: StepBatch, needed: Int32Array) -> None:
    """Steps begin anywhere in a row's room."""


def free_at_once(copies: dict[int, int]) -> Collection[int]:
    """A page is handed out as soon as no row holds it, even if it must still be copied."""
    return ()


def any_batch(checks: BatchChecks, batch: StepBatch) -> None:
    """Batches are accepted without a check."""


def rows_as_they_were(checks: BatchChecks, change: int, batch: StepBatch, num_staying: int) -> list[int]:
    """An earlier step's rows count as unchanged, even if they have changed."""
    return []


# Draft steps store when they are called.
IN_ANY_ORDER = 1


def full_space(step: DeviceStep, kind: int) -> StepTensors:
    """Layers of all spaces read through the ids of the full space."""
    return step.spaces[0]


def last_new_tokens(batch: StepBatch) -> Int32Array:
    """A step gives back pages that its sequences' last new tokens no longer see."""
    return batch.kv_len


def lengths_on_the_device(sealed_tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[StepBatch], int]:
    """A step is planned for the longest sequence that the last step's captured fill left on the device."""

    def longest(batch: StepBatch) -> int:
        positions = sealed_tensors()["position_of_token"]
        return int(positions.max()) + 1 if positions.numel() else batch.max_kv_len

    return longest


def key_without_length(key: GraphKey) -> GraphKey:
    """Steps of all lengths share the graph of the first of them."""
    return replace(key, max_kv_len=0)


class EpochlessPins(PinnedTensors):
    """Pinned tensors whose epoch does not change when they move."""

    __slots__ = ()

    def bump(self) -> int:
        return self.epoch


def sealed_or_not(seal_number: int) -> bool:
    """Graphs are made even if the memory that they read may move."""
    return True


def last_step_unseen(counts: Sequence[int], number: int) -> None:
    """The counts of the last published step are not checked."""


def wait_for_nothing(fence: Fence) -> None:
    """A ring slot is written again while the device may still have to read it."""


class EchoIgnored:
    """Takes a ring slot back without a check of the device's echo in it."""

    def __call__(self, words: memoryview) -> None:
        """Does nothing."""


def forget_then_launch(launch: Callable[[], None], forget: Callable[[], None]) -> None:
    """A change whose launch raises is lost."""
    forget()
    launch()


def page_zero_is_no_ones(terms: TableTerms) -> TableTerms:
    """Page 0 counts as reserved, even if its owner says otherwise."""
    return terms._replace(null_page=True)


def let_tables_move(reason: str) -> None:
    """A table or pages are replaced, although graphs read the old ones."""


def whatever_was_selected(layer: int, wanted: int, found: int) -> None:
    """A layer attends to the selection that is there, of any layer."""


def over_the_boundaries(counts: Tensor, step: StepTensors) -> Tensor:
    """A selection's counts overwrite the step's sequence boundaries, like a sparse plan that overwrites a dense one."""
    place = step.q_indptr[1:]
    return place[: counts.numel()] if counts.numel() <= place.numel() else counts


def whatever_was_sent(head: RecordHead, kv_len: int, kept: int) -> None:
    """The bytes of a state are taken as they arrived, like those of an engine that copies states without a name."""


def whatever_comes_back(found: Tensor, wanted: Tensor) -> Tensor:
    """A page in host memory is used as it is."""
    return torch.ones(len(found), dtype=torch.bool, device=found.device)


# Id of each safeguard -> its value when it is switched off; the entry point of rocm_attn.guards.registry.WRONG_TWINS.
WRONG_TWINS: Mapping[str, Any] = {
    "pads": leave_pads,
    "store_drops": store_everything,
    "finite_kv": store_as_it_comes,
    "row_zero": write_row_zero,
    "table_tails": leave_tails,
    "v_mask": unmasked_v,
    "cut_points": cut_by_work,
    "capacity": BY_REQUEST_ROWS,
    "child_ranges": all_in_one_place,
    "mask_room": room_for_older_keys,
    "sealed_growth": let_sealed_memory_move,
    "head_weights": let_weights_move,
    "kv_scales": let_weights_move,
    "fresh_selection": whatever_was_selected,
    "selection_place": over_the_boundaries,
    "row_width": past_the_row,
    "slot_in_row": slots_past_the_row,
    "draft_lengths": lengths_of_the_first_step,
    "path_pages": paths_through_page_zero,
    "copy_on_write": ANY_WRITERS,
    "shared_floor": NoFirstWritable,
    "kept_ids": whatever_is_kept_there,
    "stored_tokens": whatever_was_stored,
    "copy_sources": free_at_once,
    "batch_check": any_batch,
    "same_rows": rows_as_they_were,
    "draft_order": IN_ANY_ORDER,
    "layer_space": full_space,
    "window_reach": last_new_tokens,
    "planner_inputs": lengths_on_the_device,
    "graph_key": key_without_length,
    "full_refresh": fill_once,
    "state_lineage": states_as_they_come,
    "sent_state": whatever_was_sent,
    "host_bytes": whatever_comes_back,
    "host_lineage": whatever_comes_back,
    "graph_epoch": EpochlessPins,
    "sealed_capture": sealed_or_not,
    "table_first": table_one_update_late,
    "pending_changes": forget_then_launch,
    "ring_wait": wait_for_nothing,
    "echo_check": EchoIgnored,
    "last_steps": last_step_unseen,
    "length_bounds": lengths_as_they_come,
    "slots_in_table": slots_as_given,
    "null_page": page_zero_is_no_ones,
    "page_format": read_any_format,
    "table_moved": let_tables_move,
}

"""StepMemory: the device memory of steps. A sealed part for steps that graphs replay, an open part for all others.

A step that is not split has one child, itself; the children of a split one have sub-ranges of the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape, StepKind
from rocm_attn.kernels.metadata.index_tensors import IndexTensors
from rocm_attn.kernels.metadata.input_tensors import InputTensors
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.storage import SpaceTable, Table
from rocm_attn.paging.table_view import TableView
from rocm_attn.providers.contract import Need, StepMetadata
from rocm_attn.providers.select import Selection
from rocm_attn.step.buffers import (
    PADDED_BATCH,
    STEP_BUFFERS,
    BufferSpec,
    Capacity,
    FirstOfChild,
    SealedGrowth,
    StepBuffers,
    Unit,
    behind_each_other,
    name_in,
    needed_buffers,
    refuse_growth,
    space_buffers,
)
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.workspace import Workspace


@dataclass(frozen=True, slots=True)
class SpaceStep:
    """A step as the layers of one space see it: they write by its slots and read by its table, and by no other's.

    metadata: what kernels are given
    indices:  what fill reads and writes; the lengths are the same tensors in all spaces
    window_left: previous keys that the furthest-looking layer of the space sees
    """

    metadata: StepMetadata
    indices: IndexTensors
    window_left: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of the buffers of a step, or of a child of a split one, at its padded sizes.

    full:              the step in the full space; its lengths are everybody's
    spaces:            the step in each space, the full one included
    of_kind:           per kind of layer, the step in its space
    schedules:         int32, per kind of layer; kinds with equal schedules share one
    workspace:         float32, shared by the layers, not by the children
    inputs:            what is published: the lengths, shared prefixes, and the token ids, int32 [T]
    positions:         int32 [T], derived, or in a masked step those that came with the mask
    """

    full: SpaceStep
    spaces: tuple[SpaceStep, ...]
    of_kind: tuple[SpaceStep, ...]
    schedules: tuple[Tensor, ...]
    workspace: Tensor
    inputs: InputTensors
    positions: Tensor

    @property
    def metadata(self) -> StepMetadata:
        """The full space's."""
        return self.full.metadata


@dataclass(frozen=True, slots=True)
class StepPart:
    """Memory of its own for steps.

    views: of the buffers at an epoch of theirs, by the plan of the steps that use them
    """

    buffers: StepBuffers
    workspace: Workspace
    views: dict[StepPlan, tuple[int, tuple[DeviceStep, ...]]] = field(default_factory=dict)

    def seal(self) -> None:
        """From now on graphs read the addresses: growing raises."""
        self.buffers.seal()
        self.workspace.seal()


@dataclass(frozen=True, slots=True)
class FormSizes:
    """How large the forms of the table are that other libraries' kernels read past its pages.

    row_width:   pages in a row of the request table
    list_tail:   entries of page_list behind the last sequence's
    table_width: entries in a row of block_table, row_width or more
    row_tokens:  tokens that a row of the request table has room for
    """

    row_width: int
    list_tail: int
    table_width: int
    row_tokens: int

    @classmethod
    def of(cls, selections: Sequence[Selection], table: Table) -> FormSizes:
        """The sizes that serve all kernels of a runtime."""
        ahead = [kernel.row.reads_ahead for s in selections for kernel in s.kernels.values()]
        page_size = selections[0].problem.page_size
        multiple = max(-(-each.table_tokens // page_size) for each in ahead)
        return cls(
            row_width=table.width,
            list_tail=max(each.list_entries for each in ahead),
            table_width=-(-table.width // multiple) * multiple,
            row_tokens=table.width * page_size,
        )

    def buffers(self, need: Need, space: Space = Space.FULL) -> tuple[BufferSpec, ...]:
        """The buffers that a need adds for kernels of a space, at these sizes."""
        width = self.table_width if need is Need.BLOCK_TABLE else self.row_width
        return needed_buffers(need, width, self.list_tail, self.row_tokens, space)


def by_padded_batch(num_rows: int) -> Capacity:
    """Buffers as large as the padded batch, which may exceed the rows of the table."""
    return PADDED_BATCH


@dataclass(frozen=True, slots=True)
class MemoryGuards:
    """The safeguards of the memory of steps.

    capacity:       rows of the table that requests may have -> how large buffers are
    first_of_child: where in a buffer a child of a step begins
    sealed_growth:  called where memory that graphs read would have to move
    """

    capacity: Callable[[int], Capacity] = by_padded_batch
    first_of_child: FirstOfChild = behind_each_other
    sealed_growth: SealedGrowth = refuse_growth


class StepMemory:
    """Buffers and workspace for every step of a model.

    kinds: the layers, whose kernels say what they need
    """

    def __init__(
        self, kinds: LayerKinds, table: Table, device: torch.device, guards: MemoryGuards = MemoryGuards()
    ) -> None:
        self._selections = kinds.selections
        self._capacity = guards.capacity(table.spaces[0].entries.shape[0] - 1)
        self._first_of_child = guards.first_of_child
        self._sealed_growth = guards.sealed_growth
        self._table = table
        self._space_of_kind = kinds.spaces
        self._form_sizes = FormSizes.of(kinds.selections, table)
        self._device = device
        self._sealed, self._open = self.new_part(), self.new_part()

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor for everything that graphs read."""
        workspace = self._sealed.workspace
        return {**self._sealed.buffers.tensors(), "workspace": workspace.view(workspace.capacity)}

    @property
    def num_bytes(self) -> int:
        parts = (self._sealed, self._open)
        return sum(part.buffers.num_bytes + part.workspace.capacity * 4 for part in parts)

    def seal(self, shapes: Sequence[PaddedShape]) -> None:
        """Make room for steps of all these shapes and smaller ones, then fix every address that such steps read."""
        self._make_room(self._sealed, shapes)
        self._sealed.seal()

    def part_for(self, shapes: Sequence[PaddedShape]) -> StepPart:
        """Room for steps of all these shapes and smaller ones, which nothing uses before it is taken."""
        part = self.new_part()
        self._make_room(part, shapes)
        return part

    def take(self, part: StepPart) -> None:
        """Use another part for steps that graphs replay; no graph that reads the old one may be replayed again."""
        self._sealed = part

    def device_steps(self, plan: StepPlan) -> tuple[DeviceStep, ...]:
        """The views of each child of a step, after growing what is too small.

        Raises CapacityExceeded when that is sealed.
        """
        kept = self._sealed.views.get(plan)
        if kept is not None and kept[0] == self._sealed.buffers.epoch:
            return kept[1]
        part = self._sealed if plan.replayable else self._open
        part.buffers.ensure(plan.shape)
        part.workspace.ensure(words_of_children(plan.workspace_words, plan.shape.num_children))
        views = tuple(self._views(plan, part, child) for child in range(plan.shape.num_children))
        if plan.replayable:  # ragged shapes are too many to keep
            part.views[plan] = (part.buffers.epoch, views)
        return views

    def new_part(self) -> StepPart:
        """Memory that grows as steps need it."""
        buffers = StepBuffers(
            self._specs(),
            self._device,
            capacity=self._capacity,
            first_of_child=self._first_of_child,
            sealed_growth=self._sealed_growth,
        )
        return StepPart(buffers, Workspace(self._device, sealed_growth=self._sealed_growth))

    def _make_room(self, part: StepPart, shapes: Sequence[PaddedShape]) -> None:
        for shape in shapes:
            part.buffers.ensure(shape)
            kernels = (selection.kernel(shape.kind).bound for selection in self._selections)
            words = max(kernel.workspace_words(shape.child) for kernel in kernels)
            part.workspace.ensure(words_of_children(words, shape.num_children))

    def _views(self, plan: StepPlan, part: StepPart, child: int) -> DeviceStep:
        def view(name: str) -> Tensor:
            return part.buffers.step_view(name, plan.shape, child)

        words = plan.workspace_words
        spaces = {pages.space: self._space_views(plan, pages, view) for pages in self._table.spaces}
        full = spaces[Space.FULL]
        is_masked = plan.shape.kind is StepKind.MASKED
        return DeviceStep(
            full=full,
            spaces=tuple(spaces.values()),
            of_kind=tuple(spaces[space] for space in self._space_of_kind),
            schedules=tuple(view(_schedule_name(kind)) for kind in plan.schedule_of_kind),
            workspace=part.workspace.view(words, self._first_of_child(child, words)),
            inputs=InputTensors(
                full.metadata.counts,
                full.metadata.table.row_of_seq,
                full.metadata.kv_len,
                full.metadata.q_len,
                full.indices.prefix_len,
                full.indices.group_end,
                view("token_ids"),
                plan.pad_kv_len,
                plan.shape.pad_q_len,
            ),
            positions=view("given_position_of_token") if is_masked else full.indices.position_of_token,
        )

    def _space_views(self, plan: StepPlan, pages: SpaceTable, view: Callable[[str], Tensor]) -> SpaceStep:
        """A step in a space. view: name of a buffer -> what the child uses of it."""

        def ids(name: str) -> Tensor:
            return view(name_in(pages.space, name))

        metadata = StepMetadata(
            shape=plan.shape.child,
            max_q_len=plan.key.max_q_len,
            max_kv_len=plan.key.max_kv_len,
            counts=view("counts"),
            kv_len=view("kv_len"),
            q_len=view("q_len"),
            q_indptr=view("q_indptr"),
            table=TableView(pages.entries, view("row_of_seq"), space=pages.space),
            page_indptr=view("page_indptr"),
            page_list=ids("page_list"),
            last_page_len=view("last_page_len"),
            block_table=ids("block_table").view(-1, self._form_sizes.table_width),
            kv_len_int64=view("kv_len_int64"),
            mask_indptr=view("mask_indptr"),
            mask_words=view("mask_words"),
            mask_positions=view("given_position_of_token"),
            prefix_len=view("prefix_len"),
            group_indptr=view("group_indptr"),
            suffix_kv_len=view("suffix_kv_len"),
            suffix_page=view("suffix_page"),
            slot_of_token=ids("slot_of_token"),
        )
        indices = IndexTensors(
            counts=metadata.counts,
            row_of_seq=metadata.table.row_of_seq,
            kv_len=metadata.kv_len,
            q_len=metadata.q_len,
            table=metadata.table.entries,
            prefix_len=metadata.prefix_len,
            group_end=view("group_end"),
            q_indptr=metadata.q_indptr,
            last_token_of_seq=view("last_token_of_seq"),
            position_of_token=view("position_of_token"),
            slot_of_token=metadata.slot_of_token,
            page_indptr=metadata.page_indptr,
            page_list=metadata.page_list,
            last_page_len=metadata.last_page_len,
            block_table=metadata.block_table,
            kv_len_int64=metadata.kv_len_int64,
            mask_indptr=metadata.mask_indptr,
            group_indptr=metadata.group_indptr,
            suffix_kv_len=metadata.suffix_kv_len,
            suffix_page=metadata.suffix_page,
        )
        return SpaceStep(metadata, indices, pages.window_left)

    def _specs(self) -> list[BufferSpec]:
        specs = list(STEP_BUFFERS)
        for pages in self._table.spaces:
            specs += [] if pages.space is Space.FULL else space_buffers(pages.space)
            # As wide as a row of the table: their size must not depend on the lengths of a step.
            specs += [
                spec for need in self._needs_in(pages.space) for spec in self._form_sizes.buffers(need, pages.space)
            ]
        # Those that hold lengths alone are declared by every space that needs them, and exist once.
        specs = list({spec.name: spec for spec in specs}.values())
        specs += [_schedule_spec(kind, selection) for kind, selection in enumerate(self._selections)]
        return specs

    def _needs_in(self, space: Space) -> list[Need]:
        """What the kernels of a space read besides lengths and the table."""
        selections = [s for s, its in zip(self._selections, self._space_of_kind, strict=True) if its is space]
        needs = {need for s in selections for kernel in s.kernels.values() for need in kernel.row.needs}
        return [need for need in Need if need in needs]


def words_of_children(words: int, num_children: int) -> int:
    """Words of workspace for all children of a step, each of which needs this many."""
    return behind_each_other(num_children - 1, words) + words


def _schedule_name(kind: int) -> str:
    return f"schedule_{kind}"


def _schedule_spec(kind: int, selection: Selection) -> BufferSpec:
    """The schedule of a kind of layer; one buffer serves all kinds of step."""

    def words(shape: PaddedShape) -> int:
        return selection.kernel(shape.kind).bound.schedule_words(shape)

    return BufferSpec(_schedule_name(kind), Unit.WORD, torch.int32, words, pad=0)

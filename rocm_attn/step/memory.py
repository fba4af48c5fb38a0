"""StepMemory: the device memory of steps: metadata and workspace.

Captured steps use a sealed part, whose addresses never change; other steps use an open part, which may grow. A child is
the memory of one part of a step; the children of a split step are sub-ranges of the same buffers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, FIELDS, NO_PARENT, Need, StepTensors, Unit
from rocm_attn.kernels.sparse.arguments import NO_UNIT, Indexing, SparseTokens
from rocm_attn.kernels.sparse.arguments import SelectedKeys as SelectedUnits
from rocm_attn.kernels.states.arguments import LEFT_OUT, StatePlaces
from rocm_attn.paging.index_spaces import Space, space_of_states
from rocm_attn.paging.state_pool import StatePool
from rocm_attn.paging.storage import RowTable, SpaceTable
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, Indexer
from rocm_attn.providers.select import Selection
from rocm_attn.step.buffers import BufferSpec, MemoryGuards, StepBuffers, TableSizes, name_in, of_tokens
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.plan import StepPlan, keep_latest
from rocm_attn.step.prepared import PreparedCalls


class PoolPlaces(NamedTuple):
    """The places of tokens among slots that stand for several tokens each.

    tokens: of a slot
    step:   the step in its space
    slots:  int32 [T], the slot that the token is the last one of, or a dropped slot
    rows:   int32 [T], the last whole slot of its sequence that it sees, -1 if there is none; empty if no layer has rows
            of `tokens` tokens
    """

    tokens: int
    step: StepTensors
    slots: Tensor
    rows: Tensor


class SelectedPlaces(NamedTuple):
    """The places of tokens, and the selection, as attention over it reads them; None if a kind attends to all keys."""

    places: SparseTokens
    selected: SelectedUnits | None


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of the buffers for one step, or for one part (child) of it, at its padded sizes.

    spaces:    the step in each space, in the table's order; tensors that belong to no space are the same in all of them
    of_kind:   per kind of layer, the step in its space: its layers write to its slots and read through its table. If
               their rows stand for several tokens, slots and places are those of rows
    windows:   a mask is placed in each of these, by its window_left. There is one if masked layers have one window or
               none; otherwise they differ in window_start alone
    schedules: int32, per kind of layer; kinds with equal schedules share one
    workspace: float32, shared by the layers, not by the children
    queries:   the sequences that attend, which are the same in every space
    places:    the places of the tokens, the same in every space, for attention over a selection
    selected:  per kind of layer, the place of its selection; None if it attends to all keys
    left:      per kind of layer, the place of the blocks that select() leaves; None if it leaves none
    attended:  per kind of layer, places and selection as its kernel reads them: in its rows
    index_slots: per kind of layer, int32 [T], the slots of its index keys; if it has none, those of tokens
    pools:     places that are derived from those of tokens, for each space and number of tokens that a slot stands for
    of_state:  the step in the space of the states that rows of several tokens are folded from
    states:    the slots that recurrent layers read and write; without sequences if there are no such layers
    parents:   of a draft step, int32 [S, K * steps]: for each draft of the round the number of its parent among them,
               or NO_PARENT; draft step * K + branch is a draft's number. Empty if there are no branches
    prepared:  the layers' calls that were made in these views
    """

    spaces: tuple[StepTensors, ...]
    of_kind: tuple[StepTensors, ...]
    windows: tuple[tuple[StepTensors, int], ...]
    schedules: tuple[Tensor, ...]
    workspace: Tensor
    queries: Queries
    places: SparseTokens
    selected: tuple[SelectedUnits | None, ...]
    left: tuple[SelectedUnits | None, ...]
    attended: tuple[SelectedPlaces, ...]
    index_slots: tuple[Tensor, ...]
    pools: tuple[PoolPlaces, ...]
    of_state: StepTensors
    states: StatePlaces
    parents: Tensor
    prepared: PreparedCalls = field(default_factory=PreparedCalls, init=False, repr=False, compare=False)

    @property
    def tensors(self) -> StepTensors:
        """The step in its first space, for tensors that are the same in all of them."""
        return self.spaces[0]


def _table_sizes(selections: Sequence[Selection], table: RowTable, mask_keys: int, guards: MemoryGuards) -> TableSizes:
    """The sizes that serve all kernels of a runtime."""
    ahead = [kernel.entry.reads_ahead for s in selections for kernel in s.kernels.values()]
    page_size = selections[0].problem.page_size
    multiple = max(-(-each.table_tokens // page_size) for each in ahead)
    return TableSizes(
        row_width=table.width,
        list_tail=max(each.list_entries for each in ahead),
        table_width=round_up(table.width, multiple),
        row_tokens=table.width * page_size,
        mask_keys=mask_keys,
        mask_room=guards.mask_room,
    )


class StepMemory:
    """The buffers of every step of a model.

    kinds:     the layers, whose kernels declare their needs
    mask_keys: keys before the new ones that masks of steps which graphs replay have room for; masks of other steps have
               room for all
    states:    the slots of recurrent layers
    """

    def __init__(
        self,
        kinds: LayerKinds,
        table: RowTable,
        device: torch.device,
        guards: MemoryGuards,
        states: StatePool,
        *,
        mask_keys: int = ALL_KEYS,
    ) -> None:
        self._states = states
        self._selections, self._space_of_kind = kinds.selections, kinds.spaces
        self._pools = pools_of(kinds)
        num_rows = table.spaces[0].entries.shape[0] - 1
        self._guards = replace(guards, capacity=guards.capacity.of_table(num_rows))
        self._table, self._device = table, device
        self._sizes = _table_sizes(kinds.selections, table, mask_keys, guards)
        open_specs = self._specs(replace(self._sizes, mask_keys=ALL_KEYS))
        self._sealed, self._open = self.new_part(), StepBuffers(open_specs, device, self._guards)

    def sealed_tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor for everything that graphs read."""
        return self._sealed.tensors()

    @property
    def epochs(self) -> tuple[int, int]:
        """A pair that changes when views of a step that is not captured may hold memory that was given up."""
        return self._sealed.epoch, self._open.epoch

    def seal(self, shapes: Sequence[PaddedShape]) -> None:
        """Allocates memory for steps of all these shapes and smaller ones, then fixes all addresses that they read."""
        for shape in shapes:
            self._sealed.ensure(shape)
        self._sealed.seal()

    def part_for(self, shapes: Sequence[PaddedShape]) -> StepBuffers:
        """Allocates memory for steps of all these shapes and smaller ones; it is not used before take()."""
        part = self.new_part()
        for shape in shapes:
            part.ensure(shape)
        return part

    def take(self, part: StepBuffers) -> None:
        """Replaces the memory of captured steps; no graph that reads the old memory may be replayed again."""
        self._sealed = part

    def device_steps(self, plan: StepPlan) -> tuple[DeviceStep, ...]:
        """The views of each child of a step, whose buffers grow if needed. They are kept for steps of this plan.

        Raises NeverFits if such a buffer is sealed.
        """
        kept = (self._sealed if plan.replayable else self._open).views
        views: tuple[DeviceStep, ...] | None = kept.get(plan)
        if views is None:
            views = kept[plan] = self.new_device_steps(plan)
        if not plan.replayable:
            keep_latest(kept, plan, views)
        return views

    def new_device_steps(self, plan: StepPlan) -> tuple[DeviceStep, ...]:
        """Like `device_steps`, but for callers that keep the views themselves."""
        part = self._sealed if plan.replayable else self._open
        part.ensure(plan.shape)
        return tuple(self._views(plan, part, child) for child in range(plan.shape.num_children))

    def new_part(self) -> StepBuffers:
        """Memory for steps that graphs replay, which grows on demand."""
        return StepBuffers(self.specs, self._device, self._guards)

    def _views(self, plan: StepPlan, part: StepBuffers, child: int) -> DeviceStep:
        def view(name: str) -> Tensor:
            return part.step_view(name, plan.shape, child)

        spaces = {pages.space: self._space_views(plan, pages, view) for pages in self._table.spaces}
        first, longest = next(iter(spaces.values())), (plan.bounds.max_q_len, plan.bounds.max_kv_len)
        pools = {
            (space, tokens): PoolPlaces(
                tokens, spaces[space], view(_pool_slots_name(space, tokens)), view(_rows_name(space, tokens))
            )
            for space, tokens in self._pools
            if tokens > 1
        }
        windows = _windows_of(self._selections)
        of_window = {window: view(_window_name(window)) for window in windows if window != UNLIMITED_WINDOW}
        of_kind = [
            replace(spaces[space], window_start=of_window[window]) if window in of_window else spaces[space]
            for space, window in zip(self._space_of_kind, windows, strict=True)
        ]
        places = SparseTokens(first.row_of_token, first.last_key_of_token, first.counts[1:2], *longest)
        selections, attended = list[SelectedUnits | None](), []
        for kind, (selection, indexing) in enumerate(
            zip(self._selections, indexings_of(self._selections), strict=True)
        ):
            selected = None if indexing is None else self._selected(plan.shape, view, indexing, first)
            selections.append(selected)
            tokens = selection.problem.row.tokens
            if tokens > 1:
                pool = pools[self._pools[kind]]
                of_kind[kind] = replace(pool.step, slot_of_token=pool.slots, last_key_of_token=pool.rows)
                in_rows = places._replace(position_of_token=pool.rows, max_kv_len=longest[1] // tokens)
                # A chosen unit is a row here, and was a few tokens to the indexer.
                attended.append(SelectedPlaces(in_rows, selected and selected._replace(unit_tokens=1)))
            else:
                attended.append(SelectedPlaces(places, selected))
        return DeviceStep(
            spaces=tuple(spaces.values()),
            of_kind=tuple(of_kind),
            windows=tuple((replace(first, window_start=at), window) for window, at in of_window.items())
            or ((first, ALL_KEYS),),
            schedules=tuple(view(_schedule_name(kind)) for kind in plan.schedule_of_kind),
            workspace=view(WORKSPACE),
            queries=plan.bounds.queries(first),
            places=places,
            attended=tuple(attended),
            selected=tuple(selections),
            left=tuple(_left(plan.shape, view, indexing) for indexing in indexings_of(self._selections)),
            index_slots=tuple(
                pools[space, tokens].slots if tokens > 1 else spaces[space].slot_of_token
                for space, tokens in self._pools
            ),
            pools=tuple(pools.values()),
            of_state=spaces.get(space_of_states(spaces), first),
            states=StatePlaces(
                view(STATE_SOURCE),
                view(STATE_TARGET),
                view(STATE_PENDING),
                first.q_indptr,
                num_tokens=first.row_of_token.shape[0],
                max_q_len=plan.bounds.max_q_len,
            ),
            parents=view(_PARENTS).view(plan.shape.child.num_seqs, -1),
        )

    def _selected(
        self, shape: PaddedShape, view: Callable[[str], Tensor], indexing: Indexing, step: StepTensors
    ) -> SelectedUnits:
        """The place of a selection. All indexers use the same place, so each selection overwrites the one before."""
        num_tokens, sets = shape.child.num_tokens, indexing.sets
        counts = view(SELECTION_COUNTS)[: num_tokens * sets]
        return SelectedUnits(
            view(SELECTION_UNITS)[: num_tokens * sets * indexing.width].view(num_tokens, sets, indexing.width),
            self._guards.selection_place(counts, step).view(num_tokens, sets),
            indexing.unit_tokens,
        )

    def _space_views(self, plan: StepPlan, pages: SpaceTable, view: Callable[[str], Tensor]) -> StepTensors:
        """A step in a space. view: name of a buffer -> the child's part of it"""
        tensors = {name: view(name_in(pages.space, name) if field.of_space else name) for name, field in FIELDS.items()}
        tensors["block_table"] = tensors["block_table"].view(-1, self._sizes.table_width)
        no_window = view(_window_name(UNLIMITED_WINDOW))
        return StepTensors(**tensors, table=pages.entries, window_start=no_window, pads=plan.pads, terms=pages.terms)

    @property
    def specs(self) -> list[BufferSpec]:
        """The buffers of steps that graphs replay."""
        return self._specs(self._sizes)

    def _specs(self, sizes: TableSizes) -> list[BufferSpec]:
        spaces = [pages.space for pages in self._table.spaces]
        needs = {space: self._needs_in(space, tuple(StepKind)) for space in spaces}
        of_drafts = {space: self._needs_in(space, (StepKind.DECODE, StepKind.MASKED)) for space in spaces}
        specs = list(sizes.buffers(needs, of_drafts))
        if any(Need.MASK in each for each in needs.values()):  # branches of drafts need masks
            specs.append(BufferSpec(_PARENTS, Unit.DRAFT, torch.int32, _parents_of_drafts, NO_PARENT, of_round=True))
        windows = set(_windows_of(self._selections)) - {UNLIMITED_WINDOW}
        specs += [BufferSpec(_window_name(each), Unit.TOKEN, torch.int32, _masked_tokens, 0) for each in windows]
        # Memory to which indexers write their selections, one after the other.
        indexings = [indexing for indexing in indexings_of(self._selections) if indexing is not None]
        if indexings:
            units, sets = max(each.sets * each.width for each in indexings), max(each.sets for each in indexings)
            specs.append(of_tokens(SELECTION_UNITS, units, NO_UNIT, of_round=True))
            specs.append(of_tokens(SELECTION_COUNTS, sets, of_round=True))
        # Memory for the blocks that they leave for later choices.
        if leaving := [each for each in indexings if each.candidate_blocks]:
            blocks, sets = (
                max(each.sets * each.candidate_blocks for each in leaving),
                max(each.sets for each in leaving),
            )
            specs.append(of_tokens(LEFT_BLOCKS, blocks, NO_UNIT, of_round=True))
            specs.append(of_tokens(LEFT_COUNTS, sets, of_round=True))
        pools = dict.fromkeys((space, tokens) for space, tokens in self._pools if tokens > 1)
        specs += [of_tokens(_pool_slots_name(*pool)) for pool in pools]
        rows = (s.problem.row.tokens > 1 for s in self._selections)
        of_rows = dict.fromkeys(pool for pool, is_row in zip(self._pools, rows, strict=True) if is_row)
        specs += [of_tokens(_rows_name(*pool), pad=-1) for pool in of_rows]
        for kind, selection in enumerate(self._selections):
            words = partial(_schedule_words, selection)
            specs.append(BufferSpec(_schedule_name(kind), Unit.WORD, torch.int32, words, pad=0))
        if not self._states.is_empty:
            specs += [
                BufferSpec(name, Unit.SEQ, torch.int32, lambda shape: shape.num_seqs, pad)
                for name, pad in _STATE_PLACES.items()
            ]
        words = partial(_workspace_words, self._selections, self._states)
        return [*specs, BufferSpec(WORKSPACE, Unit.WORD, torch.float32, words, 0, of_round=True, exact=True)]

    def _needs_in(self, space: Space, kinds: Collection[StepKind]) -> set[Need]:
        """The needs of a space's kernels for these kinds of steps, apart from lengths and the table."""
        selections = [s for s, its in zip(self._selections, self._space_of_kind, strict=True) if its is space]
        of_kinds = [kernel for s in selections for kind, kernel in s.kernels.items() if kind in set(kinds)]
        return {need for kernel in of_kinds for need in kernel.entry.needs}


def indexings_of(selections: Sequence[Selection]) -> list[Indexing | None]:
    """The indexing of each kind of layer; None if it attends to all keys."""
    indexers = [selection.problem.indexer for selection in selections]
    return [None if isinstance(indexer, AllKeys) else indexer.indexing for indexer in indexers]


def _windows_of(selections: Sequence[Selection]) -> list[int]:
    """window_left per kind of layer; UNLIMITED_WINDOW if the kind does not use masks."""
    problems = [selection.problem for selection in selections]
    return [problem.window_left if problem.custom_mask else UNLIMITED_WINDOW for problem in problems]


def pools_of(kinds: LayerKinds) -> tuple[tuple[Space, int], ...]:
    """Per kind of layer, its space and the tokens per row, or per index key; 1 if it has neither of several tokens."""
    problems = [selection.problem for selection in kinds.selections]
    tokens = [
        max(each.row.tokens, each.indexer.indexing.key_tokens if isinstance(each.indexer, Indexer) else 1)
        for each in problems
    ]
    return tuple(zip(kinds.spaces, tokens, strict=True))


WORKSPACE = "workspace"


def _workspace_words(selections: Sequence[Selection], states: StatePool, shape: PaddedShape) -> int:
    """Words of scratch memory that layers' kernels use one after the other: the largest need, content undefined.

    The draft steps of a round run one after the other and share it. Halves may run at once and have a part each.
    """
    of_kinds = (selection.kernel(shape.kind).bound.workspace_words(shape) for selection in selections)
    return max(states.workspace_words(shape), *of_kinds)


# The tensors of StatePlaces, and their pads.
STATE_SOURCE, STATE_TARGET, STATE_PENDING = "state_source", "state_target", "state_pending"
_STATE_PLACES = {STATE_SOURCE: LEFT_OUT, STATE_TARGET: 0, STATE_PENDING: 0}
_PARENTS = "draft_parents"  # for each draft of a round, its parent
SELECTION_UNITS, SELECTION_COUNTS = "selection_units", "selection_counts"
LEFT_BLOCKS, LEFT_COUNTS = "left_blocks", "left_block_counts"


def _left(shape: PaddedShape, view: Callable[[str], Tensor], indexing: Indexing | None) -> SelectedUnits | None:
    """The place of the blocks that select() leaves. All indexers use the same place."""
    if indexing is None or not indexing.candidate_blocks:
        return None
    num_tokens, sets, blocks = shape.child.num_tokens, indexing.sets, indexing.candidate_blocks
    units, counts = view(LEFT_BLOCKS)[: num_tokens * sets * blocks], view(LEFT_COUNTS)[: num_tokens * sets]
    return SelectedUnits(units.view(num_tokens, sets, blocks), counts.view(num_tokens, sets), indexing.block_keys)


def _parents_of_drafts(shape: PaddedShape) -> int:
    drafts = shape.drafts
    return shape.num_seqs * drafts.tokens if isinstance(drafts, Drafts) and drafts.branches > 1 else 0


def _window_name(window_left: int) -> str:
    """The name of the buffer with the first keys of new tokens' windows, in masked steps."""
    return f"window_start_{window_left}"


def _masked_tokens(shape: PaddedShape) -> int:
    return shape.num_tokens if shape.kind.extra is Extra.MASK else 0


def _pool_slots_name(space: Space, key_tokens: int) -> str:
    """The name of the buffer with the slots of index keys and rows that stand for key_tokens tokens each."""
    return name_in(space, f"slot_of_pool_{key_tokens}")


def _rows_name(space: Space, tokens: int) -> str:
    """The name of the buffer with the last row of `tokens` tokens that each token sees."""
    return name_in(space, f"row_of_{tokens}_tokens")


def _schedule_name(kind: int) -> str:
    return f"schedule_{kind}"


def _schedule_words(selection: Selection, shape: PaddedShape) -> int:
    """The size of the schedule of a kind of layer; one buffer serves all kinds of step."""
    return selection.kernel(shape.kind).bound.schedule.words(shape)

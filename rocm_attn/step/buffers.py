"""StepBuffers: the tensors of a step, and the workspace of its kernels, at fixed addresses and reached by name.

Each buffer declares its unit, dtype, size and padding value. It grows when a padded step exceeds it, because a padded
batch may have more sequences than the table has rows. After seal() no buffer moves, so graphs may read them.
The parts of a split step use consecutive sub-ranges of the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.padding import PaddedShape, room_for_cells
from rocm_attn.batch.step_kinds import Extra
from rocm_attn.errors import NeverFits
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.metadata.slot_layout import COUNT_WORDS
from rocm_attn.kernels.metadata.step_tensors import FIELDS, Field, Need, StepTensors, Unit
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.devices import memory_of
from rocm_attn.paging.index_spaces import Space


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer.

    elements: padded shape of a child -> elements that a child of that shape uses
    pad:      value of an element that belongs to no real sequence, token or page
    of_round: True if all steps of a round of drafts share one
    exact:    True if no more is allocated than is needed
    """

    name: str
    unit: Unit
    dtype: torch.dtype
    elements: Callable[[PaddedShape], int]
    pad: int
    of_round: bool = False
    exact: bool = False

    def children(self, shape: PaddedShape) -> int:
        """Parts of a buffer that a step of this shape uses, one after the other."""
        return shape.num_halves if self.of_round else shape.num_children

    def part_of(self, shape: PaddedShape, child: int) -> int:
        """The index of the part that a child uses."""
        return child // shape.drafts.steps if self.of_round else child


def name_in(space: Space, name: str) -> str:
    """The name of a buffer whose entries are pages or slots of a space."""
    return name if space == Space.FULL else f"{space.value}_{name}"


# The extra input of a step that uses the tensors of a need; a need that is not listed has tensors in every step.
_EXTRA_OF_NEED = {Need.MASK: Extra.MASK, Need.PREFIXES: Extra.PREFIXES}


def room_for_mask(shape: PaddedShape, mask_keys: int) -> int:
    """Cells of a mask, with those between new tokens. A round's drafts have cells for each other, and for no prefix."""
    if isinstance(shape.drafts, Drafts):
        return shape.num_tokens * shape.drafts.tokens
    return room_for_cells(shape.num_tokens, mask_keys)


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Sizes of the forms of the table; other libraries' kernels read past its pages.

    row_width:   pages in a row of the request table
    list_tail:   entries of page_list after the last sequence's, for kernels that read ahead
    table_width: entries in a row of block_table, row_width or more
    row_tokens:  tokens that a row of the request table has room for
    mask_keys:   keys before the new ones that masks have cells for, at most
    mask_room:   padded shape of a child, and mask_keys -> cells of the mask of a step
    """

    row_width: int
    list_tail: int
    table_width: int
    row_tokens: int
    mask_keys: int
    mask_room: Callable[[PaddedShape, int], int] = room_for_mask

    def elements(self, field: Field, shape: PaddedShape) -> int:
        """Elements of a tensor of a step of this shape, or of a child of one."""
        extra, tokens = shape.kind.extra, shape.num_tokens
        if any(_EXTRA_OF_NEED.get(need, extra) is not extra for need in field.needs):
            return 0
        return {
            Unit.COUNT: COUNT_WORDS,
            Unit.SEQ: shape.num_seqs,
            Unit.SEQ_BOUNDARY: shape.num_seqs + 1,
            Unit.TOKEN: tokens,
            # A padded sequence may have pages too.
            Unit.LIST_ENTRY: shape.num_seqs * self.row_width + self.list_tail,
            Unit.TABLE_ENTRY: shape.num_seqs * self.table_width,
            Unit.MASK_WORD: -(-min(self.mask_room(shape, self.mask_keys), tokens * self.row_tokens) // 32),
        }[field.unit]

    def buffers(
        self, needs_of_space: Mapping[Space, Collection[Need]], needs_of_drafts: Mapping[Space, Collection[Need]]
    ) -> tuple[BufferSpec, ...]:
        """The buffers of steps whose kernels, in each space, have these needs; those of draft steps may have fewer.

        Buffers of lengths exist only once, for any number of spaces.
        """
        specs: dict[str, BufferSpec] = {}
        for space, needs in needs_of_space.items():
            for name, field in FIELDS.items():
                if not field.needs <= set(needs):
                    continue
                elements: Callable[[PaddedShape], int] = partial(self.elements, field)
                if not field.needs <= set(needs_of_drafts[space]):
                    elements = partial(_but_for_drafts, elements)
                named = name_in(space, name) if field.of_space else name
                specs[named] = BufferSpec(named, field.unit, field.dtype, elements, field.pad, field.of_round)
        return tuple(specs.values())


def _but_for_drafts(elements: Callable[[PaddedShape], int], shape: PaddedShape) -> int:
    return 0 if isinstance(shape.drafts, Drafts) else elements(shape)


def of_tokens(name: str, per_token: int = 1, pad: int = 0, *, of_round: bool = False) -> BufferSpec:
    """A buffer with per_token int32 for each token."""
    return BufferSpec(name, Unit.TOKEN, torch.int32, lambda shape: per_token * shape.num_tokens, pad, of_round)


def one_after_another(child: int, elements: int) -> int:
    """The first of a child's elements: every child has a sub-range of its own."""
    # Whole 16-byte units of 4-byte elements, because Triton compiles a kernel again when a pointer's alignment changes.
    return child * round_up(elements, 4)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of buffers and of their views: computed from the padded batch, and never cut short."""

    def of_table(self, num_rows: int) -> Capacity:
        """The capacity for steps over a table of num_rows rows, without the reserved one; batches may be larger."""
        return self

    def elements(self, spec: BufferSpec, shape: PaddedShape) -> int:
        """Elements that a buffer must hold for a step of this shape, all of its children together."""
        used = spec.elements(shape.child)
        return one_after_another(spec.children(shape) - 1, used) + used

    def allocated(self, elements: int) -> int:
        """Elements to allocate if `elements` are needed."""
        # A power of two, so that a batch that grows by one sequence per step does not reallocate each time.
        return next_power_of_2(elements)

    def view(self, name: str, tensor: Tensor, first: int, elements: int) -> Tensor:
        """A view of elements of a buffer. Raises NeverFits past its end, where a slice would truncate silently."""
        if first + elements > tensor.numel():
            raise NeverFits(f"{first + elements} elements of {name} were requested, and it holds {tensor.numel()}")
        return tensor[first : first + elements]


PADDED_BATCH = Capacity()


def refuse_growth(reason: str) -> None:
    """Refuses to grow sealed memory, which must not move. Raises NeverFits."""
    raise NeverFits(reason)


@dataclass(frozen=True, slots=True)
class MemoryGuards:
    """The safeguards of the memory of steps.

    capacity:       sizes of buffers and of their views
    first_of_child: child, elements of each -> its first element in a buffer
    sealed_growth:  called with a sentence if memory that graphs read would have to move
    selection_place: memory for the counts of a selection, the step -> memory that the counts are written to
    mask_room:      as of TableSizes
    """

    capacity: Capacity = PADDED_BATCH
    first_of_child: Callable[[int, int], int] = one_after_another
    sealed_growth: Callable[[str], None] = refuse_growth
    selection_place: Callable[[Tensor, StepTensors], Tensor] = lambda counts, step: counts
    mask_room: Callable[[PaddedShape, int], int] = room_for_mask


ALL_MEMORY_GUARDS = MemoryGuards()


class StepBuffers:
    """The buffers of a runtime; graphs own a sealed instance, steps above the largest graph an open one.

    epoch: a number that changes when a buffer moves
    views: views that its user has made of the buffers, by the user's keys; dropped when a buffer moves
    """

    def __init__(
        self, specs: Sequence[BufferSpec], device: torch.device, guards: MemoryGuards = ALL_MEMORY_GUARDS
    ) -> None:
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), f"a buffer is declared twice: {names}"
        self._specs: Mapping[str, BufferSpec] = {spec.name: spec for spec in specs}
        self._tensors = {spec.name: torch.empty(0, dtype=spec.dtype, device=device) for spec in specs}
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)
        self._device, self._guards = device, guards
        self.sealed, self.epoch = False, 0
        self.views: dict[Any, Any] = {}

    def seal(self) -> None:
        """Fixes the addresses, because graphs read them: growing raises from now on."""
        self.sealed = True

    def ensure(self, shape: PaddedShape) -> None:
        """Makes room for a step of this shape in every buffer; each grows only if its own elements do not fit.

        Raises NeverFits when sealed, and for more than the device has; nothing has moved then.
        """
        short = [
            (spec, needed)
            for spec in self._specs.values()
            if (needed := self._guards.capacity.elements(spec, shape)) > self._tensors[spec.name].numel()
        ]
        if not short:
            return
        if self.sealed:
            spec, needed = short[0]
            self._guards.sealed_growth(
                f"{shape.num_seqs} sequences with {shape.num_tokens} tokens need {needed} elements of {spec.name} "
                f"({spec.unit.value}) and captured graphs hold {self._tensors[spec.name].numel()}; raise the "
                "largest of capture_sizes before the first capture"
            )
        num_bytes = sum(needed * spec.dtype.itemsize for spec, needed in short)
        # A host without memory ends the process instead of raising. A GPU raises after it has allocated a part, which
        # other processes then lack.
        if num_bytes > (has := memory_of(self._device)):
            raise NeverFits(
                f"a step of {shape.num_seqs} sequences and {shape.num_tokens} tokens, pads included, needs {num_bytes} "
                f"bytes for its lengths and tables, and {self._device} has {has}; pad to less"
            )
        with torch.inference_mode(False):  # memory that is made in that mode cannot be written outside of it
            grown = {spec.name: self._new_buffer(spec, needed) for spec, needed in short}
        # All or none, and old views are dropped first: an allocation may fail, and an interrupt may come.
        self.epoch += 1
        self.views.clear()
        self._tensors = {**self._tensors, **grown}

    def _new_buffer(self, spec: BufferSpec, needed: int) -> Tensor:
        elements = needed if spec.exact else self._guards.capacity.allocated(needed)
        return torch.full((elements,), spec.pad, dtype=spec.dtype, device=self._device)

    def step_view(self, name: str, shape: PaddedShape, child: int = 0) -> Tensor:
        """The part of a buffer that a child of a step of this shape uses; empty for a buffer that no kernel needs.

        Raises NeverFits past the buffer's end.
        """
        spec = self._specs.get(name)
        if spec is None:
            return self._nothing
        elements = spec.elements(shape.child)
        first = self._guards.first_of_child(spec.part_of(shape, child), elements)
        return self._guards.capacity.view(name, self._tensors[name], first, elements)

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> whole buffer, for fingerprints and poison tests."""
        return dict(self._tensors)

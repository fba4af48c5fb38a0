"""StepBuffers: every index tensor of a step, at a fixed address, reached by name.

Each buffer declares its unit, dtype, size and pad value, and grows by itself when a padded step exceeds what it holds:
the padded batch may be larger than the pool's rows. After seal() nothing moves any more. The children of a split step
use sub-ranges of the same buffers, one behind the other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PAD_ROW, PaddedShape, StepKind, round_up
from rocm_attn.errors import CapacityExceeded
from rocm_attn.paging.index_spaces import Space
from rocm_attn.providers.contract import Need


class Unit(enum.Enum):
    """What one element of a buffer stands for."""

    SEQ = "sequence"
    SEQ_BOUNDARY = "sequence boundary (one more than sequences)"
    TOKEN = "token"
    PAGE = "page of a sequence"
    WORD = "word of a schedule"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer.

    elements: padded shape of a child -> elements that a child of that shape uses
    pad:      what an element holds where no real sequence, token or page is
    """

    name: str
    unit: Unit
    dtype: torch.dtype
    elements: Callable[[PaddedShape], int]
    pad: int


def _num_seqs(shape: PaddedShape) -> int:
    return shape.num_seqs


def _num_boundaries(shape: PaddedShape) -> int:
    return shape.num_seqs + 1


def _num_tokens(shape: PaddedShape) -> int:
    return shape.num_tokens


def name_in(space: Space, name: str) -> str:
    """The name of a buffer whose entries are pages or slots of a space."""
    return name if space is Space.FULL else f"{space.value}_{name}"


def space_buffers(space: Space) -> tuple[BufferSpec, ...]:
    """The buffers that every step has for each space."""
    return (BufferSpec(name_in(space, "slot_of_token"), Unit.TOKEN, torch.int32, _num_tokens, pad=0),)


STEP_BUFFERS: tuple[BufferSpec, ...] = (
    BufferSpec("counts", Unit.WORD, torch.int32, lambda shape: 4, pad=0),
    BufferSpec("row_of_seq", Unit.SEQ, torch.int32, _num_seqs, pad=PAD_ROW),
    BufferSpec("kv_len", Unit.SEQ, torch.int32, _num_seqs, pad=0),
    BufferSpec("q_len", Unit.SEQ, torch.int32, _num_seqs, pad=0),
    BufferSpec("token_ids", Unit.TOKEN, torch.int32, _num_tokens, pad=0),
    BufferSpec("q_indptr", Unit.SEQ_BOUNDARY, torch.int32, _num_boundaries, pad=0),
    BufferSpec("last_token_of_seq", Unit.SEQ, torch.int32, _num_seqs, pad=0),
    BufferSpec("position_of_token", Unit.TOKEN, torch.int32, _num_tokens, pad=0),
    *space_buffers(Space.FULL),
)


def needed_buffers(
    need: Need, table_width: int, list_tail: int = 0, row_tokens: int = 0, space: Space = Space.FULL
) -> tuple[BufferSpec, ...]:
    """The buffers that a kernel's need adds, for a kernel of layers in a space.

    Those that hold lengths alone are the same in all spaces.

    table_width: pages in a row of the request table, or of the dense table where that is wider
    list_tail:   entries of the page list behind those of the last sequence, for kernels that read ahead
    row_tokens:  tokens that a row of the request table has room for
    """

    def mask_words(shape: PaddedShape) -> int:
        return -(-shape.num_tokens * row_tokens // 32) if shape.kind is StepKind.MASKED else 0

    def masked_tokens(shape: PaddedShape) -> int:
        return shape.num_tokens if shape.kind is StepKind.MASKED else 0

    def shared_seqs(shape: PaddedShape) -> int:
        return shape.num_seqs if shape.kind is StepKind.SHARED else 0

    def shared_boundaries(shape: PaddedShape) -> int:
        return shape.num_seqs + 1 if shape.kind is StepKind.SHARED else 0

    def num_pages(shape: PaddedShape) -> int:
        return shape.num_seqs * table_width  # a padded sequence may hold pages too

    return {
        Need.PAGE_LIST: (
            BufferSpec("page_indptr", Unit.SEQ_BOUNDARY, torch.int32, _num_boundaries, pad=0),
            BufferSpec(
                name_in(space, "page_list"), Unit.PAGE, torch.int32, lambda shape: num_pages(shape) + list_tail, pad=0
            ),
            BufferSpec("last_page_len", Unit.SEQ, torch.int32, _num_seqs, pad=1),
        ),
        Need.BLOCK_TABLE: (BufferSpec(name_in(space, "block_table"), Unit.PAGE, torch.int32, num_pages, pad=0),),
        Need.KV_LEN_INT64: (BufferSpec("kv_len_int64", Unit.SEQ, torch.int64, _num_seqs, pad=0),),
        Need.MASK_INDPTR: (BufferSpec("mask_indptr", Unit.SEQ_BOUNDARY, torch.int64, _num_boundaries, pad=0),),
        Need.MASK_WORDS: (
            BufferSpec("mask_words", Unit.WORD, torch.int32, mask_words, pad=0),
            BufferSpec("given_position_of_token", Unit.TOKEN, torch.int32, masked_tokens, pad=0),
        ),
        Need.PREFIXES: (
            BufferSpec("prefix_len", Unit.SEQ, torch.int32, shared_seqs, pad=0),
            BufferSpec("group_end", Unit.SEQ, torch.int32, shared_seqs, pad=0),
            BufferSpec("group_indptr", Unit.SEQ_BOUNDARY, torch.int32, shared_boundaries, pad=0),
            BufferSpec("suffix_kv_len", Unit.SEQ, torch.int32, shared_seqs, pad=0),
            BufferSpec("suffix_page", Unit.SEQ, torch.int32, shared_seqs, pad=0),
        ),
    }[need]


# (child, elements of a child) -> the first element of the child's sub-range
FirstOfChild = Callable[[int, int], int]


def behind_each_other(child: int, elements: int) -> int:
    """Every child has a sub-range of its own."""
    # Whole 16-byte units of 4-byte elements: Triton compiles a kernel anew when a pointer's alignment changes.
    return child * round_up(elements, 4)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How large buffers are and what a view of one is: sized by the padded batch, and never cut short."""

    def elements(self, spec: BufferSpec, shape: PaddedShape) -> int:
        """Elements that a buffer must hold for a step of this shape, all of its children together."""
        used = spec.elements(shape.child)
        return behind_each_other(shape.num_children - 1, used) + used

    def allocated(self, elements: int) -> int:
        """Elements to allocate where this many are needed."""
        # A power of two, so that a batch that grows by one sequence a step does not reallocate each time.
        return 1 << (elements - 1).bit_length()

    def view(self, name: str, tensor: Tensor, first: int, elements: int) -> Tensor:
        """Elements of a buffer. Raises CapacityExceeded past its end: a slice would truncate silently."""
        if first + elements > tensor.numel():
            raise CapacityExceeded(f"{first + elements} elements of {name} were asked for, it holds {tensor.numel()}")
        return tensor[first : first + elements]


PADDED_BATCH = Capacity()

# Called with a sentence when sealed memory would have to move.
SealedGrowth = Callable[[str], None]


def refuse_growth(reason: str) -> None:
    """Sealed memory stays where it is. Raises CapacityExceeded."""
    raise CapacityExceeded(reason)


class StepBuffers:
    """The buffers of a runtime; graphs own a sealed instance, steps above the largest graph an open one."""

    def __init__(
        self,
        specs: Sequence[BufferSpec],
        device: torch.device,
        *,
        capacity: Capacity = PADDED_BATCH,
        first_of_child: FirstOfChild = behind_each_other,
        sealed_growth: SealedGrowth = refuse_growth,
    ) -> None:
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), f"a buffer is declared twice: {names}"
        self._specs: Mapping[str, BufferSpec] = {spec.name: spec for spec in specs}
        self._tensors = {spec.name: torch.empty(0, dtype=spec.dtype, device=device) for spec in specs}
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)
        self._device = device
        self._capacity = capacity
        self._first_of_child = first_of_child
        self._sealed_growth = sealed_growth
        self._sealed = False
        self.epoch = 0

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def seal(self) -> None:
        """From now on graphs read the addresses: growing raises."""
        self._sealed = True

    def ensure(self, shape: PaddedShape) -> None:
        """Let every buffer hold a step of this shape; each grows by itself, and only when its own elements do not fit.

        Raises CapacityExceeded when sealed; nothing has moved then.
        """
        short = [
            (spec, needed)
            for spec in self._specs.values()
            if (needed := self._capacity.elements(spec, shape)) > self._tensors[spec.name].numel()
        ]
        if not short:
            return
        if self._sealed:
            spec, needed = short[0]
            self._sealed_growth(
                f"{shape.num_seqs} sequences with {shape.num_tokens} tokens need {needed} elements of {spec.name} "
                f"({spec.unit.value}) and captured graphs hold {self._tensors[spec.name].numel()}; "
                "raise the largest of capture_sizes before the first capture"
            )
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
            grown = {
                spec.name: torch.full(
                    (self._capacity.allocated(needed),), spec.pad, dtype=spec.dtype, device=self._device
                )
                for spec, needed in short
            }
        # All or none, and views of the old ones are void before they are: an allocation may fail, and so may we.
        self.epoch += 1
        self._tensors = {**self._tensors, **grown}

    def view(self, name: str, elements: int, first: int = 0) -> Tensor:
        """The elements of a buffer from the first one on. Raises CapacityExceeded past its end."""
        return self._capacity.view(name, self._tensors[name], first, elements)

    def step_view(self, name: str, shape: PaddedShape, child: int = 0) -> Tensor:
        """What a child of a step of this shape uses of a buffer; empty for a buffer that no kernel needs."""
        spec = self._specs.get(name)
        if spec is None:
            return self._nothing
        elements = spec.elements(shape.child)
        return self.view(name, elements, self._first_of_child(child, elements))

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> whole buffer, for fingerprints and poison tests."""
        return dict(self._tensors)

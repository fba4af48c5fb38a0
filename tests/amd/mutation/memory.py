"""The places of a check's tensors: amid poison, or right before memory that ends the process when it is touched."""

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

# Elements of poison on either side: more than a kernel goes wrong by when one mask is missing.
_MARGIN = 1 << 14
_PROT_NONE = 0
# Bytes that a tensor is followed by: more than a block of the kernels that read long rows has.
_FENCE = 4 * mmap.PAGESIZE


@dataclass
class Memory(ABC):
    """Tensors and their surroundings, which no kernel may write: NaN around floats, POISON around integers."""

    POISON: ClassVar[int]
    _placed: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def put(self, values: Tensor) -> Tensor:
        """A copy of values with the same strides and gaps; nothing of it lies after its last element."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
        arena, first = self._arena(span, values.dtype)
        if values.is_floating_point():
            arena.fill_(float("nan"))
        else:
            arena.fill_(self.POISON & torch.iinfo(values.dtype).max)
        arena[first : first + span] = values.as_strided((span,), (1,), values.storage_offset())
        is_element = torch.zeros(arena.shape, dtype=torch.bool)
        is_element.as_strided(values.shape, values.stride(), first).fill_(True)
        self._placed.append((arena, arena.clone(), is_element))
        return arena.as_strided(values.shape, values.stride(), arena.storage_offset() + first)

    def assert_surroundings_untouched(self) -> None:
        """Nothing was written between or around the elements of any tensor."""
        for arena, before, is_element in self._placed:
            changed = (arena != before) & ~(arena.isnan() & before.isnan())
            assert not (changed & ~is_element).any(), "something was written past the end of a tensor or of a row"

    @abstractmethod
    def _arena(self, span: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A flat tensor that holds span elements, and where the first of them goes."""


class Poisoned(Memory):
    """A read past a tensor's end finds NaN, or a number that might be a row, a page, a length or a count."""

    POISON = 1

    def _arena(self, span: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        return torch.empty(_MARGIN + span + _MARGIN, dtype=dtype), _MARGIN


class Fenced(Memory):
    """A read past a tensor's end ends the process, even if its value would not have mattered.

    A value read before a tensor's start leads to unmapped memory if it is used as an index.
    """

    POISON = 0x7F7F7F7F

    def _arena(self, span: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        # At least one page: what has no element lies at its end.
        usable = max(1, -(-span * dtype.itemsize // mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = mmap.mmap(-1, usable + _FENCE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        libc = ctypes.CDLL(None, use_errno=True)
        fence = ctypes.c_void_p(start + usable)
        assert libc.mprotect(fence, ctypes.c_size_t(_FENCE), _PROT_NONE) == 0, ctypes.get_errno()
        elements = usable // dtype.itemsize
        return torch.frombuffer(pages, dtype=dtype, count=elements), elements - span


GARBAGE = -0x7F7F7F7F
PAGE_SIZE = 3


def ints(values: Sequence[int]) -> Tensor:
    """int32."""
    return torch.tensor(values, dtype=torch.int32)


def garbage(count: int) -> Tensor:
    """int32 words that were never written."""
    return torch.full((count,), GARBAGE, dtype=torch.int32)


def gapped(*shape: int) -> Tensor:
    """Random rows with NaN between them."""
    memory = torch.full((*shape[:-1], shape[-1] + 8), float("nan"))
    return memory[..., : shape[-1]].copy_(torch.randn(*shape))

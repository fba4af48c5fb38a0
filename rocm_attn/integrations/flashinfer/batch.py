"""Values that make up a plan, and those that one call brings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.integrations.flashinfer.lengths import Lengths
from rocm_attn.kernels.tuning.tiles import next_power_of_2


@dataclass(frozen=True, slots=True)
class Room:
    """The size of the largest batch.

    num_seqs, num_tokens: of a batch
    num_entries:          page indices of a batch
    width:                pages of a sequence
    """

    num_seqs: int
    num_tokens: int
    num_entries: int
    width: int

    def holds(self, other: Room) -> bool:
        """True if a batch that needs `other` fits."""
        mine, its = (tuple(getattr(room, name) for name in self.__slots__) for room in (self, other))
        return all(has >= needs for has, needs in zip(mine, its, strict=True))

    def grown(self, other: Room) -> Room:
        """Returns room for both, rounded up to powers of two."""
        return Room(*(next_power_of_2(max(getattr(self, name), getattr(other, name), 1)) for name in self.__slots__))


NO_ROOM = Room(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch.

    pages:    page indices, sequence after sequence; the last list ends at num_entries
    page_ids: the smallest and the largest of them
    mask:     bool [cells], the keys that new tokens see, in place of causality
    """

    lengths: Lengths
    pages: Tensor
    num_entries: int
    page_ids: tuple[int, int]
    mask: Tensor | None = None

    def room(self, page_size: int) -> Room:
        """Returns the room that the batch needs."""
        width = max(1, -(-self.lengths.max_kv_len // page_size))
        return Room(self.lengths.num_seqs, self.lengths.num_tokens, self.num_entries, width)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs and outputs of one call.

    q:        [tokens, q_heads, head_dim]
    k, v:     pages, [pages, page_size, kv_heads, head_dim | v_head_dim]
    out, lse: as in ExternalAttention.layers.attend; lse receives the natural log, and -inf for tokens that see nothing
    sinks:    float [q_heads], if the geometry has sinks
    k_scale, v_scale: float32 [1], for pages in eight bits
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

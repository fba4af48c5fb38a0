"""Checkpoints of recurrent states, for prefix caching: after which tokens one is taken, and how many there are."""

from dataclasses import dataclass, replace

from rocm_attn.paging.state_pool import SLOTS_OF_ROW, RecurrentLayers, slot_bytes

# Copying a checkpoint reads and writes a state, as each token of a sequence does. At this spacing copies add less than
# 2 %.
_SPACING = 64


def spacing_of(page_size: int, chunk: int) -> int:
    """Tokens between two checkpoints of a sequence: whole pages, and at most a chunk if a page is no longer.

    chunk: most new tokens of a step
    """
    return max(1, min(_SPACING, chunk) // page_size) * page_size


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory of recurrent layers' states next to the pages of a pool.

    recurrent:  the layers; their spacing is set, and checkpoints are counted here alone
    num_rows:   rows of the request table, the reserved row 0 included
    page_bytes: of a page of K and V, over all layers
    page_size:  its tokens
    """

    recurrent: RecurrentLayers
    num_rows: int
    page_bytes: int
    page_size: int

    @property
    def of_each_request(self) -> int:
        """Bytes of the states of a request that runs."""
        return SLOTS_OF_ROW * slot_bytes(self.recurrent)

    @property
    def of_rows(self) -> int:
        """Bytes of the states of all rows."""
        return self.num_rows * self.of_each_request

    def of_checkpoints(self, num: int) -> int:
        return num * slot_bytes(self.recurrent)

    def checkpoints(self, kv_bytes: int) -> int:
        """The checkpoints next to pages of kv_bytes: as many bytes, and no more than one after each spacing."""
        return kv_bytes // self._least_kv_bytes if self.recurrent.layers else 0

    def with_checkpoints(self, kv_bytes: int) -> RecurrentLayers:
        """The layers, with the checkpoints next to pages of kv_bytes."""
        return replace(self.recurrent, checkpoints=self.checkpoints(kv_bytes))

    def kv_bytes(self, num_bytes: int) -> int:
        """Memory for K and V, if they and checkpoints() together have num_bytes."""
        if not self.recurrent.layers:
            return num_bytes
        least = self._least_kv_bytes
        return num_bytes * least // (least + slot_bytes(self.recurrent))

    @property
    def _least_kv_bytes(self) -> int:
        """Bytes of K and V for each checkpoint."""
        return max(slot_bytes(self.recurrent), self.recurrent.spacing // self.page_size * self.page_bytes)

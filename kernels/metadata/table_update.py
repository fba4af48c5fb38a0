"""Writes changed cells of a request table. Set semantics: applying an update twice is harmless."""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch
from rocm_attn.kernels.metadata.slot_layout import UPDATE_WORDS

_BLOCK = 256


@at_any_alignment
@triton.jit(do_not_specialize=["table_stride", "num_updates"])
def _table_update_kernel(updates, table, table_stride, num_updates, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < num_updates
    row = tl.load(updates + WORDS * i, mask=live, other=0).to(tl.int64)
    column = tl.load(updates + WORDS * i + 1, mask=live, other=0)
    entry = tl.load(updates + WORDS * i + 2, mask=live, other=0)
    # Row 0 is reserved: an update of it would send every padded sequence into live memory. Lanes past the last update
    # hold it too.
    tl.store(table + row * table_stride + column, entry, mask=row > 0)


_update = RepeatedLaunch(_table_update_kernel)


def launch_table_update(updates: Tensor, table: Tensor, *, num_updates: int) -> None:
    """Sets table[row, column] = entry for the first num_updates (row, column, entry) triples.

    updates: int32 words in pinned host memory (or device memory); triples, no cell named twice
    table:   int32 [rows, width], written in place, except for row 0
    """
    blocks = -(-num_updates // _BLOCK)
    if blocks:
        _update(
            table.device,
            (blocks, 1, 1),
            updates,
            table,
            table.stride(0),
            num_updates,
            UPDATE_WORDS,
            _BLOCK,
            num_warps=4,
        )

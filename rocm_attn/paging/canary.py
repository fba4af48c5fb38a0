"""The canary: reserved memory must stay zero. Padded sequences read row 0 of the table and, through it, page 0."""

from __future__ import annotations

from collections.abc import Iterable

from rocm_attn.paging.index_spaces import RESERVED_PAGE, RESERVED_ROW
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.paging.request_table import RequestTable


def what_was_written(table: RequestTable, pool: HybridKVPool, layers: Iterable[int]) -> str:
    """Says which of row 0 of the table and page 0 of these layers is not zero any more; empty if all are.

    Waits for the device.
    """
    written = [
        "row 0 of the request table" + (f" in the {pages.space.name} space" if len(table.spaces) > 1 else "")
        for pages in table.spaces
        if bool(pages.entries[RESERVED_ROW].any())
    ]
    for layer in layers:
        if not pool.layer(layer).is_zero(RESERVED_PAGE):
            written.append(f"page 0 of layer {layer}")
        if pool.has_index(layer) and not pool.index(layer).is_zero(RESERVED_PAGE):
            written.append(f"index page 0 of layer {layer}")
        if pool.has_state(layer) and not pool.state(layer).is_zero(RESERVED_PAGE):
            written.append(f"state page 0 of layer {layer}")
    return f"{', '.join(written)} must stay zero and was written" if written else ""

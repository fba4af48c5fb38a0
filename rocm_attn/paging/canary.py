"""The canary: a check that reserved memory is still zero. Padded sequences read row 0 of the table, and so page 0."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rocm_attn.paging.index_spaces import RESERVED_PAGE, RESERVED_ROW
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.paging.request_table import RequestTable


def what_was_written(table: RequestTable, pool: HybridKVPool, layers: Iterable[int]) -> str:
    """Says which of row 0 of the table and page 0 of these layers is no longer zero; empty if all are.

    Waits for the device, once for each dtype: an engine that becomes idle calls this before it hands out its last
    tokens, and models have many layers.
    """
    reserved = list(_reserved(table, pool, layers))
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, part in reserved:
        of_dtype.setdefault(part.dtype, []).append(part.flatten())
    if not any(bool(torch.cat(parts).any()) for parts in of_dtype.values()):
        return ""
    written = dict.fromkeys(name for name, part in reserved if bool(part.any()))
    return f"{', '.join(written)} must stay zero and was written"


def _reserved(table: RequestTable, pool: HybridKVPool, layers: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
    """The memory that must stay zero, and its name."""
    for pages in table.spaces:
        space = f" in the {pages.space.name} space" if len(table.spaces) > 1 else ""
        yield f"row 0 of the request table{space}", pages.entries[RESERVED_ROW]
    for layer in layers:
        kinds = [("page", pool.layer(layer))]
        if pool.has_index(layer):
            kinds.append(("index page", pool.index(layer)))
        if pool.has_state(layer):
            kinds.append(("state page", pool.state(layer)))
        for kind, held in kinds:
            yield from ((f"{kind} 0 of layer {layer}", part) for part in held.of_page(RESERVED_PAGE))

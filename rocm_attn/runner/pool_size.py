"""How many pages the KV pool gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rocm_attn.errors import NeverFits
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import UNLIMITED_WINDOW, Problem

_CPU_BYTES = 1 << 30
# the rest of a GPU's free memory is for activations, graphs and workspaces
_GPU_SHARE = 0.8


def default_kv_bytes(device: torch.device) -> int:
    """Memory for K and V where it is not given: 1 GiB on a CPU, most of what is free on a GPU."""
    if device.type == "cpu":
        return _CPU_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * _GPU_SHARE)


@dataclass(frozen=True, slots=True)
class PoolPages:
    """How many pages the pools get, the reserved ones included.

    full: of the full space
    swa:  of the SWA space, for layers with a window; 0: all layers live in the full space
    """

    full: int
    swa: int


def pool_pages(
    problems: Sequence[Problem], *, max_num_seqs: int, max_kv_len: int, chunk: int, kv_bytes: int
) -> PoolPages:
    """Pages for max_num_seqs sequences of max_kv_len tokens, or as many as kv_bytes hold.

    chunk: new tokens of a step, which lie in the SWA space beside the windows before them
    Where memory is short the SWA space has at most as many pages as the full one: no sequence needs more there.
    Raises CapacityExceeded when not even one page for tokens fits.
    """
    windowed = [problem for problem in problems if problem.window_left != UNLIMITED_WINDOW]
    full_bytes, swa_bytes = page_bytes(problems) - page_bytes(windowed), page_bytes(windowed)
    wanted = 1 + max_num_seqs * num_pages(max_kv_len, problems[0].page_size)
    affordable = kv_bytes // (full_bytes + swa_bytes)
    if affordable < 2:
        raise NeverFits(
            f"{kv_bytes} bytes for K and V hold {affordable} pages of {full_bytes + swa_bytes} bytes, and 2 are "
            "needed; raise kv_bytes or take smaller pages"
        )
    if not windowed:
        return PoolPages(min(wanted, affordable), 0)
    swa = min(wanted, affordable, swa_pages_for(windowed, max_num_seqs=max_num_seqs, chunk=chunk))
    return PoolPages(min(wanted, (kv_bytes - swa * swa_bytes) // full_bytes) if full_bytes else wanted, swa)


def swa_pages_for(problems: Sequence[Problem], *, max_num_seqs: int, chunk: int) -> int:
    """Pages that the windows of max_num_seqs sequences and the new tokens of a step never exceed."""
    page_size = problems[0].page_size
    window_left = max(problem.window_left for problem in problems)
    # A window and a new token begin and end within pages, and the chunk is cut over several sequences.
    return 1 + max_num_seqs * (num_pages(window_left + 1, page_size) + 2) + num_pages(chunk, page_size)

"""How many pages the KV pool gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rocm_attn.errors import CapacityExceeded
from rocm_attn.index_spaces import num_pages
from rocm_attn.kv_pool import page_bytes
from rocm_attn.problem import Problem

_CPU_BYTES = 1 << 30
# the rest of a GPU's free memory is for activations, graphs and workspaces
_GPU_SHARE = 0.8


def default_kv_bytes(device: torch.device) -> int:
    """Memory for K and V when nobody says how much: 1 GiB on a CPU, most of what is free on a GPU."""
    if device.type == "cpu":
        return _CPU_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * _GPU_SHARE)


def pool_pages(problems: Sequence[Problem], *, max_num_seqs: int, max_kv_len: int, kv_bytes: int) -> int:
    """Pages for max_num_seqs sequences of max_kv_len tokens, or as many as kv_bytes hold; the reserved page included.

    Raises CapacityExceeded when not even one page for tokens fits.
    """
    wanted = 1 + max_num_seqs * num_pages(max_kv_len, problems[0].page_size)
    affordable = kv_bytes // page_bytes(problems)
    if affordable < 2:
        raise CapacityExceeded(
            f"{kv_bytes} bytes for K and V hold {affordable} pages of {page_bytes(problems)} bytes, and 2 are needed; "
            "raise kv_bytes or take smaller pages"
        )
    return min(wanted, affordable)

"""Steps whose pages lie above 4 GiB."""

from dataclasses import replace

import torch

from tests.amd.kernels.attention_cases import Case, Tensors, build
from tests.amd.simulator.large_pools import LARGE_POOL_BYTES, pool_ending_with


def build_step(case: Case, *, is_large: bool) -> Tensors:
    """A case's step. is_large: with its pages at the end of pools above 4 GiB; latent pages are one pool"""
    tensors = build(case, torch.device("cpu"))
    if not is_large:
        return tensors
    pages = [tensors.k_pages] if tensors.case.latent else [tensors.k_pages, tensors.v_pages]
    num_pages = LARGE_POOL_BYTES // min(each[0].nbytes for each in pages)
    pools = [pool_ending_with(each, num_pages) for each in pages]
    v_pages = pools[0][..., : tensors.case.dims[1]] if tensors.case.latent else pools[1]
    table = tensors.table + (num_pages - len(tensors.k_pages))
    return replace(tensors, k_pages=pools[0], v_pages=v_pages, table=table)

"""Blocks of keys are read from one page only if the lanes' offsets from its first key fit 32 bits."""

import pytest
import torch

from rocm_attn.kernels.attention.key_rows import lie_in_one_page
from rocm_attn.kernels.cache.layer_pages import LayerPages
from tests.amd.kernels.attention_cases import Case, build

PAGE_OF_64 = Case(kv_len=[40], q_len=[1], heads=(2, 2), dims=(16, 16), page_size=64)


@pytest.mark.parametrize(("key_block", "fits"), [(16, True), (64, True), (128, False)])
def test_a_block_lies_in_one_page_if_pages_are_whole_blocks(key_block: int, fits: bool) -> None:
    assert lie_in_one_page(build(PAGE_OF_64, torch.device("cpu")).args(), key_block) == fits


@pytest.mark.parametrize("strides", [(1 << 20, 16), (16, 1 << 20)])
def test_tokens_and_heads_may_not_lie_far_apart(strides: tuple[int, int]) -> None:
    # Never written, so it takes no memory.
    far = torch.empty_strided((2, 64, 2, 16), (1 << 27, *strides, 1), dtype=torch.float16)
    near = torch.zeros(2, 64, 2, 16, dtype=torch.float16)
    for k, v in ((far, near), (near, far)):
        args = build(PAGE_OF_64, torch.device("cpu")).args()._replace(pages=LayerPages.plain(k, v))
        assert not lie_in_one_page(args, 16)

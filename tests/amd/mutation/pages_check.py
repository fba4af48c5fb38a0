"""Checks of the masks of the launch that looks for pages that do not exist."""

from __future__ import annotations

from functools import partial

from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.step_tensors import Pads
from rocm_attn.kernels.refs import engine_metadata
from tests.amd.kernels.launches_of_tensors import of_check_pages
from tests.amd.mutation.fresh_tensors import ints
from tests.amd.mutation.memory import Memory, assert_same


def check_pages(memory: Memory) -> None:
    """Rows of five pages whose sequences end before them, of which one has a page that does not exist; and a pad."""
    table = ints([1, 2, 99, -1, 99, 5, 4, 3, 2, 1, -1, 0, 7, 99, 99]).view(3, 5)
    for num_pages in (8, 7):
        inputs = [ints([1, 1, 2, 0]), table, ints([num_pages])]
        outputs = [ints([3, 7, 41, 0]), ints([0, 1, 2, 0]), ints([6, 15, 9, 2])]
        kernel, twin = (
            partial(of_check_pages(check, Pads(2, 0)), page_size=3, window_left=4)
            for check in (launch_check_pages, engine_metadata.check_pages)
        )
        assert_same(memory, kernel, twin, inputs, outputs)

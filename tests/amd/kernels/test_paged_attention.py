"""Promises that paged decode and paged extend make alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.kernels.attention.key_rows import lie_in_one_page
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.kernels.attention_cases import (
    Case,
    Run,
    assert_served,
    assert_serves,
    build,
    run_decode,
    run_decode_twin,
    run_extend,
    run_extend_twin,
    run_shared_decode,
    run_shared_extend,
)

DECODES = Case(kv_len=[33, 0, 1, 16, 70, 15], q_len=[1] * 6, dims=(32, 32))
EXTENDS = Case(kv_len=[60, 0, 17, 33, 1, 30, 12], q_len=[21, 0, 17, 2, 1, 1, 0], tail=3, dims=(32, 32))
RUNS = (run_decode, run_decode_twin, run_extend, run_shared_extend, run_extend_twin)
each_run = pytest.mark.parametrize("run", RUNS)


def of_run(run: Run, decodes: Case, extends: Case) -> Case:
    return decodes if run in (run_decode, run_decode_twin) else extends


@pytest.mark.parametrize("run", [run_decode, run_extend])
def test_a_key_that_is_nan_reaches_heads_that_are_read_as_one_and_no_other_sequence(
    run: Run, kernel_device: torch.device
) -> None:
    """One program decodes the rows of all sequences."""
    decodes = Case(kv_len=[33, 20, 7], q_len=[1, 1, 1], heads=(6, 3), dims=(24, 24))
    case = of_run(run, decodes, replace(decodes, q_len=[2, 2, 2]))
    tensors, clean = build(case, kernel_device), build(case, kernel_device)
    tensors.k_pages[tensors.table[tensors.row_of_seq[1], 0], 3, 2] = float("nan")
    for each in (tensors, clean):
        if run is run_decode:
            run_decode(each, num_programs=1, tiles=DecodeTiles(16, 4, 1, 1, heads_per_row=3))
        else:
            run_extend(each, tiles=ExtendTiles(16, 16, 1, 1, heads_per_row=3))
    assert_served(clean)
    new = case.q_len[0]
    assert tensors.out[new : 2 * new].isnan().all()
    assert torch.equal(tensors.out[:new], clean.out[:new])
    assert torch.equal(tensors.out[2 * new :], clean.out[2 * new :])


@pytest.mark.fast(1)
@each_run
def test_lse_may_be_left_out(run: Run, kernel_device: torch.device) -> None:
    with_lse, without = (build(of_run(run, DECODES, EXTENDS), kernel_device) for _ in range(2))
    run(with_lse)
    run(replace(without, lse=None))  # type: ignore[arg-type]
    assert torch.equal(with_lse.out, without.out)


@pytest.mark.parametrize("run", [run_decode, run_extend])
def test_a_table_without_an_entry_to_spare_is_enough(run: Run, kernel_device: torch.device) -> None:
    """Page ids are loaded ahead: at the end of the table there is no next one."""
    decodes = Case(kv_len=[48, 16], q_len=[1, 1], dims=(32, 32))
    tensors = build(of_run(run, decodes, replace(decodes, q_len=[33, 3])), kernel_device)
    run(replace(tensors, table=tensors.table[:, :3].clone()))
    assert_served(tensors)


@pytest.mark.fast(2)
@each_run
def test_pages_beyond_two_to_the_31_elements_are_read(run: Run, kernel_device: torch.device) -> None:
    decodes = Case(kv_len=[40, 3], q_len=[1, 1], heads=(4, 2), dtype=torch.float16)
    tensors = build(of_run(run, decodes, replace(decodes, q_len=[5, 3])), kernel_device)
    pool_shape = (2**31 // tensors.k_pages[0].numel() + 8, *tensors.k_pages.shape[1:])
    first = pool_shape[0] - tensors.k_pages.shape[0]
    pools = []
    for pages in (tensors.k_pages, tensors.v_pages):
        # NumPy's zeros take memory only where they are written; the test session fills torch's with NaN.
        pool = torch.from_numpy(np.zeros(pool_shape, np.float16)).to(kernel_device)
        pool[first:] = pages
        pools.append(pool)
    run(replace(tensors, k_pages=pools[0], v_pages=pools[1], table=tensors.table + first))
    assert_served(tensors)


@pytest.mark.nightly
@pytest.mark.parametrize("window_left", [0, 1, 2, 14, 15, 16, 17, 31, 32, 33])
def test_every_window_around_tiles_is_right_at_every_length(window_left: int, kernel_device: torch.device) -> None:
    lengths = [*range(1, 5), 14, 15, 16, 17, 18, 30, 31, 32, 33, 34, 47, 48, 49, 50, 64]
    case = Case(lengths, [1] * len(lengths), heads=(1, 1), dims=(16, 16), page_size=5, window_left=window_left)
    for run in (run_decode, run_shared_decode):
        assert_serves(run, case, kernel_device)
    chunks = [min(length, new) for length, new in zip(lengths, [1, 2, 3, 16, 17, 33] * 4, strict=False)]
    for run_of_chunks in (run_extend, run_shared_extend):
        assert_serves(run_of_chunks, replace(case, q_len=chunks), kernel_device)


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

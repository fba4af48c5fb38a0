"""Paged decode and its torch twin against a float64 reference, with NaN in everything that may not be read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention import merge
from rocm_attn.kernels.attention.cuts import DecodeCut, merge_shape
from rocm_attn.kernels.attention.decode_geometry import has_whole_rows
from rocm_attn.kernels.attention.plain_decode import launch_plain_decode
from rocm_attn.kernels.tuning.decode_tiles import decode_tiles, others_of
from rocm_attn.kernels.tuning.tiles import DecodeTiles, next_power_of_2
from tests.amd.kernels.attention_cases import (
    UNTOUCHED,
    Case,
    Run,
    assert_served,
    assert_serves,
    build,
    dtypes,
    in_each_way,
    run_decode,
    run_decode_twin,
    run_shared_decode,
    with_features,
)
from tests.amd.schedule_twins import decode_schedule
from tests.amd.tolerances import assert_attention_close, assert_lse_close

# Empty, one key, a page and a tile more or less, and one that several programs share. All have one new token.
KV_LEN = [33, 0, 1, 16, 70, 15]
RAGGED = Case(kv_len=KV_LEN, q_len=[1] * len(KV_LEN))
FEW = replace(RAGGED, dims=(32, 32), page_size=4)

GEOMETRIES = {
    "mha": replace(RAGGED, heads=(2, 2)),
    "gqa_3": replace(RAGGED, heads=(6, 2), page_size=5),
    "gqa_4": replace(RAGGED, heads=(8, 2), page_size=1),
    "gqa_8_odd_kv_heads": replace(RAGGED, heads=(24, 3), page_size=64),
    "gqa_16": replace(RAGGED, heads=(16, 1), page_size=128),
    "mqa_71": replace(RAGGED, heads=(71, 1), dims=(32, 32)),
    "dim_40": replace(RAGGED, dims=(40, 40)),
    "dim_24_72": replace(RAGGED, dims=(24, 72), window_left=9),
    "dim_80": replace(RAGGED, dims=(80, 80), page_size=5),
    "dim_96": replace(RAGGED, dims=(96, 96)),
    "dim_128": replace(RAGGED, dims=(128, 128)),
    "dim_192_128": replace(RAGGED, dims=(192, 128), heads=(2, 1)),
    "dim_64_96": replace(RAGGED, dims=(64, 96)),
    "dim_256": replace(RAGGED, dims=(256, 256), heads=(2, 1)),
    "dim_320": replace(RAGGED, dims=(320, 320), heads=(2, 1)),
    "dim_512": replace(RAGGED, dims=(512, 512), heads=(8, 1)),
    "dim_512_256": replace(RAGGED, dims=(512, 256), heads=(2, 1), spread=True),
    "dim_1_7": replace(RAGGED, dims=(1, 7), heads=(1, 1), page_size=2),
    "spread": replace(RAGGED, heads=(6, 2), dims=(80, 48), page_size=3, spread=True),
    "spread_same": replace(RAGGED, heads=(4, 2), page_size=8, spread=True),
}

RUNS = (run_decode, run_shared_decode, run_decode_twin)
run_either = pytest.mark.parametrize("run", [run_decode, run_decode_twin])


@pytest.mark.fast(9)
@in_each_way("case", GEOMETRIES | with_features(FEW), RUNS)
def test_decode_equals_the_reference(case: Case, dtype: torch.dtype, run: Run, kernel_device: torch.device) -> None:
    assert_serves(run, replace(case, dtype=dtype), kernel_device)


@pytest.mark.fast
@run_either
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("scores", [{}, {"sinks": True, "soft_cap": 1.5}], ids=["plain", "scored"])
def test_keys_may_begin_after_the_first_pages_of_a_row(
    scores: dict[str, Any], page_size: int, run: Run, kernel_device: torch.device
) -> None:
    case = replace(RAGGED, page_size=page_size, first_page=[3, 0, 2, 7, 1, 40], **scores)
    assert_serves(run, case, kernel_device)


# Every score at once; a window that begins within a tile.
SCORES: dict[str, Any] = {"window_left": 20, "soft_cap": 1.5, "sinks": True, "slopes": True}
run_scored = pytest.mark.parametrize(
    ("run", "scores"),
    [(run_decode, {}), (run_decode, SCORES), (run_shared_decode, SCORES)],
    ids=["", "scored", "shared"],
)


@pytest.mark.fast(2)
@run_scored
@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 64])
def test_any_number_of_programs_gives_the_same_answer(
    run: Run, scores: dict[str, Any], num_programs: int, kernel_device: torch.device
) -> None:
    """Either one program finishes a row, or the merge does: a sink is added once."""
    case = replace(RAGGED, kv_len=[150, 3, 50, 0, 20], q_len=[1] * 5, dims=(32, 32), **scores)
    assert_serves(run, case, kernel_device, num_programs=num_programs)


@pytest.mark.fast(4)
@run_scored
@pytest.mark.parametrize(
    "tiles",
    [
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, transposed=True),
        DecodeTiles(key_block=32, num_warps=4, num_stages=2, programs_per_cu=1, heads_per_row=2),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, heads_per_row=2, transposed=True),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, head_blocks=2),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, head_blocks=3, transposed=True),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, row_cost=7),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, row_cost=0, row_end=2),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, dim_block=16),
        DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, dim_block=32, transposed=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_form_of_the_inner_loop_is_right(
    run: Run,
    scores: dict[str, Any],
    tiles: DecodeTiles,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    """Five query heads per KV head are cut unevenly by 2 and 3 blocks."""
    case = replace(RAGGED, heads=(10, 2), page_size=3, dtype=dtype, **scores)
    assert_serves(run, case, kernel_device, num_programs=4, tiles=tiles)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("dim", "number"), [(64, 0), (64, 1), (64, 2), (128, 0), (128, 1), (128, 2), (256, 0)])
@pytest.mark.parametrize("num_programs", [4, 12])
def test_tiles_of_other_numbers_of_rows_are_right(
    dim: int, number: int, num_programs: int, kernel_device: torch.device
) -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "dtype": torch.float16}
    usual = decode_tiles("sm_90", gqa_ratio=2, head_dim=dim, v_head_dim=dim, **shape)
    tiles = replace(others_of(usual)[number].tiles, early=kernel_device.type == "cuda")
    kv_len = [600, 0, 1, 129, 300, 127]
    case = replace(RAGGED, kv_len=kv_len, heads=(4, 2), dims=(dim, dim), dtype=torch.float16)
    assert_serves(run_decode, case, kernel_device, num_programs=num_programs, tiles=tiles)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("heads", "dim", "heads_per_row", "layer"),
    [
        ((12, 6), 24, 3, {"spread": True}),
        pytest.param((6, 6), 16, 6, {"window_left": 9, "sinks": True}, marks=pytest.mark.nightly),
        pytest.param((15, 5), 40, 5, {"soft_cap": 3.0}, marks=pytest.mark.nightly),
        ((8, 4), 16, 4, {"page_size": 16, "slopes": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_kv_heads_are_read_as_one(
    heads: tuple[int, int],
    dim: int,
    heads_per_row: int,
    layer: dict[str, Any],
    transposed: bool,
    num_blocks: int,
    kernel_device: torch.device,
) -> None:
    """Covers any number of heads and any dim, whole or shared among programs, adjacent in memory or not."""
    case = replace(RAGGED, heads=heads, dims=(dim, dim), **layer)
    dim_block = next_power_of_2(dim * heads_per_row) // 2 if num_blocks == 2 else 0
    tiles = DecodeTiles(16, 4, 1, 1, heads_per_row=heads_per_row, transposed=transposed, dim_block=dim_block)
    assert_serves(run_decode, case, kernel_device, num_programs=5, tiles=tiles)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("num_seqs", "num_programs", "is_by_row", "parts"),
    [
        (3, 24, True, 64),
        (1, 40, True, 32),
        (1, 70, True, 64),
        (1, 260, True, 256),
        # The cut of one sequence on an MI300X.
        pytest.param(1, 2432, True, 1024, marks=pytest.mark.nightly),
        (9, 30, True, 64),
        (9, 9, False, 8),
    ],
)
def test_every_cut_of_the_merge_is_right(
    num_seqs: int, num_programs: int, is_by_row: bool, parts: int, kernel_device: torch.device
) -> None:
    """Two KV heads have dim 32; one sequence is so long that many programs share it."""
    shape = merge_shape(num_seqs * 2, num_programs, 2, 32)
    assert (shape.by_row, shape.parts) == (is_by_row, parts)
    longest = min(8 * num_programs, 700)
    case = Case(kv_len=[longest, *[20] * (num_seqs - 1)], q_len=[1] * num_seqs, heads=(4, 2), dims=(32, 32))
    assert_serves(run_decode, case, kernel_device, num_programs=num_programs)


@pytest.mark.fast(2)
@pytest.mark.parametrize("shape", [{"parts": 4}, {"heads": 1, "parts": 8, "few": 2, "few_heads": 2}], ids=str)
def test_a_row_with_more_parts_than_a_step_takes_is_right(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    """One row has about 20 parts, and others have one or two, which one program may add up for all their heads."""
    monkeypatch.setattr(merge, "merge_shape", lambda *args: merge_shape(*args)._replace(**shape))
    case = Case(kv_len=[700, 20, 40], q_len=[1] * 3, heads=(4, 2), dims=(32, 32))
    assert_serves(run_decode, case, kernel_device, num_programs=44)


@pytest.mark.nightly
@pytest.mark.parametrize("num_pads", [0, 2])
def test_the_merge_finds_rows_that_padding_follows(num_pads: int, kernel_device: torch.device) -> None:
    """Six rows of 33, of which thirteen programs would take 16: two programs have 17 each of a row and 1 more position.

    Sequences without a new token make more rows than programs, as in a padded graph.
    """
    case = Case(kv_len=[491] + [0] * num_pads, q_len=[1] + [0] * num_pads, heads=(6, 6), dims=(16, 16))
    tiles = DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1)
    cut = DecodeCut.of(tiles, num_kv_heads=6, programs=13, window_left=case.window_left)
    words = decode_schedule(case.kv_len, case.q_len, cut)
    assert (words[4], words[7]) == (17, 1)
    assert merge_shape(len(case.kv_len) * 6, 13, 1, 16).by_row == (num_pads == 0)
    assert_serves(run_decode, case, kernel_device, num_programs=13, tiles=tiles)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("kv_len", "num_programs", "is_by_row"),
    [
        ([160, 45], 20, True),
        ([320] * 2, 17, True),
        ([320] * 2, 4, False),
        ([33, 320, 0, 90, 5], 17, False),
        ([320, 90], 3, False),
    ],
)
@pytest.mark.parametrize("merge_group", [0, 8])
def test_rows_of_programs_that_work_side_by_side_are_merged_right(
    kv_len: list[int], num_programs: int, is_by_row: bool, merge_group: int, kernel_device: torch.device
) -> None:
    """Four rows per sequence: equal parts and different ones, whole rows, and idle programs. There may be more
    programs than rows or fewer, and fewer than a sequence's rows.
    """
    case = Case(kv_len=kv_len, q_len=[1] * len(kv_len), heads=(8, 4), dims=(16, 16))
    assert merge_shape(len(kv_len) * 4, num_programs, 2, 16).by_row == is_by_row
    tiles = DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, row_cost=0, row_end=2)
    tiles = replace(tiles, side_by_side=True, merge_group=merge_group)
    assert_serves(run_decode, case, kernel_device, num_programs=num_programs, tiles=tiles)


@run_either
def test_sequences_with_another_number_of_new_tokens_are_left_alone(run: Run, kernel_device: torch.device) -> None:
    case = Case(kv_len=[20, 9, 40, 0, 7, 33], q_len=[1, 0, 3, 0, 1, 2], tail=3, dims=(32, 32))
    tensors = build(case, kernel_device)
    run(tensors)
    mine = torch.tensor([0, 4], device=kernel_device)
    others = torch.tensor([1, 2, 3, 5, 6, 7, 8, 9], device=kernel_device)
    assert_attention_close(tensors.out[mine], tensors.reference[mine], torch.float32)
    assert_lse_close(tensors.lse[mine], tensors.reference_lse[mine], torch.float32)
    assert (tensors.out[others] == UNTOUCHED).all()
    assert (tensors.lse[others] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(RAGGED, heads=(129, 1)), "129 query heads share a KV head; at most 128 may"),
        (replace(RAGGED, heads=(3, 2)), "3 query heads are not a positive multiple of 2 KV heads"),
        (replace(RAGGED, dims=(513, 64)), "head_dim is 513"),
        (replace(RAGGED, dims=(64, 640)), "v_head_dim is 640"),
        (replace(RAGGED, page_size=256), "page_size is 256"),
        (replace(RAGGED, dtype=torch.float64), "dtype is torch.float64"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(case: Case, reason: str, kernel_device: torch.device) -> None:
    tensors = build(replace(case, kv_len=[], q_len=[], dtype=torch.float32), kernel_device)
    tiles = DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1)
    with pytest.raises(ValueError, match=reason):
        run_decode(replace(tensors, q=tensors.q.to(case.dtype)), tiles=tiles)


@pytest.mark.parametrize(
    ("window_left", "num_rows", "is_whole"),
    [(-1, 264, False), (127, 1, True), (255, 700, True), (256, 1, False), (1023, 256, True), (1023, 265, False)],
)
def test_a_row_is_whole_where_there_is_nothing_to_balance(window_left: int, num_rows: int, is_whole: bool) -> None:
    """There are 264 programs at a time."""
    for head_dim in (64, 256):
        whole = has_whole_rows(num_rows, num_programs=264, window_left=window_left, head_dim=head_dim)
        assert whole == (is_whole and head_dim == 64)


# An empty sequence, one key, a page and a key block more or less, and several new tokens, which are not served.
UNEVEN = Case(kv_len=[33, 0, 1, 16, 70, 15, 40], q_len=[1, 1, 1, 1, 1, 1, 3], dims=(32, 32))
DECODES = replace(UNEVEN, kv_len=UNEVEN.kv_len[:-1], q_len=UNEVEN.q_len[:-1])
CASES = {
    "mha": replace(DECODES, heads=(2, 2)),
    "gqa_3": replace(DECODES, heads=(6, 2), page_size=5),
    "mqa_20": replace(DECODES, heads=(20, 1), page_size=1),
    "dims": replace(DECODES, dims=(80, 48), page_size=3, spread=True),
    "window": replace(DECODES, window_left=20, dims=(40, 24)),
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plain_kernel_equals_the_reference_and_the_fast_one(
    case: Case, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    plain, fast = (build(replace(case, dtype=dtype), kernel_device) for _ in range(2))
    launch_plain_decode(plain.args(), scores=plain.scores)
    run_decode(fast)
    assert_served(plain)
    assert_attention_close(plain.out, fast.out.double(), dtype)
    assert_lse_close(plain.lse, fast.lse.double(), dtype)


def test_tokens_of_other_sequences_stay_unchanged(kernel_device: torch.device) -> None:
    tensors = build(UNEVEN, kernel_device)
    launch_plain_decode(tensors.args(), scores=tensors.scores)
    assert (tensors.out[-3:] == UNTOUCHED).all()
    assert (tensors.lse[-3:] == UNTOUCHED).all()

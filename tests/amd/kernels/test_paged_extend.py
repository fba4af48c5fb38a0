"""Paged extend and its torch twin against a float64 reference, with NaN in everything that may not be read.

The reference goes token by token, and through a packed mask bit by bit.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention.cuts import BLOCK_WORDS, SHARE_WORDS, WHOLE_ROWS, ExtendCut, RowSharing, Sequences
from rocm_attn.kernels.attention.extend_merge import parts_of_step
from rocm_attn.kernels.attention.extend_schedule import SHARE_CUT, SHARE_PARTS, SHARE_SIZE, launch_extend_schedule
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from tests.amd.kernels.attention_cases import (
    ALL_SHARED,
    GARBAGE,
    UNTOUCHED,
    Case,
    Run,
    assert_served,
    assert_serves,
    build,
    dtypes,
    extend_cut,
    in_each_way,
    queries_of,
    run_decode,
    run_extend,
    run_extend_twin,
    run_shared_extend,
    with_features,
)
from tests.amd.schedule_twins import as_in_the_twin, extend_schedule

# A prefix and several tiles, nothing at all, no prefix, one new token, a cached sequence without new tokens.
RAGGED = Case(kv_len=[45, 0, 17, 33, 1, 12], q_len=[13, 0, 17, 2, 1, 0], tail=3)
# A prefix, nothing at all, no prefix: for what does not change with lengths.
SHORT = Case(kv_len=[37, 0, 17], q_len=[5, 0, 17], tail=3)
SCORED = replace(RAGGED, kv_len=[45, 0, 17, 1, 12], q_len=[13, 0, 17, 1, 0], dims=(32, 32), page_size=4)
# Every K and V that no bit of its sequence shows is NaN; and, over ranges, every one outside of all ranges.
MASKED = replace(SCORED, kv_len=[37, 0, 17, 1, 12, 40], q_len=[5, 0, 17, 1, 0, 3], masked=True)
RANGED = replace(
    MASKED, kv_len=[137, 0, 67, 1, 12, 140], masked=False, spans=((0, 132, 137), (2, 52, 60), (5, 137, 139))
)

GEOMETRIES = {
    "mha": replace(RAGGED, heads=(2, 2)),
    "gqa_3": replace(RAGGED, heads=(6, 2), page_size=5),
    "gqa_4": replace(RAGGED, heads=(4, 1), page_size=1),
    "gqa_8": replace(RAGGED, heads=(8, 1), page_size=64),
    "mqa_40": replace(RAGGED, heads=(40, 1), dims=(32, 32), page_size=128),
    "dim_40": replace(RAGGED, dims=(40, 40), heads=(2, 1)),
    "dim_80": replace(RAGGED, dims=(80, 80), page_size=5),
    "dim_96": replace(RAGGED, dims=(96, 96), heads=(2, 1)),
    "dim_128": replace(RAGGED, dims=(128, 128), heads=(3, 1)),
    "dim_192_128": replace(RAGGED, dims=(192, 128), heads=(2, 1)),
    "dim_64_96": replace(RAGGED, dims=(64, 96), heads=(2, 1)),
    "dim_256": replace(RAGGED, dims=(256, 256), heads=(2, 1)),
    "dim_384": replace(RAGGED, dims=(384, 384), heads=(2, 1)),
    "dim_512": replace(RAGGED, dims=(512, 512), heads=(8, 1)),
    "dim_256_512": replace(RAGGED, dims=(256, 512), heads=(2, 1), spread=True),
    "dim_1_7": replace(RAGGED, dims=(1, 7), heads=(1, 1), page_size=2),
    "spread": replace(RAGGED, heads=(6, 2), dims=(80, 48), page_size=3, spread=True),
    "spread_same": replace(RAGGED, heads=(4, 2), page_size=8, spread=True),
    # Cross-attention has an encoder's KV, with its length.
    "more_queries_than_keys": replace(SCORED, kv_len=[5, 40, 1], q_len=[30, 3, 2], window_right=UNLIMITED_WINDOW),
    "no_sequence": Case([], [], tail=40, heads=(2, 1), dims=(32, 32)),
    "no_key": Case([0, 0], [0, 0], tail=40, heads=(2, 1), dims=(32, 32)),
    "no_new_token": Case([9, 5], [0, 0], tail=40, heads=(2, 1), dims=(32, 32)),
}
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mha": {"heads": (2, 2)},
    "mqa": {"heads": (20, 1)},
    "one_token_each": {"q_len": [1, 0, 1, 1, 1, 1]},
    "cap": {"soft_cap": 0.7},
    "slopes": {"slopes": True},
    "window": {"window_left": 7},
    "window_of_itself": {"window_left": 0},
    "long_window": {"window_left": 40, "heads": (6, 2)},
    "sinks": {"sinks": True},
    "all": {"soft_cap": 1.5, "slopes": True, "sinks": True, "heads": (6, 2), "dims": (40, 24)},
    "all_and_a_window": {"soft_cap": 1.5, "slopes": True, "sinks": True, "window_left": 20, "dims": (40, 24)},
    "gaps": {"spread": True},
    "new_keys": {"mask_keys": 0},
    "new_keys_and_few_before": {"mask_keys": 9, "sinks": True, "soft_cap": 0.9},
    "new_keys_in_a_window": {"mask_keys": 0, "window_left": 20},
    "few_before_in_a_short_window": {"mask_keys": 5, "window_left": 3, "heads": (6, 2)},
}
# Without cells a kernel reads ranges alone; with a window also where they begin. Ranges of neighbours leave no key out.
RANGES: dict[str, dict[str, Any]] = {
    "spans": {},
    "random_ends": {"ranged": True},
    "any_end": {"ranged": True, "window_right": UNLIMITED_WINDOW},
    "window": {"window_left": 20, "heads": (6, 2)},
    "window_of_itself": {"window_left": 0},
    "spans_pass_a_window": {"window_left": 2, "spans_pass": True},
    "codes": {"kv": Encoding.E4M3FN, "scales": Scales.TOKEN, "window_right": UNLIMITED_WINDOW},
    "window_and_later": {"window_left": 20, "window_right": UNLIMITED_WINDOW, "sinks": True},
    "chunk": {"chunk": 128, "window_left": 127, "sinks": True, "soft_cap": 1.5, "slopes": True},
    "short_chunk": {"chunk": 9, "window_left": 8, "spans_pass": True, "heads": (6, 2)},
}

RUN_EITHER = (run_extend, run_shared_extend, run_extend_twin)
run_either = pytest.mark.parametrize("run", RUN_EITHER)


@pytest.mark.fast(8)
@in_each_way("case", GEOMETRIES | with_features(SCORED), RUN_EITHER)
def test_extend_equals_the_reference(case: Case, dtype: torch.dtype, run: Run, kernel_device: torch.device) -> None:
    """This includes the padded tail: output 0 and LSE -inf."""
    assert_serves(run, replace(case, dtype=dtype), kernel_device)


@pytest.mark.fast(5)
@in_each_way("feature", MASKS, RUN_EITHER)
def test_a_masked_extend_equals_the_reference(
    feature: dict[str, Any], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(MASKED, dtype=dtype, **feature), kernel_device)


@pytest.mark.fast(1)
@in_each_way("feature", RANGES, RUN_EITHER)
def test_an_extend_over_ranges_equals_the_reference(
    feature: dict[str, Any], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(RANGED, dtype=dtype, **feature), kernel_device)


@pytest.mark.fast(1)
@run_either
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.nightly] * (seed % 3 > 0)) for seed in range(6)]
)
def test_lengths_around_words_and_tiles_are_right(seed: int, run: Run, kernel_device: torch.device) -> None:
    """Every sequence's first cell is at another bit of a word."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    new = [min(length, 1 + (seq * 7 + seed) % 19) for seq, length in enumerate(lengths)]
    case = Case(lengths, new, heads=(1, 1), dims=(16, 16), page_size=5, masked=True)
    assert_serves(run, case, kernel_device, seed=seed)


@pytest.mark.fast(1)
@run_either
@pytest.mark.parametrize("mask_keys", [0, 1, 13, 31, 33])
def test_masks_that_begin_anywhere_in_a_key_block_are_right(
    mask_keys: int, run: Run, kernel_device: torch.device
) -> None:
    """The first key with bits is before, at and after the edges of tiles and of words."""
    lengths = [64, 65, 95, 96, 97, 33, 32, 31]
    new = [1, 3, 2, 4, 1, 2, 3, 4]
    case = Case(lengths, new, heads=(2, 1), dims=(16, 16), page_size=5, masked=True, mask_keys=mask_keys)
    assert_serves(run, case, kernel_device)


@pytest.mark.fast(1)
@pytest.mark.parametrize("key_block", [16, 32, 64])
def test_every_tile_reads_its_own_bits(key_block: int, kernel_device: torch.device) -> None:
    tiles = ExtendTiles(query_rows=16, key_block=key_block, num_warps=4, num_stages=1)
    assert_serves(run_extend, replace(MASKED, heads=(3, 1), mask_keys=11), kernel_device, tiles=tiles)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "tiles",
    [
        ExtendTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1),
        ExtendTiles(query_rows=16, key_block=32, num_warps=4, num_stages=2),
        ExtendTiles(query_rows=64, key_block=16, num_warps=4, num_stages=2, diagonal_stages=2),
        ExtendTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1, fills=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [pytest.param((1, 1), marks=pytest.mark.nightly), (5, 1), (20, 1)])
@pytest.mark.parametrize("scores", [{}, {"window_left": 20, "soft_cap": 1.5, "sinks": True, "slopes": True}], ids=str)
def test_every_tile_shape_is_right(
    scores: dict[str, Any], tiles: ExtendTiles, heads: tuple[int, int], kernel_device: torch.device
) -> None:
    """Five heads leave rows of a tile empty; twenty exceed 16 rows."""
    case = replace(SHORT, heads=heads, dims=(32, 32), page_size=3, **scores)
    assert_serves(run_extend, case, kernel_device, tiles=tiles)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("heads", "dims", "heads_per_row", "layer"),
    [
        ((12, 6), (24, 24), 3, {"spread": True}),
        pytest.param((6, 6), (16, 40), 6, {"window_left": 9, "sinks": True}, marks=pytest.mark.nightly),
        pytest.param(
            *((8, 4), (16, 16), 4, {"page_size": 16, "masked": True, "slopes": True}), marks=pytest.mark.nightly
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("run", [run_extend, run_shared_extend])
def test_kv_heads_are_read_as_one(
    run: Run,
    heads: tuple[int, int],
    dims: tuple[int, int],
    heads_per_row: int,
    layer: dict[str, Any],
    kernel_device: torch.device,
) -> None:
    """Covers any number of heads and any dims, whole or shared among programs, adjacent in memory or not."""
    case = replace(SHORT, heads=heads, dims=dims, **layer)
    assert_serves(run, case, kernel_device, tiles=ExtendTiles(16, 16, 1, 1, heads_per_row=heads_per_row))


@pytest.mark.fast(1)
@pytest.mark.parametrize("page_size", [2, 3, 16, 64])
def test_page_numbers_may_be_loaded_once_for_each_page(page_size: int, kernel_device: torch.device) -> None:
    """Blocks have several pages, a whole one, or a part of one; pages of three are in two blocks."""
    case = replace(SHORT, dims=(16, 16), page_size=page_size)
    assert_serves(run_extend, case, kernel_device, tiles=ExtendTiles(16, 16, 4, 2, by_number=True))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("lengths", "programs", "alike_keys", "size"),
    [
        ([80, 80], 9, 8, 44),
        ([80, 61], 9, 8, 44),
        ([80, 80], 9, 99, 40),
        # So many parts that the merge goes by row.
        ([300], 40, 8, 21),
    ],
    ids=["alike", "of other lengths", "too dear", "many parts"],
)
def test_rows_may_be_cut_alike(
    lengths: list[int], programs: int, alike_keys: int, size: int, kernel_device: torch.device
) -> None:
    case = Case(kv_len=lengths, q_len=[2] * len(lengths), heads=(4, 2), dims=(16, 16))
    tensors = build(case, kernel_device)
    tiles = ExtendTiles(16, 16, 4, 1, one_launch=True)
    sharing = ALL_SHARED._replace(programs=programs, row_keys=8, split_keys=30, least_keys=20, alike_keys=alike_keys)
    cut = extend_cut(tensors, tiles, sharing)
    words = tensors.extend_args(cut).schedule.tolist()
    assert words[SHARE_SIZE.value - SHARE_WORDS] == size, "of a share, or of an equal part"
    expected = extend_schedule(case.kv_len, case.q_len, cut, tensors.q.shape[0])
    assert as_in_the_twin(words, cut) == expected
    run_extend(tensors, tiles=tiles, sharing=sharing)
    assert_served(tensors)


@pytest.mark.fast(1)
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("layer", [{}, {"window_left": 33, "sinks": True}, {"masked": True}], ids=str)
def test_parts_that_are_alike_may_be_smaller_than_what_a_row_costs_to_begin(
    layer: dict[str, Any], one_launch: bool, kernel_device: torch.device
) -> None:
    """The first part includes that cost in addition to its keys, and then counts as several parts."""
    case = Case(kv_len=[100, 8], q_len=[3, 5], tail=3, heads=(2, 2), dims=(16, 16), **layer)
    tensors = build(case, kernel_device)
    tiles = ExtendTiles(16, 16, 4, 1, one_launch=one_launch)
    sharing = ALL_SHARED._replace(programs=24, row_keys=24, split_keys=2000, least_keys=1, alike_keys=1)
    words = extend_schedule(case.kv_len, case.q_len, extend_cut(tensors, tiles, sharing), tensors.q.shape[0])
    parts, size = words[SHARE_PARTS.value - SHARE_WORDS], words[SHARE_SIZE.value - SHARE_WORDS]
    assert parts > 2
    assert size < sharing.row_keys
    run_extend(tensors, tiles=tiles, sharing=sharing)
    assert_served(tensors)


@pytest.mark.fast(1)
@pytest.mark.parametrize("layer", [{}, {"window_left": 9}, {"masked": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("split_keys", "some_are_shared"), [(1 << 20, False), (0, True)])
def test_one_launch_may_take_shares_and_whole_rows(
    split_keys: int, some_are_shared: bool, layer: dict[str, Any], kernel_device: torch.device
) -> None:
    """Either no row is shared, or only the longest ones are."""
    case = Case(kv_len=[90, 0, 17, 33, 1], q_len=[9, 0, 17, 2, 1], tail=3, heads=(6, 2), dims=(16, 16), **layer)
    tensors = build(case, kernel_device)
    tiles = ExtendTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1, one_launch=True)
    sharing = ALL_SHARED._replace(programs=3, split_keys=split_keys)
    words = extend_schedule(case.kv_len, case.q_len, extend_cut(tensors, tiles, sharing), tensors.q.shape[0])
    cut_blocks = words[SHARE_CUT.value - SHARE_WORDS]
    assert 0 < cut_blocks < 8 if some_are_shared else cut_blocks == 0
    run_extend(tensors, tiles=tiles, sharing=sharing)
    assert_served(tensors)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("programs", "parts", "layer"),
    [
        # Every run has many programs for one kind of layer only: each of them is interpreted.
        pytest.param(programs, parts, layer, marks=[pytest.mark.nightly] * ((programs > 50) != (not layer)))
        for programs, parts in ((50, 8), (150, 32))
        for layer in ({}, {"masked": True}, {"sinks": True}, {"window_left": 40})
    ],
    ids=str,
)
def test_few_rows_of_many_parts_are_merged_by_row(
    programs: int, parts: int, layer: dict[str, Any], kernel_device: torch.device
) -> None:
    """Two heads of a sequence's six tokens have keys shared by many programs; the merge takes several steps, or one."""
    case = Case(kv_len=[170, 0], q_len=[6, 0], tail=2, heads=(6, 2), dims=(24, 40), **layer)
    tensors = build(case, kernel_device)
    tiles = ExtendTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1)
    sharing = ALL_SHARED._replace(programs=programs)
    rows = 2 * (extend_cut(tensors, tiles, sharing).max_blocks(tensors.q.shape[0], 2) - 1)
    assert parts_of_step(rows, programs) == parts
    run_extend(tensors, tiles=tiles, sharing=sharing)
    assert_served(tensors)


@pytest.mark.fast(1)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_decode_and_extend_share_a_mixed_step(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Extend leaves single tokens to decode, decode leaves the rest: together they serve everything once."""
    case = replace(RAGGED, kv_len=[40, 20, 17, 0, 50], q_len=[1, 9, 17, 0, 1], heads=(8, 2), dtype=dtype)
    tensors = build(case, kernel_device)
    run_extend(tensors, min_q_len=2)
    assert (tensors.out[[0, 27]] == UNTOUCHED).all()
    assert (tensors.lse[[0, 27]] == UNTOUCHED).all()
    run_decode(tensors)
    assert_served(tensors)


def test_the_twin_cuts_large_steps_into_groups(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_attn.kernels.refs.attention._GROUP_ELEMENTS", 20_000)
    assert_serves(run_extend_twin, replace(RAGGED, heads=(4, 2), dims=(32, 32)), kernel_device)


BY_SEGMENTS = RowSharing(
    programs=7, rows=2, row_keys=20, split_keys=1, gain=4, least_keys=32, most_keys=300, segment_len=32
)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "sharing",
    [
        WHOLE_ROWS,
        RowSharing(programs=400, rows=2, row_keys=20, split_keys=999, gain=0, least_keys=12, alike_keys=1),
        RowSharing(programs=60, rows=1, row_keys=9, split_keys=999, gain=0, least_keys=5, window_left=33, alike_keys=4),
        RowSharing(programs=7, rows=2, row_keys=20, split_keys=0, gain=0, least_keys=1),
        RowSharing(programs=3, rows=1, row_keys=1, split_keys=3, gain=1, least_keys=9, window_left=33),
        RowSharing(programs=9, rows=4, row_keys=9, split_keys=-99999, gain=0, least_keys=1, causal=False),
        RowSharing(programs=5, rows=3, row_keys=64, split_keys=5, gain=2, causal=False, window_left=7),
        RowSharing(programs=7, rows=2, row_keys=20, split_keys=-99999, gain=0, least_keys=64, most_keys=200),
        BY_SEGMENTS,
        BY_SEGMENTS._replace(shares_first=True),
        BY_SEGMENTS._replace(programs=150, split_keys=999, alike_keys=1),
    ],
    ids=[
        "whole",
        "alike",
        "alike_window",
        "shared",
        "window",
        "not_causal",
        "masked_window",
        "small_shares",
        "segments",
        "segments_first",
        "segments_alike",
    ],
)
@pytest.mark.parametrize(
    ("num_seqs", "longest_q", "min_q_len", "tail"),
    [(1, 100, 1, 0), (5, 40, 1, 9), (20, 9, 2, 30), pytest.param(70, 3, 2, 5, marks=pytest.mark.nightly)],
)
def test_the_device_lists_the_tiles_of_the_host_twin(
    sharing: RowSharing,
    num_seqs: int,
    longest_q: int,
    min_q_len: int,
    tail: int,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Order: longest first, then the padded tail, then nothing; equal extents in the order of their sequences."""
    # Seventy sequences are then read in three steps.
    monkeypatch.setattr("rocm_attn.kernels.attention.extend_schedule._SEQS_AT_ONCE", 32)
    draw = random.Random(num_seqs)
    q_len = [draw.randrange(longest_q + 1) for _ in range(num_seqs)]
    kv_len = [new + draw.choice([0, 0, 1, draw.randrange(300)]) for new in q_len]
    tiles = ExtendTiles(query_rows=32, key_block=16, num_warps=4, num_stages=1)
    num_tokens = sum(q_len) + tail
    cut = replace(ExtendCut.of(tiles, gqa_ratio=3, causal=True, min_q_len=min_q_len), sharing=sharing)
    schedule = torch.full((cut.words(num_tokens, num_seqs) + 3,), GARBAGE, dtype=torch.int32, device=kernel_device)
    launch_extend_schedule(queries_of(kv_len, q_len, num_tokens, kernel_device), schedule, cut)
    expected = extend_schedule(kv_len, q_len, cut, num_tokens)
    *words, a, b, c = schedule.tolist()
    assert as_in_the_twin(words, cut) == expected
    assert {a, b, c} == {GARBAGE}


def test_blocks_of_a_sequence_with_many_more_keys_stay_together(kernel_device: torch.device) -> None:
    """The second one has a key too few: its blocks that reach less far than 128 keys come last."""
    kv_len, q_len, cut = [150, 149, 150], [60] * 3, ExtendCut(10, sharing=ALL_SHARED)
    schedule = torch.full((cut.words(180, 3),), GARBAGE, dtype=torch.int32, device=kernel_device)
    launch_extend_schedule(queries_of(kv_len, q_len, 180, kernel_device), schedule, cut)
    words = as_in_the_twin(schedule.tolist(), cut)
    assert words[: 18 * BLOCK_WORDS : BLOCK_WORDS] == [0] * 6 + [1] * 3 + [2] * 6 + [1] * 3
    assert words == extend_schedule(kv_len, q_len, cut, 180)


@pytest.mark.parametrize("sequences", Sequences)
def test_a_schedule_leaves_out_sequences_with_cells_or_without(
    sequences: Sequences, kernel_device: torch.device
) -> None:
    kv_len, q_len, first_cell = [90, 5, 70, 0, 33, 8], [40, 5, 1, 0, 33, 0], [50, 5, 70, 0, 0, 8]
    with_cells = {0, 4}
    left_out = {
        Sequences.ALL: set[int](),
        Sequences.WITH_CELLS: set(range(6)) - with_cells,
        Sequences.WITHOUT_CELLS: with_cells,
    }[sequences]
    cut = replace(ExtendCut(10, sharing=ALL_SHARED), sequences=sequences)
    schedule = torch.full((cut.words(90, 6) + 3,), GARBAGE, dtype=torch.int32, device=kernel_device)
    cells = torch.tensor(first_cell, dtype=torch.int32, device=kernel_device)
    launch_extend_schedule(queries_of(kv_len, q_len, 90, kernel_device), schedule, cut, cells)
    expected = extend_schedule(kv_len, q_len, cut, 90, left_out)
    *words, a, b, c = schedule.tolist()
    assert as_in_the_twin(words, cut) == expected
    assert {a, b, c} == {GARBAGE}


def test_the_list_holds_any_split_of_the_padded_tokens() -> None:
    """Every token of every split is in exactly one tile, including the tail's."""
    tiles = ExtendTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1)
    draw = random.Random(0)
    for _ in range(300):
        num_seqs, tail = draw.randrange(8), draw.choice([0, 1, 40])
        q_len = [draw.choice([0, 1, 4, 5, 17]) for _ in range(num_seqs)]
        num_tokens = sum(q_len) + tail
        cut = ExtendCut.of(tiles, gqa_ratio=4, causal=True)
        words = extend_schedule(q_len, q_len, cut, num_tokens)
        assert len(words) == cut.words(num_tokens, num_seqs)
        tokens = [
            token
            for first, count in zip(words[1::BLOCK_WORDS], words[2::BLOCK_WORDS], strict=True)
            for token in range(first, first + count)
        ]
        assert sorted(tokens) == list(range(num_tokens))


@pytest.mark.parametrize("window_left", [UNLIMITED_WINDOW, 20])
def test_shares_may_have_smaller_key_blocks_than_whole_rows(window_left: int, kernel_device: torch.device) -> None:
    case = Case(kv_len=[75, 9], q_len=[3, 9], heads=(2, 1), dims=(16, 16), page_size=4, window_left=window_left)
    tiles = ExtendTiles(16, 32, 1, 1, programs_per_cu=1, share_block=16)
    assert_serves(run_shared_extend, case, kernel_device, tiles=tiles)

"""Packed masks in extend and its torch twin, against a float64 reference that goes bit by bit.

Every K and V that no bit of its sequence shows is NaN, and so is all memory around.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.attention.visible_keys import PackedMask
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.attention_cases import (
    Case,
    Run,
    assert_served,
    assert_serves,
    build,
    in_each_way,
    run_extend,
    run_extend_twin,
    run_shared_extend,
)

MASKED = Case(
    kv_len=[37, 0, 17, 1, 12, 40],
    q_len=[5, 0, 17, 1, 0, 3],
    dims=(32, 32),
    page_size=4,
    tail=3,
    masked=True,
)

FEATURES = {
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

# Without cells a kernel reads ranges alone; with a window also where they begin.
RANGES = {
    "causal": {},
    "any_end": {"window_right": UNLIMITED_WINDOW},
    "window": {"window_left": 20, "heads": (6, 2)},
    "codes": {"kv": Encoding.E4M3FN, "scales": Scales.TOKEN, "window_right": UNLIMITED_WINDOW},
    "window_and_later": {"window_left": 20, "window_right": UNLIMITED_WINDOW, "sinks": True},
    "chunk": {"window_left": 127, "sinks": True, "soft_cap": 1.5, "slopes": True},
}

EXTENDS = (run_extend, run_shared_extend, run_extend_twin)
run_extends = pytest.mark.parametrize("run", EXTENDS)


@pytest.mark.fast(2)
@in_each_way("feature", FEATURES, EXTENDS)
def test_a_masked_extend_equals_the_reference(
    feature: dict[str, object], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(MASKED, dtype=dtype, **feature), kernel_device)  # type: ignore[arg-type]


@pytest.mark.fast(1)
@in_each_way("feature", RANGES, EXTENDS)
def test_an_extend_over_ranges_equals_the_reference(
    feature: dict[str, object], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    """Keys outside every range are NaN."""
    case = replace(MASKED, kv_len=[137, 0, 67, 1, 12, 140], masked=False, ranged=True, dtype=dtype, **feature)  # type: ignore[arg-type]
    assert_serves(run, case, kernel_device)


@pytest.mark.fast(1)
@run_extends
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
@run_extends
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
@run_extends
def test_keys_before_the_mask_are_seen_whatever_its_bits_are(run: Run, kernel_device: torch.device) -> None:
    """With all bits off, a token's result depends only on the keys before the mask."""
    case = Case([90, 40], [3, 2], heads=(2, 1), dims=(16, 16), page_size=5, masked=True, mask_keys=0)
    tensors = build(case, kernel_device)
    assert isinstance(tensors.mask, PackedMask)
    tensors.mask.words.zero_()
    run(tensors)
    masked, masked_lse = tensors.out.clone(), tensors.lse.clone()
    scores = replace(tensors.scores, visibility=Visibility(window_right=UNLIMITED_WINDOW))
    before = replace(
        tensors, case=replace(case, window_right=UNLIMITED_WINDOW), kv_len=tensors.mask.start, mask=None, scores=scores
    )
    run(before)
    torch.testing.assert_close(masked, before.out)
    torch.testing.assert_close(masked_lse, before.lse)


@pytest.mark.fast(1)
@pytest.mark.parametrize("key_block", [16, 32, 64])
def test_every_tile_reads_its_own_bits(key_block: int, kernel_device: torch.device) -> None:
    tiles = ExtendTiles(query_rows=16, key_block=key_block, num_warps=4, num_stages=1)
    assert_serves(run_extend, replace(MASKED, heads=(3, 1), mask_keys=11), kernel_device, tiles=tiles)


@pytest.mark.fast(1)
@run_extends
def test_a_token_that_sees_nothing_gets_zero(run: Run, kernel_device: torch.device) -> None:
    """This holds with a sink too: without keys there is no output to reduce."""
    tensors = build(replace(MASKED, heads=(2, 1), sinks=True), kernel_device)
    assert isinstance(tensors.mask, PackedMask)
    tensors.mask.words.zero_()
    run(tensors)
    assert (tensors.out == 0).all()
    assert (tensors.lse == float("-inf")).all()


@pytest.mark.fast(1)
@run_extends
def test_every_bit_has_its_effect(run: Run, kernel_device: torch.device) -> None:
    """One bit less changes the output of its token, and of no other."""
    tensors = build(Case([40], [3], heads=(2, 1), dims=(16, 16), page_size=4, masked=True), kernel_device)
    assert isinstance(tensors.mask, PackedMask)
    pages = tensors.k_pages.nan_to_num(1.0), tensors.v_pages.nan_to_num(1.0)
    words = torch.full_like(tensors.mask.words, -1)
    tensors = replace(tensors, k_pages=pages[0], v_pages=pages[1], mask=replace(tensors.mask, words=words))
    run(tensors)
    before = tensors.out.clone()
    for token, key in [(0, 0), (1, 31), (2, 5), (2, 39)]:
        words.fill_(-1)
        cell = token * 40 + key
        words[cell // 32] = ~(1 << cell % 32) if cell % 32 != 31 else 2**31 - 1
        run(tensors)
        changed = (tensors.out != before).flatten(1).any(1).tolist()
        assert changed == [other == token for other in range(3)], f"bit of token {token} and key {key}"


@pytest.mark.fast(1)
@run_extends
def test_a_mask_takes_the_place_of_causality(run: Run, kernel_device: torch.device) -> None:
    case = Case([9, 40], [9, 4], dims=(32, 32), page_size=4)
    causal = build(case, kernel_device)
    run(causal)
    cells = [key <= length - new + t for length, new in ((9, 9), (40, 4)) for t in range(new) for key in range(length)]
    words = [sum(bit << place for place, bit in enumerate(cells[at : at + 32])) for at in range(0, len(cells), 32)]
    mask = PackedMask(
        torch.tensor([*range(9), *range(36, 40)], dtype=torch.int32).to(kernel_device),
        torch.tensor([9] * 9 + [40] * 4, dtype=torch.int32).to(kernel_device),
        torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).to(kernel_device),
        torch.tensor([0, 81, 81 + 160]).to(kernel_device),
        torch.zeros(2, dtype=torch.int32).to(kernel_device),
    )
    masked = replace(causal, out=torch.full_like(causal.out, -1.0), mask=mask)
    run(masked)
    assert_served(masked)

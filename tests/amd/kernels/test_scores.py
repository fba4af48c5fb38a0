"""Windows, soft caps, ALiBi slopes, sinks and non-causal attention.

Decode, extend and their torch twins are compared with a float64 reference that goes key by key. K and V that no token
of a step sees are NaN, as evicted pages may be.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.attention.decode_geometry import has_whole_rows
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.attention_cases import (
    Case,
    Run,
    assert_serves,
    in_each_way,
    run_decode,
    run_decode_twin,
    run_extend,
    run_extend_twin,
    run_shared_decode,
    run_shared_extend,
)

KV_LEN = [33, 0, 1, 16, 70]
DECODES = Case(kv_len=KV_LEN, q_len=[1] * len(KV_LEN), dims=(32, 32), page_size=4)
EXTENDS = Case(kv_len=[45, 0, 17, 1, 12], q_len=[13, 0, 17, 1, 0], dims=(32, 32), page_size=4, tail=3)

FEATURES = {
    "window_0": {"window_left": 0},
    "window_1": {"window_left": 1},
    "window_a_tile_less_one": {"window_left": 15},
    "window_a_tile": {"window_left": 16},
    "window_longer_than_any": {"window_left": 500},
    "cap": {"soft_cap": 0.7},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True},
    "gptoss": {"window_left": 20, "sinks": True, "heads": (16, 2)},
    "gemma2": {"window_left": 18, "soft_cap": 0.5},
    "all": {"window_left": 9, "soft_cap": 1.5, "slopes": True, "sinks": True, "heads": (6, 2)},
    "padded_dims": {"window_left": 9, "sinks": True, "dims": (40, 24)},
    "narrow_v": {"dims": (64, 32)},
    "wide_v": {"dims": (16, 64)},
    "not_causal": {"window_right": UNLIMITED_WINDOW},
    "not_causal_all": {"window_right": UNLIMITED_WINDOW, "soft_cap": 1.5, "slopes": True, "sinks": True},
}

RUN_DECODES = (run_decode, run_shared_decode, run_decode_twin)
RUN_EXTENDS = (run_extend, run_shared_extend, run_extend_twin)
run_extends = pytest.mark.parametrize("run", RUN_EXTENDS)


@pytest.mark.fast(4)
@in_each_way("feature", FEATURES, RUN_DECODES)
def test_decode_equals_the_reference(
    feature: dict[str, object], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(DECODES, dtype=dtype, **feature), kernel_device)  # type: ignore[arg-type]


@pytest.mark.fast(4)
@in_each_way("feature", FEATURES, RUN_EXTENDS)
def test_extend_equals_the_reference(
    feature: dict[str, object], dtype: torch.dtype, run: Run, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(EXTENDS, dtype=dtype, **feature), kernel_device)  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "window_left", [2, 16, *(pytest.param(keys, marks=pytest.mark.nightly) for keys in (0, 1, 14, 15, 17, 31, 32, 33))]
)
def test_every_window_around_tiles_is_right_at_every_length(window_left: int, kernel_device: torch.device) -> None:
    lengths = [*range(1, 5), 14, 15, 16, 17, 18, 30, 31, 32, 33, 34, 47, 48, 49, 50, 64]
    case = Case(lengths, [1] * len(lengths), heads=(1, 1), dims=(16, 16), page_size=5, window_left=window_left)
    for run in (run_decode, run_shared_decode):
        assert_serves(run, case, kernel_device)
    chunks = [min(length, new) for length, new in zip(lengths, [1, 2, 3, 16, 17, 33] * 4, strict=False)]
    for run_of_chunks in (run_extend, run_shared_extend):
        assert_serves(run_of_chunks, replace(case, q_len=chunks), kernel_device)


@pytest.mark.fast(1)
@run_extends
def test_queries_may_outnumber_the_keys_they_look_at(run: Run, kernel_device: torch.device) -> None:
    """Cross-attention has an encoder's KV, with its length."""
    case = Case(kv_len=[5, 40, 1], q_len=[30, 3, 2], dims=(32, 32), page_size=4, window_right=UNLIMITED_WINDOW)
    assert_serves(run, case, kernel_device)


@pytest.mark.parametrize(
    ("window_left", "num_rows", "is_whole"),
    [(-1, 264, False), (127, 1, True), (255, 700, True), (256, 1, False), (1023, 256, True), (1023, 265, False)],
)
def test_a_row_is_whole_where_there_is_nothing_to_balance(window_left: int, num_rows: int, is_whole: bool) -> None:
    """There are 264 programs at a time."""
    for head_dim in (64, 256):
        whole = has_whole_rows(num_rows, num_programs=264, window_left=window_left, head_dim=head_dim)
        assert whole == (is_whole and head_dim == 64)

"""Rotary embeddings by FlashInfer's names equal its formulas in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import indptr, ints
from tests.amd.integrations.oracle import Array

TOKENS, Q_HEADS, K_HEADS, DIM = 9, 3, 2, 16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
NAN = float("nan")


def frequencies(rotary_dim: int, scale: float, theta: float, llama31: tuple[float, float, int] | None) -> Array:
    """Returns radians per position of each pair. Source: FlashInfer's include/flashinfer/pos_enc.cuh, 0.6.18."""
    found = []
    for pair in range(rotary_dim // 2):
        freq = theta ** (-2 * pair / rotary_dim)
        if llama31 is None:
            found.append(freq / scale)
            continue
        low, high, old = llama31
        smooth = freq * old / (2 * math.pi * high - 2 * math.pi * low) - 1 / (high / low - 1)
        smooth = max(0.0, min(1.0, smooth))
        found.append((1 - smooth) * freq / scale + smooth * freq)
    return np.array(found)


def turned(x: Tensor, angles: Array, *, interleave: bool) -> Array:
    """Returns x [tokens, heads, dim] turned by angles [tokens, pairs]; one element after the other."""
    out: Array = x.cpu().double().numpy().copy()
    given, pairs = out.copy(), angles.shape[1]
    for token, pair in np.ndindex(*angles.shape):
        first, second = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + pairs)
        cos, sin = math.cos(angles[token, pair]), math.sin(angles[token, pair])
        out[token, :, first] = given[token, :, first] * cos - given[token, :, second] * sin
        out[token, :, second] = given[token, :, second] * cos + given[token, :, first] * sin
    return out


def poisoned(heads: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Returns rows of several heads, and the memory that they are a part of, whose rest is NaN."""
    memory = torch.full((TOKENS + 1, heads + 2, DIM), NAN, dtype=dtype, device=device)
    x = memory[:TOKENS, 1 : 1 + heads]
    x.copy_(torch.from_numpy(np.random.default_rng(seed).standard_normal(x.shape)))
    return x, memory


def check(found: Tensor, expected: Array, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), torch.from_numpy(expected), atol=TOLERANCE[dtype] * 4, rtol=0)


LLAMA31: dict[str, Any] = {"low_freq_factor": 1.5, "high_freq_factor": 5.0, "old_context_len": 200}
CASES = [
    # rotary_dim, interleave, dtype, arguments, llama31
    (None, False, torch.float32, {"rope_scale": 1.0, "rope_theta": 1e4}, False),
    (8, True, torch.float32, {"rope_scale": 4.0, "rope_theta": 500.0}, False),
    (8, False, torch.float16, {"rope_scale": 2.0, "rope_theta": 1e4}, False),
    (None, True, torch.float32, {"rope_scale": 8.0, "rope_theta": 100.0, **LLAMA31}, True),
    (12, False, torch.float32, {"rope_scale": 8.0, "rope_theta": 100.0, **LLAMA31}, True),
]


@pytest.mark.parametrize(("rotary_dim", "interleave", "dtype", "more", "llama31"), CASES)
def test_heads_turn_by_their_positions(
    rotary_dim: int | None,
    interleave: bool,
    dtype: torch.dtype,
    more: dict[str, Any],
    llama31: bool,
    device: torch.device,
) -> None:
    form = "llama31_rope" if llama31 else "rope"
    smooth = (1.5, 5.0, 200) if llama31 else None
    freq = frequencies(rotary_dim or DIM, more["rope_scale"], more["rope_theta"], smooth)
    options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleave": interleave, **more}
    positions = [0, 1, 5, 1000, 3, 3, 77, 2, 19]
    lens, offsets = (4, 0, 3), (10, 99, 0)
    of_seqs = [10, 11, 12, 13, 0, 1, 2, 0, 0]  # the last two tokens are pads, which do not turn
    for at, arguments, suffix in (
        (positions, (ints(positions, device),), "_pos_ids"),
        (of_seqs, (indptr(lens, device), ints(offsets, device)), ""),
    ):
        (q, q_memory), (k, k_memory) = (poisoned(heads, dtype, device, heads) for heads in (Q_HEADS, K_HEADS))
        expected = [turned(x, np.outer(at, freq), interleave=interleave) for x in (q, k)]
        before = q.clone(), k.clone()
        found = getattr(flashinfer, f"apply_{form}{suffix}")(q, k, *arguments, **options)
        for its, its_expected, x, given in zip(found, expected, (q, k), before, strict=True):
            check(its, its_expected, dtype)
            assert x.equal(given)
        assert getattr(flashinfer, f"apply_{form}{suffix}_inplace")(q, k, *arguments, **options) is None
        for x, its_expected, memory in ((q, expected[0], q_memory), (k, expected[1], k_memory)):
            check(x, its_expected, dtype)
            assert memory[:, 0].isnan().all()
            assert memory[:, -1].isnan().all()
            assert memory[-1].isnan().all()


@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_turn_by_a_table(is_neox: bool, device: torch.device) -> None:
    angles = np.random.default_rng(0).uniform(0, 6, (20, 4))
    table = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), 1)).float().to(device)
    at = [0, 19, 5, 5, 1, 2, 18, 7, 0]
    positions = torch.tensor(at, device=device)
    query, key = (
        torch.from_numpy(np.random.default_rng(heads).standard_normal((TOKENS, heads * DIM))).float().to(device)
        for heads in (Q_HEADS, K_HEADS)
    )
    expected = [turned(x.view(TOKENS, -1, DIM), angles[at], interleave=not is_neox) for x in (query, key)]
    found = flashinfer.apply_rope_with_cos_sin_cache(positions, query, key, DIM, table, is_neox)
    for its, its_expected in zip(found, expected, strict=True):
        assert its.shape[1] in (Q_HEADS * DIM, K_HEADS * DIM)
        check(its.view(TOKENS, -1, DIM), its_expected, torch.float32)
    heads = query.view(TOKENS, Q_HEADS, DIM)  # as some engines pass them
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, heads, key, DIM, table, is_neox)
    for x, its_expected in zip((query, key), expected, strict=True):
        check(x.view(TOKENS, -1, DIM), its_expected, torch.float32)


def test_a_position_that_the_table_lacks_gives_nan(device: torch.device) -> None:
    table = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), 1).to(device)
    q = torch.ones(3, DIM, device=device)
    found, _ = flashinfer.apply_rope_with_cos_sin_cache(ints([3, 4, -1], device), q, q, DIM, table)
    assert found[0].equal(q[0])
    assert found[1:].isnan().all()
    # Their low 32 bits are positions that the table has.
    wide = torch.tensor([3, (1 << 32) + 3, 2 - (1 << 32)], device=device)
    found, _ = flashinfer.apply_rope_with_cos_sin_cache(wide, q, q, DIM, table)
    assert found[0].equal(q[0])
    assert found[1:].isnan().all()


def test_no_tokens_are_none(device: torch.device) -> None:
    q = torch.ones(0, 2, DIM, device=device)
    assert flashinfer.apply_rope_pos_ids(q, q, ints([], device))[0].shape == q.shape


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    q, pos = torch.ones(3, 2, DIM, device=device), ints([0, 1, 2], device)
    strided = torch.ones(3, 2, 2 * DIM, device=device)[..., ::2]
    cases: list[tuple[Any, str]] = [
        (lambda: flashinfer.apply_rope_pos_ids(q[:2], q, pos), "q is torch.float32 .2, 2, 16.* with the 3 tokens"),
        (lambda: flashinfer.apply_rope_pos_ids(q, q.double(), pos), "k is torch.float64"),
        (lambda: flashinfer.apply_rope_pos_ids_inplace(q, strided, pos), "k .* with strides .*a last stride of 1"),
        (lambda: flashinfer.apply_rope_pos_ids(q, q, pos, 5), "rotary_dim is 5; it must be even, and at least 2"),
        (lambda: flashinfer.apply_rope_pos_ids(q, q, pos, 18), "rotary_dim is 18, and q has heads of 16 elements"),
        (lambda: flashinfer.apply_rope_pos_ids(q, q, pos.float()), "positions are torch.float32"),
        (lambda: flashinfer.apply_rope(q, q, pos, pos), r"indptr is \[3\] and offsets \[3\]"),
        (
            lambda: flashinfer.apply_rope_with_cos_sin_cache(pos, q[:, 0], q[:, 0], DIM, q[0].half()),
            "cos_sin_cache is torch.float16",
        ),
        (
            lambda: flashinfer.apply_rope_with_cos_sin_cache(pos, q[:, 0], q[:, 0], 5, q[0]),
            r"query is \[3, 16\]; it must be \[tokens, heads \* head_size\], head_size 5",
        ),
    ]
    for call, message in cases:
        with pytest.raises(BadTensor, match=message):
            call()

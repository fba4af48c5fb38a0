"""Every limit of a row, by a layer that breaks it alone: the clause of each, and that no field has none."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rocm_attn.machine.releases import Release
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Row, Scales
from rocm_attn.providers.contract import OWN_POOL, Limits, PoolSize, PoolTerms
from tests.amd.host.choices import LAYER, with_triton

Said = dict[str, Any]
# They serve every layer below that the limits of a case do not refuse.
WIDE = Limits(
    archs=("gfx942", "gfx95*"),
    dtypes=(torch.bfloat16,),
    head_dim=(64, 256),
    v_head_dim=(64, 256),
    page_size=(16, 128),
    max_gqa_ratio=16,
    window=True,
    soft_cap=True,
    sinks=True,
    encodings=(KVEncoding.LIKE_Q, KVEncoding.E4M3FN),
    scales=(Scales.NONE, Scales.HEAD),
    alibi=True,
    non_causal=True,
    page_strides=True,
    short_kv=True,
    ranges=True,
)
CODED: Said = {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.HEAD}
LATER: Said = {"window_right": UNLIMITED_WINDOW}
BOTH_SIDES: Said = {"window_left": 99, "window_right": 99}
LATENT_OF_4: Said = {"pool": PoolKind.LATENT, "num_q_heads": 8, "num_kv_heads": 1, "row": Row(4)}
STRIDES, ANYWHERE = PoolTerms(page_strides=True), PoolTerms(unaligned_rows=True)
# Each as limits that differ from WIDE, a layer that differs from LAYER, and the clause.
BROKEN: list[tuple[Said, Said, str]] = [
    ({"archs": ("gfx950", "sm_*")}, {}, "arch gfx942 is not one of gfx950, sm_*"),
    (
        {"pools": (PoolKind.LATENT, PoolKind.VECTORIZED)},
        {},
        "it reads latent pages or vectorised pages, not K and V pages",
    ),
    ({"pools": (PoolKind.LATENT,)}, LATENT_OF_4, "it reads rows of one token, not of 4"),
    ({"row_tokens": (2, 128)}, {}, "it reads rows of several tokens, not of 1"),
    ({"tritons": (Release.of("3.6.0"),)}, {}, "it needs Triton 3.6.0, and 3.9.0 is installed"),
    ({"dtypes": (torch.float32, torch.float16)}, {}, "dtype bfloat16 is not one of float32, float16"),
    ({"encodings": (KVEncoding.LIKE_Q,)}, CODED, "it reads K and V as q, not float8_e4m3fn"),
    (
        {"scales": (Scales.LAYER, Scales.TOKEN)},
        CODED,
        "it reads a scale for each layer or a scale for each token and KV head, not a scale for each KV head",
    ),
    (
        {"coded_dim_step": 16},
        {"head_dim": 72, "v_head_dim": 72, **CODED},
        "head_dim/v_head_dim 72/72 of eight-bit pages are not multiples of 16",
    ),
    ({"most_coded_dim": 96}, CODED, "head_dim/v_head_dim 128/128 of eight-bit pages are larger than 96"),
    ({"coded_page_sizes": (32, 64)}, CODED, "it reads eight-bit pages of 32 or 64 tokens, not 16"),
    ({"head_dim": (192, 256)}, {}, "head_dim 128 is outside 192..256"),
    ({"v_head_dim": (64, 96)}, {}, "v_head_dim 128 is outside 64..96"),
    ({"page_size": (32, 64)}, {}, "page_size 16 is outside 32..64"),
    (
        {"exact_dims": ((64, 64), (192, 128)), "head_dim": (1, 1), "v_head_dim": (1, 1)},
        {},
        "head_dim/v_head_dim 128/128 is not 64/64 or 192/128",
    ),
    ({"dims_alike": True}, {"v_head_dim": 64}, "head_dim and v_head_dim must be equal, and are 128 and 64"),
    ({"dim_step": 8}, {"head_dim": 100, "v_head_dim": 100}, "head_dim/v_head_dim 100/100 are not multiples of 8"),
    ({"page_sizes": (32, 64), "page_size": (1, 1)}, {}, "page_size 16 is not 32 or 64"),
    ({"max_gqa_ratio": 3}, {}, "4 query heads share a KV head; at most 3 may"),
    ({"least_gqa_ratio": 5}, {}, "4 query heads share a KV head; at least 5 must"),
    ({"window": False}, {"window_left": 4095}, "it has no sliding window (window_left 4095)"),
    ({"ranges": False}, {"chunk": 64}, "it has no chunks of keys (64)"),
    ({"ranges": False}, BOTH_SIDES, "it has no window with later keys (window_left 99, window_right 99)"),
    ({"others": False}, {}, "it serves layers with chunks, or with windows of later keys, alone"),
    ({"least_window": 129}, {"window_left": 127}, "a window of 128 keys is shorter than its least, 129"),
    ({"soft_cap": False}, {"logits_soft_cap": 50.0}, "it has no logits soft cap (50)"),
    ({"sinks": False}, {"has_sinks": True}, "it has no attention sinks"),
    ({"alibi": False}, {"has_alibi_slopes": True}, "it has no ALiBi slopes"),
    ({"non_causal": False}, LATER, "it is causal only"),
    ({"lse": False}, {"wants_lse": True}, "it returns no log-sum-exp"),
    (
        {"lse_of_slopes": False},
        {"wants_lse": True, "has_alibi_slopes": True},
        "it returns no log-sum-exp for layers with ALiBi slopes",
    ),
    (
        {"max_side_bytes": 2 * 64 * 16 * 8 * 128 - 1},
        {},
        "K or V of a layer takes 2097152 bytes, and its offsets reach 2097151",
    ),
]
# The same, with the terms of the layer's pool before the clause.
BROKEN_BY_POOLS: list[tuple[Said, Said, PoolTerms, str]] = [
    ({"page_strides": False}, {}, STRIDES, "it needs contiguous pages, and these may have other strides"),
    (
        {"page_strides": False, "even_slots": True},
        {},
        STRIDES,
        "it needs pages whose slots lie at equal distances, and these may have other strides",
    ),
    ({"aligned_sides": True}, {}, ANYWHERE, "it needs K and V at multiples of 16 bytes, and these may begin anywhere"),
    ({"aligned_rows": True}, {}, ANYWHERE, "it needs rows at multiples of 16 elements, and these may begin anywhere"),
    ({"short_kv": False}, LATER, PoolTerms(short_kv=True), "it cannot serve sequences with more new tokens than keys"),
    (
        {},
        BOTH_SIDES,
        PoolTerms(short_kv=True),
        "sequences may have more new tokens than keys, and a window's later keys need a place",
    ),
]
GFX942 = with_triton("gfx942", Release.of("3.9.0"))


def refusals(limits: Said, layer: Said, terms: PoolTerms) -> tuple[str, ...]:
    return replace(WIDE, **limits).refusals(replace(LAYER, **layer), GFX942, PoolSize(64, 1024, 4, terms))


@pytest.mark.parametrize(("limits", "layer", "clause"), BROKEN)
def test_a_broken_limit_is_said_in_its_clause(limits: Said, layer: Said, clause: str) -> None:
    assert refusals(limits, layer, OWN_POOL) == (clause,)


@pytest.mark.parametrize(("limits", "layer", "terms", "clause"), BROKEN_BY_POOLS)
def test_a_limit_that_a_pool_breaks_is_said_in_its_clause(
    limits: Said, layer: Said, terms: PoolTerms, clause: str
) -> None:
    assert refusals(limits, layer, terms) == (clause,)


def test_every_limit_has_a_case() -> None:
    broken = [limits for limits, *_ in BROKEN] + [limits for limits, *_ in BROKEN_BY_POOLS]
    assert {name for limits in broken for name in limits} == {field.name for field in fields(Limits)}

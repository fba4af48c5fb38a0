"""Extend for Hopper over pages of eight bits, and over pages with strides, against a float64 reference.

It needs that GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.hopper_tiles import hopper_segment_tiles
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_hopper import LIMITS
from tests.amd.kernels.attention_cases import ALL_SHARED, assert_served, build
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.hopper_cases import FORMS, NONE_SHARED, RAGGED, assert_right, run_hopper

pytestmark = OF_HOPPERS_KERNELS

CODED_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (64, 128), (256, 256), (80, 48), (16, 16)]
coded_dims = pytest.mark.parametrize("dims", CODED_DIMS, ids=str)
codings = pytest.mark.parametrize(
    ("kv", "scales"),
    [
        (Encoding.E4M3FN, Scales.LAYER),
        (Encoding.E4M3FN, Scales.HEAD),
        (Encoding.E4M3FN, Scales.TOKEN),
        (Encoding.E5M2, Scales.HEAD),
        (Encoding.E5M2, Scales.TOKEN),
    ],
    ids=str,
)


def test_every_page_size_of_codes_has_a_form() -> None:
    assert tuple(page_size for page_size, *_ in FORMS) == LIMITS.coded_page_sizes
    assert {dtype for *_, dtype in FORMS} == set(LIMITS.dtypes)


@coded_dims
@codings
@pytest.mark.parametrize(("page_size", "heads", "dtype"), FORMS)
def test_extend_of_eight_bit_pages_equals_the_reference(
    page_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    kv: Encoding,
    scales: Scales,
    dims: tuple[int, int],
    device: torch.device,
) -> None:
    """This includes the padded tail, and NaN in codes and scales that no token sees."""
    case = replace(RAGGED, heads=heads, page_size=page_size, dtype=dtype, dims=dims, kv=kv, scales=scales)
    assert_right(case, device)


@coded_dims
@codings
@pytest.mark.parametrize(
    "scores",
    [{"window_left": 100}, {"sinks": True, "window_left": 63, "page_size": 128}, {"window_right": UNLIMITED_WINDOW}],
    ids=str,
)
def test_windows_sinks_and_attention_to_all_keys_are_right_over_eight_bit_pages(
    scores: dict[str, Any], kv: Encoding, scales: Scales, dims: tuple[int, int], device: torch.device
) -> None:
    assert_right(replace(RAGGED, dims=dims, kv=kv, scales=scales, **scores), device)


@coded_dims
@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD])
def test_rows_of_zeros_see_all_keys_alike_however_small_the_scale_of_k_is(
    scales: Scales, dims: tuple[int, int], device: torch.device
) -> None:
    """Rows are converted to float16 with a scale, and the product of both scales and -inf must not be NaN."""
    case = replace(RAGGED, dims=dims, kv=Encoding.E5M2, scales=scales, tail=0)
    tensors = build(case, device)
    assert tensors.k_scale is not None
    tensors.q.zero_()
    tensors.k_scale.fill_(2.0**-40)
    run_hopper(tensors, NONE_SHARED)
    seen = [key + 1 for length, new in zip(case.kv_len, case.q_len, strict=True) for key in range(length - new, length)]
    lse = torch.tensor(seen, device=device).float().log()[:, None].expand_as(tensors.lse)
    torch.testing.assert_close(tensors.lse, lse)


Sides = tuple[torch.Tensor, torch.Tensor]


def packed(k: torch.Tensor, v: torch.Tensor, between: int = 0) -> Sides:
    """Returns pages in which K and V of a head lie next to each other, as vLLM packs them, with NaN around them.

    between: pages between a page and the next one, as of other layers
    """
    shape = (len(k), 1 + between, *k.shape[1:3], k.shape[3] + v.shape[3])
    memory = torch.full(shape, float("nan"), device=k.device, dtype=k.dtype)
    memory[:, 0] = torch.cat([k, v], 3)
    return memory[:, 0, ..., : k.shape[3]], memory[:, 0, ..., k.shape[3] :]


def between_layers(k: torch.Tensor, v: torch.Tensor) -> Sides:
    """The same, with pages of two other layers between."""
    return packed(k, v, between=2)


def heads_first(k: torch.Tensor, v: torch.Tensor) -> Sides:
    """Returns pages with the tokens of a head next to each other."""
    k, v = (side.transpose(1, 2).contiguous().transpose(1, 2) for side in (k, v))
    return k, v


ALIKE = [(64, 64), (80, 80), (128, 128), (256, 256)]


@pytest.mark.parametrize("lay_out", [packed, between_layers, heads_first], ids=lambda each: each.__name__)
@pytest.mark.parametrize("page_size", [2, 16, 48])
@pytest.mark.parametrize(
    ("dims", "in_segments"), [*((dims, False) for dims in [*ALIKE, (192, 128)]), *((dims, True) for dims in ALIKE)]
)
def test_pages_whose_slots_lie_at_equal_distances_are_read_where_they_are(
    dims: tuple[int, int], in_segments: bool, page_size: int, lay_out: Callable[..., Sides], device: torch.device
) -> None:
    tensors = build(replace(RAGGED, dims=dims, page_size=page_size), device)
    k, v = lay_out(tensors.k_pages, tensors.v_pages)
    assert not k.is_contiguous()
    tiles = hopper_segment_tiles(dims[0], page_size) if in_segments else None
    run_hopper(replace(tensors, k_pages=k, v_pages=v), NONE_SHARED if in_segments else ALL_SHARED, tiles=tiles)
    assert_served(tensors)

"""Codes of one eight-bit encoding as those of another: each code is looked up, and its change reported."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.paging.convert import KEEPING_BITS, code_tables

FN, FNUZ, E5M2 = Encoding.E4M3FN, Encoding.E4M3FNUZ, Encoding.E5M2
SATURATED, ROUNDED, NOT_A_NUMBER = 1, 2, 3


def converted(source: Encoding, target: Encoding, ratio: float) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns the value of each of 256 codes times ratio, that of its new code, and how many have each change."""
    codes, change = code_tables(source, target, torch.tensor([ratio], dtype=torch.float64))
    given = torch.arange(256, dtype=torch.uint8).view(source.dtype).double() * ratio
    return given.nan_to_num(), codes[0].view(target.dtype).double(), torch.bincount(change[0], minlength=4).tolist()


def test_every_number_of_e4m3fn_is_kept_by_scales_twice_as_large() -> None:
    """NaN becomes 0, and so does negative 0, whose code is NaN in E4M3FNUZ."""
    given, found, change = converted(FN, FNUZ, 1 / KEEPING_BITS[FN, FNUZ])
    assert torch.equal(found, given)
    assert change == [254, 0, 0, 2]


def test_back_only_the_largest_has_no_like_and_that_is_reported() -> None:
    given, found, change = converted(FNUZ, FN, 1 / KEEPING_BITS[FNUZ, FN])
    assert change == [253, 2, 0, 1]
    assert set((found - given).abs().tolist()) == {0.0, 480.0 - 448.0}


@pytest.mark.parametrize(("target", "saturated"), [(FNUZ, 2 * 7), (E5M2, 0)])
def test_under_one_scale_what_is_beyond_saturates_and_what_is_small_rounds(target: Encoding, saturated: int) -> None:
    given, found, change = converted(FN, target, 1.0)
    # 256, 288, 320, 352, 384, 416 and 448, of both signs, are beyond 240.
    assert (change[SATURATED], change[NOT_A_NUMBER]) == (saturated, 2)
    nearest = given.clamp(-target.largest, target.largest).float().to(target.dtype).double()
    assert torch.equal(found, nearest)
    assert change[ROUNDED] == int(((nearest != given) & (given.abs() <= target.largest)).sum())

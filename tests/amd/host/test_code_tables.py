"""Codes of one eight-bit encoding as those of another: each code is looked up, and a change of any is reported."""

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.paging.convert import KEEPING_BITS, code_tables

FN, FNUZ, E5M2 = Encoding.E4M3FN, Encoding.E4M3FNUZ, Encoding.E5M2


def converted(source: Encoding, target: Encoding, ratio: float) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns the value of each of 256 codes times ratio, that of its new code, and whether all count as kept."""
    codes, is_exact = code_tables(source, target, torch.tensor([ratio], dtype=torch.float64))
    given = torch.arange(256, dtype=torch.uint8).view(source.dtype).double() * ratio
    return given.nan_to_num(), codes[0].view(target.dtype).double(), is_exact


def test_every_number_of_e4m3fn_is_kept_by_scales_twice_as_large() -> None:
    """NaN becomes 0, and so does negative 0, whose code is NaN in E4M3FNUZ."""
    given, found, is_exact = converted(FN, FNUZ, 1 / KEEPING_BITS[FN, FNUZ])
    assert is_exact
    assert torch.equal(found, given)


def test_back_only_the_largest_has_no_like_and_that_is_reported() -> None:
    given, found, is_exact = converted(FNUZ, FN, 1 / KEEPING_BITS[FNUZ, FN])
    assert not is_exact
    assert set((found - given).abs().tolist()) == {0.0, 480.0 - 448.0}


@pytest.mark.parametrize("target", [FNUZ, E5M2])
def test_under_one_scale_what_is_beyond_saturates_and_what_is_small_rounds(target: Encoding) -> None:
    given, found, is_exact = converted(FN, target, 1.0)
    assert not is_exact
    assert torch.equal(found, given.clamp(-target.largest, target.largest).float().to(target.dtype).double())

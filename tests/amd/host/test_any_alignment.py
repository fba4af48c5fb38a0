"""Arguments of launches: at any alignment a kernel has one variant, and strides are counted in 8 elements."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.cache.layer_pages import LayerPages


@triton.jit(do_not_specialize=["num"])  # type: ignore[untyped-decorator]
def _kernel(to, given, num, other, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def test_no_argument_is_specialised_on_its_alignment_and_numbers_stay_as_they_were() -> None:
    """Triton refuses constants among the names, and takes a number in both lists for one whose value does not count."""
    before, after = _kernel.params, at_any_alignment(_kernel).params
    assert [each.name for each in after if each.do_not_specialize_on_alignment] == ["to", "given", "num", "other"]
    assert [each.name for each in after if each.do_not_specialize] == ["num"]
    assert [each.name for each in after if each.is_constexpr] == ["BLOCK"]
    assert not any(each.do_not_specialize_on_alignment for each in before)


def args_of(head_dim: int, *, pages: Tensor | None = None, out: Tensor | None = None) -> AttendArgs:
    """Returns three tokens of four heads over pages of two heads."""
    nothing = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(3, 4, head_dim)
    k = torch.zeros(5, 4, 2, head_dim) if pages is None else pages
    queries = Queries(nothing, nothing, nothing, 3, 1, 1)
    out = torch.zeros_like(q) if out is None else out
    table = torch.zeros(2, 7, dtype=torch.int32)
    lse = torch.zeros(3, 4)
    return AttendArgs(q, LayerPages.plain(k, k), table, queries, out, lse, None, None, nothing, lse)


@pytest.mark.parametrize(("head_dim", "unit"), [(16, 1), (64, 1), (8, 8), (24, 8), (40, 8), (72, 8), (20, 1), (7, 1)])
def test_strides_of_odd_multiples_of_8_are_counted_in_8(head_dim: int, unit: int) -> None:
    assert args_of(head_dim).stride_unit == unit


def test_one_stride_that_is_no_multiple_of_8_leaves_all_as_they_are() -> None:
    assert args_of(40, out=torch.zeros(3, 4, 44)[..., :40]).stride_unit == 1
    assert args_of(40, out=torch.zeros(3, 4, 48)[..., :40]).stride_unit == 8
    assert args_of(64, out=torch.zeros(3, 4, 72)[..., :64]).stride_unit == 8


def test_a_stride_that_needs_64_bits_is_not_divided() -> None:
    memory = torch.empty(1, device="meta")
    far = memory.as_strided((1, 4, 2, 40), (1 << 31, 80, 40, 1))
    assert args_of(40, pages=far).stride_unit == 1
    near = memory.as_strided((1, 4, 2, 40), ((1 << 31) - 8, 80, 40, 1))
    assert args_of(40, pages=near).stride_unit == 8

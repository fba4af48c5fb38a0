"""A kernel at any alignment has one variant, whatever the addresses of its tensors are."""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.any_alignment import at_any_alignment


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

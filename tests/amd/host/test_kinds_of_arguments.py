"""launch() tells apart all arguments that Triton compiles a kernel apart for, at any alignment."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.launch import kinds_of


def _some_kernel(tensor: Any, number: int, free: int, fraction: float, flag: bool, NUMBER: tl.constexpr) -> None:
    pass


KERNEL: Any = triton.jit(_some_kernel, do_not_specialize=["free"])


MEMORY = torch.empty(64)
NUMBERS = st.sampled_from([0, 1, 2, 16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63])
FAR = torch.from_numpy(np.zeros(2**29, np.float32))  # of 2 GiB, which nothing touches: torch would fill it
TENSORS = st.sampled_from([None, FAR, MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.bfloat16(), MEMORY.int()])
ARGUMENTS = st.tuples(TENSORS, NUMBERS, NUMBERS, st.sampled_from([0.0, 1.0]), st.booleans(), st.integers(0, 2))


@pytest.fixture(scope="module", params=[GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)], ids=str)
def specialised(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Triton's function from arguments to what it compiles a kernel for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0" if request.param.backend == "hip" else None)
        backend = make_backend(request.param)
        yield create_function_from_signature(KERNEL.signature, KERNEL.params, backend)


@given(first=ARGUMENTS, second=ARGUMENTS)
@example(first=(MEMORY, 1, 1, 0.0, True, 0), second=(MEMORY, 2, 1, 0.0, True, 0))
@example(first=(MEMORY, 16, 1, 0.0, True, 0), second=(MEMORY, 17, 1, 0.0, True, 0))
@example(first=(MEMORY, 2, 2**31, 0.0, True, 0), second=(MEMORY, 2, 2, 0.0, True, 0))
@example(first=(MEMORY, 2, 2, 0.0, True, 0), second=(MEMORY[1:], 2, 2, 0.0, True, 0))
@example(first=(MEMORY, 2, 2, 0.0, True, 0), second=(FAR, 2, 2, 0.0, True, 0))
def test_arguments_of_one_kind_have_one_variant(
    specialised: Any, first: tuple[object, ...], second: tuple[object, ...]
) -> None:
    if kinds_of(KERNEL, first) == kinds_of(KERNEL, second):
        assert specialised(*first)[1] == specialised(*second)[1]


def test_arguments_that_only_triton_knows_have_no_kind() -> None:
    assert kinds_of(KERNEL, ((MEMORY,), 1, 1, 0.0, True, 0)) is None


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

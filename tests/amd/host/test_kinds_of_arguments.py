"""launch() tells apart all arguments that Triton compiles a kernel apart for: Triton's own function judges it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from rocm_attn.kernels.launch import kinds_of


def _some_kernel(tensor: Any, number: int, free: int, fraction: float, flag: bool, NUMBER: tl.constexpr) -> None:
    pass


KERNEL: Any = triton.jit(_some_kernel, do_not_specialize=["free"])


MEMORY = torch.empty(64)
NUMBERS = st.sampled_from([0, 1, 2, 16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63])
FAR = torch.empty(2**31, dtype=torch.int8).view(torch.float32)  # of 2 GiB, which nothing touches
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

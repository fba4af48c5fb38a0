"""What decode's speed on sm_90 hangs on, and what an early merge needs to be right, as Triton compiles them."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.candidate_kernels import decode_kernels
from tests.amd.offline.matrix import Row

ARCHS = ("sm_90", "gfx942")


@functools.cache
def kernels(arch: str, *, early_merge: bool) -> dict[str, CompiledKernel]:
    """Decode and its merge, of heads of 128."""
    row = Row(arch, (32, 8), (128, 128), torch.bfloat16, 16)
    return decode_kernels(row, DecodeTiles(64, 4, 2, 2, early_merge=early_merge))


def test_an_early_merge_waits_for_the_end_of_decode() -> None:
    found = kernels("sm_90", early_merge=True)
    assert "griddepcontrol.launch_dependents" in found["_decode_kernel"].asm["ptx"]
    assert found["_merge_kernel"].metadata.launch_pdl
    # Once, before anything that decode wrote is read, and in every program: after no branch.
    code = found["_merge_kernel"].asm["ptx"]
    before = code[: code.index("griddepcontrol.wait")]
    assert code.count("griddepcontrol.wait") == 1
    assert not re.search(r"\bbra\b", before)


def test_decode_itself_starts_when_all_before_it_has_ended() -> None:
    assert not kernels("sm_90", early_merge=True)["_decode_kernel"].metadata.launch_pdl


@pytest.mark.parametrize("arch", ARCHS)
def test_no_other_merge_is_early(arch: str) -> None:
    for kernel in kernels(arch, early_merge=False).values():
        assert not getattr(kernel.metadata, "launch_pdl", False)
        assert "griddepcontrol" not in kernel.asm.get("ptx", "")


def test_page_numbers_are_extended_without_a_sign() -> None:
    """ptxas moves the extension of a sign far ahead, and waits for the load of the number at once."""
    code = kernels("sm_90", early_merge=False)["_decode_kernel"].asm["ttir"]
    assert re.search(r"arith\.extui .*: tensor<64xi32> to tensor<64xi64>", code)

"""What decode's speed on sm_90 hangs on, and what early launches need to be right, as Triton compiles them."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.candidate_kernels import decode_kernels, storing_decode
from tests.amd.offline.matrix import Row

ARCHS = ("sm_90", "gfx942")


@functools.cache
def kernels(arch: str, *, early: bool) -> dict[str, CompiledKernel]:
    """Decode and its merge, of heads of 128."""
    row = Row(arch, (32, 8), (128, 128), torch.bfloat16, 16)
    return decode_kernels(row, DecodeTiles(64, 4, 2, 2, early=early))


@pytest.mark.parametrize("name", ["_decode_kernel", "_merge_kernel"])
def test_an_early_launch_waits_for_the_end_of_the_one_before(name: str) -> None:
    kernel = kernels("sm_90", early=True)[name]
    assert kernel.metadata.launch_pdl
    code = kernel.asm["ptx"]
    assert code.count("griddepcontrol.launch_dependents") == code.count("griddepcontrol.wait") == 1
    # In every program, after no branch: what comes after this launch shall find the one before it ended too.
    before = code[: code.index("griddepcontrol.wait")]
    assert not re.search(r"\bbra\b", before)
    if name == "_decode_kernel":
        # Any launch before it may have written what decode reads, and the merge reads the schedule before it waits.
        assert "ld.global" not in before
        assert "griddepcontrol.launch_dependents" not in before


@pytest.mark.parametrize("arch", ARCHS)
def test_no_other_launch_is_early(arch: str) -> None:
    for kernel in kernels(arch, early=False).values():
        assert not getattr(kernel.metadata, "launch_pdl", False)
        assert "griddepcontrol" not in kernel.asm.get("ptx", "")


def test_page_numbers_are_extended_without_a_sign() -> None:
    """ptxas moves the extension of a sign far ahead, and waits for the load of the number at once."""
    code = kernels("sm_90", early=False)["_decode_kernel"].asm["ttir"]
    assert re.search(r"arith\.extui .*: tensor<64xi32> to tensor<64xi64>", code)


def test_what_a_program_stores_is_there_before_it_reads_keys() -> None:
    code = storing_decode(Row("sm_90", (32, 8), (128, 128), torch.bfloat16, 16), DecodeTiles(64, 4, 2, 2)).asm["ttir"]
    (barrier,) = re.finditer(r"\b(gpu|ttg)\.barrier\b", code)
    assert max(at.start() for at in re.finditer("tt.atomic_rmw", code)) < barrier.start() < code.index("scf.for")
    assert not re.search(r"\.barrier\b", kernels("sm_90", early=False)["_decode_kernel"].asm["ttir"])

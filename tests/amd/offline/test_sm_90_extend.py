"""Conditions of correct early launches of extend on sm_90, and its loads of page numbers, as Triton compiles them."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonExtend
from rocm_attn.providers.triton_hopper import TRITONS
from tests.amd.offline.candidate_kernels import extend_kernels
from tests.amd.offline.code_object import read_nvidia_code
from tests.amd.offline.early_launches import assert_waits
from tests.amd.offline.matrix import Row


@functools.cache
def kernels(arch: str, *, early: bool, by_number: bool = False) -> dict[str, CompiledKernel]:
    """Extend that shares rows and its merge, of heads of 64 in pages of 16."""
    tiles = ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, one_launch=True, early=early, by_number=by_number)
    return extend_kernels(Row(arch, (32, 8), (64, 64), torch.bfloat16, 16), tiles)


@pytest.mark.parametrize("name", ["_extend_kernel", "_extend_merge_kernel"])
def test_an_early_launch_waits_for_the_end_of_the_one_before(name: str) -> None:
    assert_waits(kernels("sm_90", early=True)[name], reads_before=name != "_extend_kernel")


def test_no_other_launch_is_early() -> None:
    found = kernels("sm_90", early=False)
    assert list(found) == ["_extend_kernel", "_extend_merge_kernel"]
    for kernel in found.values():
        assert not getattr(kernel.metadata, "launch_pdl", False)
        assert "griddepcontrol" not in kernel.asm.get("ptx", "")


def test_page_numbers_are_loaded_once_for_each_page() -> None:
    """Four numbers for 64 keys, extended without a sign (key_loop.py)."""
    numbers = re.compile(r"arith\.extui .*: tensor<4xi32> to tensor<4xi64>")
    assert numbers.search(kernels("sm_90", early=False, by_number=True)["_extend_kernel"].asm["ttir"])
    assert not numbers.search(kernels("sm_90", early=False)["_extend_kernel"].asm["ttir"])


@pytest.mark.nightly
def test_by_number_changes_nothing_on_amd() -> None:
    on_amd = kernels("gfx942", early=False, by_number=True)["_extend_kernel"].asm["ttir"]
    assert on_amd == kernels("gfx942", early=False)["_extend_kernel"].asm["ttir"]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("heads", "dim", "page_size"),
    [
        ((12, 3), 24, 1),
        ((60, 6), 32, 16),
        ((8, 8), 64, 1),
        ((32, 8), 64, 16),
        ((8, 8), 80, 1),
        ((12, 12), 96, 16),
        ((32, 32), 128, 16),
        ((8, 1), 192, 1),
    ],
)
def test_tiles_of_short_prefills_are_launched_once_and_early_and_spill_hardly_anything(
    heads: tuple[int, int], dim: int, page_size: int
) -> None:
    """They were tuned for rows that are shared out."""
    target = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
    layer = Problem(*heads, dim, torch.bfloat16, page_size)
    kernel = select(layer, target, "triton").kernel(StepKind.PREFILL).bound
    assert isinstance(kernel, KernelByTokens)
    whole = [sized.kernel for sized in kernel.short if isinstance(sized.kernel, TritonExtend)]
    assert whole
    for each in whole:
        found = extend_kernels(Row("sm_90", heads, (dim, dim), torch.bfloat16, page_size), each.tiles)
        (name,) = found
        assert each.tiles.early == (each.tiles.query_rows <= 64)
        if each.tiles.early:
            assert_waits(found[name], reads_before=False)
        code = read_nvidia_code(found[name])
        # Large blocks of 128 columns with Triton 3.9; none with 3.6, which Hopper's table is made for.
        assert code.stack_bytes <= (24 if (dim, each.tiles.query_rows) == (128, 128) else 0)
        assert code.local_bytes == 0
        assert code.shared_bytes <= target.lds_bytes

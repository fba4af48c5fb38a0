"""A record of a launch has a parameter for each that the compiled kernel takes, whatever it was specialised on."""

from __future__ import annotations

import re
import struct
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from rocm_attn.kernels.packed_launches import packed
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.small_kernels import launch_copy

ARCHS = pytest.mark.parametrize("arch", ["sm_90", "gfx942"])


def vectors(size: int, dtype: torch.dtype = torch.float32, *, first: int = 0) -> tuple[Tensor, Tensor]:
    """Two vectors, of which the first begins so many elements after a multiple of 16 bytes."""
    return torch.zeros(size + first, dtype=dtype)[first:], torch.zeros(size, dtype=dtype)


def copy_of(source: Tensor, out: Tensor, arch: str) -> CompiledKernel:
    (compiled,) = compiled_by(lambda: launch_copy(source, out), arch)
    return compiled


def parameters_taken(compiled: CompiledKernel) -> list[int]:
    """Bytes of each parameter that the binary takes from its caller."""
    if "ptx" in compiled.asm:
        head = compiled.asm["ptx"].split(".visible .entry", 1)[1].split(")", 1)[0]
        return [int(bits) // 8 for bits in re.findall(r"\.param \.[usbf](\d+)", head)]
    arguments = compiled.asm["amdgcn"].split(".args:", 1)[1].split(".group_segment", 1)[0]
    kinds = re.findall(r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", arguments)
    return [int(size) for size, kind in kinds if not kind.startswith("hidden")]


def parameters_given(compiled: CompiledKernel, *arguments: object) -> list[int]:
    """The values of a record's parameters."""
    run = SimpleNamespace(launch=print)
    parts = {name: getattr(compiled, name) for name in ("metadata", "packed_metadata", "src")}
    record = packed(SimpleNamespace(run=run, function=1, **parts), (1,), arguments)
    assert record is not None
    num_parameters = struct.unpack_from("=Q6I", record)[-1]
    return [struct.unpack_from("=Qq", record, 32 + 16 * at)[0] for at in range(num_parameters)]


@ARCHS
@pytest.mark.oldest_triton
def test_a_record_has_what_the_binary_takes_and_addresses_of_scratch_memory(arch: str) -> None:
    for size in (48, 1):
        compiled = copy_of(*vectors(size), arch)
        given = parameters_given(compiled, 16, 32, size, 256)
        assert given == [16, 32, *([size] if size > 1 else []), 0, 0], "what is 1 is compiled in"
        taken = parameters_taken(compiled)
        assert taken == [8, 8, *([4] if size > 1 else []), 8, 8]


@ARCHS
def test_another_dtype_alignment_or_number_is_another_variant(arch: str) -> None:
    """So a prepared launch, which holds its variant, is prepared anew for each of these."""
    usual = copy_of(*vectors(48), arch)
    assert copy_of(*vectors(64), arch).hash == usual.hash, "another multiple of 16 is not"
    others = vectors(48, torch.float16), vectors(48, first=1), vectors(49), vectors(1)
    hashes = {copy_of(*other, arch).hash for other in others}
    assert len(hashes) == len(others)
    assert usual.hash not in hashes

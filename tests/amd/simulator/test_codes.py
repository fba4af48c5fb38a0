"""Every eight-bit code is read and written exactly by machine code: by instructions of the arch and by arithmetic."""

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.kernels.codes_kernels import FP8, decode_all, encode, numbers_to_encode
from tests.amd.simulator.kernel_cases import CPU

# The instructions that an arch has for its own encodings; others are arithmetic there.
BY_HARDWARE = {("gfx942", Encoding.E4M3FNUZ), ("gfx950", Encoding.E4M3FN), ("gfx950", Encoding.E5M2)}
each_encoding = pytest.mark.parametrize("encoding", FP8, ids=lambda encoding: encoding.name)
each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
@each_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_is_read_exactly(arch: str, encoding: Encoding, dtype: torch.dtype) -> None:
    with simulated(arch) as simulation:
        numbers, wanted = decode_all(encoding, dtype, CPU)
    assert torch.equal(numbers.isnan(), wanted.isnan())
    as_bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    is_number = ~wanted.isnan()
    assert torch.equal(numbers.view(as_bits)[is_number], wanted.view(as_bits)[is_number])
    (mnemonics,) = simulation.mnemonics.values()
    converts = any(name.startswith("v_cvt") and ("fp8" in name or "bf8" in name) for name in mnemonics)
    assert converts == ((arch, encoding) in BY_HARDWARE)


@each_arch
@each_encoding
def test_every_number_becomes_the_nearest_code_and_what_is_beyond_the_largest(arch: str, encoding: Encoding) -> None:
    with simulated(arch):
        codes, wanted = encode(numbers_to_encode(encoding), encoding)
    assert torch.equal(codes, wanted)

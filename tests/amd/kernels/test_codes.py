"""All 8-bit codes are read and written bit for bit like torch's own casts."""

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding
from tests.amd.kernels.codes_kernels import FP8, decode_all, encode, numbers_to_encode

each_encoding = pytest.mark.parametrize("encoding", FP8, ids=lambda encoding: encoding.name)
_INTEGERS = {2: torch.int16, 4: torch.int32}


@each_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_is_read_exactly(encoding: Encoding, dtype: torch.dtype, kernel_device: torch.device) -> None:
    numbers, wanted = decode_all(encoding, dtype, kernel_device)
    assert torch.equal(numbers.isnan(), wanted.isnan())
    as_bits = _INTEGERS[dtype.itemsize]
    is_number = ~wanted.isnan()
    assert torch.equal(numbers.view(as_bits)[is_number], wanted.view(as_bits)[is_number])


def test_the_codes_that_are_no_numbers_are_those_of_the_specifications(kernel_device: torch.device) -> None:
    nan = {e: decode_all(e, torch.float32, kernel_device)[0].isnan().nonzero().flatten().tolist() for e in FP8}
    assert nan[Encoding.E4M3FN] == [0x7F, 0xFF]
    assert nan[Encoding.E4M3FNUZ] == [0x80]
    assert nan[Encoding.E5M2] == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


@each_encoding
def test_numbers_between_codes_become_the_nearest_and_the_even_one_of_two(
    encoding: Encoding, kernel_device: torch.device
) -> None:
    codes, wanted = encode(numbers_to_encode(encoding).to(kernel_device), encoding)
    assert torch.equal(codes, wanted)


@pytest.mark.fast
@each_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_sixteen_bits_is_written_as_torch_writes_it(
    encoding: Encoding, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes, wanted = encode(numbers[~numbers.isnan()].to(kernel_device), encoding)
    assert torch.equal(codes, wanted)


@each_encoding
def test_what_is_beyond_the_largest_is_the_largest_and_never_infinite(
    encoding: Encoding, kernel_device: torch.device
) -> None:
    codes, _ = encode(torch.tensor([1e30, -1e30, float("inf"), encoding.largest], device=kernel_device), encoding)
    numbers = codes[:4].cpu().view(encoding.dtype).float()
    assert numbers.tolist() == [encoding.largest, -encoding.largest, encoding.largest, encoding.largest]

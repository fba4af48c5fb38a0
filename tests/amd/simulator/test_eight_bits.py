"""Conversions between float32 and eight bits, every code, by instructions and in kernels, against torch's dtypes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding
from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.kernels.codes_kernels import FP8, decode_all, encode, numbers_to_encode
from tests.amd.simulator.kernel_cases import CPU
from tests.amd.simulator.snippet import execute, floats

DTYPES = {
    ("fp8", "gfx942"): torch.float8_e4m3fnuz,
    ("bf8", "gfx942"): torch.float8_e5m2fnuz,
    ("fp8", "gfx950"): torch.float8_e4m3fn,
    ("bf8", "gfx950"): torch.float8_e5m2,
}
every_dtype = pytest.mark.parametrize(("kind", "arch"), DTYPES)


def of_codes(codes: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(codes.astype(np.uint8)).view(dtype).float().numpy()


@every_dtype
def test_every_code_is_worth_what_torch_says(kind: str, arch: str) -> None:
    for quarter in range(4):
        codes = np.arange(64 * quarter, 64 * (quarter + 1), dtype=np.uint32)
        want = of_codes(codes, DTYPES[kind, arch])
        others = codes ^ 0x55
        register = codes | others << np.uint32(8) | codes << np.uint32(16) | others << np.uint32(24)
        pair = execute(f"v_cvt_pk_f32_{kind}_e32 v[2:3], v0", vector={0: register}, arch=arch)
        high = execute(f"v_cvt_pk_f32_{kind}_sdwa v[2:3], v0 src0_sel:WORD_1", vector={0: register}, arch=arch)
        one = execute(f"v_cvt_f32_{kind}_sdwa v2, v0 src0_sel:BYTE_2", vector={0: register}, arch=arch)
        for core in (pair, high, one):
            np.testing.assert_array_equal(floats(core, 2), want)
        np.testing.assert_array_equal(floats(pair, 3), of_codes(others, DTYPES[kind, arch]))


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_gfx950_widens_with_a_power_of_two(kind: str) -> None:
    dtype = DTYPES[kind, "gfx950"]
    codes = np.arange(0, 128, 2, dtype=np.uint32)
    register = codes << np.uint32(16) | (codes ^ 1) << np.uint32(24) | np.uint32(0xFFFF)
    want = torch.from_numpy(np.stack([of_codes(codes, dtype), of_codes(codes ^ 1, dtype)], 1)) * 4
    for wide, torch_dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        core = execute(f"v_cvt_scalef32_pk_{wide}_{kind} v2, v0, 4.0 op_sel:[1,0,0]", vector={0: register})
        given = torch.from_numpy(core.vector[2].view(np.int16).reshape(-1, 2).copy()).view(torch_dtype)
        assert torch.equal(given.float().nan_to_num(7), want.to(torch_dtype).float().nan_to_num(7))
    core = execute(f"v_cvt_scalef32_pk_f32_{kind} v[2:3], v0, 4.0 op_sel:[1,0]", vector={0: register})
    for row in (0, 1):
        np.testing.assert_array_equal(floats(core, 2 + row), want[:, row].numpy())


@pytest.mark.parametrize(("unused", "kept"), [("UNUSED_PAD", 0), ("UNUSED_PRESERVE", 0xABCD00EF)])
def test_a_byte_of_a_register_is_written_beside_others(unused: str, kept: int) -> None:
    words: dict[int, Array | int] = {0: 4, 1: 0x12345678, 2: 0xABCD12EF}
    line = f"v_lshrrev_b32_sdwa v2, v0, v1 dst_sel:BYTE_1 dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD"
    assert set(execute(line, vector=words).vector[2].tolist()) == {kept | 0x67 << 8}


def test_a_byte_of_a_register_may_be_a_result_of_16_bits() -> None:
    words: dict[int, Array | int] = {0: 0xFFFE, 1: 3, 2: 0xABCD12EF}
    line = "v_max_i16_sdwa v2, v0, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD"
    assert set(execute(line, vector=words).vector[2].tolist()) == {0xABCD03EF}


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize(("wide", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_gfx950_narrows_16_bits_by_a_power_of_two(kind: str, wide: str, dtype: torch.dtype) -> None:
    pairs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = pairs.float().to(DTYPES[kind, "gfx950"]).view(torch.uint8).numpy().astype(np.uint32)
    words: dict[int, Array | int] = {0: (4 * pairs).view(torch.int32)[:, 0].numpy().view(np.uint32), 2: 0xABCD1234}
    codes = want[:, 0] | want[:, 1] << np.uint32(8)
    line = f"v_cvt_scalef32_pk_{kind}_{wide} v2, v0, 4.0"
    np.testing.assert_array_equal(execute(line, vector=words).vector[2], 0xABCD0000 | codes)
    high = execute(f"{line} op_sel:[0,0,1]", vector=words).vector[2]
    np.testing.assert_array_equal(high, 0x1234 | codes << np.uint32(16))


def roundings(dtype: torch.dtype) -> Tensor:
    """Every finite number, those half way between two, and their neighbours in float32."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middles, torch.full_like(middles, side)) for side in (-1e9, 1e9)]
    values = torch.cat([finite, middles, *near])
    return torch.cat([values, values.new_zeros(-len(values) % 128)])


@every_dtype
def test_numbers_are_rounded_to_the_nearest_code_as_torch_rounds_them(kind: str, arch: str) -> None:
    dtype = DTYPES[kind, arch]
    for a, b in roundings(dtype).numpy().reshape(-1, 2, 64):
        want_a, want_b = (
            torch.from_numpy(half).to(dtype).view(torch.uint8).numpy().astype(np.uint32) for half in (a, b)
        )
        held = np.full(64, 0xABCD1234, np.uint32)
        words = {0: a.view(np.uint32), 1: b.view(np.uint32), 2: held}
        low = execute(f"v_cvt_pk_{kind}_f32 v2, v0, v1", vector=words, arch=arch).vector[2]
        high = execute(f"v_cvt_pk_{kind}_f32 v2, v0, v1 op_sel:[0,0,1]", vector=words, arch=arch).vector[2]
        np.testing.assert_array_equal(low, 0xABCD0000 | want_a | want_b << np.uint32(8))
        np.testing.assert_array_equal(high, 0x1234 | want_a << np.uint32(16) | want_b << np.uint32(24))
        if arch == "gfx950":
            words |= {0: (4 * a).view(np.uint32), 1: (4 * b).view(np.uint32)}
            line = f"v_cvt_scalef32_pk_{kind}_f32 v2, v0, v1, 4.0 op_sel:[0,0,0,1]"
            np.testing.assert_array_equal(execute(line, vector=words, arch=arch).vector[2], high)


@every_dtype
def test_what_is_too_large_is_no_finite_number(kind: str, arch: str) -> None:
    strange = np.tile(np.array([np.inf, -np.inf, np.nan, 1e30], np.float32), 16)
    words: dict[int, Array | int] = {0: strange.view(np.uint32), 1: strange.view(np.uint32), 2: 0}
    core = execute(f"v_cvt_pk_{kind}_f32 v2, v0, v1", vector=words, arch=arch)
    assert not np.isfinite(of_codes(core.vector[2] & 255, DTYPES[kind, arch])).any()


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

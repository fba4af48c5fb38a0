"""Matrix products against float64, element by element of the documented register layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.snippet import execute, floats

SHAPES = {
    "gfx942": ["32x32x2_f32", "16x16x4_f32", "32x32x4_xf32", "16x16x8_xf32"]
    + [f"{m}_{t}" for m in ("32x32x8", "16x16x16") for t in ("f16", "bf16")]
    + ["32x32x16_fp8_fp8", "16x16x32_fp8_fp8"],
    "gfx950": [f"{m}_{t}" for m in ("32x32x16", "16x16x32") for t in ("f16", "bf16", "fp8_fp8")]
    + ["32x32x64_f8f6f4", "16x16x128_f8f6f4"],
}
DTYPES = {"f32": torch.float32, "xf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
EIGHT_BITS = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def result_place(size: int, row: int, column: int) -> tuple[int, int]:
    """Register and lane that hold an element of the result."""
    if size == 16:
        return row % 4, row // 4 * 16 + column
    return row // 8 * 4 + row % 4, row // 4 % 2 * 32 + column


def result_of(core: Core, size: int) -> torch.Tensor:
    """The result of a product, [size, size] in float64, from register 0 on."""
    found = torch.empty(size, size, dtype=torch.float64)
    for row in range(size):
        for column in range(size):
            index, lane = result_place(size, row, column)
            found[row, column] = float(floats(core, index)[lane])
    return found


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(("arch", "shape"), [(arch, shape) for arch, shapes in SHAPES.items() for shape in shapes])
def test_products_are_where_the_layout_says(arch: str, shape: str, accumulates: bool) -> None:
    sizes, _, kind = shape.partition("_")
    size, _, depth = map(int, sizes.split("x"))
    dtype = DTYPES.get(kind, EIGHT_BITS[arch])
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, depth, generator=generator).to(dtype) for _ in range(2))
    if kind == "xf32":
        # Numbers of as many digits as count.
        a, b = (each.half().float() for each in (a, b))
    c = torch.randn(size, size, generator=generator)
    per_lane = depth * size // 64
    num_inputs = max(1, per_lane * dtype.itemsize // 4)
    num_results = size * size // 64
    vector = {index: np.zeros(64, np.uint32) for index in range(64)}
    for first, matrix in ((32, a), (40, b)):
        words = torch.zeros(64, num_inputs, dtype=torch.int32)
        values = words.view(dtype)
        for row in range(size):
            for k in range(depth):
                values[k // per_lane * size + row, k % per_lane] = matrix[row, k]
        for index in range(num_inputs):
            vector[first + index] = words[:, index].numpy().view(np.uint32)
    for row in range(size):
        for column in range(size):
            index, lane = result_place(size, row, column)
            vector[index][lane] = np.float32(c[row, column]).view(np.uint32)
    into = f"v[0:{num_results - 1}]"
    first_b = f"v[40:{39 + num_inputs}]" if num_inputs > 1 else "v40"
    first_a = f"v[32:{31 + num_inputs}]" if num_inputs > 1 else "v32"
    core = execute(
        f"v_mfma_f32_{shape} {into}, {first_a}, {first_b}, {into if accumulates else '0'}", vector=vector, arch=arch
    )
    expected = a.double() @ b.double().T + (c.double() if accumulates else 0)
    torch.testing.assert_close(result_of(core, size), expected, atol=3e-5, rtol=2e-5)


def test_products_ignore_exec_and_reach_accumulation_registers() -> None:
    ones = int(np.float32(1).view(np.uint32))
    core = execute("v_mfma_f32_16x16x4_f32 a[4:7], v0, v1, 1.0", vector={0: ones, 1: ones}, exec_mask=1)
    for index in range(4):
        assert set(floats(core, 256 + 4 + index).tolist()) == {5.0}


@pytest.mark.parametrize(("bits", "shift"), [("[0,0,0]", 0), ("[0,0,0] op_sel:[0,1,0]", 8), ("[0,1,0]", 16)])
@pytest.mark.parametrize("shape", ["32x32x64", "16x16x128"])
def test_scales_are_powers_of_two_of_a_lanes_values(shape: str, bits: str, shift: int) -> None:
    size, depth = int(shape[:2]), int(shape.rpartition("x")[2])
    generator = torch.Generator().manual_seed(1)
    lanes = 64 // size
    a, b = (torch.randn(size, depth, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    exponents = torch.randint(120, 135, (2, lanes, size), generator=generator)
    vector = {index: np.zeros(64, np.uint32) for index in range(64)}
    for first, matrix in ((32, a), (40, b)):
        words = matrix.view(size, lanes, depth // lanes).transpose(0, 1).reshape(64, -1).contiguous().view(torch.int32)
        for index in range(words.shape[1]):
            vector[first + index] = words[:, index].numpy().view(np.uint32)
    for register, each, place in zip((50, 51), exponents, (0, shift), strict=True):
        vector[register] = (each.flatten().numpy() << place).astype(np.uint32)
    last = size * size // 64 - 1
    line = f"v_mfma_scale_f32_{shape}_f8f6f4 v[0:{last}], v[32:39], v[40:47], 0, v50, v51 op_sel_hi:{bits}"
    core = execute(line, vector=vector, arch="gfx950")
    scaled = [
        matrix.double().view(size, lanes, -1) * 2.0 ** (each.T[:, :, None].double() - 127)
        for matrix, each in zip((a, b), exponents, strict=True)
    ]
    expected = scaled[0].flatten(1) @ scaled[1].flatten(1).T
    torch.testing.assert_close(result_of(core, size), expected, atol=1e-3, rtol=1e-4)


def test_scales_without_their_bytes_are_refused() -> None:
    line = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 0, v24, v25"
    with pytest.raises(UnknownInstruction, match="op_sel_hi"):
        execute(line, vector={}, arch="gfx950")

"""Matrix products against float64, element by element of the documented register layout."""

import numpy as np
import pytest
import torch

from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import UnknownInstruction
from tests.amd.simulator.snippet import execute, floats

DTYPES = {"f32": torch.float32, "xf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8}
EIGHT_BITS = {
    "gfx942": {"fp8": torch.float8_e4m3fnuz, "bf8": torch.float8_e5m2fnuz},
    "gfx950": {"fp8": torch.float8_e4m3fn, "bf8": torch.float8_e5m2},
}
PAIRS = [(a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
# The end of a mnemonic, and the kinds of A and B.
SHAPES = {
    "gfx942": [(f"{m}_{t}", t, t) for m, t in (("32x32x2", "f32"), ("16x16x4", "f32"))]
    + [(f"{m}_{t}", t, t) for m, t in (("32x32x4", "xf32"), ("16x16x8", "xf32"))]
    + [(f"{m}_{t}", t, t) for m in ("32x32x8", "16x16x16") for t in ("f16", "bf16")]
    + [(f"{m}_{a}_{b}", a, b) for m in ("32x32x16", "16x16x32") for a, b in PAIRS]
    + [(f"{m}_i8", "i8", "i8") for m in ("32x32x16", "16x16x32")],
    "gfx950": [(f"{m}_{t}", t, t) for m in ("32x32x16", "16x16x32") for t in ("f16", "bf16", "i8")]
    + [(f"{m}_fp8_fp8", "fp8", "fp8") for m in ("32x32x16", "16x16x32")]
    + [(f"{m}_f8f6f4", a, b) for m in ("32x32x64", "16x16x128") for a, b in PAIRS]
    + [(f"{m}_i8", "i8", "i8") for m in ("32x32x32", "16x16x64")],
}


def result_place(size: int, row: int, column: int) -> tuple[int, int]:
    """Register and lane that hold an element of the result."""
    if size == 16:
        return row % 4, row // 4 * 16 + column
    return row // 8 * 4 + row % 4, row // 4 % 2 * 32 + column


def result_of(core: Core, size: int, dtype: type = np.float32) -> torch.Tensor:
    """The result of a product, [size, size] in float64, from register 0 on."""
    found = torch.empty(size, size, dtype=torch.float64)
    for row in range(size):
        for column in range(size):
            index, lane = result_place(size, row, column)
            found[row, column] = float(core.vector[index].view(dtype)[lane])
    return found


def random_matrix(size: int, depth: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(size, depth, generator=generator).to(dtype)
    return torch.randint(-128, 128, (size, depth), generator=generator, dtype=dtype)


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(
    ("arch", "shape", "kinds"), [(arch, shape, kinds) for arch, shapes in SHAPES.items() for shape, *kinds in shapes]
)
def test_products_are_where_the_layout_says(arch: str, shape: str, kinds: list[str], accumulates: bool) -> None:
    size, _, depth = map(int, shape.partition("_")[0].split("x"))
    dtypes = [EIGHT_BITS[arch].get(kind) or DTYPES[kind] for kind in kinds]
    result = torch.int32 if dtypes[0] == torch.int8 else torch.float32
    generator = torch.Generator().manual_seed(0)
    a, b = (random_matrix(size, depth, dtype, generator) for dtype in dtypes)
    if kinds[0] == "xf32":
        # Numbers of as many digits as count.
        a, b = (each.half().float() for each in (a, b))
    c = random_matrix(size, size, result, generator)
    per_lane = depth * size // 64
    num_inputs = max(1, per_lane * a.itemsize // 4)
    num_results = size * size // 64
    vector = {index: np.zeros(64, np.uint32) for index in range(64)}
    for first, matrix in ((32, a), (40, b)):
        words = torch.zeros(64, num_inputs, dtype=torch.int32)
        values = words.view(matrix.dtype)
        for row in range(size):
            for k in range(depth):
                values[k // per_lane * size + row, k % per_lane] = matrix[row, k]
        for index in range(num_inputs):
            vector[first + index] = words[:, index].numpy().view(np.uint32)
    for row in range(size):
        for column in range(size):
            index, lane = result_place(size, row, column)
            vector[index][lane] = c[row, column].numpy().view(np.uint32)
    into = f"v[0:{num_results - 1}]"
    first_b = f"v[40:{39 + num_inputs}]" if num_inputs > 1 else "v40"
    first_a = f"v[32:{31 + num_inputs}]" if num_inputs > 1 else "v32"
    line = f"v_mfma_{'i' if result == torch.int32 else 'f'}32_{shape} {into}, {first_a}, {first_b}, "
    line += into if accumulates else "0"
    if shape.endswith("f8f6f4"):
        line += "".join(f" {name}:1" for name, kind in zip(("cbsz", "blgp"), kinds, strict=True) if kind == "bf8")
    core = execute(line, vector=vector, arch=arch)
    expected = a.double() @ b.double().T + (c.double() if accumulates else 0)
    found = result_of(core, size, c.numpy().dtype.type)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=2e-5)


@pytest.mark.parametrize("modifiers", ["cbsz:4", "blgp:2", "cbsz:1 blgp:3"])
def test_formats_of_six_and_four_bits_are_refused(modifiers: str) -> None:
    with pytest.raises(UnknownInstruction, match="six and four bits"):
        execute(f"v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 0 {modifiers}", vector={}, arch="gfx950")


def test_products_of_bytes_wrap_around() -> None:
    minus = 0x80808080
    core = execute(
        "v_mfma_i32_16x16x32_i8 v[8:11], v[0:1], v[2:3], v[4:7]",
        vector={**dict.fromkeys(range(4), minus), **dict.fromkeys(range(4, 8), 0x7FFFFFFF)},
    )
    assert set(core.vector[8].tolist()) == {0x7FFFFFFF + 32 * 128 * 128}


def test_products_ignore_exec_and_reach_accumulation_registers() -> None:
    ones = int(np.float32(1).view(np.uint32))
    core = execute("v_mfma_f32_16x16x4_f32 a[4:7], v0, v1, 1.0", vector={0: ones, 1: ones}, exec_mask=1)
    for index in range(4):
        assert set(floats(core, 256 + 4 + index).tolist()) == {5.0}


@pytest.mark.parametrize(("bits", "shift"), [("[0,0,0]", 0), ("[0,0,0] op_sel:[0,1,0]", 8), ("[0,1,0]", 16)])
@pytest.mark.parametrize("shape", ["32x32x64", "16x16x128"])
def test_scales_are_powers_of_two_of_32_values_in_a_row(shape: str, bits: str, shift: int) -> None:
    size, depth = int(shape[:2]), int(shape.rpartition("x")[2])
    generator = torch.Generator().manual_seed(1)
    lanes = 64 // size
    a, b = (torch.randn(size, depth, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    exponents = torch.randint(120, 135, (2, lanes, size), generator=generator)
    vector = {index: np.zeros(64, np.uint32) for index in range(64)}
    for first, matrix in ((32, a), (40, b)):
        # Two runs of 16 values in a lane.
        runs = matrix.view(size, 2, lanes, 16).permute(2, 0, 1, 3)
        words = runs.reshape(64, -1).contiguous().view(torch.int32)
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

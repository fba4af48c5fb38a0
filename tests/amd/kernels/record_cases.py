"""Records as their format defines them, byte by byte: made at random, and read as float64, with no code of the kernels.

A record: 512 codes (or another multiple of 128), a float32 scale for every 128 of them, then bfloat16 elements. Bytes
that nothing may read are 0xff, which makes scales, rests and codes of E4M3FN NaN.
"""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding

POISON = 0xFF
# Exponent bias and the codes that are NaN: OCP OFP8, and gfx942's E4M3FNUZ.
_BIASES = {Encoding.E4M3FN: 7, Encoding.E4M3FNUZ: 8}
_NANS = {Encoding.E4M3FN: (0x7F, 0xFF), Encoding.E4M3FNUZ: (0x80,)}
_GROUP = 128


def record_bytes(dims: tuple[int, int]) -> int:
    """Returns the bytes of a record. dims: of a row, and of its first elements that have codes"""
    head_dim, v_head_dim = dims
    return v_head_dim + v_head_dim // _GROUP * 4 + (head_dim - v_head_dim) * 2


def random_records(
    read: Tensor, dims: tuple[int, int], encoding: Encoding, generator: torch.Generator, *, any_scale: bool
) -> Tensor:
    """Returns records of random finite numbers, uint8 [..., bytes], and poison where they are not read. read: bool

    any_scale: whether scales are any numbers; if not they are powers of two, with which values are exact in bfloat16
    """
    head_dim, v_head_dim = dims
    codes = torch.randint(0, 256, (*read.shape, v_head_dim), generator=generator, dtype=torch.uint8)
    for nan in _NANS[encoding]:
        codes[codes == nan] = 0x31
    scales = (torch.rand(*read.shape, v_head_dim // _GROUP, generator=generator) + 0.5) / 64
    if not any_scale:
        scales = torch.exp2(scales.log2().round())
    rest = torch.randn(*read.shape, head_dim - v_head_dim, generator=generator).bfloat16()
    records = torch.cat((codes, scales.view(torch.uint8), rest.view(torch.uint8)), -1)
    return records.masked_fill(~read[..., None], POISON)


def record_value(record: Tensor, dims: tuple[int, int], encoding: Encoding) -> Tensor:
    """Returns the row of one record, float64 [head_dim]. record: uint8 [bytes]"""
    head_dim, v_head_dim = dims
    held, groups = bytes(record.tolist()), v_head_dim // _GROUP
    scales = struct.unpack_from(f"<{groups}f", held, v_head_dim)
    values = [_value_of_code(held[d], encoding) * scales[d // _GROUP] for d in range(v_head_dim)]
    halves = struct.unpack_from(f"<{head_dim - v_head_dim}H", held, v_head_dim + 4 * groups)
    # A bfloat16 is the upper half of a float32.
    rest = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return torch.tensor(values + rest, dtype=torch.float64)


def _value_of_code(code: int, encoding: Encoding) -> float:
    if code in _NANS[encoding]:
        return float("nan")
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - _BIASES[encoding])
    return -magnitude if code & 0x80 else magnitude


@cache
def _magnitudes(encoding: Encoding) -> list[tuple[float, int]]:
    """Returns the value of each code that is not negative, and the code."""
    return [(_value_of_code(code, encoding), code) for code in range(0x80) if code not in _NANS[encoding]]


def code_of_value(value: float, encoding: Encoding) -> int:
    """Returns the code nearest to a value, the even one of two, the largest of larger values; no -0 in E4M3FNUZ."""
    nearest = min(_magnitudes(encoding), key=lambda each: (abs(abs(value) - each[0]), each[1] & 1))[1]
    is_negative = math.copysign(1.0, value) < 0 and not (nearest == 0 and encoding is Encoding.E4M3FNUZ)
    return nearest | 0x80 * is_negative


def record_of_row(row: Tensor, dims: tuple[int, int], encoding: Encoding) -> bytes:
    """Returns a record by vLLM's formula: 2 ** ceil(log2(max(largest / 448, 1e-4))), with 224 for E4M3FNUZ."""
    largest = 448.0 if encoding is Encoding.E4M3FN else 224.0
    values, codes, scales = row.double().tolist(), b"", b""
    for first in range(0, dims[1], 128):
        group = values[first : first + 128]
        scale = 2.0 ** math.ceil(math.log2(max(max(map(abs, group)) / largest, 1e-4)))
        codes += bytes(code_of_value(value / scale, encoding) for value in group)
        scales += struct.pack("<f", scale)
    return codes + scales + row[dims[1] :].bfloat16().view(torch.uint8).numpy().tobytes()

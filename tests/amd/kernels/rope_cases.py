"""A layer's work on its rows, in float64 and by complex numbers: a reference that shares no code with the kernels."""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.row_work import RopePairs, RopeTable, RowNorm

GENERATOR_SEED = 7


def random_rope(dim: int, num_positions: int, pairs: RopePairs, *, at_end: bool, device: torch.device) -> RopeTable:
    """Returns a table of angles that differ in every pair and position."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    frequencies = torch.rand(dim // 2, generator=generator) * 2
    table = RopeTable.of_frequencies(frequencies, num_positions, factor=1.25, pairs=pairs, at_end=at_end)
    return RopeTable(table.cos_sin.to(device), pairs, at_end)


def random_norm(dim: int, offset: float, dtype: torch.dtype, device: torch.device) -> RowNorm:
    """Returns a norm with random weights around those that change little."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    weight = torch.randn(dim, generator=generator) * 0.3 + (1.0 - offset)
    return RowNorm(weight.to(device, dtype), 1e-5, offset)


def normalised(rows: Tensor, norm: RowNorm | None) -> Tensor:
    """Returns float64 rows [..., dim] with their first elements normalised."""
    rows = rows.double().clone()
    if norm is not None:
        first = rows[..., : norm.dim]
        length = (first.square().sum(-1, keepdim=True) / norm.dim + norm.eps).sqrt()
        rows[..., : norm.dim] = first / length * (norm.weight.double() + norm.offset)
    return rows


def turned(rows: Tensor, positions: Tensor, rope: RopeTable | None, *, back: bool = False) -> Tensor:
    """Returns rotated float64 rows [T, heads, dim]. A pair is a complex number, and a product rotates it."""
    if rope is None:
        return rows
    rows, num_pairs = rows.clone(), rope.dim // 2
    line = rope.cos_sin.double()[positions.long()]
    factor = torch.complex(line[:, :num_pairs], line[:, num_pairs:])[:, None]
    begin = rows.shape[-1] - rope.dim if rope.at_end else 0
    places = torch.arange(rope.dim, device=rows.device) + begin
    if rope.pairs is RopePairs.HALVES:
        first, second = places[:num_pairs], places[num_pairs:]
    else:
        first, second = places[::2], places[1::2]
    product = torch.complex(rows[..., first], rows[..., second]) * (factor.conj() if back else factor)
    rows[..., first], rows[..., second] = product.real, product.imag
    return rows


def assert_rounded(found: Tensor, want: Tensor) -> None:
    """Checks found against float64 want, computed in float32 and rounded once: half a last place, and sums' errors."""
    eps = torch.finfo(found.dtype).eps
    bound = want.abs() * eps * 0.5 + 2e-5 * max(1.0, float(want.abs().max()))
    error = (found.double() - want).abs()
    assert bool((error <= bound).all()), f"off by {float((error - bound).max())} more than rounding"

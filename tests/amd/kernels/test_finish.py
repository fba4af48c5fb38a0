"""The kernel after attention, and its twin: output gates, and the reversed rotation, against float64."""

from collections.abc import Callable

import pytest
import torch

from rocm_attn.kernels.attention.finish import launch_finish
from rocm_attn.kernels.cache.row_work import RopePairs
from rocm_attn.kernels.refs import rope as twins
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.rope_cases import assert_rounded, random_rope, turned

Launch = Callable[..., None]
either = pytest.mark.parametrize("finish", [launch_finish, twins.finish], ids=["kernel", "twin"])
NUM_TOKENS, NUM_PADS = 5, 2


@pytest.mark.fast
@either
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("gated", ["no gate", "of heads", "of elements"])
@pytest.mark.parametrize(
    ("heads", "dim", "turns", "pairs"),
    [
        (3, 40, 16, RopePairs.NEIGHBOURS),
        (3, 40, 0, RopePairs.HALVES),
        (6, 24, 24, RopePairs.HALVES),
        (4, 512, 64, RopePairs.NEIGHBOURS),
    ],
)
def test_outputs_are_turned_back_and_gated(
    finish: Launch,
    dtype: torch.dtype,
    gated: str,
    heads: int,
    dim: int,
    turns: int,
    pairs: RopePairs,
    kernel_device: torch.device,
) -> None:
    """Rows are between others; pads are zero, whatever their gates are."""
    if gated == "no gate" and not turns:
        return  # the caller launches nothing in this case: tests/amd/runtime/test_row_work.py
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(NUM_TOKENS + NUM_PADS, heads + 1, dim + 8, generator=generator).to(kernel_device, dtype)
    out, before = wide[:, :heads, :dim], wide.clone()
    out[NUM_TOKENS:] = 0
    gate = None
    if gated != "no gate":
        shape = (len(out), heads, dim) if gated == "of elements" else (len(out), heads)
        gate = (torch.randn(shape, generator=generator) * 4).to(kernel_device, dtype)
        gate[NUM_TOKENS:] = float("nan")
    rope = random_rope(turns, 50, pairs, at_end=True, device=kernel_device) if turns else None
    positions = torch.tensor([0, 3, 49, 7, 20, 0, 0], dtype=torch.int32, device=kernel_device)
    counts = torch.tensor([2, NUM_TOKENS, 1, 0], dtype=torch.int32, device=kernel_device)
    want = turned(before[:, :heads, :dim].double(), positions, rope, back=True)
    if gate is not None:
        want = want / (1 + (-(gate if gate.dim() == 3 else gate[..., None]).double()).exp())
    finish(out, gate, rope, positions, counts)
    assert_rounded(out[:NUM_TOKENS], want[:NUM_TOKENS])
    assert not out[NUM_TOKENS:].any(), "a pad is no longer zero"
    assert torch.equal(wide[:, heads:], before[:, heads:])
    assert torch.equal(wide[..., dim:], before[..., dim:])


@either
def test_a_gate_of_any_size_saturates(finish: Launch, kernel_device: torch.device) -> None:
    out = torch.full((3, 1, 16), 2.0, device=kernel_device)
    gate = torch.tensor([[float("inf")], [-1e4], [1e4]], device=kernel_device)
    positions = torch.zeros(3, dtype=torch.int32, device=kernel_device)
    finish(out, gate, None, positions, torch.tensor([3, 3, 1, 0], dtype=torch.int32, device=kernel_device))
    assert out[:, 0, 0].tolist() == [2.0, 0.0, 2.0]


@either
def test_what_was_turned_is_turned_back(finish: Launch, kernel_device: torch.device) -> None:
    rope = random_rope(16, 50, RopePairs.NEIGHBOURS, at_end=True, device=kernel_device)
    positions = torch.tensor([49, 7], dtype=torch.int32, device=kernel_device)
    rows = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    out = turned(rows.double(), positions, rope).float()
    finish(out, None, rope, positions, torch.tensor([2, 2, 1, 0], dtype=torch.int32, device=kernel_device))
    rows[..., 24:] *= 1.25**2  # the table's cosines and sines contain this factor in both directions
    torch.testing.assert_close(out, rows, rtol=1e-5, atol=1e-5)

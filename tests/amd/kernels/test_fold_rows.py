"""Rows that several tokens' values and gates are folded into: the kernel and its twin equal the formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.refs.cache import fold_rows
from rocm_attn.problem import Row
from tests.amd.tolerances import BOUNDS
from tests.amd.worlds.compressed import folded

Fold = Callable[..., None]
NAN = float("nan")

both = pytest.mark.parametrize("fold", [launch_fold_rows, fold_rows], ids=["kernel", "twin"])


def int32(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def folded_by(
    fold: Fold, row: Row, columns: int, kv_len: list[int], q_len: list[int], page_size: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """For each sequence, its rows by the launch, with NaN in unused places, and its rows by the formula."""
    generator, width = torch.Generator().manual_seed(0), columns * (1 + row.overlaps)
    widest = -(-max(kv_len) // page_size)
    num_pages = 1 + len(kv_len) * widest
    pages = [torch.full((num_pages, page_size, 1, width), NAN) for _ in range(2)]
    table = torch.randperm(num_pages - 1, generator=generator).int().view(len(kv_len), widest) + 1
    rows_of, positions, sides = [], [], []
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        values, gates = (torch.randn(length, width, generator=generator) * size for size in (1.0, 3.0))
        for token in range(length):
            page = int(table[seq, token // page_size])
            for side, given in zip(pages, (values, gates), strict=True):
                side[page, token % page_size, 0] = given[token]
        rows_of += [seq] * new
        positions += range(length - new, length)
        sides.append((values, gates))
    num_tokens, pads = len(positions), 3
    out = torch.full((num_tokens + pads, columns + 5), NAN, device=device)[:, :columns]
    fold(
        LayerPages.plain(*(side.to(device) for side in pages)),
        table.to(device),
        int32(rows_of + [0] * pads, device),
        int32(positions + [row.tokens - 1] * pads, device),
        int32([len(kv_len), num_tokens, 0, 0], device),
        out,
        tokens=row.tokens,
        overlaps=row.overlaps,
    )
    assert not out[num_tokens:].any(), "a pad got a row"
    found, wanted, first = [], [], 0
    for (values, gates), length, new in zip(sides, kv_len, q_len, strict=True):
        mine = out[first : first + new].cpu()
        ends = [at for at in range(new) if (length - new + at + 1) % row.tokens == 0]
        assert not mine[[at for at in range(new) if at not in ends]].any(), "a token that ends no row got one"
        found.append(mine[ends])
        rows = folded(values, gates, row)
        wanted.append(torch.stack(rows[len(rows) - len(ends) :]) if ends else torch.zeros(0, columns).double())
        first += new
    return found, wanted


@pytest.mark.fast
@both
@pytest.mark.parametrize(
    ("row", "columns", "page_size"),
    [
        (Row(4, overlaps=True), 24, 8),
        (Row(2), 130, 4),
        (Row(128), 16, 128),
        (Row(3, overlaps=True), 8, 6),
        (Row(16), 8, 32),
    ],
    ids=str,
)
def test_a_row_is_the_mean_of_its_tokens_by_the_softmax_of_their_gates(
    fold: Fold, row: Row, columns: int, page_size: int, kernel_device: torch.device
) -> None:
    """The first row of a sequence, rows over two pages, several rows of a step, and none."""
    tokens = row.tokens
    kv_len = [tokens, 2 * tokens + 1, 3 * tokens, tokens - 1, 3 * tokens]
    found, wanted = folded_by(fold, row, columns, kv_len, [tokens, 3, 2 * tokens, 1, 1], page_size, kernel_device)
    assert [len(rows) for rows in found] == [1, 1 if tokens > 1 else 3, 2, 0, 1]
    bound = BOUNDS[torch.float32]
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), want, atol=bound.atol, rtol=bound.rtol)


@pytest.mark.fast
@both
def test_gates_of_any_size_give_numbers(fold: Fold, kernel_device: torch.device) -> None:
    """One gate takes all of the weight: the row is that token's values, bit for bit."""
    values, gates = torch.randn(2, 4, 1, 8), torch.full((2, 4, 1, 8), -1e30)
    gates[1, 2] = 2e38
    rows = torch.empty(1, 8, device=kernel_device)
    at = (int32([[1]], kernel_device), int32([0], kernel_device), int32([3], kernel_device))
    pages = LayerPages.plain(values.to(kernel_device), gates.to(kernel_device))
    fold(pages, *at, int32([1, 1, 0, 0], kernel_device), rows, tokens=4, overlaps=False)
    assert torch.equal(rows.cpu()[0], values[1, 2, 0])

"""Folds of sequences with known values and gates: rows by a launch, and by the formula in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Row
from tests.amd.kernels.attention_cases import ints
from tests.amd.tolerances import BOUNDS
from tests.amd.worlds.compressed import folded

Fold = Callable[..., None]
NAN = float("nan")


def step_of_state(table: Tensor, row_of_token: Tensor, position_of_token: Tensor, counts: Tensor) -> StepTensors:
    """The tensors of a step that folding reads."""
    named = {"table": table, "row_of_token": row_of_token, "position_of_token": position_of_token, "counts": counts}
    return StepTensors.of(counts[:0], **named)


def folded_by(
    fold: Fold, row: Row, columns: int, kv_len: list[int], q_len: list[int], page_size: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """For each sequence, its rows by the launch, with NaN in unused places, and its rows by the formula."""
    generator, width = torch.Generator().manual_seed(0), columns * (1 + row.overlaps)
    widest = -(-max(kv_len) // page_size)
    num_pages = 1 + len(kv_len) * widest
    pages = [torch.full((num_pages, page_size, 1, width), NAN, dtype=row.state_dtype) for _ in range(2)]
    table = torch.randperm(num_pages - 1, generator=generator).int().view(len(kv_len), widest) + 1
    rows_of, positions, sides = list[int](), list[int](), list[tuple[Tensor, Tensor]]()
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
    step = step_of_state(
        table.to(device),
        ints(rows_of + [0] * pads, device),
        ints(positions + [row.tokens - 1] * pads, device),
        ints([len(kv_len), num_tokens, 0, 0], device),
    )
    state = LayerPages.plain(*(side.to(device) for side in pages))
    fold(state, step, out, tokens=row.tokens, overlaps=row.overlaps)
    assert not out[num_tokens:].any(), "a pad got a row"
    found, wanted, first = [], [], 0
    for (values, gates), length, new in zip(sides, kv_len, q_len, strict=True):
        mine = out[first : first + new].cpu()
        ends = [at for at in range(new) if (length - new + at + 1) % row.tokens == 0]
        assert not mine[[at for at in range(new) if at not in ends]].any(), "a token that ends no row got one"
        found.append(mine[ends])
        # The reference folds what is stored: rounding the values and gates is another test's matter.
        rows = folded(values.to(row.state_dtype), gates.to(row.state_dtype), row)
        wanted.append(torch.stack(rows[len(rows) - len(ends) :]) if ends else torch.zeros(0, columns).double())
        first += new
    return found, wanted


def assert_folded(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Checks the rows of every sequence."""
    bound = BOUNDS[torch.float32]
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), want, atol=bound.atol, rtol=bound.rtol)

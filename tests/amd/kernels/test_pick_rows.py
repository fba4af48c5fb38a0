"""Tokens picked from rows of logits: kernel and twin against the definition in NumPy."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.refs import sampling as refs
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.row_results import ALL_ZERO

Pick = Callable[..., None]
Float64Array = npt.NDArray[np.float64]

picks = pytest.mark.parametrize("pick", [launch_pick_rows, refs.pick_rows], ids=["kernel", "twin"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
NAN, INF = float("nan"), float("inf")
NOT_WRITTEN = -77


def picked(
    pick: Pick, logits: Tensor, terms: list[tuple[float, float, float]], device: torch.device
) -> tuple[list[int], list[int], list[float]]:
    """Returns the tokens in the next step's form, in the host's form, and the largest logits."""
    rows = logits.shape[0]
    tokens = torch.full((rows + 1,), NOT_WRITTEN, dtype=torch.int32, device=device)
    found = torch.full((rows + 1, 2), NOT_WRITTEN, dtype=torch.int32, device=device)
    given = torch.tensor(terms, dtype=torch.float32, device=device).view(rows, 3)
    num_drawing = sum(temperature > 0 for temperature, _, _ in terms)
    pick(logits.to(device), given, tokens[:rows], found[:rows], num_drawing=num_drawing)
    assert tokens[-1] == NOT_WRITTEN == found[-1].max()
    best = found[:rows, 1].contiguous().view(torch.float32)
    return tokens[:rows].tolist(), found[:rows, 0].tolist(), best.tolist()


def kept_weights(logits: Tensor, temperature: float, top_p: float) -> Float64Array:
    """Returns the weight of each token that may be drawn, and 0 for the others."""
    values = logits.double().numpy()
    weights = np.exp((values - values.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    num_kept = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    kept: Float64Array = np.zeros_like(weights)
    kept[order[:num_kept]] = weights[order[:num_kept]]
    return kept


@pytest.mark.fast
@picks
@dtypes
@pytest.mark.parametrize("vocab", [3, 4096, 5000])
def test_the_first_of_the_likeliest_is_taken(
    pick: Pick, dtype: torch.dtype, vocab: int, kernel_device: torch.device
) -> None:
    """Rows are apart, one has its best logit twice, and one is almost ruled out."""
    wide = torch.randn(4, vocab + 5, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits = wide[:, :vocab]
    logits[1, [vocab // 2, vocab - 1]] = 9.0
    logits[2] = -INF
    logits[2, vocab - 1] = -3.0
    tokens, found, best = picked(pick, logits, [(0.0, 1.0, 0.5)] * 4, kernel_device)
    wanted = [int(row.float().numpy().argmax()) for row in logits]
    assert tokens == found == wanted
    assert best == [float(row.max()) for row in logits]
    assert wanted[1:3] == [vocab // 2, vocab - 1]


@pytest.mark.fast
@picks
@dtypes
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1e-30, 0.9), (1e30, 1.0)])
def test_a_token_is_drawn_by_the_weights_of_those_that_are_kept(
    pick: Pick, dtype: torch.dtype, temperature: float, top_p: float, kernel_device: torch.device
) -> None:
    """Uniform numbers are in the middle of a token's share: the first token, the last one, and some likely ones
    between.

    Many logits are equal, and there is more than one block of tokens.
    """
    vocab, generator = 4100, torch.Generator().manual_seed(3)
    logits = torch.randn(vocab, generator=generator).mul(4).round().div(2).to(dtype)
    logits[::7] = -INF
    kept = kept_weights(logits, temperature, top_p)
    total, before = kept.sum(), np.cumsum(kept) - kept
    possible = np.flatnonzero(kept > 1e-5 * total)
    likely = possible[np.argsort(-kept[possible])][:4]
    wanted = [int(token) for token in (possible[0], possible[-1], *likely)]
    terms = [(temperature, top_p, float((before[token] + kept[token] / 2) / total)) for token in wanted]
    tokens, found, _ = picked(pick, logits.expand(len(wanted), -1).contiguous(), terms, kernel_device)
    assert tokens == found == wanted


@picks
def test_rows_that_draw_and_rows_that_do_not_stand_side_by_side(pick: Pick, kernel_device: torch.device) -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]))
    terms = [(1.0, 1.0, 0.05), (0.0, 0.0, 0.0), (1.0, 1.0, 1 - 2**-24)]
    assert picked(pick, logits, terms, kernel_device)[0] == [0, 1, 2]


@pytest.mark.fast
@picks
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
def test_a_row_that_no_token_can_be_picked_from_is_reported_and_has_one_that_exists(
    pick: Pick, temperature: float, kernel_device: torch.device
) -> None:
    rows = [[1, NAN, 3], [NAN, NAN, NAN], [1, INF, 3], [-INF, -INF, -INF], [0, 0, 0], [-0.0, 0.0, 0.0], [-INF, 0, -1]]
    terms = [(temperature, 1.0, 0.3)] * len(rows)
    tokens, found, best = picked(pick, torch.tensor(rows), terms, kernel_device)
    assert all(0 <= token < 3 for token in tokens)
    np.testing.assert_array_equal(best, [NAN, NAN, INF, -INF, 0, 0, 0])
    assert found[4] == found[5] == ALL_ZERO
    assert ALL_ZERO not in (*found[:4], found[6])
    assert found[6] in (1, 2)


@pytest.mark.fast(1)
@picks
def test_a_rows_token_does_not_depend_on_the_others(pick: Pick, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4500, generator=generator)
    terms = [(0.5 + 0.1 * row, 0.95, float(torch.rand((), generator=generator))) for row in range(2)]
    together = picked(pick, logits, terms, kernel_device)[0]
    alone = [picked(pick, logits[row : row + 1], [terms[row]], kernel_device)[0] for row in range(2)]
    assert [[token] for token in together] == alone


@picks
def test_no_rows_are_nothing_to_do(pick: Pick, kernel_device: torch.device) -> None:
    assert picked(pick, torch.empty(0, 7), [], kernel_device) == ([], [], [])

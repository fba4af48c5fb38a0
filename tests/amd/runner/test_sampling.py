"""Sampling: the right distribution, the same draws whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadLogits, BadRequest
from rocm_attn.runner.sampling import Float32Array, Sampler, Sampling, pick_tokens

LOGITS: Float32Array = (np.log([0.05, 0.5, 0.15, 0.3]) + 3.0).astype(np.float32)


def shares(sampling: Sampling, draws: int = 20_000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    sampler = Sampler(sampling)
    return np.bincount([sampler.draw(LOGITS) for _ in range(draws)], minlength=4) / draws


def test_temperature_one_draws_by_the_probabilities() -> None:
    # 5 standard deviations of a share over 20,000 draws are under 0.018
    np.testing.assert_allclose(shares(Sampling(temperature=1.0)), [0.05, 0.5, 0.15, 0.3], atol=0.018)


def test_temperature_sharpens_and_flattens() -> None:
    squared = np.array([0.05, 0.5, 0.15, 0.3]) ** 2
    np.testing.assert_allclose(shares(Sampling(temperature=0.5)), squared / squared.sum(), atol=0.018)
    rooted = np.array([0.05, 0.5, 0.15, 0.3]) ** 0.5
    np.testing.assert_allclose(shares(Sampling(temperature=2.0)), rooted / rooted.sum(), atol=0.018)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.4, [0, 1, 0, 0]),
        (0.6, [0, 0.625, 0, 0.375]),
        (0.85, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        (1.0, [0.05, 0.5, 0.15, 0.3]),
    ],
)
def test_top_p_keeps_the_likeliest_up_to_the_one_that_reaches_it(top_p: float, expected: list[float]) -> None:
    np.testing.assert_allclose(shares(Sampling(temperature=1.0, top_p=top_p)), expected, atol=0.018)


def test_a_tiny_temperature_neither_overflows_nor_draws_anything_but_the_best() -> None:
    sampler = Sampler(Sampling(temperature=1e-6))
    assert {sampler.draw(LOGITS * np.float32(1e3)) for _ in range(50)} == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-310, 5e-324])
def test_a_temperature_next_to_nothing_draws_what_greedy_takes(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature))
    assert {sampler.draw(LOGITS) for _ in range(50)} == {int(LOGITS.argmax())}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_is_no_token_and_the_others_are(sampling: Sampling, dtype: torch.dtype) -> None:
    rows = [[1, NAN, 3], [9, 1, 1], [NAN, NAN, NAN], [1, INF, 3], [-INF, -INF, -INF], [-INF, -INF, 2], [-INF, 30, NAN]]
    picks = pick_tokens(torch.tensor(rows, dtype=dtype), [Sampler(replace(sampling, seed=row)) for row in range(7)])
    assert [isinstance(pick, BadLogits) for pick in picks] == [True, False, True, True, True, False, True]
    assert (picks[1], picks[5]) == (0, 2)
    for row, best in ((0, "nan"), (3, "inf"), (4, "-inf")):
        assert str(picks[row]).startswith(f"the largest logit of the next token is {best}, so no token can be picked")


def test_a_row_of_zeros_is_no_token_and_a_row_whose_best_is_zero_is_one() -> None:
    zeros, best_is_zero = pick_tokens(torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), [Sampler(Sampling())] * 2)
    assert str(zeros).startswith("every logit of the next token is 0, so no token can be picked")
    assert best_is_zero == 1


@pytest.mark.parametrize("logits", [[1, NAN, 3], [NAN] * 3, [1, INF, 3], [-INF] * 3])
def test_nothing_is_drawn_from_logits_that_are_not_finite(logits: list[float]) -> None:
    with pytest.raises(BadLogits, match="no token can be picked"):
        Sampler(Sampling(temperature=1.0)).draw(np.array(logits, np.float32))


@pytest.mark.parametrize("temperature", [1e-310, 1.0, 1e300])
def test_a_token_that_is_ruled_out_is_never_drawn(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature))
    assert {sampler.draw(np.array([-INF, 0, 0, -INF], np.float32)) for _ in range(60)} == {1, 2}


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    logits = np.zeros(1000, np.float32)
    draws = [[Sampler(Sampling(temperature=1.0, seed=seed)).draw(logits)] for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_a_requests_draws_do_not_depend_on_its_company() -> None:
    logits = torch.randn(6, 300)
    samplings = [Sampling(), *(Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)), Sampling()]
    together = pick_tokens(logits, [Sampler(sampling) for sampling in samplings])
    alone = [pick_tokens(logits[i : i + 1], [Sampler(samplings[i])])[0] for i in range(6)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_every_dtype_can_be_drawn_from(dtype: torch.dtype) -> None:
    logits = torch.full((2, 9), -20.0, dtype=dtype)
    logits[0, 4] = logits[1, 7] = 20.0
    assert pick_tokens(logits, [Sampler(Sampling(temperature=1.0)), Sampler(Sampling())]) == [4, 7]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1; it must not be negative"),
    ],
)
def test_values_without_sense_are_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        Sampling(**values)  # type: ignore[arg-type]

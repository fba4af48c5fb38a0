"""Sampling: the right distribution, the same draws whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadRequest
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

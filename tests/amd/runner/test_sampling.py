"""Sampling: the right distribution, and the same draws in every batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadLogits
from rocm_attn.providers.torch_ref import TORCH
from rocm_serve.sampling.sampling import Sampler, TokenPicker, pick_tokens
from rocm_serve.sampling.sampling_options import Sampling

LOGITS = (np.log([0.05, 0.5, 0.15, 0.3]) + 3.0).astype(np.float32)


def new_picker(most_rows: int) -> TokenPicker:
    return TokenPicker(torch.device("cpu"), most_rows, TORCH.ops().pick_rows)


def drawn(logits: np.ndarray[tuple[int], np.dtype[np.float32]], sampling: Sampling, draws: int) -> list[int]:
    """The first tokens of a request, all of which are drawn from these logits."""
    rows = torch.from_numpy(logits).expand(draws, -1)
    picks = new_picker(draws).pick(rows, dict(enumerate(map(Sampler(sampling).draw, range(draws)))))
    return [pick for pick in picks.read() if not isinstance(pick, BadLogits)]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-310, 5e-324])
def test_a_temperature_next_to_nothing_draws_what_greedy_takes(temperature: float) -> None:
    assert set(drawn(LOGITS, Sampling(temperature=temperature), 50)) == {int(LOGITS.argmax())}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_is_no_token_and_the_others_are(sampling: Sampling, dtype: torch.dtype) -> None:
    rows = [[1, NAN, 3], [9, 1, 1], [NAN, NAN, NAN], [1, INF, 3], [-INF, -INF, -INF], [-INF, -INF, 2], [-INF, 30, NAN]]
    picks = pick_tokens(torch.tensor(rows, dtype=dtype), [Sampler(replace(sampling, seed=row)) for row in range(7)])
    assert [isinstance(pick, BadLogits) for pick in picks] == [True, False, True, True, True, False, True]
    assert (picks[1], picks[5]) == (0, 2)
    for row, best in ((0, "nan"), (3, "inf"), (4, "-inf")):
        assert str(picks[row]).startswith(f"the largest logit of the next token is {best}, so no token can be sampled")


def test_a_row_of_zeros_is_no_token_and_a_row_whose_best_is_zero_is_one() -> None:
    zeros, best_is_zero = pick_tokens(torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), [Sampler(Sampling())] * 2)
    assert str(zeros).startswith("every logit of the next token is 0, so no token can be sampled")
    assert best_is_zero == 1


@pytest.mark.parametrize("temperature", [1e-310, 1.0, 1e300])
def test_a_token_that_is_ruled_out_is_never_drawn(temperature: float) -> None:
    assert set(drawn(np.array([-INF, 0, 0, -INF], np.float32), Sampling(temperature=temperature), 60)) == {1, 2}


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    logits = np.ones(1000, np.float32)
    draws = [drawn(logits, Sampling(temperature=1.0, seed=seed), 40) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_a_requests_draws_do_not_depend_on_its_company() -> None:
    logits = torch.randn(6, 300)
    samplings = [Sampling(), *(Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)), Sampling()]
    together = pick_tokens(logits, [Sampler(sampling) for sampling in samplings])
    alone = [pick_tokens(logits[i : i + 1], [Sampler(samplings[i])])[0] for i in range(6)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


def test_a_token_is_drawn_alike_however_often_and_in_whatever_order_it_is_asked_for() -> None:
    sampler, again = (Sampler(Sampling(temperature=1.0, seed=4)) for _ in range(2))
    in_order = [sampler.next_draw() for _ in range(50)]
    assert [again.draw(place) for place in reversed(range(50))] == in_order[::-1]
    assert sampler.draw(7) == in_order[7]
    assert len({draw.uniform for draw in in_order}) == 50


def test_two_steps_may_be_picked_from_before_the_first_is_read() -> None:
    picker = new_picker(3)
    first = picker.pick(torch.eye(3), {})
    second = picker.pick(torch.eye(3)[[2, 0]], {})
    assert picker.tokens.tolist() == [2, 0, 2]
    assert (first.read(), second.read()) == ([0, 1, 2], [2, 0])
    assert picker.pick(torch.eye(3)[:0], {}).read() == []

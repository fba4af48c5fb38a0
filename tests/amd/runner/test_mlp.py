"""Experts: bits, numbers that are none, and refusals. test_families.py compares logits with each kind of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.mlp_config import ExpertMlp, ExpertTensors
from rocm_attn.models.routing import Routing
from rocm_serve.models.layer_input import LayerInput
from rocm_serve.models.linears import BatchInvariantLinears, Linears
from rocm_serve.models.mlp import experts_sum
from rocm_serve.models.mlp_weights import ExpertWeights

# a whole vector of a CPU in each row: other instructions compute the rest of a row
EXPERTS, INNER, HIDDEN = 5, 16, 8
MLP = ExpertMlp(Routing(EXPERTS, 2, normalised=True), INNER, SwiGLU(), ExpertTensors.STACKED, has_bias=True)


def random_weights() -> ExpertWeights:
    return ExpertWeights(
        router=torch.randn(EXPERTS, HIDDEN),
        router_bias=torch.randn(EXPERTS),
        gate_up=torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        gate_up_bias=torch.randn(EXPERTS, 2 * INNER),
        down=torch.randn(EXPERTS, HIDDEN, INNER),
        down_bias=torch.randn(EXPERTS, HIDDEN),
    )


def output(x: Tensor, mlp: ExpertMlp, weights: ExpertWeights, linears: Linears | None = None) -> Tensor:
    linears = Linears() if linears is None else linears
    given = LayerInput(linears, x)
    return experts_sum(given, given, mlp, weights, linears)


def test_the_bits_of_a_token_depend_on_no_other_token_where_that_is_asked_for() -> None:
    weights, x = random_weights(), torch.randn(37, HIDDEN)
    together = output(x, MLP, weights, BatchInvariantLinears())
    for first, end in ((0, 1), (3, 20), (36, 37)):
        assert torch.equal(output(x[first:end], MLP, weights, BatchInvariantLinears()), together[first:end])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_expert_that_overflows_harms_no_token_that_did_not_choose_it(bad: float) -> None:
    weights, x = random_weights(), torch.randn(9, HIDDEN)
    assert weights.router_bias is not None
    weights.router_bias[3] = -1e6
    expected = output(x, MLP, weights)
    weights.gate_up[3] = bad
    torch.testing.assert_close(output(x, MLP, weights), expected, atol=0, rtol=0)


def test_a_token_that_is_not_finite_harms_no_other() -> None:
    weights, x = random_weights(), torch.randn(9, HIDDEN)
    expected = output(x, MLP, weights, BatchInvariantLinears())
    x[4] = float("nan")
    rest = [token for token in range(9) if token != 4]
    torch.testing.assert_close(output(x, MLP, weights, BatchInvariantLinears())[rest], expected[rest], atol=0, rtol=0)


def test_there_may_be_no_token() -> None:
    assert output(torch.empty(0, HIDDEN), MLP, random_weights()).shape == (0, HIDDEN)
    expert, share = Routing(6, 2, normalised=True, num_groups=3, num_groups_chosen=2).choose(torch.empty(0, 6), None)
    assert expert.shape == share.shape == (0, 2)


@pytest.mark.parametrize("num_chosen", [0, EXPERTS + 1])
def test_more_experts_a_token_than_there_are_is_refused(num_chosen: int) -> None:
    with pytest.raises(BadModel, match=f"{num_chosen} of 5 experts"):
        replace(MLP.routing, num_chosen=num_chosen)


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"num_groups": 4}, "1 of 4 groups of 6 experts"),
        ({"num_groups": 2, "num_groups_chosen": 3}, "3 of 2 groups"),
        ({"num_groups": 3, "num_chosen": 3}, "3 experts per token out of 1 groups of 2"),
        ({"num_groups": 6, "best_of_group": 2}, "each group at least 2"),
    ],
)
def test_groups_that_cannot_hold_what_is_chosen_are_refused(groups: dict[str, int], sentence: str) -> None:
    with pytest.raises(BadModel, match=sentence):
        replace(Routing(6, 2, normalised=True), **groups)  # type: ignore[arg-type]

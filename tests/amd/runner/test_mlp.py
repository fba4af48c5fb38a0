"""Experts, token by token in float64 against all of them at once; experts that are not chosen have no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.gates import ClampedSwiGLU, Gate, GeGLU, ReluSquared, SwiGLU
from rocm_attn.models.mlp_config import ExpertMlp, ExpertTensors
from rocm_attn.models.routing import ExpertScores, Routing
from rocm_serve.models.linears import AllRows, BlocksOfRows, Linears
from rocm_serve.models.mlp import experts_sum
from rocm_serve.models.mlp_weights import DenseWeights, ExpertWeights
from tests.amd.tolerances import assert_layers_close

# a whole vector of a CPU in each row: other instructions compute the rest of a row
EXPERTS, INNER, HIDDEN, SHARED = 5, 16, 8, 7
MLP = ExpertMlp(Routing(EXPERTS, 2, normalised=True), INNER, SwiGLU(), ExpertTensors.STACKED, has_bias=True)


def random_weights(gate: Gate = MLP.gate) -> ExpertWeights:
    products = len(gate.PRODUCTS)
    return ExpertWeights(
        router=torch.randn(EXPERTS, HIDDEN),
        router_bias=torch.randn(EXPERTS),
        gate_up=torch.randn(EXPERTS, products * INNER, HIDDEN),
        gate_up_bias=torch.randn(EXPERTS, products * INNER),
        down=torch.randn(EXPERTS, HIDDEN, INNER),
        down_bias=torch.randn(EXPERTS, HIDDEN),
    )


def output(x: Tensor, mlp: ExpertMlp, weights: ExpertWeights, linears: Linears | None = None) -> Tensor:
    return experts_sum(x, x, mlp, weights, AllRows() if linears is None else linears)


def one_expert(x: Tensor, expert: int, gate: Gate, weights: ExpertWeights) -> Tensor:
    """Float64 [hidden]: the output of one expert for one token."""
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    products = weights.gate_up[expert].double() @ x.double() + weights.gate_up_bias[expert].double()
    inner = gate.mix(*torch.split(products, INNER))
    return weights.down[expert].double() @ inner + weights.down_bias[expert].double()


def logits_of(token: Tensor, weights: ExpertWeights) -> Tensor:
    assert weights.router_bias is not None
    return (weights.router @ token + weights.router_bias).double()


@pytest.mark.fast
@pytest.mark.parametrize("linears", [AllRows(), BlocksOfRows()], ids=lambda linears: type(linears).__name__)
@pytest.mark.parametrize("gate", [SwiGLU(), GeGLU(), ClampedSwiGLU(limit=0.7, alpha=1.3), ReluSquared()], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("num_chosen", [1, 2, EXPERTS])
def test_a_token_gets_its_chosen_experts_in_their_shares(
    num_chosen: int, normalised: bool, gate: Gate, linears: Linears
) -> None:
    mlp = replace(MLP, routing=Routing(EXPERTS, num_chosen, normalised), gate=gate)
    weights, x = random_weights(gate), torch.randn(7, HIDDEN)
    expected = []
    for token in x:
        logits = logits_of(token, weights)
        chosen = logits.argsort(descending=True)[:num_chosen].tolist()
        parts = logits.exp()
        whole = parts[chosen].sum() if normalised else parts.sum()
        of_experts = [parts[e] / whole * one_expert(token, e, gate, weights) for e in chosen]
        expected.append(torch.stack(of_experts).sum(0))
    assert_layers_close(output(x, mlp, weights, linears), torch.stack(expected).float())


def test_every_token_takes_what_is_shared_and_its_own_scale_of_an_expert() -> None:
    mlp, weights, x = replace(MLP, shared_size=SHARED), random_weights(), torch.randn(7, HIDDEN)
    shared = DenseWeights(torch.randn(2 * SHARED, HIDDEN), None, torch.randn(HIDDEN, SHARED), None)
    scales = torch.rand(EXPERTS)
    expected = []
    for token in x:
        logits = logits_of(token, weights)
        chosen = logits.argsort(descending=True)[:2].tolist()
        share = logits[chosen].softmax(-1)
        parts = [
            weight * scales[e].double() * one_expert(token, e, SwiGLU(), weights)
            for e, weight in zip(chosen, share, strict=True)
        ]
        gate, up = (shared.gate_up.double() @ token.double()).chunk(2)
        expected.append(sum(parts) + shared.down.double() @ (gate * gate.sigmoid() * up))
    result = output(x, mlp, replace(weights, shared=shared, share_scale=scales))
    assert_layers_close(result, torch.stack(expected).float())


def test_the_bits_of_a_token_depend_on_no_other_token_where_that_is_asked_for() -> None:
    weights, x = random_weights(), torch.randn(37, HIDDEN)
    together = output(x, MLP, weights, BlocksOfRows())
    for first, end in ((0, 1), (3, 20), (36, 37)):
        assert torch.equal(output(x[first:end], MLP, weights, BlocksOfRows()), together[first:end])


@pytest.mark.parametrize("scores", ExpertScores)
def test_experts_are_chosen_within_the_best_groups_and_a_correction_changes_no_share(scores: ExpertScores) -> None:
    """Six experts in three groups, token by token."""
    routing = Routing(
        6, 2, True, scores, num_groups=3, num_groups_chosen=1, best_of_group=2, scale=2.5, has_correction=True
    )
    logits, correction = torch.randn(50, 6), torch.randn(6)
    experts, shares = routing.choose(logits, correction)
    for token, (expert, share) in enumerate(zip(experts.tolist(), shares, strict=True)):
        score = (
            logits[token].double().sigmoid() if scores is ExpertScores.SIGMOID else logits[token].double().softmax(0)
        )
        ranks = (score + correction.double()).tolist()
        best = max(range(3), key=lambda group: ranks[2 * group] + ranks[2 * group + 1])
        assert set(expert) == {2 * best, 2 * best + 1}
        torch.testing.assert_close(share.double(), 2.5 * score[expert] / score[expert].sum(), atol=1e-6, rtol=1e-5)


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
    expected = output(x, MLP, weights, BlocksOfRows())
    x[4] = float("nan")
    rest = [token for token in range(9) if token != 4]
    torch.testing.assert_close(output(x, MLP, weights, BlocksOfRows())[rest], expected[rest], atol=0, rtol=0)


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

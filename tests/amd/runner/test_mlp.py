"""Experts, token by token in float64 against all of them at once; what is not chosen has no part in anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.runner.config import ExpertMlp, ExpertTensors
from rocm_attn.runner.gates import ClampedSwiGLU, Gate, GeGLU, SwiGLU
from rocm_attn.runner.linears import AllRows
from rocm_attn.runner.mlp import expert_shares, inner_and_bias
from rocm_attn.runner.mlp_weights import MlpWeights
from tests.amd.tolerances import assert_layers_close

EXPERTS, INNER, HIDDEN = 5, 6, 8
MLP = ExpertMlp(EXPERTS, 2, INNER, SwiGLU(), has_bias=True, normalised=True, tensors=ExpertTensors.STACKED)


def random_weights() -> MlpWeights:
    return MlpWeights(
        gate_up=torch.randn(2 * EXPERTS * INNER, HIDDEN),
        gate_up_bias=torch.randn(2 * EXPERTS * INNER),
        down=torch.randn(HIDDEN, EXPERTS * INNER),
        down_bias=torch.randn(EXPERTS, HIDDEN),
        router=torch.randn(EXPERTS, HIDDEN),
        router_bias=torch.randn(EXPERTS),
    )


def output(x: Tensor, mlp: ExpertMlp, weights: MlpWeights) -> Tensor:
    inner, bias = inner_and_bias(x, mlp, weights, AllRows())
    assert bias is not None
    return inner @ weights.down.t() + bias


def one_expert(x: Tensor, expert: int, gate: Gate, weights: MlpWeights) -> Tensor:
    """Float64 [hidden]: what one expert makes of one token."""
    rows = slice(expert * INNER, (expert + 1) * INNER)
    matrices = weights.gate_up.double().view(2, EXPERTS * INNER, HIDDEN)[:, rows]
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    biases = weights.gate_up_bias.double().view(2, EXPERTS * INNER)[:, rows]
    gate_product, up = (matrices[side] @ x.double() + biases[side] for side in (0, 1))
    return weights.down.double()[:, rows] @ gate.mix(gate_product, up) + weights.down_bias[expert].double()


@pytest.mark.parametrize("gate", [SwiGLU(), GeGLU(), ClampedSwiGLU(limit=0.7, alpha=1.3)], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("num_chosen", [1, 2, EXPERTS])
def test_a_token_gets_its_chosen_experts_in_their_shares(num_chosen: int, normalised: bool, gate: Gate) -> None:
    mlp = replace(MLP, num_chosen=num_chosen, normalised=normalised, gate=gate)
    weights, x = random_weights(), torch.randn(7, HIDDEN)
    assert weights.router is not None
    assert weights.router_bias is not None
    expected = []
    for token in x:
        logits = (weights.router @ token + weights.router_bias).double()
        chosen = logits.argsort(descending=True)[:num_chosen].tolist()
        parts = logits.exp()
        whole = parts[chosen].sum() if normalised else parts.sum()
        expected.append(sum(parts[e] / whole * one_expert(token, e, gate, weights) for e in chosen))
    assert_layers_close(output(x, mlp, weights), torch.stack(expected).float())


def test_shares_of_normalised_experts_sum_to_one_and_the_others_are_zero() -> None:
    shares = expert_shares(torch.randn(11, EXPERTS), MLP)
    torch.testing.assert_close(shares.sum(-1), torch.ones(11))
    assert ((shares > 0).sum(-1) == MLP.num_chosen).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_expert_that_overflows_harms_no_token_that_did_not_choose_it(bad: float) -> None:
    weights, x = random_weights(), torch.randn(9, HIDDEN)
    assert weights.router_bias is not None
    weights.router_bias[3] = -1e6
    expected = output(x, MLP, weights)
    weights.gate_up.view(2, EXPERTS, INNER, HIDDEN)[:, 3] = bad
    torch.testing.assert_close(output(x, MLP, weights), expected, atol=0, rtol=0)


def test_a_token_that_is_not_finite_harms_no_other() -> None:
    weights, x = random_weights(), torch.randn(9, HIDDEN)
    expected = output(x, MLP, weights)
    x[4] = float("nan")
    rest = [token for token in range(9) if token != 4]
    torch.testing.assert_close(output(x, MLP, weights)[rest], expected[rest], atol=0, rtol=0)


@pytest.mark.parametrize("num_chosen", [0, EXPERTS + 1])
def test_more_experts_a_token_than_there_are_is_refused(num_chosen: int) -> None:
    with pytest.raises(BadModel, match=f"{num_chosen} experts a token of 5 experts"):
        replace(MLP, num_chosen=num_chosen)

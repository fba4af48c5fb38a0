"""The MLPs of a forward pass: dense, mixture of experts (MoE), or both.

Tokens are sorted by expert on the device, and each expert's matrix is multiplied with the tokens that chose it. No size
depends on the router's output, so a step with experts is captured like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.models.mlp_config import DenseAndExperts, DenseMlp, ExpertMlp, Mlp
from rocm_serve.models.arithmetic import Arithmetic, Residual
from rocm_serve.models.expert_products import choice, combined
from rocm_serve.models.layer_input import LayerInput
from rocm_serve.models.linears import Linears
from rocm_serve.models.mlp_weights import DenseAndExpertWeights, DenseWeights, ExpertWeights
from rocm_serve.models.weights import LayerWeights


def add_mlp(residual: Residual, mlp: Mlp, weights: LayerWeights, arithmetic: Arithmetic) -> None:
    """Adds the output of a layer's MLP to the residual, if it has one."""
    if weights.mlp_norm is None:
        return
    given, norm, of_mlp = residual.normed(weights.mlp_norm), weights.mlp_out_norm, weights.mlp
    if isinstance(mlp, DenseMlp):
        assert isinstance(of_mlp, DenseWeights), "weights are read by their config"
        inner = given.gated(of_mlp.gate_up, of_mlp.gate_up_bias, mlp.gate)
        residual.add(arithmetic.output(inner, of_mlp.down, of_mlp.down_bias, norm))
        return
    if isinstance(mlp, ExpertMlp):
        assert isinstance(of_mlp, ExpertWeights), "weights are read by their config"
        total = experts_sum(given, given, mlp, of_mlp, arithmetic.linears)
    else:
        assert isinstance(mlp, DenseAndExperts), "a layer without an MLP has no norm before it"
        assert isinstance(of_mlp, DenseAndExpertWeights), "weights are read by their config"
        total = _dense_and_experts(residual.rows, given, mlp, of_mlp, arithmetic)
    residual.add(total if norm is None else arithmetic.norm(total, norm))


def _dense_and_experts(
    hidden: Tensor, given: LayerInput, mlp: DenseAndExperts, weights: DenseAndExpertWeights, arithmetic: Arithmetic
) -> Tensor:
    linears, norm = arithmetic.linears, arithmetic.norm
    inner = given.gated(weights.dense.gate_up, weights.dense.gate_up_bias, mlp.dense.gate)
    dense = linears.summed_linear(inner, weights.dense.down, weights.dense.down_bias)
    of_each, of_router = norm(hidden, weights.experts_norm), arithmetic.plain_norm(hidden)
    of_experts = experts_sum(
        LayerInput(linears, of_each), LayerInput(linears, of_router), mlp.experts, weights.experts, linears
    )
    return norm(dense, weights.dense_out_norm) + norm(of_experts, weights.experts_out_norm)


def experts_sum(
    given: LayerInput, of_router: LayerInput, mlp: ExpertMlp, weights: ExpertWeights, linears: Linears
) -> Tensor:
    """[tokens, hidden]: the outputs of each token's experts by their shares, plus the shared MLP's, summed over ranks.

    of_router: the router's input
    """
    logits = of_router.linear(weights.router, weights.router_bias)
    expert, share, groups = choice(mlp.routing, logits, weights.correction)
    if weights.share_scale is not None:
        share = share * weights.share_scale[expert]
    of_experts = given.rows if weights.latent_in is None else given.linear(weights.latent_in)
    inner = linears.of_experts(of_experts, weights.gate_up, weights.gate_up_bias, groups, mlp.gate)
    parts = linears.of_experts(inner, weights.down, weights.down_bias, groups)
    shared = shared_share = None
    if weights.shared is not None:
        inner = given.gated(weights.shared.gate_up, weights.shared.gate_up_bias, mlp.shared.gate)
        shared = linears.linear(inner, weights.shared.down)
        if weights.shared_share is not None:
            shared_share = given.linear(weights.shared_share)
    if weights.latent_out is not None:
        parts = linears.linear(combined(parts, share, None, None), weights.latent_out)
        share = torch.ones(len(expert), 1, device=expert.device)  # this is a token's only part
    return linears.summed(combined(parts, share, shared, shared_share))

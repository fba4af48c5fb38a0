"""The MLPs of a forward pass: dense, mixture of experts (MoE), or both.

Tokens are sorted by expert on the device, and each expert's matrix is multiplied with the tokens that chose it; a few
tokens read the matrices that they chose one by one. No size depends on the router's output, so a step with experts is
captured like any other.
"""

from dataclasses import replace

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

    The shared MLP may be one of the experts: see ExpertWeights.
    of_router: the router's input
    """
    logits = of_router.linear(weights.router, weights.router_bias)
    chosen = choice(mlp.routing, logits, weights)
    if weights.share_scale is not None:
        chosen = replace(chosen, share=chosen.share * weights.share_scale[chosen.expert])
    of_experts = given.rows if weights.latent_in is None else given.linear(weights.latent_in)
    shared = factor = None
    if weights.shared is not None:
        of_shared = given.gated(weights.shared.gate_up, weights.shared.gate_up_bias, mlp.shared.gate)
        shared = linears.linear(of_shared, weights.shared.down)
        if weights.shared_share is not None:
            factor = given.linear(weights.shared_share)
    if weights.latent_out is None:
        total = linears.sums_of_experts(of_experts, weights, chosen, mlp.gate, shared, factor)
    else:
        latents = linears.sums_of_experts(of_experts, weights, chosen, mlp.gate)
        whole = torch.ones(len(latents), 1, device=latents.device)  # these are a token's only part
        total = combined(linears.linear(latents, weights.latent_out), None, whole, shared, factor)
    return linears.summed(total)

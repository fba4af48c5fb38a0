"""The MLPs of a forward pass, dense or of experts.

All experts are computed, and the shares of those that were not chosen are 0. That costs as many products as there are
experts instead of the few that count, and needs no size that depends on what a router says: a step with experts is
captured like any other, and what a token gets does not depend on the tokens beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.runner.config import DenseMlp, ExpertMlp
from rocm_attn.runner.linears import Linears
from rocm_attn.runner.mlp_weights import MlpWeights


def inner_and_bias(
    x: Tensor, mlp: DenseMlp | ExpertMlp, weights: MlpWeights, linears: Linears
) -> tuple[Tensor, Tensor | None]:
    """What `weights.down` is to be multiplied with, and what is then to be added to the product.

    x:       [tokens, hidden], normalised
    returns: [tokens, inner], and [hidden] or [tokens, hidden]
    """
    gate, up = linears.linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
    inner = mlp.gate.mix(gate, up)
    if isinstance(mlp, DenseMlp):
        return inner, weights.down_bias
    assert weights.router is not None, "a layer of experts is read with its router"
    share = expert_shares(linears.linear(x, weights.router, weights.router_bias), mlp)
    weighted = inner.view(*share.shape, -1) * share[..., None]
    # not chosen: 0 even where the expert overflowed
    weighted.masked_fill_((share == 0)[..., None], 0.0)
    return weighted.flatten(1), None if weights.down_bias is None else linears.linear(share, weights.down_bias.t())


def expert_shares(logits: Tensor, mlp: ExpertMlp) -> Tensor:
    """[tokens, num_experts], the dtype of logits: how much of each expert a token takes, 0 where it was not chosen.

    logits: [tokens, num_experts], the router's
    """
    wide = logits.float()
    chosen, expert = wide.topk(mlp.num_chosen, -1)
    share = chosen.softmax(-1) if mlp.normalised else wide.softmax(-1).gather(-1, expert)
    # a scatter by comparison: on a GPU the operation of that name sorts to be deterministic
    is_expert = expert[..., None] == torch.arange(mlp.num_experts, device=logits.device)
    return (share[..., None] * is_expert).sum(-2).to(logits.dtype)

"""MoE on a GPU and on a CPU: the choice of each token's experts, products with their matrices, and the sum of those.

Between the products rows lie by expert: see ExpertGroups.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.models.gates import Gate, ReluSquared
from rocm_attn.models.routing import ExpertScores, Routing
from rocm_serve.models.gated import form_of, lie_right, mixed, multiply, target_of
from rocm_serve.models.mlp_weights import ExpertWeights

# A program compares all pairs with its expert. H200, the kernel and torch: 23 and 35 us for 32,768 pairs and up to 128
# experts, 47 and 37 for 65,536; 12 and 24 us for 2,560 pairs and 512 experts, 42 and 38 for 16,384.
_MOST_COMPARED = 3 << 21
_EXPERTS_AT_ONCE = 128
# Experts for each pair of a token and an expert, from which on tokens hardly share any: see few_tokens.py. H200,
# choice, products, gate and sum of 128 experts of 2048 x 768, 8 of a token, without sorting and with: 28 and 35 us for
# one token, 47 and 52 for two, 65 and 69 for three, 83 and 81 for four; of 513 of 2048 x 512, 11 of a token: 28 and 39,
# 44 and 58, 60 and 68, 76 and 87, 103 and 99 for five.
_EXPERTS_OF_PAIR = 8


@dataclass(frozen=True, eq=False)
class Choice:
    """The experts of a step's tokens.

    expert: integer [tokens, chosen], share: float32 [tokens, chosen]; see Routing.choose
    """

    expert: Tensor
    share: Tensor
    num_experts: int

    @cached_property
    def groups(self) -> ExpertGroups:
        """The pairs of a token and an expert by expert. They are sorted when they are needed first."""
        expert = self.expert
        num_pairs, num_compared = expert.numel(), max(self.num_experts, _EXPERTS_AT_ONCE)
        if expert.device.type == "cpu" or num_pairs * num_compared > _MOST_COMPARED:
            return ExpertGroups.of(expert, self.num_experts)
        from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs

        tokens, places, indptr = (
            expert.new_empty(size, dtype=torch.int64) for size in (num_pairs, num_pairs, self.num_experts + 1)
        )
        groups = ExpertGroups(tokens, places, indptr, expert.new_empty(1))
        launch_sort_pairs(expert, groups)
        return groups

    def suits_few_tokens(self, x: Tensor, weights: ExpertWeights) -> bool:
        """True if kernels that sort nothing take these rows and matrices, and are faster."""
        (num_tokens, num_chosen), device = self.expert.shape, self.expert.device
        if not 0 < num_tokens * num_chosen * _EXPERTS_OF_PAIR <= self.num_experts or device.type == "cpu":
            return False
        from rocm_attn.kernels.experts.few_tokens import fits

        down = weights.down
        fit = fits(1, x.shape[1]) and fits(num_chosen, down.shape[2])
        return fit and lie_right(x, weights.gate_up) and lie_right(x, down)


def choice(routing: Routing, logits: Tensor, weights: ExpertWeights) -> Choice:
    """Chooses the experts of every token. Each token also takes the shared MLP, if that is an expert.

    logits: [tokens, rows of the router]
    """
    num_experts, correction = routing.num_experts, weights.correction
    is_expert, by_logit = len(weights.down) > num_experts, logits.shape[1] > num_experts
    if logits.device.type == "cpu":
        expert, share = routing.choose(logits[:, :num_experts], correction)
        if is_expert:
            own = logits[:, num_experts, None].float().sigmoid() if by_logit else torch.ones(len(logits), 1)
            expert, share = F.pad(expert + 1, (0, 1)), torch.cat((share, own), 1)
        return Choice(expert, share, len(weights.down))
    from rocm_attn.kernels.experts.choose import NO_SHARED, SHARED, SHARED_BY_LOGIT, ChoiceRule, launch_choose

    rule = ChoiceRule(
        routing.num_groups,
        routing.num_groups_chosen,
        routing.best_of_group,
        routing.scores is ExpertScores.SOFTMAX,
        routing.normalised,
        routing.scale,
        SHARED_BY_LOGIT if by_logit else SHARED if is_expert else NO_SHARED,
    )
    shape, device = (len(logits), routing.num_chosen + int(is_expert)), logits.device
    expert, share = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    launch_choose(logits[:, : num_experts + int(by_logit)], correction, expert, share, rule)
    return Choice(expert, share, len(weights.down))


def expert_sums(
    x: Tensor,
    weights: ExpertWeights,
    chosen: Choice,
    gate: Gate,
    shared: Tensor | None,
    factor: Tensor | None,
    *,
    rows: int,
    fixed: bool,
) -> Tensor:
    """[tokens, width]: the sum of the outputs of a token's experts by its shares, and of sigmoid(factor) * shared.

    x:     [tokens, in]; see combined() for shared and factor
    rows:  of a block on a CPU, if bits are fixed; else it takes whole groups
    fixed: whether a row's bits must not depend on the number of rows
    """
    if not fixed and chosen.suits_few_tokens(x, weights):
        return _sums_of_few_tokens(x, weights, chosen, gate, shared, factor)
    source, rows = chosen.groups.tokens, rows if fixed else 0
    inner = expert_products(x, weights.gate_up, weights.gate_up_bias, chosen, source, gate, rows=rows, fixed=fixed)
    parts = expert_products(inner, weights.down, weights.down_bias, chosen, None, None, rows=rows, fixed=fixed)
    return combined(parts, chosen.groups.places, chosen.share, shared, factor)


def expert_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Choice,
    source: Tensor | None,
    gate: Gate | None,
    *,
    rows: int,
    fixed: bool,
) -> Tensor:
    """[pairs, out] by expert: each pair's row of x times the matrix of its expert; see launch_expert_product.

    source: int64 [pairs]: the row of x of each pair; None: the same row
    gate:   combines the products, whose matrices are then twice as large; see mixed()
    """
    is_cpu = x.device.type == "cpu"
    if gate is not None and (is_cpu or isinstance(gate, ReluSquared)):
        return mixed(gate, expert_products(x, weight, bias, chosen, source, None, rows=rows, fixed=fixed))
    num_pairs, num_out = chosen.expert.numel(), weight.shape[1] // (1 if gate is None else 2)
    out = torch.empty(num_pairs, num_out, dtype=x.dtype, device=x.device)
    if is_cpu:
        run_as_launch(expert_product, x, weight, bias, chosen.groups, source, out, rows=rows)
        return out
    from rocm_attn.kernels.experts.arguments import ProductArgs

    form = None if gate is None else form_of(gate)
    args = ProductArgs.of_experts(x, weight, bias, chosen.groups, source, out, form)
    multiply(args, -(-num_pairs // chosen.num_experts), by_hopper=args.suits_hopper, fixed=fixed)
    return out


def _sums_of_few_tokens(
    x: Tensor, weights: ExpertWeights, chosen: Choice, gate: Gate, shared: Tensor | None, factor: Tensor | None
) -> Tensor:
    """Does the same as expert_sums. Rows lie by pair between the products, as nothing is sorted."""
    from rocm_attn.kernels.experts.few_tokens import launch_expert_sums, launch_inner_products

    expert, units = chosen.expert, target_of(x.device).compute_units
    form = None if isinstance(gate, ReluSquared) else form_of(gate)
    num_inner = weights.gate_up.shape[1] // (1 if form is None else 2)
    inner = torch.empty(expert.numel(), num_inner, dtype=x.dtype, device=x.device)
    launch_inner_products(x, weights.gate_up, weights.gate_up_bias, expert, inner, units, form)
    if form is None:
        inner = mixed(gate, inner)
    out = torch.empty(len(x), weights.down.shape[1], dtype=x.dtype, device=x.device)
    launch_expert_sums(inner, weights.down, weights.down_bias, expert, chosen.share, shared, factor, out, units)
    return out


def combined(
    parts: Tensor, places: Tensor | None, share: Tensor, shared: Tensor | None, weight: Tensor | None
) -> Tensor:
    """[tokens, width]: the sum of each token's parts by its shares, and of sigmoid(weight) * shared.

    parts:  [tokens * chosen, width], share: float32 [tokens, chosen]
    places: int64 [tokens * chosen]: the row of parts of each pair; None: the same row
    shared: [tokens, width] or None; weight: [tokens, 1], or None for a factor of 1
    """
    if parts.device.type == "cpu":
        by_pair = parts if places is None else parts[places]
        total = (by_pair.view(*share.shape, parts.shape[1]) * share.to(parts.dtype)[..., None]).sum(1)
        if shared is not None:
            total = total + (shared if weight is None else shared * weight.sigmoid())
        return total
    from rocm_attn.kernels.experts.combine import launch_combine

    out = torch.empty(share.shape[0], parts.shape[1], dtype=parts.dtype, device=parts.device)
    launch_combine(parts, places, share, shared, weight, out)
    return out

"""MoE on a GPU and on a CPU: the choice of each token's experts, products with their matrices, and the sum of those."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.models.gates import Gate, ReluSquared
from rocm_attn.models.routing import ExpertScores, Routing
from rocm_serve.models.gated import form_of, mixed, multiply

# The kernel compares each pair with each expert (H200): 57 us for 65,536 pairs and 128 experts, where torch takes 76,
# and 232 for 81,920 and 512.
_MOST_COMPARED = 2**24
# With fewer rows of an expert on average, blocks of 64 columns keep more multiprocessors at work (H200).
_LEAST_ROWS_FOR_HOPPER = 2


class Choice(NamedTuple):
    """The experts of a step's tokens.

    expert: integer [tokens, chosen], share: float32 [tokens, chosen]; see Routing.choose
    groups: the pairs of both by expert
    """

    expert: Tensor
    share: Tensor
    groups: ExpertGroups


def choice(routing: Routing, logits: Tensor, correction: Tensor | None) -> Choice:
    """Chooses the experts of every token."""
    if logits.device.type == "cpu":
        expert, share = routing.choose(logits, correction)
        return Choice(expert, share, ExpertGroups.of(expert, routing.num_experts))
    from rocm_attn.kernels.experts.choose import ChoiceRule, launch_choose

    rule = ChoiceRule(
        routing.num_groups,
        routing.num_groups_chosen,
        routing.best_of_group,
        routing.scores is ExpertScores.SOFTMAX,
        routing.normalised,
        routing.scale,
    )
    shape, device = (len(logits), routing.num_chosen), logits.device
    expert, share = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    of_one_token = _empty_groups(expert, routing.num_experts) if len(logits) == 1 else None
    launch_choose(logits, correction, expert, share, rule, of_one_token)
    return Choice(expert, share, of_one_token or _sorted(expert, routing.num_experts))


def _sorted(expert: Tensor, num_experts: int) -> ExpertGroups:
    """The pairs of tokens and experts by expert, on a GPU: see ExpertGroups.of."""
    if expert.numel() * num_experts > _MOST_COMPARED:
        return ExpertGroups.of(expert, num_experts)
    from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs

    groups = _empty_groups(expert, num_experts)
    launch_sort_pairs(expert, *groups)
    return groups


def _empty_groups(expert: Tensor, num_experts: int) -> ExpertGroups:
    sizes = expert.numel(), num_experts + 1
    return ExpertGroups(*(torch.empty(size, dtype=torch.int64, device=expert.device) for size in sizes))


def expert_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: ExpertGroups,
    gate: Gate | None = None,
    *,
    rows: int,
    fixed: bool,
) -> Tensor:
    """[pairs, out]: each pair's row of x times the matrix of its expert; see launch_expert_product.

    gate:  combines the products, whose matrices are then twice as large; see mixed()
    rows:  of a block on a CPU, if bits are fixed; else it takes whole groups
    fixed: whether a row's bits must not depend on the number of rows
    """
    is_cpu = x.device.type == "cpu"
    if gate is not None and (is_cpu or isinstance(gate, ReluSquared)):
        return mixed(gate, expert_products(x, weight, bias, groups, rows=rows, fixed=fixed))
    num_pairs, num_out = groups.order.shape[0], weight.shape[1] // (1 if gate is None else 2)
    out = torch.empty(num_pairs, num_out, dtype=x.dtype, device=x.device)
    if is_cpu:
        run_as_launch(expert_product, x, weight, bias, groups, out, rows=rows if fixed else 0)
        return out
    from rocm_attn.kernels.experts.arguments import ProductArgs

    args = ProductArgs.of_experts(x, weight, bias, groups, out, None if gate is None else form_of(gate))
    mean_rows = -(-num_pairs // groups.num_experts)
    by_hopper = (fixed or mean_rows >= _LEAST_ROWS_FOR_HOPPER) and args.suits_hopper
    multiply(args, mean_rows, by_hopper=by_hopper, fixed=fixed)
    return out


def combined(parts: Tensor, share: Tensor, shared: Tensor | None, weight: Tensor | None) -> Tensor:
    """[tokens, width]: the sum of each token's parts by its shares, and of sigmoid(weight) * shared.

    parts:  [tokens * chosen, width], share: float32 [tokens, chosen]
    shared: [tokens, width] or None; weight: [tokens, 1], or None for a factor of 1
    """
    if parts.device.type == "cpu":
        total = (parts.view(*share.shape, parts.shape[1]) * share.to(parts.dtype)[..., None]).sum(1)
        if shared is not None:
            total = total + (shared if weight is None else shared * weight.sigmoid())
        return total
    from rocm_attn.kernels.experts.combine import launch_combine

    out = torch.empty(share.shape[0], parts.shape[1], dtype=parts.dtype, device=parts.device)
    launch_combine(parts, share, shared, weight, out)
    return out

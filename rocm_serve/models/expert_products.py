"""MoE on a GPU and on a CPU: the choice of each token's experts, products with their matrices, and the sum of those."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.models.gates import Gate, ReluSquared
from rocm_attn.models.routing import ExpertScores, Routing
from rocm_serve.models.gated import form_of, lie_right, mixed, multiply, target_of

# The kernel compares each pair with each expert (H200): 57 us for 65,536 pairs and 128 experts, where torch takes 76,
# and 232 for 81,920 and 512.
_MOST_COMPARED = 2**24
# With fewer rows of an expert on average, blocks of 64 columns keep more multiprocessors at work (H200).
_LEAST_ROWS_FOR_HOPPER = 2
# Experts for each pair of a token and an expert, from which on tokens hardly share any: see few_tokens.py. H200, gate,
# product and sum of 128 experts of 2048 x 768, 8 of a token, without sorting and with: 25 and 30 us for one token, 45
# and 51 for two, 81 and 85 for four, 151 and 137 for eight; of 512 of 2048 x 512, 10 of a token: 20 and 30, 35 and 48,
# 64 and 80, 123 and 143.
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
        expert, sizes = self.expert, (self.expert.numel(), self.num_experts + 1)
        if expert.device.type == "cpu" or expert.numel() * self.num_experts > _MOST_COMPARED:
            return ExpertGroups.of(expert, self.num_experts)
        from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs

        groups = ExpertGroups(*(torch.empty(size, dtype=torch.int64, device=expert.device) for size in sizes))
        launch_sort_pairs(expert, *groups)
        return groups

    def suits_few_tokens(self, x: Tensor, weight: Tensor, rows_at_once: int) -> bool:
        """True if kernels that sort nothing take these rows and matrices, and are faster.

        rows_at_once: rows of x that a program holds
        """
        if not 0 < self.expert.numel() * _EXPERTS_OF_PAIR <= self.num_experts or self.expert.device.type == "cpu":
            return False
        from rocm_attn.kernels.experts.few_tokens import fits

        return lie_right(x, weight) and fits(rows_at_once, x.shape[1])


def choice(routing: Routing, logits: Tensor, correction: Tensor | None) -> Choice:
    """Chooses the experts of every token."""
    if logits.device.type == "cpu":
        return Choice(*routing.choose(logits, correction), routing.num_experts)
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
    launch_choose(logits, correction, expert, share, rule)
    return Choice(expert, share, routing.num_experts)


def expert_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Choice, gate: Gate | None, *, rows: int, fixed: bool
) -> Tensor:
    """[pairs, out]: each pair's row of x times the matrix of its expert; see launch_expert_product.

    gate:  combines the products, whose matrices are then twice as large; see mixed()
    rows:  of a block on a CPU, if bits are fixed; else it takes whole groups
    fixed: whether a row's bits must not depend on the number of rows
    """
    is_cpu = x.device.type == "cpu"
    if gate is not None and (is_cpu or isinstance(gate, ReluSquared)):
        return mixed(gate, expert_products(x, weight, bias, chosen, None, rows=rows, fixed=fixed))
    num_pairs, num_out = chosen.expert.numel(), weight.shape[1] // (1 if gate is None else 2)
    out = torch.empty(num_pairs, num_out, dtype=x.dtype, device=x.device)
    if is_cpu:
        run_as_launch(expert_product, x, weight, bias, chosen.groups, out, rows=rows if fixed else 0)
        return out
    form = None if gate is None else form_of(gate)
    if not fixed and len(x) == len(chosen.expert) and chosen.suits_few_tokens(x, weight, 1):
        from rocm_attn.kernels.experts.few_tokens import launch_inner_products

        launch_inner_products(x, weight, bias, chosen.expert, out, target_of(x.device).compute_units, form)
        return out
    from rocm_attn.kernels.experts.arguments import ProductArgs

    args = ProductArgs.of_experts(x, weight, bias, chosen.groups, out, form)
    mean_rows = -(-num_pairs // chosen.num_experts)
    by_hopper = (fixed or mean_rows >= _LEAST_ROWS_FOR_HOPPER) and args.suits_hopper
    multiply(args, mean_rows, by_hopper=by_hopper, fixed=fixed)
    return out


def expert_sums(
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Choice,
    shared: Tensor | None,
    factor: Tensor | None,
    *,
    rows: int,
    fixed: bool,
) -> Tensor:
    """[tokens, width]: the sum of a token's expert_products(), by its shares, and of sigmoid(factor) * shared.

    inner:  [pairs, in]; see combined() for shared and factor
    """
    if fixed or not chosen.suits_few_tokens(inner, weight, chosen.expert.shape[1]):
        parts = expert_products(inner, weight, bias, chosen, None, rows=rows, fixed=fixed)
        return combined(parts, chosen.share, shared, factor)
    from rocm_attn.kernels.experts.few_tokens import launch_expert_sums

    out = torch.empty(len(chosen.expert), weight.shape[1], dtype=inner.dtype, device=inner.device)
    units = target_of(inner.device).compute_units
    launch_expert_sums(inner, weight, bias, chosen.expert, chosen.share, shared, factor, out, units)
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

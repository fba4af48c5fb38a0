"""The choice of experts, the sort of pairs, and the sum of their outputs, by brute force and in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.experts.choose import ChoiceRule, launch_choose
from rocm_attn.kernels.experts.combine import launch_combine
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs
from tests.amd.tolerances import assert_attention_close

Put = Callable[[Tensor], Tensor]
NONE = -7  # of memory that is not written


@dataclass(frozen=True)
class Choice:
    """A choice of experts: logits [tokens, experts], and what is added to the scores [experts], or None."""

    logits: Tensor
    correction: Tensor | None
    num_chosen: int
    rule: ChoiceRule

    def made(self, put: Put = Tensor.clone) -> tuple[Tensor, Tensor]:
        """The kernel's experts and shares. put: where a tensor lies"""
        shape, device = (len(self.logits), self.num_chosen), self.logits.device
        expert = put(torch.full(shape, NONE, dtype=torch.int32, device=device))
        share = put(torch.full(shape, float("nan"), device=device))
        correction = None if self.correction is None else put(self.correction)
        is_alone = len(self.logits) == 1
        sizes = self.num_chosen, self.logits.shape[1] + 1
        order, indptr = (put(torch.full((size,), NONE, dtype=torch.int64, device=device)) for size in sizes)
        groups = ExpertGroups(order, indptr) if is_alone else None
        launch_choose(put(self.logits), correction, expert, share, self.rule, groups)
        if is_alone:
            assert order.tolist() == sorted(range(self.num_chosen), key=lambda place: int(expert[0, place]))
            assert indptr.tolist() == [int((expert < each).sum()) for each in range(sizes[1])]
        return expert, share

    def assert_served(self, put: Put = Tensor.clone) -> None:
        """Checks every token's experts, and its shares."""
        expert, share = self.made(put)
        for token, logits in enumerate(self.logits.double().cpu()):
            chosen = self.chosen_of(logits)
            assert expert[token].tolist() == chosen, f"token {token}"
            scores = self._scores(logits)[chosen]
            exact = (scores / scores.sum() if self.rule.normalised else scores) * self.rule.scale
            torch.testing.assert_close(share[token].double().cpu(), exact, rtol=2e-6, atol=0)

    def chosen_of(self, logits: Tensor) -> list[int]:
        """The experts of a token: by falling rank, the first of equal ones first."""
        scores, rule = self._scores(logits), self.rule
        ranks = (scores if self.correction is None else scores + self.correction.double().cpu()).tolist()
        of_group = len(ranks) // rule.num_groups
        groups = [range(first, first + of_group) for first in range(0, len(ranks), of_group)]

        def best(group: Sequence[int]) -> float:
            total: float = sum(sorted((ranks[each] for each in group), reverse=True)[: rule.best_of_group])
            return total

        allowed = sorted(groups, key=best, reverse=True)[: rule.num_groups_chosen]
        among = sorted(expert for group in allowed for expert in group)
        return sorted(among, key=lambda expert: -ranks[expert])[: self.num_chosen]

    def _scores(self, logits: Tensor) -> Tensor:
        powers = logits.exp()
        return powers / powers.sum() if self.rule.softmax else powers / (1 + powers)


def random_choice(
    sizes: tuple[int, int, int],
    rule: ChoiceRule,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_corrected: bool = False,
) -> Choice:
    """Random logits. sizes: tokens, experts, experts of a token"""
    num_tokens, num_experts, num_chosen = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    logits = 3 * torch.randn(num_tokens, num_experts, generator=random)
    correction = torch.randn(num_experts, generator=random).to(device) if is_corrected else None
    return Choice(logits.to(device, dtype), correction, num_chosen, rule)


def assert_sorted(expert: Tensor, num_experts: int, put: Put = Tensor.clone) -> None:
    """Checks the kernel's order of pairs, and each expert's first place. expert: [tokens, chosen]"""
    pairs, device = expert.flatten().tolist(), expert.device
    order, indptr = (
        put(torch.full((size,), NONE, dtype=torch.int64, device=device)) for size in (len(pairs), num_experts + 1)
    )
    launch_sort_pairs(put(expert.int()), order, indptr)
    wanted = [[pair for pair, owner in enumerate(pairs) if owner == each] for each in range(num_experts)]
    assert order.tolist() == [pair for group in wanted for pair in group]
    assert indptr.tolist() == [sum(map(len, wanted[:each])) for each in range(num_experts + 1)]


def assert_combined(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
    *,
    has_shared: bool,
    has_weight: bool,
) -> None:
    """Checks the sums of random parts. sizes: tokens, experts of a token, width"""
    num_tokens, chosen, width = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    parts, shared, weight = (
        torch.randn(*shape, generator=random).to(device, dtype)
        for shape in ((num_tokens * chosen, width), (num_tokens, width), (num_tokens, 1))
    )
    share = torch.rand(num_tokens, chosen, generator=random).to(device) / chosen
    out = put(torch.full((num_tokens, width), float("nan"), dtype=dtype, device=device))
    of_all, of_weight = put(shared) if has_shared else None, put(weight) if has_weight else None
    launch_combine(put(parts), put(share), of_all, of_weight, out)
    exact = (parts.double().view(num_tokens, chosen, width) * share.double()[..., None]).sum(1)
    if has_shared:
        exact = exact + shared.double() / ((1 + (-weight.double()).exp()) if has_weight else 1)
    assert_attention_close(out, exact, dtype)

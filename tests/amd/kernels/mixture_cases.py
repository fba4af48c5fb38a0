"""The choice of experts, the sort of pairs, and the sum of their outputs, by brute force and in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.experts.choose import NO_SHARED, SHARED_BY_LOGIT, ChoiceRule, launch_choose
from rocm_attn.kernels.experts.combine import launch_combine
from rocm_attn.kernels.experts.few_tokens import launch_expert_sums, launch_inner_products
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs
from rocm_attn.kernels.model.gate import GateForm
from tests.amd.kernels.expert_cases import ExpertProblem, random_problem
from tests.amd.tolerances import assert_attention_close

Put = Callable[[Tensor], Tensor]
NONE = -7  # of memory that is not written
_UNITS = 2  # so that programs take several tiles


@dataclass(frozen=True)
class Choice:
    """A choice of experts: logits [tokens, experts], and what is added to the scores [experts], or None.

    There is one more logit if the shared expert has one.
    """

    logits: Tensor
    correction: Tensor | None
    num_chosen: int
    rule: ChoiceRule

    def made(self, put: Put = Tensor.clone) -> tuple[Tensor, Tensor]:
        """The kernel's experts and shares. put: where a tensor lies"""
        has_shared = self.rule.shared != NO_SHARED
        shape, device = (len(self.logits), self.num_chosen + has_shared), self.logits.device
        expert = put(torch.full(shape, NONE, dtype=torch.int32, device=device))
        share = put(torch.full(shape, float("nan"), device=device))
        correction = None if self.correction is None else put(self.correction)
        # Rows of the logits of a router with rows of zeros lie apart.
        room = F.pad(self.logits, (0, 3 if has_shared else 0), value=float("nan"))
        launch_choose(put(room)[:, : self.logits.shape[1]], correction, expert, share, self.rule)
        return expert, share

    def assert_served(self, put: Put = Tensor.clone) -> None:
        """Checks every token's experts, and its shares."""
        expert, share = self.made(put)
        num_experts = self.logits.shape[1] - (self.rule.shared == SHARED_BY_LOGIT)
        for token, logits in enumerate(self.logits.double().cpu()):
            chosen = self.chosen_of(logits[:num_experts])
            scores = self._scores(logits[:num_experts])[chosen]
            exact = (scores / scores.sum() if self.rule.normalised else scores) * self.rule.scale
            if self.rule.shared != NO_SHARED:
                own = 1 / (1 + (-logits[-1:]).exp()) if self.rule.shared == SHARED_BY_LOGIT else torch.ones(1)
                chosen, exact = [*(each + 1 for each in chosen), 0], torch.cat((exact, own.double()))
            assert expert[token].tolist() == chosen, f"token {token}"
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
    columns = num_experts + (rule.shared == SHARED_BY_LOGIT)
    logits = 3 * torch.randn(num_tokens, columns, generator=random)
    correction = torch.randn(num_experts, generator=random).to(device) if is_corrected else None
    return Choice(logits.to(device, dtype), correction, num_chosen, rule)


def assert_sorted(expert: Tensor, num_experts: int, put: Put = Tensor.clone) -> None:
    """Checks the kernel's groups. expert: [tokens, chosen]"""
    tokens, places, indptr = (
        put(torch.full((size,), NONE, dtype=torch.int64, device=expert.device))
        for size in (expert.numel(), expert.numel(), num_experts + 1)
    )
    drawn = torch.full((1,), NONE, dtype=torch.int32, device=expert.device)
    groups = ExpertGroups(tokens, places, indptr, drawn)
    launch_sort_pairs(put(expert.int()), groups)
    assert_grouped(groups, expert, num_experts)


def assert_grouped(groups: ExpertGroups, expert: Tensor, num_experts: int) -> None:
    """Checks the groups of tokens and the experts that they have chosen, by brute force. expert: [tokens, chosen]"""
    owners = expert.flatten().tolist()
    wanted = [[pair for pair, owner in enumerate(owners) if owner == each] for each in range(num_experts)]
    order = [pair for group in wanted for pair in group]
    assert groups.tokens.tolist() == [pair // expert.shape[1] for pair in order]
    assert [order[place] for place in groups.places.tolist()] == list(range(len(order)))
    assert groups.indptr.tolist() == [sum(map(len, wanted[:each])) for each in range(num_experts + 1)]
    assert groups.drawn.tolist() == [0]


def assert_combined(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
    *,
    has_shared: bool,
    has_weight: bool,
) -> None:
    """Checks the sums of random parts, which lie by expert if there is a shared one. sizes: tokens, chosen, width"""
    num_tokens, chosen, width = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    parts, shared, weight = (
        torch.randn(*shape, generator=random).to(device, dtype)
        for shape in ((num_tokens * chosen, width), (num_tokens, width), (num_tokens, 1))
    )
    share = torch.rand(num_tokens, chosen, generator=random).to(device) / chosen
    places = torch.randperm(len(parts), generator=random).to(device)
    out = put(torch.full((num_tokens, width), float("nan"), dtype=dtype, device=device))
    of_all, of_weight = put(shared) if has_shared else None, put(weight) if has_weight else None
    launch_combine(put(parts), put(places) if has_shared else None, put(share), of_all, of_weight, out)
    by_pair = parts.double()[places] if has_shared else parts.double()
    exact = (by_pair.view(num_tokens, chosen, width) * share.double()[..., None]).sum(1)
    if has_shared:
        exact = exact + shared.double() / ((1 + (-weight.double()).exp()) if has_weight else 1)
    assert_attention_close(out, exact, dtype)


@dataclass(frozen=True)
class FewTokens:
    """Tokens that choose some experts each, and dims of their rows: of x, of inner products, and of the sum.

    The first expert is chosen by no token, and its biases are NaN; the last one is chosen by the last token.
    """

    tokens: int
    experts: int
    chosen: int
    width: int
    inner: int

    def assert_inner(
        self,
        form: GateForm | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        put: Put = Tensor.clone,
        *,
        has_bias: bool = False,
    ) -> None:
        """Checks each pair's inner products, combined if there is a gate."""
        sizes = self.width, self.inner * (1 if form is None else 2)
        problem = self._problem(sizes, dtype, device, has_bias=has_bias)
        problem = replace(problem, x=problem.x / self.width**0.5)  # products of about one
        out = put(problem.empty_out(1 if form is None else 2))
        bias = None if problem.bias is None else put(problem.bias)
        launch_inner_products(put(problem.x), put(problem.weight), bias, put(problem.expert.int()), out, _UNITS, form)
        if form is None:
            problem.assert_served(out)
        else:
            problem.assert_gated(out, form)

    def assert_sums(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        put: Put = Tensor.clone,
        *,
        has_bias: bool,
        has_shared: bool,
        has_factor: bool,
    ) -> None:
        """Checks the sum of each token's experts."""
        problem = self._problem((self.inner, self.width), dtype, device, has_bias=has_bias, of_pairs=True)
        random = torch.Generator().manual_seed(self.width)
        share = torch.rand(self.tokens, self.chosen, generator=random).to(device)
        shared, factor = (torch.randn(self.tokens, n, generator=random).to(device, dtype) for n in (self.width, 1))
        out = put(torch.full((self.tokens, self.width), float("nan"), dtype=dtype, device=device))
        optional = (problem.bias, shared if has_shared else None, factor if has_factor else None)
        bias, of_shared, of_factor = (None if each is None else put(each) for each in optional)
        launch_expert_sums(
            put(problem.x),
            put(problem.weight),
            bias,
            put(problem.expert.int()),
            put(share),
            of_shared,
            of_factor,
            out,
            _UNITS,
        )
        x = problem.x.double().view(self.tokens, self.chosen, self.inner)
        products = torch.einsum("tci,tcwi->tcw", x, problem.weight.double()[problem.expert])
        if problem.bias is not None:
            products += problem.bias.double()[problem.expert]
        exact = (products * share.double()[..., None]).sum(1)
        if has_shared:
            exact += shared.double() / ((1 + (-factor.double()).exp()) if has_factor else 1)
        size = (self.inner * self.chosen) ** 0.5
        assert_attention_close(out / size, exact / size, dtype)

    def _problem(
        self,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        has_bias: bool,
        of_pairs: bool = False,
    ) -> ExpertProblem:
        problem = random_problem(
            self.tokens,
            self.experts,
            self.chosen,
            sizes,
            dtype=dtype,
            device=device,
            has_bias=has_bias,
            of_pairs=of_pairs,
        )
        # The last expert of a problem has no token.
        problem = replace(problem, expert=self.experts - 1 - problem.expert)
        problem.expert[-1, 0] = self.experts - 1
        if problem.bias is not None:
            problem.bias[0] = float("nan")
        return problem

"""Products of rows with the matrices of their experts: problems, and their results in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.model.gate import GateForm
from rocm_attn.oracle.numerics import sum_error
from rocm_serve.models.expert_products import Choice
from tests.amd.kernels.model_cases import exact_gate
from tests.amd.tolerances import assert_attention_close


@dataclass(frozen=True)
class ExpertProblem:
    """A problem: x [rows, in], weight [experts, out, in], bias [experts, out], expert [tokens, chosen].

    of_pairs: whether x has a row per pair of a token and an expert, by expert, and not per token
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    expert: Tensor
    of_pairs: bool = False

    @property
    def groups(self) -> ExpertGroups:
        return ExpertGroups.of(self.expert, len(self.weight))

    @property
    def source(self) -> Tensor | None:
        """The row of x of each pair, by expert, if it is not the same row."""
        return None if self.of_pairs else self.groups.tokens

    @property
    def order(self) -> list[int]:
        """The pairs by expert."""
        owner = self.expert.flatten().tolist()
        return sorted(range(len(owner)), key=owner.__getitem__)

    def by_pair(self, out: Tensor) -> Tensor:
        """The rows of a product, which lie by expert, in the order of pairs."""
        placed = torch.empty_like(out)
        placed[self.order] = out
        return placed

    def rows_of_pairs(self) -> Tensor:
        """The row of x of each pair, in float64."""
        x = self.x.double()
        return self.by_pair(x) if self.of_pairs else x.repeat_interleave(self.expert.shape[1], 0)

    @property
    def choice(self) -> Choice:
        return Choice(self.expert.int(), torch.ones(self.expert.shape, device=self.expert.device), len(self.weight))

    def args(self, out: Tensor, gate: GateForm | None = None) -> ProductArgs:
        """Returns the arguments of a launch that writes out."""
        return ProductArgs.of_experts(self.x, self.weight, self.bias, self.groups, self.source, out, gate)

    def empty_out(self, sides: int = 1) -> Tensor:
        """Returns [pairs, out] of NaN. sides: matrices of an expert, whose products are combined"""
        size = self.expert.numel(), self.weight.shape[1] // sides
        return torch.full(size, float("nan"), dtype=self.x.dtype, device=self.x.device)

    def assert_served(self, out: Tensor) -> None:
        """Checks rows, by pair, against products, within the error of a float32 sum of their length and rounding."""
        x, weight, result = self.rows_of_pairs().cpu(), self.weight.double().cpu(), out.double().cpu()
        for pair, expert in enumerate(self.expert.flatten().tolist()):
            row = x[pair]
            exact, size = weight[expert] @ row, weight[expert].abs() @ row.abs()
            if self.bias is not None:
                exact = exact + self.bias[expert].double().cpu()
                size = size + self.bias[expert].double().abs().cpu()
            allowed = sum_error(x.shape[1] + 1, size) + torch.finfo(out.dtype).eps * exact.abs()
            assert bool(((result[pair] - exact).abs() <= allowed).all()), f"pair {pair} of expert {expert}"

    def assert_gated(self, out: Tensor, form: GateForm) -> None:
        """Checks rows, by pair, against their products, combined."""
        x, weight = self.rows_of_pairs(), self.weight.double()
        for pair, expert in enumerate(self.expert.flatten().tolist()):
            products = weight[expert] @ x[pair]
            if self.bias is not None:
                products = products + self.bias[expert].double()
            size = products.square().mean().sqrt()
            assert_attention_close(out[pair] / size, exact_gate(products, form) / size, out.dtype)


def random_problem(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    sizes: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    has_bias: bool = False,
    of_pairs: bool = False,
) -> ExpertProblem:
    """Returns a random problem. The last expert has no token if there is a choice.

    sizes: in, out
    """
    generator = torch.Generator().manual_seed(num_tokens + 100 * num_experts)
    num_in, num_out = sizes
    used = max(num_chosen, num_experts - 1)
    expert = torch.rand(num_tokens, used, generator=generator).argsort(-1)[:, :num_chosen]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return ExpertProblem(
        x=random(num_tokens * (num_chosen if of_pairs else 1), num_in),
        weight=random(num_experts, num_out, num_in),
        bias=random(num_experts, num_out) if has_bias else None,
        expert=expert.to(device),
        of_pairs=of_pairs,
    )

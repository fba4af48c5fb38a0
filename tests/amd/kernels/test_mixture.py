"""Kernels around a model's experts and recurrences, against brute force and float64."""

import pytest
import torch

from rocm_attn.kernels.experts.choose import SHARED, SHARED_BY_LOGIT, ChoiceRule
from rocm_attn.kernels.model.gate import GateForm
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.mixture_cases import FewTokens, assert_combined, assert_sorted, random_choice
from tests.amd.kernels.model_cases import FORMS
from tests.amd.kernels.recurrent_gate_cases import GATED, GatedCase, assert_gates

SOFTMAX = ChoiceRule(1, 1, 1, softmax=True, normalised=True, scale=1.0)
RULES = {
    "softmax": ((5, 60, 4), SOFTMAX),
    "all experts": ((3, 4, 4), SOFTMAX._replace(normalised=False)),
    "sigmoid": ((3, 128, 8), ChoiceRule(1, 1, 1, softmax=False, normalised=True, scale=2.5)),
    "groups": ((7, 64, 6), ChoiceRule(8, 3, 2, softmax=False, normalised=True, scale=2.5)),
    "groups of 20": ((4, 160, 6), ChoiceRule(8, 3, 1, softmax=True, normalised=False, scale=16.0)),
    "three groups": ((4, 12, 2), ChoiceRule(3, 1, 2, softmax=True, normalised=True, scale=1.0)),
    "many": ((2, 513, 10), SOFTMAX),
    "shared": ((5, 16, 3), ChoiceRule(4, 2, 2, softmax=False, normalised=True, scale=2.5, shared=SHARED)),
    "shared by a logit": ((3, 60, 4), SOFTMAX._replace(scale=1.5, shared=SHARED_BY_LOGIT)),
}


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(("sizes", "rule"), RULES.values(), ids=RULES)
def test_experts_are_chosen_by_rank(
    sizes: tuple[int, int, int],
    rule: ChoiceRule,
    is_corrected: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    random_choice(sizes, rule, dtype=dtype, device=kernel_device, is_corrected=is_corrected).assert_served()


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_experts_are_there_and_differ_whatever_the_logits(
    value: float, softmax: bool, kernel_device: torch.device
) -> None:
    choice = random_choice((4, 12, 5), ChoiceRule(3, 2, 2, softmax, True, 1.0), device=kernel_device)
    _, wanted = choice.made()
    choice.logits[1] = value
    choice.logits[2, 7] = value
    expert, share = choice.made()
    assert all(len(set(chosen)) == 5 and set(chosen) <= set(range(12)) for chosen in expert.tolist())
    assert torch.equal(share[[0, 3]], wanted[[0, 3]])
    if softmax or value != value:
        assert bool(share[1].isnan().all())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts"), [(1, 8, 128), (37, 3, 7), (700, 3, 5), (1500, 3, 5), (1, 1, 1)]
)
def test_pairs_are_sorted_by_expert(tokens: int, chosen: int, experts: int, kernel_device: torch.device) -> None:
    """The last expert has no pair if there is a choice; 4,500 pairs are read in two turns."""
    random = torch.Generator().manual_seed(tokens)
    expert = torch.rand(tokens, max(chosen, experts - 1), generator=random).argsort(-1)[:, :chosen]
    assert_sorted(expert.contiguous().to(kernel_device), experts)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("has_shared", "has_weight"), [(False, False), (True, False), (True, True)])
def test_outputs_of_experts_are_summed(
    has_shared: bool, has_weight: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for sizes in ((1, 8, 40), (3, 1, 1030), (5, 6, 512)):
        assert_combined(sizes, dtype, kernel_device, has_shared=has_shared, has_weight=has_weight)


FEW_TOKENS = [FewTokens(1, 40, 5, 200, 72), FewTokens(3, 9, 1, 64, 37)]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
@pytest.mark.parametrize("case", [*FEW_TOKENS, FewTokens(2, 24, 3, 1030, 40)], ids=str)
def test_few_tokens_are_multiplied_with_their_experts(
    case: FewTokens, form: GateForm | None, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for has_bias in (False, True):
        case.assert_inner(form, dtype, kernel_device, has_bias=has_bias)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("case", [*FEW_TOKENS, FewTokens(2, 24, 3, 80, 520)], ids=str)
def test_outputs_of_few_tokens_are_summed(case: FewTokens, dtype: torch.dtype, kernel_device: torch.device) -> None:
    for has_bias, has_shared, has_factor in ((False, False, False), (True, True, False), (True, True, True)):
        case.assert_sums(dtype, kernel_device, has_bias=has_bias, has_shared=has_shared, has_factor=has_factor)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_gates_of_a_recurrence(dtype: torch.dtype, kernel_device: torch.device) -> None:
    assert_gates((5, 40, 1), dtype, kernel_device, has_y=False)
    assert_gates((5, 40, 1), dtype, kernel_device, has_y=True)
    assert_gates((3, 6, 100), dtype, kernel_device, has_y=True)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("case", GATED.values(), ids=GATED)
def test_the_output_of_a_recurrence_is_normalised_and_gated(
    case: GatedCase, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    case.assert_served(dtype, kernel_device)

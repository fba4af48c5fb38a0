"""Checks of the masks of the kernels around a model's experts and recurrences.

Tensors of experts have a multiple of 16 bytes, so that they begin at one where their end is fenced.
"""

import torch

from rocm_attn.kernels.experts.choose import NO_SHARED, SHARED_BY_LOGIT, ChoiceRule
from tests.amd.kernels.mixture_cases import FewTokens, assert_combined, assert_sorted, random_choice
from tests.amd.kernels.model_cases import FORMS
from tests.amd.kernels.recurrent_gate_cases import GATED, assert_gates
from tests.amd.mutation.memory import Memory


def choose(memory: Memory) -> None:
    """Checks groups that fill no block, and a token that has no whole block of experts."""
    for sizes, groups, shared in (
        ((4, 12, 3), 3, NO_SHARED),
        ((4, 20, 5), 1, NO_SHARED),
        ((4, 19, 3), 1, SHARED_BY_LOGIT),
    ):
        rule = ChoiceRule(groups, 1, 2, softmax=groups == 1, normalised=True, scale=2.0, shared=shared)
        random_choice(sizes, rule, is_corrected=not shared).assert_served(memory.put)


def sort_pairs(memory: Memory) -> None:
    """Checks pairs that do not fill a turn, the first one or the second."""
    for num_tokens in (8, 1500):
        assert_sorted(torch.arange(3 * num_tokens).view(-1, 3) % 4, 5, memory.put)


def combine(memory: Memory) -> None:
    """Checks rows that fill no block, with all parts of the sum."""
    assert_combined((4, 3, 520), torch.float32, put=memory.put, has_shared=True, has_weight=True)


def few_tokens(memory: Memory) -> None:
    """Checks rows, and experts of a token, that fill no block, and matrices whose rows fill no turn of the programs."""
    case = FewTokens(4, 9, 3, 40, 21)
    for form in (None, FORMS[0]):
        case.assert_inner(form, torch.float32, put=memory.put, has_bias=True)
    for width in (1, 37):  # the first row that is read is the last one, or it is read ahead
        FewTokens(4, 9, 3, width, 40).assert_sums(
            torch.float32, put=memory.put, has_bias=True, has_shared=True, has_factor=True
        )


def gates(memory: Memory) -> None:
    """Checks tokens that fill no block of columns, with a channel of each head and with more."""
    assert_gates((2, 40, 1), torch.float32, put=memory.put, has_y=True)
    assert_gates((2, 6, 100), torch.float32, put=memory.put, has_y=True)


def gated_norm(memory: Memory) -> None:
    """Checks groups that fill no block, and rows that fill no program."""
    for case in GATED.values():
        case.assert_served(torch.float32, put=memory.put)

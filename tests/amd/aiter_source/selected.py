"""Runs of AITER's own unified_attention_sparse_mla under the provider, each at one step over poisoned memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.sparse.arguments import SelectedArgs
from rocm_attn.machine.target import Target
from rocm_attn.providers.aiter import library
from tests.amd.aiter.selected_steps import CASES as STEPS
from tests.amd.aiter.selected_steps import ROW, attended, in_wide_rows, unchanged
from tests.amd.aiter_source.cases import CASES, INTERPRETED, Outcome, SourceCase, Verdict
from tests.amd.kernels.sparse_cases import SelectedCase
from tests.amd.simulator.sparse_cases import with_large_pages


@dataclass(frozen=True, slots=True)
class SelectedSourceCase:
    """A step of attention over a selection. changed: returns the step in other memory"""

    name: str
    case: SelectedCase
    changed: Callable[[SelectedArgs], SelectedArgs] = unchanged
    kernel: str = ROW.name
    eight_bits: bool = False

    def __str__(self) -> str:
        return f"{self.kernel.removeprefix('aiter.')}-{self.name}"

    def outcome(self, target: Target) -> Outcome:
        """Runs the case; see SourceCase.outcome."""
        complaint = library.unavailable().get(self.kernel)
        if complaint:
            return Outcome(Verdict.REFUSED, complaint)
        try:
            return Outcome(Verdict.RIGHT, "", attended(self.case, target, self.changed))
        except Exception as caught:  # any exception is the kernel's result; the other cases still run
            return Outcome(Verdict.WRONG, f"{type(caught).__name__}: {caught}")


AnyCase = SourceCase | SelectedSourceCase

SELECTED_CASES = (
    *(SelectedSourceCase(name, case) for name, case in STEPS.items()),
    *(
        SelectedSourceCase(f"page{size}-{name}", STEPS[f"page{size}"], changed)
        for size in (1, 16)
        for name, changed in (("above_4_gib", with_large_pages), ("wide_rows", in_wide_rows))
    ),
)

# Triton's interpreter computes bfloat16 wrongly, and copies pools.
_INTERPRETED_SELECTED = tuple(
    replace(each, case=replace(each.case, dtype=torch.float16))
    for each in SELECTED_CASES
    if each.name != "fp16" and each.changed is not with_large_pages
)

ALL_CASES: tuple[AnyCase, ...] = (*CASES, *SELECTED_CASES)
ALL_INTERPRETED: tuple[AnyCase, ...] = (*INTERPRETED, *_INTERPRETED_SELECTED)

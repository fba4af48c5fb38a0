"""merge_states: attention over parts of the keys, merged for the caller."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import Problem
from rocm_attn.step.merging import merge_state, merge_states
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.worlds.problems import small_problem

# Left out under the interpreter by day: no Triton kernel runs here, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

Side = tuple[Tensor, Tensor]


def sides_of(problem: Problem, cuts: Sequence[int], device: torch.device, seed: int) -> tuple[list[Side], Side]:
    """The reference over ranges of keys between the cuts, and over all of them; q, k and v are random."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(7, 6, 16, generator=generator)
    k, v = torch.randn(2, cuts[-1], 2, 16, generator=generator)
    hidden = torch.zeros(7, cuts[-1], dtype=torch.bool)
    parts = []
    for first, end in pairwise(cuts):
        visible = hidden.clone()
        visible[:, first:end] = True
        out, lse = attend_sequence(q, k, v, problem, visible=visible)
        parts.append((out.float().to(device), lse.float().to(device)))
    return parts, attend_sequence(q, k, v, problem, visible=~hidden)


@pytest.mark.parametrize("cuts", [[0, 20], [0, 5, 20], [0, 5, 5, 20], [0, 1, 2, 3, 10, 10, 20], [0, 0, 20, 20]])
@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_parts_gives_attention_over_the_whole(cuts: list[int], seed: int, device: torch.device) -> None:
    parts, (want, want_lse) = sides_of(small_problem(), cuts, device, seed)
    out, lse = merge_states(parts)
    assert_attention_close(out, want.to(device), torch.float32)
    assert_lse_close(lse, want_lse.to(device), torch.float32)


def test_many_sides_round_once(device: torch.device) -> None:
    """Sixty merges of float16 sides whose mean is between two float16 values."""
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(3, 2, 16, generator=generator).half() for _ in range(60)]
    lse = torch.zeros(3, 2, device=device)
    out, out_lse = merge_states([(side.to(device), lse) for side in outs])
    assert out.dtype == torch.float16
    want = torch.stack(outs).double().mean(0).to(device)
    assert torch.equal(out, want.half()) or (out.double() - want).abs().max() < 1e-4
    torch.testing.assert_close(out_lse, torch.full_like(lse, 60.0).log())


def test_nothing_of_an_empty_side_is_read(device: torch.device) -> None:
    nothing = torch.full((2, 1, 4), float("nan"), device=device), torch.full((2, 1), float("-inf"), device=device)
    for sides in ([nothing], [nothing, nothing], [nothing, nothing, nothing]):
        out, lse = merge_states(sides)
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


OUT, LSE = torch.zeros(3, 2, 8), torch.zeros(3, 2)
BAD_SIDES = {
    "another shape": (
        (torch.zeros(3, 2, 4), LSE),
        r"out of side 1 has shape \[3, 2, 4\] and side 0 \[3, 2, 8\]",
    ),
    "integers": ((torch.zeros(3, 2, 8).int(), LSE), "out of side 1 is torch.int32 with stride 1"),
    "gaps": ((torch.zeros(3, 2, 16)[..., ::2], LSE), "with stride 2 in its last dimension; it must be floating point"),
    "half lse": (
        (OUT, LSE.half()),
        r"lse of side 1 is torch.float16 of shape \[3, 2\]; it must be torch.float32 \[3, 2\]",
    ),
    "turned lse": ((OUT, LSE.t()), r"lse of side 1 is torch.float32 of shape \[2, 3\]"),
    "elsewhere": ((OUT.to("meta"), LSE), "side 1 is on meta and cpu, side 0 on cpu; use one device"),
}


@pytest.mark.parametrize(("side", "complaint"), BAD_SIDES.values(), ids=BAD_SIDES)
def test_sides_that_do_not_fit_are_refused(side: Side, complaint: str) -> None:
    with pytest.raises(BadTensor, match=complaint):
        merge_state(OUT, LSE, *side)


def test_no_side_is_refused() -> None:
    with pytest.raises(BadTensor, match="there is no side to merge"):
        merge_states([])


@pytest.mark.parametrize("side", [OUT, (OUT,), (OUT, None), None])
def test_a_side_that_is_no_pair_is_refused(side: Any) -> None:
    with pytest.raises(BadTensor, match=r"side 1 is of type \w+; give a pair of tensors, \(out, lse\)"):
        merge_states([(OUT, LSE), side])

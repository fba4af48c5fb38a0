"""The product of rows with the matrices of their experts: the kernel and its twin, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.kernels.tuning.expert_tiles import EXPERT_CHOICES, expert_tiles
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import detect_target
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.expert_cases import ExpertProblem, random_problem

Product = Callable[[ExpertProblem], Tensor]


def kernel(problem: ExpertProblem, rows: int = 1) -> Tensor:
    """Computes the product with the kernel, and with tiles for groups of this many rows."""
    out, x = problem.empty_out(), problem.x
    tiles = expert_tiles(detect_target(x.device).arch, x.dtype, rows)
    launch_expert_product(x, problem.weight, problem.bias, problem.groups, out, tiles=tiles)
    return out


def twin(problem: ExpertProblem, rows: int = 0) -> Tensor:
    """Computes the product with the twin, on the host."""
    host = ExpertProblem(*(None if each is None else each.cpu() for each in vars(problem).values()))  # type: ignore[arg-type]
    out = host.empty_out()
    expert_product(host.x, host.weight, host.bias, host.groups, out, rows=rows)
    return out


PRODUCTS = {"kernel": kernel, "many rows": partial(kernel, rows=1000), "twin": twin, "blocks": partial(twin, rows=4)}
products = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)

# tokens, experts, experts of a token, (in, out)
SHAPES = [(1, 1, 1, (5, 7)), (5, 3, 2, (33, 40)), (40, 5, 2, (64, 33)), (17, 9, 8, (16, 16)), (3, 64, 4, (48, 32))]


@pytest.mark.fast
@products
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_is_multiplied_with_its_expert_alone(
    shape: tuple[int, int, int, tuple[int, int]], dtype: torch.dtype, product: Product, kernel_device: torch.device
) -> None:
    """Covers a row per token without biases, and a row per pair with biases."""
    for of_pairs in (False, True):
        problem = random_problem(*shape, dtype=dtype, device=kernel_device, has_bias=of_pairs, of_pairs=of_pairs)
        problem.assert_served(product(problem))


@products
@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_may_take_all_tokens(expert: int, product: Product, kernel_device: torch.device) -> None:
    problem = random_problem(50, 4, 1, (20, 24), device=kernel_device)
    problem = replace(problem, expert=torch.full_like(problem.expert, expert))
    problem.assert_served(product(problem))


@products
def test_rows_that_are_not_finite_harm_no_other(product: Product, kernel_device: torch.device) -> None:
    problem = random_problem(20, 4, 2, (16, 24), device=kernel_device)
    expected = product(problem)
    problem.x[7] = float("nan")
    rest = [pair for pair in range(40) if pair // 2 != 7]
    assert torch.equal(product(problem)[rest], expected[rest])


def test_matrices_may_lie_further_apart_than_32_bits_reach(kernel_device: torch.device) -> None:
    """The second of two experts begins 2**31 elements after the first."""
    problem = random_problem(9, 2, 2, (32, 16), dtype=torch.float16, device=kernel_device)
    # NumPy's zeros take memory only where they are written; the test session fills torch's with NaN.
    far = torch.from_numpy(np.zeros((1 << 31) + 512, np.float16)).to(kernel_device)
    weight = far.as_strided((2, 16, 32), (1 << 31, 32, 1))
    weight.copy_(problem.weight)
    problem.assert_served(kernel(replace(problem, weight=weight)))


def test_groups_hold_every_pair_once_in_the_order_of_experts() -> None:
    expert = torch.randint(0, 6, (37, 3))
    groups = ExpertGroups.of(expert, 7)
    assert sorted(groups.order.tolist()) == list(range(111))
    for each in range(7):
        pairs = groups.order[groups.indptr[each] : groups.indptr[each + 1]].tolist()
        assert pairs == [pair for pair, owner in enumerate(expert.flatten().tolist()) if owner == each]


def test_an_arch_without_tiles_is_refused() -> None:
    with pytest.raises(NoTiles, match=r"no tiles of experts for gfx90a with torch.bfloat16; rows exist for sm_90"):
        expert_tiles("gfx90a", torch.bfloat16, 1)
    assert {row.item_bytes for row in EXPERT_CHOICES if row.arch == "gfx942"} == {2, 4}

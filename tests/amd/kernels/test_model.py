"""A model's kernels against float64, or bit by bit: norms, gates, products of rows and of experts, sums over ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.model.gate import GateForm, launch_gate
from rocm_attn.kernels.model.peer_sum import launch_peer_sum
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.kernels.tuning.expert_tiles import EXPERT_CHOICES, expert_tiles
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import detect_target
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.expert_cases import ExpertProblem, random_problem
from tests.amd.kernels.mixture_cases import assert_grouped
from tests.amd.kernels.model_cases import (
    FORMS,
    OneOfRanks,
    assert_few_rows_multiplied,
    assert_gated,
    assert_row_multiplied,
    sum_of_rows,
)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 40), (5, 1000), (2, 4096)])
def test_a_row_is_the_sum_and_its_norm(rows: int, width: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    sum_of_rows(rows, width, dtype, kernel_device, terms=1 + rows // 3 * 2).assert_served()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
@pytest.mark.parametrize(("width", "num_out"), [(40, 7), (1000, 64), (2048, 37)])
def test_a_row_is_the_sum_and_its_norm_is_multiplied(
    width: int, num_out: int, form: GateForm | None, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """The launcher is given two processors, so that programs have several turns."""
    sum_of_rows(1, width, dtype, kernel_device).assert_multiplied(num_out, form, has_bias=num_out == 64)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (3, 1032), (2, 2048)])
def test_the_halves_of_a_row_are_combined(
    rows: int, inner: int, form: GateForm, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_gated(rows, inner, form, dtype, kernel_device)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("place", [0, 64])
def test_nan_stays(place: int, form: GateForm, kernel_device: torch.device) -> None:
    both = torch.zeros(1, 128, device=kernel_device)
    both[0, place] = float("nan")
    out = torch.zeros(1, 64, device=kernel_device)
    launch_gate(both, out, form)
    assert out.isnan().nonzero().tolist() == [[0, 0]]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(7, 64), (40, 3000)], ids=str)
def test_a_row_is_multiplied_with_a_matrix(
    sizes: tuple[int, int], has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_row_multiplied(sizes, dtype, kernel_device, has_bias=has_bias)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("sizes", [(3, 128, 128), (64, 64, 192)], ids=str)
def test_a_few_rows_are_multiplied_and_combined(
    sizes: tuple[int, int, int], form: GateForm, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_few_rows_multiplied(sizes, form, dtype, kernel_device, has_bias=sizes[0] == 3)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("sizes", [(3, 128, 256), (33, 64, 512)], ids=str)
def test_a_few_rows_are_multiplied_in_parts(
    sizes: tuple[int, int, int], parts: int, has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_few_rows_multiplied(sizes, None, dtype, kernel_device, parts=parts, has_bias=has_bias)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (3, 1), (8, 7)])
def test_every_rank_gets_the_sum(ranks: int, rank: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Sums of one program and of several, one after the other."""
    of_rank = OneOfRanks(ranks, rank, kernel_device)
    for num in (8, 1304, 512):
        of_rank.assert_sums(dtype, num)


def test_a_large_sum_has_several_blocks_in_a_program(kernel_device: torch.device) -> None:
    OneOfRanks(2, 1, kernel_device).assert_sums(torch.float16, (1 << 19) + 8)


def test_the_number_of_sums_goes_on_below_zero(kernel_device: torch.device) -> None:
    of_rank = OneOfRanks(2, 1, kernel_device, begun=2**31 - 2)
    for _ in range(3):
        of_rank.assert_sums(torch.float32, 520)


@pytest.mark.fast
def test_a_sum_waits_for_the_last_rank(kernel_device: torch.device) -> None:
    OneOfRanks(3, 0, kernel_device).assert_sums(torch.float32, 1304, last_is_late=True)


def test_a_sum_that_tries_the_memory_ends_without_a_rank_that_never_comes(kernel_device: torch.device) -> None:
    of_rank = OneOfRanks(2, 0, kernel_device)
    launch_peer_sum(torch.ones(512, device=kernel_device), of_rank.memory, looks=3)
    assert of_rank.memory.counts[0] == 1
    assert of_rank.others[0].flags[0].tolist() == [1, 0]


Product = Callable[[ExpertProblem], Tensor]


def kernel(problem: ExpertProblem, rows: int = 1, gate: GateForm | None = None) -> Tensor:
    """Computes the product with the kernel, and with tiles for groups of this many rows."""
    out, x = problem.empty_out(1 if gate is None else 2), problem.x
    tiles = expert_tiles(detect_target(x.device).arch, x.dtype, rows)
    launch_expert_product(replace(problem, x=x).args(out, gate), tiles=tiles)
    return problem.by_pair(out)


def twin(problem: ExpertProblem, rows: int = 0) -> Tensor:
    """Computes the product with the twin, on the host."""
    tensors = problem.x, problem.weight, problem.bias, problem.expert
    x, weight, bias, expert = (None if each is None else each.cpu() for each in tensors)
    host = ExpertProblem(x, weight, bias, expert, problem.of_pairs)  # type: ignore[arg-type]
    out = host.empty_out()
    expert_product(host.x, host.weight, host.bias, host.groups, host.source, out, rows=rows)
    return host.by_pair(out)


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


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 1000])
def test_products_of_experts_are_combined(
    rows: int, has_bias: bool, form: GateForm, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Covers halves that fill no block, the second one, and blocks of few pairs and of many."""
    problem = random_problem(9, 5, 2, (40, 2 * 35), dtype=dtype, device=kernel_device, has_bias=has_bias)
    problem = replace(problem, x=problem.x / 6)  # products of about one
    problem.assert_gated(kernel(problem, rows, form), form)


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
    expert = torch.randint(0, 6, (37, 3), dtype=torch.int32)
    assert_grouped(ExpertGroups.of(expert, 7), expert, 7)


def test_an_arch_without_tiles_is_refused() -> None:
    with pytest.raises(NoTiles, match=r"no tiles of experts for gfx90a with torch.bfloat16; rows exist for sm_90"):
        expert_tiles("gfx90a", torch.bfloat16, 1)
    assert {row.item_bytes for row in EXPERT_CHOICES if row.arch == "gfx942"} == {2, 4}

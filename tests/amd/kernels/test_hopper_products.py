"""Products of rows with one matrix or their experts' for Hopper against float64, with NaN in all that may not be read.

It needs that GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.launch import note_launches
from rocm_attn.kernels.model.gate import GateForm
from rocm_attn.kernels.tuning.expert_tiles import expert_tiles
from rocm_attn.models.gates import ClampedSwiGLU, Gate, GeGLU, SwiGLU
from rocm_serve.models.expert_products import expert_products
from rocm_serve.models.gated import form_of
from rocm_serve.models.linears import BatchInvariantLinears, Linears
from rocm_serve.models.mlp_weights import ExpertWeights
from tests.amd.kernels.expert_cases import ExpertProblem, random_problem
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.model_cases import FORMS

pytestmark = OF_HOPPERS_KERNELS

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# tokens, experts, experts of a token, (in, out): sizes that fill no step, no box of a matrix and no block of columns;
# experts with up to a hundred pairs, with several blocks, and more than a warp has lanes.
SHAPES = [
    (1, 1, 1, (16, 8)),
    (40, 5, 2, (80, 40)),
    (300, 3, 2, (144, 272)),
    (17, 9, 8, (64, 512)),
    (90, 70, 4, (320, 129)),
]


SORT, HOPPERS, PLAIN = "_sort_pairs_kernel", "_hopper_expert_product_kernel", "_expert_product_kernel"
COMBINE = "_combine_experts_kernel"


def among_nan(rows: Tensor) -> Tensor:
    """The same rows, with NaN between them, before them and after them."""
    room = rows.new_full((*rows.shape[:-2], rows.shape[-2] + 2, rows.shape[-1] + 16), float("nan"))
    placed = room[..., 1:-1, : rows.shape[-1]]
    return placed.copy_(rows)


def product(problem: ExpertProblem, gate: GateForm | None = None) -> Tensor:
    """The product by Hopper's kernel, whose rows of x, matrices and results lie among NaN.

    Blocks of any size give the same bits.
    """
    from rocm_attn.kernels.hopper import expert_product

    x, weight = among_nan(problem.x), among_nan(problem.weight)
    outs = list[Tensor]()
    for size in expert_product.BLOCK_SIZES:
        out = among_nan(problem.empty_out(1 if gate is None else 2))
        args = replace(problem, x=x, weight=weight).args(out, gate)
        assert args.suits_hopper
        with patch.object(expert_product, "block_size", return_value=size):
            expert_product.launch_hopper_expert_product(args, compute_units=132)
        assert out._base is not None
        assert int(out._base.isnan().sum()) == out._base.numel() - out.numel()
        assert not args.drawn.any(), "the next product draws from its first block on"
        outs.append(problem.by_pair(out))
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0]


def served(problem: ExpertProblem, *, fixed: bool) -> Tensor:
    """The product, by pair, as a model gets it."""
    chosen, x, weight = problem.choice, problem.x, problem.weight
    return problem.by_pair(expert_products(x, weight, None, chosen, problem.source, None, rows=0, fixed=fixed))


@HALVES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_is_multiplied_with_its_expert_alone(
    shape: tuple[int, int, int, tuple[int, int]], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for of_pairs in (False, True):
        problem = random_problem(*shape, dtype=dtype, device=kernel_device, has_bias=of_pairs, of_pairs=of_pairs)
        problem.assert_served(product(problem))


@HALVES
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_combined(has_bias: bool, form: GateForm, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Halves end within a block of columns, and the second one begins there."""
    problem = random_problem(150, 3, 2, (48, 2 * 168), dtype=dtype, device=kernel_device, has_bias=has_bias)
    problem = replace(problem, x=problem.x / 7)  # products of about one
    problem.assert_gated(product(problem, form), form)


@pytest.mark.parametrize("counts", [(2500, 1, 0, 63, 0, 2049, 129), (0, 0, 0, 1), (64, 128, 192, 65, 127)], ids=str)
def test_bits_are_those_of_the_plain_kernel(counts: Sequence[int], kernel_device: torch.device) -> None:
    """Covers experts with more blocks than a panel has, and with blocks of which one group has no pair."""
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expert = expert[torch.randperm(len(expert), generator=torch.Generator().manual_seed(1))].to(kernel_device)
    problem = random_problem(len(expert), len(counts), 1, (208, 600), dtype=torch.bfloat16, device=kernel_device)
    problem = replace(problem, expert=expert[:, None])
    plain = problem.empty_out()
    tiles = expert_tiles("sm_90", torch.bfloat16, 64)
    launch_expert_product(problem.args(plain), tiles=tiles)
    assert torch.equal(product(problem), problem.by_pair(plain))


def test_rows_that_are_not_finite_harm_no_other(kernel_device: torch.device) -> None:
    problem = random_problem(200, 4, 2, (64, 48), dtype=torch.bfloat16, device=kernel_device)
    expected = product(problem)
    from rocm_attn.kernels.hopper.expert_product import launch_hopper_expert_product

    x, again = problem.x.clone(), problem.empty_out()
    x[7] = float("nan")
    launch_hopper_expert_product(replace(problem, x=x).args(again), compute_units=3)
    rest = [pair for pair in range(400) if pair // 2 != 7]
    assert torch.equal(problem.by_pair(again)[rest], expected[rest])


def test_matrices_may_lie_further_apart_than_32_bits_reach(kernel_device: torch.device) -> None:
    """The second of two experts begins 2**31 elements after the first."""
    problem = random_problem(9, 2, 2, (32, 16), dtype=torch.float16, device=kernel_device)
    far = torch.empty((1 << 31) + 512, dtype=torch.float16, device=kernel_device)
    weight = far.as_strided((2, 16, 32), (1 << 31, 32, 1))
    weight.copy_(problem.weight)
    problem.assert_served(served(replace(problem, weight=weight), fixed=True))


@pytest.mark.parametrize(
    ("num_tokens", "width", "names"),
    [
        (64, 64, [SORT, HOPPERS, HOPPERS, COMBINE]),
        (2, 64, [SORT, HOPPERS, HOPPERS, COMBINE]),
        (1, 64, ["_inner_products_kernel", "_expert_sums_kernel"]),
        (64, 72, [SORT, PLAIN, HOPPERS, COMBINE]),
    ],
)
def test_models_get_it_where_pairs_are_sorted(
    num_tokens: int, width: int, names: list[str], kernel_device: torch.device
) -> None:
    problem = random_problem(num_tokens, 16, 2, (width, 64), dtype=torch.bfloat16, device=kernel_device)
    down = torch.zeros(16, 72, 32, dtype=torch.bfloat16, device=kernel_device)
    weights = ExpertWeights(router=down, gate_up=problem.weight, down=down)
    with note_launches() as notes:
        Linears().sums_of_experts(problem.x, weights, problem.choice, SwiGLU())
    assert [launch.kernel.__name__ for launch in notes.launches] == names


def test_a_rows_bits_depend_on_no_number_of_rows_in_a_deterministic_model(kernel_device: torch.device) -> None:
    problem = random_problem(200, 4, 2, (96, 80), dtype=torch.bfloat16, device=kernel_device)
    together = served(problem, fixed=True)
    for first, end in ((0, 1), (3, 70), (150, 200)):
        part = replace(problem, x=problem.x[first:end], expert=problem.expert[first:end])
        assert torch.equal(served(part, fixed=True), together[2 * first : 2 * end])


ONE_MATRIX = [(64, 64), (448, 192), (2048, 1088)]


@HALVES
@pytest.mark.parametrize("sizes", ONE_MATRIX, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_rows_bits_depend_on_no_number_of_rows(
    has_bias: bool, sizes: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Covers both kernels, and rows of a wider tensor, of which one alone begins at no multiple of 16 bytes."""
    problem = random_problem(300, 1, 1, sizes, dtype=dtype, device=kernel_device, has_bias=has_bias)
    weight, bias = problem.weight[0], None if problem.bias is None else problem.bias[0]
    x = problem.x.new_full((300, sizes[0] + 3), float("nan"))[:, 3:].copy_(problem.x)
    linears = BatchInvariantLinears()
    together = linears.linear(x, weight, bias)
    problem.assert_served(together)
    for first, end in ((0, 1), (7, 8), (3, 67), (3, 68), (100, 117), (40, 300)):
        assert torch.equal(linears.linear(x[first:end], weight, bias), together[first:end])
    x[65] = float("nan")
    rest = [row for row in range(300) if row != 65]
    assert torch.equal(linears.linear(x, weight, bias)[rest], together[rest])
    assert linears.linear(x[:0], weight, bias).shape == (0, sizes[1])


@HALVES
@pytest.mark.parametrize("gate", [SwiGLU(), GeGLU(), ClampedSwiGLU(0.7, 1.3)], ids=lambda gate: type(gate).__name__)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_combined_rows_bits_do_not_either(
    has_bias: bool, gate: Gate, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    problem = random_problem(200, 1, 1, (192, 2 * 320), dtype=dtype, device=kernel_device, has_bias=has_bias)
    problem = replace(problem, x=problem.x / 14)  # products of about one
    weight, bias = problem.weight[0], None if problem.bias is None else problem.bias[0]
    linears = BatchInvariantLinears()
    together = linears.gated(problem.x, weight, bias, gate)
    problem.assert_gated(together, form_of(gate))
    for first, end in ((0, 1), (3, 67), (3, 68), (150, 200)):
        assert torch.equal(linears.gated(problem.x[first:end], weight, bias, gate), together[first:end])


@pytest.mark.parametrize("num_in", [128, 72])
def test_the_bits_of_a_rows_heads_do_not_either(num_in: int, kernel_device: torch.device) -> None:
    """Covers both kernels; inputs of heads are a part of wider ones."""
    x = torch.randn(90, 5, num_in + 64, device=kernel_device, dtype=torch.bfloat16)[..., :num_in]
    weight = torch.randn(5, 64, num_in, device=kernel_device, dtype=torch.bfloat16)
    linears = BatchInvariantLinears()
    together = linears.of_heads(x, weight)
    for first, end in ((0, 1), (3, 67), (3, 68), (40, 90)):
        assert torch.equal(linears.of_heads(x[first:end], weight), together[first:end])


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((72, 64), torch.bfloat16), ((64, 40), torch.bfloat16), ((64, 64), torch.float32)]
)
def test_one_tile_serves_other_matrices(
    sizes: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    problem = random_problem(90, 1, 1, sizes, dtype=dtype, device=kernel_device)
    with note_launches() as notes:
        out = BatchInvariantLinears().linear(problem.x, problem.weight[0])
    assert [launch.kernel.__name__ for launch in notes.launches] == ["_expert_product_kernel"]
    problem.assert_served(out)
    assert torch.equal(BatchInvariantLinears().linear(problem.x[30:31], problem.weight[0]), out[30:31])


def test_there_may_be_no_tokens(kernel_device: torch.device) -> None:
    problem = random_problem(1, 4, 2, (64, 48), dtype=torch.bfloat16, device=kernel_device)
    none = replace(problem, x=problem.x[:0], expert=problem.expert[:0])
    for fixed in (False, True):
        assert served(none, fixed=fixed).shape == (0, 48)

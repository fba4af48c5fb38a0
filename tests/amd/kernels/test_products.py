"""Linear layers of a model on a device: which kernel multiplies, and that all of them are right."""

import pytest
import torch

from rocm_attn.kernels import early
from rocm_attn.kernels.model.add_norm import NormedSum
from rocm_attn.machine.target import known_target
from rocm_attn.models.gates import Gate, ReluSquared, SwiGLU
from rocm_serve.models import gated
from rocm_serve.models.layer_input import input_of
from rocm_serve.models.linears import BatchInvariantLinears, Linears
from tests.amd.kernels.model_cases import EPS, FACTOR, FORMS, exact_gate, sum_of_rows
from tests.amd.tolerances import assert_attention_close


@pytest.mark.parametrize(
    ("rows", "out", "num_in", "parts"),
    [
        # The fewest parts that 132 processors have programs of 64 outputs for, seven of ten of them at least.
        (32, 2048, 8192, 4),
        (32, 3072, 2048, 2),
        (2, 6144, 4096, 1),
        (1, 6144, 4096, 0),
        # With more than 32 rows no processor has two programs.
        (64, 8192, 1024, 1),
        (64, 10240, 1024, 0),
        (32, 10240, 1024, 1),
        (65, 8192, 1024, 0),
        # Sizes that programs do not fill.
        (8, 8200, 1024, 0),
        (8, 8192, 1000, 0),
        (8, 2048, 128, 0),
    ],
)
def test_a_product_is_cut_into_the_parts_that_fill_a_gpu(
    rows: int, out: int, num_in: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "starts_early", lambda device: True)
    monkeypatch.setattr(gated, "target_of", lambda device: known_target("sm_90"))
    x, weight = (torch.zeros(size, num_in, dtype=torch.bfloat16) for size in (rows, out))
    assert gated.parts_of_few_rows(x, weight, out) == parts
    assert gated.parts_of_few_rows(x.float(), weight.float(), out) == 0
    assert gated.parts_of_few_rows(x, weight[:, :-64], out) == 0
    monkeypatch.setattr(early, "starts_early", lambda device: False)
    assert gated.parts_of_few_rows(x, weight, out) == 0


@pytest.mark.parametrize("rows", [1, 2, 33, 64, 65])
@pytest.mark.parametrize(("out", "num_in"), [(192, 512), (12800, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_are_right(rows: int, out: int, num_in: int, has_bias: bool, kernel_device: torch.device) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((rows, num_in), (out, num_in), (out,)))
    x, weight, bias = (each.to(kernel_device, torch.bfloat16) for each in (x, weight * num_in**-0.5, bias))
    given, linears = bias if has_bias else None, Linears()
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert_attention_close(linears.linear(x, weight, given), exact, x.dtype)
    terms = linears.terms(x, weight, given)
    assert_attention_close(terms if terms.dim() == 2 else terms.sum(0).to(x.dtype), exact, x.dtype)
    # By several launches, both inner products are rounded before they are combined.
    mixed = linears.gated(x, weight, given, SwiGLU()).double()
    torch.testing.assert_close(mixed, exact_gate(exact, FORMS[0]), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("first", ["linear", "gated", "rows", "float32", "no gate", "fixed", "two rows"])
def test_the_first_use_of_a_rows_norm_makes_it_and_the_sum(first: str, kernel_device: torch.device) -> None:
    """Products of one row make both; a float32 router, a gate of one product and deterministic layers do not."""
    case = sum_of_rows(2 if first == "two rows" else 1, 128, torch.bfloat16, kernel_device)
    summed, normed = (torch.full_like(case.residual, float("nan")) for _ in range(2))
    linears = BatchInvariantLinears() if first == "fixed" else Linears()
    made = NormedSum(case.residual, case.output, case.weight, summed, normed, FACTOR, EPS)
    given = input_of(linears, made)
    weight = torch.randn(64, 128, device=kernel_device).to(torch.bfloat16) / 16
    assert bool(summed.isnan().all()) == (first not in ("fixed", "two rows"))
    if first == "rows":
        assert given.rows is normed
    of_weight = weight.float() if first == "float32" else weight
    gates: dict[str, Gate] = {"gated": SwiGLU(), "no gate": ReluSquared()}
    found = given.gated(weight, None, gates[first]) if first in gates else given.linear(of_weight)
    case.assert_right(summed, normed)
    exact = normed.double() @ weight.double().T
    if first in gates:
        exact = exact_gate(exact, FORMS[0]) if first == "gated" else exact.relu().square()
    assert found.dtype == of_weight.dtype
    torch.testing.assert_close(found.double(), exact, atol=3e-2, rtol=3e-2)
    # Other uses find what is made.
    summed.fill_(7.0)
    torch.testing.assert_close(given.linear(weight).double(), normed.double() @ weight.double().T, atol=3e-2, rtol=3e-2)
    assert bool((summed == 7.0).all())


@pytest.mark.parametrize("rows", [0, 1, 17, 70])
@pytest.mark.parametrize(("out", "num_in", "dtype"), [(64, 128, torch.float16), (40, 33, torch.float32)], ids=str)
def test_products_in_one_order_are_right(
    out: int, num_in: int, dtype: torch.dtype, rows: int, kernel_device: torch.device
) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, num_in, generator=random) for size in (rows, out))
    x, weight = x.to(kernel_device, dtype), (weight * num_in**-0.5).to(kernel_device, dtype)
    bias = weight[:, 0].contiguous()
    exact = x.double() @ weight.double().T + bias.double()
    assert_attention_close(gated.multiplied_in_one_order(x, weight, bias), exact, dtype)
    # Rows of a wider tensor, which begin at no multiple of 16 bytes.
    wider = torch.cat((bias.new_full((rows, 1), float("nan")), x), 1)[:, 1:]
    assert_attention_close(gated.multiplied_in_one_order(wider, weight, bias), exact, dtype)


@pytest.mark.parametrize(("num_in", "out", "dtype"), [(128, 64, torch.float16), (33, 40, torch.float32)], ids=str)
def test_products_of_heads_in_one_order_are_right(
    num_in: int, out: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """The heads' inputs are a part of wider ones."""
    random = torch.Generator().manual_seed(out)
    wide, weight = torch.randn(70, 3, num_in + 16, generator=random), torch.randn(3, out, num_in, generator=random)
    wide, weight = wide.to(kernel_device, dtype), (weight * num_in**-0.5).to(kernel_device, dtype)
    x = wide[..., :num_in]
    exact = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    for rows in (70, 1, 0):
        assert_attention_close(gated.heads_multiplied_in_one_order(x[:rows], weight), exact[:rows], dtype)

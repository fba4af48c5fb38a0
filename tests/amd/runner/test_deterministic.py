"""The runner's deterministic mode: the bits of a request's logits, regardless of the other requests."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.models.config import ModelConfig
from rocm_serve.engine import Engine
from rocm_serve.models.linears import ROWS, BatchInvariantLinears, Linears
from rocm_serve.request import Request
from rocm_serve.sampling.sampling import Draw, PickedTokens, Sampler, TokenPicker
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.noted import noted
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model
from tests.amd.runner.with_parameters import BASE as ALIKE
from tests.amd.tolerances import assert_products_close

BASE = replace(ALIKE, chunk=16, max_kv_len=64)

PICK = TokenPicker.pick


def some_requests() -> list[Request]:
    """Requests that differ by their seed, which identifies their draws; the likeliest token is drawn."""
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 29, 1, 17, 8, 22)
    prompts = [torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Request(tuple(prompt), 9, sampling=Sampling(1e-6, seed=seed)) for seed, prompt in enumerate(prompts)]


def logits_of(
    requests: Sequence[Request], monkeypatch: pytest.MonkeyPatch, model: ModelConfig = CONFIG, **changes: Any
) -> tuple[dict[int, list[Tensor]], Engine]:
    """Seed -> the logits from which each of the request's tokens was picked."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    samplings = [request.sampling for request in requests]
    seed_of = {Sampler(sampling).draw(place): sampling.seed for sampling in samplings for place in range(9)}

    def watched(picker: TokenPicker, logits: Tensor, draws: Mapping[int, Draw]) -> PickedTokens:
        for row, draw in draws.items():
            seen[seed_of[draw]].append(logits[row].clone())
        return PICK(picker, logits, draws)

    monkeypatch.setattr(TokenPicker, "pick", watched)
    engine = Engine(tiny_model(base=model), replace(BASE, **changes))
    engine.generate(requests)
    return seen, engine


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "changes",
    [{"num_pages": 22}, {}, {"chunk": 7}, {"chunk": 64, "page_size": 16}, {"graphs": True, "max_batch_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("model", [CONFIG, RECURRENT], ids=["attention", "recurrent"])
def test_a_requests_logits_are_those_that_it_gets_alone(
    model: ModelConfig, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, engine = logits_of(some_requests(), monkeypatch, model, **changes)
    assert engine.report().deterministic
    for request in some_requests():
        alone, _ = logits_of([request], monkeypatch, model)
        seed = request.sampling.seed
        assert len(alone[seed]) == 9
        assert all(torch.equal(a, b) for a, b in zip(alone[seed], together[seed], strict=True)), f"request {seed}"


@pytest.mark.parametrize("outputs", [576, 6, 3, 1])
@pytest.mark.parametrize("by_column", [False, True])
def test_a_row_of_a_linear_layer_is_the_same_in_any_batch(outputs: int, by_column: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, 333, generator=generator), torch.randn(outputs, generator=generator)
    weight = weight.t().contiguous().t() if by_column else weight
    x, linears = torch.randn(40, 333, generator=generator), BatchInvariantLinears()
    whole = linears.linear(x, weight, bias)
    for first, end in ((0, 1), (3, 4), (5, 22), (39, 40), (1, 40)):
        assert torch.equal(linears.linear(x[first:end], weight, bias), whole[first:end])
    for product in (whole, Linears().linear(x, weight, bias)):
        assert_products_close(product, x, weight, bias)
    assert linears.linear(x[:0], weight).shape == (0, outputs)
    of_heads = torch.randn(2, outputs, 333, generator=generator)
    rows = x[:, None].expand(-1, 2, -1)
    whole = linears.of_heads(rows, of_heads)
    assert all(torch.equal(linears.of_heads(rows[first : first + 1], of_heads), whole[first, None]) for first in (0, 5))


def test_every_product_has_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    products = noted(monkeypatch, torch.nn.functional, "linear")
    logits_of(some_requests()[:2], monkeypatch)
    assert {len(x) for x, *_ in products} == {ROWS}

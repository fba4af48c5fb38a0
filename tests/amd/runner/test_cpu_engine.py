"""The engine with the kernels for CPUs: the tokens of the plain kernels, by fewer calls."""

from dataclasses import replace

import pytest
import torch

from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Request
from tests.amd.host.test_host_calls import calls_in
from tests.amd.runner.serving import engine, some_requests, tokens_of
from tests.amd.runner.tiny_model import CONFIG, tiny_model

# Calls of Python and C functions in each layer of a decode step, checks included: transformers makes 190.
CALLS_OF_A_LAYER = 200
# Likewise of each sequence in a step, for its token, its room and its event.
CALLS_OF_A_SEQUENCE = 20
NEW_TOKENS = 9


def calls_of_a_step(loaded: LoadedModel, batch: int, provider: str) -> float:
    served = engine(loaded, provider=provider, prefix_caching=False, chunk=64)

    def calls(num: int) -> int:
        requests = [Request((5, 6, 7, 8 + number), num, ignore_eos=True) for number in range(batch)]
        return calls_in(lambda: served.generate(requests))

    calls(NEW_TOKENS)  # views and the like are made once
    return (calls(NEW_TOKENS) - calls(1)) / (NEW_TOKENS - 1)


def with_layers(num: int) -> LoadedModel:
    """The tiny model with some layers like its first."""
    return tiny_model(base=replace(CONFIG, layers=CONFIG.layers[:1] * num))


@pytest.mark.parametrize("batch", [1, 8])
def test_a_layer_of_a_decode_step_makes_few_calls(batch: int) -> None:
    short, long = (calls_of_a_step(with_layers(num), batch, "cpu") for num in (2, 6))
    assert (long - short) / 4 <= CALLS_OF_A_LAYER


def test_a_layer_makes_as_many_calls_for_any_number_of_sequences() -> None:
    of_layer = []
    for batch in (2, 8):
        short, long = (calls_of_a_step(with_layers(num), batch, "cpu") for num in (2, 6))
        of_layer.append(long - short)
    assert of_layer[0] == of_layer[1]


def test_a_sequence_of_a_decode_step_makes_few_calls() -> None:
    few, many = (calls_of_a_step(with_layers(2), batch, "cpu") for batch in (2, 8))
    assert 10 < (many - few) / 6 <= CALLS_OF_A_SEQUENCE


def test_tokens_are_those_of_the_plain_kernels(graphs: bool) -> None:
    """Chunked prompts, decodes with pads, and both in one step."""
    loaded = tiny_model()
    plain = engine(loaded, provider="torch").generate(some_requests())
    served = engine(loaded, provider="auto", graphs=graphs)
    assert any(line.startswith("mixed: cpu.extend") for line in served.report().kernels)
    assert tokens_of(served.generate(some_requests())) == tokens_of(plain)
    assert (served.report().metrics.replays > 0) == graphs


def test_a_cpus_matrices_lie_by_columns_and_its_tables_by_rows() -> None:
    weights = tiny_model().weights
    assert weights.attending[0].out.t().is_contiguous()
    assert weights.head.t().is_contiguous()
    of_ties = {is_tied: tiny_model(base=replace(CONFIG, tied_embeddings=is_tied)).weights for is_tied in (False, True)}
    assert of_ties[False].embedding.is_contiguous()
    assert of_ties[True].head.data_ptr() == of_ties[True].embedding.data_ptr()
    assert of_ties[True].embedding.t().is_contiguous()
    assert tiny_model(dtype=torch.bfloat16).weights.attending[0].out.is_contiguous()

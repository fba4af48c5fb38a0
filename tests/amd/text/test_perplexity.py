"""Eight-bit K and V on real weights: the perplexity of a text (Lewis Carroll, 1865) stays within one percent."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rocm_attn.problem import KVEncoding, Scales
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat
from rocm_serve.models.loading import LoadedModel, load_model
from tests.amd.one_thread import computing_in_one_thread
from tests.amd.text.perplexity import perplexity

# relative to the perplexity with K and V in the dtype in which they are computed
MOST = 0.01

# the second is in every run
ENCODINGS = [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ]
# fewer tokens differ by chance
SHORT = 224


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with computing_in_one_thread():
        yield


def tokens_of(loaded: LoadedModel) -> Tensor:
    text = (Path(__file__).parent / "alice.txt").read_text()
    assert loaded.tokenizer is not None
    return torch.tensor(loaded.tokenizer.encode(text))


def assert_near(
    loaded: LoadedModel, tokens: Tensor, provider: str, encodings: Sequence[KVEncoding] = ENCODINGS
) -> None:
    """Checks that eight-bit perplexity is near, and not the same: the encoding is in use."""
    exact = perplexity(loaded, tokens, AS_COMPUTED, provider=provider)
    assert 2 < exact < 40, "the model understands the text"
    for encoding in encodings:
        eight_bits = perplexity(loaded, tokens, KVFormat(encoding, Scales.TOKEN), provider=provider)
        assert eight_bits != exact
        assert abs(eight_bits / exact - 1) < MOST, f"{encoding}: {eight_bits} in place of {exact}"


def test_perplexity_with_eight_bit_kv_is_within_a_percent(loaded: LoadedModel) -> None:
    assert_near(loaded, tokens_of(loaded)[:SHORT], "torch", ENCODINGS[1:])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_perplexity_of_a_whole_chapter_is_within_a_percent(dtype: torch.dtype) -> None:
    loaded = load_model("smollm2", dtype=dtype, device=torch.device("cpu"))
    tokens = tokens_of(loaded)
    assert len(tokens) > 2500
    assert_near(loaded, tokens, "torch")


@pytest.mark.gpu
def test_perplexity_on_a_gpu_is_within_a_percent(device: torch.device) -> None:
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=device)
    assert_near(loaded, tokens_of(loaded), "triton")

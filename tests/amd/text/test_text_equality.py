"""Real weights, real text: the runner's greedy tokens are transformers', however the requests are served.

If transformers' two best logits lie closer together than NARROW, float32 rounding may decide. The prompts are chosen
without such a place, and the test reports if that changes.
"""

from collections.abc import Sequence

import pytest

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Request
from tests.amd.text.hf_reference import greedy_steps, hf_llama

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 8
MANY_NEW_TOKENS = 64
NARROW = 1e-4

CHAT_PROMPTS = (
    "Tell me a story about a dragon who learns to cook.",
    "Explain how rain forms, step by step.",
    "Write a poem about the winter moon.",
)
RAW_PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The history of the Roman Empire begins",
    "In 1969, 2 astronauts",
    "A",
)

# prompts and how any model of this size continues them
PLAIN_FACTS = (
    ("The capital of France is", " Paris"),
    ("The opposite of hot is", " cold"),
    ("1, 2, 3, 4, 5, 6,", " 7, 8"),
)

# page size, chunk, graphs: every pair of values occurs. Each run has the two most different ways; chunks of 7 are for
# the night; a small model serves them in tests/amd/runner/test_engine.py
WAYS = [
    EngineOptions(
        provider="torch",
        page_size=page_size,
        chunk=chunk,
        graphs=graphs,
        max_batch_size=8,
        max_kv_len=128,
        capture_after=0,
    )
    for page_size, chunk, graphs in ((16, 64, False), (16, 7, True), (1, 64, True), (1, 7, False))
]


@pytest.fixture(scope="module")
def all_requests(loaded: LoadedModel) -> list[Request]:
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode_chat(prompt) for prompt in CHAT_PROMPTS]
    prompts += [loaded.tokenizer.encode(prompt) for prompt in RAW_PROMPTS]
    return [Request(tuple(prompt), NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def requests(all_requests: list[Request]) -> list[Request]:
    """Returns the requests of each run: a chat, two texts and a prompt of one letter. The night serves all."""
    return [all_requests[0], *all_requests[3:5], all_requests[-1]]


def serve(loaded: LoadedModel, requests: Sequence[Request], options: EngineOptions) -> list[Completion]:
    return Engine(loaded, options).generate(requests)


@pytest.fixture(scope="module")
def completions(loaded: LoadedModel, requests: list[Request]) -> list[Completion]:
    return serve(loaded, requests, WAYS[0])


def test_greedy_tokens_equal_those_of_transformers(
    loaded: LoadedModel, requests: list[Request], completions: list[Completion]
) -> None:
    assert {len(completion.token_ids) for completion in completions} == {NEW_TOKENS}
    assert_those_of_transformers(loaded, requests, completions)


def assert_those_of_transformers(
    loaded: LoadedModel, requests: Sequence[Request], completions: Sequence[Completion]
) -> None:
    reference = hf_llama(loaded)
    for request, completion in zip(requests, completions, strict=True):
        picks, gaps = greedy_steps(reference, request.prompt_token_ids, completion.token_ids)
        assert float(gaps.min()) > NARROW, f"{completion.text!r} has a gap of {gaps.min()} at token {gaps.argmin()}"
        assert list(completion.token_ids) == picks


@pytest.mark.nightly
def test_longer_texts_are_those_of_transformers_in_every_way(loaded: LoadedModel, all_requests: list[Request]) -> None:
    longer = [Request(request.prompt_token_ids, MANY_NEW_TOKENS) for request in all_requests]
    completions = serve(loaded, longer, WAYS[0])
    assert {len(completion.token_ids) for completion in completions} == {MANY_NEW_TOKENS}
    assert_those_of_transformers(loaded, longer, completions)
    for options in WAYS[1:]:
        assert serve(loaded, longer, options) == completions


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options,
            id=f"page{options.page_size}-chunk{options.chunk}-graphs_{options.graphs}",
            marks=[pytest.mark.nightly] * (options.chunk != WAYS[0].chunk),
        )
        for options in WAYS[1:]
    ],
)
def test_the_way_of_serving_changes_no_token(
    options: EngineOptions, loaded: LoadedModel, requests: list[Request], completions: list[Completion]
) -> None:
    engine = Engine(loaded, options)
    assert engine.generate(requests) == completions
    report = engine.report()
    assert (report.metrics.replays > NEW_TOKENS // 2) == options.graphs


def test_the_text_makes_sense(loaded: LoadedModel) -> None:
    """Wrong weights that both sides share would pass the tests above."""
    assert loaded.tokenizer is not None
    requests = [Request(tuple(loaded.tokenizer.encode(prompt)), 6) for prompt, _ in PLAIN_FACTS]
    texts = [completion.text for completion in serve(loaded, requests, WAYS[0])]
    for text, (_, word) in zip(texts, PLAIN_FACTS, strict=True):
        assert text.startswith(word)

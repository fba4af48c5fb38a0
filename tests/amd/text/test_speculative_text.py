"""Real weights, edited code: speculation gives the text of plain decoding, token by token, with every drafter."""

from dataclasses import replace
from itertools import product

import pytest

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Request
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.tiny_model import with_windows

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = (
    "def total(items):\n    result = 0\n    for item in items:\n        result = result + item.price\n"
    "    return result\n",
    "class Counter:\n    def __init__(self, start):\n        self.value = start\n\n    def add(self, step):\n"
    "        self.value = self.value + step\n        return self.value\n",
)
PROMPTS = (
    f"{CODE[1]}\n\n# The same code, with a comment before each function:\n{CODE[1].splitlines()[0]}\n",
    f"{CODE[1]}\n{CODE[1]}\n{CODE[1].splitlines()[0]}\n",
    f"{CODE[0]}\n\n# The same code, with other names:\n{CODE[0].splitlines()[0]}\n",
)
BASE = EngineOptions(
    provider="torch", page_size=16, chunk=512, graphs=False, max_batch_size=8, max_kv_len=256, capture_after=0
)
NEW_TOKENS = 18
# Texts of other requests, for steps with many sequences.
OTHERS = ("Once upon a time, in a village by the sea,", "1, 2, 3, 4, 5, 6,", "The history of the Roman Empire begins")

QUICK_WAYS = {(16, 4, 1, False)}
WAYS = [
    pytest.param(*way, marks=[] if way in QUICK_WAYS else [pytest.mark.nightly])
    for way in product((1, 2, 16), (2, 4, 16), (1, 2, 8), (False, True))
    if way[2] <= way[1]
]


def requests_of(loaded: LoadedModel, prompts: tuple[str, ...], new_tokens: int) -> list[Request]:
    assert loaded.tokenizer is not None
    return [Request(tuple(loaded.tokenizer.encode(prompt)), new_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[Completion]:
    return Engine(loaded, BASE).generate(requests_of(loaded, PROMPTS, NEW_TOKENS))


@pytest.mark.parametrize(("page_size", "draft_tokens", "topk", "graphs"), WAYS)
def test_prompt_lookup_changes_no_token_of_edited_code(
    page_size: int, draft_tokens: int, topk: int, graphs: bool, loaded: LoadedModel, plain: list[Completion]
) -> None:
    options = replace(
        BASE, page_size=page_size, speculative="ngram", draft_tokens=draft_tokens, topk=topk, graphs=graphs
    )
    engine = Engine(loaded, options)
    assert engine.generate(requests_of(loaded, PROMPTS, NEW_TOKENS)) == plain
    metrics = engine.report().metrics
    assert metrics.accepted_drafts >= 8
    assert metrics.real_seqs <= len(PROMPTS) * NEW_TOKENS - metrics.accepted_drafts


@pytest.fixture(scope="module")
def windowed(loaded: LoadedModel) -> LoadedModel:
    """The same weights, with a window of 24 tokens and a separate pool in every other layer."""
    return replace(loaded, config=with_windows(loaded.config, *([24, -1] * (loaded.config.num_layers // 2))))


@pytest.fixture(scope="module")
def plain_windowed(windowed: LoadedModel) -> list[Completion]:
    return Engine(windowed, BASE).generate(requests_of(windowed, PROMPTS, NEW_TOKENS))


MODES = [
    # Graphs and windows in turn: each drafter has each combination.
    (*mode, number // 2 % 2 == 0, number % 2 == 0)
    for number, mode in enumerate(
        product(("ngram", "draft:smollm2", "eagle:seeded", "eagle:seeded3"), (1, 2, 16), (1, 2, 8))
    )
]


@pytest.mark.nightly
@pytest.mark.parametrize(("speculative", "page_size", "topk", "graphs", "hybrid"), MODES)
def test_whatever_draft_tokens_changes_no_token(
    speculative: str,
    page_size: int,
    topk: int,
    graphs: bool,
    hybrid: bool,
    request: pytest.FixtureRequest,
) -> None:
    """A model and heads, too, and layers with windows. Heads of random weights are mostly wrong."""
    model = request.getfixturevalue("windowed" if hybrid else "loaded")
    expected = request.getfixturevalue("plain_windowed" if hybrid else "plain")
    options = replace(BASE, page_size=page_size, speculative=speculative, draft_tokens=8, topk=topk, graphs=graphs)
    engine = Engine(model, options)
    assert engine.generate(requests_of(model, PROMPTS, NEW_TOKENS)) == expected
    report = engine.report()
    assert (report.swa_pages > 0) == hybrid
    assert report.metrics.drafts > 20
    assert report.metrics.accepted_drafts > (0 if speculative.startswith("eagle") else 8) - 1
    assert (report.metrics.replays > 0) == graphs


@pytest.mark.nightly
@pytest.mark.parametrize(("num_seqs", "topk"), [(1, 1), (7, 8), (16, 2), (64, 1), (64, 2)])
def test_any_number_of_sequences_and_any_drafts_change_no_token(num_seqs: int, topk: int, loaded: LoadedModel) -> None:
    prompts = ((PROMPTS + OTHERS) * 13)[:num_seqs]
    requests = requests_of(loaded, prompts, 20)
    expected = Engine(loaded, replace(BASE, max_batch_size=num_seqs)).generate(requests)
    for draft_tokens, graphs in ((8, False), (15, True)):
        options = replace(
            BASE, max_batch_size=num_seqs, speculative="ngram", draft_tokens=draft_tokens, topk=topk, graphs=graphs
        )
        texts = [(*done.prompt_token_ids, *done.token_ids) for done in expected]
        script = ScriptedDrafter(texts, loaded.config.vocab_size, branches=topk > 1)
        engine = with_drafter(Engine(loaded, options), script)
        assert engine.generate(requests) == expected
        assert engine.report().metrics.accepted_drafts > 0

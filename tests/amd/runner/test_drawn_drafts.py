"""Drawn drafts: rejection sampling accepts them, and the tokens are distributed as by plain sampling."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, Verified
from rocm_attn.step.accepting import accept_sampled
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation import drawn
from rocm_serve.speculation.beams import Level
from rocm_serve.speculation.eagle import EagleDrafter
from rocm_serve.speculation.engines import model_drafter, rejection_of
from rocm_serve.speculation.speculation import Speculation
from tests.amd.runner.serving import all_pages_are_free
from tests.amd.runner.test_speculation import BASE, without_speculation
from tests.amd.runner.tiny_model import CONFIG, tiny_model

VOCABULARY = CONFIG.vocab_size

SAMPLING = Sampling(temperature=0.7, top_p=0.8)
MANY = replace(
    BASE,
    speculative="eagle:seeded",
    sampled_drafts=True,
    draft_tokens=2,
    max_batch_size=200,
    chunk=800,
    page_size=16,
    max_kv_len=16,
)


def chi_square_exceedance(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Standard deviations by which the statistic of two samples of one size exceeds its mean; rare kinds are one."""
    both = first + second
    kinds = [kind for kind, count in both.items() if count >= 20]
    cells = [(first[kind], second[kind]) for kind in kinds]
    cells.append((first.total() - sum(a for a, _ in cells), second.total() - sum(b for _, b in cells)))
    cells = [(a, b) for a, b in cells if a + b]
    assert len(cells) > 3
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    degrees = len(cells) - 1
    return float((statistic - degrees) / (2 * degrees) ** 0.5)


def sampled(num: int, first: int, sampling: Sampling = SAMPLING) -> list[Request]:
    return [Request((5, 6, 7), 3, sampling=replace(sampling, seed=first + seed)) for seed in range(num)]


def pairs(engine: Engine, requests: list[Request]) -> Counter[tuple[int, ...]]:
    return Counter(done.token_ids[1:] for done in engine.generate(requests))


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Counter[tuple[int, ...]]:
    options = without_speculation(MANY)
    return pairs(Engine(loaded, options), sampled(800, 0))


def drafting_for_itself(loaded: LoadedModel, small: LoadedModel, **changes: Any) -> Engine:
    options = replace(MANY, **changes)
    engine = Engine(loaded, replace(options, speculative="ngram", sampled_drafts=False))
    drafter = model_drafter(small, loaded, options, engine.runtime)
    rejection = rejection_of(drafter, options)
    picker, num = engine._picker, options.draft_tokens
    engine._speculation = Speculation(drafter, engine.runtime, picker, num, engine.metrics, rejection)
    return engine


TREES: dict[str, Any] = {"topk": 2, "draft_tokens": 4}
EAGLE3: dict[str, Any] = {"speculative": "eagle:seeded3"}


@pytest.mark.parametrize(
    "changes",
    [
        TREES,
        *(
            pytest.param(changes, marks=pytest.mark.nightly)
            for changes in (
                {},
                EAGLE3,
                {"graphs": True},
                {"topk": 4, "draft_tokens": 7},
                TREES | EAGLE3,
                TREES | {"graphs": True},
            )
        ),
    ],
    ids=str,
)
def test_tokens_of_drawn_drafts_are_distributed_as_by_plain_sampling(
    changes: dict[str, Any], loaded: LoadedModel, plain: Counter[tuple[int, ...]]
) -> None:
    """Chi-square of two samples with different seeds: pairs of a text's second and third token.

    A node of a tree has several drafts, drawn without replacement.
    """
    engine = Engine(loaded, replace(MANY, **changes))
    assert chi_square_exceedance(plain, pairs(engine, sampled(800, 10_000))) < 4.0
    metrics = engine.report().metrics
    assert 30 < metrics.accepted_drafts < metrics.drafts - 30, "both what is accepted and what is not is drawn"
    assert all_pages_are_free(engine)


@pytest.mark.nightly
def test_they_are_with_a_small_model_that_draws(loaded: LoadedModel, plain: Counter[tuple[int, ...]]) -> None:
    engine = drafting_for_itself(loaded, tiny_model(seed=1))
    assert chi_square_exceedance(plain, pairs(engine, sampled(800, 10_000))) < 4.0


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{}, TREES], ids=["chains", "trees"])
def test_drafts_that_are_all_accepted_show_in_the_distribution(
    changes: dict[str, Any], loaded: LoadedModel, plain: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_all(probabilities: Probabilities, given: Verified) -> Accepted:
        return accept_sampled(probabilities._replace(target=probabilities.draft), given)

    monkeypatch.setattr(drawn, "accept_sampled", accept_all)
    engine = Engine(loaded, replace(MANY, **changes))
    assert chi_square_exceedance(plain, pairs(engine, sampled(800, 10_000))) > 8.0


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_model_that_draws_for_itself_is_always_right(graphs: bool, loaded: LoadedModel) -> None:
    """If p is q each draft is accepted, although it is not the token that p draws by itself."""
    engine = drafting_for_itself(loaded, loaded, graphs=graphs, max_kv_len=64, draft_tokens=3)
    requests = [replace(each, max_new_tokens=20) for each in sampled(12, 0, Sampling(temperature=0.9))]
    done = engine.generate(requests)
    metrics = engine.report().metrics
    assert metrics.drafts > 100
    # Two kernels round p and q differently, which matters for a random number that lies in between.
    assert metrics.accepted_drafts >= metrics.drafts - 2
    assert engine.generate(requests) == done, "the same seeds and drafts give the same tokens"


def test_probabilities_are_those_of_plain_sampling() -> None:
    """The tokens up to the one that reaches top_p keep their probabilities; the others have none."""
    logits = torch.tensor([[3.0, 1.0, 2.0, -1.0], [0.0, 0.0, 0.0, 5.0]]).log_softmax(-1)
    temperature, top_p = torch.tensor([1.0, 0.5]), torch.tensor([0.8, 1.0])
    first, second = drawn._probabilities(logits, temperature, top_p, cut=True)
    kept = logits[0].exp() * torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(first, kept / kept.sum())
    torch.testing.assert_close(second, (logits[1] * 2).softmax(-1))


def test_a_tree_accepts_more_than_a_chain_of_its_depth(loaded: LoadedModel) -> None:
    """The first branch is the chain; the others are tried if it is refused."""
    requests = [replace(each, max_new_tokens=12) for each in sampled(40, 0, Sampling(temperature=0.9))]
    accepted = {}
    for topk, draft_tokens in ((1, 2), (4, 8)):
        engine = Engine(loaded, replace(MANY, topk=topk, draft_tokens=draft_tokens, max_kv_len=48))
        engine.generate(requests)
        metrics = engine.report().metrics
        accepted[topk] = metrics.accepted_drafts / metrics.verifications
    assert accepted[4] > 1.2 * accepted[1] > 0


def test_a_tree_of_a_sharp_distribution_has_the_drafts_that_there_are(loaded: LoadedModel) -> None:
    """At a temperature near 0 one token has all of q: there is no second one to draw, and none is verified."""
    requests = sampled(6, 0, Sampling(temperature=1e-6))
    expected = Engine(loaded, without_speculation(MANY)).generate([replace(r, sampling=Sampling()) for r in requests])
    engine = Engine(loaded, replace(MANY, topk=4, draft_tokens=8))
    done = engine.generate(requests)
    assert [each.token_ids for each in done] == [each.token_ids for each in expected]
    metrics = engine.report().metrics
    assert metrics.drafts <= 3 * metrics.verifications, "of each tree the first branch alone"


def test_siblings_are_drawn_without_replacement_by_what_is_left() -> None:
    """Compares pairs of 20,000 draws with the product of their probabilities."""
    q, num = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), 20_000
    uniform = torch.rand(num, 2, generator=torch.Generator().manual_seed(0))
    ids, is_left = drawn._siblings(q.expand(num, -1), uniform)
    assert bool(is_left.all())
    counts = Counter(map(tuple, ids.tolist()))
    statistic = sum(
        (counts[first, second] - wanted) ** 2 / wanted
        for first in range(4)
        for second in range(4)
        if first != second and (wanted := num * float(q[first] * q[second] / (1 - q[first])))
    )
    assert sum(counts[each, each] for each in range(5)) == 0
    assert statistic < 31.264, "99.9 % quantile of chi-square of 11 degrees of freedom"


class InAnotherOrder:
    """A head like that of EAGLE-3 whose d2t names all tokens, place 0 the last one."""

    def tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        return VOCABULARY - 1 - drafted


def test_probabilities_follow_a_d2t_that_names_all_tokens_in_another_order(loaded: LoadedModel) -> None:
    engine = Engine(loaded, replace(MANY, max_batch_size=4))
    drafter = engine._speculation._drafter
    assert isinstance(drafter, EagleDrafter)
    runners = drafter.runners
    runners._model = InAnotherOrder()  # type: ignore[assignment]
    runners._terms[:, 0], runners._terms[:, 1] = 1.0, 0.5
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    carried = runners._first_level.carried[:4, 0]
    level = runners._chosen(Level.first(logits, carried, 1), logits, carried, 0)
    torch.testing.assert_close(level.drawn_by[:, 0], logits.softmax(-1).flip(1))
    reached = logits.softmax(-1).cumsum(1)
    assert level.token_ids[:, 0].tolist() == (VOCABULARY - 1 - (reached > 0.5).int().argmax(1)).tolist()

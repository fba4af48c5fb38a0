"""Draws and the other sampling options of requests: right by float64, and independent of how the engine serves."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.errors import BadLogits, BadRequest, BadTensor
from rocm_attn.kernels.sampling.parameter_columns import IN_PROMPT
from rocm_attn.providers.torch_ref import TORCH
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.prefix_cache import CachedRow
from rocm_serve.request import Completion, Request, RequestsFailed
from rocm_serve.request import Sequence as Served
from rocm_serve.sampling.parameter_picker import ParameterPicker, RowParameters
from rocm_serve.sampling.sampling import Sampler, TokenPicker, pick_tokens
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.sampling.sampling_parameters import sampling_parameters_of
from rocm_serve.sampling.token_counts import CountedText, TokenCounts
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.thread_ranks import on_threads
from tests.amd.runner.with_parameters import ASKING, BASE, CONSTRAINED, END, PLAIN, PROMPT, character_model, drawn
from tests.amd.tolerances import assert_logprobs_close

VOCAB = 64
CPU = torch.device("cpu")
ALL = (PLAIN, *ASKING, *CONSTRAINED)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return character_model()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Completion]:
    """Serves each request with a separate engine."""
    return [Engine(loaded, BASE).generate([request])[0] for request in ALL]


def new_picker(most_rows: int, vocab: int) -> ParameterPicker:
    return ParameterPicker(TokenPicker(CPU, most_rows, TORCH.ops().pick_rows), TORCH.ops(), vocab, most_rows)


def served(request: Request, new: Sequence[int] = (), number: int = 0) -> Served:
    stops = frozenset({END})
    parameters = sampling_parameters_of(request, stops, None, VOCAB)
    tokens = array("i", [*request.prompt_token_ids, *new])
    return Served(
        number, request, stops, Sampler(request.sampling), tokens, CachedRow("", is_cached=False), parameters=parameters
    )


def requested(sequence: Served, place: int) -> RowParameters:
    assert sequence.parameters is not None
    return sequence.parameters.of(sequence, place)


def probabilities(logits: npt.NDArray[np.float64], request: Request, new: Sequence[int]) -> Any:
    """Computes the probabilities by definition, in float64."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    times = np.bincount(np.array(new, np.int64), minlength=len(logits))
    seen = (times > 0) | np.isin(np.arange(len(logits)), list(prompt))
    x = logits.copy()
    x[seen] = np.where(x[seen] > 0, x[seen] / sampling.repetition_penalty, x[seen] * sampling.repetition_penalty)
    x = x - sampling.presence_penalty * (times > 0) - sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if request.allowed_token_ids:
        x[~np.isin(np.arange(len(x)), request.allowed_token_ids)] = -np.inf
    weights = np.exp((x - x.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    mass = np.cumsum(weights[order])
    weights[order[int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1 :]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        pytest.param(drawn(top_k=6, min_p=0.05, top_p=0.8), (), marks=pytest.mark.nightly),
        pytest.param(drawn(presence_penalty=1.0, frequency_penalty=0.7), (), marks=pytest.mark.nightly),
        (
            drawn(
                repetition_penalty=0.6, frequency_penalty=-0.5, logit_bias=((3, -1.0),), top_k=7, min_p=0.02, top_p=0.95
            ),
            (),
        ),
        (drawn(top_k=4, frequency_penalty=0.2), (2, 3, 5, 6, 8, 9)),
        (drawn(top_k=5), ()),  # alone, as most requests have them
        (drawn(min_p=0.2), ()),
    ],
    ids=lambda each: str(each.top_k + each.repetition_penalty) if isinstance(each, Sampling) else str(len(each)),
)
def test_tokens_are_drawn_as_float64_says(sampling: Sampling, allowed: tuple[int, ...]) -> None:
    """A chi-square of 1,500 draws from one row, with the request's own uniform numbers, next to rows of others."""
    logits = np.log([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005]) + 2.0
    new, num_draws, at_once = [0, 0, 4, 7, 0, 9], 1_500, 100
    request = Request((1, 4, 2), 10, sampling, allowed_token_ids=allowed)
    wanted = probabilities(logits, request, new)
    picker, sampler = new_picker(2 * at_once, 10), Sampler(sampling)
    rows = torch.from_numpy(logits).float().expand(2 * at_once, -1).contiguous()
    rows[1::2] = torch.linspace(0, 3, 10)
    counts = np.zeros(10)
    sequences = [served(request, new, number) for number in range(at_once)]
    for first in range(0, num_draws, at_once):
        draws = {2 * row: sampler.draw(first + row) for row in range(at_once)}
        parameters = {2 * row: requested(sequence, len(new)) for row, sequence in enumerate(sequences)}
        picks = picker.pick(rows, draws, parameters).read()
        assert set(picks[1::2]) == {9}
        counts += np.bincount([pick for pick in picks[::2] if isinstance(pick, int)], minlength=10)
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    expected = wanted[possible] * num_draws
    chi_square, freedom = float(((counts[possible] - expected) ** 2 / expected).sum()), possible.sum() - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 12  # one in a million exceeds this


def test_logprobs_are_those_of_the_logits_before_anything_is_done_to_them() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).mul_(3)
    sampling = drawn(frequency_penalty=2.0, logit_bias=((int(logits[0].argmax()), -100.0),))
    request = Request((1, 2), 5, sampling, logprobs=4)
    picked = new_picker(2, 50).pick(logits, {}, {0: requested(served(request), 0)})
    picks = picked.read()
    emitted = picked.logprobs(picks)
    assert set(emitted) == {0}
    exact = logits[0].double().log_softmax(-1)
    assert picks[0] == emitted[0].token_id != int(logits[0].argmax())
    ids = [token for token, _ in emitted[0].likeliest]
    assert ids == exact.argsort(descending=True, stable=True)[:4].tolist()
    found = torch.tensor([emitted[0].logprob, *(logprob for _, logprob in emitted[0].likeliest)])
    assert_logprobs_close(found, exact[torch.tensor([emitted[0].token_id, *ids])])


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"graphs": True}, marks=pytest.mark.nightly),
        pytest.param({"steps_ahead": 1}, marks=pytest.mark.nightly),
        pytest.param({"steps_ahead": 1, "graphs": True}, marks=pytest.mark.nightly),
        {"speculative": "ngram", "draft_tokens": 4, "steps_ahead": 1},
        pytest.param({"speculative": "ngram", "draft_tokens": 6, "topk": 3, "graphs": True}, marks=pytest.mark.nightly),
        {"steps_ahead": 1, "num_pages": 16},
        pytest.param({"max_batch_size": 3, "chunk": 3}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_requests_come_to_the_same_however_they_are_served(
    loaded: LoadedModel, alone: list[Completion], changes: dict[str, Any]
) -> None:
    engine = Engine(loaded, replace(BASE, **changes))
    assert engine.generate(ALL) == alone
    if changes.get("num_pages"):
        assert engine.report().metrics.preemptions > 0


def test_two_ranks_come_to_the_same(alone: list[Completion]) -> None:
    def serve(ranks: Any) -> list[Completion]:
        return Engine(character_model(ranks), BASE).generate(ALL[::3])

    for served_by_one in on_threads(2, serve):
        assert [(done.token_ids, done.text) for done in served_by_one] == [
            (done.token_ids, done.text) for done in alone[::3]
        ]


def test_each_ask_changes_what_a_request_comes_to(loaded: LoadedModel, alone: list[Completion]) -> None:
    """Otherwise the other tests here would pass for an engine that ignores the options."""
    plain, likeliest, *_, early, stopped = alone[: 1 + len(ASKING)]
    hot = Engine(loaded, BASE).generate([replace(PLAIN, sampling=drawn())])[0]
    assert likeliest.token_ids == plain.token_ids
    others = [done.token_ids for done in alone[2:7]]
    assert len({*others, plain.token_ids, hot.token_ids}) == len(others) + 2
    assert set(alone[6].token_ids) <= {END, *range(20, 40)}
    assert early.token_ids == (*plain.token_ids[:9], END)
    assert stopped.finish_reason == "stop"
    assert hot.text.startswith(stopped.text)


def test_penalties_hold_for_the_tokens_that_came_before(loaded: LoadedModel) -> None:
    """A penalty lets each token come once; the last token of each step is unread when the next one is picked."""
    request = Request(PROMPT, 40, Sampling(logit_bias=((END, -100.0),), presence_penalty=2.0, frequency_penalty=2.0))
    strong = replace(request.sampling, repetition_penalty=100.0)
    engine = Engine(loaded, replace(BASE, steps_ahead=1))
    tokens = engine.generate([replace(request, sampling=strong)])[0].token_ids
    assert len(set(tokens)) == len(tokens) == 40
    assert not set(tokens) & set(PROMPT)
    drafting = Engine(loaded, replace(BASE, speculative="ngram", steps_ahead=1))
    with_drafter(drafting, ScriptedDrafter([PROMPT + tokens], 64, mistakes=0))
    assert drafting.generate([replace(request, sampling=strong)])[0].token_ids == tokens


async def test_logprobs_come_with_the_tokens_to_events_pieces_and_completions(loaded: LoadedModel) -> None:
    request = replace(ASKING[0], stop=("8",))
    events: list[Any] = []
    done = Engine(loaded, replace(BASE, steps_ahead=1)).generate([request, PLAIN], events.append)
    assert [emitted.token_id for emitted in done[0].logprobs] == list(done[0].token_ids)
    assert all(len(emitted.likeliest) == 3 for emitted in done[0].logprobs)
    assert tuple(event.logprobs for event in events if event.request == 0) == done[0].logprobs
    assert done[1].logprobs == ()
    assert all(event.logprobs is None for event in events if event.request == 1)
    async with AsyncEngine(Engine(loaded, BASE)) as front:
        read = [emitted async for piece in front.stream(request) for emitted in piece.logprobs]
    assert tuple(read) == done[0].logprobs


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": tuple(range(VOCAB))}, {"allowed_token_ids": (END,)}],
    ids=["every token ends it", "the end alone is allowed"],
)
def test_a_request_that_allows_no_token_fails_alone(
    fields: dict[str, Any], loaded: LoadedModel, alone: list[Completion]
) -> None:
    engine = Engine(loaded, BASE)
    with pytest.raises(RequestsFailed) as failed:
        engine.generate([Request(PROMPT, 5, min_tokens=2, **fields), PLAIN])
    none, plain = failed.value.completions
    assert none.error.startswith("no token is left that the request allows: its constraint, its biases, allowed_token_")
    assert none.is_own_fault
    assert plain == alone[0]


def test_a_constraint_and_the_allowed_tokens_hold_together(alone: list[Completion]) -> None:
    """The allowed tokens are every second letter, and digits, which the constraint excludes."""
    text = alone[-1].text
    assert len(text) == 9
    assert set(text) <= set("bdfhjlnprtvxz")


def test_rows_that_ask_for_nothing_are_picked_from_as_ever(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch is added for them: neither in a step with only such rows nor for a greedy request with top_k."""

    def refuse(*_: object) -> None:
        raise AssertionError("a step without asks goes through the picker of others")

    monkeypatch.setattr(ParameterPicker, "pick", refuse)
    requests = [PLAIN, Request(PROMPT, 8, drawn(top_p=0.9)), Request(PROMPT, 8, Sampling(top_k=3, min_p=0.5))]
    Engine(loaded, BASE).generate(requests)


def test_a_bias_of_a_token_that_does_not_exist_is_refused_and_allowing_it_is_too(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(provider="torch", num_pages=9, max_kv_len=16, graphs=False))
    with pytest.raises(BadRequest, match="token 64 is not in the model's vocabulary"):
        engine.submit(Request((1,), 2, Sampling(logit_bias=((64, 1.0),))))
    with pytest.raises(BadRequest, match="token 64 is not in the model's vocabulary"):
        engine.submit(Request((1,), 2, allowed_token_ids=(3, 64, 5)))


LOGITS = (np.log([0.05, 0.5, 0.15, 0.3]) + 3.0).astype(np.float32)


def token_picker(most_rows: int) -> TokenPicker:
    return TokenPicker(torch.device("cpu"), most_rows, TORCH.ops().pick_rows)


def drawn_tokens(logits: np.ndarray[tuple[int], np.dtype[np.float32]], sampling: Sampling, draws: int) -> list[int]:
    """The first tokens of a request, all of which are drawn_tokens from these logits."""
    rows = torch.from_numpy(logits).expand(draws, -1)
    picks = token_picker(draws).pick(rows, dict(enumerate(map(Sampler(sampling).draw, range(draws)))))
    return [pick for pick in picks.read() if not isinstance(pick, BadLogits)]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-310, 5e-324])
def test_a_temperature_next_to_nothing_draws_what_greedy_takes(temperature: float) -> None:
    assert set(drawn_tokens(LOGITS, Sampling(temperature=temperature), 50)) == {int(LOGITS.argmax())}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_is_no_token_and_the_others_are(sampling: Sampling, dtype: torch.dtype) -> None:
    rows = [[1, NAN, 3], [9, 1, 1], [NAN, NAN, NAN], [1, INF, 3], [-INF, -INF, -INF], [-INF, -INF, 2], [-INF, 30, NAN]]
    picks = pick_tokens(torch.tensor(rows, dtype=dtype), [Sampler(replace(sampling, seed=row)) for row in range(7)])
    assert [isinstance(pick, BadLogits) for pick in picks] == [True, False, True, True, True, False, True]
    assert (picks[1], picks[5]) == (0, 2)
    for row, best in ((0, "nan"), (3, "inf"), (4, "-inf")):
        assert str(picks[row]).startswith(f"the largest logit of the next token is {best}, so no token can be sampled")


def test_a_row_of_zeros_is_no_token_and_a_row_whose_best_is_zero_is_one() -> None:
    zeros, best_is_zero = pick_tokens(torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), [Sampler(Sampling())] * 2)
    assert str(zeros).startswith("every logit of the next token is 0, so no token can be sampled")
    assert best_is_zero == 1


@pytest.mark.parametrize("num_samplers", [0, 1, 3])
def test_rows_and_samplers_are_as_many(num_samplers: int) -> None:
    """A row without a sampler got its likeliest token, however its request samples."""
    with pytest.raises(BadTensor, match=rf"logits have shape \[2, 4\] and there are {num_samplers} samplers"):
        pick_tokens(torch.ones(2, 4), [Sampler(Sampling(temperature=1.0))] * num_samplers)


@pytest.mark.parametrize("temperature", [1e-310, 1.0, 1e300])
def test_a_token_that_is_ruled_out_is_never_drawn(temperature: float) -> None:
    assert set(drawn_tokens(np.array([-INF, 0, 0, -INF], np.float32), Sampling(temperature=temperature), 60)) == {1, 2}


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    logits = np.ones(1000, np.float32)
    draws = [drawn_tokens(logits, Sampling(temperature=1.0, seed=seed), 40) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_a_requests_draws_do_not_depend_on_its_company() -> None:
    logits = torch.randn(6, 300)
    samplings = [Sampling(), *(Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)), Sampling()]
    together = pick_tokens(logits, [Sampler(sampling) for sampling in samplings])
    alone = [pick_tokens(logits[i : i + 1], [Sampler(samplings[i])])[0] for i in range(6)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


def test_a_token_is_drawn_alike_however_often_and_in_whatever_order_it_is_asked_for() -> None:
    sampler, again = (Sampler(Sampling(temperature=1.0, seed=4)) for _ in range(2))
    in_order = [sampler.next_draw() for _ in range(50)]
    assert [again.draw(place) for place in reversed(range(50))] == in_order[::-1]
    assert sampler.draw(7) == in_order[7]
    assert len({draw.uniform for draw in in_order}) == 50


def test_two_steps_may_be_picked_from_before_the_first_is_read() -> None:
    picker = token_picker(3)
    first = picker.pick(torch.eye(3), {})
    second = picker.pick(torch.eye(3)[[2, 0]], {})
    assert picker.tokens.tolist() == [2, 0, 2]
    assert (first.read(), second.read()) == ([0, 1, 2], [2, 0])
    assert picker.pick(torch.eye(3)[:0], {}).read() == []


NUM_WORDS, MOST = 9, 3


def counted(prompt: list[int], new: list[int]) -> list[int]:
    """By definition."""
    counts = np.bincount(np.array(new, np.int64), minlength=NUM_WORDS)
    counts[sorted(set(prompt))] += IN_PROMPT
    found: list[int] = counts.tolist()
    return found


token = st.integers(0, NUM_WORDS - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=5), min_size=5, max_size=5)
# The texts of a step; for each, whether its last token is unknown, the number of its lost tokens, and its new tokens.
steps = st.lists(
    st.dictionaries(st.integers(0, 4), st.tuples(st.booleans(), st.integers(0, 2), token), min_size=1, max_size=MOST),
    max_size=12,
)


@given(prompts, steps)
def test_each_texts_row_has_the_counts_of_its_tokens(
    prompts: list[list[int]], steps: list[dict[int, tuple[bool, int, int]]]
) -> None:
    """Five texts share three rows. In each step one gets a token or has lost some: none comes before the next pick."""
    counts = TokenCounts(CPU, NUM_WORDS, MOST)
    news: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        texts, picked = [], torch.full((MOST,), NUM_WORDS - 1, dtype=torch.int32)
        for place, (number, (is_pending, lost, last)) in enumerate(step.items()):
            new = news[number]
            if lost:
                del new[max(0, len(new) - lost) :]
            else:
                new.append(last)
            picked[place] = last
            is_pending = is_pending and not lost
            known = [*prompts[number], *(new[:-1] if is_pending else new)]
            texts.append(CountedText(number, known, len(prompts[number]), place if is_pending else -1))
        rows = counts.rows(texts, picked)
        assert len(set(rows)) == len(rows)
        for row, number in zip(rows, step, strict=True):
            assert counts.table[row].tolist() == counted(prompts[number], news[number])

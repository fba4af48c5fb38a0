"""Speculation decides how many tokens a step brings, and never which ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rocm_attn.errors import BadModel, BadSetting
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.draft_model import ModelDrafter
from rocm_serve.speculation.engines import model_drafter
from rocm_serve.speculation.speculation import Speculation
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.thread_ranks import ThreadRank, on_threads
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

BASE = EngineOptions(
    provider="torch", page_size=4, max_batch_size=8, chunk=64, graphs=False, max_kv_len=64, capture_after=0
)
DRAWN = Sampling(temperature=0.8, top_p=0.9, seed=4)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def windowed() -> LoadedModel:
    """Every other layer has a window, as in Gemma, and lies in a separate pool."""
    return tiny_model(base=with_windows(CONFIG, 9, -1))


def some_requests(num: int = 7, new_tokens: int = 20, **options: Any) -> list[Request]:
    chooser = random.Random(num)
    lengths = [chooser.randrange(1, 30) for _ in range(num)]
    return [
        Request(tuple(chooser.randrange(CONFIG.vocab_size) for _ in range(length)), new_tokens, **options)
        for length in lengths
    ]


def texts_of(completions: Many[Completion]) -> list[tuple[int, ...]]:
    return [done.prompt_token_ids + done.token_ids for done in completions]


def without_speculation(options: EngineOptions) -> EngineOptions:
    """Options of plain decoding; without graphs, which change no token (test_engine.py)."""
    return replace(options, speculative="off", draft_tokens=4, topk=1, sampled_drafts=False, graphs=False)


def speculating(loaded: LoadedModel, options: EngineOptions, requests: list[Request], **script: Any) -> Engine:
    """An engine with drafts that are mostly right by plain decoding's completions."""
    completions = Engine(loaded, without_speculation(options)).generate(requests)
    return guessing(loaded, options, completions, **script)


def guessing(loaded: LoadedModel, options: EngineOptions, right: Many[Completion], **script: Any) -> Engine:
    """An engine with drafts that are mostly those of the right completions."""
    texts = texts_of(right)
    return with_drafter(
        Engine(loaded, options), ScriptedDrafter(texts, CONFIG.vocab_size, branches=options.topk > 1, **script)
    )


def assert_lossless(loaded: LoadedModel, options: EngineOptions, requests: list[Request]) -> Engine:
    """Checks that every token is plain decoding's, some drafts were right and some wrong, and all pages come back."""
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = guessing(loaded, options, expected)
    assert engine.generate(requests) == expected
    metrics = engine.report().metrics
    assert 0 < metrics.accepted_drafts < metrics.drafts
    assert metrics.new_tokens == sum(len(done.token_ids) for done in expected)
    engine.forget_prefixes()
    for table in engine.runtime.table.spaces:
        assert table.num_free_pages == table.num_usable_pages
    return engine


def ways(quick: set[tuple[int, int, int, bool]]) -> list[Any]:
    """Page size, most drafts, branches, graphs; all but the quick ones at night."""
    return [
        pytest.param(*way, marks=[] if way in quick else [pytest.mark.nightly])
        for way in sorted({*quick, *product((1, 2, 16), (2, 3, 4, 7, 8, 16), (1, 2, 8), (False, True))})
        if way[2] <= way[1]
    ]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("page_size", "draft_tokens", "topk", "graphs"), ways({(1, 4, 1, False), (2, 3, 2, True), (16, 8, 8, False)})
)
def test_greedy_tokens_are_those_of_plain_decoding(
    page_size: int, draft_tokens: int, topk: int, graphs: bool, loaded: LoadedModel
) -> None:
    options = replace(
        BASE, page_size=page_size, draft_tokens=draft_tokens, topk=topk, graphs=graphs, speculative="ngram"
    )
    assert_lossless(loaded, options, some_requests())


@pytest.mark.parametrize(("page_size", "draft_tokens", "topk", "graphs"), ways({(2, 3, 2, False)}))
def test_they_are_with_a_pool_of_its_own_for_layers_with_windows(
    page_size: int, draft_tokens: int, topk: int, graphs: bool, windowed: LoadedModel
) -> None:
    options = replace(
        BASE, page_size=page_size, draft_tokens=draft_tokens, topk=topk, graphs=graphs, speculative="ngram"
    )
    engine = assert_lossless(windowed, options, some_requests())
    assert engine.report().swa_pages > 0


@pytest.mark.parametrize(
    "num_requests", [1, *(pytest.param(num, marks=pytest.mark.nightly) for num in (2, 16, 33, 64))]
)
def test_they_are_for_any_number_of_sequences(num_requests: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", draft_tokens=3, max_batch_size=64, chunk=512, graphs=num_requests > 1)
    assert_lossless(loaded, options, some_requests(num_requests, new_tokens=34))


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_drawn_tokens_are_those_of_plain_decoding(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", topk=topk)
    assert_lossless(loaded, options, some_requests(5) + some_requests(4, sampling=DRAWN))


def test_deterministic_mode_gives_the_same_bits_and_tokens_in_sixteen_bits_too() -> None:
    half = tiny_model(dtype=torch.float16)
    options = replace(BASE, speculative="ngram", deterministic=True)
    assert_lossless(half, options, some_requests(5) + some_requests(2, sampling=DRAWN))


@pytest.mark.nightly
@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_preemption_changes_no_token_of_a_speculating_engine(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", draft_tokens=6, topk=topk, num_pages=18)
    engine = assert_lossless(loaded, options, some_requests(5, new_tokens=34))
    assert engine.report().metrics.preemptions > 0


def test_a_prompt_that_comes_later_finds_no_rejected_draft_in_the_prefix_cache(loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", draft_tokens=8, page_size=1)
    requests = some_requests(4)
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    longer = [Request(text, 5) for text in texts_of(expected)]
    wanted = Engine(loaded, without_speculation(options)).generate(longer)
    script = ScriptedDrafter(texts_of([*expected, *wanted]), CONFIG.vocab_size, mistakes=0.5)
    engine = with_drafter(Engine(loaded, options), script)
    assert engine.generate(requests) == expected
    assert engine.generate(longer) == wanted
    assert engine.report().metrics.prefix_hits > 0


def test_a_stop_token_among_accepted_drafts_is_the_last_event(loaded: LoadedModel) -> None:
    request = some_requests(1)[0]
    free = Engine(loaded, BASE).generate([request])[0].token_ids
    stopping = replace(request, stop_token_ids=(free[9],))
    engine = speculating(loaded, replace(BASE, speculative="ngram", draft_tokens=16), [request], mistakes=0.0)
    events: list[Event] = []
    completion = engine.generate([stopping], events.append)[0]
    assert completion.token_ids == free[: free.index(free[9]) + 1]
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert tuple(event.token_id for event in tokens) == completion.token_ids
    assert [event.finish_reason for event in tokens] == [None] * (len(tokens) - 1) + ["stop"]


def test_the_report_counts_drafts_and_what_steps_bring(loaded: LoadedModel) -> None:
    requests = some_requests(2, new_tokens=21)
    engine = speculating(loaded, replace(BASE, speculative="ngram"), requests, mistakes=0.0)
    engine._speculation._drafter._random.randint = lambda low, high: high  # type: ignore[union-attr]
    engine.generate(requests)
    metrics = engine.report().metrics
    # 1 token of the prompt's step, then 5 of each of 4 steps
    assert (metrics.verifications, metrics.drafts, metrics.accepted_drafts) == (8, 32, 32)
    assert metrics.acceptance_length == 5
    assert metrics.tokens_per_step == 42 / 5
    assert "acceptance length 5.00, 8.40 tokens a step" in str(metrics)
    assert "rocm_attn_accepted_drafts_total 32" in metrics.as_prometheus()
    assert metrics.as_dict()["acceptance_length"] == 5


def test_steps_that_verify_are_replayed(loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", draft_tokens=3, graphs=True, max_batch_size=4)
    requests = some_requests(4)
    engine = speculating(loaded, options, requests)
    made = engine.capture_all(lambda done, total, name: None)
    assert not made.skipped
    assert {
        "extend of 4 sequences with 16 tokens, lengths to 64",
        "mixed of 4 sequences with 16 tokens, lengths to 64",
    } <= {bucket.name for bucket in made.buckets}
    engine.generate(requests)
    metrics = engine.report().metrics
    assert metrics.captures == len(made.buckets)
    assert not metrics.graphs_off
    # all but those with prompts
    assert metrics.replays >= metrics.steps - len(requests)


@pytest.mark.nightly
def test_steps_with_prompts_are_replayed_too(loaded: LoadedModel) -> None:
    """Prompts come singly, next to sequences whose drafts are verified: each such step has one of two sizes."""
    options = replace(BASE, speculative="ngram", draft_tokens=3, graphs=True, max_batch_size=2, chunk=32)
    requests = [replace(each, max_new_tokens=5 + 3 * place) for place, each in enumerate(some_requests(5))]
    engine = speculating(loaded, options, requests)
    assert engine.runtime.padding.prompts == (8, 32)
    names = {bucket.name for bucket in engine.capture_all(lambda done, total, name: None).buckets}
    assert {f"mixed of 2 sequences with {tokens} tokens, lengths to 64" for tokens in (8, 32)} <= names
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    metrics = engine.report().metrics
    assert metrics.replays == metrics.steps
    assert metrics.captures == len(names)


@pytest.mark.parametrize("topk", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_what_came_of_a_step_is_published_while_the_next_one_runs(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", topk=topk, steps_ahead=1, max_batch_size=3)
    requests = some_requests(3, new_tokens=12) + some_requests(2, new_tokens=12, sampling=DRAWN)
    engine = assert_lossless(loaded, options, requests)
    order: list[str] = []
    run, publish = engine._run, engine._publish
    engine._run = lambda step: (order.append("launched"), run(step))[1]  # type: ignore[method-assign,func-returns-value]
    engine._publish = lambda *what: (order.append("published"), publish(*what))[1]  # type: ignore[method-assign,func-returns-value]
    chains = [replace(request, max_new_tokens=2) for request in requests[:2]]
    engine.generate(chains)
    assert order == ["launched", "launched", "published", "published", "published", "published"]


def test_a_request_is_aborted_while_its_drafts_are_verified(loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", steps_ahead=1)
    requests = some_requests(4)
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = guessing(loaded, options, expected)
    numbers = [engine.submit(request) for request in requests]
    for _ in range(3):
        engine.step()
    assert engine._unread[0].step.drafts
    engine.abort(numbers[1])
    while engine.has_work:
        engine.step()
    done = [engine.completion(number) for number in numbers]
    assert [each for place, each in enumerate(done) if place != 1] == [*expected[:1], *expected[2:]]
    assert done[1].token_ids == expected[1].token_ids[: len(done[1].token_ids)]
    assert done[1].finish_reason == "abort"


@pytest.mark.nightly
def test_tokens_are_distributed_as_by_plain_sampling(loaded: LoadedModel) -> None:
    """Chi-square of two samples with different seeds: pairs of a text's second and third token."""
    sampling = Sampling(temperature=0.7, top_p=0.8)
    plain, verified = (
        [Request((5, 6, 7), 3, sampling=replace(sampling, seed=first + seed)) for seed in range(800)]
        for first in (0, 10_000)
    )
    options = replace(
        BASE, speculative="ngram", draft_tokens=2, max_batch_size=200, chunk=800, page_size=16, max_kv_len=16
    )
    verifying = likeliest_drafts(loaded, options)
    counts = [
        Counter(done.token_ids[1:] for done in engine.generate(requests))
        for engine, requests in ((Engine(loaded, without_speculation(options)), plain), (verifying, verified))
    ]
    metrics = verifying.report().metrics
    assert 100 < metrics.accepted_drafts < metrics.drafts - 100, "both what is accepted and what is not is drawn"
    assert chi_square_exceedance(*counts) < 4.0


def likeliest_drafts(loaded: LoadedModel, options: EngineOptions) -> Engine:
    """An engine whose drafts are the tokens of a greedy request: right more often than any others."""
    greedy = Engine(loaded, without_speculation(options)).generate([Request((5, 6, 7), 3)])
    texts = texts_of(greedy * 2000)
    return with_drafter(Engine(loaded, options), ScriptedDrafter(texts, CONFIG.vocab_size, mistakes=0.0))


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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculative": "guess"}, "speculative 'guess' is not known; give off, ngram, draft:MODEL"),
        ({"speculative": "draft:"}, "speculative 'draft:' is not known"),
        ({"speculative": "ngram", "topk": 5}, "topk is 5 and draft_tokens is 4"),
        ({"speculative": "ngram", "draft_tokens": 0}, "draft_tokens is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadSetting, match=sentence):
        replace(BASE, **changes)


def drafting(large: LoadedModel, small: LoadedModel, options: EngineOptions) -> Engine:
    """An engine of the large model, for which the small one drafts."""
    engine = Engine(large, options)
    drafter = model_drafter(small, large, options, engine.runtime)
    engine._speculation = Speculation(drafter, engine.runtime, engine._picker, options.draft_tokens, engine.metrics)
    return engine


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"topk": 2, "page_size": 1},
        {"graphs": True, "draft_tokens": 3},
        pytest.param({"chunk": 9}, marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(changes: dict[str, Any], loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", **changes)
    requests = some_requests(5)
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = drafting(loaded, loaded, options)
    assert engine.generate(requests) == expected
    metrics = engine.report().metrics
    if options.topk == 1:
        assert metrics.accepted_drafts == metrics.drafts > 30
    assert metrics.accepted_drafts > 30


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_drafts_of_all_levels_are_one_publication_and_one_graph(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", topk=topk, graphs=True, draft_tokens=4, max_batch_size=2)
    requests = some_requests(2)
    engine = drafting(loaded, tiny_model(seed=1), options)
    drafter = engine._speculation._drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter)
    runners, published = drafter.runners, Counter[int]()
    draft, runtime = drafter._draft, runners._runtime

    def counted(decoding: Any, ahead: Any) -> Any:
        before = runtime.faults.step_number, runners._runner.metrics.captures
        found = draft(decoding, ahead)
        if found and before[1] == runners._runner.metrics.captures:
            published[runtime.faults.step_number - before[0]] += 1
        return found

    drafter._draft = counted  # type: ignore[method-assign]
    engine.generate(requests)
    # The new tokens are one step, and everything after the first drafts is another one.
    assert set(published) == {2}
    assert published[2] > 3
    assert runners._runner.metrics.replays > 6
    assert not runners._runner.metrics.fallbacks
    assert runners._drafts.tokens == (3 if topk == 1 else 4)


@pytest.mark.parametrize("topk", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_no_served_round_captures_anything_after_all_graphs_were_made(topk: int, loaded: LoadedModel) -> None:
    """The steps are steps that verify, steps with prompts, the small model's prefill, and its rounds."""
    options = replace(
        BASE, speculative="ngram", topk=topk, graphs=True, draft_tokens=4, max_batch_size=2, chunk=32, num_pages=64
    )
    requests = some_requests(4, new_tokens=12)
    engine = drafting(loaded, tiny_model(seed=1), options)
    drafter = engine._speculation._drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter)
    counted = (engine.metrics, drafter.runners._runner.metrics)
    assert not engine.capture_all(lambda done, total, name: None).skipped
    before = [metrics.captures for metrics in counted]
    assert all(before)
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    assert [metrics.captures for metrics in counted] == before
    assert counted[1].replays > 6
    assert not counted[1].fallbacks


@pytest.mark.parametrize(
    "changes", [*(pytest.param(changes, marks=pytest.mark.nightly) for changes in ({}, {"num_pages": 18})), {"topk": 2}]
)
def test_a_model_that_drafts_for_another_changes_no_token(changes: dict[str, Any], windowed: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", **changes)
    requests = some_requests(5, new_tokens=30) + some_requests(3, sampling=DRAWN)
    expected = Engine(windowed, without_speculation(options)).generate(requests)
    engine = drafting(windowed, tiny_model(), options)
    assert engine.generate(requests) == expected
    metrics = engine.report().metrics
    assert metrics.drafts > metrics.accepted_drafts
    drafter = engine._speculation._drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter)
    drafter.draft([], frozenset())
    assert drafter.table.num_free_rows == options.max_batch_size
    assert drafter.table.full.num_free_pages == drafter.table.full.num_usable_pages


def test_a_model_with_a_shorter_context_drafts_as_far_as_that_goes(loaded: LoadedModel) -> None:
    options, short = replace(BASE, speculative="ngram"), 24
    requests = [Request((5, 6, 7), 40), Request(tuple(range(8, 8 + short + 4)), 20), Request((9,), 4)]
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = drafting(loaded, tiny_model(context_len=short), options)
    assert engine.generate(requests) == expected
    assert 0 < engine.report().metrics.drafts <= 2 * short * options.draft_tokens


def test_a_model_with_other_tokens_cannot_draft(loaded: LoadedModel) -> None:
    other = tiny_model(base=replace(CONFIG, vocab_size=65))
    with pytest.raises(BadModel, match="the draft model has 65 tokens and the model 64"):
        drafting(loaded, other, replace(BASE, speculative="ngram"))


def test_ranks_that_share_a_model_guess_and_verify_the_same() -> None:
    # Tokens that repeat themselves, so that there is something to look up.
    requests = [Request((5, 6, 7) * 4, 20), Request((9, 8) * 5, 20, sampling=DRAWN)]
    expected = Engine(tiny_model(), BASE).generate(requests)

    def served(rank: ThreadRank) -> tuple[list[Completion], int]:
        engine = Engine(tiny_model(ranks=rank), replace(BASE, speculative="ngram"))
        return engine.generate(requests), engine.report().metrics.drafts

    for completions, drafts in on_threads(2, served):
        assert completions == expected
        assert drafts > 0


def test_what_happens_between_two_rounds_touches_no_tensor_and_makes_no_plan(loaded: LoadedModel) -> None:
    """From the tokens' arrival to the next step's publication the host works on lists and arrays.

    A tensor's call costs a microsecond or more, and a plan a hundred. Steps that verify drafts of the same number of
    sequences have one plan for any number of drafts, or two if one sequence has no draft.
    """
    options = replace(BASE, speculative="ngram", draft_tokens=4, graphs=True, max_batch_size=4)
    requests = some_requests(4, new_tokens=24)
    engine = speculating(loaded, options, requests)
    engine.capture_all(lambda done, total, name: None)
    planner, scheduler = engine.runtime.gate.planner, engine._scheduler
    plans, shapes, calls = Counter[int](), set[tuple[int, ...]](), list[str]()

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    make_plan, next_step, finish_step = planner._make_plan, scheduler.next_step, scheduler.finish_step

    def counted(*args: Any) -> Any:
        plans[args[1].num_seqs] += args[1].max_q_len > 1 and args[1].max_q_len <= 5
        return make_plan(*args)

    def scheduled(drafts: Any) -> Any:
        with Noted():
            step = next_step(drafts)
        assert step is not None
        shapes.add(tuple(step.batch.q_len.tolist()))
        return step

    def finished(step: Any, picks: Any) -> Any:
        with Noted():
            taken = finish_step(step, picks)
            engine._speculation._drafter.follow(step, taken)  # type: ignore[union-attr]
        return taken

    planner._make_plan = counted  # type: ignore[method-assign,assignment]
    scheduler.next_step = scheduled  # type: ignore[method-assign,assignment]
    scheduler.finish_step = finished  # type: ignore[method-assign]
    engine.generate(requests)
    assert not calls
    assert len(shapes) > 8
    assert max(plans.values()) <= 2


def test_a_round_of_a_sequence_that_has_ended_meanwhile_counts_for_nothing(loaded: LoadedModel) -> None:
    requests = some_requests(2, new_tokens=20)
    engine = speculating(loaded, replace(BASE, speculative="ngram", steps_ahead=1), requests, mistakes=0.0)
    numbers = [engine.submit(request) for request in requests]
    while not any(unread.step.drafts.keys() == {0, 1} for unread in engine._unread):
        engine.step()
    before = engine.metrics.verifications, engine.metrics.drafts
    drafts = len(engine._unread[-1].step.drafts[1])
    engine.abort(numbers[0])
    engine.settle()
    assert (engine.metrics.verifications, engine.metrics.drafts) == (before[0] + 1, before[1] + drafts)


@pytest.mark.fast(1)
@pytest.mark.parametrize("end", ["abort", "cancel"])
def test_an_interrupt_between_reading_and_publishing_loses_no_token_of_what_is_ended_then(
    end: str, loaded: LoadedModel
) -> None:
    requests = some_requests(2, new_tokens=20)
    expected = Engine(loaded, without_speculation(BASE)).generate(requests)
    engine = speculating(loaded, replace(BASE, speculative="ngram", steps_ahead=1), requests, mistakes=0.0)
    numbers = [engine.submit(request) for request in requests]
    for _ in range(3):
        engine.step()
    read = engine._read_all

    def interrupted() -> None:
        read()
        raise KeyboardInterrupt

    engine._read_all = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._read_all = read  # type: ignore[method-assign]
    assert engine._read
    known = len(engine._outputs[numbers[0]].sequence.new_token_ids)
    getattr(engine, end)(numbers[0])
    while engine.has_work:
        engine.step()
    assert engine.completion(numbers[1]).token_ids == expected[1].token_ids
    if end == "abort":
        assert engine.completion(numbers[0]).token_ids == expected[0].token_ids[:known]

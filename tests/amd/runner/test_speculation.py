"""Speculation decides how many tokens a step brings, and never which ones."""

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rocm_attn.errors import BadModel, DeviceFault
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.draft_model import ModelDrafter
from rocm_serve.speculation.engines import model_drafter
from rocm_serve.speculation.row_drafter import RowDrafter
from rocm_serve.speculation.speculation import Speculation
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.serving import BASE as CHUNKS_OF_16
from tests.amd.runner.serving import all_pages_are_free, served_to_the_end, some_requests
from tests.amd.runner.tiny_model import CONFIG, tiny_model

BASE = replace(CHUNKS_OF_16, chunk=64)
DRAWN = Sampling(temperature=0.8, top_p=0.9, seed=4)


def without_speculation(options: EngineOptions) -> EngineOptions:
    """Options of plain decoding; without graphs, which change no token (test_engine.py)."""
    return replace(options, speculative="off", draft_tokens=4, topk=1, sampled_drafts=False, graphs=False)


def speculating(loaded: LoadedModel, options: EngineOptions, requests: list[Request], **script: Any) -> Engine:
    """An engine with drafts that are mostly right by plain decoding's completions."""
    completions = Engine(loaded, without_speculation(options)).generate(requests)
    return scripted(loaded, options, completions, **script)


def scripted(loaded: LoadedModel, options: EngineOptions, right: Many[Completion], **script: Any) -> Engine:
    """An engine with drafts that are mostly those of the right completions."""
    texts = [(*done.prompt_token_ids, *done.token_ids) for done in right]
    return with_drafter(
        Engine(loaded, options), ScriptedDrafter(texts, CONFIG.vocab_size, branches=options.topk > 1, **script)
    )


def assert_lossless(loaded: LoadedModel, options: EngineOptions, requests: list[Request]) -> Engine:
    """Checks that every token is plain decoding's, some drafts were right and some wrong, and all pages come back."""
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = scripted(loaded, options, expected)
    assert engine.generate(requests) == expected
    metrics = engine.report().metrics
    assert 0 < metrics.accepted_drafts < metrics.drafts
    assert metrics.new_tokens == sum(len(done.token_ids) for done in expected)
    assert all_pages_are_free(engine)
    return engine


def test_the_report_counts_drafts_and_what_steps_bring(loaded: LoadedModel) -> None:
    requests = some_requests(2, new_tokens=21)
    engine = speculating(loaded, replace(BASE, speculative="ngram"), requests, mistakes=0.0)
    engine._speculation._drafter._random.randint = lambda low, high: high  # type: ignore[attr-defined]
    engine.generate(requests)
    metrics = engine.report().metrics
    # 1 token of the prompt's step, then 5 of each of 4 steps
    assert (metrics.verifications, metrics.drafts, metrics.accepted_drafts) == (8, 32, 32)
    assert metrics.acceptance_length == 5
    assert metrics.tokens_per_step == 42 / 5
    assert "acceptance length 5.00, 8.40 tokens a step" in str(metrics)
    assert "rocm_attn_accepted_drafts_total 32" in metrics.as_prometheus()
    assert metrics.as_dict()["acceptance_length"] == 5


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_steps_with_prompts_are_replayed_too(most: int, loaded: LoadedModel) -> None:
    """Prompts come singly, next to sequences whose drafts are verified: each such step has one of a few sizes."""
    options = replace(BASE, speculative="ngram", draft_tokens=3, graphs=True, max_batch_size=most, chunk=32)
    requests = [replace(each, max_new_tokens=5 + 3 * place) for place, each in enumerate(some_requests(5))]
    engine = speculating(loaded, options, requests)
    padding = engine.runtime.padding
    assert padding.prompts == (3, 4, 6, 8, 12, 16, 24, 32)
    shapes = [bucket.key.shape for bucket in engine.capture_all(lambda done, total, name: None).buckets]
    assert {*padding.prompt_shapes()} <= {*shapes}
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    metrics = engine.report().metrics
    assert metrics.replays == metrics.steps
    assert metrics.captures == len(shapes)


@pytest.mark.parametrize("topk", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_what_came_of_a_step_is_published_while_the_next_one_runs(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", topk=topk, steps_ahead=1, max_batch_size=3)
    requests = some_requests(3, new_tokens=12) + some_requests(2, new_tokens=12, sampling=DRAWN)
    engine = assert_lossless(loaded, options, requests)
    order: list[str] = []
    run, publish = engine._run, engine._publish_step
    engine._run = lambda step: (order.append("launched"), run(step))[1]  # type: ignore[method-assign,func-returns-value]
    engine._publish_step = lambda *what: (order.append("published"), publish(*what))[1]  # type: ignore[method-assign,func-returns-value]
    chains = [replace(request, max_new_tokens=2) for request in requests[:2]]
    engine.generate(chains)
    assert order == ["launched", "launched", "published", "published"]


def drafting(large: LoadedModel, small: LoadedModel, options: EngineOptions) -> Engine:
    engine = Engine(large, options)
    drafter = model_drafter(small, large, options, engine.runtime)
    engine._speculation = Speculation(drafter, engine.runtime, engine._picker, options.draft_tokens, engine.metrics)
    return engine


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_drafts_of_all_levels_are_one_publication_and_one_graph(topk: int, loaded: LoadedModel) -> None:
    options = replace(BASE, speculative="ngram", topk=topk, graphs=True, draft_tokens=4, max_batch_size=2)
    requests = some_requests(2)
    engine = drafting(loaded, tiny_model(seed=1), options)
    drafter = engine._speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    runners, published = drafter.runners, Counter[int]()
    draft, runtime = drafter._draft, runners._runtime

    def counted(decoding: Any, alive: Any) -> Any:
        before = runtime.faults.step_number, runners._runner.metrics.captures
        found = draft(decoding, alive)
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
    """The steps are steps that verify, steps with prompts, the small model's prefill, and its rounds: all replays."""
    options = replace(
        BASE, speculative="ngram", topk=topk, graphs=True, draft_tokens=4, max_batch_size=2, chunk=32, num_pages=64
    )
    requests = some_requests(4, new_tokens=12)
    engine = drafting(loaded, tiny_model(seed=1), options)
    drafter = engine._speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    counted = (engine.metrics, drafter.runners._runner.metrics)
    made = engine.capture_all(lambda done, total, name: None)
    assert not made.skipped
    assert {f"{kind} of 2 sequences with 10 tokens, lengths to 64" for kind in ("extend", "mixed")} <= {
        bucket.name for bucket in made.buckets
    }
    before = [metrics.captures for metrics in counted]
    assert all(before)
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    assert [metrics.captures for metrics in counted] == before
    assert counted[0].replays >= counted[0].steps - len(requests)
    assert counted[1].replays > 6
    assert not counted[1].fallbacks


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
            engine._speculation._drafter.follow(step, taken)
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
    while not any(pending.step.drafts.keys() == {0, 1} for pending in engine._pending):
        engine.step()
    before = engine.metrics.verifications, engine.metrics.drafts
    drafts = len(engine._pending[-1].step.drafts[1])
    engine.abort(numbers[0])
    engine.settle()
    assert (engine.metrics.verifications, engine.metrics.drafts) == (before[0] + 1, before[1] + drafts)


def test_after_a_fault_in_its_own_step_a_model_drafts_anew(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, requests = replace(BASE, speculative="ngram"), some_requests(3)
    engine = drafting(loaded, loaded, options)
    drafter = engine._speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    found, faults = drafter._found, [DeviceFault("a page was not there")] * 2

    def faulty(drafting: Any) -> Any:
        if faults:
            raise faults.pop()
        return found(drafting)

    monkeypatch.setattr(drafter, "_found", faulty)
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    assert engine.report().metrics.accepted_drafts > 10


@pytest.mark.parametrize("speculative", ["ngram", "eagle:seeded"], ids=["model", "head"])
def test_after_memory_has_run_out_in_its_own_step_a_model_drafts_anew(
    speculative: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows counted tokens that it had not stored, and no later step of the engine ran."""
    options, requests = replace(BASE, speculative=speculative), some_requests(3)
    engine = Engine(loaded, options) if speculative != "ngram" else drafting(loaded, loaded, options)
    drafter = engine._speculation._drafter
    assert isinstance(drafter, RowDrafter)
    numbers = [engine.submit(request) for request in requests]

    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(drafter.runners._runner, "run", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    wanted = Engine(loaded, without_speculation(options)).generate(requests)
    assert served_to_the_end(engine, numbers) == wanted
    assert engine.report().metrics.drafts > 10


def test_sequences_that_the_small_pool_of_a_draft_model_has_no_room_for_get_no_drafts(loaded: LoadedModel) -> None:
    """They share a prefix in the pages of the model, and not in those of the draft model."""
    options = replace(BASE, speculative="ngram", max_batch_size=4, num_pages=1 + 28)
    requests = [Request((*range(40), 40 + number), 12) for number in range(4)]
    engine = drafting(loaded, loaded, options)
    drafter = engine._speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    engine.generate(requests[:1])
    left = []
    has_room = drafter._has_room
    drafter._has_room = lambda sequence: (left.append(has_room(sequence)), left[-1])[1]  # type: ignore[method-assign,func-returns-value]
    assert engine.generate(requests) == Engine(loaded, without_speculation(options)).generate(requests)
    assert set(left) == {False, True}
    assert engine.report().metrics.accepted_drafts > 0


def test_tokens_that_were_drafted_and_accepted_are_not_stored_again(loaded: LoadedModel) -> None:
    engine = drafting(loaded, loaded, replace(BASE, speculative="ngram", draft_tokens=4))
    drafter = engine._speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    stored: list[int] = []
    batch = drafter._batch
    drafter._batch = lambda sequences, q_len: (stored.extend(q_len), batch(sequences, q_len))[1]  # type: ignore[method-assign,func-returns-value]
    engine.generate([Request((5, 6, 7), 31)])
    assert stored[0] == 4, "the prompt and the first token"
    assert sum(stored[1:]) < 31 / 2, "most were stored when they were drafted"

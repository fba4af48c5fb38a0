"""An engine whose prefix cache has host memory: texts are those without it, and no wrong page is ever used."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.errors import BadSetting, NeverFits, Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.host_pages import CHANGED, OTHER, HostPages
from rocm_attn.paging.host_record import HEAD_WORDS
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Request
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.engine_worlds import Run, World
from tests.amd.runner.serving import engine as small_engine
from tests.amd.runner.serving import until_done
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model, with_windows

# Pages of 4 tokens. A prompt has 8 or 9 of them, and the pool 24.
PAGE = 4
FEW = {"num_pages": 25, "host_kv_bytes": 1 << 20}


def requests(num: int = 24, seed: int = 3) -> list[Request]:
    """Questions after one of six beginnings, more than the pool has pages for."""
    chooser = random.Random(seed)
    begins = [tuple(chooser.randrange(1, 60) for _ in range(33)) for _ in range(6)]
    return [
        Request(chooser.choice(begins) + tuple(chooser.randrange(1, 60) for _ in range(chooser.randrange(1, 6))), 6)
        for _ in range(num)
    ]


def one_by_one(served: Engine, asked: Sequence[Request]) -> list[Completion]:
    done = []
    for request in asked:
        done += served.generate([request])
        check_cache(served._scheduler._cache, served.runtime.table)
    return done


def host(served: Engine) -> HostPages:
    tier = served._scheduler._cache._tier
    assert isinstance(tier, HostPages)
    return tier


@pytest.mark.fast(3)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    "options",
    [{}, {"steps_ahead": 1}, {"graphs": True, "steps_ahead": 1}, {"speculative": "ngram"}],
    ids=["eager", "ahead", "graphs", "ngram"],
)
def test_texts_are_those_of_dense_attention_and_pages_come_back(
    options: dict[str, Any], at_once: bool, loaded: LoadedModel
) -> None:
    served, plain = (small_engine(loaded, **{**FEW, **options, **more}) for more in ({}, {"host_kv_bytes": 0}))
    asked = requests()
    done = served.generate(asked) if at_once else one_by_one(served, asked)
    for each in done:
        assert_greedy(loaded, each)
    plain.generate(asked) if at_once else one_by_one(plain, asked)
    metrics, without = served.report().metrics, plain.report().metrics
    assert metrics.host_kv_hits > 20
    assert metrics.prefix_hits >= without.prefix_hits + PAGE * 20
    assert not metrics.host_kv_refusals
    assert metrics.host_kv_bytes == host(served)._memory.num_bytes > 0
    assert (without.host_kv_hits, without.host_kv_bytes) == (0, 0)
    assert sum(each.cached_tokens for each in done) == metrics.prefix_hits
    served.forget_prefixes()
    assert served.metrics.host_kv_bytes == 0
    served.runtime.check_device()


def test_in_deterministic_mode_a_page_from_host_memory_changes_no_bit(loaded: LoadedModel) -> None:
    asked = [replace(request, logprobs=3) for request in requests(12)]
    found = []
    for host_kv_bytes in (0, 1 << 20):
        served = small_engine(loaded, **{**FEW, "host_kv_bytes": host_kv_bytes}, deterministic=True)
        found.append([(done.token_ids, done.logprobs) for done in one_by_one(served, asked)])
        assert (served.metrics.host_kv_hits > 0) == (host_kv_bytes > 0)
    assert found[0] == found[1]


def flip(served: Engine, seed: int) -> int:
    """Flips a bit of the page in each record; returns their number."""
    memory, chooser = host(served)._memory, random.Random(seed)
    for key in memory._slots:
        at = 8 * HEAD_WORDS + chooser.randrange(memory.record_bytes - 8 * HEAD_WORDS)
        memory.at(key)[at] ^= 1 << chooser.randrange(8)
    return len(memory)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_flipped_bits_in_host_memory_are_misses_that_are_counted_and_texts_stay_right(
    steps_ahead: int, loaded: LoadedModel
) -> None:
    served = small_engine(loaded, **FEW, steps_ahead=steps_ahead)
    num_flipped = 0
    for number, request in enumerate(requests()):
        (done,) = served.generate([request])
        assert_greedy(loaded, done)
        check_cache(served._scheduler._cache, served.runtime.table)
        num_flipped += flip(served, number)
    metrics = served.report().metrics
    assert num_flipped
    assert metrics.host_kv_hits == 0
    assert metrics.host_kv_refusals[CHANGED] > 10
    text = metrics.as_prometheus()
    assert f'rocm_attn_host_kv_refusals_total{{reason="changed"}} {metrics.host_kv_refusals[CHANGED]}' in text
    assert 'rocm_attn_host_kv_refusals_total{reason="other"} 0' in text


def test_records_of_other_tokens_are_misses_that_are_counted_and_texts_stay_right(loaded: LoadedModel) -> None:
    """All records are at the place of another one."""
    served = small_engine(loaded, **FEW)
    for request in requests():
        (done,) = served.generate([request])
        assert_greedy(loaded, done)
        slots = host(served)._memory._slots
        for key, slot in zip(list(slots), [*list(slots.values())[1:], *list(slots.values())[:1]], strict=True):
            slots[key] = slot
    metrics = served.report().metrics
    assert (metrics.host_kv_hits, metrics.host_kv_refusals[OTHER] > 10) == (0, True)


@pytest.mark.parametrize("guard", ["host_bytes", "host_lineage"])
def test_without_either_safeguard_texts_are_wrong(
    guard: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_attn.selection.build.guards_from_settings", lambda: Guards().without(guard))
    served = small_engine(loaded, **FEW)
    assert served.runtime.guards.off == (guard,)
    wrong = 0
    for request in requests():
        (done,) = served.generate([request])
        try:
            assert_greedy(loaded, done)
        except AssertionError:
            wrong += 1
        memory = host(served)._memory
        if guard == "host_bytes":
            for key in memory._slots:
                memory.at(key)[8 * HEAD_WORDS + 3 :: 4] ^= 0x80  # signs
        else:
            slots = memory._slots
            for key, slot in zip(list(slots), [*list(slots.values())[1:], *list(slots.values())[:1]], strict=True):
                slots[key] = slot
    assert wrong > 3


def test_little_host_memory_keeps_what_was_used_last(loaded: LoadedModel) -> None:
    record_bytes = HostPages.record_bytes(small_engine(loaded, **FEW).runtime)
    served = small_engine(loaded, **{**FEW, "host_kv_bytes": 10 * record_bytes + 7})
    for done in one_by_one(served, requests()):
        assert_greedy(loaded, done)
    memory = host(served)._memory
    assert memory.num_slots == len(memory) == 10
    with pytest.raises(NeverFits, match=f"{record_bytes - 1} bytes of host memory hold no page of {record_bytes}"):
        small_engine(loaded, **{**FEW, "host_kv_bytes": record_bytes - 1})


def test_tenants_do_not_find_each_others_pages_in_host_memory(loaded: LoadedModel) -> None:
    served = small_engine(loaded, **FEW)
    first, *others = requests(12)
    for salt, hits in (("one", 0), ("two", 0), ("one", 32)):
        (done,) = served.generate([replace(first, cache_salt=salt)])
        assert_greedy(loaded, done)
        assert done.cached_tokens == hits
        one_by_one(served, others)
    assert served.metrics.host_kv_hits >= 8


def test_a_page_that_is_not_known_to_be_right_does_not_go_to_host_memory(loaded: LoadedModel) -> None:
    """Pages run out right after a prompt, some steps before faults of its steps would be known."""
    served = small_engine(loaded, **FEW)
    request, *_ = requests()
    served.submit(replace(request, max_new_tokens=1))
    until = served._scheduler._cache
    while not until._pages:
        served.step()
    assert not served.has_work or until._right_until < max(page.step for page in until._pages.values())
    unknown = {key for key, page in until._pages.items() if page.step > until._right_until}
    until.make_room(0, 24)
    assert unknown.isdisjoint(host(served)._memory._slots)
    until_done(served)


@pytest.mark.fast(2)
@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", [seed for seed in range(32) if not seed & 2])
def test_every_output_of_random_worlds_is_that_of_dense_attention(seed: int, steps_ahead: int) -> None:
    """With faults of K and V, aborts, tenants, priorities and second turns, over few pages. Bits flip now and then.

    A seed with the second bit has windows.
    """
    world = World.plain(seed, 40, steps_ahead)
    run = Run(replace(world, options=replace(world.options, host_kv_bytes=40_000)))
    arrive, chooser = run._arrive_or_leave, random.Random(seed)

    def flipping() -> None:
        arrive()
        if chooser.random() < 0.08:
            flip(run.engine, chooser.randrange(1000))

    run._arrive_or_leave = flipping  # type: ignore[method-assign]
    metrics = run.run()
    assert metrics.host_kv_hits > 0
    assert metrics.host_kv_refusals.get(CHANGED, 0) > 0
    assert set(metrics.host_kv_refusals) == {CHANGED}


def test_what_cannot_move_is_refused_in_one_sentence(loaded: LoadedModel) -> None:
    for options, why in (
        ({"prefix_caching": False}, "host_kv_bytes is 4096 and prefix_caching is off"),
        ({"speculative": "eagle:seeded"}, "speculative is eagle:seeded, which keeps K and V of its own"),
        ({"speculative": "draft:small"}, "speculative is draft:small, which keeps K and V of its own"),
    ):
        with pytest.raises(BadSetting, match=why):
            EngineOptions(host_kv_bytes=4096, **options)
    with pytest.raises(BadSetting, match="host_kv_bytes is -1; it must be at least 0"):
        EngineOptions(host_kv_bytes=-1)
    with pytest.raises(Unsupported, match="recurrent layers do not move to host memory"):
        small_engine(tiny_model(base=RECURRENT), **{**FEW, "num_pages": 60})
    with pytest.raises(Unsupported, match="layers with a window have pages of their own"):
        small_engine(tiny_model(base=with_windows(CONFIG, 9, -1)), **{**FEW, "swa_pages": 20})

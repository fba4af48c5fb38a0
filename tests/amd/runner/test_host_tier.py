"""An engine whose prefix cache has host memory: texts are those without it, and no wrong page is ever used."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import NeverFits, Unsupported
from rocm_attn.integrations.host_pages import CHANGED, HostPages
from rocm_attn.paging.host_record import HEAD_WORDS
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.page_tier import NoTier
from rocm_serve.prefix_cache import CachedRow, PrefixCache
from rocm_serve.request import Completion, Request
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.engine_worlds import Run, World
from tests.amd.runner.serving import all_pages_are_free, tokens_of, until_done
from tests.amd.runner.serving import engine as small_engine
from tests.amd.runner.test_prefix_cache import STEPS_UNTIL_KNOWN, Pages, Row
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model, with_windows

# Pages of 4 tokens. A prompt has 8 or 9 of them, and the pool 24.
PAGE = 4
FEW: Mapping[str, Any] = {"num_pages": 25, "host_kv_bytes": 1 << 20}


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


def test_a_suspect_takes_no_page_from_host_memory(loaded: LoadedModel) -> None:
    served, asked = small_engine(loaded, **FEW), requests()
    one_by_one(served, asked)
    hits = served.metrics.host_kv_hits
    for request in asked[:6]:
        number = served.submit(request)
        served._scheduler.suspect(served._outputs[number].sequence)
        until_done(served)
        assert_greedy(loaded, served.completion(number))
    assert served.metrics.host_kv_hits == hits > 0


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


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("copy", ["_gather", "_scatter"])
def test_memory_that_runs_out_in_a_copy_leaves_the_engine_usable(
    copy: str, steps_ahead: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy: to host memory, or back"""
    served, plain = (small_engine(loaded, **{**FEW, **more}) for more in ({}, {"host_kv_bytes": 0}))
    asked, made, real = requests(), list[bool](), getattr(HostPages, copy)

    def copied(*given: Any) -> None:
        made.append(len(made) % 3 > 0)
        if not made[-1]:
            raise MemoryError
        real(*given)

    monkeypatch.setattr(HostPages, copy, copied)
    numbers = [served.submit(request) for request in asked]
    num_failed = 0
    while served.has_work:
        try:
            served.step()
        except MemoryError:
            num_failed += 1
        check_cache(served._scheduler._cache, served.runtime.table)
    assert num_failed == made.count(False) > 1
    assert tokens_of([served.completion(number) for number in numbers]) == tokens_of(plain.generate(asked))
    assert all_pages_are_free(served)


class Recorded(NoTier):
    """A tier that has the keys it was given, and no bytes. right: the pages of a call that come back, at most"""

    def __init__(self, right: int = 99) -> None:
        self.keys: list[bytes] = []
        self.right = right

    def found(self, key: bytes) -> bool:
        return key in self.keys

    def put(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        assert len(set(pages.tolist())) == len(keys)
        assert (pages > 0).all()
        self.keys += keys

    def restore(self, keys: Sequence[bytes], pages: Int32Array) -> int:
        assert len(pages) == len(keys)
        right = min(self.right, len(keys))
        self.keys = [key for key in self.keys if key not in keys[:right]]
        return right

    def clear(self) -> None:
        self.keys.clear()


def with_tier(right: int = 99) -> tuple[Pages, Recorded]:
    """A table of pages of 2 tokens, and its cache."""
    pages, tier = Pages(40), Recorded(right)
    pages.cache = PrefixCache(pages.table, STEPS_UNTIL_KNOWN, tier)
    return pages, tier


TOKENS = (1, 2, 3, 4, 5, 6, 7)


def test_only_pages_that_are_known_to_be_right_go_to_the_tier_and_the_end_of_a_chain_goes_first() -> None:
    pages, tier = with_tier()
    row, _ = pages.serve(TOKENS)
    pages.leave(row)
    pages.cache.make_room(0, 39)
    assert (len(pages.cache), tier.keys) == (0, [])
    row, _ = pages.serve(TOKENS)
    pages.leave(row)
    pages.idle_steps()
    pages.cache.make_room(0, 38)
    assert tier.keys == row.cached.keys[2:0:-1]
    pages.cache.make_room(0, 39)
    assert tier.keys == row.cached.keys[::-1]
    failing, _ = pages.serve((8, 9, 10))
    pages.idle_steps()
    pages.cache.forget_row(failing.cached)
    pages.leave(failing)
    assert len(tier.keys) == 3, "pages of a sequence that has failed do not go there"
    pages.cache.clear()
    assert not tier.keys


def restored(pages: Pages, tokens: tuple[int, ...]) -> tuple[Row, int]:
    """A row for tokens, and how many of its pages came from the tier."""
    cached = CachedRow()
    found = pages.cache.find(cached, tokens)
    row = Row(pages.cache.admit(cached, found), cached, tokens[: len(found) * 2], "")
    num = pages.cache.num_in_tier(cached, tokens)
    pages.table.reserve(row.number, (len(found) + num) * 2)
    right = pages.cache.restore(cached, row.number, num)
    row.tokens = tokens[: (len(found) + right) * 2]
    check_cache(pages.cache, pages.table)
    return row, right


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_row_gets_the_pages_that_come_back_and_others_find_them_at_once(right: int) -> None:
    pages, _ = with_tier(right)
    row, _ = pages.serve(TOKENS)
    pages.leave(row)
    pages.idle_steps()
    pages.cache.make_room(0, 38)
    row, num = restored(pages, TOKENS)
    assert num == min(right, 2), "the first page is still in the pool"
    pages.extend(row, TOKENS[len(row.tokens) :])
    check_cache(pages.cache, pages.table)
    assert pages.find(TOKENS) == 2 + 2 * num
    pages.idle_steps()
    assert pages.find(TOKENS) == 6
    pages.leave(row)
    assert pages.cache.num_idle(0) == 3


def test_a_page_of_the_tier_takes_the_place_of_one_that_is_not_known_to_be_right() -> None:
    """A suspect has computed it again, without looking it up."""
    pages, tier = with_tier()
    row, _ = pages.serve(TOKENS)
    pages.leave(row)
    pages.idle_steps()
    pages.cache.make_room(0, 39)
    again, found = pages.serve(TOKENS)
    assert (found, len(tier.keys), pages.find(TOKENS)) == (0, 3, 0)
    row, num = restored(pages, TOKENS)
    assert (num, pages.find(TOKENS)) == (3, 6)
    pages.cache.forget_unknown()
    assert pages.find(TOKENS) == 6
    for each in (again, row):
        pages.leave(each)
    check_cache(pages.cache, pages.table)
    assert pages.table.full.num_free_pages == 39 - 3
    assert pages.cache.num_idle(0) == 3


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
    with pytest.raises(Unsupported, match="recurrent layers do not move to host memory"):
        small_engine(tiny_model(base=RECURRENT), **{**FEW, "num_pages": 60})
    with pytest.raises(Unsupported, match="layers with a window have pages of their own"):
        small_engine(tiny_model(base=with_windows(CONFIG, 9, -1)), **{**FEW, "swa_pages": 20})


def test_host_memory_has_as_many_pages_as_fit_and_at_least_one(loaded: LoadedModel) -> None:
    record_bytes = HostPages.record_bytes(small_engine(loaded, **FEW).runtime)
    served = small_engine(loaded, **{**FEW, "host_kv_bytes": 10 * record_bytes + 7})
    assert host(served)._memory.num_slots == 10
    with pytest.raises(NeverFits, match=f"host_kv_bytes is {record_bytes - 1}, and a page takes {record_bytes} bytes"):
        small_engine(loaded, **{**FEW, "host_kv_bytes": record_bytes - 1})

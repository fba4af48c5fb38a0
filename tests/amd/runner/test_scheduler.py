"""The scheduler over random worlds, and over small ones that show one rule each."""

import itertools
import random
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.capture.step_times import NEVER, StepBudget
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.recurrence import Recurrence
from rocm_serve.appended import Picks
from rocm_serve.engine_runtime import prompt_sizes
from rocm_serve.request import Request
from rocm_serve.scheduled_step import PromptRoom
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.scheduler_world import (
    VOCAB,
    Drafter,
    World,
    draft_tokens,
    expected_tokens,
    no_drafts,
    right,
    wrong,
)

LAYER = Recurrence(num_heads=1, num_k_heads=1, k_dim=8, v_dim=8, dtype=torch.float32)

# Two letters: prompts often begin with the same ones.
prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=24).map(tuple),
    st.integers(1, 24).map(lambda length: (3,) * length),
)
requests = st.builds(
    Request,
    prompt_token_ids=prompts,
    max_new_tokens=st.integers(1, 20),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
    cache_salt=st.sampled_from(["", "", "tenant"]),
    prefix_caching=st.sampled_from([True, True, True, False]),
)


worlds = given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), requests), min_size=1, max_size=12),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 11), max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    max_batch_size=st.integers(1, 6),
    chunk=st.integers(1, 40),
    spare_pages=st.integers(0, 12),
    window_left=st.sampled_from([None, 0, 4, 7]),
    drafts_of=st.one_of(st.none(), st.integers(0, 1000)),
    ahead=st.booleans(),
    beside=st.integers(1, 40),
    doubles_after=st.sampled_from([1, 10, NEVER]),
    sizes=st.sampled_from([(), (3, 8, 13)]),
    keys=st.sampled_from([0, 256]),
    states=st.sampled_from([0, 1, 5]),
)


@worlds
@settings(max_examples=60)
def test_every_request_comes_to_what_it_would_alone(
    arrivals: list[tuple[int, Request]],
    aborts: dict[int, int],
    page_size: int,
    max_batch_size: int,
    chunk: int,
    spare_pages: int,
    window_left: int | None,
    drafts_of: int | None,
    ahead: bool,
    beside: int,
    doubles_after: int,
    sizes: tuple[int, ...],
    keys: int,
    states: int,
) -> None:
    """Random lengths and arrivals over few pages: nothing is lost, leaked, mixed up or starved.

    drafts_of: a seed; None: no drafts
    states:    that the cache keeps of recurrent layers; 0: there are no such layers
    """
    draft = no_drafts if drafts_of is None else draft_tokens(drafts_of, trees=not states)
    max_kv_len = 40
    num_pages = 1 + -(-max_kv_len // page_size) + spare_pages
    windows = () if window_left is None else (SpacePages(Space.SWA, num_pages, window_left=window_left),)
    world = World(
        *(page_size, num_pages, max_batch_size, chunk, max_kv_len, windows, draft, ahead),
        beside=beside,
        doubles_after=doubles_after,
        sizes=sizes,
        keys=keys,
        recurrent=RecurrentLayers([LAYER], kept=10, checkpoints=states, spacing=2 * page_size)
        if states
        else NO_RECURRENT_LAYERS,
    )
    late = [(sum(steps for steps, _ in arrivals[: n + 1]), n, request) for n, (_, request) in enumerate(arrivals)]
    for now in itertools.count():
        for _, number, request in (one for one in late if one[0] == now):
            world.add(number, request)
        unlucky = aborts.get(now)
        if unlucky in world.sequences and unlucky not in world.results:
            world.abort(unlucky)
        if world.scheduler.has_work:
            world.step()
            check_cache(world.scheduler._cache, world.table)
        elif now > late[-1][0]:
            break
        if not world.scheduler.has_work:
            world.read()  # an abort may have left it
        assert now < 10_000
    for number, (_, request) in enumerate(arrivals):
        tokens, reason = expected_tokens(request, max_kv_len)
        came_to, why = world.results[number]
        assert (came_to, why) == ((tokens[: len(came_to)], "abort") if why == "abort" else (tokens, reason))
    world.scheduler.forget_pages()
    assert all(pages.num_free_pages == pages.num_usable_pages for pages in world.table.spaces)
    assert world.table.num_free_rows == max_batch_size
    for step in world.steps:
        decodes = int((step.batch.q_len == 1).sum()) + len(step.drafts)
        assert step.batch.num_seqs <= max_batch_size
        assert step.batch.num_tokens <= max(chunk, decodes + 1)


@pytest.mark.nightly
@worlds
@settings(max_examples=1000)
def test_every_request_of_more_worlds_does(**world: Any) -> None:
    test_every_request_comes_to_what_it_would_alone.hypothesis.inner_test(**world)  # type: ignore[attr-defined]


def request(prompt_len: int, max_new_tokens: int = 5) -> Request:
    return Request(tuple(range(prompt_len)), max_new_tokens)


def world(*, num_pages: int = 65, chunk: int = 8, max_kv_len: int = 64) -> World:
    return World(page_size=4, num_pages=num_pages, max_batch_size=4, chunk=chunk, max_kv_len=max_kv_len)


def running(served: World) -> list[int]:
    """Numbers of the sequences in the last step."""
    return [sequence.number for sequence in served.steps[-1].sequences]


def q_len_of_steps(
    prompt_lens: Many[int], first: int, steps: int, *, chunk: int, beside: int, **more: Any
) -> list[list[int]]:
    """The new tokens of each sequence in some steps. The first request runs alone in the `first` ones."""
    served = World(4, 257, max_batch_size=4, chunk=chunk, max_kv_len=256, beside=beside, **more)
    for number, prompt_len in enumerate(prompt_lens):
        served.add(number, request(prompt_len, max_new_tokens=20))
        while number == 0 and len(served.steps) < first:
            served.step()
    while len(served.steps) < steps:
        served.step()
    return [step.batch.q_len.tolist() for step in served.steps]


def test_a_step_is_whole_until_a_sequence_decodes_and_then_prompts_get_what_they_may() -> None:
    assert q_len_of_steps([100], 0, 3, chunk=64, beside=6) == [[64], [36], [1]]
    assert q_len_of_steps([3, 20], 1, 5, chunk=64, beside=6) == [[3], [1, 6], [1, 6], [1, 6], [1, 2]]
    assert q_len_of_steps([3, 4, 20], 1, 3, chunk=64, beside=6) == [[3], [1, 4, 2], [1, 1, 6]]
    assert q_len_of_steps([3, 20], 1, 2, chunk=5, beside=6) == [[3], [1, 4]]


def test_a_prompt_gets_fewer_tokens_the_more_it_has_before_them() -> None:
    # after 0, 10, 19, 27 and 35: 12 x 60 / (60 + before + 12), rounded up
    steps = q_len_of_steps([3, 60], 1, 6, chunk=64, beside=12, doubles_after=60)
    assert steps[1:] == [[1, 10], [1, 9], [1, 8], [1, 8], [1, 7]]
    # a prompt that ends leaves less to the next one
    assert q_len_of_steps([3, 6, 30], 1, 2, chunk=64, beside=12, doubles_after=6)[1:] == [[1, 4]]


def test_a_prompt_that_goes_on_leaves_no_room_for_pads() -> None:
    steps = q_len_of_steps([3, 24], 1, 4, chunk=64, beside=15, sizes=(4, 8, 12, 20))
    assert steps[1:] == [[1, 11], [1, 13], [1, 1]]  # the step in which it ends has pads
    # a step beyond the largest size is not padded
    assert q_len_of_steps([3, 24], 1, 2, chunk=64, beside=15, sizes=(4, 8, 12))[1:] == [[1, 15]]


@given(st.integers(2, 2048), st.integers(1, 256), st.integers(1, 2048))
def test_a_prompt_that_goes_on_gets_half_of_its_tokens_at_least_whatever_its_step_is_padded_to(
    most: int, num_decoding: int, beside: int
) -> None:
    budget = StepBudget(256, 8192, (beside,), sizes=prompt_sizes(most, elements=1.0))
    got = PromptRoom.beside(num_decoding, 0, budget).take(9999, 0, 9999)
    assert beside <= 2 * got <= 2 * beside


def test_a_prompt_goes_on_by_a_token_however_far_it_is() -> None:
    assert q_len_of_steps([3, 200], 1, 9, chunk=64, beside=1, doubles_after=1, read_tokens=8)[1:] == [[1, 1]] * 8


@pytest.mark.parametrize("steps_of_others", [0, 3])
def test_a_long_cached_prefix_is_looked_up_in_steps_that_others_do_not_wait_for(steps_of_others: int) -> None:
    """A step computes 10 keys, and one for each token of the step before it; the prefix has 62 pages."""
    served = World(4, 257, max_batch_size=4, chunk=64, max_kv_len=256, keys=10)
    served.add(0, request(250))
    served_in_turn(served)
    served.scheduler.all_is_right()
    if steps_of_others:
        served.add(1, Request((700,), 40))
        served.step(steps_of_others)
    before = len(served.steps)
    served.add(2, request(250))
    while 2 not in running(served):
        served.step()
    of_steps = [step.batch.q_len.tolist() for step in served.steps[before:]]
    assert of_steps == ([*[[1]] * 5, [1, 2]] if steps_of_others else [[2]])


def test_decodes_run_even_where_they_exceed_the_chunk_and_a_prompt_still_moves() -> None:
    served = world(chunk=1)
    for number in range(3):
        served.add(number, request(1, max_new_tokens=30))
    served.step(3)
    served.add(3, request(3))
    served.step()
    assert served.steps[-1].batch.q_len.tolist() == [1, 1, 1, 1]
    assert served.steps[-1].num_picks == 3


@pytest.mark.parametrize("window_left", [None, 2**31 - 2])
def test_a_newcomer_waits_while_those_who_run_would_soon_need_its_pages(window_left: int | None) -> None:
    served = World(4, 1 + 8, 4, 64, 32)
    if window_left is not None:  # there are too few pages in its space
        served = World(4, 1 + 64, 4, 64, 32, (SpacePages(Space.SWA, 1 + 8, window_left=window_left),))
    served.add(0, Request(tuple(range(16)), 9))  # 4 pages now, 6 in the end
    served.add(1, Request(tuple(range(16, 32)), 9))  # the other 4 now
    served_in_turn(served)
    assert served.metrics.preemptions == 0


@pytest.mark.parametrize("prompt_len", range(1, 13))
def test_a_pool_made_for_all_of_them_serves_all_of_them_at_once(prompt_len: int) -> None:
    served = world(chunk=64, num_pages=1 + 4 * 3, max_kv_len=12)
    for number in range(4):
        served.add(number, request(prompt_len, max_new_tokens=13 - prompt_len))
    served_in_turn(served)
    assert {step.batch.num_seqs for step in served.steps} == {4}


def served_in_turn(served: World) -> list[int]:
    """Serves all; returns the numbers in the order in which they were first part of a step."""
    while served.scheduler.has_work:
        served.step()
    return list(dict.fromkeys(sequence.number for step in served.steps for sequence in step.sequences))


@pytest.mark.parametrize("short_of", ["places", "pages"])
def test_one_of_better_priority_takes_the_place_of_the_youngest_that_is_worse(short_of: str) -> None:
    served = (
        World(page_size=4, num_pages=65, max_batch_size=3, chunk=64, max_kv_len=64)
        if short_of == "places"
        else world(num_pages=1 + 15, chunk=64, max_kv_len=32)
    )
    for number, priority in enumerate([1, 2, 2]):
        served.add(number, Request((number, *range(14)), 8, priority=priority))
    served.step()
    assert running(served) == [0, 1, 2]
    served.add(3, Request((9, 8, 7, 6, 5), 4, priority=1))
    served.step()
    assert running(served) == [0, 1, 3], "the youngest of priority 2 has given way"
    served.add(4, Request((9, 9, 9, 9, 9), 4, priority=2))
    served.step()
    assert 4 not in running(served), "an equal one does not"
    served_in_turn(served)
    wanted = {n: expected_tokens(sequence.request, served.max_kv_len) for n, sequence in served.sequences.items()}
    assert served.results == wanted
    assert served.metrics.preemptions == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_none_gives_way_before_the_better_one_gets_tokens(ahead: bool) -> None:
    served = world(chunk=8)
    served.ahead = ahead
    for number in range(3):
        served.add(number, Request((number, 1), 20, priority=2))
    served.step()
    served.add(3, request(5))  # has all tokens that those which decode leave
    served.add(4, Request((4, 1), 2, priority=1))
    served.step()
    assert running(served) == [0, 1, 2, 3]
    served.step(1 + ahead)  # the one that gives way is read first
    assert running(served) == [3, 0, 1, 4]


def steps_beside_better_ones(priority_aging: int, most_steps: int) -> int:
    """Steps until one of priority 3 ends, while one of priority 0 comes in each step and fills the only place."""
    served = World(4, 65, max_batch_size=1, chunk=8, max_kv_len=64, priority_aging=priority_aging)
    served.add(0, Request((1, 2, 3), 4, priority=3))
    while 0 not in served.results and len(served.steps) < most_steps:
        served.add(len(served.sequences), Request((len(served.sequences) % VOCAB, 2), 1))
        served.step()
    if 0 in served.results:
        assert served.results[0] == expected_tokens(served.sequences[0].request, served.max_kv_len)
    return len(served.steps)


def test_a_worse_priority_beside_an_endless_stream_of_better_ones_ends_if_priorities_age() -> None:
    assert steps_beside_better_ones(0, most_steps=400) == 400, "without aging it waits as long as they come"
    ends = [steps_beside_better_ones(aging, most_steps=400) for aging in (5, 20, 60)]
    assert ends == sorted(set(ends))
    assert all(end <= (3 + 1) * aging + 4 for end, aging in zip(ends, (5, 20, 60), strict=True))
    assert ends == [steps_beside_better_ones(aging, most_steps=400) for aging in (5, 20, 60)], "no clock decides"


def test_none_gives_way_to_one_that_would_have_to_wait_all_the_same() -> None:
    served = world(num_pages=1 + 8, chunk=64, max_kv_len=32)
    served.add(0, Request(tuple(range(16)), 9))
    served.add(1, Request((7, 7, 7), 2, priority=1))
    served.step()
    assert running(served) == [0, 1]
    served.add(2, Request((*range(20), 1), 2))  # does not fit with the first, with or without the second
    served.step()
    assert running(served) == [0, 1]
    served_in_turn(served)
    assert served.metrics.preemptions == 0


@given(
    requests_of=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 8)), min_size=1, max_size=40),
    max_batch_size=st.integers(1, 5),
    spare_pages=st.integers(0, 6),
)
@settings(max_examples=60)
def test_preemptions_for_better_priorities_come_to_an_end(
    requests_of: list[tuple[int, int, int]], max_batch_size: int, spare_pages: int
) -> None:
    """One request arrives per step, in the worst order: each has at least as good a priority as those before it.

    The first of all is in every step. So it ends, and then the next one is the first: no livelock.
    """
    served = World(4, 1 + 8 + spare_pages, max_batch_size, chunk=6, max_kv_len=32)
    queue = sorted(requests_of, reverse=True)
    while queue or served.scheduler.has_work:
        if queue:
            priority, length, new = queue.pop(0)
            served.add(len(served.sequences), Request(tuple(range(length)), new, priority=priority))
        alive = [sequence for number, sequence in served.sequences.items() if number not in served.results]
        served.step()
        assert min(alive, key=lambda sequence: sequence.urgency).number in running(served)
    assert len(served.steps) <= sum(length + new for _, length, new in requests_of) * 4 + 4


@pytest.mark.parametrize("draft", [right(19), wrong(19)], ids=["right", "wrong"])
def test_drafts_never_take_the_pages_of_another_sequence(draft: Drafter) -> None:
    """The first ends before the second has grown much, so that there is room for both, but not for the drafts."""
    for drafted in (no_drafts, draft):
        served = World(page_size=1, num_pages=1 + 28, max_batch_size=2, chunk=64, max_kv_len=24, draft=drafted)
        served.add(0, Request(tuple(range(4)), 5))
        served.add(1, Request((7, 8, 9, 10), 21))
        served_in_turn(served)
        assert served.metrics.preemptions == 0
        assert served.results[1] == expected_tokens(served.sequences[1].request, 24)


def test_pages_that_hold_nothing_but_rejected_drafts_are_given_back_before_a_sequence_is() -> None:
    served = World(page_size=1, num_pages=1 + 32, max_batch_size=2, chunk=64, max_kv_len=24)
    served.draft = lambda token_ids, most: wrong(15)(token_ids, most) if token_ids[0] == 7 else None
    served.add(0, Request(tuple(range(4)), 14))
    served.add(1, Request((7, 8), 20))
    served.step(2)
    assert served.steps[-1].batch.q_len.tolist() == [1, 1 + 15]
    served.draft = no_drafts
    served_in_turn(served)
    assert served.metrics.preemptions == 0


def test_a_decoding_sequence_gets_its_pages_ahead_and_most_steps_change_nothing_in_the_table() -> None:
    served = World(page_size=4, num_pages=1 + 200, max_batch_size=2, chunk=64, max_kv_len=300)
    for number in range(2):
        served.add(number, Request((number, 1, 2), 120))
    changed = []
    while served.scheduler.has_work:
        served.step()
        pending = served.table.full.pending
        changed.append(bool(pending.cells))
        pending.cells.clear()
    assert len(changed) == 120
    assert sum(changed[:-1]) == 3, "for the prompts, for the first 64 tokens after them, and for the next ones"
    assert served.table.full.num_free_pages + served.metrics.cached_pages == 200
    for number, sequence in served.sequences.items():
        assert served.results[number] == expected_tokens(sequence.request, 300)


@pytest.mark.parametrize("draft", [no_drafts, right(9)])
def test_pages_that_were_taken_ahead_are_given_back_to_one_that_waits_for_them(draft: Drafter) -> None:
    served = World(page_size=4, num_pages=1 + 40, max_batch_size=2, chunk=256, max_kv_len=160, draft=draft)
    served.add(0, Request((1, 2, 3), 40))
    served.step(3)
    row = served.sequences[0].row
    held = served.table.num_held(row)
    assert held > 16
    served.add(1, Request(tuple(range(50)) * 2, 20))  # 25 pages now, which are not free
    served.step()
    assert running(served) == [0, 1]
    assert served.table.num_held(row) < held
    served_in_turn(served)
    assert served.metrics.preemptions == 0


@pytest.mark.parametrize("is_suspect", [False, True])
def test_no_sequence_gives_way_because_its_room_ahead_is_not_there(is_suspect: bool) -> None:
    """The cache holds the pages: it gives back the pages that a chunk needs, fewer than would be reserved ahead."""
    served = World(page_size=4, num_pages=1 + 220, max_batch_size=2, chunk=160, max_kv_len=400)
    chooser = random.Random(1)
    for number in range(8):
        served.add(number, Request(tuple(chooser.choices(range(VOCAB), k=130)), 2))
        served_in_turn(served)
    assert served.metrics.cached_pages > 200
    served.add(8, Request(tuple(chooser.choices(range(VOCAB), k=390)), 2))
    served.step()
    if is_suspect:
        served.scheduler.suspect(served.sequences[8])
    served_in_turn(served)
    assert served.metrics.preemptions == is_suspect, "the one that makes a suspect begin anew"
    assert served.results[8] == expected_tokens(served.sequences[8].request, 400)


def test_no_sequence_gives_way_for_room_ahead_that_is_a_page_of_many_tokens() -> None:
    served = World(page_size=64, num_pages=1 + 2, max_batch_size=2, chunk=128, max_kv_len=128)
    for number in range(2):
        served.add(number, Request((number,) * 60, 4))
    served_in_turn(served)
    assert served.metrics.preemptions == 0


def test_room_ahead_leaves_a_page_for_each_row_and_is_for_none_while_one_waits() -> None:
    served = world(num_pages=1 + 8, max_kv_len=32, chunk=64)
    served.add(0, request(16))
    served.step()
    rows, scheduler = np.array([served.sequences[0].row], np.int32), served.scheduler
    assert not scheduler.reserve_ahead(rows, np.array([32], np.int32))  # all four pages
    assert scheduler.reserve_ahead(rows, np.array([28], np.int32))
    scheduler._give_back_room()
    served.add(1, request(1))
    assert not scheduler.reserve_ahead(rows, np.array([28], np.int32))


def test_room_that_was_asked_for_ahead_is_given_back_to_one_that_waits() -> None:
    served = world(num_pages=1 + 8, max_kv_len=32, chunk=64)
    served.add(0, request(16))
    served.step()
    assert served.scheduler.reserve_ahead(np.array([served.sequences[0].row], np.int32), np.array([28], np.int32))
    served.add(1, request(8, 1))
    served.step()
    assert running(served) == [0, 1]


def test_pages_ahead_of_a_prompt_that_goes_on_are_given_back_too() -> None:
    served = World(page_size=4, num_pages=1 + 45, max_batch_size=2, chunk=16, max_kv_len=180)
    served.add(0, Request(tuple(range(40)), 100, prefix_caching=False))
    served.step(2)
    assert served.table.num_held(served.sequences[0].row) == 24, "32 tokens and 64 more"
    served.add(1, Request(tuple(range(50)) * 2, 20))  # 25 pages
    served.step()
    assert running(served) == [0, 1]


def test_pages_ahead_are_given_back_to_a_better_one_that_takes_a_place() -> None:
    served = World(page_size=4, num_pages=1 + 80, max_batch_size=2, chunk=256, max_kv_len=320)
    served.add(0, Request((1, 2, 3), 40, priority=-1))
    served.add(1, Request((4, 5, 6), 8))
    served.step(3)
    assert served.table.num_held(served.sequences[0].row) > 16
    served.add(2, Request(tuple(range(26)) * 10, 20, priority=-1))  # 65 pages
    served.step()
    assert running(served) == [0, 2]


def test_drafts_leave_the_prompts_that_run_all_of_the_chunk_and_those_that_wait_half_of_the_rest() -> None:
    served = world(chunk=12)
    served.draft = right(20)
    served.add(0, request(2, max_new_tokens=40))
    served.step(2)
    assert served.steps[-1].batch.q_len.tolist() == [12], "alone it may have all"
    served.add(1, Request(tuple(range(20, 40)), 3))
    served.step()
    assert served.steps[-1].batch.q_len.tolist() == [1 + 5, 6], "half of what a newcomer could take"
    served.step()
    assert served.steps[-1].batch.q_len.tolist() == [1, 11], "a prompt that runs goes first"


def test_a_sequence_that_ends_before_its_step_is_launched_takes_no_token() -> None:
    served = world()
    served.add(0, request(5))
    step = served.scheduler.next_step({})
    assert step is not None
    served.scheduler.drop(served.sequences[0])
    served.scheduler.launched(step)
    assert list(map(list, served.scheduler.finish_step(step, Picks([[7]], {})).token_ids)) == [[]]


def test_pages_of_a_sequence_that_has_failed_are_not_cached() -> None:
    served = world()
    served.add(0, request(8))
    served.step()
    served.scheduler.fail(served.sequences[0])
    served.scheduler.drop(served.sequences[0])  # one that has ended stays so
    assert served.metrics.cached_pages == 0


def test_a_large_pool_gives_back_a_few_hundred_cached_pages_at_a_time() -> None:
    """A 64th of its pages would be 1,250."""
    served = World(1, 80_001, max_batch_size=2, chunk=80_000, max_kv_len=80_000)
    served.add(0, request(79_990))
    served_in_turn(served)
    served.scheduler.all_is_right()
    served.add(1, Request((700,) * 100, 2))
    served.step()
    assert 0 < served.table.full.num_free_pages <= 256


def test_a_suspect_is_served_without_drafts() -> None:
    served = world(chunk=64)
    served.draft = right(4)
    served.add(0, request(5, max_new_tokens=20))
    served.step(2)
    assert served.steps[-1].drafts
    served.scheduler.suspect(served.sequences[0])
    served.step()
    assert not served.steps[-1].drafts
    served_in_turn(served)
    assert served.results[0] == expected_tokens(served.sequences[0].request, 64)


def test_a_suspect_that_waits_takes_the_only_place_and_is_read_before_it_goes_on() -> None:
    served = World(page_size=4, num_pages=65, max_batch_size=1, chunk=8, max_kv_len=64, ahead=True)
    for number in range(2):
        served.add(number, request(5))
    served.step()
    served.scheduler.suspect(served.sequences[1])
    assert served.scheduler.next_step() is None, "the place's tokens are not read"
    served.read()
    served.step()
    assert running(served) == [1]
    assert served.scheduler.next_step() is None
    served_in_turn(served)
    assert served.results == {n: expected_tokens(served.sequences[n].request, 64) for n in range(2)}

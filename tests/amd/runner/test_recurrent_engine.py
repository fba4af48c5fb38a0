"""An engine of a model with recurrent layers: where prompts begin, where their chunks end, and which states stay."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.errors import BadSetting, CapacityExceeded
from rocm_attn.paging.checkpoints import StateMemory, spacing_of
from rocm_attn.paging.state_pool import RecurrentLayers, slot_bytes
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation import engines
from rocm_serve.speculation.device_steps import FOLLOWING
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.serving import BASE
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model

# With chunks of 16 and pages of 4 tokens, states stay after multiples of 16 tokens.
OPTIONS = replace(BASE, state_checkpoints=20, num_pages=200)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(base=RECURRENT)


def engine(loaded: LoadedModel, **changes: Any) -> Engine:
    return Engine(loaded, replace(OPTIONS, **changes))


def prompt(first: int, length: int) -> tuple[int, ...]:
    """Tokens that differ from those of another `first` from the beginning on."""
    return tuple((first + 7 * place) % CONFIG.vocab_size for place in range(length))


def cached(served: Engine, *prompts: tuple[int, ...], new_tokens: int = 1) -> list[int]:
    """Serves prompts one after the other, with the text that dense attention has; returns their cached tokens."""
    found = []
    for each in prompts:
        (done,) = served.generate([Request(each, new_tokens)])
        assert_greedy(served._loaded, done)
        found.append(done.cached_tokens)
        check_cache(served._scheduler._cache, served.runtime.table)
    return found


def chunks(served: Engine, requests: Sequence[Request]) -> list[list[tuple[int, int, int]]]:
    """The request, first token and number of new tokens of each sequence of each step with prompts."""
    launched, steps = served._scheduler.launched, list[list[tuple[int, int, int]]]()

    def watched(step: ScheduledStep, *left_out: Any) -> None:
        starts, new = step.batch.start.tolist(), step.batch.q_len.tolist()
        steps.append([(each.number, *of) for each, *of in zip(step.sequences, starts, new, strict=True) if of[1] > 1])
        launched(step, *left_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served._scheduler, "launched", watched)
        for done in served.generate(requests):
            assert_greedy(served._loaded, done)
    return [step for step in steps if step]


def test_a_prompt_begins_after_the_last_state_of_its_beginning(loaded: LoadedModel) -> None:
    served = engine(loaded)
    first = prompt(0, 45)
    # 44 tokens lie in whole pages, and 32 of them before a state.
    assert cached(served, first, first, first[:33], first[:32], (*first[:30], 5, 6)) == [0, 32, 32, 16, 16]
    metrics = served.report().metrics
    assert (metrics.prefix_hits, metrics.prefix_lookups) == (96, 45 + 45 + 33 + 32 + 32)


def test_a_second_turn_begins_after_a_state_of_the_text(loaded: LoadedModel) -> None:
    served = engine(loaded)
    (done,) = served.generate([Request(prompt(0, 20), 30)])
    text = (*done.prompt_token_ids, *done.token_ids)
    # 49 tokens are stored: the last one is picked and not stored.
    assert cached(served, (*text, 1, 2, 3)) == [48]


def test_a_chunk_ends_at_the_last_state_and_other_prompts_get_the_rest(loaded: LoadedModel) -> None:
    served = engine(loaded, chunk=40, page_size=16)
    assert served.runtime.states.recurrent.spacing == 32
    steps = chunks(served, [Request(prompt(0, 37), 2), Request(prompt(1, 5), 2), Request(prompt(2, 30), 2)])
    # Request 0 ends a chunk after 32 tokens. Request 1 has its whole prompt in that step, and picks a token.
    assert steps[0] == [(1, 0, 5), (0, 0, 32), (2, 0, 3)]
    assert steps[1] == [(0, 32, 5), (2, 3, 27)]


def test_without_the_prefix_cache_chunks_end_anywhere(loaded: LoadedModel) -> None:
    for changes in ({"prefix_caching": False}, {"state_checkpoints": 0}):
        served = engine(loaded, chunk=40, page_size=16, **changes)
        assert chunks(served, [Request(prompt(0, 37), 2)]) == [[(0, 0, 37)]]
        assert served.report().metrics.prefix_lookups == 0
        assert served.runtime.states.recurrent.checkpoints == 0


def test_where_prompts_part_a_state_stays(loaded: LoadedModel) -> None:
    """The second prompt with these first tokens finds pages and no state there, and leaves one."""
    served = engine(loaded, chunk=23)
    assert served.runtime.states.recurrent.spacing == 20
    shared = prompt(0, 43)
    parting = [(*shared[:30], *prompt(first, 20)) for first in (50, 51, 52)]
    # The first one has chunks of 23, 17 and 3 tokens. The second one has 28 tokens in common pages with it.
    assert cached(served, shared, *parting, shared) == [0, 0, 20, 20, 40]


def test_with_one_state_the_last_prompt_has_it(loaded: LoadedModel) -> None:
    served = engine(loaded, state_checkpoints=1)
    one, other = prompt(0, 40), prompt(1, 40)
    assert cached(served, one, one, other, other, one, one) == [0, 32, 0, 32, 0, 32]


def test_a_state_that_a_text_has_passed_is_given_back_before_others(loaded: LoadedModel) -> None:
    """With two states, a long text keeps one for itself, however many it passes."""
    served = engine(loaded, state_checkpoints=2)
    one = prompt(0, 17)
    assert cached(served, one) == [0]
    (done,) = served.generate([Request(prompt(1, 5), 50)])
    assert cached(served, one) == [16]
    assert cached(served, (*done.prompt_token_ids, *done.token_ids, 1)) == [48]


def test_states_go_with_forgotten_pages(loaded: LoadedModel) -> None:
    served = engine(loaded)
    cached(served, prompt(0, 40), prompt(1, 40))
    assert served.runtime.table.kept.num_free_states < 20
    served.forget_prefixes()
    assert served.runtime.table.kept.num_free_states == 20
    assert cached(served, prompt(0, 40)) == [0]


def test_drafts_are_verified_in_steps_of_the_host(loaded: LoadedModel) -> None:
    served = engine(loaded, speculative="ngram", draft_tokens=3)
    assert served.runtime.states.recurrent.kept == 4
    said = served.report().speculative_steps
    assert (
        said == "planned by the host: the model has recurrent layers, whose states the host follows from step to step"
    )
    assert engine(tiny_model(), state_checkpoints=None, speculative="ngram").report().speculative_steps == FOLLOWING


def test_settings_that_do_not_fit_recurrent_layers_are_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSetting, match=r"topk is 2 and the model has recurrent layers.*use topk 1"):
        engine(loaded, speculative="ngram", topk=2)
    with pytest.raises(BadSetting, match="state_checkpoints is 20 and the model has no recurrent layers; leave it out"):
        engine(tiny_model())
    monkeypatch.setattr(engines, "load_model", lambda path, dtype, device: loaded)
    with pytest.raises(BadSetting, match=r"draft:small, a model with recurrent layers.* use a draft model without"):
        engine(loaded, speculative="draft:small")


@pytest.mark.parametrize("speculative", ["draft:small", "eagle:seeded"])
def test_states_are_kept_beside_a_model_that_drafts_and_has_none(
    speculative: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "load_model", lambda path, dtype, device: tiny_model())
    served = engine(loaded, speculative=speculative, draft_tokens=3)
    assert cached(served, prompt(0, 45), prompt(0, 45), new_tokens=9) == [0, 32]
    assert served.report().metrics.drafts > 0


def test_states_are_spaced_by_whole_pages_within_a_chunk() -> None:
    sizes = [(1, 512), (16, 512), (64, 512), (256, 512), (48, 512), (4, 23), (16, 9)]
    assert [spacing_of(*each) for each in sizes] == [64, 64, 64, 256, 48, 20, 16]


def test_kept_states_take_as_much_memory_as_pages_and_no_more_than_one_for_each_spacing(loaded: LoadedModel) -> None:
    layers = loaded.config.attention.recurrences(loaded.weights.dtype)
    slot = slot_bytes(RecurrentLayers(layers))
    for page_bytes in (slot // 32, slot // 2):  # a spacing has 8 pages: fewer bytes than a state, and more
        memory = StateMemory(RecurrentLayers(layers, spacing=64), 5, page_bytes, 8)
        for num_bytes in (0, slot, 100 * slot + 7):
            of_pages = memory.kv_bytes(num_bytes)
            num = memory.checkpoints(of_pages)
            assert num * slot <= of_pages
            assert num * 8 * page_bytes <= of_pages
            assert num_bytes - 2 * max(slot, 8 * page_bytes) - 2 < of_pages + num * slot <= num_bytes
        assert memory.of_rows == 5 * 2 * slot


@pytest.mark.parametrize(
    ("changes", "num_pages", "checkpoints"),
    [
        # 1,024 bytes for a page, and 1,792 for a state; a spacing has 4 pages, which take more.
        ({"num_pages": 41}, 41, 10),
        ({"kv_bytes": 10 * (4 * 1024 + 1792)}, 40, 10),
        ({"kv_bytes": 40 * 1024 + 5 * 1792, "state_checkpoints": 5}, 40, 5),
        ({"kv_bytes": 40 * 1024, "prefix_caching": False}, 40, 0),
    ],
)
def test_states_have_a_share_of_the_memory(
    changes: dict[str, Any], num_pages: int, checkpoints: int, loaded: LoadedModel
) -> None:
    options = EngineOptions(page_size=4, max_batch_size=8, chunk=16, graphs=False, max_kv_len=64)
    served = Engine(loaded, replace(options, **changes))
    report, states = served.report(), served.runtime.states
    assert slot_bytes(states.recurrent) == 1792
    assert (report.num_pages, report.checkpoints) == (num_pages, checkpoints)
    # Eight requests, the truth probe and the reserved row have two states each.
    assert report.state_bytes == states.num_bytes == (2 * 10 + checkpoints) * 1792
    assert "states 0.00 GiB" in report.memory_line()


def test_states_that_leave_no_memory_for_pages_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(CapacityExceeded, match=r"state_checkpoints is 20.*lower state_checkpoints, or leave it out"):
        engine(loaded, num_pages=None, kv_bytes=20 * 1792)

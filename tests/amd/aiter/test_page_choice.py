"""The page size is chosen for all layers and kinds of step together, before a pool is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rocm_attn import runtime
from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.page_choice import AUTO_PAGE_SIZE, PAGE_SIZES, choose_page_size
from rocm_attn.problem import Problem
from rocm_attn.providers.select import Selection, select
from rocm_attn.runner import engine
from rocm_attn.runner.engine import Engine, EngineOptions
from rocm_attn.target import Target, known_target
from tests.amd.aiter.serving import GFX942, latent_problem, plain_problem
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runner.test_engine import some_requests, tokens_of
from tests.amd.runner.tiny_model import tiny_model

GFX950 = known_target("gfx950")
WIDE = plain_problem(dims=(128, 128))
EIGHTY = plain_problem(dims=(80, 80))


def chooser(target: Target, provider: str = "auto", **unavailable: str) -> Callable[[Problem], Selection]:
    missing = {f"aiter.{name}": why for name, why in unavailable.items()}
    return lambda problem: select(problem, target, provider, unavailable=missing)


CASES = {
    "a plain model": ([WIDE] * 4, chooser(GFX942), 16),
    "windows beside full layers": ([WIDE, replace(WIDE, window_left=100)], chooser(GFX942), 16),
    "latent rows": ([latent_problem()] * 2, chooser(GFX950), 1),
    "two kernels are missing": ([WIDE], chooser(GFX942, paged_attention_ragged="x", mha_batch_prefill_func="x"), 16),
    "one kernel is left": (
        [WIDE],
        chooser(GFX942, unified_attention="x", paged_attention_ragged="x", flash_attn_varlen_func="x"),
        16,
    ),
    "nothing of AITER's": ([EIGHTY] * 3, chooser(GFX942), 16),
    "another arch": ([WIDE], chooser(known_target("sm_90")), 16),
    "torch": ([WIDE], chooser(known_target("cpu"), "torch"), 16),
}


@pytest.mark.parametrize(("problems", "choose", "expected"), CASES.values(), ids=CASES)
def test_the_page_size_with_the_best_kernels_is_chosen(
    problems: list[Problem], choose: Callable[[Problem], Selection], expected: int
) -> None:
    assert choose_page_size(problems, choose).page_size == expected


def test_the_layers_choose_together() -> None:
    """One layer in eight would rather have pages of 32; with eight of them it gets its way."""

    def only(page_size: int) -> dict[str, str]:
        return {} if page_size == 32 else {"aiter.unified_attention": "x", "aiter.paged_attention_ragged": "x"}

    def choose(problem: Problem) -> Selection:
        wants_32 = problem.head_dim == 256
        served = only(problem.page_size) if wants_32 else only(32 if problem.page_size == 16 else 16)
        return select(problem, GFX942, "auto", unavailable=served)

    picky, other = plain_problem(dims=(256, 256)), WIDE
    assert choose_page_size([picky] + [other] * 7, choose, (16, 32)).page_size == 16
    assert choose_page_size([picky] * 8 + [other], choose, (16, 32)).page_size == 32


def test_among_equals_the_first_page_size_is_taken() -> None:
    for sizes in (PAGE_SIZES, (64, 32, 16)):
        assert choose_page_size([EIGHTY], chooser(GFX942), sizes).page_size == sizes[0]


def test_what_each_page_size_came_to_is_said() -> None:
    choice = choose_page_size([latent_problem()] * 61, chooser(GFX942), (16, 1))
    assert choice.lines == (
        "pages of 16: some layers have no kernel",
        "pages of 1: aiter serves 244 of 244 kinds of step over 61 layers",
    )


def test_where_no_page_size_serves_the_reasons_of_each_are_given() -> None:
    with pytest.raises(Unsupported, match="no page size of 16, 1 has kernels for every layer") as caught:
        choose_page_size([latent_problem(160)], chooser(GFX942), (16, 1))
    assert any(reason.startswith("pages of 16: decode: aiter.mla_decode_fwd") for reason in caught.value.reasons)
    assert any(reason.startswith("pages of 1: extend: aiter.mla_prefill_fwd") for reason in caught.value.reasons)


def test_an_engine_chooses_its_page_size(aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_mi300(device: torch.device) -> Target:
        return GFX942

    for module in (runtime, engine):
        monkeypatch.setattr(module, "detect_target", on_mi300)
    loaded = tiny_model(dtype=torch.float16)
    options = EngineOptions(page_size=AUTO_PAGE_SIZE, max_batch_size=4, max_kv_len=64, graphs=False, provider="torch")
    chosen = Engine(loaded, options)
    assert chosen.report().page_size == 16
    fixed = Engine(loaded, replace(options, page_size=4))
    assert tokens_of(chosen.generate(some_requests(3))) == tokens_of(fixed.generate(some_requests(3)))


def test_a_page_size_of_an_engine_is_still_checked() -> None:
    with pytest.raises(BadSetting, match="page_size is 0"):
        EngineOptions(page_size=0)

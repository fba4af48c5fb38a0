"""Page size and layout are chosen for all layers and kinds of step together, before a pool is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.choices import AUTO
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection import build
from rocm_attn.selection.pages import choose_pages
from rocm_serve import engine_runtime
from rocm_serve.engine import Engine
from rocm_serve.options import EngineOptions
from tests.amd.aiter.serving import GFX942, latent_problem, plain_problem
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runner.serving import some_requests, tokens_of
from tests.amd.runner.tiny_model import tiny_model

GFX950 = known_target("gfx950")
WIDE = plain_problem(dims=(128, 128))
HEADS = plain_problem(heads=(16, 2), dims=(128, 128))
LINEAR = (PoolKind.SPLIT,)
EIGHTY = plain_problem(dims=(80, 80))


def chooser(target: Target, provider: str = "auto", **unavailable: str) -> Callable[[Problem], Selection]:
    missing = {f"aiter.{name}": why for name, why in unavailable.items()}
    return lambda problem: select(problem, target, provider, unavailable=missing)


CASES = {
    "a plain model": ([WIDE] * 4, chooser(GFX942), 16),
    "windows beside full layers": ([WIDE, replace(WIDE, window_left=100)], chooser(GFX942), 16),
    "latent rows": ([latent_problem()] * 2, chooser(GFX950), 1),
    "two kernels are missing": ([WIDE], chooser(GFX942, paged_attention_ragged="x", mha_batch_prefill_func="x"), 16),
    "kernels are missing, and those over vectorised pages come next": (
        [HEADS],
        chooser(GFX942, paged_attention_ragged="x", mha_batch_prefill_func="x"),
        16,
    ),
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
    assert choose_pages(problems, choose, pools=LINEAR).page_size == expected


def test_the_layers_choose_together() -> None:
    """One layer that prefers pages of 32 loses against seven others. Eight such layers win against one other."""

    def only(page_size: int) -> dict[str, str]:
        return {} if page_size == 32 else {"aiter.unified_attention": "x", "aiter.paged_attention_ragged": "x"}

    def choose(problem: Problem) -> Selection:
        wants_32 = problem.head_dim == 256
        served = only(problem.page_size) if wants_32 else only(32 if problem.page_size == 16 else 16)
        return select(problem, GFX942, "auto", unavailable=served)

    picky, other = plain_problem(dims=(256, 256)), WIDE
    assert choose_pages([picky] + [other] * 7, choose, (16, 32), LINEAR).page_size == 16
    assert choose_pages([picky] * 8 + [other], choose, (16, 32), LINEAR).page_size == 32


LINEAR_DECODE = {"paged_attention_ragged": "x", "unified_attention": "x"}


def test_vectorised_pages_are_taken_where_more_is_served_over_them() -> None:
    """Two functions that read linear pages are missing, so that Triton would serve decode."""
    choice = choose_pages([HEADS] * 3, chooser(GFX942, **LINEAR_DECODE))
    assert (choice.page_size, choice.pool) == (16, PoolKind.VECTORIZED)
    assert choice.describe() == "vectorised pages of 16 tokens"
    (problem, *_) = choice.problems([HEADS])
    assert problem == replace(HEADS, page_size=16, pool=PoolKind.VECTORIZED)
    served = chooser(GFX942, **LINEAR_DECODE)(problem)
    assert served.kernels[StepKind.DECODE].entry.name == "aiter.pa_decode_gluon"


@pytest.mark.parametrize(
    "changes",
    [{"custom_mask": True}, {"wants_lse": True}, {"head_dim": 80, "v_head_dim": 80}, {"dtype": torch.float32}],
    ids=str,
)
def test_linear_pages_stay_where_a_kind_of_step_has_no_kernel_over_others(changes: dict[str, Any]) -> None:
    choice = choose_pages([HEADS, replace(HEADS, **changes)], chooser(GFX942, **LINEAR_DECODE))
    assert choice.pool is PoolKind.SPLIT
    assert any(line.startswith("vectorised pages of 16: some layers") for line in choice.lines)


def test_latent_layers_keep_their_pool_beside_any_other() -> None:
    torch_alone = chooser(known_target("cpu"), "torch")
    choice = choose_pages([latent_problem(), HEADS], torch_alone, (16,), (PoolKind.VECTORIZED,))
    assert [p.pool for p in choice.problems([latent_problem(), HEADS])] == [PoolKind.LATENT, PoolKind.VECTORIZED]
    lines = choose_pages([latent_problem()], torch_alone).lines
    assert not any(line.startswith("vectorised") for line in lines)


def test_where_no_page_size_serves_the_reasons_of_each_are_given() -> None:
    with pytest.raises(Unsupported, match="no page size of 16, 1 has kernels for every layer") as caught:
        choose_pages([latent_problem(160)], chooser(GFX942), (16, 1))
    assert any(reason.startswith("pages of 16: decode: aiter.mla_decode_fwd") for reason in caught.value.reasons)
    assert any(reason.startswith("pages of 1: extend: aiter.mla_prefill_fwd") for reason in caught.value.reasons)


def test_an_engine_chooses_its_page_size(aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_mi300(device: torch.device) -> Target:
        return GFX942

    for module in (build, engine_runtime):
        monkeypatch.setattr(module, "detect_target", on_mi300)
    loaded = tiny_model(dtype=torch.float16)
    options = EngineOptions(page_size=AUTO, max_batch_size=4, max_kv_len=64, graphs=False, provider="torch")
    chosen = Engine(loaded, options)
    assert chosen.report().page_size == 16
    fixed = Engine(loaded, replace(options, page_size=4))
    assert tokens_of(chosen.generate(some_requests(3))) == tokens_of(fixed.generate(some_requests(3)))

"""The choice of kernels, the reasons that change it, and the messages about it.

Page size and layout are chosen for all layers and kinds of step together, before a pool is allocated.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.machine.choices import AUTO
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import Indexer, PoolKind, Problem
from rocm_attn.providers.contract import SMALLEST_POOL, PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection import build
from rocm_attn.selection import kernels as kernel_choice
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.selection.pages import choose_pages
from rocm_serve import engine_runtime
from rocm_serve.engine import Engine
from rocm_serve.options import EngineOptions
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, plain_problem
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runner.serving import some_requests, tokens_of
from tests.amd.runner.tiny_model import tiny_model

META = torch.device("meta")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    kernel_choice._warn_once.cache_clear()
    yield
    kernel_choice._warn_once.cache_clear()


def test_auto_takes_triton_for_the_kinds_of_step_that_aiter_does_not_serve() -> None:
    chosen = select(plain_problem(16, dims=(128, 128), wants_lse=True), GFX942, "auto")
    assert {kind.value: kernel.entry.name for kind, kernel in chosen.kernels.items()} == {
        "decode": "triton.decode",
        "extend": "aiter.mha_batch_prefill_func",
        "mixed": "aiter.mha_batch_prefill_func",
        "prefill": "aiter.flash_attn_varlen_func",
        "shared": "triton.shared_prefix",
    }
    assert chosen.provider == "auto"


def test_aiter_by_name_is_refused_for_what_it_does_not_serve_with_every_reason() -> None:
    with pytest.raises(Unsupported, match="serves decode steps of") as caught:
        select(plain_problem(16, dims=(128, 128), wants_lse=True), GFX942, "aiter")
    for kernel in ("paged_attention_ragged", "unified_attention"):
        assert f"decode: aiter.{kernel}: it returns no log-sum-exp" in caught.value.reasons


def test_what_fell_back_is_said_once_with_its_reason(aiter: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    problem = plain_problem(16, dims=(80, 80))
    with caplog.at_level(logging.WARNING, logger=kernel_choice.__name__):
        for _ in range(2):
            choose_kernels([problem], GFX942, "auto", SMALLEST_POOL, device=CPU)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("decode steps are served by triton.decode, not by AITER (aiter.paged_attention_ragged: ")
    assert "head_dim/v_head_dim 80/80 is not 64/64 or 128/128" in said[0]


def test_nothing_is_said_where_nothing_fell_back(aiter: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=kernel_choice.__name__):
        choose_kernels([plain_problem()], GFX942, "auto", SMALLEST_POOL, device=CPU)
        choose_kernels([plain_problem()], known_target("sm_90"), "auto", SMALLEST_POOL, device=META)
    assert caplog.records == []


def test_without_aiter_auto_says_so_and_takes_triton(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=kernel_choice.__name__):
        (chosen,) = choose_kernels([plain_problem()], GFX942, "auto", SMALLEST_POOL, device=CPU)
    assert chosen.provider == "triton"
    for record in caplog.records:
        assert record.getMessage().count("install the distribution amd-aiter") == 1
        assert record.getMessage().count(": ") == 1  # no other reason


# A pool whose K takes as many bytes as a limit, and one page less.
LIMITS = [
    ("aiter.paged_attention_ragged", StepKind.DECODE, 2**32),
]


@pytest.mark.parametrize(("kernel", "kind", "num_bytes"), LIMITS)
def test_a_pool_beyond_a_kernels_offsets_takes_another_kernel(kernel: str, kind: StepKind, num_bytes: int) -> None:
    problem = plain_problem(16, dims=(128, 128))
    num_pages = num_bytes // (16 * 2 * 128 * 2)
    for pages, expected in ((num_pages - 1, kernel), (num_pages, "aiter.unified_attention")):
        chosen = select(problem, GFX942, "aiter", pool=PoolSize(pages, 1024, 1))
        assert chosen.kernels[kind].entry.name == expected
    assert any(f"not {kernel}: K or V of a layer takes {num_bytes} bytes" in line for line in chosen.refusal_lines())


def test_a_workspace_beyond_the_budget_takes_another_kernel() -> None:
    problem = Problem(64, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=0.1)
    for num_seqs, expected in ((64, "aiter.paged_attention_ragged"), (256, "aiter.unified_attention")):
        chosen = select(problem, GFX942, "aiter", pool=PoolSize(100, 1 << 17, num_seqs))
        assert chosen.kernels[StepKind.DECODE].entry.name == expected
    assert any("its workspace for 256 sequences of 131072 tokens takes" in line for line in chosen.refusal_lines())


GFX950 = known_target("gfx950")
_BLOCKS = Indexer(2, 64, Indexing(scale=1.0, top=4, sets=2, rectified=False, unit_keys=32, last=1))
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
    "layers with an indexer of blocks": ([replace(WIDE, indexer=_BLOCKS)], chooser(known_target("cpu")), 16),
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

"""The choice of kernels, the reasons that change it, and the messages about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import SMALLEST_POOL, PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection import kernels as kernel_choice
from rocm_attn.selection.kernels import choose_kernels
from tests.amd.aiter.serving import CPU, GFX942, plain_problem
from tests.amd.aiter.stand_in import StandIn

META = torch.device("meta")


def names(selection: Selection) -> dict[str, str]:
    return {kind.value: kernel.entry.name for kind, kernel in selection.kernels.items()}


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    kernel_choice._warn_once.cache_clear()
    yield
    kernel_choice._warn_once.cache_clear()


def test_auto_takes_triton_for_the_kinds_of_step_that_aiter_does_not_serve() -> None:
    chosen = select(plain_problem(16, dims=(128, 128), wants_lse=True), GFX942, "auto")
    assert names(chosen) == {
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
    assert "install the distribution amd-aiter" in caplog.records[0].getMessage()


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
    assert any(f"not {kernel}: K or V of a layer takes {num_bytes} bytes" in line for line in chosen.lines())


def test_a_workspace_beyond_the_budget_takes_another_kernel() -> None:
    problem = Problem(64, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=0.1)
    for num_seqs, expected in ((64, "aiter.paged_attention_ragged"), (256, "aiter.unified_attention")):
        chosen = select(problem, GFX942, "aiter", pool=PoolSize(100, 1 << 17, num_seqs))
        assert chosen.kernels[StepKind.DECODE].entry.name == expected
    assert any("its workspace for 256 sequences of 131072 tokens takes" in line for line in chosen.lines())

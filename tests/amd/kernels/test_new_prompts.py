"""Steps of new prompts only have a kernel of their own on Hopper. A runtime is compared with float64 attention."""

from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import Problem
from rocm_attn.providers import triton_hopper
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonExtend
from rocm_attn.providers.triton_hopper import MIN_HEAD_DIM, TRITONS
from rocm_attn.providers.triton_later import hopper_launches
from tests.amd.kernels.gpus import IS_HOPPER
from tests.amd.runtime.token_stories import Story, Teller
from tests.amd.worlds.problems import small_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no other GPU has a kernel for prompts alone")]


def teller_of(problem: Problem, device: torch.device) -> Teller:
    """Stories of up to 1,024 tokens."""
    return Teller.of(
        device,
        "triton",
        problem,
        deterministic=False,
        max_kv_len=1024,
        max_tokens=2048,
        num_pages=2000,
        capture_tokens=(1,),
    )


def serve_prompts(teller: Teller, problem: Problem, q_len: Sequence[int]) -> None:
    """Serves a step of new prompts, and compares each with the reference. q_len: their tokens"""
    reported = [teller.begin(Story.random(problem, 1000, seed)) for seed in range(len(q_len))]
    teller.serve(list(zip(reported, q_len, strict=True)))
    for each in reported:
        teller.check_told(each)
        teller.free(each)


@pytest.mark.parametrize(
    ("page_size", "dtype", "heads", "dim", "sinks", "most_rows"),
    [
        (16, torch.bfloat16, (12, 4), 32, False, 128),
        (1, torch.float16, (8, 2), 64, True, 64),
        (4, torch.bfloat16, (32, 8), 72, False, 128),
        (16, torch.bfloat16, (6, 2), 80, False, 64),
        (16, torch.bfloat16, (32, 8), 128, False, 128),
        (8, torch.float16, (4, 4), 192, False, 64),
        (16, torch.bfloat16, (2, 1), 256, False, 32),
    ],
)
def test_short_prompts_are_served_by_whole_rows_and_long_ones_as_extend_steps_are(
    page_size: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    sinks: bool,
    most_rows: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = small_problem(
        page_size, dtype, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, v_head_dim=dim, has_sinks=sinks
    )
    is_hoppers = dim >= MIN_HEAD_DIM and Release.of(triton_version()) in TRITONS
    prefill = select(problem, detect_target(device), "triton").kernel(StepKind.PREFILL)
    assert prefill.entry.name == ("triton.hopper_prefill" if is_hoppers else "triton.prefill")
    launch = Mock(wraps=hopper_launches.launch_hopper_extend)
    monkeypatch.setattr(triton_hopper, "hopper_launches", SimpleNamespace(launch_hopper_extend=launch))
    teller = teller_of(problem, device)
    # Tiles of few rows, and of more. The last three, padded to 4 sequences, have larger tiles if many heads give the
    # whole GPU enough of them.
    lengths = ([3], [64], [2, 41, 71], [500, 100, 500])
    assert isinstance(prefill.bound, KernelByTokens)
    many = prefill.bound.of_shape(PaddedShape(StepKind.PREFILL, 4, sum(lengths[-1])))
    assert isinstance(many, TritonExtend)
    assert many.tiles.query_rows == most_rows
    for q_len in lengths:
        serve_prompts(teller, problem, q_len)
        assert launch.call_count == 0
    long = teller.begin(Story.random(problem, 1000, 9))
    teller.serve([(long, 700)])
    assert launch.call_count == is_hoppers
    # A step with tokens in the cache is no prefill.
    teller.serve([(long, 200)])
    assert launch.call_count == 2 * is_hoppers
    teller.check_told(long)


@pytest.mark.parametrize("window_left", [127, 600])
def test_prompts_of_layers_with_windows_equal_the_reference(window_left: int, device: torch.device) -> None:
    """Prompts of few tokens, of as many as fill the GPU, and of more than the window has keys."""
    problem = small_problem(16, torch.bfloat16, head_dim=64, v_head_dim=64, window_left=window_left)
    assert StepKind.PREFILL in select(problem, detect_target(device), "triton").kernels
    teller = teller_of(problem, device)
    for q_len in ([3], [64], [2, 41, 200], [300] * 6, [500, 100, 1000]):
        serve_prompts(teller, problem, q_len)

"""Extend takes tiles of few rows if a step's shape shows that its sequences have few new tokens."""

import itertools
from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.kernels.tuning.extend_tiles import extend_choices
from rocm_attn.kernels.tuning.tiles import ANY_ROWS
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import KernelByTokens, likely_q_len
from rocm_attn.providers.select import Selection
from tests.amd.graphs.small_models import Requests, Tiny
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

BF16 = torch.bfloat16
# Three sequences, one with many more new tokens than the mean, by which the tiles are chosen.
ONE_LONG = [2, 11, 2]


def by_tokens(selection: Selection, kind: StepKind) -> KernelByTokens:
    bound = selection.kernel(kind).bound
    assert isinstance(bound, KernelByTokens)
    return bound


def layers() -> list[Problem]:
    plain = small_problem(dtype=torch.float16)
    scored = replace(plain, has_sinks=True, has_alibi_slopes=True, logits_soft_cap=2.0)
    return [scored, replace(plain, window_left=7), replace(plain, custom_mask=True)]


@pytest.mark.parametrize("is_masked", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_sequence_with_more_tokens_than_its_steps_shape_says_is_served_right(
    is_masked: bool, kernel_device: torch.device
) -> None:
    world = World.build(layers()[: 2 + is_masked], kernel_device, "triton", num_pages=128)
    requests = [world.admit() for _ in ONE_LONG]
    world.step(requests, [5, 4, 3])
    visible = None
    if is_masked:
        sizes = [(new, request.kv_len + new) for request, new in zip(requests, ONE_LONG, strict=True)]
        visible = [torch.rand(size, generator=world.generator) < 0.5 for size in sizes]
    world.step(requests, ONE_LONG, visible=visible)
    shape = PaddedShape(StepKind.MASKED if is_masked else StepKind.EXTEND, 3, sum(ONE_LONG))
    for selection in world.runtime.selections[2 * is_masked :]:
        kernel = by_tokens(selection, shape.kind)
        assert kernel.of_shape(shape) is not kernel.other, "the step was to be one of few tokens a sequence"


@pytest.mark.nightly
def test_a_graph_of_short_sequences_serves_a_long_one(kernel_device: torch.device) -> None:
    """A replay has the tiles of its shape, for any lengths: it is bitwise the eager run, and from one graph."""
    tiny = Tiny.build(kernel_device, "triton", (4,), (16,))
    runner = StepRunner(tiny.runtime, tiny.forward, recorder_for(kernel_device))
    requests = Requests(tiny.runtime)
    requests.admit(4)
    runner.run(requests.batch([3, 20, 7, 5]))
    for q_len in ([4, 4, 4, 4], [2, 9, 2, 2], [2, 0, 12, 2], [4, 4, 4, 4]):
        batch = requests.batch(q_len)
        rows = runner.run(batch).clone()
        assert torch.equal(rows, runner.run_eagerly(batch))
    assert runner.counters.replays == 4, runner.counters


@pytest.mark.parametrize(
    ("shape", "q_len"),
    [
        (PaddedShape(StepKind.EXTEND, 64, 320), 5),
        (PaddedShape(StepKind.EXTEND, 64, 321), 6),
        (PaddedShape(StepKind.PREFILL, 2, 7), 4),
        (PaddedShape(StepKind.MASKED, 3, 9), 3),
        (PaddedShape(StepKind.MIXED, 64, 320), 320),
        (PaddedShape(StepKind.SHARED, 64, 64), 64),
    ],
)
def test_a_shape_tells_how_many_new_tokens_a_sequence_is_likely_to_have(shape: PaddedShape, q_len: int) -> None:
    assert likely_q_len(shape) == q_len


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942", "gfx950", "interpreter"])
def test_rows_of_a_problem_rise_to_one_that_serves_any(arch: str) -> None:
    for dim, gqa_ratio in itertools.product((16, 64, 80, 96, 128, 192, 256, 512), (1, 3, 4, 6, 8, 10, 16, 71)):
        *short, last = extend_choices(
            arch, gqa_ratio=gqa_ratio, num_kv_heads=1, head_dim=dim, v_head_dim=dim, dtype=BF16
        )
        assert last.max_rows == ANY_ROWS
        bounds = [row.max_rows for row in short]
        assert bounds == sorted(set(bounds))
        assert all(bound >= gqa_ratio for bound in bounds), "a bound that holds not even one token"

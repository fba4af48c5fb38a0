"""The judge passes right results, and no error that a kernel could make."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.problem import Problem
from rocm_lab.bench import judge
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.judge import ExpectedOutput
from rocm_lab.bench.step_data import StepData
from tests.amd.bench.layers import LATENT, LAYER, one_step

PROBLEMS = {
    "plain": LAYER,
    "window, cap, sinks": replace(LAYER, window_left=5, logits_soft_cap=3.0, has_sinks=True),
    "bfloat16": replace(LAYER, dtype=torch.bfloat16),
    "latent": LATENT,
    "chunks": replace(LAYER, chunk=8),
    "images": replace(LAYER, custom_mask=True),
    "images in a window": replace(LAYER, custom_mask=True, window_left=70),
    "later keys": replace(LAYER, window_right=-1),
}
BATCHES = ("3d40", "2x7+30", "2d9+1x12+4", "1d9+2x330+12")


def output_of(data: StepData) -> Tensor:
    """Returns the torch provider's output."""
    launch = OwnProvider("torch").prepare(data)
    launch.run()
    return launch.out()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_right_output_passes(batch: str, problem: Problem) -> None:
    data = one_step(batch, problem)
    verdict = ExpectedOutput.of(data).judge(output_of(data))
    assert verdict.is_right, verdict
    assert verdict.compared == data.batch.num_tokens
    assert 0 <= verdict.part <= 1


def one_token_lost(out: Tensor) -> Tensor:
    wrong = out.clone()
    wrong[-1] = 0
    return wrong


def one_nan(out: Tensor) -> Tensor:
    wrong = out.clone()
    wrong[0, 0, 0] = float("nan")
    return wrong


@pytest.mark.parametrize(
    "spoil", [one_token_lost, one_nan, lambda out: out.flip(1), lambda out: out * 1.01, lambda out: out[:-1]]
)
def test_a_spoilt_output_does_not_pass(spoil: Callable[[Tensor], Tensor]) -> None:
    data = one_step("3d40")
    assert not ExpectedOutput.of(data).judge(spoil(output_of(data))).is_right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lost_page_of_a_long_sequence_does_not_pass(dtype: torch.dtype) -> None:
    """The mean of 4,096 values is small, and so is the contribution of one page."""
    data = one_step("1d4k", replace(LAYER, dtype=dtype))
    truth = ExpectedOutput.of(data)
    data.step.table[0, 100] = data.step.table[0, 101]
    assert not truth.judge(output_of(data)).is_right


def test_a_first_token_may_lie_as_far_off_as_its_own_size_allows_and_a_last_one_no_further() -> None:
    """A value is read by the first token whole, and by the last one as a part of a small mean."""
    data = one_step("1x300", replace(LAYER, dtype=torch.bfloat16))
    truth = ExpectedOutput.of(data)
    out = torch.cat([sample.wanted for sample in truth.samples])
    rounding = 2.0**-7 * out[0].square().mean(-1).sqrt()
    smallest = out.abs().argmin(-1)
    first, last = out.clone(), out.clone()
    first[0].scatter_add_(-1, smallest[0][:, None], rounding[:, None])
    assert truth.judge(first).is_right
    last[-1].scatter_add_(-1, smallest[-1][:, None], rounding[:, None])
    assert not truth.judge(last).is_right


def test_of_a_large_step_the_first_middle_and_last_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_SCORES", 4 * 60 * 5)
    data = one_step("1x50+10")
    truth = ExpectedOutput.of(data)
    assert [(sample.begin, len(sample.wanted)) for sample in truth.samples] == [(0, 5), (22, 5), (45, 5)]
    out = output_of(data)
    assert truth.judge(out).is_right
    out[47] += 1
    assert not truth.judge(out).is_right


def test_blocks_that_would_overlap_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_SCORES", 4 * 20 * 6)
    samples = ExpectedOutput.of(one_step("1x12+8")).samples
    tokens = [token for sample in samples for token in range(sample.begin, sample.begin + len(sample.wanted))]
    assert tokens == list(range(12))

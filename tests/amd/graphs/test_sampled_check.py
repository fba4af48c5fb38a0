"""Sampled verification: right steps pass, wrong graphs and wrong layers are counted, results stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rocm_attn.capture_check import NO_CHECK
from rocm_attn.graphs import recorder_for
from rocm_attn.sampled_check import LayerTap, SampledCheck, SampledCounters
from rocm_attn.step_runner import StepRunner
from rocm_attn.steps import LayerCalls
from tests.amd.graphs.tiny import SERVED, Tiny, counts_on_the_host, same, serve
from tests.amd.runtime.stepping import providers

pytestmark = pytest.mark.parametrize("provider", providers())


class OffByALittle(LayerTap):
    """A runtime whose attention is wrong in one layer."""

    def __init__(self, layers: LayerCalls, wrong_layer: int) -> None:
        super().__init__(layers)
        self._wrong_layer = wrong_layer

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        super().attend(layer, q, out, lse)
        if layer == self._wrong_layer:
            out += 0.01


def checked(tiny: Tiny, runner: StepRunner, tap: LayerTap, every: int = 1) -> SampledCheck:
    """A sampled check of a tiny model."""
    return SampledCheck(runner, tiny.runtime, [tiny.problem, tiny.problem], tap, every=every)


@pytest.mark.parametrize("graphs", [False, True])
def test_right_steps_pass_and_stay_what_they_are(graphs: bool, provider: str, device: torch.device) -> None:
    served = [*SERVED, [3, 9], [1, 4, 1], [0, 2], []]
    outs = []
    for sampled in (False, True):
        tiny = Tiny.build(device, provider, [4], tokens=(8,))
        tiny.layers = tap = LayerTap(tiny.runtime)
        runner = StepRunner(tiny.runtime, tiny.forward, recorder_for(tiny.runtime.device) if graphs else None)
        check = checked(tiny, runner, tap)
        outs.append(serve(check if sampled else runner, tiny.runtime, served))
        assert check.counters == SampledCounters(len(served) if sampled else 0, 0, 0, "")
        assert runner.counters.steps == len(served)
        assert (runner.counters.replays > 0) == graphs
    assert same(*outs)


def test_one_step_in_so_many_is_looked_at(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider)
    tiny.layers = tap = LayerTap(tiny.runtime)
    check = checked(tiny, StepRunner(tiny.runtime, tiny.forward, None), tap, every=3)
    serve(check, tiny.runtime)
    assert check.counters.samples == len(SERVED) // 3


def test_a_graph_that_went_wrong_is_counted(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4])
    tiny.layers = tap = LayerTap(tiny.runtime)
    forward = counts_on_the_host(tiny)
    runner = StepRunner(tiny.runtime, forward, recorder_for(tiny.runtime.device), check=NO_CHECK)
    check = checked(tiny, runner, tap)
    serve(check, tiny.runtime)
    counters = check.counters
    # Recorded for three sequences: wrong for the two steps of two and the one of one.
    assert (counters.samples, counters.rows_differ, counters.attention_differs) == (len(SERVED), 3, 0)
    assert "rows [0, 1] of a step of 2 sequences" in counters.last


@pytest.mark.parametrize("wrong_layer", [0, 1])
def test_a_layer_that_went_wrong_is_counted(wrong_layer: int, provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider)
    tiny.layers = tap = LayerTap(OffByALittle(tiny.runtime, wrong_layer))
    check = checked(tiny, StepRunner(tiny.runtime, tiny.forward, None), tap)
    serve(check, tiny.runtime)
    counters = check.counters
    # One of two layers is looked at in each step.
    assert 0 < counters.attention_differs < len(SERVED)
    assert counters.rows_differ == 0
    assert f"layer {wrong_layer} of sequences" in counters.last

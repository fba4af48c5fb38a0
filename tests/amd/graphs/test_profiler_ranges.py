"""Ranges around steps and layers: properly nested, closed by exceptions, and without influence on results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, WrongState
from rocm_attn.watch.profiler_ranges import RangedLayers, RangedSteps, device_ranges
from tests.amd.graphs.small_models import Tiny, same, serve


class Timeline:
    """Records ranges; entries are (depth, name)."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []
        self.depth = 0

    def push(self, name: str) -> None:
        self.entries.append((self.depth, name))
        self.depth += 1

    def pop(self) -> None:
        assert self.depth > 0
        self.depth -= 1


def test_a_step_and_its_layers_are_ranges(graphs: bool, provider: str, device: torch.device) -> None:
    outs, timeline = [], Timeline()
    for ranged in (False, True):
        tiny = Tiny.build(device, provider, [4], layers=2)
        runner = tiny.runner(graphs=graphs)
        if ranged:
            tiny.around = lambda layers: RangedLayers(layers, timeline)
        runner.capture_all()
        timeline.entries.clear()
        outs.append(serve(RangedSteps(runner, timeline) if ranged else runner, tiny.runtime, [[3, 2], [1, 1]]))
    layers = [(1, f"layer {layer}: {what}") for layer in (0, 1) for what in ("store", "attend")]
    decode = (0, "step: 2 sequences, 2 tokens")
    # Python does not run the layers of a replayed step.
    assert timeline.entries == [(0, "step: 2 sequences, 5 tokens"), *layers, decode, *([] if graphs else layers)]
    assert timeline.depth == 0
    assert same(*outs)


def test_an_exception_closes_its_ranges(device: torch.device) -> None:
    tiny, timeline = Tiny.build(device, "torch"), Timeline()
    one = np.ones(1, np.int32)
    with pytest.raises(BadBatch):
        RangedSteps(tiny.runner(graphs=False), timeline).run(StepBatch(one, one, one, NO_TOKEN_IDS))
    step = tiny.runtime.step(StepBatch([], [], [], NO_TOKEN_IDS)).parts[0]
    tiny.runtime.end_step()
    layers = RangedLayers(step.layers, timeline)
    for call in (layers.store, layers.attend):
        with pytest.raises(WrongState):
            call(0, torch.empty(0), torch.empty(0))
    assert (timeline.depth, len(timeline.entries)) == (0, 3)


def test_ranges_of_the_device_need_a_torch_that_has_them() -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(BadSetting, match="use a build for ROCm or CUDA"):
            device_ranges()
    else:
        ranges = device_ranges()
        ranges.push("a range")
        ranges.pop()

"""Errors of a real recording are errors of the fake one too, with equal results; the sound twins are right on both."""

from __future__ import annotations

import pytest
import torch

from tests.amd.hip_graphs.broken_fixtures import SCENARIOS, Scenario
from tests.amd.hip_graphs.recorders import Lab

each_kind = pytest.mark.parametrize("kind", SCENARIOS, ids=lambda kind: kind.__name__)


@each_kind
def test_a_broken_function_replays_the_stale_answer(lab: Lab, kind: type[Scenario]) -> None:
    scenario = kind(lab.device, is_sound=False)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    scenario.change()
    recording.replay()
    assert torch.equal(out, scenario.stale())
    assert not torch.equal(out, scenario.wanted())


@each_kind
def test_its_sound_twin_replays_the_right_answer(lab: Lab, kind: type[Scenario]) -> None:
    scenario = kind(lab.device, is_sound=True)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    assert not torch.equal(out, scenario.wanted())  # only the change makes a difference
    scenario.change()
    for _ in range(2):
        recording.replay()
        assert torch.equal(out, scenario.wanted())

"""Errors of a real recording are errors of the fake one too, with equal results; the sound twins are right on both."""

from __future__ import annotations

import pytest
import torch

from tests.amd.hip_graphs.broken_fixtures import BROKEN_AND_SOUND, Broken, Scenario
from tests.amd.hip_graphs.recorders import Lab

BROKEN = [broken for broken, _ in BROKEN_AND_SOUND]
SOUND = [sound for _, sound in BROKEN_AND_SOUND]


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_function_replays_the_stale_answer(lab: Lab, kind: type[Broken]) -> None:
    scenario = kind(lab.device)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    scenario.change()
    recording.replay()
    assert torch.equal(out, scenario.stale())
    assert not torch.equal(out, scenario.wanted())


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_its_sound_twin_replays_the_right_answer(lab: Lab, kind: type[Scenario]) -> None:
    scenario = kind(lab.device)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    assert not torch.equal(out, scenario.wanted())  # only the change makes a difference
    scenario.change()
    recording.replay()
    assert torch.equal(out, scenario.wanted())
    recording.replay()
    assert torch.equal(out, scenario.wanted())

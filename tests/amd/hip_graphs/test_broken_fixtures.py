"""Errors of a real recording are errors of the fake one too, with equal results; the sound twins are right on both."""

from __future__ import annotations

import pytest
import torch

from tests.amd.hip_graphs.broken_fixtures import SCENARIOS, Scenario
from tests.amd.hip_graphs.recorders import Lab


@pytest.mark.parametrize("is_sound", [False, True], ids=["broken", "sound"])
@pytest.mark.parametrize("kind", SCENARIOS, ids=lambda kind: kind.__name__)
def test_a_broken_function_replays_the_stale_answer_and_its_sound_twin_the_right_one(
    lab: Lab, kind: type[Scenario], is_sound: bool
) -> None:
    scenario, sound = kind(lab.device, is_sound=is_sound), kind(lab.device, is_sound=True)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    stale = scenario.stale(sound.step())
    scenario.change()
    sound.change()
    recording.replay()
    right = sound.step()
    assert not torch.equal(right, stale)  # only the change makes a difference
    assert torch.equal(out, right if is_sound else stale)

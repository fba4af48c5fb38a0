"""Counters of energy: what files say, and why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_attn.bench import energy


def test_hwmon_counts_microjoules_of_the_card_that_is_asked_for(tmp_path: Path) -> None:
    for card, microjoules in (("card0", 1_000_000), ("card1", 2_500_000)):
        folder = tmp_path / card / "device" / "hwmon" / "hwmon3"
        folder.mkdir(parents=True)
        (folder / "energy1_input").write_text(f"{microjoules}\n")
    meter = energy._hwmon(1, tmp_path)
    assert meter.joules() == 2.5
    assert "card1" in meter.source
    assert not meter.why_not
    with pytest.raises(energy._NoCounter, match="has 2 cards with energy1_input"):
        energy._hwmon(2, tmp_path)


def test_powercap_counts_a_package(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.write_text("7000000\n")
    meter = energy._powercap(tmp_path)
    counter.write_text("9000000\n")
    assert meter.joules() == 9.0


def test_a_device_without_a_counter_says_why_and_counts_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> energy.EnergyMeter:
        return real(Path("/nowhere"))

    real = energy._powercap
    monkeypatch.setattr(energy, "_powercap", missing)
    meter = energy.meter_of(torch.device("cpu"))
    assert meter.why_not == "energy is not counted: /nowhere has no package with energy_uj"
    assert meter.joules() != meter.joules()
    assert meter.mhz() != meter.mhz()

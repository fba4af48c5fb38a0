"""Energy counters: the values of their files, and the reasons for a missing counter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from rocm_lab.bench import energy

# Two GPUs; the first one on the bus is the second card.
BUSY, OTHER = "0000:c1:00.0", "0000:26:00.0"


def test_hwmon_counts_microjoules_of_the_card_that_is_asked_for(tmp_path: Path) -> None:
    drm = tmp_path / "drm"
    for card, address, microjoules in (("card10", BUSY, 2_500_000), ("card2", OTHER, 1_000_000)):
        folder = tmp_path / "pci" / address / "hwmon" / "hwmon3"
        folder.mkdir(parents=True)
        (folder / "energy1_input").write_text(f"{microjoules}\n")
        (drm / card).mkdir(parents=True)
        (drm / card / "device").symlink_to(tmp_path / "pci" / address)
    meter = energy._hwmon(BUSY, drm)
    assert meter.joules() == 2.5
    assert "card10" in meter.source
    assert not meter.why_not
    assert energy._hwmon(OTHER, drm).joules() == 1.0
    with pytest.raises(energy._NoCounter, match=r"no card at 0000:07:00\.0 with energy1_input"):
        energy._hwmon("0000:07:00.0", drm)


def test_amd_smi_counts_the_gpu_at_the_address_of_torchs_and_not_the_one_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {BUSY: 4e6, OTHER: 1e6}
    smi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [OTHER, BUSY],
        amdsmi_get_gpu_device_bdf=str.upper,
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": counts[handle], "counter_resolution": 2.0},
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2100},
        AmdSmiClkType=SimpleNamespace(GFX=0),
    )
    monkeypatch.setitem(sys.modules, "amdsmi", cast("ModuleType", smi))
    # The address that torch reports for its first device if HIP_VISIBLE_DEVICES hides the other one.
    address = energy._pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0))
    meter = energy._amd(address)
    assert (address, meter.joules(), meter.mhz()) == (BUSY, 8.0, 2100.0)
    with pytest.raises(energy._NoCounter, match=r"and not 0000:07:00\.0"):
        energy._amd("0000:07:00.0")


def test_powercap_counts_a_package(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.write_text("7000000\n")
    meter = energy._powercap(tmp_path)
    counter.write_text("9000000\n")
    assert meter.joules() == 9.0


def test_a_library_that_fails_costs_the_counter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> energy.EnergyMeter:
        raise RuntimeError("the driver is not loaded")

    monkeypatch.setattr(energy, "_powercap", fails)
    assert energy.meter_of(torch.device("cpu")).why_not == "energy is not counted: the driver is not loaded"


def test_a_device_without_a_counter_says_why_and_counts_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> energy.EnergyMeter:
        return real(Path("/nowhere"))

    real = energy._powercap
    monkeypatch.setattr(energy, "_powercap", missing)
    meter = energy.meter_of(torch.device("cpu"))
    assert meter.why_not == "energy is not counted: /nowhere has no package with energy_uj"
    assert meter.joules() != meter.joules()
    assert meter.mhz() != meter.mhz()

"""Energy counters: the values that they have, and the reasons for a missing counter."""

import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from rocm_lab.bench import energy

# Two GPUs; the first one on the bus is the second card.
BUSY, OTHER = "0000:c1:00.0", "0000:26:00.0"


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


def test_a_counter_that_fails_costs_the_counter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert "amdsmi" in energy.meter_of(torch.device("cuda")).why_not


def test_a_device_without_a_counter_says_why_and_counts_nan() -> None:
    meter = energy.meter_of(torch.device("cpu"))
    assert meter.why_not == "energy is not counted: only a GPU's is read"
    assert meter.joules() != meter.joules()
    assert meter.mhz() != meter.mhz()

"""A GPU's energy and clock: NVIDIA's by NVML, AMD's by AMD SMI."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NOT_COUNTED = "energy is not counted: "
_NVML_CLOCK_SM = 1


def _nothing() -> float:
    return float("nan")


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Joules since a fixed moment, and the present clock.

    joules:  reads the counter, which GPUs update every 20 to 100 ms
    source:  the counter, in words
    why_not: the reason why nothing is counted; empty if something is
    mhz:     reads the clock of the compute units; NaN if it is unknown
    """

    joules: Callable[[], float]
    source: str
    why_not: str = ""
    mhz: Callable[[], float] = _nothing


def meter_of(device: torch.device) -> EnergyMeter:
    """Returns the counter of a device. If there is none, its why_not has the reason."""
    try:
        if device.type != "cuda":
            raise _NoCounter("only a GPU's is read")
        # Not above: processes that send requests to a server need no torch, whose import takes them a second.
        import torch

        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is None:
            return _nvml(f"GPU-{properties.uuid}")
        return _amd(_pci_address(properties))
    # AMD SMI raises its own errors. Times must not be lost because a counter fails.
    except Exception as error:
        return EnergyMeter(_nothing, "", f"{_NOT_COUNTED}{error}")


class _NoCounter(Exception):
    """A device has no counter, or this process may not read it."""


def _pci_address(properties: Any) -> str:
    """Returns the PCI address. Device numbers do not identify it: HIP_VISIBLE_DEVICES hides some only from torch."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _nvml(uuid: str) -> EnergyMeter:
    """Reads NVIDIA's management library, which comes with the driver: millijoules since the driver was loaded."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()

    def check(code: int) -> None:
        if code:
            library.nvmlErrorString.restype = ctypes.c_char_p
            raise _NoCounter(f"NVML says {library.nvmlErrorString(code).decode()!r} of {uuid}")

    check(library.nvmlInit_v2())
    check(library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)))

    def joules() -> float:
        millijoules = ctypes.c_ulonglong()
        check(library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    def mhz() -> float:
        found = ctypes.c_uint()
        check(library.nvmlDeviceGetClockInfo(handle, _NVML_CLOCK_SM, ctypes.byref(found)))
        return float(found.value)

    joules(), mhz()
    return EnergyMeter(joules, "NVML total energy", mhz=mhz)


def _amd(address: str) -> EnergyMeter:
    """Reads AMD SMI's Python package, which ROCm brings. address: on the PCI bus"""
    smi: Any = importlib.import_module("amdsmi")
    smi.amdsmi_init()
    handles = {smi.amdsmi_get_gpu_device_bdf(each).lower(): each for each in smi.amdsmi_get_processor_handles()}
    if address not in handles:
        raise _NoCounter(f"AMD SMI lists {', '.join(handles) or 'no GPU'}, and not {address}")
    handle = handles[address]

    def joules() -> float:
        found = smi.amdsmi_get_energy_count(handle)
        count = found.get("energy_accumulator", found.get("power"))
        return float(count) * float(found["counter_resolution"]) / 1e6

    def mhz() -> float:
        return float(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)["clk"])

    joules(), mhz()
    return EnergyMeter(joules, "AMD SMI energy count", mhz=mhz)

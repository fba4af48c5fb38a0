"""The machine is the one that the report is about, and nothing is known to be wrong with it."""

import os

import pytest
import torch
from triton.runtime import driver

from rocm_attn.cli.doctor.finding import Severity
from rocm_attn.cli.doctor.reading import read_machine
from rocm_attn.cli.doctor.registry import diagnose
from rocm_attn.machine.target import KNOWN_TARGETS, detect_target
from tests.amd.rocm.models import Measured

pytestmark = pytest.mark.gpu


def test_the_doctor_finds_no_problem(measured: Measured) -> None:
    findings = diagnose(read_machine(os.environ))
    measured("warnings", [f.verdict.found for f in findings if f.severity is Severity.WARNING])
    problems = [f"{f.check.id}: {f.verdict.found}; {f.verdict.fix}" for f in findings if f.severity is Severity.PROBLEM]
    assert problems == []


def test_the_device_is_one_that_kernels_are_tuned_for(device: torch.device, measured: Measured) -> None:
    """And not merely named so: a job for one arch has run on another before (TheRock#8151)."""
    target = detect_target(device)
    measured("target", str(target))
    assert target.arch in KNOWN_TARGETS
    compiled_for = driver.active.get_current_target()
    assert target.arch == (compiled_for.arch if target.is_amd else f"sm_{compiled_for.arch}")
    assert target.wave_size == compiled_for.warp_size
    assert target.lds_bytes <= driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]


@pytest.mark.rocm
def test_the_device_is_an_mi300_or_an_mi350(device: torch.device) -> None:
    assert torch.version.hip is not None
    target = detect_target(device)
    assert target.arch in ("gfx942", "gfx950")
    assert target.wave_size == 64
    fp8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[target.arch]
    assert target.fp8_dtype == fp8

"""The first hour on an MI300, rehearsed with the simulator as the GPU: small steps in the report, and what is read."""

import base64
import ctypes
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from triton.backends.amd import driver

from rocm_attn.cli import DONE, main
from rocm_attn.errors import BadSetting
from rocm_attn.machine.target import known_target
from rocm_attn.watch.evidence import StepEvidence
from rocm_attn.watch.sampled_check import LayerTap
from rocm_lab.first_run import findings
from rocm_lab.first_run.findings import Discrepancy, discrepancies
from rocm_lab.first_run.report import GpuReport
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.launcher import simulated
from tests.amd.house.source_tree import ROOT
from tests.amd.rocm import kernel_notes
from tests.amd.rocm.stand_in import Report
from tests.amd.rocm.test_simulated import LAYERS, record
from tests.amd.simulator.kernel_cases import run_merge_states

ARCH = "gfx942"
DECODE = "heads of 64", "decode"


class ChangesOnce(LayerTap):
    """Layers of which one attention gives another result once, as a faulty GPU may. at: its number, from 0"""

    def __init__(self, at: int, by: float) -> None:
        super().__init__()
        self._left, self._by = at, by

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(self._layers, name)(layer, *given, **named)
        if name == "attend":
            if self._left == 0:
                given[1][0, 1, 7] += self._by
            self._left -= 1


def measured(path: Path, outer: LayerTap, layer: str = DECODE[0], step: str = DECODE[1]) -> str:
    """A step that the simulator ran as the GPU, as it is in a report."""
    with simulated(ARCH):
        target = replace(known_target(ARCH), compute_units=2)
        record(LAYERS[layer], step, torch.device("cpu"), target, path, outer)
    return packed_of(path)


def packed_of(path: Path) -> str:
    """A file as a report holds it."""
    return base64.b64encode(zlib.compress(path.read_bytes())).decode()


def read(folder: Path, content: dict[str, Any]) -> GpuReport:
    path = folder / "report.json"
    path.write_text(json.dumps(content))
    return GpuReport.read(path, ARCH)


def differences(folder: Path, packed: str) -> list[Discrepancy]:
    content = Report(candidates=()).content
    content["tests"]["small"] = {"outcome": "passed", "seconds": 1.0, "measured": {"evidence": packed}}
    return discrepancies(read(folder, content), ())


@pytest.mark.parametrize(
    ("layer", "step"),
    [
        DECODE,
        *(
            pytest.param(layer, step, marks=pytest.mark.nightly)
            for layer in LAYERS
            for step in ("prompt", "decode")
            if (layer, step) != DECODE
        ),
    ],
)
def test_a_step_that_is_right_has_no_difference(layer: str, step: str, tmp_path: Path) -> None:
    assert differences(tmp_path, measured(tmp_path / "a.evidence", LayerTap(), layer, step)) == []


def test_a_wrong_result_is_listed_with_its_cause(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, measured(tmp_path / "a.evidence", ChangesOnce(1, 8.0)))
    assert (found.kind, found.subject) == ("result", "small, _decode_kernel, _merge_kernel")
    assert found.found.endswith("the cause: the hardware, or a race between waves")


def test_another_error_within_the_bound_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.evidence"
    packed = measured(path, ChangesOnce(1, 2e-3))
    evidence = StepEvidence.read(path)
    assert evidence.is_right(evidence.recorded)
    (found,) = differences(tmp_path, packed)
    assert found.kind == "result"
    assert float(found.found) > 2 * float(found.expected.removesuffix(" of the bound"))


def test_other_bits_of_a_second_run_are_listed(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, measured(tmp_path / "a.evidence", ChangesOnce(1, 3e-4)))
    assert found.found == "other bits in a second run"


def test_an_end_of_the_simulator_is_its_own_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = measured(tmp_path / "a.evidence", LayerTap())
    monkeypatch.setattr(findings, "output_of", Mock(side_effect=SimulationFault("an address is in no storage")))
    (found,) = differences(tmp_path, packed)
    assert found.found == "the simulator ends: an address is in no storage"


def test_code_of_another_compiler_is_compared_only_with_a_disassembler(tmp_path: Path) -> None:
    path = tmp_path / "a.evidence"
    measured(path, LayerTap())
    content = torch.load(path, weights_only=True)
    content["launches"][0]["code"][-1] ^= 1
    torch.save(content, path)
    (found,) = differences(tmp_path, packed_of(path))
    assert "not compared: no llvm-objdump is found for" in found.found


@pytest.mark.parametrize("damage", [lambda packed: packed[:-8], lambda packed: "?", lambda packed: ""])
def test_damaged_evidence_is_refused(damage: Callable[[str], str], tmp_path: Path) -> None:
    packed = damage(base64.b64encode(zlib.compress(b"no evidence")).decode())
    with pytest.raises(BadSetting):
        differences(tmp_path, packed)


def test_a_kernel_that_cannot_be_noted_fails_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is unlike any that is known, for instance."""

    monkeypatch.setattr(kernel_notes, "programs_per_cu", Mock(side_effect=OSError("libamdhip64.so: no such file")))
    notes = kernel_notes.KernelNotes()
    notes.start()
    try:
        with simulated(ARCH):
            run_merge_states(torch.float16)
    finally:
        notes.stop()
    (entry,) = notes.variants.values()
    assert (entry["static"], entry["failure"]) == (None, "OSError('libamdhip64.so: no such file')")
    assert notes.launched == {entry["kernel"]}
    content = Report(candidates=()).content
    content["kernels"].append(entry)
    assert len(read(tmp_path, content).kernels) == 2


def test_the_driver_is_asked_for_the_room_of_a_whole_program(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Driver:
        def __init__(self, path: str) -> None:
            assert path == "/opt/rocm/lib/libamdhip64.so"

        @staticmethod
        def hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            count: Any, function: ctypes.c_void_p, lanes: ctypes.c_int, lds_bytes: ctypes.c_size_t
        ) -> int:
            asked.append((function.value or 0, lanes.value, lds_bytes.value))
            count._obj.value = 3
            return 1 if lds_bytes.value > 65536 else 0

    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(driver, "_get_path_to_hip_runtime_dylib", lambda: "/opt/rocm/lib/libamdhip64.so")
    target = SimpleNamespace(warp_size=64)
    for lds_bytes, programs in ((8192, 3), (1 << 20, 0)):
        compiled = SimpleNamespace(function=7, metadata=SimpleNamespace(num_warps=4, target=target, shared=lds_bytes))
        assert kernel_notes.programs_per_cu(compiled) == programs
    assert asked == [(7, 256, 8192), (7, 256, 1 << 20)]


def run_the_command(path: Path, *given: str) -> None:
    """Runs the tests of docs/rocm.md's command that are named, and writes the report."""
    command = ["-m", "pytest", "-p", "no:benchmark", "-p", "no:schemathesis", "-p", "no:cacheprovider", *given]
    command += ["-p", "tests.amd.rocm.report", "--gpu-report", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_command_on_a_simulated_gpu_leaves_a_report_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small steps of the command fit the simulator. Its times mean nothing."""
    path = tmp_path / "report.json"
    run_the_command(path, "-p", "tests.amd.rocm.stand_in_gpu", "tests/amd/rocm/test_simulated.py")
    assert main(["read-report", str(path), "--folder", str(tmp_path / "read"), "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["device"] == "a simulated MI300X"
    assert said["differences"] == []
    report = GpuReport.read(path, ARCH)
    noted = {each.kernel.rpartition(":")[2] for each in report.kernels}
    assert {"_decode_kernel", "_merge_kernel", "_extend_kernel", "_store_kernel"} <= noted
    assert len(list(report.measured("evidence"))) == len(report.tests) == 4
    assert all(each.static.vgprs > 0 for each in report.kernels)


@pytest.mark.nightly
def test_the_command_without_a_gpu_leaves_a_report_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run_the_command(path, "tests/amd/rocm", "-m", "gpu and not rocm")
    with pytest.raises(BadSetting, match="the report has 0 kinds of GPUs"):
        GpuReport.read(path, ARCH)

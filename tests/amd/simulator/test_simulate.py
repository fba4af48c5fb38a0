"""simulate(), `rocm-attn simulate` and the fixture of pytest, on a kernel that anyone may have written."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, main
from rocm_attn.errors import BadTensor
from rocm_lab.simulator import report
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.simulator.simulate import simulate
from rocm_lab.waits.check import Fault, Verdict, Word
from tests.amd.offline.small_kernels import (
    _copy_kernel,
    _looped_product_kernel,
    _saying_kernel,
    _scaled_product_kernel,
    number_kernel,
)

SCRIPT = """\
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 512})], key=[])
@triton.jit
def doubled(source, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(source + at, mask=at < n, other=0), mask=at < LIMIT)


DEVICE = triton.runtime.driver.active.get_active_torch_device()
source, out = torch.randn(100, device=DEVICE), torch.empty(100, device=DEVICE)
doubled[lambda chosen: (triton.cdiv(100, chosen["BLOCK"]),)](source, out, 100)
print("the script's own line")
assert torch.equal(out, 2 * source)
"""
DESCRIPTOR = """\
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def first(rows, out):
    tl.store(out + tl.arange(0, 16), rows.load([0]))


rows, out = torch.randn(16), torch.empty(16)
first[(1,)](TensorDescriptor(rows, [16], [1], [16]), out)
"""
TEST = """\
import numpy as np

from tests.amd.offline.small_kernels import _copy_kernel, number_kernel


def test_copy(simulate_amd):
    source, out = np.arange(50, dtype=np.float32), np.zeros(50, np.float32)
    simulate_amd(_copy_kernel, 1, [source, out, LENGTH], BLOCK=64)
    assert (source == out).all()
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_results_are_in_the_arrays_whatever_they_are(arch: str) -> None:
    source = np.arange(100, dtype=np.float32)
    whole, by_name = np.zeros(200, np.float32), torch.zeros(100)
    narrow = simulate(_copy_kernel, 1, [source, whole[100:], 100], arch, BLOCK=128, num_warps=1)
    arguments = {"source_ptr": source, "out_ptr": by_name, "size": 100}
    wide = simulate(_copy_kernel, lambda chosen: (100 // chosen["BLOCK"] + 1,), arguments, arch, BLOCK=64, num_warps=4)
    assert (whole == [0] * 100 + source.tolist()).all()
    assert (by_name.numpy() == source).all()
    assert narrow.code.num_waves == 1
    assert (wide.code.kernel, wide.code.arch, wide.launches) == ("_copy_kernel", arch, 1)
    assert wide.instructions > narrow.instructions > 0
    assert 0 < wide.figures.vgprs <= 64
    assert wide.waits.word is Word.PROVED
    assert not wide.faults


@pytest.mark.parametrize("arch", ARCHS)
def test_a_loop_of_products_has_clocks(arch: str) -> None:
    source, out = np.eye(16, dtype=np.float16), np.zeros((16, 16), np.float32)
    looped = simulate(_looped_product_kernel, 1, [source, out, 5], arch, SIZE=16, num_warps=1)
    assert (out == 5 * np.eye(16)).all()
    assert looped.loop_clocks is not None
    # A product of 16 x 16 x 16 keeps the matrix unit for 4 passes of 4 clocks, and waves of a SIMD share it.
    assert looped.loop_clocks >= 16 * looped.figures.waves_per_simd
    assert f"{looped.loop_clocks:,.0f} clocks an iteration" in looped.lines()[0]
    copied = simulate(_copy_kernel, 1, [np.zeros(8), np.zeros(8), 8], arch, BLOCK=8)
    assert copied.as_json()["loop_clocks"] is None


def test_an_access_outside_of_the_arrays_is_a_fault() -> None:
    with pytest.raises(SimulationFault, match=r"_copy_kernel.*the start of source_ptr, which has 400"):
        simulate(_copy_kernel, 1, [np.zeros(100, np.float32), np.zeros(128, np.float32), 101], BLOCK=128)


def test_programs_that_store_to_one_place_race() -> None:
    out = np.zeros(1, np.int32)
    assert not simulate(number_kernel, 1, [out]).faults
    (line,) = simulate(number_kernel, 2, [out]).faults
    assert line.startswith("race: number_kernel, out_ptr, byte 0: wave 0 of program (")


def test_arrays_that_no_kernel_can_write_are_refused() -> None:
    source = np.zeros(100, np.float32)
    source.flags.writeable = False
    with pytest.raises(BadTensor, match=r"of shape \(100,\) is read-only; give a copy"):
        simulate(_copy_kernel, 1, [source, torch.empty(100), 100], BLOCK=128)
    with pytest.raises(BadTensor, match=r"an array of <U1 cannot be a tensor \(.*; give a tensor of torch"):
        simulate(_copy_kernel, 1, [np.array(["a"]), torch.empty(100), 100], BLOCK=128)
    with pytest.raises(BadTensor, match="an array of complex128 has no type of Triton's"):
        simulate(_copy_kernel, 1, [np.zeros(100, complex), torch.empty(100), 100], BLOCK=128)


def test_prints_of_kernels_are_refused_and_assertions_that_hold_are_not() -> None:
    source, out = torch.ones(1), torch.empty(1)
    with pytest.raises(UnknownInstruction, match="_saying_kernel: it prints, which the host does: leave prints out"):
        simulate(_saying_kernel, 1, [source, out], ASSERTS=False)
    simulate(_saying_kernel, 1, [source, out], ASSERTS=True, debug=True)
    assert out == 1
    with pytest.raises(UnknownInstruction, match="s_getpc"):
        simulate(_saying_kernel, 1, [-source, out], ASSERTS=True, debug=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [16, 32])
def test_scaled_products_are_those_of_their_blocks(arch: str, size: int) -> None:
    generator, depth = torch.Generator().manual_seed(0), 256
    a, b = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in ((size, depth), (depth, size)))
    scales = torch.randint(120, 135, (2, size, depth // 32), generator=generator, dtype=torch.uint8)
    out, of_k = torch.empty(size, size), (2.0 ** (scales.double() - 127)).repeat_interleave(32, 2)
    given = [a.view(torch.uint8), b.view(torch.uint8), scales[0].clone(), scales[1].clone(), out]
    simulate(_scaled_product_kernel, 1, given, arch, SIZE=size, DEPTH=depth, num_warps=4)
    want = (a.double() * of_k[0]) @ (b.double() * of_k[1].T)
    torch.testing.assert_close(out.double(), want, atol=0.02 * float(want.abs().max()), rtol=0.02)


def test_a_script_is_run_and_each_kernel_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.replace("LIMIT", "n"))
    assert main(["simulate", str(script), "--json"]) == DONE
    said = capsys.readouterr()
    runs = json.loads(said.out)["runs"]
    assert [run["arch"] for run in runs] == list(ARCHS)
    for run in runs:
        assert run["passed"]
        (kernel,) = run["kernels"]
        assert (kernel["kernel"], kernel["launches"], kernel["checks"]["waits"]) == ("doubled", 1, "proved")
        assert kernel["figures"]["lds_bytes"] == 0
    assert said.err.count("the script's own line") == len(ARCHS)
    assert main(["simulate", str(script), "--arch", "gfx950"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert "gfx950 doubled: 1 launch, " in lines[0]
    assert lines[0].endswith("waits proved, 0 races")
    assert lines[1].endswith("it ended well")


def test_a_script_that_does_not_pass_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "check.py"
    wrong = {
        SCRIPT.replace("LIMIT", "n + 1"): "SimulationFault: doubled, program (1, 0, 0)",
        SCRIPT.replace("LIMIT", "n").replace("2 * source", "3 * source"): "AssertionError",
        DESCRIPTOR: "BadTensor: rows has Triton's type tensordesc",
        "raise SystemExit('no')": "SystemExit: no",
        "": "it launched no kernel",
    }
    for text, says in wrong.items():
        script.write_text(text)
        assert main(["simulate", str(script), "--arch", "gfx942"]) == FAILED
        said = capsys.readouterr()
        assert says in said.out
        assert "check.py did not pass on gfx942" in said.err
    assert main(["simulate", str(tmp_path / "none.py")]) == BAD_INPUT
    assert "is no file; give a Python script" in capsys.readouterr().err


def test_a_script_without_a_kernel_says_so_to_programs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error was empty, and the run had not passed."""
    script = tmp_path / "check.py"
    script.write_text("")
    assert main(["simulate", str(script), "--json"]) == FAILED
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert all("it launched no kernel" in run["error"] and not run["passed"] for run in runs)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("by", ["SIGINT", "SIGTERM"])
def test_kernels_that_ran_before_an_interrupt_are_reported(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the arch before were lost too."""
    script = tmp_path / "check.py"
    second = f"""
import os, signal
if os.path.exists({str(tmp_path / "once")!r}):
    os.kill(os.getpid(), signal.{by})
open({str(tmp_path / "once")!r}, "w").close()
"""
    script.write_text(SCRIPT.replace("LIMIT", "n") + second)
    assert main(["simulate", str(script), "--json"]) == INTERRUPTED
    first, last = json.loads(capsys.readouterr().out)["runs"]
    assert (first["arch"], first["passed"], len(first["kernels"])) == ("gfx942", True, 1)
    assert (last["arch"], last["passed"], last["error"], len(last["kernels"])) == ("gfx950", False, "interrupted", 1)


def test_code_with_a_missing_wait_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("a load", ("first",), "a use", "v0 is not waited for")
    monkeypatch.setattr(report, "check_waits", lambda assembly, arch: Verdict(assembly.name, (fault,), ()))
    report._of_code.cache_clear()
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.replace("LIMIT", "n"))
    assert main(["simulate", str(script), "--arch", "gfx942"]) == FAILED
    assert f"  waits: {fault.line()}" in capsys.readouterr().out
    report._of_code.cache_clear()


def test_the_fixture_runs_a_test_on_every_arch(tmp_path: Path) -> None:
    """In a process of its own: pytest's plug-ins are those of a run."""
    right, wrong = tmp_path / "test_right.py", tmp_path / "test_wrong.py"
    right.write_text(TEST.replace("LENGTH", "50"))
    wrong.write_text(TEST.replace("LENGTH", "51"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", "-p", "no:cacheprovider"]
    command += ["-p", "rocm_lab.simulator.pytest_plugin", str(right), str(wrong), "--rootdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    for arch in ARCHS:
        assert f"test_wrong.py::test_copy[{arch}]" in done.stdout
    assert "start of source_ptr, which has 200" in done.stdout

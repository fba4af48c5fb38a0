"""ROCm libraries are read from the process that has loaded them: real ELF files, built and loaded here."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rocm_attn.cli.doctor.loaded_libraries import identity_of, installation_of, loaded_libraries, release_in_name
from rocm_attn.cli.doctor.machine import ImportFailure, LoadedLibrary, TorchBuild
from rocm_attn.cli.doctor.probe import probe
from rocm_attn.cli.doctor.reading import read_machine
from rocm_attn.cli.doctor.registry import diagnose
from tests.amd.forked import run_python

HIP = "int hipRuntimeGetVersion(int *v) { *v = 70253211; return 0; }"
OLD_HIP = "int hipRuntimeGetVersion(int *v) { *v = 60443483; return 0; }"
BLAS = (
    "#include <string.h>\nint rocblas_get_version_string(char *s, unsigned long n) "
    '{ if (n < 16) return 1; strcpy(s, "5.2.0.3ff05c6a"); return 0; }'
)
CRASHES = "int hipRuntimeGetVersion(int *v) { *(volatile int *)0 = 1; return 0; }"


def build(folder: Path, name: str, source: str, soname: str) -> Path:
    """Builds a shared library with a name and a soname."""
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / f"{name}.c"
    code.write_text(source)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "Triton needs a C compiler too"
    library = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", library, code], check=True)
    code.unlink()
    return library


def torch_that_loads(folder: Path, *libraries: Path, hip: str = "7.2.53211-abc") -> str:
    """Returns a folder with a torch for ROCm that loads these libraries when it is imported."""
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(
        "import ctypes, types\n"
        f"kept = [ctypes.CDLL(path) for path in {[str(library) for library in libraries]}]\n"
        "__version__ = '2.10.0+rocm7.2.4'\n"
        f"version = types.SimpleNamespace(hip={hip!r}, cuda=None)\n"
        "cuda = types.SimpleNamespace(device_count=lambda: 8)\n"
    )
    return str(folder)


def loaded(found: object) -> list[LoadedLibrary]:
    assert isinstance(found, dict)
    return [LoadedLibrary(**each) for each in found["libraries"]]


def test_what_torch_has_loaded_is_asked_for_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "site" / "torch" / "lib"
    hip = build(own, "libamdhip64.so", HIP, "libamdhip64.so.7")
    blas = build(own, "librocblas.so", BLAS, "librocblas.so.5")
    runtime = build(own, "libhsa-runtime64.so.1.18.70204", "int nothing;", "libhsa-runtime64.so.1")
    build(own, "librccl.so.1.0.70204", "int not_loaded;", "librccl.so.1")
    monkeypatch.setenv("PYTHONPATH", torch_that_loads(tmp_path / "site", blas, hip, runtime))
    found = loaded(probe("loaded"))
    assert [(each.name, each.version, each.rocm) for each in found] == [
        ("libamdhip64", "7.2.53211", "7.2"),
        ("libhsa-runtime64", "1.18.70204", "7.2.4"),
        ("librocblas", "5.2.0.3ff05c6a", ""),
    ]
    assert [each.path for each in found] == [str(hip), str(runtime), str(blas)]
    assert {installation_of(each.path) for each in found} == {"torch's own"}


def test_the_systems_hip_in_place_of_torchs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = build(tmp_path / "opt" / "rocm-6.4.1" / "lib", "libamdhip64.so.6.4.60401", OLD_HIP, "libamdhip64.so.6")
    monkeypatch.setenv("PYTHONPATH", torch_that_loads(tmp_path / "site", system))
    named = {"HOME": str(tmp_path), "TRITON_LIBHIP_PATH": str(system)}
    machine = read_machine(named, tmp_path)
    assert isinstance(machine.torch, TorchBuild)
    assert machine.named_hip == identity_of(str(system))
    findings = {finding.check.id: finding for finding in diagnose(machine)}
    found = findings["rocm-loaded"].verdict.found
    assert found.startswith("torch is built for ROCm 7.2.4 and has loaded libamdhip64 6.4.43483 of ROCm 6.4.1 (")
    assert findings["triton-hip"].verdict.found == "TRITON_LIBHIP_PATH names the HIP runtime that torch has loaded"


def test_two_names_of_one_file_are_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's Python packages have two names in _rocm_sdk_core and in _rocm_sdk_devel."""
    core = build(tmp_path / "site" / "_rocm_sdk_core" / "lib", "libamdhip64.so.7", HIP, "libamdhip64.so.7")
    devel = tmp_path / "site" / "_rocm_sdk_devel" / "lib" / "libamdhip64.so.7"
    devel.parent.mkdir(parents=True)
    os.link(core, devel)
    assert identity_of(str(core)) == identity_of(str(devel)) != ""
    assert installation_of(str(core)) == installation_of(str(devel)) == "ROCm's Python packages"
    monkeypatch.setenv("PYTHONPATH", torch_that_loads(tmp_path / "site", devel))
    monkeypatch.setenv("TRITON_LIBHIP_PATH", str(core))
    machine = read_machine({"HOME": str(tmp_path), "TRITON_LIBHIP_PATH": str(core)}, tmp_path)
    verdicts = {finding.check.id: finding.verdict for finding in diagnose(machine)}
    assert verdicts["triton-hip"].found == "TRITON_LIBHIP_PATH names the HIP runtime that torch has loaded"
    assert verdicts["rocm-places"].found.startswith("all ROCm libraries of torch are ROCm's Python packages")


def test_a_library_that_crashes_when_it_is_asked_takes_only_the_probe_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hip = build(tmp_path / "lib", "libamdhip64.so.7", CRASHES, "libamdhip64.so.7")
    monkeypatch.setenv("PYTHONPATH", torch_that_loads(tmp_path / "site", hip))
    machine = read_machine({"HOME": str(tmp_path)}, tmp_path)
    assert isinstance(machine.torch, TorchBuild)
    assert machine.loaded == ImportFailure("the process was ended by signal 11")


def test_no_library_is_loaded_to_be_asked(tmp_path: Path) -> None:
    hip = build(tmp_path, "libamdhip64.so.7", HIP, "libamdhip64.so.7")
    maps = (
        f"7f00-7f01 r-xp 00000000 08:01 42  {hip}\n7f02-7f03 rw-p 00000000 00:00 0\n7f04-7f05 r--p 0 08:01 7  [heap]\n"
    )
    imports = "import json; from rocm_attn.cli.doctor.loaded_libraries import loaded_libraries"
    code = f"{imports}; print(json.dumps(loaded_libraries({maps!r})))"
    (facts,) = json.loads(run_python("-c", code))
    assert facts["version"] == "7", "its name alone says something"


def test_names_tell_the_release() -> None:
    assert release_in_name("/opt/rocm/lib/libhsa-runtime64.so.1.18.70204") == "7.2.4"
    assert release_in_name("libamdhip64.so.6.4.60401") == "6.4.1"
    assert release_in_name("libamdhip64.so.7") == release_in_name("libMIOpen.so") == ""
    # auditwheel puts eight hexadecimal digits into names.
    (facts,) = loaded_libraries("1-2 r-xp 0 08:01 4  /w/torch.libs/librocblas-1a2b3c4d.so.5.2\n")
    assert (facts["name"], facts["version"], facts["identity"]) == (
        "librocblas",
        "5.2",
        "/w/torch.libs/librocblas-1a2b3c4d.so.5.2",
    )

"""The doctor's findings for machines given as data: healthy ones, and ones with one thing wrong."""

from dataclasses import replace

import pytest

from rocm_attn.cli.doctor.finding import Finding, Severity
from rocm_attn.cli.doctor.machine import ImportFailure, Machine, TorchBuild, release_of
from rocm_attn.cli.doctor.registry import CHECKS, diagnose
from tests.amd.doctor.machines import BROKEN, CPU_ONLY, H200, HEALTHY, MI300, Broken

BAD = (Severity.WARNING, Severity.PROBLEM)


def findings_by_id(machine: Machine) -> dict[str, Finding]:
    """Returns the finding of every check, without the known faults of releases, which have a test of their own."""
    return {finding.check.id: finding for finding in diagnose(machine) if finding.check in CHECKS}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_a_healthy_machine(name: str) -> None:
    findings = diagnose(HEALTHY[name])
    assert [finding.verdict for finding in findings if finding.severity in BAD] == []
    of_checks = [finding.check for finding in findings if finding.check.id != "known-bad"]
    assert of_checks == list(CHECKS)
    assert len({check.id for check in of_checks}) == len(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_by_its_check_and_by_no_other(name: str) -> None:
    broken: Broken = BROKEN[name]
    findings = findings_by_id(broken.machine)
    bad = {id for id, finding in findings.items() if finding.severity in BAD}
    assert bad == {broken.check, *broken.also}
    verdict = findings[broken.check].verdict
    assert verdict.severity is broken.severity
    assert broken.found in verdict.found
    assert broken.fix in verdict.fix


def test_every_check_has_a_machine_that_it_finds_something_wrong_with() -> None:
    assert {broken.check for broken in BROKEN.values()} == {check.id for check in CHECKS}


def test_a_machine_without_a_gpu_is_not_asked_for_rocm() -> None:
    findings = findings_by_id(CPU_ONLY)
    assert findings["torch-gpus"].verdict.found.startswith("the kernel lists no AMD and no NVIDIA GPU")
    for id in ("gpu-nodes", "rocm-release", "numa-balancing", "shared-memory", "aiter-package", "c-compiler"):
        assert findings[id].severity is Severity.SKIPPED


def test_an_nvidia_machine_is_not_asked_for_rocm() -> None:
    findings = findings_by_id(H200)
    assert findings["torch-gpus"].verdict.found == "torch is built for this machine's GPUs: NVIDIA H200"
    assert findings["gpu-count"].severity is Severity.OK
    assert findings["c-compiler"].severity is Severity.OK
    for id in ("gpu-nodes", "rocm-release", "allocator", "numa-balancing", "aiter-package"):
        assert findings[id].severity is Severity.SKIPPED


def test_everything_is_looked_at_when_neither_torch_nor_triton_can_be_imported() -> None:
    failure = ImportFailure("OSError: libamdhip64.so.7: cannot open shared object file")
    bad = {f.check.id for f in diagnose(replace(MI300, torch=failure, triton=failure)) if f.severity in BAD}
    assert bad == {"torch-import", "triton-import"}


def test_while_an_image_is_built_the_host_is_not_looked_at() -> None:
    builder = replace(MI300, amd_gpus=(), nodes=(), shm_bytes=64 << 20, numa_balancing="1")
    ids = {finding.check.id for finding in diagnose(builder, at_build=True)}
    assert not ids & {"gpu-nodes", "gpu-count", "shared-memory", "numa-balancing", "aiter-prebuilt"}
    assert {"torch-import", "rocm-match", "triton-copies", "aiter-package", "aiter-modules", "caches"} <= ids
    assert not [f for f in diagnose(builder, at_build=True) if f.severity in BAD]


@pytest.mark.parametrize(
    ("version", "hip", "rocm"),
    [
        ("2.10.0+rocm7.2.4", "7.2.53211-e1a6bc5663", (7, 2, 4)),
        ("2.10.0+rocm7.2.4.gitb1234567", "7.2.53211", (7, 2, 4)),
        ("2.10.0+git1234567", "7.2.53211", (7, 2)),
        ("2.11.0+rocm10.0.0", "10.0.51831", (10, 0, 0)),
        ("2.11.0+rocm6.4", "7.2.1", (7, 2)),
        ("2.13.0+cu130", "", ()),
    ],
)
def test_the_build_number_of_hip_is_not_taken_for_a_patch(version: str, hip: str, rocm: tuple[int, ...]) -> None:
    assert TorchBuild(version, hip, "", 1).rocm == rocm


@pytest.mark.parametrize("tag", ["rocm7.2.4", "rocm7.2", "rocm72", "rocm720", "rocm724.git123"])
def test_the_rocm_release_of_an_aiter_is_read_with_and_without_dots(tag: str) -> None:
    installed = [replace(d, version=f"0.1.21+{tag}") if d.name == "amd-aiter" else d for d in MI300.distributions]
    finding = findings_by_id(replace(MI300, distributions=tuple(installed)))["aiter-release"]
    assert finding.verdict.found == f"amd-aiter 0.1.21+{tag} and torch are both of ROCm 7.2"


def test_a_release_is_the_numbers_that_a_version_starts_with() -> None:
    assert release_of("7.2.4-93") == (7, 2, 4)
    assert release_of("0.1.21.post2+rocm7.2") == (0, 1, 21)
    assert release_of("") == release_of("unknown") == ()

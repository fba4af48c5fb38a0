"""Checks of torch and of the ROCm release under it."""

from rocm_attn.cli.doctor.finding import Diagnosis, Severity, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.machine import ImportFailure, Machine, NotInstalled, Release, TorchBuild, release_name

# Aborted captures: sglang#24011, aiter#2941. The first release after the last that is affected.
_CAPTURE_ABORTS_BEFORE: Release = (7, 2, 1)
# Corrupted replays: one setup's report, clr#279. First and last release of the report.
_CORRUPT_REPLAYS: tuple[Release, Release] = ((7, 2, 0), (7, 2, 3))
# pytorch#187110: from here on HIP reports operations that are illegal while capturing.
_REPORTS_CAPTURE_ERRORS: Release = (7, 14)

_GOOD_RELEASE = "7.2.4"


@machine_check("torch-import", "can torch be imported?", "vllm#39485, sglang#30562")
def _torch_imports(machine: Machine) -> Diagnosis:
    match machine.torch:
        case NotInstalled():
            return problem("torch is not installed", "install the torch that is built for this machine's GPU")
        case ImportFailure(error):
            return problem(
                f"torch cannot be imported: {error}",
                "install torch and its ROCm or CUDA libraries again, from one release; an undefined symbol or a "
                "missing library means that their releases differ",
            )
        case TorchBuild(version, hip, cuda):
            built = f"ROCm {release_name(machine.torch_rocm)}" if hip else f"CUDA {cuda}" if cuda else "CPUs"
            return ok(f"torch {version}, built for {built}")


@machine_check("torch-gpus", "is torch built for this machine's GPUs?", "sglang#9603", at_build=False)
def _torch_fits_gpus(machine: Machine) -> Diagnosis:
    torch = machine.torch
    if not isinstance(torch, TorchBuild):
        return skipped("torch cannot be imported")
    if machine.amd_gpus and not torch.hip:
        return problem(
            f"this machine has {len(machine.amd_gpus)} AMD GPUs ({_distinct(machine.amd_gpus)}), and torch "
            f"{torch.version} is built for {'CUDA' if torch.cuda else 'CPUs'}",
            "install torch for ROCm; name it in PIP_CONSTRAINT, so that no other package replaces it with PyPI's",
        )
    if machine.nvidia_gpus and not machine.amd_gpus and not torch.cuda:
        return problem(
            f"this machine has {len(machine.nvidia_gpus)} NVIDIA GPUs ({_distinct(machine.nvidia_gpus)}), and torch "
            f"{torch.version} is built for {'ROCm' if torch.hip else 'CPUs'}",
            "install torch for CUDA",
        )
    if not machine.has_gpu:
        return skipped("the kernel lists no AMD and no NVIDIA GPU; the torch provider serves CPUs, slowly")
    return ok(f"torch is built for this machine's GPUs: {_distinct(machine.amd_gpus or machine.nvidia_gpus)}")


@machine_check("cuda-leftovers", "CUDA libraries next to torch for ROCm", "sglang#26345")
def _cuda_leftovers(machine: Machine) -> Diagnosis:
    if not machine.torch_rocm:
        return skipped("torch is not built for ROCm")
    found = sorted({d.name for d in machine.distributions if d.name.startswith("nvidia-") and "cu1" in d.name})
    if found:
        return warning(
            f"CUDA libraries are installed next to torch for ROCm: {', '.join(found)}",
            "a package has installed PyPI's torch at some time; uninstall these libraries, and name torch in "
            "PIP_CONSTRAINT",
        )
    return ok("no CUDA libraries next to torch for ROCm")


@machine_check("rocm-release", "known defects of the ROCm release", "sglang#24011, clr#279")
def _rocm_release(machine: Machine) -> Diagnosis:
    release = full_release(machine)
    if not release:
        return skipped("neither a ROCm release nor a torch for ROCm is installed")
    name, said = release_name(release), []
    severity = Severity.OK
    if len(release) < 3 and release[:2] == _CAPTURE_ABORTS_BEFORE[:2]:
        return warning(
            f"ROCm {name} of an unknown patch release: {name}.0 aborts captures (sglang#24011), and graphs were "
            f"reported to corrupt data up to {name}.3 (clr#279)",
            f"make sure that it is {_GOOD_RELEASE} or later; the system's release is in /opt/rocm/.info/version",
        )
    if release < _CAPTURE_ABORTS_BEFORE:
        severity = Severity.PROBLEM
        said.append("querying an event during a graph capture aborts it (sglang#24011)")
    if _CORRUPT_REPLAYS[0] <= release <= _CORRUPT_REPLAYS[1]:
        severity = severity if severity is Severity.PROBLEM else Severity.WARNING
        said.append("replayed graphs were reported to corrupt data (clr#279, one report)")
    if release < _REPORTS_CAPTURE_ERRORS:
        said.append("illegal calls during a capture give no error, so new graphs are compared with eager runs")
    found = f"ROCm {name}" + (f": {'; '.join(said)}" if said else "")
    fix = f"use ROCm {_GOOD_RELEASE} or later, or serve without graphs"
    return Diagnosis(severity, found, "" if severity is Severity.OK else fix)


def full_release(machine: Machine) -> Release:
    """The release that torch runs on: torch's, with the system's patch number if torch does not know its own."""
    torch, system = machine.torch_rocm, machine.rocm
    if not torch or (len(torch) < 3 and system[:2] == torch[:2]):
        return system
    return torch


@machine_check("rocm-match", "do torch and the system have the same ROCm release?", "flashinfer-amd#268")
def _rocm_releases_match(machine: Machine) -> Diagnosis:
    torch, system = machine.torch_rocm, machine.rocm
    if not torch or not system:
        return skipped("torch is not built for ROCm, or the system has no ROCm of its own")
    if torch[:2] == system[:2]:
        return ok(f"torch and the system have the same ROCm release, {release_name(system[:2])}")
    return problem(
        f"torch is built for ROCm {release_name(torch)} and the system has {release_name(system)}: AITER compiles "
        "with the system's release and is loaded into torch's",
        "use a torch that is built for the system's release, or an image in which both have the same release",
    )


def _distinct(names: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(names))

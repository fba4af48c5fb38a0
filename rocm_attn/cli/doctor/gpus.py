"""Checks of the GPUs: whether this process may use them, and which of them it sees."""

from collections.abc import Mapping

from rocm_attn.cli.doctor.finding import Diagnosis, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.machine import Machine, TorchBuild

KFD = "/dev/kfd"
_SERVED_ARCHS = ("gfx942", "gfx950")
_NO_AMD_GPU = "the kernel lists no AMD GPU"

_HIP, _CUDA, _ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@machine_check("gpu-nodes", "access to the device files of AMD GPUs", "sglang#9603, aiter#4800", at_build=False)
def _nodes(machine: Machine) -> Diagnosis:
    if not machine.amd_gpus:
        return skipped(_NO_AMD_GPU)
    paths = {node.path for node in machine.nodes}
    if KFD not in paths or len(paths) < 2:
        lacking = KFD if KFD not in paths else "the render nodes in /dev/dri"
        return problem(
            f"this host has {len(machine.amd_gpus)} AMD GPUs and {lacking} cannot be seen from here",
            "give the container the devices: docker run --device=/dev/kfd --device=/dev/dri",
        )
    closed = [node for node in machine.nodes if not node.usable]
    if closed:
        gids = sorted({node.gid for node in closed})
        return problem(
            f"user {machine.uid} has no access to {', '.join(node.path for node in closed)} (groups "
            f"{', '.join(map(str, gids))})",
            "add the user to these groups; for a container give their numbers, because its names differ from the "
            f"host's: docker run {' '.join(f'--group-add {gid}' for gid in gids)}",
        )
    return ok(f"{KFD} and {len(paths) - 1} render nodes can be used")


@machine_check("visible-devices", "variables that select GPUs", "vllm's refusal of clashing values", at_build=False)
def _visible(machine: Machine) -> Diagnosis:
    if not machine.has_gpu:
        return skipped("no GPU is visible")
    given = {name: machine.environment[name] for name in (_HIP, _CUDA, _ROCR) if name in machine.environment}
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    if not given:
        return ok("no variable hides a GPU")
    if not machine.amd_gpus:
        given = {name: value for name, value in given.items() if name == _CUDA}
    hiding = [name for name, value in given.items() if value.strip() in ("", "-1")]
    if hiding:
        return problem(f"{said}: every GPU is hidden", f"unset {' '.join(hiding)}, or list the GPUs to use")
    if _HIP in given and _CUDA in given and given[_HIP] != given[_CUDA]:
        return problem(
            f"{said}: on ROCm, libraries disagree about which of the two counts",
            f"set {_HIP} alone, or both to the same value",
        )
    beyond = _beyond_rocr(given)
    if beyond:
        return problem(
            f"{said}: {beyond} counts among the GPUs that {_ROCR} leaves visible, and asks for more than those",
            f"use {_ROCR} or {_HIP}, not both",
        )
    return ok(said or "no variable hides a GPU")


def _beyond_rocr(given: Mapping[str, str]) -> str:
    """The variable that selects a GPU which ROCR_VISIBLE_DEVICES leaves out; empty if none does."""
    if _ROCR not in given:
        return ""
    left = len(given[_ROCR].split(","))
    for name in (_HIP, _CUDA):
        numbers = [int(part) for part in given.get(name, "").split(",") if part.strip().isdigit()]
        if any(number >= left for number in numbers):
            return name
    return ""


@machine_check("gpu-count", "does torch see the GPUs?", "legacy-rocm-build#5656", at_build=False)
def _counted(machine: Machine) -> Diagnosis:
    if not isinstance(machine.torch, TorchBuild) or not machine.has_gpu:
        return skipped("there is no GPU, or no torch to count them")
    if any(name in machine.environment for name in (_HIP, _CUDA, _ROCR)):
        return skipped("a variable selects GPUs")
    listed, counted = len(machine.amd_gpus or machine.nvidia_gpus), machine.torch.num_gpus
    if counted == listed:
        return ok(f"torch counts the {listed} GPUs that the kernel lists")
    # A container may have been given some of the host's GPUs, while the kernel still lists all.
    if counted:
        return ok(f"torch counts {counted} of the {listed} GPUs of this host")
    return problem(
        f"the kernel lists {listed} GPUs and torch counts none",
        "look at the findings on device files and on torch's build; a driver older than torch's libraries, or a "
        "second copy of libamd_smi next to the one that torch loads, hides GPUs",
    )


@machine_check("gpu-arch", "the GPUs' archs", "TheRock#8151, aiter#1436, vllm#22795", at_build=False)
def _arch(machine: Machine) -> Diagnosis:
    if not machine.amd_gpus:
        return skipped(_NO_AMD_GPU)
    pretended = machine.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if pretended:
        return problem(
            f"HSA_OVERRIDE_GFX_VERSION={pretended}: code is compiled for another GPU than {machine.amd_gpus[0]}",
            "unset HSA_OVERRIDE_GFX_VERSION",
        )
    if len(set(machine.amd_gpus)) > 1:
        return warning(
            f"the GPUs are of several archs: {', '.join(machine.amd_gpus)}",
            "choose GPUs of one arch with HIP_VISIBLE_DEVICES",
        )
    if machine.amd_gpus[0] not in _SERVED_ARCHS:
        return warning(
            f"{machine.amd_gpus[0]} has no tuned kernels; they exist for {', '.join(_SERVED_ARCHS)}",
            "list the kernels that would run: rocm-attn explain CONFIG.json --arch " + machine.amd_gpus[0],
        )
    return ok(f"{len(machine.amd_gpus)} x {machine.amd_gpus[0]}")

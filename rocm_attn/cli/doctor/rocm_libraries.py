"""Checks of the ROCm libraries that torch has loaded, against torch, the system and one another."""

from collections.abc import Sequence

from rocm_attn.cli.doctor.finding import Diagnosis, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.loaded_libraries import installation_of
from rocm_attn.cli.doctor.machine import (
    ImportFailure,
    LoadedLibrary,
    Machine,
    Release,
    TorchBuild,
    release_name,
    release_of,
)

_HIP = "libamdhip64"
_ONE_RELEASE = (
    "unset LD_LIBRARY_PATH and LD_PRELOAD, which come before the folders of torch's wheel; or install a torch that "
    "is built for the release of these libraries"
)


@machine_check(
    "rocm-loaded", "the versions of the ROCm libraries that torch loads", "rocBLAS#1386, pytorch-builder#1468"
)
def _loaded_release(machine: Machine) -> Diagnosis:
    torch = machine.torch
    if not isinstance(torch, TorchBuild) or not torch.hip:
        return skipped("torch is not built for ROCm, or cannot be imported")
    if isinstance(machine.loaded, ImportFailure):
        return problem(
            f"the versions of torch's ROCm libraries cannot be read: {machine.loaded.error}",
            "install torch and its ROCm libraries again, from one release; gdb shows which of them fails",
        )
    if not machine.loaded:
        return skipped(f"torch {torch.version} has loaded no ROCm library that rocm-attn knows")
    twice = _loaded_twice(machine.loaded)
    if twice:
        return problem(f"one library is loaded from two files: {twice}; each copy has its own state", _ONE_RELEASE)
    strange = [each for each in machine.loaded if _release(each) and _release(each) != machine.torch_rocm[:2]]
    if any(each.name == _HIP for each in strange):
        return problem(
            f"torch is built for ROCm {release_name(machine.torch_rocm)} and has loaded {_list(strange)}", _ONE_RELEASE
        )
    if strange:
        return warning(
            f"in addition to ROCm {release_name(machine.torch_rocm)}, which torch is built for, it has loaded "
            f"{_list(strange)}",
            _ONE_RELEASE,
        )
    driver = f"; amdgpu driver {machine.driver}" if machine.driver else ""
    return ok(f"{_list(machine.loaded)}{driver}")


@machine_check("rocm-places", "are torch's ROCm libraries from one installation?", "ROCm/pytorch#1340, rocm-aic#149")
def _one_installation(machine: Machine) -> Diagnosis:
    loaded = () if isinstance(machine.loaded, ImportFailure) else machine.loaded
    if not loaded:
        return skipped("torch has loaded no ROCm library that rocm-attn knows")
    of_each: dict[str, list[str]] = {}
    for each in loaded:
        of_each.setdefault(installation_of(each.path), []).append(each.name)
    if len(of_each) == 1:
        (place,) = of_each
        system = machine.rocm
        beside = (
            f"; the system has ROCm {release_name(system)}" if system and place.startswith(("torch", "ROCm")) else ""
        )
        return ok(f"all ROCm libraries of torch are {_place(place)}{beside}")
    said = "; ".join(f"{', '.join(names)}: {_place(place)}" for place, names in of_each.items())
    return warning(
        f"the ROCm libraries of torch come from {len(of_each)} installations: {said}",
        "unset LD_LIBRARY_PATH and LD_PRELOAD, so that torch finds the libraries that it was built with",
    )


@machine_check("triton-hip", "does Triton use torch's HIP runtime?", "triton#3403, triton#11492")
def _triton_hip(machine: Machine) -> Diagnosis:
    named = machine.environment.get("TRITON_LIBHIP_PATH", "")
    if not named:
        return skipped("TRITON_LIBHIP_PATH is not set; Triton uses the HIP runtime that torch has loaded")
    if not machine.named_hip:
        return problem(f"TRITON_LIBHIP_PATH is {named}, which does not exist", "unset TRITON_LIBHIP_PATH")
    loaded = () if isinstance(machine.loaded, ImportFailure) else machine.loaded
    hip = next((each for each in loaded if each.name == _HIP), None)
    if hip is None:
        return skipped(f"TRITON_LIBHIP_PATH is {named}, and torch has loaded no {_HIP}")
    if hip.identity == machine.named_hip:
        return ok("TRITON_LIBHIP_PATH names the HIP runtime that torch has loaded")
    return problem(
        f"TRITON_LIBHIP_PATH is {named} and torch has loaded {hip.path}: kernels would be launched in another HIP "
        "runtime than the one with torch's memory and streams",
        "unset TRITON_LIBHIP_PATH: Triton then uses the runtime that torch has loaded",
    )


def _loaded_twice(loaded: Sequence[LoadedLibrary]) -> str:
    """Paths of the first library of which two different files are loaded; empty if there is none."""
    for library in loaded:
        others = [each.path for each in loaded if each.name == library.name and each.identity != library.identity]
        if others:
            return " and ".join([library.path, *others])
    return ""


def _release(library: LoadedLibrary) -> Release:
    """Major and minor of its ROCm release; () if it is not known."""
    return release_of(library.rocm)[:2]


def _list(libraries: Sequence[LoadedLibrary]) -> str:
    named = []
    for each in libraries:
        of = f" of ROCm {each.rocm}" if each.rocm else ""
        named.append(f"{each.name} {each.version or 'of unknown version'}{of} ({each.path})")
    return ", ".join(named)


def _place(installation: str) -> str:
    return f"in {installation}" if installation.startswith("/") else installation

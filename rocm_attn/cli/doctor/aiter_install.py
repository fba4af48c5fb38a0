"""Checks of AITER. Nothing here imports it, because importing AITER compiles code and uses the GPU."""

import re
from pathlib import Path

from rocm_attn.cli.doctor.finding import Diagnosis, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.machine import AiterCopy, AiterModule, Machine, Release, TorchBuild, release_name, release_of
from rocm_attn.machine.aiter_releases import not_read, too_old
from rocm_attn.machine.aiter_switches import SWITCHES

DISTRIBUTION = "amd-aiter"
# A project of 2019 on PyPI that has the name of AITER's module.
STRANGER = "aiter"

_INSTALL = (
    "install amd-aiter from AMD's index for your ROCm release with pip's --extra-index-url (--index-url would hide "
    "PyPI, which has its dependencies), or build it from source"
)
_REBUILD = "remove these files and build AITER again with this torch"
_AMD_ONLY = "no AMD GPU and no torch for ROCm"
_NO_AITER = "AITER is not installed; Triton's kernels are used"


@machine_check("aiter-package", "is the package aiter AMD's?", "Hyperloom#1508")
def _package(machine: Machine) -> Diagnosis:
    copy = machine.imported_aiter
    stranger = machine.versions_of(STRANGER)
    if (copy is not None and not copy.is_amds) or (stranger and copy is None):
        version = f" {stranger[0]}" if stranger else ""
        return problem(
            f"the installed aiter{version} is another project of that name, not AMD's",
            f"pip uninstall aiter; {_INSTALL}",
        )
    if stranger and machine.versions_of(DISTRIBUTION):
        return problem(
            f"PyPI's unrelated aiter {stranger[0]} is installed next to amd-aiter, in the same folder",
            f"pip uninstall aiter amd-aiter; {_INSTALL}",
        )
    if copy is None:
        return skipped(_NO_AITER)
    # Before v0.1.8, AMD's distribution had the same name as the stranger.
    versions = machine.versions_of(DISTRIBUTION) or stranger
    return ok(f"amd-aiter {versions[0]}" if versions else f"AITER from source in {copy.path}")


@machine_check("aiter-copies", "is AITER installed once?", "aiter#4437")
def _copies(machine: Machine) -> Diagnosis:
    ours = [copy.path for copy in machine.aiter if copy.is_amds]
    if len(ours) < 2:
        return ok("one AITER") if ours else skipped(_NO_AITER)
    return problem(
        f"AITER is on Python's path {len(ours)} times: {', '.join(ours)}; modules of one are loaded into the other",
        "keep one: pip uninstall amd-aiter, or take the source folder from PYTHONPATH",
    )


@machine_check(
    "aiter-release", "AITER's release, and the ROCm release that it is built for", "vllm#39485, flashinfer-amd#277"
)
def _release(machine: Machine) -> Diagnosis:
    versions = machine.versions_of(DISTRIBUTION)
    if not versions:
        return skipped("amd-aiter is not installed as a distribution")
    if sentence := too_old(versions[0]):
        return warning(f"{sentence}, so no kernel of it runs", "install a later release")
    built = re.search(r"rocm(\d+(?:\.\d+)*)", versions[0])
    if not built or not machine.torch_rocm:
        return ok(f"amd-aiter {versions[0]}; its version names no ROCm release to compare")
    release = _dotted(built.group(1))
    if release[:2] == machine.torch_rocm[:2]:
        return ok(f"amd-aiter {versions[0]} and torch are both of ROCm {release_name(release[:2])}")
    return problem(
        f"amd-aiter {versions[0]} is built for ROCm {release_name(release)} and torch for "
        f"{release_name(machine.torch_rocm)}; AITER has no stable binary interface",
        f"pip uninstall amd-aiter; {_INSTALL}",
    )


@machine_check("aiter-read", "was this release of AITER read?", "aiter#5565, vllm#46856")
def _was_read(machine: Machine) -> Diagnosis:
    copy, versions = _amds(machine), machine.versions_of(DISTRIBUTION)
    if copy is None:
        return skipped(_NO_AITER)
    version = versions[0] if versions else ""
    if too_old(version):
        return skipped(f"amd-aiter {version} is not used")
    if unread := not_read(version):
        return warning(
            f"{unread}; its kernels serve where their parameters agree and their probe passes",
            "run rocm-attn truth on this machine, or install a release that was read",
        )
    return ok(f"amd-aiter {version} was read")


def _dotted(name: str) -> Release:
    """The release in the tag of a version, which may leave the dots out: 7.2, 72 and 720 are (7, 2, ...)."""
    if "." in name or len(name) < 2:
        return release_of(name)
    length = 2 if name.startswith("10") else 1
    return (int(name[:length]), *(int(digit) for digit in name[length:]))


@machine_check("aiter-requirements", "AITER's dependencies", "ATOM#13, flashinfer-amd#277")
def _requirements(machine: Machine) -> Diagnosis:
    (*_, aiter) = [None, *(found for found in machine.distributions if found.name == DISTRIBUTION)]
    if aiter is None:
        return skipped("amd-aiter is not installed as a distribution")
    installed = {found.name for found in machine.distributions}
    missing = [name for name in aiter.requires if name not in installed]
    if missing:
        return problem(
            f"amd-aiter needs {', '.join(missing)}, which are not installed; an index without PyPI does not have them",
            f"pip install {' '.join(missing)}",
        )
    return ok("all dependencies of amd-aiter are installed")


@machine_check("aiter-modules", "can AITER's compiled modules be loaded?", "aiter#2864, aiter#2870, aiter#5312")
def _modules_load(machine: Machine) -> Diagnosis:
    modules = _all_modules(machine)
    broken = [module for module in modules if module.error]
    if not modules:
        return skipped("AITER has compiled modules neither in its package nor in its cache")
    if broken:
        torch = machine.torch.version if isinstance(machine.torch, TorchBuild) else "this torch"
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        return problem(
            f"{broken[0].path} cannot be loaded{more}: {broken[0].error}; it was built for another torch, ROCm or "
            f"C++ library than torch {torch} here",
            _REBUILD,
        )
    return ok(f"all {len(modules)} compiled modules of AITER can be loaded")


@machine_check("aiter-entry-points", "does AITER have its attention functions?", "aiter#3049, aiter#3219")
def _entry_points(machine: Machine) -> Diagnosis:
    copy = _amds(machine)
    if copy is None:
        return skipped(_NO_AITER)
    if copy.missing:
        return problem(
            f"AITER in {copy.path} does not define {', '.join(copy.missing)}; importing it gives no error",
            "install a newer amd-aiter, or use --provider triton",
        )
    return ok("every attention function that may be called is defined")


@machine_check("aiter-archs", "the GPUs that AITER is built for", "aiter#1436, aiter#4525", at_build=False)
def _archs(machine: Machine) -> Diagnosis:
    if _amds(machine) is None or not machine.amd_gpus:
        return skipped(_NO_AITER if machine.amd_gpus else _AMD_ONLY)
    requested = machine.environment.get("GPU_ARCHS", "native").replace(" ", "").split(";")
    lacking = [arch for arch in dict.fromkeys(machine.amd_gpus) if "native" not in requested and arch not in requested]
    if lacking:
        return problem(
            f"GPU_ARCHS is {';'.join(requested)!r} and the GPU is {', '.join(lacking)}: AITER compiles for another GPU",
            "unset GPU_ARCHS, or name the GPU in it",
        )
    others = [m for m in _all_modules(machine) if m.archs and not set(machine.amd_gpus) <= set(m.archs)]
    if others:
        return warning(
            f"{len(others)} modules of AITER have no code for {machine.amd_gpus[0]}, such as {others[0].path} "
            f"({', '.join(others[0].archs)}): each is compiled again when it is first used",
            f"build AITER with GPU_ARCHS={machine.amd_gpus[0]}, or run: rocm-attn prewarm CONFIG.json",
        )
    return ok("AITER compiles for this machine's GPU")


@machine_check("aiter-stale", "modules older than the installed AITER", "aiter#4437")
def _stale(machine: Machine) -> Diagnosis:
    copy = _amds(machine)
    if copy is None or not machine.aiter_jit:
        return skipped("AITER has compiled nothing on this machine")
    old = [module.path for module in machine.aiter_jit if module.built < copy.installed]
    if old:
        return warning(
            f"{len(old)} modules in AITER's cache are older than the installed AITER, such as {old[0]}",
            _REBUILD,
        )
    return ok(f"the {len(machine.aiter_jit)} modules in AITER's cache are newer than AITER")


@machine_check("aiter-prebuilt", "are AITER's modules compiled?", "sglang#34586, aiter#3706", at_build=False)
def _prebuilt(machine: Machine) -> Diagnosis:
    if _amds(machine) is None or not machine.is_amd:
        return skipped(_NO_AITER if machine.is_amd else _AMD_ONLY)
    modules = _all_modules(machine)
    if not modules:
        return warning(
            "no module of AITER is compiled yet: the first request of each kind waits minutes for the compiler",
            "compile before serving, as the user that serves: rocm-attn prewarm CONFIG.json",
        )
    return ok(f"{len(modules)} modules of AITER are compiled")


@machine_check("aiter-jit-dir", "can AITER load its compiled modules?", "aiter#887")
def _jit_dir(machine: Machine) -> Diagnosis:
    copy, chosen = _amds(machine), machine.environment.get("AITER_JIT_DIR", "")
    if copy is None:
        return skipped(_NO_AITER)
    if not chosen and Path(machine.aiter_jit_dir).is_relative_to(copy.path):
        return ok("AITER compiles into its package")
    if not chosen:
        return problem(
            f"user {machine.uid} cannot write to {copy.path}/jit, and AITER cannot import the modules that it "
            f"compiles into {machine.aiter_jit_dir} instead",
            f"link {copy.path}/jit/*.so into a folder of this user's and set AITER_JIT_DIR to it",
        )
    there = {*machine.aiter_linked, *(Path(module.path).name for module in machine.aiter_jit)}
    hidden = [name for module in copy.modules if (name := Path(module.path).name) not in there]
    if hidden:
        return warning(
            f"AITER_JIT_DIR={chosen} hides {len(hidden)} modules that were installed compiled, such as {hidden[0]}: "
            "AITER searches no other folder and compiles them again",
            f"link {copy.path}/jit/*.so into {chosen}",
        )
    return ok(f"AITER's modules are in {chosen}")


@machine_check("aiter-compiler", "can AITER compile?", "aiter#5264")
def _compiler(machine: Machine) -> Diagnosis:
    if _amds(machine) is None or not machine.is_amd:
        return skipped(_NO_AITER if machine.is_amd else _AMD_ONLY)
    if machine.hipcc:
        return ok(f"hipcc is {machine.hipcc}")
    return warning(
        "hipcc is not installed: AITER fails in the middle of a request when a module has to be compiled",
        "use an image with ROCm's compiler, or build AITER with PREBUILD_KERNELS=1",
    )


@machine_check("aiter-switches", "variables that select AITER's kernels", "aiter#4770")
def _switches(machine: Machine) -> Diagnosis:
    if _amds(machine) is None:
        return skipped(_NO_AITER)
    found = {
        f"{each.name}={machine.environment[each.name]}": each for each in SWITCHES if each.name in machine.environment
    }
    if not found:
        return ok("no variable of AITER's that selects kernels is set")
    return warning(
        "; ".join(f"{text} {each.changes}, from {each.since} on: {each.verdict}" for text, each in found.items()),
        f"unset {', '.join(each.name for each in found.values())}, unless you want these kernels",
    )


@machine_check("aiter-locks", "locks of killed builds", "aiter#3635, aiter#5264, flashinfer#993")
def _locks(machine: Machine) -> Diagnosis:
    if not machine.leftover_locks:
        return ok("no build lock was left over")
    return problem(
        f"killed builds of AITER left locks that the next build waits for: {', '.join(machine.leftover_locks)}",
        "remove these files while nothing is building",
    )


def _amds(machine: Machine) -> AiterCopy | None:
    copy = machine.imported_aiter
    return copy if copy is not None and copy.is_amds else None


def _all_modules(machine: Machine) -> tuple[AiterModule, ...]:
    copy = _amds(machine)
    return () if copy is None else (*copy.modules, *machine.aiter_jit)

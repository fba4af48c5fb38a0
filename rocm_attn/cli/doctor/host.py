"""Checks of the host: caches, memory and variables that a serving process inherits."""

from rocm_attn.cli.doctor.finding import Diagnosis, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.machine import Machine
from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import CHOICES, DISABLE_GUARDS, misspelt, read_settings

_NO_AMD = "no AMD GPU and no torch for ROCm"
# Docker's default is 64 MiB; RCCL and the worker processes of a serving engine take gigabytes.
_MIN_SHM_BYTES = 8 << 30
# A model's kernels take tens of megabytes, AITER's modules up to gigabytes.
_MIN_FREE_BYTES = 4 << 30
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.s3", "9p")

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DEBUG = {
    "HIP_LAUNCH_BLOCKING": "0",
    "CUDA_LAUNCH_BLOCKING": "0",
    "AMD_SERIALIZE_KERNEL": "0",
    "AMD_SERIALIZE_COPY": "0",
    "AMD_LOG_LEVEL": "0",
    "TRITON_ALWAYS_COMPILE": "0",
    "TORCH_USE_HIP_DSA": "0",
    "AITER_REBUILD": "0",
}
_ENGINE_SWITCHES = {"vllm": "VLLM_ROCM_USE_AITER", "sglang": "SGLANG_USE_AITER"}


@machine_check("caches", "are the caches of compiled code writable?", "aiter#4800")
def _caches(machine: Machine) -> Diagnosis:
    if machine.environment.get("TRITON_CACHE_DIR") == "":
        return problem(
            "TRITON_CACHE_DIR is empty, and Triton compiles nothing then", "unset TRITON_CACHE_DIR, or name a folder"
        )
    closed = [folder for folder in machine.folders if not folder.writable]
    if closed:
        folder = closed[0]
        return problem(
            f"user {machine.uid} cannot write to {folder.purpose}, {folder.path} (owner {folder.owner}, mode "
            f"{folder.mode:04o})" + (f", nor to {len(closed) - 1} more" if len(closed) > 1 else ""),
            "compile as the serving user, or give that user the folder: chown -R USER; or choose other folders with "
            "TRITON_CACHE_DIR and AITER_JIT_DIR",
        )
    named = ", ".join(f"{folder.purpose} ({folder.path})" for folder in machine.folders)
    return ok(f"writable: {named or 'no folder'}")


@machine_check("cache-filesystem", "are caches on a network file system?", "flashinfer#993", at_build=False)
def _cache_filesystem(machine: Machine) -> Diagnosis:
    remote = [folder for folder in machine.folders if folder.filesystem.startswith(_NETWORK_FILESYSTEMS)]
    if remote:
        return warning(
            f"{remote[0].purpose}, {remote[0].path}, is on {remote[0].filesystem}: file locks and renames over a "
            "network have hung compilers",
            "point TRITON_CACHE_DIR and AITER_JIT_DIR to a local disk",
        )
    return ok("caches are on local disks")


@machine_check("cache-space", "free space for compiled code", "aiter#2843", at_build=False)
def _cache_space(machine: Machine) -> Diagnosis:
    full = [folder for folder in machine.folders if folder.free_bytes < _MIN_FREE_BYTES]
    if full:
        return warning(
            f"{full[0].purpose}, {full[0].path}, has {full[0].free_bytes >> 20} MiB free",
            f"make {_MIN_FREE_BYTES >> 30} GiB free, or choose another disk with TRITON_CACHE_DIR and AITER_JIT_DIR",
        )
    return ok(f"the caches have at least {_MIN_FREE_BYTES >> 30} GiB free")


@machine_check("allocator", "torch's allocator", "pytorch#179930, aiter#4621")
def _allocator(machine: Machine) -> Diagnosis:
    if not machine.is_amd:
        return skipped(_NO_AMD)
    for name in _ALLOCATOR:
        options = machine.environment.get(name, "").lower().replace(" ", "")
        if "expandable_segments:true" in options:
            return problem(
                f"{name} has expandable_segments:True: with it graphs have failed to capture, and have replayed into "
                "freed memory",
                f"remove expandable_segments from {name}",
            )
    return ok("the allocator does not use expandable segments")


@machine_check("numa-balancing", "the kernel's NUMA balancing", "vllm#32902", at_build=False)
def _numa_balancing(machine: Machine) -> Diagnosis:
    if not machine.is_amd:
        return skipped(_NO_AMD)
    if machine.numa_balancing in ("", "0"):
        return ok("NUMA balancing is off" if machine.numa_balancing else "the kernel has no NUMA balancing")
    return warning(
        f"NUMA balancing is on ({machine.numa_balancing}): the kernel moves pages that GPUs read, which costs time "
        "and has caused errors",
        "on the host: sudo sysctl kernel.numa_balancing=0",
    )


@machine_check("shared-memory", "the size of /dev/shm", "ROCm's run flags", at_build=False)
def _shared_memory(machine: Machine) -> Diagnosis:
    if not machine.is_amd:
        return skipped(_NO_AMD)
    if machine.shm_bytes >= _MIN_SHM_BYTES:
        return ok(f"/dev/shm has {machine.shm_bytes >> 30} GiB")
    return warning(
        f"/dev/shm has {machine.shm_bytes >> 20} MiB: RCCL and engines with several processes need more",
        "docker run --ipc=host, or --shm-size=16g",
    )


@machine_check("debug-switches", "variables that slow everything down", "aiter#5264")
def _debug_switches(machine: Machine) -> Diagnosis:
    environment = machine.environment
    on = [f"{name}={environment[name]}" for name, off in _DEBUG.items() if environment.get(name, off) not in ("", off)]
    if on:
        names = " ".join(switch.partition("=")[0] for switch in on)
        return warning(f"debugging variables are set: {', '.join(on)}", f"unset {names} before serving")
    return ok("no debugging variable is set")


@machine_check("safeguards", "this project's own variables", "docs/environment.md")
def _settings(machine: Machine) -> Diagnosis:
    try:
        settings = read_settings(machine.environment)
        for variable in CHOICES.values():  # also those that only plug-ins read
            variable.word(machine.environment)
    except BadSetting as error:
        return problem(str(error), "set the variable to an allowed value, or unset it")
    if settings.disable_guards:
        return warning(
            f"{DISABLE_GUARDS} switches safeguards off: {', '.join(settings.disable_guards)}", f"unset {DISABLE_GUARDS}"
        )
    wrong = misspelt(machine.environment)
    if wrong:
        return warning(
            "nothing reads " + ", ".join(wrong), "; ".join(f"rename {name} to {meant}" for name, meant in wrong.items())
        )
    return ok("all safeguards are on")


@machine_check("engine-switches", "do engines use AITER?", "vllm#56945, vllm#46596")
def _engine_switches(machine: Machine) -> Diagnosis:
    copy = machine.imported_aiter
    if copy is None or not copy.is_amds or not machine.is_amd:
        return skipped("AITER is not installed, or there is no AMD GPU")
    off = [
        (engine, switch)
        for engine, switch in _ENGINE_SWITCHES.items()
        if machine.versions_of(engine) and machine.environment.get(switch, "0").lower() not in ("1", "true")
    ]
    if off:
        return warning(
            f"{', '.join((engine for engine, _ in off))} does not use AITER by default",
            f"export {' '.join(f'{switch}=1' for _, switch in off)}",
        )
    return ok("no engine has AITER switched off")

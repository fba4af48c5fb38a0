"""Machines as data: healthy ones of every make, and ones with one broken thing each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocm_attn.cli.doctor.finding import Severity
from rocm_attn.cli.doctor.machine import (
    AiterCopy,
    AiterModule,
    DeviceNode,
    Distribution,
    Folder,
    ImportFailure,
    LoadedLibrary,
    Machine,
    NotInstalled,
    TorchBuild,
    TritonBuild,
)

SITE = "/opt/venv/lib/python3.12/site-packages"
RENDER_GID = 992


def _folder(purpose: str, path: str) -> Folder:
    return Folder(purpose, path, writable=True, owner=1000, mode=0o755, filesystem="ext4", free_bytes=100 << 30)


MODULE = AiterModule(f"{SITE}/aiter/jit/module_aiter_core.so", ("gfx942", "gfx950"), built=2000.0)
AITER = AiterCopy(f"{SITE}/aiter", is_amds=True, modules=(MODULE,), installed=1000.0)


def library(name: str, version: str, rocm: str, folder: str = f"{SITE}/torch/lib") -> LoadedLibrary:
    path = f"{folder}/{name}.so"
    return LoadedLibrary(name, path, path, version, rocm)


LOADED = (
    library("libamdhip64", "7.2.53211", "7.2"),
    library("libhsa-runtime64", "1.18.70204", "7.2.4"),
    library("librocblas", "5.2.0.3ff05c6a", ""),
)

MI300 = Machine(
    uid=1000,
    environment={"HOME": "/home/server", "AITER_JIT_DIR": "/cache/aiter"},
    distributions=(
        Distribution("torch", "2.10.0+rocm7.2.4"),
        Distribution("pytorch-triton-rocm", "3.6.0"),
        Distribution("amd-aiter", "0.1.20+rocm7.2", requires=("pybind11", "einops")),
        Distribution("pybind11", "3.0.1"),
        Distribution("einops", "0.8.1"),
    ),
    torch=TorchBuild("2.10.0+rocm7.2.4", hip="7.2.53211-e1a6bc5663", cuda="", num_gpus=8),
    triton=TritonBuild("3.6.0", ("amd", "nvidia")),
    loaded=LOADED,
    named_hip="",
    driver="6.16.13",
    rocm=(7, 2, 4),
    amd_gpus=("gfx942",) * 8,
    nvidia_gpus=(),
    nodes=(
        DeviceNode("/dev/kfd", usable=True, gid=RENDER_GID),
        *(DeviceNode(f"/dev/dri/renderD{128 + gpu}", usable=True, gid=RENDER_GID) for gpu in range(8)),
    ),
    aiter=(AITER,),
    aiter_jit=(AiterModule("/cache/aiter/module_mha.so", ("gfx942",), built=2000.0),),
    aiter_jit_dir="/cache/aiter",
    aiter_linked=("module_aiter_core.so",),
    leftover_locks=(),
    folders=(
        _folder("Triton's cache", "/home/server/.triton/cache"),
        _folder("AITER's cache", "/cache/aiter"),
    ),
    c_compiler="/usr/bin/gcc",
    python_headers=True,
    hipcc="/opt/rocm/bin/hipcc",
    numa_balancing="0",
    shm_bytes=64 << 30,
)

CPU_ONLY = replace(
    MI300,
    distributions=(Distribution("torch", "2.13.0+cpu"),),
    torch=TorchBuild("2.13.0+cpu", hip="", cuda="", num_gpus=0),
    triton=NotInstalled(),
    loaded=(),
    driver="",
    rocm=(),
    amd_gpus=(),
    nodes=(),
    aiter=(),
    aiter_jit=(),
    folders=MI300.folders[:1],
    hipcc="",
    numa_balancing="1",
    shm_bytes=64 << 20,
)

H200 = replace(
    CPU_ONLY,
    distributions=(Distribution("torch", "2.11.0+cu130"), Distribution("triton", "3.6.0")),
    torch=TorchBuild("2.11.0+cu130", hip="", cuda="13.0", num_gpus=1),
    triton=TritonBuild("3.6.0", ("amd", "nvidia")),
    nvidia_gpus=("NVIDIA H200",),
)

HEALTHY = {"MI300": MI300, "CPU only": CPU_ONLY, "H200": H200}


@dataclass(frozen=True, slots=True)
class Broken:
    """A machine with one thing wrong.

    check:      the check that must report it
    found, fix: words that it must use
    also:       checks that notice it too
    """

    machine: Machine
    check: str
    severity: Severity
    found: str
    fix: str
    also: frozenset[str] = frozenset()


def _with(base: Machine = MI300, **environment: str) -> Machine:
    return replace(base, environment={**base.environment, **environment})


def _torch(version: str, hip: str, cuda: str = "", num_gpus: int = 8) -> TorchBuild:
    return TorchBuild(version, hip=hip, cuda=cuda, num_gpus=num_gpus)


def _on_rocm(torch_version: str, hip: str, system: tuple[int, ...]) -> Machine:
    """Returns torch and the system on a ROCm release, without AITER, which has a release of its own."""
    of_torch = ".".join(hip.split(".")[:2])
    loaded = tuple(replace(each, rocm=of_torch) for each in LOADED)
    return replace(_without_aiter(MI300), torch=_torch(torch_version, hip), loaded=loaded, rocm=system)


def _without_aiter(machine: Machine) -> Machine:
    kept = tuple(found for found in machine.distributions if found.name != "amd-aiter")
    return replace(machine, distributions=kept, aiter=(), aiter_jit=())


def _distributions(change: Callable[[Distribution], Distribution | None], *more: Distribution) -> Machine:
    changed = (change(found) for found in MI300.distributions)
    return replace(MI300, distributions=(*(found for found in changed if found is not None), *more))


def _aiter_version(version: str) -> Machine:
    return _distributions(lambda found: replace(found, version=version) if found.name == "amd-aiter" else found)


def _all(*more: Distribution) -> Machine:
    return _distributions(lambda found: found, *more)


def _problem(machine: Machine, check: str, found: str, fix: str, *also: str) -> Broken:
    return Broken(machine, check, Severity.PROBLEM, found, fix, frozenset(also))


def _warning(machine: Machine, check: str, found: str, fix: str) -> Broken:
    return Broken(machine, check, Severity.WARNING, found, fix)


_STRANGER = Distribution("aiter", "0.13.20191203")
_UNDEFINED = "undefined symbol: _ZN3c103hip28c10_hip_check_implementationEiPKcS2_jb"

_SYSTEM_BLAS = library("librocblas", "4.4.1", "6.4.1", "/opt/rocm-6.4.1/lib")

BROKEN = {
    "the system's HIP in place of torch's": _problem(
        replace(MI300, loaded=tuple(replace(each, rocm="7.0.2") for each in LOADED)),
        "rocm-loaded",
        "torch is built for ROCm 7.2.4 and has loaded libamdhip64 7.2.53211 of ROCm 7.0.2",
        "unset LD_LIBRARY_PATH",
    ),
    "two rocBLAS in one process": _problem(
        replace(MI300, loaded=(*LOADED, _SYSTEM_BLAS)),
        "rocm-loaded",
        f"loaded from two files: {SITE}/torch/lib/librocblas.so and /opt/rocm-6.4.1/lib/librocblas.so",
        "unset LD_LIBRARY_PATH",
        "rocm-places",
    ),
    "one library of another release": _warning(
        replace(MI300, loaded=(*LOADED[:2], replace(LOADED[2], rocm="7.1.0"))),
        "rocm-loaded",
        "in addition to ROCm 7.2.4, which torch is built for, it has loaded librocblas",
        "built for the release",
    ),
    "libraries that crash when they are asked": _problem(
        replace(MI300, loaded=ImportFailure("the process was ended by signal 11")),
        "rocm-loaded",
        "cannot be read: the process was ended by signal 11",
        "install torch and its ROCm libraries again",
    ),
    "libraries of two installations": _warning(
        replace(MI300, loaded=(*LOADED[:2], library("librocblas", "5.2.0", "7.2.4", "/opt/rocm-7.2.4/lib"))),
        "rocm-places",
        "from 2 installations: libamdhip64, libhsa-runtime64: torch's own; librocblas: in /opt/rocm-7.2.4/lib",
        "unset LD_LIBRARY_PATH",
    ),
    "another HIP for Triton": _problem(
        replace(_with(TRITON_LIBHIP_PATH="/opt/rocm/lib/libamdhip64.so"), named_hip="1:2"),
        "triton-hip",
        f"torch has loaded {SITE}/torch/lib/libamdhip64.so",
        "unset TRITON_LIBHIP_PATH",
    ),
    "no HIP for Triton": _problem(
        _with(TRITON_LIBHIP_PATH="/opt/rocm-6/lib/libamdhip64.so"),
        "triton-hip",
        "does not exist",
        "unset TRITON_LIBHIP_PATH",
    ),
    "no /dev/kfd in the container": _problem(
        replace(MI300, nodes=()), "gpu-nodes", "/dev/kfd cannot be seen", "--device=/dev/kfd"
    ),
    "no render nodes in the container": _problem(
        replace(MI300, nodes=MI300.nodes[:1]), "gpu-nodes", "the render nodes", "--device=/dev/dri"
    ),
    "a user outside of the render group": _problem(
        replace(MI300, nodes=tuple(replace(node, usable=False) for node in MI300.nodes)),
        "gpu-nodes",
        "user 1000 has no access to /dev/kfd",
        f"--group-add {RENDER_GID}",
    ),
    "HIP and CUDA disagree": _problem(
        _with(HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="2,3"),
        "visible-devices",
        "libraries disagree",
        "set HIP_VISIBLE_DEVICES alone",
    ),
    "every GPU hidden": _problem(
        _with(HIP_VISIBLE_DEVICES=""), "visible-devices", "every GPU is hidden", "unset HIP_VISIBLE_DEVICES"
    ),
    "every GPU of an NVIDIA host hidden": _problem(
        _with(H200, CUDA_VISIBLE_DEVICES="-1"), "visible-devices", "hidden", "unset CUDA_VISIBLE_DEVICES"
    ),
    "numbered past what ROCR leaves": _problem(
        _with(ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="4"),
        "visible-devices",
        "HIP_VISIBLE_DEVICES counts among",
        "not both",
    ),
    "torch counts no GPU": _problem(
        replace(MI300, torch=_torch("2.10.0+rocm7.2.4", "7.2.53211", num_gpus=0)),
        "gpu-count",
        "lists 8 GPUs and torch counts none",
        "driver older",
    ),
    "another GPU is pretended": _problem(
        _with(HSA_OVERRIDE_GFX_VERSION="9.0.10"), "gpu-arch", "another GPU than gfx942", "unset HSA_OVERRIDE"
    ),
    "GPUs of two archs": _warning(
        replace(
            MI300,
            amd_gpus=("gfx942", "gfx950"),
            torch=_torch("2.10.0+rocm7.2.4", "7.2.53211", num_gpus=2),
            aiter_jit=(),
        ),
        "gpu-arch",
        "several archs",
        "HIP_VISIBLE_DEVICES",
    ),
    "a Radeon": _warning(
        replace(_without_aiter(MI300), amd_gpus=("gfx1100",)), "gpu-arch", "gfx1100 has no tuned kernels", "explain"
    ),
    "no torch": _problem(
        replace(CPU_ONLY, torch=NotInstalled()), "torch-import", "torch is not installed", "install the torch"
    ),
    "torch cannot be imported": _problem(
        replace(CPU_ONLY, torch=ImportFailure(f"ImportError: libtorch_hip.so: {_UNDEFINED}")),
        "torch-import",
        "c10_hip_check_implementation",
        "from one release",
    ),
    "PyPI's torch on an AMD host": _problem(
        replace(_without_aiter(MI300), torch=_torch("2.10.0+cu128", "", "12.8", num_gpus=0)),
        "torch-gpus",
        "8 AMD GPUs (gfx942), and torch 2.10.0+cu128 is built for CUDA",
        "PIP_CONSTRAINT",
        "gpu-count",
    ),
    "torch for CPUs on an NVIDIA host": _problem(
        replace(H200, torch=_torch("2.13.0+cpu", "", num_gpus=0)),
        "torch-gpus",
        "built for CPUs",
        "torch for CUDA",
        "gpu-count",
    ),
    "CUDA libraries left by another torch": _warning(
        _all(Distribution("nvidia-cublas-cu12", "12.8.4.1")),
        "cuda-leftovers",
        "nvidia-cublas-cu12",
        "uninstall these libraries",
    ),
    "ROCm 7.2.0": _problem(
        _on_rocm("2.10.0+rocm7.2.0", "7.2.26015", (7, 2, 0)),
        "rocm-release",
        "aborts it (sglang#24011); replayed graphs",
        "7.2.4 or later",
    ),
    "ROCm 6.4": _problem(
        _on_rocm("2.9.0+rocm6.4", "6.4.43482", (6, 4, 1)), "rocm-release", "sglang#24011", "7.2.4 or later"
    ),
    "ROCm 7.2.3, which only the system tells": _warning(
        _on_rocm("2.10.0", "7.2.53211", (7, 2, 3)), "rocm-release", "ROCm 7.2.3: replayed graphs", "7.2.4"
    ),
    "ROCm 7.2 of an unknown patch": _warning(
        _on_rocm("2.10.0+git1234", "7.2.53211", ()), "rocm-release", "unknown patch", "/opt/rocm/.info"
    ),
    "torch and the system of different ROCm releases": _problem(
        _on_rocm("2.12.0+rocm7.14.0", "7.14.1", (7, 2, 4)),
        "rocm-match",
        "torch is built for ROCm 7.14.0 and the system has 7.2.4",
        "the system's release",
    ),
    "no Triton": _problem(replace(H200, triton=NotInstalled()), "triton-import", "not installed", "install the Triton"),
    "Triton cannot be imported": _problem(
        replace(MI300, triton=ImportFailure("ImportError: libamdhip64.so.6: cannot open shared object file")),
        "triton-import",
        "libamdhip64.so.6",
        "brings its own",
    ),
    "Triton without AMD's compiler": _problem(
        replace(MI300, triton=TritonBuild("3.6.0", ("nvidia",))),
        "triton-import",
        "no compiler for amd",
        "brings its own",
    ),
    "an old Triton": _warning(
        replace(MI300, triton=TritonBuild("3.2.0", ("amd",))), "triton-import", "older than 3.6", "newer"
    ),
    "two Tritons": _problem(
        _all(Distribution("triton", "3.9.0")),
        "triton-copies",
        "pytorch-triton-rocm 3.6.0, triton 3.9.0",
        "uninstall pytorch-triton-rocm triton",
    ),
    "kernels are interpreted": _problem(
        _with(TRITON_INTERPRET="1"), "triton-interpreter", "bf16 arithmetic is wrong", "unset"
    ),
    "no C compiler": _problem(
        replace(MI300, c_compiler="", python_headers=False),
        "c-compiler",
        "a C compiler and Python.h cannot be found",
        "python3-dev",
    ),
    "the stranger on PyPI": _problem(
        replace(
            _distributions(lambda found: None if found.name == "amd-aiter" else found, _STRANGER),
            aiter=(AiterCopy(f"{SITE}/aiter", is_amds=False),),
            aiter_jit=(),
        ),
        "aiter-package",
        "aiter 0.13.20191203 is another project",
        "--extra-index-url",
    ),
    "the stranger beside AMD's": _problem(
        _all(_STRANGER), "aiter-package", "next to amd-aiter", "pip uninstall aiter amd-aiter"
    ),
    "two AITERs": _problem(
        replace(MI300, aiter=(replace(AITER, path="/src/aiter/aiter"), AITER)),
        "aiter-copies",
        "2 times: /src/aiter/aiter,",
        "keep one",
    ),
    "AITER of another ROCm release": _problem(
        _aiter_version("0.1.20+rocm7.1"),
        "aiter-release",
        "built for ROCm 7.1 and torch for 7.2.4",
        "pip uninstall amd-aiter",
    ),
    "AITER of another ROCm release, written without a dot": _problem(
        _aiter_version("0.1.20.post1+rocm70"), "aiter-release", "built for ROCm 7.0", "uninstall"
    ),
    "kernels that ignore scales": _warning(
        _with(AITER_ENABLE_EXPERIMENTAL="1", QKV_VERSION="EXPERIMENTAL"),
        "aiter-switches",
        "AITER_ENABLE_EXPERIMENTAL=1 decodes 64 or 128 heads over latent pages in eight bits, and verifies four tokens",
        "unset AITER_ENABLE_EXPERIMENTAL, QKV_VERSION",
    ),
    "an AITER that is no longer served": _warning(
        _aiter_version("0.1.12.post1"), "aiter-release", "is older than v0.1.15, the first", "a later release"
    ),
    "a release of AITER that was never read": _warning(
        _aiter_version("0.1.29+rocm7.2"), "aiter-read", "AITER 0.1.29+rocm7.2 was never read;", "was read"
    ),
    "an index without PyPI": _problem(
        _distributions(lambda found: None if found.name == "pybind11" else found),
        "aiter-requirements",
        "needs pybind11",
        "pip install pybind11",
    ),
    "a module of AITER for another torch": _problem(
        replace(MI300, aiter=(replace(AITER, modules=(replace(MODULE, error=f"{MODULE.path}: {_UNDEFINED}"),)),)),
        "aiter-modules",
        "c10_hip_check_implementation",
        "build AITER again",
    ),
    "a module of AITER for another C++ library": _problem(
        replace(MI300, aiter_jit=(replace(MODULE, error="version `GLIBCXX_3.4.31' not found"),)),
        "aiter-modules",
        "GLIBCXX_3.4.31",
        "build AITER again",
    ),
    "an AITER without a function": _problem(
        replace(MI300, aiter=(replace(AITER, missing=("unified_attention",)),)),
        "aiter-entry-points",
        "does not define unified_attention",
        "--provider triton",
    ),
    "AITER set to compile for another GPU": _problem(
        _with(GPU_ARCHS="gfx950;gfx90a"), "aiter-archs", "the GPU is gfx942", "unset GPU_ARCHS"
    ),
    "AITER's modules for another GPU": _warning(
        replace(MI300, aiter=(replace(AITER, modules=(replace(MODULE, archs=("gfx950",)),)),)),
        "aiter-archs",
        "have no code for gfx942",
        "prewarm",
    ),
    "modules from before an upgrade": _warning(
        replace(MI300, aiter=(replace(AITER, installed=3000.0),)),
        "aiter-stale",
        "older than the installed AITER",
        "remove these files",
    ),
    "nothing is compiled yet": _warning(
        replace(MI300, aiter=(replace(AITER, modules=()),), aiter_jit=()),
        "aiter-prebuilt",
        "waits minutes for the compiler",
        "rocm-attn prewarm",
    ),
    "a JIT folder that hides what is there": _warning(
        replace(MI300, aiter_linked=()),
        "aiter-jit-dir",
        "hides 1 modules that were installed compiled, such as module_aiter_core.so",
        f"link {SITE}/aiter/jit/*.so into /cache/aiter",
    ),
    "a package of AITER's that only root may write to": _problem(
        replace(MI300, environment={"HOME": "/home/server"}, aiter_jit_dir="/home/server/.aiter/jit"),
        "aiter-jit-dir",
        "AITER cannot import the modules that it compiles into /home/server/.aiter/jit",
        "set AITER_JIT_DIR",
    ),
    "no hipcc": _warning(replace(MI300, hipcc=""), "aiter-compiler", "hipcc is not installed", "PREBUILD_KERNELS=1"),
    "a build was killed": _problem(
        replace(MI300, leftover_locks=("/cache/aiter/build/lock_module_mha",)),
        "aiter-locks",
        "lock_module_mha",
        "remove these files",
    ),
    "root's cache in a container for others": _problem(
        replace(MI300, folders=(replace(MI300.folders[0], writable=False, owner=0, mode=0o700), MI300.folders[1])),
        "caches",
        "owner 0, mode 0700",
        "chown",
    ),
    "a cache without a name": _problem(
        replace(MI300, environment={**MI300.environment, "TRITON_CACHE_DIR": ""}),
        "caches",
        "TRITON_CACHE_DIR is empty",
        "unset TRITON_CACHE_DIR",
    ),
    "a home on NFS": _warning(
        replace(MI300, folders=(replace(MI300.folders[0], filesystem="nfs4"),)),
        "cache-filesystem",
        "is on nfs4",
        "local disk",
    ),
    "a full disk": _warning(
        replace(MI300, folders=(replace(MI300.folders[0], free_bytes=300 << 20),)),
        "cache-space",
        "has 300 MiB free",
        "4 GiB",
    ),
    "expandable segments": _problem(
        _with(PYTORCH_HIP_ALLOC_CONF="max_split_size_mb:512, expandable_segments:True"),
        "allocator",
        "expandable_segments",
        "remove expandable_segments",
    ),
    "NUMA balancing": _warning(
        replace(MI300, numa_balancing="1"), "numa-balancing", "is on (1)", "kernel.numa_balancing=0"
    ),
    "Docker's shared memory": _warning(replace(MI300, shm_bytes=64 << 20), "shared-memory", "has 64 MiB", "--ipc=host"),
    "a debugging session that was left on": _warning(
        _with(AMD_SERIALIZE_KERNEL="3", HIP_LAUNCH_BLOCKING="1"),
        "debug-switches",
        "AMD_SERIALIZE_KERNEL=3",
        "unset HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL",
    ),
    "a safeguard is off": _warning(
        _with(ROCM_ATTN_DEBUG="1", ROCM_ATTN_DISABLE_GUARDS="pads"), "safeguards", "off: pads", "unset"
    ),
    "a setting with a typo": _problem(
        _with(ROCM_ATTN_DEBUG="yes"), "safeguards", "it must be 0 or 1", "an allowed value"
    ),
    "a provider that plug-ins do not have": _problem(
        _with(ROCM_ATTN_PROVIDER="cpu"), "safeguards", "it must be auto, triton, aiter or torch", "an allowed value"
    ),
    "a variable with a typo": _warning(
        _with(ROCM_ATTN_PROVIDR="aiter"), "safeguards", "ROCM_ATTN_PROVIDR", "rename ROCM_ATTN_PROVIDR to"
    ),
    "vLLM without AITER": _warning(
        _all(Distribution("vllm", "0.22.1")), "engine-switches", "vllm", "export VLLM_ROCM_USE_AITER=1"
    ),
}

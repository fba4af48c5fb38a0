"""Checks of Triton and of its requirements for compiling."""

from rocm_attn.cli.doctor.finding import Diagnosis, machine_check, ok, problem, skipped, warning
from rocm_attn.cli.doctor.machine import ImportFailure, Machine, NotInstalled, TritonBuild, release_of
from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS
from rocm_attn.machine.settings import interprets_kernels

_OLDEST = (3, 6)
_COMES_WITH_TORCH = "install the Triton that your torch requires; torch for ROCm brings its own"


@machine_check("triton-import", "is Triton installed, and does it compile for the GPU?", "sglang#34741, triton#10654")
def _imports(machine: Machine) -> Diagnosis:
    match machine.triton:
        case TritonBuild(version, backends):
            needed = {"amd"} if machine.amd_gpus else {"nvidia"} if machine.nvidia_gpus else set()
            if not needed <= set(backends):
                return problem(
                    f"triton {version} has no compiler for {', '.join(needed)}; it has {', '.join(backends) or 'none'}",
                    _COMES_WITH_TORCH,
                )
            if release_of(version)[:2] < _OLDEST:
                return warning(
                    f"triton {version} is older than 3.6, the oldest release that is tested",
                    "use a torch with a newer Triton",
                )
            return ok(f"triton {version} compiles for {', '.join(backends)}")
        case ImportFailure(error):
            return problem(f"triton cannot be imported: {error}", _COMES_WITH_TORCH)
        case NotInstalled():
            if machine.has_gpu or machine.torch_rocm:
                return problem("triton is not installed; no kernel can be compiled", _COMES_WITH_TORCH)
            return skipped("triton is not installed; CPUs work without it")


@machine_check("triton-copies", "is Triton installed once?", "mamba#595, ROCm/triton#626")
def _copies(machine: Machine) -> Diagnosis:
    found = [d for d in machine.distributions if d.name in TRITON_DISTRIBUTIONS]
    names = ", ".join(f"{d.name} {d.version}" for d in found)
    if len(found) < 2:
        return ok(f"one Triton: {names}") if found else skipped("no Triton is installed")
    return problem(
        f"several distributions install the package triton, and the last one overwrote the others: {names}",
        f"pip uninstall {' '.join(dict.fromkeys(d.name for d in found))}; then {_COMES_WITH_TORCH}",
    )


@machine_check("triton-interpreter", "are kernels compiled?", "this project's tests")
def _interpreter(machine: Machine) -> Diagnosis:
    if not interprets_kernels(machine.environment):
        return ok("Triton compiles its kernels")
    value = machine.environment["TRITON_INTERPRET"]
    if not machine.has_gpu:
        return skipped(f"TRITON_INTERPRET={value}: kernels are interpreted, as the tests on a CPU need")
    return problem(
        f"TRITON_INTERPRET={value}: kernels run on the CPU, thousands of times slower, and bf16 arithmetic is wrong",
        "unset TRITON_INTERPRET",
    )


@machine_check("c-compiler", "the compiler and headers that Triton needs", "sglang#9603")
def _c_compiler(machine: Machine) -> Diagnosis:
    if not (machine.has_gpu or machine.torch_rocm):
        return skipped("no GPU: Triton compiles no launcher")
    missing = [
        name
        for name, is_there in (("a C compiler", machine.c_compiler), ("Python.h", machine.python_headers))
        if not is_there
    ]
    if missing:
        return problem(
            f"{' and '.join(missing)} cannot be found: Triton compiles a small C launcher when its driver starts",
            "install gcc and this Python's headers (on Debian and Ubuntu: gcc python3-dev), or set CC",
        )
    return ok(f"Triton's launchers are compiled by {machine.c_compiler}")

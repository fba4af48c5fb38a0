"""Waits of our own kernels, each removed or made weaker: what a run with late results shows wrong, the check finds.

The check has no say in which mutants are wrong: late_results.py runs them, and the case's own comparison fails, or an
address strays. Mutants that it does not show wrong are redundant waits, or waits of paths that the run does not
take.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import pytest

from rocm_lab.simulator import kernel as simulated_kernel
from rocm_lab.simulator import launcher
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.kernel import SimulatedKernel
from rocm_lab.simulator.launcher import ARCHS, Simulation, simulated
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.attention_cases import Case
from tests.amd.simulator.check_cases import run_check
from tests.amd.simulator.kernel_cases import BF16, STEP, linear_pools, run_step, run_store
from tests.amd.simulator.late_results import LateKernel
from tests.amd.simulator.wait_mutants import mutants_of

ONE_DECODE = replace(STEP, kv_len=[40], q_len=[1], heads=(2, 1), dims=(64, 64), dtype=BF16)
ONE_EXTEND = replace(ONE_DECODE, kv_len=[33], q_len=[9])


@dataclass(frozen=True, slots=True)
class Mutated:
    """A kernel of a run, of whose mutants each stride-th is tried, and how many of those the judge must show wrong."""

    kernel: str
    run: Callable[[str], None]
    stride: int
    least_wrong: int

    def __str__(self) -> str:
        return self.kernel

    def simulate(self, arch: str) -> Simulation:
        """Runs it with every kernel as machine code."""
        with simulated(arch) as simulation:
            self.run(arch)
        return simulation


def _step(case: Case) -> Callable[[str], None]:
    return lambda arch: run_step(arch, case, is_large=False)


KERNELS = {
    "table_update": Mutated("_table_update_kernel", lambda _: run_check("metadata/table_update.py"), 1, 6),
    "store": Mutated("_store_kernel", lambda _: run_store(BF16, linear_pools, is_large=False), 3, 4),
    "decode": Mutated("_decode_kernel", _step(ONE_DECODE), 19, 2),
}
AT_NIGHT = {
    "store": replace(KERNELS["store"], stride=1),
    "decode": replace(KERNELS["decode"], stride=1, least_wrong=40),
    "extend": Mutated("_extend_kernel", _step(ONE_EXTEND), 2, 25),
    "list": Mutated("_list_kernel", _step(ONE_EXTEND), 2, 5),
}

# By day the two that take seconds run on an arch each.
ARCHS_BY_DAY = {"table_update": ARCHS, "store": ARCHS[1:], "decode": ARCHS[:1]}


@pytest.mark.parametrize(
    ("mutated", "arch"),
    [
        pytest.param(each, arch, id=f"{arch}-{name}", marks=[pytest.mark.nightly] * (arch not in ARCHS_BY_DAY[name]))
        for name, each in KERNELS.items()
        for arch in ARCHS
    ]
    + [
        pytest.param(each, arch, id=f"{arch}-all of {name}", marks=pytest.mark.nightly)
        for name, each in AT_NIGHT.items()
        for arch in ARCHS
    ],
)
def test_every_mutant_that_late_results_show_wrong_is_found(
    mutated: Mutated, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: dict[str, tuple[launcher.Code, SimulatedKernel]] = {}
    monkeypatch.setattr(launcher, "_simulated", kernels)
    sound = mutated.simulate(arch)
    # A loop to a bound that is poison would take minutes up to the simulator's own limit.
    most = max(launch.instructions for launch in sound.launches)
    monkeypatch.setattr(simulated_kernel, "MAX_STEPS_OF_A_WAVE", most)
    of_run = {key: each for key, each in kernels.items() if each[1].assembly.name == mutated.kernel}
    assert of_run
    tried: Counter[tuple[bool, Word]] = Counter()
    missed = []
    for key, (code, kernel) in of_run.items():
        kernels[key] = code, LateKernel(kernel.assembly, arch)
        mutated.simulate(arch)
        assert check_waits(kernel.assembly, arch).word is Word.PROVED
        for mutant in islice(mutants_of(kernel.assembly), 0, None, mutated.stride):
            kernels[key] = code, LateKernel(mutant.assembly, arch)
            word = check_waits(mutant.assembly, arch).word
            is_wrong = _is_wrong(mutated, arch)
            tried[is_wrong, word] += 1
            if is_wrong and word is Word.PROVED:
                missed.append(mutant.name)
        kernels[key] = code, kernel
    assert not missed
    assert sum(count for (is_wrong, _), count in tried.items() if is_wrong) >= mutated.least_wrong, tried


def _is_wrong(mutated: Mutated, arch: str) -> bool:
    try:
        mutated.simulate(arch)
    except (AssertionError, SimulationFault, UnknownInstruction, OverflowError):
        return True  # the last two: a descriptor or an address of poison is none that the simulator can read
    return False

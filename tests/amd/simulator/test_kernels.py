"""Every kernel of kernels/, executed as gfx942 and gfx950 machine code, gives the right answer and strays nowhere."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.core import POISON
from rocm_lab.simulator.launcher import ARCHS, Code, simulated
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.attention_cases import build, run_decode, run_extend, tiles_of
from tests.amd.offline.test_compiles import TO_READ, names_of_all_kernels
from tests.amd.simulator.case import KernelCase, Runs
from tests.amd.simulator.kernel_cases import BF16, CPU, GRID, QUICK, STEP

OF_CDNA = ("_cdna_decode_kernel", "_cdna_extend_kernel", "_cdna_latent_decode_kernel", "_cdna_selected_kernel")

every_arch = pytest.mark.parametrize("arch", ARCHS)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The cases of this session, which run on all cores while the first tests wait for theirs."""
    started = Runs()
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, KernelCase):
            started.start(case)
    yield started
    started.close()


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_kernel_gives_the_right_answer(case: KernelCase, runs: Runs) -> None:
    simulation = runs.result(case)
    assert simulation.kernels
    assert simulation.instructions > 0


def test_every_kernel_was_executed(runs: Runs) -> None:
    """On one arch; the grid has what an arch leaves out."""
    executed = {name for case in QUICK for name in runs.result(case).kernels}
    assert executed == names_of_all_kernels() | {*OF_CDNA, TO_READ}


def test_every_kernel_waits_for_what_it_uses(runs: Runs) -> None:
    """The variant that was executed first, by a proof that runs nothing."""
    codes: dict[str, Code] = {}
    for case in QUICK:
        for launch in runs.result(case).launches:
            codes.setdefault(launch.code.kernel, launch.code)
    verdicts = {name: check_waits(parse_assembly(code.text), code.arch) for name, code in codes.items()}
    assert [name for name, verdict in verdicts.items() if verdict.word is not Word.PROVED] == []


@every_arch
@pytest.mark.parametrize("kernel", ["_decode_kernel", "_extend_kernel", "_store_kernel"])
def test_both_pointer_widths_were_executed(arch: str, kernel: str, runs: Runs) -> None:
    """Above 2 GiB Triton leaves the 32-bit offsets of buffer instructions for 64-bit addresses."""
    accesses: dict[str, set[str]] = {"below": set(), "above": set()}
    for case in QUICK:
        width = case.name.rpartition("-")[2]
        if case.arch == arch and width in accesses:
            mnemonics = runs.result(case).mnemonics.get(kernel, frozenset())
            accesses[width] |= {name.split("_")[0] for name in mnemonics if name.startswith(("buffer_", "global_"))}
    assert "buffer" in accesses["below"]
    assert "global" in accesses["above"]


@every_arch
@pytest.mark.parametrize("kernel", ["_decode_kernel", "_extend_kernel"])
def test_keys_of_one_page_have_32_bit_offsets_from_its_first_key(arch: str, kernel: str, runs: Runs) -> None:
    """Above 2 GiB too. Page numbers are loaded from the place of their line in the table, a word at a time."""
    (case,) = (case for case in QUICK if case.arch == arch and case.name.endswith("page64-above"))
    loads = {name for name in runs.result(case).mnemonics[kernel] if "_load_" in name}
    assert "buffer_load_dwordx4" in loads
    assert not {name for name in loads if name.startswith("global_") and name != "global_load_dword"}


@every_arch
def test_matrix_units_were_executed(arch: str, runs: Runs) -> None:
    for case in QUICK:
        if case.arch == arch:
            for kernel, mnemonics in runs.result(case).mnemonics.items():
                if kernel in ("_decode_kernel", "_extend_kernel"):
                    assert any(name.startswith("v_mfma") for name in mnemonics), f"{case}: {kernel}"


def outputs_of_a_step(arch: str, poison: int) -> tuple[Tensor, Tensor]:
    """The bits of out and lse of a mixed step."""
    tensors = build(replace(STEP, kv_len=[40, 20], q_len=[1, 9], heads=(4, 2), dims=(64, 64), dtype=BF16), CPU)
    decode, extend = tiles_of(arch, tensors.case)
    with simulated(arch, poison=poison):
        run_extend(tensors, min_q_len=2, tiles=extend)
        run_decode(tensors, num_programs=3, tiles=decode)
    return tensors.out.view(torch.int16), tensors.lse.view(torch.int32)


@pytest.mark.fast(1)
@every_arch
def test_no_bit_depends_on_what_registers_and_lds_held_before(arch: str) -> None:
    out, lse = outputs_of_a_step(arch, POISON)
    for poison in (0, 0x3F803F80):
        other_out, other_lse = outputs_of_a_step(arch, poison)
        assert torch.equal(out, other_out)
        assert torch.equal(lse, other_lse)


def test_the_grid_holds_the_quick_cases_and_more() -> None:
    names = [str(case) for case in GRID]
    assert len(names) == len(set(names))
    assert {str(case) for case in QUICK} < set(names)

"""Attention over a selection for CDNA compiles: nothing spills to memory, waits are proved, and its loop takes few more
clocks than that of latent decode, and far fewer than that of the kernel for every layer."""

from dataclasses import replace

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.tuning.sparse_tiles import cdna_selected_tiles, selected_tiles
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.cdna_selected_cases import CASES, cases_of, run_cdna_selected
from tests.amd.kernels.sparse_cases import SelectedCase, build_selected
from tests.amd.offline.cdna_kernels import Latents, compiled_latents
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.cycle_counts import count_of
from tests.amd.offline.offline_driver import last_compiled_by

pytestmark = pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason=f"it needs Triton {' or '.join(map(str, TRITONS))}"
)

_CPU = torch.device("cpu")
_IN_EVERY_RUN = (("4_tiles", 1), ("records_4_tiles", 1))
# 64 heads on CDNA 4 have an address in accumulators until the loop begins, which counts as spilled.
_IN_ACCUMULATORS = 2


def _compiled(arch: str, case: SelectedCase, programs: int) -> CompiledKernel:
    name = "_cdna_selected_kernel"
    problem = build_selected(case, _CPU)
    return last_compiled_by(lambda: run_cdna_selected(arch, problem, programs), arch, [name])[name]


def _clocks_of_key(kernel: CompiledKernel, arch: str, keys: int) -> float:
    """Clocks of a SIMD for a key of all heads of a program. keys: those of an iteration"""
    count = count_of(kernel, arch)
    assert count is not None
    return float(count.clocks * kernel.metadata.num_warps / (4 * count.waves * keys))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "programs"),
    [
        pytest.param(name, programs, marks=[pytest.mark.nightly] * ((name, programs) not in _IN_EVERY_RUN))
        for name in cases_of(ARCHS[0])
        for programs in (1, 4, 60)
    ],
)
def test_it_fits_and_its_waits_are_proved(name: str, programs: int, arch: str) -> None:
    kernel = _compiled(arch, cases_of(arch)[name], programs)
    code = read_amd_code(kernel)
    assert (code.sgpr_spills, code.scratch_bytes) == (0, 0)
    assert code.vgpr_spills <= _IN_ACCUMULATORS
    assert check_waits(parse_assembly(kernel.asm["amdgcn"]), arch).word is Word.PROVED


@pytest.mark.parametrize(
    ("heads", "arch"),
    [
        pytest.param(heads, arch, marks=[pytest.mark.nightly] * ((heads, arch) != (64, "gfx950")))
        for heads in (64, 32, 16)
        for arch in ARCHS
    ],
)
def test_a_key_takes_few_more_clocks_than_in_latent_decode(heads: int, arch: str) -> None:
    """Widths are those of published models: slots of a whole selection are in LDS."""
    tiles = cdna_selected_tiles(arch, heads, is_record=False)
    keys = tiles.key_block * tiles.num_stages
    case = replace(CASES["4_tiles"], heads=(heads, 1), width=2048)
    ours = _clocks_of_key(_compiled(arch, case, 1), arch, keys)
    dense = _clocks_of_key(compiled_latents(arch, Latents(heads)), arch, keys)
    assert ours <= dense * 1.1
    assert ours * 2 <= _plain_clocks_of_key(arch, case)


@pytest.mark.parametrize(
    ("heads", "arch", "fewer"),
    [
        (64, "gfx950", 5.5),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in ((16, "gfx950", 3.5), (16, "gfx942", 4), (32, "gfx942", 4.5))
        ),
    ],
)
def test_a_key_in_a_record_takes_far_fewer_clocks_than_in_the_plain_kernel(heads: int, arch: str, fewer: float) -> None:
    """The plain kernel has 32 heads of a program at most."""
    tiles = cdna_selected_tiles(arch, heads, is_record=True)
    case = replace(cases_of(arch)["records_4_tiles"], heads=(heads, 1), width=2048)
    ours = _clocks_of_key(_compiled(arch, case, 1), arch, tiles.key_block * tiles.num_stages)
    assert ours * fewer <= _plain_clocks_of_key(arch, case) * (2 if heads == 64 else 1)


def _plain_clocks_of_key(arch: str, case: SelectedCase) -> float:
    """Clocks of a SIMD for a key of all heads of a program of the kernel for every layer."""
    problem = build_selected(replace(case, width=64), _CPU)
    is_record = case.scales is not Scales.NONE
    tiles = selected_tiles(
        arch,
        gqa_ratio=case.heads[0],
        head_dim=576,
        v_head_dim=512,
        dtype=torch.bfloat16,
        is_coded=is_record,
        is_record=is_record,
    )
    name = "_selected_attention_kernel"
    kernel = last_compiled_by(
        lambda: launch_selected_attention(problem.args, scale=1.0, tiles=tiles, programs=1), arch, [name]
    )[name]
    return _clocks_of_key(kernel, arch, tiles.key_block)

"""Latent decode for CDNA compiles: nothing spills, no row passes LDS, waits are proved, and its loop needs no more than
AITER's assembly does."""

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.latent_tiles import CDNA_LATENT_TILES
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.waits.check import Word, check_waits
from tests.amd.offline.cdna_kernels import Latents, compiled_latents, latent_traffic
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.hot_loop import bytes_in_flight, hot_loop_of, lds_bytes, loaded_bytes

pytestmark = pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason=f"it needs Triton {' or '.join(map(str, TRITONS))}"
)

# A wave's loop over as many keys in mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co of ROCm/aiter e4048607a5, the same
# code for both archs, by llvm-objdump: instructions, waits, the fewest bytes of a lane that a wait leaves in flight.
AITER_INSTRUCTIONS, AITER_WAITS, AITER_IN_FLIGHT = 849, 16, 128
TILES = CDNA_LATENT_TILES[0]
LANES = 64 * TILES.num_warps
LAYERS = {
    "pages_of_64": Latents(16),
    "tokens": Latents(16, page_size=1),
    "float16": Latents(16, page_size=16, dtype=torch.float16),
    "few_heads": Latents(5, page_size=48),
}
# For a KiB of rows, of AITER's files for 64 heads (docs/cycles.md): instructions, waits, barriers, bytes of LDS; and
# KiB in flight of a wave.
AITER_OF_64 = {"gfx942": (69.22, 2.44, 0.67, 10866, 9), "gfx950": (38.26, 0.56, 0.12, 6030, 18)}
# The same of AITER's files over codes, by the rows of q: with 64 of those for four tokens that have the fewest waits.
AITER_OVER_CODES = {
    ("gfx942", 16): (37.14, 0.87, 0.55, 2602, 13),
    ("gfx942", 32): (49.89, 1.30, 0.76, 3210, 13),
    ("gfx942", 64): (73.45, 1.34, 0.23, 10866, 9),
    ("gfx950", 64): (35.14, 0.78, 0.34, 3726, 9),
    ("gfx950", 16): (19.19, 0.78, 0.17, 2375, 27),
}
# Bounds of 32 heads on gfx950, which lie between AITER's files for fewer and more.
OF_32_OVER_CODES = (35.14, 0.78, 0.34, 3726, 9)


def assert_whole(kernel: CompiledKernel, arch: str) -> None:
    """Asserts that nothing spills to memory, and that every wait is proved."""
    code = read_amd_code(kernel)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert check_waits(parse_assembly(kernel.asm["amdgcn"]), arch).word is Word.PROVED


@pytest.mark.parametrize(
    ("layer", "arch"),
    [
        pytest.param(layer, arch, marks=[pytest.mark.nightly] * ((layer, arch) != ("pages_of_64", "gfx942")))
        for layer in LAYERS
        for arch in ARCHS
    ],
)
def test_its_loop_needs_no_more_than_assembly(layer: str, arch: str) -> None:
    kernel = compiled_latents(arch, LAYERS[layer])
    assert_whole(kernel, arch)
    loop = hot_loop_of(kernel)
    names = [each.name for each in loop.body]
    assert len(names) <= AITER_INSTRUCTIONS * 0.75
    assert names.count("s_waitcnt") <= AITER_WAITS
    # Waves exchange nothing. On CDNA 3 lanes exchange maxima by LDS, two words of a chunk.
    assert names.count("s_barrier") == 0
    assert lds_bytes(loop) <= 2 * 4 * TILES.num_stages
    # A row as K and, without its rest, as V; and the numbers of the pages of a lane's keys, one and four of a chunk.
    rows = TILES.key_block * TILES.num_stages * (576 + 512) * 2
    assert loaded_bytes(loop) == rows // LANES + 5 * 4 * TILES.num_stages
    # V of rows whose K has come is in a cache; the K of a whole block is always on its way from memory.
    assert bytes_in_flight(loop) >= max(TILES.key_block * 576 * 2 // LANES, AITER_IN_FLIGHT)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "layer",
    [
        Latents(64),
        *(
            pytest.param(layer, marks=pytest.mark.nightly)
            for layer in (
                Latents(32),
                Latents(20, page_size=1),
                Latents(100, page_size=24, dtype=torch.float16),
                Latents(128, page_size=1),
                Latents(64, is_coded=True),
                Latents(16, is_coded=True),
                Latents(32, is_coded=True),
                Latents(32, is_coded=True, page_size=1),
            )
        ),
    ],
    ids=str,
)
def test_waves_that_share_rows_need_no_more_than_assembly(layer: Latents, arch: str) -> None:
    kernel = compiled_latents(arch, layer)
    assert_whole(kernel, arch)
    found = latent_traffic(kernel, layer)
    bounds = AITER_OF_64[arch]
    if layer.is_coded:
        bounds = AITER_OVER_CODES.get((arch, layer.num_heads), OF_32_OVER_CODES)
    instructions, waits, barriers, lds, flight = bounds
    assert found.of_kib(found.instructions) <= instructions
    assert found.of_kib(found.waits) <= waits
    assert found.of_kib(found.barriers) <= barriers
    assert found.of_kib(found.lds_bytes) <= lds
    assert found.in_flight >= flight * 1024

"""Latent decode for CDNA compiles: nothing spills, no row passes LDS, waits are proved, and its loop needs no more than
AITER's assembly does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.tuning.latent_tiles import CDNA_LATENT_TILES
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.cdna_latent_cases import SMALL
from tests.amd.offline.cdna_latent import compiled_latents
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.hot_loop import bytes_in_flight, hot_loop_of, lds_bytes, loaded_bytes

pytestmark = pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason=f"it needs Triton {' or '.join(map(str, TRITONS))}"
)

LANES = 64


@dataclass(frozen=True, slots=True)
class OfLoop:
    """Figures of a wave's loop. keys: of the program's four waves in an iteration

    instructions, waits, barriers: of an iteration
    lds:                           bytes that a lane stores to LDS or reads there
    in_flight:                     the fewest bytes of a lane that a wait for loads leaves in flight
    """

    keys: int
    instructions: int
    waits: int
    barriers: int
    lds: int
    in_flight: int


# mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co of ROCm/aiter e4048607a5, the same code for both archs, by llvm-objdump.
AITER = OfLoop(keys=128, instructions=849, waits=16, barriers=10, lds=1368, in_flight=128)
LAYERS: dict[str, dict[str, Any]] = {
    "pages_of_64": {},
    "tokens": {"page_size": 1},
    "float16": {"dtype": torch.float16, "page_size": 16},
    "few_heads": {"heads": (5, 1), "page_size": 48},
}


@pytest.mark.parametrize(
    ("layer", "arch"),
    [
        pytest.param(layer, arch, marks=[pytest.mark.nightly] * (layer not in ("pages_of_64", "tokens")))
        for layer in LAYERS
        for arch in ARCHS
    ],
)
def test_its_loop_needs_no_more_than_assembly(layer: str, arch: str) -> None:
    kernel = compiled_latents(arch, replace(SMALL, spread=False, **LAYERS[layer]))
    code, loop = read_amd_code(kernel), hot_loop_of(kernel)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert check_waits(parse_assembly(kernel.asm["amdgcn"]), arch).word is Word.PROVED
    keys = CDNA_LATENT_TILES.key_block * CDNA_LATENT_TILES.num_stages
    assert keys == AITER.keys
    names = [each.name for each in loop.body]
    assert len(names) <= AITER.instructions * 0.75
    assert names.count("s_waitcnt") <= AITER.waits
    # Waves exchange nothing. On CDNA 3 lanes exchange maxima by LDS, two words of a chunk.
    assert names.count("s_barrier") == 0
    assert lds_bytes(loop) <= 2 * 4 * CDNA_LATENT_TILES.num_stages
    # A row as K and, without its rest, as V; and the numbers of the pages of a lane's keys, one and four of a chunk.
    rows, numbers = keys * (576 + 512) * 2, 5 * 4 * CDNA_LATENT_TILES.num_stages
    assert loaded_bytes(loop) == rows // (LANES * CDNA_LATENT_TILES.num_warps) + numbers
    # V of rows whose K has come is in a cache; the K of a whole block is always on its way from memory.
    assert bytes_in_flight(loop) >= CDNA_LATENT_TILES.key_block * 576 * 2 // (LANES * CDNA_LATENT_TILES.num_warps)
    assert bytes_in_flight(loop) >= 2 * AITER.in_flight

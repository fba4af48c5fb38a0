"""Latent decode for CDNA compiles: nothing spills, no row passes LDS, waits are proved, and its loop needs no more than
AITER's assembly does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.tuning.latent_tiles import CDNA_LATENT_TILES
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_latent_cases import SMALL, launch_cdna_latent
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.hot_loop import bytes_in_flight, hot_loop_of, lds_bytes, loaded_bytes
from tests.amd.offline.offline_driver import last_compiled_by

pytestmark = pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason=f"it needs Triton {' or '.join(map(str, TRITONS))}"
)

# A wave's loop over as many keys in mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co of ROCm/aiter e4048607a5, the same
# code for both archs, by llvm-objdump: instructions, waits, the fewest bytes of a lane that a wait leaves in flight.
AITER_INSTRUCTIONS, AITER_WAITS, AITER_IN_FLIGHT = 849, 16, 128
TILES = CDNA_LATENT_TILES
LANES = 64 * TILES.num_warps
NAME = "_cdna_latent_decode_kernel"
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
    tensors = build(replace(SMALL, spread=False, **LAYERS[layer]), torch.device("cpu"))
    kernel = last_compiled_by(lambda: launch_cdna_latent(arch, tensors), arch, [NAME])[NAME]
    code, loop = read_amd_code(kernel), hot_loop_of(kernel)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert check_waits(parse_assembly(kernel.asm["amdgcn"]), arch).word is Word.PROVED
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

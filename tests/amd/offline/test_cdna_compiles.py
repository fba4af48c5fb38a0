"""Decode and extend for CDNA compile: nothing spills.

Keys and values of decode pass no LDS, and its numbers of pages are scalar loads. Extend keeps the matrix units busy, by
the count of docs/cycles.md, and waits for all that it uses.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.cdna_tiles import ARCHS, EXTEND_CODES, HEAD_DIMS
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.waits.check import Word, check_waits
from tests.amd.kernels.attention_cases import Case
from tests.amd.kernels.cdna_cases import tiles_of_case
from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.kernels.cdna_extend_cases import PLAIN
from tests.amd.offline.cdna_kernels import compiled_decode, compiled_extend
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.cycle_counts import DECODES, DecodedLayer, count_of, decode_traffic
from tests.amd.offline.hot_loop import hot_loop_of, lds_bytes

pytestmark = pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason=f"it needs Triton {' or '.join(map(str, TRITONS))}"
)

CASE = Case([300, 200], [1, 1], heads=(8, 2), dtype=torch.bfloat16)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": torch.float16, "page_size": 64},
    "window": {"window_left": 100, "sinks": True},
    "shared_window": {"window_left": 600, "kv_len": [900] * 3, "q_len": [1] * 3, "sinks": True},
    "capped": {"soft_cap": 50.0, "window_left": 4095},
    "many_heads": {"heads": (16, 2), "page_size": 128},
    "suffixes": {"first_page": [2, 3]},
}
# With more a SIMD has room for one wave.
MOST_VGPRS = 256
# The plain layer's VGPRs, counted in docs/amd_tuning.md, plus a tenth.
ACCEPTED_VGPRS = {
    ("gfx942", 64): 268,
    ("gfx942", 128): 268,
    ("gfx942", 256): 264,
    ("gfx950", 64): 260,
    ("gfx950", 128): 260,
}
# Instructions of an iteration per key, plus a tenth: the vector unit bounds it.
ACCEPTED_INSTRUCTIONS = {
    ("gfx942", 64): 6.1,
    ("gfx942", 128): 6.1,
    ("gfx942", 256): 12.0,
    ("gfx950", 64): 5.1,
    ("gfx950", 128): 5.1,
}
# K and V of a key do not pass LDS. On CDNA 3 the maximum and the sum of scores do: a lane's words of a block.
MOST_LDS_BYTES = {"gfx942": 16, "gfx950": 0}


def has_tiles(arch: str, dim: int) -> bool:
    try:
        tiles_of_case(arch, replace(CASE, dims=(dim, dim)))
    except NoTiles:
        return False
    return True


SERVED = [(arch, dim) for arch in ARCHS for dim in HEAD_DIMS if has_tiles(arch, dim)]


def test_every_tile_has_accepted_figures() -> None:
    assert set(SERVED) == set(ACCEPTED_VGPRS) == set(ACCEPTED_INSTRUCTIONS)


@pytest.mark.parametrize(
    ("arch", "dim", "layer"),
    [
        pytest.param(arch, dim, layer, marks=[pytest.mark.nightly] * ((arch, dim, layer) != ("gfx950", 128, "plain")))
        for arch, dim in SERVED
        for layer in LAYERS
    ],
)
def test_it_spills_nothing_and_keys_pass_no_lds(arch: str, dim: int, layer: str) -> None:
    case = replace(CASE, dims=(dim, dim), **LAYERS[layer])
    tiles = tiles_of_case(arch, case)
    kernel = compiled_decode(arch, case, tiles)
    code, loop = read_amd_code(kernel), hot_loop_of(kernel)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert code.vgprs <= MOST_VGPRS
    assert code.lds_bytes <= 4096
    assert lds_bytes(loop) <= MOST_LDS_BYTES[arch]
    keys = tiles.key_block
    # Sixteen bytes per lane, for K and V once, and no other loads: page numbers are scalar loads.
    loads = [each.name for each in loop.body if re.match(r"(buffer|global)_load_", each.name)]
    assert set(loads) == {"buffer_load_dwordx4"}
    assert len(loads) * 16 * 64 == 2 * keys * dim * tiles.heads_per_row * 2
    assert sum(each.name == "s_load_dword" for each in loop.body) == -(-keys // case.page_size)
    if layer == "plain":
        assert code.vgprs <= ACCEPTED_VGPRS[arch, dim]
        per_key = len(loop.body) / keys
        assert per_key <= ACCEPTED_INSTRUCTIONS[arch, dim], per_key


@pytest.mark.nightly
@pytest.mark.parametrize("scales", [Scales.HEAD, Scales.TOKEN])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_codes_spill_nothing_and_leave_a_simd_two_waves(arch: str, layer: str, scales: Scales) -> None:
    case = replace(CASE, dims=(128, 128), kv=EXTEND_CODES[arch], scales=scales, **LAYERS[layer])
    kernel = compiled_decode(arch, case, tiles_of_case(arch, case))
    code, loop = read_amd_code(kernel), hot_loop_of(kernel)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert code.vgprs <= MOST_VGPRS
    assert lds_bytes(loop) <= MOST_LDS_BYTES[arch]
    verdict = check_waits(parse_assembly(kernel.asm["amdgcn"]), arch)
    assert (verdict.faults, verdict.reasons) == ((), ())


# AITER's assembly, as docs/cycles.md counts it, in 16 bits and in codes: instructions, matrix ones, waits and bytes of
# LDS of a KiB of K and V, and KiB in flight of a SIMD. Codes meet both parts of q and of weights here, one there.
AITER = {False: (14.48, 2.0, 0.19, 296, 40), True: (21.97, 2 * 2.0, 0.69, 704, 40)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layer, marks=[pytest.mark.nightly] * (at % 2))
        for at, layer in enumerate((*DECODES[:2], *DECODES[-4:]))
    ],
    ids=str,
)
def test_a_byte_takes_no_more_than_in_the_assembly_of_aiter(arch: str, layer: DecodedLayer) -> None:
    kernel, found = decode_traffic(arch, layer)
    instructions, matrix, waits, lds, in_flight = AITER[layer.is_coded]
    assert found.of_kib(found.instructions) <= instructions
    assert found.of_kib(found.matrix) <= matrix
    assert found.of_kib(found.waits) <= waits
    assert found.barriers == 0
    assert found.of_kib(found.lds_bytes) <= lds
    code = read_amd_code(kernel)
    assert code.waves_per_simd * found.in_flight >= in_flight * 1024
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)


EXTENDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": torch.float16, "page_size": 64},
    "large_pages": {"page_size": 128},
    "every_key": {"window_right": UNLIMITED_WINDOW},
    "other_strides": {"spread": True},
    "wide": {"dims": (192, 128), "heads": (32, 32)},
    "wide_float16": {"dims": (192, 128), "heads": (32, 32), "dtype": torch.float16, "page_size": 64},
    "wide_large_pages": {"dims": (192, 128), "heads": (32, 32), "page_size": 128, "spread": True},
    "codes": {"scales": Scales.HEAD},
    "codes_float16": {"scales": Scales.LAYER, "dtype": torch.float16},
    "codes_large_pages": {"scales": Scales.HEAD, "page_size": 128, "spread": True},
    "codes_wide": {"scales": Scales.HEAD, "dims": (192, 128), "heads": (32, 32)},
    "codes_64": {"scales": Scales.HEAD, "dims": (64, 64), "heads": (64, 8)},
    "heads_64": {"dims": (64, 64), "heads": (64, 8)},
}
EXTENDS_BY_DAY = (("wide", "gfx942"), ("codes", "gfx950"), ("heads_64", "gfx950"))
# The least share of the matrix units' ceiling, by the count, in whole blocks of keys. With strides that are counted in
# eights one address more is computed.
LEAST_SHARE = 0.85
# The softmax bounds heads of 64 (docs/cycles.md).
LEAST_SHARES = {"codes_64": 0.6, "heads_64": 0.63}


@pytest.mark.parametrize(
    ("layer", "arch"),
    [
        pytest.param(layer, arch, marks=[pytest.mark.nightly] * ((layer, arch) not in EXTENDS_BY_DAY))
        for layer in EXTENDS
        for arch in EXTEND_ARCHS
    ],
)
def test_extend_keeps_the_matrix_units_busy_and_waits(layer: str, arch: str) -> None:
    more = {"heads": (32, 8)} | EXTENDS[layer]
    kernel = compiled_extend(arch, replace(PLAIN, kv=EXTEND_CODES[arch] if "scales" in more else None, **more))
    code, count = read_amd_code(kernel), count_of(kernel, arch)
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert code.waves_per_simd == 2
    assert count is not None
    assert count.waves == 2
    assert count.share >= LEAST_SHARES.get(layer, LEAST_SHARE), count
    assert check_waits(parse_assembly(kernel.asm["amdgcn"]), arch).word is Word.PROVED

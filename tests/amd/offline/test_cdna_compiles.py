"""Decode, extend, latent decode and attention over a selection for CDNA compile: nothing spills, waits are proved.

Keys and values of decode pass no LDS, and its numbers of pages are scalar loads. Extend keeps the matrix units busy, by
the count of docs/cycles.md, and waits for all that it uses. Latent decode's loop needs no more than AITER's assembly;
that of a selection takes few more clocks, and far fewer than that of the kernel for every layer.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.tuning.cdna_tiles import ARCHS, EXTEND_CODES, HEAD_DIMS
from rocm_attn.kernels.tuning.latent_tiles import CDNA_LATENT_TILES
from rocm_attn.kernels.tuning.sparse_tiles import cdna_selected_tiles
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
from tests.amd.kernels.cdna_selected_cases import CASES, cases_of, run_cdna_selected
from tests.amd.kernels.sparse_cases import SelectedCase, build_selected, selected_tiles_of
from tests.amd.offline.cdna_kernels import Latents, compiled_decode, compiled_extend, compiled_latents, latent_traffic
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.cycle_counts import DECODES, DecodedLayer, count_of, decode_traffic
from tests.amd.offline.hot_loop import bytes_in_flight, hot_loop_of, lds_bytes, loaded_bytes
from tests.amd.offline.offline_driver import last_compiled_by

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
    kernel = compiled_decode(arch, case)
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
    kernel = compiled_decode(arch, case)
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


# A wave's loop over as many keys in mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co of ROCm/aiter e4048607a5, the same
# code for both archs, by llvm-objdump: instructions, waits, the fewest bytes of a lane that a wait leaves in flight.
AITER_INSTRUCTIONS, AITER_WAITS, AITER_IN_FLIGHT = 849, 16, 128
TILES = CDNA_LATENT_TILES[0]
LANES = 64 * TILES.num_warps
LATENT_LAYERS = {
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
        for layer in LATENT_LAYERS
        for arch in ARCHS
    ],
)
def test_its_loop_needs_no_more_than_assembly(layer: str, arch: str) -> None:
    kernel = compiled_latents(arch, LATENT_LAYERS[layer])
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
    tiles = selected_tiles_of(arch, case)
    name = "_selected_attention_kernel"
    kernel = last_compiled_by(
        lambda: launch_selected_attention(problem.args, scale=1.0, tiles=tiles, programs=1), arch, [name]
    )[name]
    return _clocks_of_key(kernel, arch, tiles.key_block)

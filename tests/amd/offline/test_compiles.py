"""The compile gate: the kernels that the runtime would launch compile for every arch, spill nothing and fit."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning import latent_tiles
from rocm_attn.kernels.tuning.decode_tiles import DECODE_CHOICES
from rocm_attn.kernels.tuning.expert_tiles import EXPERT_CHOICES, ONE_ORDER_CHOICES, expert_tiles
from rocm_attn.kernels.tuning.extend_tiles import EXTEND_CHOICES
from rocm_attn.kernels.tuning.latent_tiles import (
    LatentTiles,
    latent_decode_tiles,
    latent_extend_tiles,
    latent_segment_tiles,
)
from rocm_attn.kernels.tuning.segment_tiles import SEGMENT_ROWS
from rocm_attn.kernels.tuning.tile_choices import choices_of
from rocm_attn.kernels.tuning.tiles import CodeKind, DecodeTiles
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.machine.target import known_target
from rocm_attn.problem import KVEncoding, PoolKind
from tests.amd.house.source_tree import ROOT, python_files
from tests.amd.offline.code_object import AmdCode, NvidiaCode, read_amd_code, read_nvidia_code
from tests.amd.offline.compiling import (
    AMD_ARCHS,
    IN_EVERY_RUN,
    NVIDIA_ARCHS,
    LaunchedTiles,
    compiled_kernels,
    launched_tiles,
    rows_for,
)
from tests.amd.offline.matrix import EXPERT_ROWS, ROWS, Row, launch_rest, shares_segments
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.test_offline_driver import gather_product

MAX_ROWS = 136
# An arch without its own rows -> the key of its rows in tuning/decode.json.
FAMILIES = {"sm_80": "sm_"}

# A wave of gfx942 and gfx950 addresses 512 vector registers, accumulation registers included.
MAX_VGPRS = 512

SMALL, LARGE = (next(row for row in ROWS if row.is_large == is_large) for is_large in (False, True))

# Kernels that read K or V pages, or slots of states: above 2 GiB their loads need 64-bit addresses.
# _latent_segment_extend_kernel is left out: it adds offsets of 32 bits to a page's address, a scalar.
READS_PAGES = (
    "_decode_kernel",
    "_extend_kernel",
    "_segment_decode_kernel",
    "_segment_extend_kernel",
    "_latent_decode_kernel",
    "_latent_extend_kernel",
    "_latent_segment_decode_kernel",
    "_index_scores_kernel",
    "_selected_attention_kernel",
    "_token_steps_kernel",
    "_chunk_walk_kernel",
    "_convolve_kernel",
)

# Bytes that kernels may keep on the stack on sm_90, the most of any row: tiles that spill were still measured as the
# fastest there (kernels/tuning says so of some). Accumulators of latents and of wide heads take half of all
# registers, so that addresses and lengths are spilled around products; other kernels spill nothing.
SPILLED_ON_SM_90 = {
    "_decode_kernel": 88,
    "_extend_kernel": 696,
    "_segment_decode_kernel": 152,
    "_segment_extend_kernel": 928,
    "_latent_decode_kernel": 768,
    "_latent_extend_kernel": 512,
    "_latent_segment_decode_kernel": 104,
    "_merge_kernel": 24,
    "_store_kernel": 8,
    "_choose_kernel": 8,
    # Blocks of 128 pairs and 256 columns with a gate.
    "_expert_product_kernel": 8,
    # Deterministic, with heads of 256; nothing smaller was measured.
    "_selected_attention_kernel": 544,
    # These of states are faster than with more warps or fewer columns.
    "_token_steps_kernel": 48,
    "_chunk_rows_kernel": 704,
    "_chunk_walk_kernel": 96,
}
# In float32, which no model with states is served in, a product is three.
SPILLED_IN_FLOAT32 = {"_chunk_rows_kernel": 352, "_chunk_walk_kernel": 1184}

# Scalar registers that programs with shares of rows keep in lanes of vector registers and read back once per row: their
# pointers and strides do not all fit. None of them goes to memory. Heads of 64 over codes have the most; in
# deterministic attention those with scales of tokens. Those of a kernel of states are addresses and masks; steps with
# spans have a dozen pointers and as many numbers.
SCALARS_IN_LANES = {
    "_extend_kernel": 39,
    "_segment_extend_kernel": 21,
    "_token_steps_kernel": 10,
    "_chunk_rows_kernel": 168,
    "_place_spans_kernel": 4,
}

# Vector registers, and bytes of memory for them, that programs with shares of rows of deterministic attention spill by
# the newest Triton: one of 128 x 1 heads of 128 on gfx942; on gfx950 two of heads of 80 and 96, to other registers.
SPILLED_BY_SHARES = {"gfx942": (1, 8), "gfx950": (2, 0)}

# The package of kernels over latent pages, which have separate rows of the matrix.
LATENT = "rocm_attn.kernels.latent"

# In Gluon for archs of one vendor: test_hopper_compiles.py and test_cdna_compiles.py have them.
HOPPER, CDNA = "rocm_attn.kernels.hopper", "rocm_attn.kernels.cdna"

# It merges the parts that programs with shares of deterministic attention keep.
PARTS_OF_SEGMENTS = "_segment_parts_kernel"

SIMDS = 4  # of a compute unit

# Waves that a SIMD must have room for at least, beside those that a row of tiles asks for: with fewer nothing fills the
# waits of the kernel. One wave is known and accepted where a program's accumulators take most registers (latent pages,
# selected rows, large heads) or its keys most of LDS. Kernels that are not listed have small blocks.
WAVES_OF_SMALL_BLOCKS = 5
LEAST_WAVES = {
    "_extend_kernel": 1,
    "_segment_decode_kernel": 1,
    "_segment_extend_kernel": 1,
    "_latent_decode_kernel": 1,
    "_latent_extend_kernel": 1,
    "_index_scores_kernel": 1,
    "_selected_attention_kernel": 1,
    "_decode_kernel": 2,
    "_latent_segment_decode_kernel": 2,
    "_latent_segment_extend_kernel": 2,
    "_expert_product_kernel": 2,
    # A chunk's matrix is inverted in registers, next to its channels' decays.
    "_chunk_rows_kernel": 1,
    # Registers hold a state.
    "_chunk_walk_kernel": 2,
    # A block of the vocabulary is in registers.
    "_accept_sampled_kernel": 3,
    "_likeliest_kernel": 3,
    "_pick_rows_kernel": 3,
    # In float32 its blocks take twice as many registers.
    "_inner_products_kernel": 3,
    # Blocks of both products are in LDS.
    "_few_rows_kernel": 4,
    "_merge_kernel": 4,
    "_rope_store_kernel": 4,
    "_share_kernel": 4,
    # The rows of the next token wait in registers, too.
    "_token_steps_kernel": 4,
}
# Above 2 GiB its addresses have 64 bits.
LEAST_WAVES_ABOVE = LEAST_WAVES | {"_convolve_kernel": 4}

# Triton 3.6 gives extend of 128-element heads registers for one wave where its tiles ask for two.
GRANTS_WAVES = Release.of("3.9.0")

_KERNEL = re.compile(r"^def (\w+_kernel)\(|repr=lambda _: \"(\w+)\"", re.MULTILINE)
# The kernel to read first. No runtime launches it.
TO_READ = "_plain_decode_kernel"

# Kernels that write and read single words only: those are scalar loads.
ONLY_WRITES = ("_zero_tails_kernel", "_clear_pads_kernel")


@rows_for(AMD_ARCHS)
def test_amd_kernels_fit_and_use_the_matrix_units(row: Row) -> None:
    kernels = compiled_kernels(row)
    names, latent = {kernel.name for kernel in kernels}, names_of_all_kernels(LATENT)
    if row.pool is PoolKind.LATENT:
        assert names >= latent
    elif not row.is_large and row.kv is KVEncoding.LIKE_Q:
        unshared: set[str] = set() if shares_segments(row) else {PARTS_OF_SEGMENTS}
        assert names == names_of_all_kernels() - latent - names_of_separate_kernels() - unshared
    codes = [(kernel.name, read_amd_code(kernel)) for kernel in kernels]
    complaints = [f"{name}: {complaint}" for name, code in codes for complaint in amd_complaints(row, name, code)]
    assert not complaints, "\n".join(complaints)
    least = waves_of_decode(row)
    assert not [
        f"{code.waves_per_simd} of {least}"
        for name, code in codes
        if name == "_decode_kernel" and code.waves_per_simd < least
    ]


def waves_of_decode(row: Row) -> int:
    """Returns the waves that a SIMD must have room for so that all programs of decode's grid run at the same time."""
    tiles = [launched.tiles for launched in launched_tiles(replace(row, is_large=False))]
    waves = [-(-each.programs_per_cu * each.num_warps // SIMDS) for each in tiles if isinstance(each, DecodeTiles)]
    return min(waves, default=0)


@rows_for(NVIDIA_ARCHS)
def test_nvidia_kernels_fit_and_use_the_matrix_units(row: Row) -> None:
    complaints = [f"{kernel.name}: {each}" for kernel in compiled_kernels(row) for each in complaints_of(row, kernel)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.nightly
def test_every_kernel_fits_sm_90() -> None:
    """Includes kernels of metadata and of engines, which rows for NVIDIA leave to the tests that run them."""
    rows = [row for row in ROWS if row.arch == "sm_90"]
    row = next(row for row in rows if row.dims == (128, 128) and row.kv is KVEncoding.LIKE_Q)
    latent = next(row for row in rows if row.pool is PoolKind.LATENT)
    rest = compiled_by(lambda: launch_rest(row), row.arch)
    kernels = [*compiled_kernels(row), *compiled_kernels(latent), *rest]
    # Only Hopper's own kernel shares segments there: test_hopper_compiles.py has their merge.
    elsewhere = names_of_separate_kernels() | {PARTS_OF_SEGMENTS}
    assert {kernel.name for kernel in kernels} == names_of_all_kernels() - elsewhere
    found = [
        f"{kernel.name}: {each}"
        for kernel in rest
        if kernel.name not in READS_PAGES
        for each in complaints_of(row, kernel)
    ]
    assert not found, "\n".join(found)


def names_of_sparse_kernels() -> set[str]:
    """Names of the kernels of kernels/sparse/, whose rows are in sparse_matrix.py."""
    return names_of_all_kernels("rocm_attn.kernels.sparse")


def names_of_state_kernels() -> set[str]:
    """Names of the kernels of kernels/states/, whose rows are in state_matrix.py."""
    return names_of_all_kernels("rocm_attn.kernels.states")


def names_of_separate_kernels() -> set[str]:
    """Names of the kernels whose rows are in matrices of their own."""
    return names_of_sparse_kernels() | names_of_state_kernels()


def names_of_all_kernels(package: str = "rocm_attn.kernels") -> set[str]:
    """Every jitted function of kernels/, or of a folder, that runtimes launch on archs of more than one vendor."""
    return {
        name
        for module, names in _kernels_of_modules().items()
        for name in names
        if module.startswith(f"{package}.") and not module.startswith((f"{HOPPER}.", f"{CDNA}."))
    } - {TO_READ}


@functools.cache
def _kernels_of_modules() -> dict[str, list[str]]:
    """Returns module -> names of its jitted functions, for each file of kernels/."""
    return {
        ".".join(("rocm_attn", *path.relative_to(ROOT).with_suffix("").parts)): [
            "".join(names) for names in _KERNEL.findall(path.read_text())
        ]
        for path in python_files(ROOT / "kernels")
    }


class Compiled(Protocol):
    """A row of any matrix. is_large: true if K and V, or slots of states, lie in more than 2 GiB"""

    @property
    def arch(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_large(self) -> bool: ...


def complaints_of(row: Compiled, kernel: CompiledKernel) -> Iterator[str]:
    """Yields the faults of a kernel's machine code, a clause each."""
    if row.arch.startswith("gfx"):
        return amd_complaints(row, kernel.name, read_amd_code(kernel))
    return nvidia_complaints(row, kernel.name, read_nvidia_code(kernel))


def amd_complaints(row: Compiled, name: str, code: AmdCode) -> Iterator[str]:
    """Yields the faults of a kernel's machine code, a clause each."""
    vectors, scratch = SPILLED_BY_SHARES.get(row.arch, (0, 0)) if name == "_segment_extend_kernel" else (0, 0)
    scalars = SCALARS_IN_LANES.get(name, 0)
    if code.vgpr_spills > vectors or code.sgpr_spills > scalars or code.scratch_bytes > scratch:
        yield (
            f"{code.vgpr_spills} VGPRs and {code.sgpr_spills} SGPRs spilled, {code.scratch_bytes} bytes of scratch, "
            f"at {code.vgprs} VGPRs"
        )
    if code.vgprs > MAX_VGPRS:
        yield f"{code.vgprs} VGPRs, {MAX_VGPRS} exist"
    lds_bytes = known_target(row.arch).lds_bytes
    if code.lds_bytes > lds_bytes:
        yield f"{code.lds_bytes} bytes of LDS, {row.arch} has {lds_bytes}"
    yield from too_few_waves(name, code, LEAST_WAVES_ABOVE if row.is_large else LEAST_WAVES)
    if code.has_dot and not code.matrix_ops:
        yield "a product without matrix instructions"
    if not row.is_large and name not in ONLY_WRITES and not code.buffer_loads:
        yield "no buffer loads, though all tensors are below 2 GiB"
    if row.is_large and name in READS_PAGES and not code.global_loads:
        yield "no 64-bit loads, though K and V are above 2 GiB"


def too_few_waves(name: str, code: AmdCode, least_of: Mapping[str, int]) -> Iterator[str]:
    """Yields a clause if registers and LDS leave a SIMD room for too few waves of a kernel."""
    requested = code.waves_asked if Release.of(triton_version()) >= GRANTS_WAVES else 0
    least = max(requested, least_of.get(name, WAVES_OF_SMALL_BLOCKS))
    if code.waves_per_simd < least:
        yield f"room for {code.waves_per_simd} waves, {least} are needed"


def nvidia_complaints(row: Compiled, name: str, code: NvidiaCode) -> Iterator[str]:
    """Yields faults of a kernel's machine code, a clause each. Exact float32 products have no matrix instructions."""
    in_float32 = SPILLED_IN_FLOAT32 if row.dtype == torch.float32 else {}
    allowed = {**SPILLED_ON_SM_90, **in_float32}.get(name, 0) if row.arch == "sm_90" else 0
    if code.stack_bytes + code.local_bytes > allowed:
        yield f"{code.stack_bytes + code.local_bytes} bytes spilled, at {code.registers} registers"
    shared_bytes = known_target(row.arch).lds_bytes
    if code.shared_bytes > shared_bytes:
        yield f"{code.shared_bytes} bytes of shared memory, {row.arch} has {shared_bytes}"
    if code.has_dot and not code.matrix_ops and row.dtype != torch.float32:
        yield "a product without matrix instructions"
    yield from code.touched[:1]
    yield from code.unwritten[:1]


def launched_in_the_matrix(arch: str, *, is_large: bool) -> list[LaunchedTiles]:
    """Returns the launches of all rows of a size. Size changes no tiles, and a large pool takes seconds to make."""
    here = [row for row in ROWS if (row.arch, row.is_large) == (arch, is_large) and row.pool is not PoolKind.LATENT]
    return [launched for row in here for launched in launched_tiles(replace(row, is_large=False))]


# One worker collects the launches of an arch, once.
LAUNCHED = pytest.mark.parametrize(
    "arch",
    [
        pytest.param(
            arch,
            # By day those of one arch.
            marks=[pytest.mark.xdist_group(f"launched by {arch}")] + [pytest.mark.nightly] * (arch != AMD_ARCHS[0]),
        )
        for arch in (*AMD_ARCHS, *NVIDIA_ARCHS)
    ],
)


@LAUNCHED
def test_every_tuning_row_is_in_the_matrix(arch: str) -> None:
    """At both pool sizes on AMD, where the size changes the code."""
    for is_large in (False, True) if arch in AMD_ARCHS else (False,):
        compiled = {id(launched.tiles) for launched in launched_in_the_matrix(arch, is_large=is_large)}
        own_name = FAMILIES.get(arch, arch)
        tuned = [row for row in (*DECODE_CHOICES, *EXTEND_CHOICES, *SEGMENT_ROWS) if row.arch == own_name]
        if is_large:  # it changes only loads of pages, coded or not
            tuned = [row for row in tuned if CodeKind.NONE in row.codes]
        assert tuned, f"no tuning choice for {arch}"
        missing = [row for row in tuned if id(row.tiles) not in compiled]
        assert not missing, f"no compile {'above' if is_large else 'below'} 2 GiB for {missing}"


@LAUNCHED
def test_every_way_that_decode_adds_up_parts_is_in_the_matrix_without_a_window(arch: str) -> None:
    """Within its launch too, if the tiles say so; steps with a program per row have no other way then."""
    rows = [row for row in DECODE_CHOICES if row.arch == FAMILIES.get(arch, arch)]
    ways = [(row.tiles, within) for row in rows for within in (False, True) if row.tiles.merge_group or not within]
    ways += [(other.tiles, other.tiles.merge_group > 0) for row in rows for other in row.by_rows]
    launched = launched_in_the_matrix(arch, is_large=False)
    compiled = {(id(each.tiles), each.merges_within) for each in launched if not each.has_window}
    missing = [(tiles, within) for tiles, within in ways if (id(tiles), within) not in compiled]
    assert not missing, f"no compile without a window for {missing}"


@pytest.mark.parametrize("arch", [*AMD_ARCHS, *NVIDIA_ARCHS])
def test_every_latent_tuning_row_is_in_the_matrix(arch: str) -> None:
    own_name = FAMILIES.get(arch, arch)
    for is_large in (False, True) if arch in AMD_ARCHS else (False,):
        compiled: set[LatentTiles] = set()
        for row in ROWS:
            if row.arch == arch and row.is_large == is_large and row.pool is PoolKind.LATENT:
                dims, dtype = row.dims, row.dtype
                for is_coded in (False, True):
                    compiled.add(
                        latent_decode_tiles(arch, num_rows=row.heads[0], dims=dims, dtype=dtype, is_coded=is_coded)
                    )
                    compiled.add(latent_extend_tiles(arch, dims=dims, dtype=dtype, is_coded=is_coded))
                segments = latent_segment_tiles(arch, dims=dims, dtype=dtype)
                compiled |= {segments.block, segments.of_decode(row.heads[0])}
        tuned = [row.tiles for row in (*latent_tiles.DECODE_ROWS, *latent_tiles.EXTEND_ROWS) if row.arch == own_name]
        of_segments = [row.tiles for row in latent_tiles.SEGMENT_ROWS if row.arch == own_name]
        assert tuned, f"no latent tuning choice for {arch}"
        walked = [tiles for segments in of_segments for tiles in (segments.block, *segments.decoders)]
        assert {*tuned, *walked} <= compiled


@pytest.mark.parametrize("arch", [*AMD_ARCHS, *NVIDIA_ARCHS])
def test_every_tuning_row_of_experts_is_in_the_matrix(arch: str) -> None:
    dtypes = {row.dtype for row in ROWS if row.arch == arch and not row.is_large}
    for table in (EXPERT_CHOICES, ONE_ORDER_CHOICES):
        served = [dtype for dtype in dtypes if table is EXPERT_CHOICES or any(choices_of(table, arch, dtype))]
        compiled = {id(expert_tiles(arch, dtype, rows, table)) for dtype in served for rows in EXPERT_ROWS}
        tuned = [row for row in table if row.arch == FAMILIES.get(arch, arch)]
        assert tuned or table is ONE_ORDER_CHOICES, f"no tuning choice for {arch}"
        assert all(id(row.tiles) in compiled for row in tuned)


def test_every_kernel_with_a_least_number_of_waves_exists() -> None:
    assert LEAST_WAVES_ABOVE.keys() <= names_of_all_kernels()


def test_the_matrix_is_a_list_that_a_change_can_wait_for() -> None:
    assert len(ROWS) == len({str(row) for row in ROWS}) <= MAX_ROWS


def test_the_oldest_triton_compiles_a_row_for_each_amd_arch() -> None:
    assert {row.arch for row in ROWS if row.on_oldest} >= set(AMD_ARCHS)


def test_every_run_compiles_each_kind_of_layer() -> None:
    rows = [row for row in ROWS if str(row) in IN_EVERY_RUN]
    assert len(rows) == len(IN_EVERY_RUN), "a row has another name now"
    assert {row.arch for row in rows} == {*AMD_ARCHS, "sm_90"}
    assert {row.pool for row in rows} == {row.pool for row in ROWS}
    assert {row.kv is KVEncoding.LIKE_Q for row in rows} == {True, False}


@pytest.mark.parametrize(
    ("row", "change", "complaint"),
    [
        (SMALL, {"vgpr_spills": 2, "scratch_bytes": 12}, "2 VGPRs and 0 SGPRs spilled, 12 bytes of scratch"),
        (SMALL, {"sgpr_spills": 1}, "0 VGPRs and 1 SGPRs spilled"),
        (SMALL, {"lds_bytes": 65537}, "65537 bytes of LDS, gfx942 has 65536"),
        (SMALL, {"waves_per_simd": 1}, "room for 1 waves, 2 are needed"),
        pytest.param(
            SMALL,
            {"waves_asked": 9},
            "9 are needed",
            marks=pytest.mark.skipif(
                Release.of(triton_version()) < GRANTS_WAVES, reason="it does not grant the waves that tiles ask for"
            ),
        ),
        (SMALL, {"matrix_ops": 0}, "a product without matrix instructions"),
        (SMALL, {"buffer_loads": 0}, "no buffer loads"),
        (LARGE, {"global_loads": 0}, "no 64-bit loads"),
    ],
)
def test_the_gate_refuses(row: Row, change: dict[str, int], complaint: str) -> None:
    code = replace(read_amd_code(gather_product("gfx942")), global_loads=1)
    assert list(amd_complaints(row, "_decode_kernel", code)) == []
    (found,) = amd_complaints(row, "_decode_kernel", replace(code, **change))  # type: ignore[arg-type]
    assert complaint in found

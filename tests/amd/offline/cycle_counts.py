"""Counts the hot loops of our kernels for CDNA into docs/cycles.md, next to their static figures, and decode's bytes.

    python -m tests.amd.offline.cycle_counts docs

compiles the kernels of static_figures.json and those of ROWS_SHOWN with the installed Triton, which takes minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.compiler import CompiledKernel

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles
from rocm_lab.cost.static_figures import CDNA, DecodeFigures, StaticFigures
from rocm_lab.cycles import rates
from rocm_lab.cycles.count import LoopCount, count_loop, waves_of
from rocm_lab.cycles.page import TRAFFIC, traffic_cells
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.simulator.assembly import parse_assembly
from tests.amd.kernels.attention_cases import Case
from tests.amd.kernels.cdna_cases import tiles_of_case
from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.kernels.cdna_extend_cases import PLAIN
from tests.amd.offline.candidate_kernels import plain_kernel
from tests.amd.offline.cdna_decode import KINDS, compiled_decode
from tests.amd.offline.cdna_extend import compiled_extend
from tests.amd.offline.cdna_latent import Latents, compiled_latents, latent_traffic
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.compiling import AMD_ARCHS, first_kernels
from tests.amd.offline.matrix import ROWS, Row
from tests.amd.offline.tile_candidates import chosen_tiles, layers

# Rows whose other kernels are shown: heads of 128, and latent pages.
SHOWN = (
    "gfx942-32x8-128-128-bfloat16-page16-below_2gib",
    "gfx950-32x8-128-128-bfloat16-page16-below_2gib",
    "gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib",
    "gfx950-16x1-576-512-latent-bfloat16-page64-below_2gib",
)
_SECTION = re.compile(r"(<!-- made by cycle_counts: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_CLOCKS_PER_CYCLE = 4
_COUNTED = "clocks | products | vector | LDS | loads | of the ceiling"


def main(docs: Path) -> None:
    """Writes the four tables of the page."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    page = docs / "cycles.md"
    tables = {"figures": "".join(_with_figures()), "others": "".join(_others()), "decodes": "".join(decode_lines())}
    tables["latents"] = f"| our latent decode | {TRAFFIC} |\n{'|---' * 9}|\n" + "".join(
        latent_line(arch, layer) for arch in EXTEND_ARCHS for layer in LATENTS
    )
    page.write_text(_SECTION.sub(lambda found: f"{found[1]}{tables[found[2]]}", page.read_text()))


def count_of(kernel: CompiledKernel, arch: str, most_programs: int | None = None) -> LoopCount | None:
    """Counts a compiled kernel, with as many programs as registers and LDS have room for, or with fewer."""
    code, num_warps = read_amd_code(kernel), kernel.metadata.num_warps
    room = code.waves_per_simd
    if most_programs is not None:
        room = min(room, max(1, most_programs * num_warps // rates.SIMDS))
    return count_loop(parse_assembly(kernel.asm["amdgcn"]), arch, *waves_of(room, num_warps))


def cells(count: LoopCount) -> str:
    """The counted columns of a line."""
    units = (count.matrix, count.vector, count.local_memory, count.vector_memory)
    return f"{count.waves} | {count.clocks:,.0f} | {' | '.join(f'{each:,}' for each in units)} | {count.share:.1%}"


def _with_figures() -> Iterator[str]:
    yield f"Triton {triton.__version__}. Static figures are of one wave, counts of all waves of a SIMD.\n\n"
    yield f"| kernel | arch | heads of | kind | tiles | static figures | waves | {_COUNTED} |\n{'|---' * 13}|\n"
    for decode in StaticFigures.read().decodes:
        count = count_of(_decode(decode), decode.arch, decode.figures.programs)
        known = decode.figures
        said = f"own {known.own * _CLOCKS_PER_CYCLE:,.0f}, {known.latencies:.0f} latency, {known.programs} programs"
        assert count is not None, f"{decode.kernel} has matrix instructions in its loop"
        shape = f"{decode.tiles.key_block}, {decode.tiles.num_warps} waves"
        of_layer = f"{decode.arch} | {decode.head_dim} | {decode.kind}"
        yield f"| `{decode.kernel}` | {of_layer} | {shape} | {said} | {cells(count)} |\n"


def _row_of(figures: DecodeFigures) -> Row:
    """The first layer with these figures' arch and heads, whose own tiles they are if they are not of CDNA's decode."""
    known = (figures.arch, figures.head_dim)
    rows = [row for row, kind in layers() if kind is DecodeTiles and (row.arch, row.dims[0]) == known]
    return next((row for row in rows if chosen_tiles(row, DecodeTiles) == figures.tiles), rows[0])


def _decode(figures: DecodeFigures) -> CompiledKernel:
    row = _row_of(figures)
    if figures.kernel != CDNA:
        return plain_kernel(row, figures.tiles)
    assert isinstance(figures.tiles, CdnaTiles)
    case = Case([300, 200], [1, 1], heads=row.heads, dims=row.dims, dtype=row.dtype, page_size=row.page_size)
    return compiled_decode(row.arch, replace(case, **KINDS[figures.kind]), figures.tiles)


def _others() -> Iterator[str]:
    yield f"| kernel | arch | of the row | waves | {_COUNTED} |\n{'|---' * 10}|\n"
    for row in ROWS:
        if str(row) in SHOWN:
            yield from lines_of(row)
    for arch in EXTEND_ARCHS:
        yield from (extend_line(arch, layer) for layer in EXTENDS)


@dataclass(frozen=True, slots=True)
class ExtendedLayer:
    """A layer that extend for CDNA serves. is_coded: whether its pages hold codes, with a scale for each head"""

    heads: tuple[int, int]
    dims: tuple[int, int]
    is_coded: bool


EXTENDS = (
    ExtendedLayer((32, 8), (128, 128), is_coded=False),
    ExtendedLayer((32, 8), (128, 128), is_coded=True),
    ExtendedLayer((32, 32), (192, 128), is_coded=False),
    ExtendedLayer((32, 32), (192, 128), is_coded=True),
    ExtendedLayer((64, 8), (64, 64), is_coded=True),
)


def extend_line(arch: str, layer: ExtendedLayer) -> str:
    """The line of extend for CDNA on an arch."""
    kv, scales = (EXTEND_CODES[arch], Scales.HEAD) if layer.is_coded else (None, Scales.NONE)
    kernel = compiled_extend(arch, replace(PLAIN, heads=layer.heads, dims=layer.dims, kv=kv, scales=scales))
    count = count_of(kernel, arch)
    assert count is not None
    codes = "" if kv is None else f"-{kv.value.removeprefix('float8_')}"
    of_layer = f"{'x'.join(map(str, layer.heads))}-{'-'.join(map(str, layer.dims))}-bfloat16{codes}-page16"
    return f"| `{kernel.name}` | {arch} | {of_layer} | {cells(count)} |\n"


def lines_of(row: Row) -> Iterator[str]:
    """A line for each kernel of a row with matrix instructions in a loop, of its first variant."""
    assert row.arch in AMD_ARCHS
    for name, kernel in sorted(first_kernels(row).items()):
        count = count_of(kernel, row.arch) if read_amd_code(kernel).matrix_ops else None
        if count is not None:
            of_row = str(row).removeprefix(f"{row.arch}-").removesuffix("-below_2gib")
            yield f"| `{name}` | {row.arch} | {of_row} | {cells(count)} |\n"


@dataclass(frozen=True, slots=True)
class DecodedLayer:
    """A layer with heads of 128, eight of them of K and V, and pages of 16. is_coded: whether pages hold codes"""

    num_q_heads: int
    dtype: torch.dtype
    is_coded: bool


# Those of AITER's assembly (page.py), 8 and 16 query heads for each of K and V.
DECODES = tuple(
    DecodedLayer(num_q_heads, dtype, is_coded)
    for dtype, is_coded in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True))
    for num_q_heads in (64, 128)
)


def decode_traffic(arch: str, layer: DecodedLayer) -> tuple[CompiledKernel, LoopTraffic]:
    """Decode for CDNA in the tiles that serve a layer, and the work of its loop."""
    kv, scales = (EXTEND_CODES[arch], Scales.HEAD) if layer.is_coded else (None, Scales.NONE)
    case = Case([300, 200], [1, 1], heads=(layer.num_q_heads, 8), dims=(128, 128), dtype=layer.dtype)
    case = replace(case, kv=kv, scales=scales)
    kernel = compiled_decode(arch, case, tiles_of_case(arch, case))
    traffic = loop_traffic(parse_assembly(kernel.asm["amdgcn"]))
    assert traffic is not None
    return kernel, traffic


def decode_lines() -> Iterator[str]:
    """The table of decode for CDNA."""
    yield f"| our decode | {TRAFFIC} |\n{'|---' * 9}|\n"
    for arch in AMD_ARCHS:
        yield from (decode_line(arch, layer) for layer in DECODES)


def decode_line(arch: str, layer: DecodedLayer) -> str:
    """The line of a layer: what a KiB of K and V takes."""
    kernel, traffic = decode_traffic(arch, layer)
    dtype, codes = str(layer.dtype).removeprefix("torch."), ", E4M3" if layer.is_coded else ""
    of_layer = f"{arch}, {dtype}{codes}, {layer.num_q_heads // 8} query heads"
    return f"| {of_layer} | {traffic_cells(traffic, read_amd_code(kernel).waves_per_simd)} |\n"


LATENTS = tuple(Latents(heads, is_coded) for is_coded in (False, True) for heads in (16, 32, 64))


def latent_line(arch: str, layer: Latents) -> str:
    """The line of a layer over latent pages: what a KiB of rows takes."""
    kernel = compiled_latents(arch, layer)
    of_layer = f"{arch}, {'E4M3' if layer.is_coded else 'bfloat16'}, {layer.num_heads} query heads"
    return f"| {of_layer} | {traffic_cells(latent_traffic(kernel, layer), read_amd_code(kernel).waves_per_simd)} |\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

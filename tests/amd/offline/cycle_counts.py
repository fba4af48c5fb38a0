"""Counts the hot loops of our kernels for CDNA, and the bytes of decode, into docs/cycles.md.

    python -m tests.amd.offline.cycle_counts docs

compiles those of DECODE_LAYERS and SHOWN with the installed Triton, which takes minutes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.compiler import CompiledKernel

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles, NoTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import KVEncoding
from rocm_attn.providers.tiles import extend_choices_of
from rocm_attn.providers.triton_cdna import LIMITS, TRITONS
from rocm_lab.cycles import rates
from rocm_lab.cycles.count import LoopCount, count_loop, waves_of
from rocm_lab.cycles.page import TRAFFIC, traffic_cells
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.page_parts import with_part
from rocm_lab.simulator.assembly import parse_assembly
from tests.amd.kernels.attention_cases import Case
from tests.amd.kernels.cdna_cases import tiles_of_case
from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.kernels.cdna_extend_cases import PLAIN
from tests.amd.offline.candidate_kernels import DECODE_LAYERS, chosen_tiles, extend_kernels, plain_decode
from tests.amd.offline.cdna_kernels import (
    KINDS,
    Latents,
    compiled_decode,
    compiled_extend,
    compiled_latents,
    latent_traffic,
)
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.compiling import AMD_ARCHS, first_kernels
from tests.amd.offline.matrix import ROWS, Row

# Rows whose other kernels are shown: heads of 128, and latent pages.
SHOWN = (
    "gfx942-32x8-128-128-bfloat16-page16-below_2gib",
    "gfx950-32x8-128-128-bfloat16-page16-below_2gib",
    "gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib",
    "gfx950-16x1-576-512-latent-bfloat16-page64-below_2gib",
)
_COUNTED = "clocks | products | vector | LDS | loads | of the ceiling"


def main(docs: Path) -> None:
    """Writes the four tables of the page."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    page = docs / "cycles.md"
    text = page.read_text()
    tables = {"figures": "".join(_plain_lines()), "others": "".join(_others()), "decodes": "".join(decode_lines())}
    tables["latents"] = f"| our latent decode | {TRAFFIC} |\n{'|---' * 9}|\n" + "".join(
        latent_line(arch, layer) for arch in EXTEND_ARCHS for layer in LATENTS
    )
    for name, table in tables.items():
        text = with_part(text, name, table)
    page.write_text(text)


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


def _plain_lines() -> Iterator[str]:
    yield f"Triton {triton.__version__}.\n\n"
    yield f"| kernel | arch | heads of | kind | tiles | waves | {_COUNTED} |\n{'|---' * 12}|\n"
    for row in DECODE_LAYERS:
        yield from plain_lines_of(row)


def plain_lines_of(row: Row) -> Iterator[str]:
    """The lines of the kernels that decode a layer, in the tiles that serve it."""
    yield _line("triton.decode", row, "plain", chosen_tiles(row), plain_decode(row))
    tiles = _cdna_tiles(row)
    if tiles is not None:
        for kind, changes in KINDS.items():
            kernel = compiled_decode(row.arch, replace(_case_of(row), **changes))
            yield _line("triton.cdna_decode", row, kind, tiles, kernel)


def _line(name: str, row: Row, kind: str, tiles: DecodeTiles, kernel: CompiledKernel) -> str:
    count = count_of(kernel, row.arch, tiles.programs_per_cu)
    assert count is not None, f"{name} has matrix instructions in its loop"
    of_layer = f"{row.arch} | {row.dims[0]} | {kind} | {tiles.key_block}, {tiles.num_warps} waves"
    return f"| `{name}` | {of_layer} | {cells(count)} |\n"


def _case_of(row: Row) -> Case:
    return Case([300, 200], [1, 1], heads=row.heads, dims=row.dims, dtype=row.dtype, page_size=row.page_size)


def _cdna_tiles(row: Row) -> CdnaTiles | None:
    """The tiles of decode for CDNA over a layer; None if it does not serve the layer."""
    target = replace(known_target(row.arch), releases=Releases(triton=TRITONS[-1]))
    if LIMITS.refusals(row.problems[0], target):
        return None
    try:
        return tiles_of_case(row.arch, _case_of(row))
    except NoTiles:
        return None


def _others() -> Iterator[str]:
    yield f"| kernel | arch | of the row | waves | {_COUNTED} |\n{'|---' * 10}|\n"
    for row in ROWS:
        if str(row) in SHOWN:
            yield from lines_of(row)
    for arch in EXTEND_ARCHS:
        for layer in EXTENDS:
            yield extend_line(arch, layer) + plain_extend_line(arch, layer)


@dataclass(frozen=True, slots=True)
class ExtendedLayer:
    """A layer that extend for CDNA serves. is_coded: whether its pages hold codes, with a scale for each head"""

    heads: tuple[int, int]
    dims: tuple[int, int]
    is_coded: bool

    @property
    def scales(self) -> Scales:
        return Scales.HEAD if self.is_coded else Scales.NONE

    def line(self, name: str, arch: str, kernel: CompiledKernel) -> str:
        count = count_of(kernel, arch)
        assert count is not None
        codes = f"-{EXTEND_CODES[arch].value.removeprefix('float8_')}" if self.is_coded else ""
        of_layer = f"{'x'.join(map(str, self.heads))}-{'-'.join(map(str, self.dims))}-bfloat16{codes}-page16"
        return f"| `{name}` | {arch} | {of_layer} | {cells(count)} |\n"


EXTENDS = (
    ExtendedLayer((32, 8), (128, 128), is_coded=False),
    ExtendedLayer((32, 8), (128, 128), is_coded=True),
    ExtendedLayer((32, 32), (192, 128), is_coded=False),
    ExtendedLayer((32, 32), (192, 128), is_coded=True),
    ExtendedLayer((64, 8), (64, 64), is_coded=False),
    ExtendedLayer((64, 8), (64, 64), is_coded=True),
)


def extend_line(arch: str, layer: ExtendedLayer) -> str:
    kv = EXTEND_CODES[arch] if layer.is_coded else None
    kernel = compiled_extend(arch, replace(PLAIN, heads=layer.heads, dims=layer.dims, kv=kv, scales=layer.scales))
    return layer.line(kernel.name, arch, kernel)


def plain_extend_line(arch: str, layer: ExtendedLayer) -> str:
    """The line of triton.extend, which serves such a layer's smaller steps, in its tiles for the largest ones."""
    kv = KVEncoding(EXTEND_CODES[arch].value) if layer.is_coded else KVEncoding.LIKE_Q
    row = Row(arch, layer.heads, layer.dims, torch.bfloat16, page_size=16, kv=kv, scales=layer.scales)
    tiles = extend_choices_of(row.problems[0], known_target(arch))[-1].tiles
    return layer.line("triton.extend", arch, extend_kernels(row, tiles)["_extend_kernel"])


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
    """A layer with heads of 128, eight of them of K and V, and pages of 16. scales: of codes; NONE: of no codes"""

    num_q_heads: int
    dtype: torch.dtype
    scales: Scales

    @property
    def is_coded(self) -> bool:
        return self.scales is not Scales.NONE


# Those of AITER's assembly (page.py), 8 and 16 query heads for each of K and V.
DECODES = tuple(
    DecodedLayer(num_q_heads, dtype, scales)
    for dtype, scales in (
        (torch.bfloat16, Scales.NONE),
        (torch.float16, Scales.NONE),
        (torch.bfloat16, Scales.TOKEN),
        (torch.bfloat16, Scales.HEAD),
    )
    for num_q_heads in (64, 128)
)


def decode_traffic(arch: str, layer: DecodedLayer) -> tuple[CompiledKernel, LoopTraffic]:
    """Decode for CDNA in the tiles that serve a layer, and the work of its loop."""
    kv = EXTEND_CODES[arch] if layer.is_coded else None
    case = Case([300, 200], [1, 1], heads=(layer.num_q_heads, 8), dims=(128, 128), dtype=layer.dtype)
    case = replace(case, kv=kv, scales=layer.scales)
    kernel = compiled_decode(arch, case)
    # Scales of tokens are other loads of 8 bytes a lane.
    traffic = loop_traffic(parse_assembly(kernel.asm["amdgcn"]), ("buffer_load_",))
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
    codes += " with scales of tokens" if layer.scales is Scales.TOKEN else ""
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

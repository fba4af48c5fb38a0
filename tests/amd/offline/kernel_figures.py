"""Writes the section on kernels that are not ranked of the page of AMD tiles: registers, LDS and waves of each.

    python -m tests.amd.offline.kernel_figures docs/amd_tuning.md

compiles those kernels with the installed Triton, which takes an hour, and replaces the page's last section.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.problem import PoolKind
from tests.amd.offline.code_object import AmdCode, read_amd_code
from tests.amd.offline.compiling import AMD_ARCHS, compiled_kernels
from tests.amd.offline.matrix import ROWS, Row
from tests.amd.offline.sparse_matrix import ROWS as SPARSE_ENTRIES
from tests.amd.offline.sparse_matrix import LayerRow, SparseRow, compiled_sparse_kernels

AnyRow = Row | SparseRow

HEADING = "## Kernels that are not ranked"
_TEXT = """\
The compiler's figures for kernels over eight-bit and latent pages, of sparse attention, and of the fused store, for
pools below 2 GiB with Triton {triton}. None spills a register on either arch; the gate refuses one that does, and one
that leaves room for fewer waves than its tiles need. A range is that of the launched variants (windows, caps, sinks,
masks, LSE). Waves are those that a SIMD has room for.
"""
# Kernels whose cost differs from layer to layer have a line for each; the others have one line.
_BY_LAYER = (
    "_decode_kernel",
    "_extend_kernel",
    "_latent_decode_kernel",
    "_latent_extend_kernel",
    "_index_scores_kernel",
    "_selected_attention_kernel",
)
_ALSO = (
    "_segment_decode_kernel",
    "_segment_extend_kernel",
    "_latent_segment_decode_kernel",
    "_latent_segment_extend_kernel",
    "_maxima_kernel",
    "_bound_kernel",
    "_filter_kernel",
    "_choose_kernel",
    "_check_selection_kernel",
    "_merge_parts_kernel",
    "_store_kernel",
    "_rope_store_kernel",
    "_finish_kernel",
)
_FACTORS = {Scales.LAYER: "per layer", Scales.HEAD: "per head", Scales.TOKEN: "per token"}
# Arch -> kernels of a line.
Figures = dict[str, list[AmdCode]]


def main(document: Path) -> None:
    """Replace the section, which is the last one."""
    before, _, _ = document.read_text().partition(HEADING)
    document.write_text(before + section())


def kept(document: Path) -> str:
    """Returns the section as the page has it."""
    _, heading, text = document.read_text().partition(HEADING)
    return heading + text


def section() -> str:
    """Returns the section, from its heading to the end of the page."""
    heads = " | ".join(f"{arch} VGPRs | LDS | waves" for arch in AMD_ARCHS)
    lines = [f"| kernel | layer | {heads} |", "|---|---|" + "---|---|---|" * len(AMD_ARCHS)]
    for (kernel, layer), figures in _figures().items():
        cells = " | ".join(_cells(figures.get(arch, [])) for arch in AMD_ARCHS)
        lines.append(f"| `{kernel}` | {layer} | {cells} |")
    return "\n".join([HEADING, "", _TEXT.format(triton=triton.__version__), *lines]) + "\n"


def _figures() -> dict[tuple[str, str], Figures]:
    """(Kernel, layer) -> figures, in the page's order."""
    found: dict[tuple[str, str], Figures] = defaultdict(lambda: defaultdict(list))
    rows = list(_rows())
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for row, kernels in zip(rows, pool.map(_compiled, rows), strict=True):
            for name, code in kernels:
                if name in _BY_LAYER:
                    found[name, _layer(row)][row.arch].append(code)
                elif name in _ALSO:
                    found[name, "all"][row.arch].append(code)
    order = (*_BY_LAYER, *_ALSO)
    return dict(sorted(found.items(), key=lambda entry: order.index(entry[0][0])))


def _rows() -> Iterator[AnyRow]:
    for row in (*ROWS, *SPARSE_ENTRIES):
        is_ranked = isinstance(row, Row) and row.pool is PoolKind.SPLIT and row.scales is Scales.NONE
        if row.arch in AMD_ARCHS and not is_ranked and not row.is_large:
            yield row


def _compiled(row: AnyRow) -> list[tuple[str, AmdCode]]:
    """Returns names and resources of the kernels that a row launches."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    kernels = compiled_kernels(row) if isinstance(row, Row) else compiled_sparse_kernels(row)
    return [(kernel.name, read_amd_code(kernel)) for kernel in kernels]


def _layer(row: AnyRow) -> str:
    if not isinstance(row, Row):
        name = f"sparse: {row.name.replace('_', ' ')}"
        return f"{name}, {_heads(row.heads, row.dims)}" if isinstance(row, LayerRow) else f"{name}, {row.heads} heads"
    scale_values = f", scales {_FACTORS[row.scales]}" if row.scales is not Scales.NONE else ""
    # gfx942 has no instruction for it.
    encoding = f" {row.kv.name}" if row.kv.name == "E5M2" else ""
    return f"{_heads(row.heads, row.dims)}{encoding}{scale_values}"


def _heads(heads: tuple[int, int], dims: tuple[int, int]) -> str:
    return f"{heads[0]} x {heads[1]} heads of {'/'.join(map(str, dict.fromkeys(dims)))}"


def _cells(codes: list[AmdCode]) -> str:
    if not codes:
        return " | ".join("-" * 3)
    lds = [-(-code.lds_bytes // 1024) for code in codes]
    return (
        f"{_range(code.vgprs for code in codes)} | {_range(lds)} KiB | {_range(code.waves_per_simd for code in codes)}"
    )


def _range(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return f"{least}" if least == most else f"{least} to {most}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

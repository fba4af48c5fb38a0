"""Writes the section on kernels that are not ranked of the page of AMD tiles: registers, LDS and waves of each.

    python -m tests.amd.offline.kernel_figures docs/amd_tuning.md

takes them from the budgets of the newest Triton and compiles nothing. It replaces the page's last section.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.problem import PoolKind
from tests.amd.offline.budgets import FOLDER, AnyRow, Cost, read, rows_with_budgets
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.matrix import Row
from tests.amd.offline.sparse_matrix import LayerRow

HEADING = "## Kernels that are not ranked"
_TEXT = """\
The compiler's figures for kernels over eight-bit and latent pages, of sparse attention, and of the fused store, for
pools below 2 GiB with Triton {triton}: the budgets that the gate holds them to. None spills a register on either arch;
the gate refuses one that does. A range is that of the launched variants (windows, caps, sinks, masks, LSE). Waves are
those that a SIMD has room for.
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
# Arch -> costs of a line.
Figures = dict[str, list[Cost]]


def main(document: Path) -> None:
    """Replace the section, which is the last one."""
    before, _, _ = document.read_text().partition(HEADING)
    document.write_text(before + section())


def section() -> str:
    """The section, from its heading to the end of the page."""
    heads = " | ".join(f"{arch} VGPRs | LDS | waves" for arch in AMD_ARCHS)
    lines = [f"| kernel | layer | {heads} |", "|---|---|" + "---|---|---|" * len(AMD_ARCHS)]
    for (kernel, layer), figures in _figures().items():
        cells = " | ".join(_cells(figures.get(arch, [])) for arch in AMD_ARCHS)
        lines.append(f"| `{kernel}` | {layer} | {cells} |")
    return "\n".join([HEADING, "", _TEXT.format(triton=_newest()), *lines]) + "\n"


def _figures() -> dict[tuple[str, str], Figures]:
    """(Kernel, layer) -> figures, in the page's order."""
    found: dict[tuple[str, str], Figures] = defaultdict(lambda: defaultdict(list))
    for row in _rows():
        for variant, cost in read(_newest(), row).items():
            if variant.kernel in _BY_LAYER:
                found[variant.kernel, _layer(row)][row.arch].append(cost)
            elif variant.kernel in _ALSO:
                found[variant.kernel, "all"][row.arch].append(cost)
    order = (*_BY_LAYER, *_ALSO)
    return dict(sorted(found.items(), key=lambda entry: order.index(entry[0][0])))


def _rows() -> Iterator[AnyRow]:
    for row in rows_with_budgets(_newest()):
        is_ranked = isinstance(row, Row) and row.pool is PoolKind.SPLIT and row.scales is Scales.NONE
        if not is_ranked and not row.is_large:
            yield row


def _layer(row: AnyRow) -> str:
    if not isinstance(row, Row):
        name = f"sparse: {row.name.replace('_', ' ')}"
        return f"{name}, {_heads(row.heads, row.dims)}" if isinstance(row, LayerRow) else f"{name}, {row.heads} heads"
    factors = f", scales {_FACTORS[row.scales]}" if row.scales is not Scales.NONE else ""
    # gfx942 has no instruction for it.
    encoding = f" {row.kv.name}" if row.kv.name == "E5M2" else ""
    return f"{_heads(row.heads, row.dims)}{encoding}{factors}"


def _heads(heads: tuple[int, int], dims: tuple[int, int]) -> str:
    return f"{heads[0]} x {heads[1]} heads of {'/'.join(map(str, dict.fromkeys(dims)))}"


def _cells(costs: list[Cost]) -> str:
    if not costs:
        return " | ".join("-" * 3)
    lds = [-(-cost.lds_bytes // 1024) for cost in costs]
    return (
        f"{_range(cost.vgprs for cost in costs)} | {_range(lds)} KiB | {_range(cost.waves_per_simd for cost in costs)}"
    )


def _range(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return f"{least}" if least == most else f"{least} to {most}"


def _newest() -> str:
    return max((path.name for path in FOLDER.iterdir()), key=lambda name: [*map(int, name.split("."))])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

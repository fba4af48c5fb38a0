"""Write the page that says what the tuning rows of gfx942 and gfx950 were chosen from.

    python -m tests.amd.offline.tuning_table docs/amd_tuning.md [TITLE...]

compiles every candidate with the Triton at hand, which must be the newest supported, and costs it with llvm-mca (see
mca.py). With titles only sections in whose own one of them stands are written anew. Prints a line for each layer; exits
with 1, and leaves the page as it is, where a row spills or is worse than its best candidate by more than the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import triton

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.offline.kernel_figures import section
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import find_llvm_mca
from tests.amd.offline.tile_candidates import (
    DECODE_LAYERS,
    EXTEND_LAYERS,
    FAR,
    TOLERANCE,
    Estimate,
    Kind,
    Ranking,
    Tiles,
    chosen_tiles,
    rank,
)
from tests.amd.offline.tile_cost import DECODE_LATENCY, EXTEND_LATENCY, TileCost, floor_clocks

# Candidates of a layer that the page shows, besides the row that serves.
SHOWN = 6

_HEAD = """\
# Where the AMD tiles come from

**Nothing on this page was measured on hardware.** No AMD GPU was at hand. The tuning rows of gfx942 and gfx950
(`kernels/tuning/`) were chosen from what the compiler reports, and from a static model around `llvm-mca`, which
reads machine code and runs none. The order of candidates is a guess that a first measurement may overturn; differences
below {tolerance:.0%} mean nothing at all.

`python -m tests.amd.offline.tuning_table docs/amd_tuning.md` writes this page; it needs `llvm-mca` of LLVM 22 or newer
(`apt-get install llvm-22`). `bash scripts/test.sh tuning` holds that no row spills or is more than
{tolerance:.0%} worse than its best candidate. This page: Triton {triton}, LLVM {llvm}.

## The cost

The hot loop of the compiled kernel (the innermost loop with the most matrix instructions) goes through `llvm-mca`,
which issues one wave's instructions in order and follows `s_waitcnt`. Two things are put right before (`mca.py`): loads
with 64-bit addresses, which it takes for loads of LDS too, and exp2, reciprocals and 32-bit products, which a SIMD
computes at a quarter of the rate. There are four bounds, in clocks of a CU:

| bound | clocks |
|---|---|
| issue | the unit of a SIMD that is busiest (matrix, vector, scalar, ...), over all waves |
| LDS | bytes that the waves read and write there, at 128 a clock |
| loads | bytes that the waves load, at 64 a clock |
| waits | an iteration of one wave alone, divided by the programs that run on the CU at the same time |

for a KV token of one KV head (decode), or 1024 products of a q row and a key (extend), in full tiles. The programs on a
CU follow from registers and LDS, and for decode from `programs_per_cu`. The floor in a heading is what data sheets
allow: HBM for decode, the matrix units for extend. "own" and "in series" are an iteration of one wave: its cycles, of 4
clocks each, were loads immediate, and the latencies of loads that come on top, one after another.

**Extend** is ranked by the largest of the bounds, with loads of {extend} cycles: assumed, not known.

**Decode** stays below its floor in all of them, so it is ranked by its *break-even latency*: how many microseconds a
load may take until all programs of a CU together ask for less than HBM delivers. What a load takes while HBM is busy is
not published; 1 to 2.5 us are likely. The column of waits is for {decode} cycles.

The model does not know caches, bank conflicts, barriers, uneven work, clocks under load or what starting a row costs.

A candidate is out when any kernel that it is compiled for spills: windows, soft caps, sinks, ALiBi slopes, packed
masks, pools below and above 2 GiB. Tiles of decode that leave a SIMD one wave come last, and blocks of 256 query rows
are left out. Candidates more than {far} times worse than the best are compiled for the plain layer only. **Bold** is
the row that serves. VGPRs, LDS and the figures are those of the plain layer, waves a SIMD those of the kernel that
needs most. float32 and deterministic rows have no ranking; they are held to the budgets.
[amd_beside_aiter.md](amd_beside_aiter.md) has the rows that serve beside AITER's own kernels.

Left for hardware to decide: eight waves in turns on gfx950 (`ExtendTiles(256, 32, 8, 4)` with four stages at the launch
compiles to four `s_setprio` and four barriers without a spill, and is right in the simulator, but no model here credits
what overlaps), and loads of K and V that stay out of the L2 cache (`.cg`).
"""


def main(document: Path, titles: Sequence[str] = ()) -> int:
    """Rank, print, write; the exit status."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rankings = []
    for row, kind in layers():
        if titles and not any(wanted in title(row, kind) for wanted in titles):
            continue
        ranking = rank(row, kind)
        print(
            f"{title(ranking.row, ranking.kind)}: {ranking.excess:.1%} worse than the best, or above the floor",
            flush=True,
        )
        rankings.append(ranking)
    if any(ranking.excess > TOLERANCE for ranking in rankings):
        return 1
    document.write_text(renewed(document.read_text(), rankings) if titles else page(rankings))
    return 0


def layers() -> Iterator[tuple[Row, Kind]]:
    """What is ranked, in the page's order."""
    yield from ((row, DecodeTiles) for row in DECODE_LAYERS)
    yield from ((row, ExtendTiles) for row in EXTEND_LAYERS)


def chosen_layers() -> Iterator[tuple[Row, Tiles]]:
    """The tiles that serve what is ranked."""
    yield from ((row, chosen_tiles(row, kind)) for row, kind in layers())


def page(rankings: list[Ranking]) -> str:
    """The whole page."""
    head = _HEAD.format(
        tolerance=TOLERANCE,
        triton=triton.__version__,
        llvm=find_llvm_mca()[1],
        decode=DECODE_LATENCY,
        extend=EXTEND_LATENCY,
        far=FAR,
    )
    ranked = "".join(f"\n## {title(ranking.row, ranking.kind)}\n\n{_table(ranking)}" for ranking in rankings)
    return f"{head}{ranked}\n{section()}"


def renewed(text: str, rankings: list[Ranking]) -> str:
    """A page with some of its sections anew."""
    for ranking in rankings:
        before, heading, rest = text.partition(f"## {title(ranking.row, ranking.kind)}\n")
        assert heading, f"the page has no section for {title(ranking.row, ranking.kind)}"
        _, following, others = rest.partition("\n## ")
        text = f"{before}{heading}\n{_table(ranking)}{following}{others}"
    return text


def title(row: Row, kind: Kind) -> str:
    """What a ranking of such tiles is about."""
    q_heads, kv_heads = row.heads
    verb = "decode" if kind is DecodeTiles else "extend"
    dtype = str(row.dtype).removeprefix("torch.")
    dims = "/".join(map(str, dict.fromkeys(row.dims)))
    floor = f"{floor_clocks(row, kind):.1f}"
    return f"{row.arch} {verb}: {q_heads} x {kv_heads} heads of {dims}, {dtype}, floor {floor}"


def words(tiles: Tiles) -> str:
    """The tiles as a row of the tuning table says them, without what has its default."""
    if isinstance(tiles, DecodeTiles):
        text = f"{tiles.key_block}, {tiles.num_warps}, {tiles.num_stages}, {tiles.programs_per_cu}"
        text += ", transposed=True" if tiles.transposed else ""
        text += f", heads_per_row={tiles.heads_per_row}" if tiles.heads_per_row > 1 else ""
        text += f", waves_per_eu={tiles.waves_per_eu}" if tiles.waves_per_eu else ""
        return f"DecodeTiles({text})"
    text = f"{tiles.query_rows}, {tiles.key_block}, {tiles.num_warps}, {tiles.num_stages}"
    text += f", waves_per_eu={tiles.waves_per_eu}" if tiles.waves_per_eu else ""
    text += f", dim_block={tiles.dim_block}" if tiles.dim_block else ""
    return f"ExtendTiles({text})"


def _table(ranking: Ranking) -> str:
    fitting = [found for found in ranking.candidates if found.cost]
    shown = [found for place, found in enumerate(fitting) if place < SHOWN or found is ranking.chosen]
    lines = [
        f"| tiles | VGPRs | LDS | waves | own | in series | issue | LDS | loads | waits | {ranked_by(ranking.kind)} |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(found, found is ranking.chosen) for found in shown),
    ]
    return "\n".join(lines) + "\n\nThe others are worse, spill or do not fit.\n"


def _line(found: Estimate, is_chosen: bool) -> str:
    code, cost = found.code, found.cost
    assert code
    assert cost
    name = f"`{words(found.tiles)}`"
    cells = [
        f"**{name}**" if is_chosen else name,
        f"{code.vgprs}",
        f"{code.lds_bytes / 1024:.0f} KiB",
        f"{found.waves}",
        *cost_cells(cost, type(found.tiles)),
    ]
    return f"| {' | '.join(cells)} |"


def ranked_by(kind: Kind) -> str:
    """The last column of cost_cells."""
    return "break-even" if kind is DecodeTiles else "cost"


def cost_cells(cost: TileCost, kind: Kind) -> tuple[str, ...]:
    """What a line says of a cost: an iteration's own cycles, latencies in series, the four bounds, the order."""
    return (
        f"{cost.cycles.own:.0f}",
        f"{cost.cycles.latencies:.1f}",
        *(f"{bound:.1f}" for bound in (cost.issue, cost.lds, cost.loads, cost.waits)),
        f"{cost.break_even:.1f} us" if kind is DecodeTiles else f"{cost.clocks:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

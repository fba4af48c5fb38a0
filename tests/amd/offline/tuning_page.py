"""The page of AMD's tiles, made from static_figures.json alone: docs/amd_tuning.md but for its last section."""

from __future__ import annotations

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.cost.static_figures import KernelFigures, LayerFigures, StaticFigures, Tiles
from tests.amd.offline.tile_candidates import KEPT, TOLERANCE
from tests.amd.offline.tile_cost import DECODE_LATENCY, EXTEND_LATENCY

# The order of a table's cells before the last one, by which candidates are ordered.
_COLUMNS = (
    "tiles",
    "VGPRs",
    "spilled",
    "LDS",
    "waves",
    "programs",
    "own",
    "in series",
    "issue",
    "LDS clocks",
    "loads",
    "waits",
)
_ASSEMBLY = """\
## Products and the softmax of extend

The columns say how many cycles an iteration keeps the matrix and the vector unit of a SIMD busy. "none" is the share of
the matrix unit's peak if the two never overlap, "full" if they always do; [predicted times](cost.md) use both. AITER's
kernels in assembly are read from its code objects.
"""
_GLUON = """\
## Decode in Gluon

`kernels/cdna` has a decode with explicit layouts. Keys and values go from memory straight into the operands of
products: nothing of them is written to LDS, and lanes exchange only the maximum and the sum of their scores. Loads of
other blocks are in flight meanwhile, and page numbers are scalar loads two rounds ahead. The table goes from the row of
paged decode that serves otherwise to this kernel in its own tiles:

"""
_SERVES = """\
`triton.cdna_decode` serves on gfx942 and gfx950 with Triton 3.9.0 ([limits](kernels.md)), chosen by these figures and
[the simulator](simulator.md) like all AMD rows. **No MI300 and no MI355 has run it**, so it is [probed before it
serves](providers.md#the-probe), and tiles of `triton.decode` that `rocm-attn tune` measured to be faster take its
place. On gfx950 heads of 256 stay with paged decode:
{wide}, and nothing fills its waits for products, which this model does not know.
With a window every block is masked, and a cap has more to compute. Clocks to issue a key of heads of 128:
{kinds}.
With Triton 3.6.0 it is right in the simulator and gains nothing: page numbers are vector loads there.
"""
_STUDY = """\
## Extend in Gluon

The same was tried for extend, for heads of 128 in bfloat16, and does not serve. A wave had 32 or 64 rows of q (new
tokens times four query heads), K and V went straight into the operands of products, and no key passed LDS. At best it
cost 1.02 of the row that serves on gfx942, and 1.55 on gfx950. Each wave loads all keys for itself: with 32 rows the
loads alone take the bound of gfx942, and twice that of gfx950. With 64 rows a SIMD has room for one wave, and nothing
fills its waits. On gfx950 the vector unit bounds extend, and turning V for products without LDS adds to its work.
"""
_HEAD = """\
# Where the AMD tiles come from

**Nothing on this page was measured on hardware.** No AMD GPU was at hand. The tuning choices of gfx942 and gfx950
(`kernels/tuning/`) were chosen from the compiler's figures and from a static model around `llvm-mca`, which reads
machine code and runs none. A first measurement may overturn the order of candidates; differences below {tolerance:.0%}
mean nothing. AITER's Triton and Gluon kernels for the same layers stand next to the rows.

<!-- not run: they take an hour, and llvm-mca of LLVM 22 or newer (apt-get install llvm-22) -->
```bash
AITER_SOURCE=../aiter python -m tests.amd.offline.every_figure docs         # all of it
AITER_SOURCE=../aiter python -m tests.amd.offline.every_figure docs none    # without the candidates: minutes
```

This writes `rocm_lab/cost/static_figures.json` and from it this page and the figures of [predicted times](cost.md).
`bash scripts/test.sh tuning` checks that no row spills or is more than {tolerance:.0%} worse than its best candidate.
The rows that serve, decode for CDNA and AITER's kernels are of one run:
AITER {aiter} of {date}, Triton {triton} for all (AITER pins an older one), LLVM {llvm}.
AITER's wrappers chose its tiles for 64 sequences of 4,096 keys (decode) and 4 chunks of 2,048 tokens of 8,192 (extend),
pages of 16.

## The cost

The hot loop (the innermost loop with the most matrix instructions) goes through `llvm-mca`, which issues one wave's
instructions in order and follows `s_waitcnt`. `mca.py` corrects two of its errors: loads with 64-bit addresses, which
it takes for loads of LDS too, and exp2, reciprocals and 32-bit products, which a SIMD computes at a quarter of the
rate. The result is four bounds, in clocks of a CU, per KV token of a KV head (decode) or per 1024 products of a q row
and a key (extend), in full tiles:

| bound | clocks |
|---|---|
| issue | the busiest unit of a SIMD (matrix, vector, scalar, ...), over all waves |
| LDS clocks | bytes that the waves read and write there, at 128 a clock |
| loads | bytes that the waves load, at 64 a clock |
| waits | an iteration of one wave alone, divided by the programs on the CU |

Registers, LDS and, for decode, `programs_per_cu` decide how many programs run on a CU. The bound in a heading is the
data sheets' limit: HBM for decode, the matrix units for extend. "own" and "in series" are one wave's iteration: its
cycles, of 4 clocks each, with immediate loads, and the load latencies that come on top.

* **Extend** is ranked by the largest bound, with loads of {extend} cycles (assumed).
* **Decode** stays below its bound in all of them, so it is ranked by its *break-even latency*: the microseconds that a
  load may take until all programs of a CU together ask for less than HBM delivers. The latency while HBM is busy is not
  published; 1 to 2.5 us are likely. The column of waits is for {decode} cycles.

The model does not know caches, bank conflicts, barriers, uneven work, clocks under load or the cost of starting a row,
and leaves out merges of parts.

A candidate is out if any kernel that it is compiled for spills: windows, soft caps, sinks, ALiBi slopes, packed masks,
pools below and above 2 GiB. AITER's kernels that spill keep their cost, to compare. Decode tiles that leave a SIMD one
wave come last, and blocks of 256 query rows are left out. The best {kept} are shown, and **bold** is the row that
serves. VGPRs, LDS and the figures are those of the plain layer; so are waves of the row that serves and of AITER's
kernels, while candidates show the kernel that needs most. float32 and deterministic rows have no ranking.

Hardware has to decide two things: eight waves in turns on gfx950 (`ExtendTiles(256, 32, 8, 4)` with four stages
compiles to four `s_setprio` and four barriers without a spill, and is right in the simulator, but no model here credits
the overlap), and loads of K and V that stay out of the L2 cache (`.cg`).
"""


def page(figures: StaticFigures) -> str:
    """The whole page."""
    head = _HEAD.format(
        tolerance=TOLERANCE,
        triton=figures.triton,
        llvm=figures.llvm,
        aiter=figures.aiter,
        date=figures.aiter_date,
        decode=DECODE_LATENCY,
        extend=EXTEND_LATENCY,
        kept=KEPT,
    )
    ranked = "".join(f"\n## {title(layer)}\n\n{_table(layer)}" for layer in figures.layers)
    return f"{head}{ranked}\n{_assembly(figures)}\n{_gluon(figures)}\n{_STUDY}\n"


def title(layer: LayerFigures) -> str:
    """Returns the title of a layer's section."""
    q_heads, kv_heads = layer.heads
    what = f"{q_heads} x {kv_heads} heads of {layer.head_dim}, {layer.dtype}"
    return f"{layer.arch} {layer.step}: {what}, lower bound {layer.lower_bound:.1f}"


def words(tiles: Tiles) -> str:
    """Describes the tiles like a row of the tuning table, without default values."""
    if isinstance(tiles, DecodeTiles):
        text = f"{tiles.key_block}, {tiles.num_warps}, {tiles.num_stages}, {tiles.programs_per_cu}"
        text += ", transposed=True" if tiles.transposed else ""
        text += f", heads_per_row={tiles.heads_per_row}" if tiles.heads_per_row > 1 else ""
        text += f", waves_per_eu={tiles.waves_per_eu}" if tiles.waves_per_eu else ""
        return f"{type(tiles).__name__}({text})"
    text = f"{tiles.query_rows}, {tiles.key_block}, {tiles.num_warps}, {tiles.num_stages}"
    text += f", waves_per_eu={tiles.waves_per_eu}" if tiles.waves_per_eu else ""
    text += f", dim_block={tiles.dim_block}" if tiles.dim_block else ""
    return f"ExtendTiles({text})"


def _table(layer: LayerFigures) -> str:
    order = "break-even" if layer.step == "decode" else "cost"
    columns = (*_COLUMNS, order)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in layer.candidates:
        name = f"`{words(each.tiles)}`"
        lines.append(_line(f"**{name}**" if each.serves else name, each.figures, layer.step))
    lines += [_line(f"AITER `{peer.name}`", peer.figures, layer.step) for peer in layer.peers]
    for cdna in layer.cdna:
        name = f"`triton.cdna_decode: {words(cdna.tiles)}`{'' if cdna.kind == 'plain' else ', ' + cdna.kind}"
        lines.append(_line(f"**{name}**" if cdna.serves else name, cdna.figures, layer.step))
    refused = [f"`{name}` does not serve this layer: {why}." for name, why in layer.refused.items()]
    reported = (
        f"Candidates were ranked with {layer.ranked}; others are worse, spill or do not fit." if layer.ranked else ""
    )
    reported = reported or "No candidate is shown: they were not ranked since the row or the model changed."
    return "\n".join([*lines, "", " ".join([reported, *refused])]) + "\n"


def _line(name: str, figures: KernelFigures, step: str) -> str:
    cells = [
        name,
        f"{figures.vgprs}",
        f"{figures.spilled}",
        f"{figures.lds_bytes / 1024:.0f} KiB",
        f"{figures.waves}",
        f"{figures.programs}",
        f"{figures.own:.0f}",
        f"{figures.latencies:.1f}",
        *(f"{bound:.1f}" for bound in (figures.issue, figures.lds, figures.loads, figures.waits)),
        f"{figures.break_even:.1f} us" if step == "decode" else f"{_cost(figures):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _assembly(figures: StaticFigures) -> str:
    """Compares extend with AITER's kernels in assembly, of which only the two busiest units can be counted."""
    lines = ["| arch | kernel | matrix | vector | none | full |", "|---|---|---|---|---|---|"]
    for arch, (matrix, vector) in figures.code_objects.items():
        extends = [layer for layer in figures.layers if (layer.arch, layer.step) == (arch, "extend")]
        kernels = [(f"`{words(layer.serving.tiles)}`, {layer.head_dim}", layer.busy) for layer in extends]
        kernels += [(f"AITER `{peer.name}`, {layer.head_dim}", peer.busy) for layer in extends for peer in layer.peers]
        lines += [_overlap(arch, name, *busy) for name, busy in kernels]
        lines.append(_overlap(arch, "AITER in assembly, 128", matrix, vector))
    return "\n".join([_ASSEMBLY, *lines]) + "\n"


def _gluon(figures: StaticFigures) -> str:
    """Compares decode in Gluon with the rows of paged decode."""
    lines = [
        "| layer | VGPRs | LDS | waves | issue | LDS clocks | waits | break-even |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layer in figures.layers:
        for each in layer.cdna:
            if each.serves and each.kind == "plain":
                lines.append(_change(f"{layer.arch}, heads of {layer.head_dim}", layer.serving.figures, each.figures))
    return "\n".join([_GLUON + lines[0], *lines[1:], "", _SERVES.format(wide=_wide(figures), kinds=_kinds(figures))])


def _wide(figures: StaticFigures) -> str:
    """Describes the occupancy and the break-even latency of the best tiles for heads of 256 on gfx950."""
    of_dim = [layer.cdna for layer in figures.layers if (layer.arch, layer.head_dim) == ("gfx950", 256) and layer.cdna]
    best = max((each.figures for cdna in of_dim for each in cdna), key=lambda found: found.break_even)
    waves = "one wave" if best.waves == 1 else f"{best.waves} waves"
    return f"a SIMD has room for {waves} of it ({best.break_even:.1f} us at best)"


def _kinds(figures: StaticFigures) -> str:
    """Lists the clocks to issue a key by kind of layer, which shows the cost of windows and caps."""
    said = []
    for layer in figures.layers:
        if layer.cdna and layer.head_dim == 128:
            issue = {each.kind: each.figures.issue for each in layer.cdna if each.serves}
            named = [f"{clocks:.1f} ({kind})" for kind, clocks in issue.items()]
            said.append(f"{layer.arch} {', '.join(named)}")
    return "; ".join(said)


def _cost(found: KernelFigures) -> float:
    """Returns the cost of extend: the larger of its units and its waits."""
    return max(found.units, found.waits)


def _change(name: str, ours: KernelFigures, other: KernelFigures) -> str:
    cells = [
        f"{ours.vgprs} to {other.vgprs}",
        f"{ours.lds_bytes // 1024} to {other.lds_bytes // 1024} KiB",
        f"{ours.waves} to {other.waves}",
        *(
            f"{getattr(ours, what):.1f} to {getattr(other, what):.1f}"
            for what in ("issue", "lds", "waits", "break_even")
        ),
    ]
    return f"| {name} | {' | '.join(cells)} us |"


def _overlap(arch: str, name: str, matrix: float, vector: float) -> str:
    none, full = matrix / (matrix + vector), matrix / max(matrix, vector)
    return f"| {arch} | {name} | {matrix:.0f} | {vector:.0f} | {none:.2f} | {full:.2f} |"

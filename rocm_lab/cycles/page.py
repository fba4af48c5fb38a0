"""Writes the count of a published kernel into a page, next to its measured clocks.

    python -m rocm_lab.cycles.page docs/cycles.md fav4 fav4.amdgcn

The page has a table between two marks; the line of the same name is written anew. The names are those of PUBLISHED.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.cycles.count import LoopCount, count_loop
from rocm_lab.waits.objects import kernels_of

_NOTES = "kernels/attention/note.md"


@dataclass(frozen=True, slots=True)
class Published:
    """One measured loop. name: of the page's line; what: how it differs from the others; source: where it is written"""

    name: str
    what: str
    clocks: int
    source: str


# Clocks on an MI355X of the kernel "flash attention forward, rotated, four clusters" of ROCm/gfx950-gluon-tutorials:
# heads of 128, 16-bit, no mask, 16,320 tokens, 256 rows of q and 64 keys, 8 waves. An iteration takes two key blocks of
# two waves of a SIMD: 4,096 clocks of products. Instruction traces measured them (docs/mfma_efficiency.md there).
PUBLISHED = (
    Published("fav3", "no declared order", 6282, f"{_NOTES} 1.1, baseline"),
    Published("fav3-3", "3 vector instructions declared after each product", 5768, f"{_NOTES} 1.1, K=3"),
    Published("fav3-8", "8 of them, nothing packed", 5451, f"{_NOTES} 1.1, scalarize + uniform K=8"),
    Published("fav3-split", "products with vector, then with exp2", 5390, f"{_NOTES} 1.1, VALU/TRANS split"),
    Published("fav4-plain", "lazy rescale, no declared order", 5394, f"{_NOTES} 3.1, no llir scheduler"),
    Published("fav4-no-pause", "declared order, scale folded into q", 4423, f"{_NOTES} 3.1, opt5"),
    Published("fav4", "and a pause before the loads of LDS", 4373, "kernels/attention/README.md 8"),
    Published("fav4-scale", "the same, scale in the loop", 4438, "kernels/attention/README.md 8"),
)


BEGIN, END = "<!-- published -->\n", "<!-- end of published -->\n"
_HEAD = """\
| loop | | published clocks | counted | wrong by | of the ceiling, published | counted | code object |
|---|---|---|---|---|---|---|---|
"""
# Eight waves of one program: two on each SIMD.
_WAVES = 2
_HASH_CHARACTERS = 12


def published_line(published: Published, count: LoopCount, sha256: str) -> str:
    """The line of a published loop: by how much the count is wrong, and both shares of the ceiling."""
    wrong = count.clocks / published.clocks - 1
    cells = [
        f"`{published.name}`",
        f"{published.what} ({published.source})",
        f"{published.clocks:,}",
        f"{count.clocks:,.0f}",
        f"{wrong:+.1%}",
        f"{count.matrix / published.clocks:.1%}",
        f"{count.share:.1%}",
        sha256[:_HASH_CHARACTERS],
    ]
    return f"| {' | '.join(cells)} |\n"


def with_line(page: str, name: str, path: Path) -> str:
    """The page with the count of a file's one kernel in the line of that name. Raises BadSetting for another name."""
    published = {each.name: each for each in PUBLISHED}
    if name not in published:
        raise BadSetting(f"{name!r} is not published; known are {', '.join(published)}")
    (kernel,) = kernels_of(path)
    count = count_loop(kernel.assembly, kernel.arch, _WAVES, _WAVES)
    if count is None:
        raise BadSetting(f"{path} has no loop with matrix instructions")
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = {line.split("`")[1]: line for line in table.splitlines(keepends=True)[2:]}
    lines[name] = published_line(published[name], count, kernel.sha256)
    ordered = [lines[each] for each in published if each in lines]
    return f"{before}{BEGIN}{_HEAD}{''.join(ordered)}{END}{after}"


if __name__ == "__main__":
    document, of_name, file = sys.argv[1:]
    Path(document).write_text(with_line(Path(document).read_text(), of_name, Path(file)))

"""Writes the count of a published kernel into a page, next to its measured clocks.

    python -m rocm_lab.cycles.page docs/cycles.md fav4 fav4.amdgcn

The page has a table between two marks; the line of the same name is written anew. The names are those of published.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.cycles.count import LoopCount, count_loop
from rocm_lab.cycles.published import PUBLISHED, Published
from rocm_lab.waits.objects import kernels_of

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

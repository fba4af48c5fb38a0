"""Writes verdicts into a page: a line for each kernel of each arch, from folders of compiled code.

    python -m rocm_lab.waits.page docs/waits.md "AITER v0.1.20" /tmp/cache_of_triton

The page has a table between two marks; the lines of the same source are written anew.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.page_parts import rows_of, with_rows
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.waits.check import Word, check_waits
from rocm_lab.waits.objects import files_of, kernels_of

# AITER appends the values of a kernel's constants to its name.
_CONSTANTS = re.compile(r"_num_query_heads_\d.*")
_SHIPPED = ".co"


def lines_of(source: str, folders: Iterable[Path]) -> list[str]:
    """A line for each kernel and arch; codes that differ in nothing but their lines of source count once.

    Code objects that are shipped as such, each of one kernel, have a line for each of their folders.
    """
    folders = tuple(folders)
    counts: dict[tuple[str, str], Counter[Word]] = defaultdict(Counter)
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for path in files_of(folders):
        try:
            kernels = kernels_of(path)
        except BadSetting:  # another arch
            continue
        for kernel in kernels:
            code = kernel.arch, _text(kernel.assembly)
            if code not in seen:
                seen.add(code)
                name = _CONSTANTS.sub("", kernel.assembly.name)
                if path.suffix == _SHIPPED:
                    given = next((each for each in folders if each in path.parents), path.parent)
                    name = (given.name / path.parent.relative_to(given) / f"*{_SHIPPED}").as_posix()
                counts[kernel.arch, name][check_waits(kernel.assembly, kernel.arch).word] += 1
    return [
        f"| {source} | {arch} | `{name}` | {sum(found.values())} | {found[Word.PROVED]} | {found[Word.NOT_CHECKED]} | "
        f"{found[Word.FAULT]} |\n"
        for (arch, name), found in sorted(counts.items())
    ]


def with_lines(page: str, source: str, lines: list[str]) -> str:
    """The page with these lines of a source in place of its earlier ones."""
    others = [line for line in rows_of(page, "verdicts") if not line.startswith(f"| {source} |")]
    return with_rows(page, "verdicts", sorted([*others, *lines]))


def _text(assembly: Assembly) -> tuple[str, ...]:
    return tuple(instruction.text for instruction in assembly.instructions)


if __name__ == "__main__":
    document, name, *rest = sys.argv[1:]
    found = lines_of(name, map(Path, rest))
    Path(document).write_text(with_lines(Path(document).read_text(), name, found))
    print("".join(found), end="")

"""The page of the ledger: `python -m rocm_lab.ledger.page` writes it from the data, the product's tables and the runs.

No cell is written by hand. sources.json has what AITER's sources declare; sources.py writes it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rocm_attn.machine.aiter_releases import releases, written_for
from rocm_attn.machine.releases import Release
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.aiter.library import ENTRY_POINTS, EntryPoint
from rocm_attn.providers.contract import Fault
from rocm_lab.ledger.sources import Sources, functions, pins, recorded

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RUNS = DOCS / "aiter_ledger.md", DOCS / "aiter_source.md"

_READ = {
    "tree": "the whole tree",
    "functions": "the functions that are called",
    "notes": "release notes alone",
    "title": "its title alone",
    "nothing": "nothing",
}
# A line of the table of runs: release, commits since, arch, kernel, number of cases, verdict.
_RUN = re.compile(
    r"^\| (v\S+)-(\d+)-g\w+ \| \S+ \| \S+ \| (\S+) \| ([^|]+) \| (\d+) \| [^|]* \| ([^|]+) \| \S+ \|$", re.MULTILINE
)

_HEAD = """# The ledger of AITER's releases

This page shows which release of AITER declares which function, which parts of it were read and run, which faults it
has, and who ships it. `python -m rocm_lab.ledger.page` writes this page; a test checks that it is current. The
declarations are read from AITER's git by `AITER_SOURCE=../aiter python -m rocm_lab.ledger.sources`. A release that was
read has a line in `rocm_attn/machine/aiter_releases.json`; those who ship it are in `rocm_lab/ledger/pins.json`.

This version of rocm_attn was written for {written_for}.
Other releases serve too: a kernel is used if its parameters agree and its probe passes. `rocm-attn explain`
marks such kernels as not read, the log says so, and `rocm-attn doctor` has the finding `aiter-read`. If a function has
moved, its new place is named.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A line of the table of runs in docs/aiter_source.md. release: "v0.1.20", or the name of a commit after it"""

    release: str
    where: str
    kernel: str
    cases: int
    verdict: str


def page() -> str:
    """The page."""
    sources, ran = recorded(), runs(RUNS.read_text())
    parts = [
        _HEAD.format(written_for=written_for()),
        _section(
            "Releases",
            _RELEASES,
            ("release", "day", "read", "differs in", "run", "shipped by"),
            _releases(sources, ran),
        ),
        _section("Functions", _FUNCTIONS, ("kernel", "functions", "agrees", "run"), _kernels(sources, ran)),
        _section("Where they are declared", "", ("function", "file", "changes of its parameters"), _places(sources)),
        _section("Faults of releases", _FAULTS, ("fault", "kernels", "releases", "archs"), _faults()),
        _section("Attention in notes and titles", "", ("release", "of it"), _notes()),
        _section("Who ships which AITER", _PINS, ("who", "AITER", "read?", "evidence"), _pins(sources)),
    ]
    return "\n".join(parts)


_RELEASES = """\
*Differs in* names kernels whose functions lack a parameter there, so that the release does not serve them. Runs are
those of [AITER's own kernels on a CPU](aiter_source.md): cases that were right, of all that ran.
"""
_FUNCTIONS = """\
*Agrees* has the releases whose functions take all that the provider passes and require nothing else.
"""
_FAULTS = """\
Kernels are refused where these faults are met ([kernels](kernels.md)); `rocm_attn/providers/aiter/faults.py` says how
each is known. A row without releases is true of all that were read.
"""
_PINS = """\
`--build-arg AITER_COMMIT=v0.1.23` builds the [image](../docker/README.md) with another one. Before hours are spent, the
build says in a sentence whether it was read, and ends if it is older than the first one that is served.
"""


def _section(title: str, text: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"## {title}\n", *([text] if text else []), *table, ""])


def runs(text: str) -> list[Run]:
    """The runs that docs/aiter_source.md has. text: of that page"""
    found = []
    for tag, since, where, kernel, cases, verdict in _RUN.findall(text):
        found.append(Run(tag if since == "0" else _of_commit(tag, since), where, kernel, int(cases), verdict))
    return found


def _of_commit(tag: str, since: str) -> str:
    """The name of a build some commits after a tag: 46 after v0.1.20 is 0.1.21.dev46."""
    major, minor, patch = Release.of(tag).numbers[:3]
    return f"{major}.{minor}.{patch + 1}.dev{since}"


def agreeing(sources: Sources, kernel: str) -> list[str]:
    """The releases whose functions can be called as a kernel calls them."""
    entries = ENTRY_POINTS[kernel]
    return [name for name in sources.dates if not any(_disagrees(sources, entry, name) for entry in entries)]


def _disagrees(sources: Sources, entry: EntryPoint, release: str) -> bool:
    declared = sources.at(entry.function.name, release)
    return not declared.file or bool(entry.disagreement(declared.function()))


def _spans(names: Sequence[str], among: Sequence[str]) -> str:
    """Releases in words: runs of neighbours, where a run up to the newest has no end."""
    spans: list[list[str]] = []
    for name in names:
        if spans and among.index(name) == among.index(spans[-1][-1]) + 1:
            spans[-1].append(name)
        else:
            spans.append([name])
    words = [
        f"since {each[0]}" if each[-1] == among[-1] else " to ".join(dict.fromkeys((each[0], each[-1])))
        for each in spans
    ]
    return ", ".join(words) or "none"


def _ran(found: Iterable[Run]) -> str:
    """Runs in words: on each arch the cases that were right, of all."""
    right: dict[str, list[int]] = {}
    for run in found:
        counts = right.setdefault(run.where, [0, 0])
        counts[0] += sum(map(int, re.findall(r"(\d+) right", run.verdict)))
        counts[1] += run.cases
    return ", ".join(f"{one} of {all_} on {where}" for where, (one, all_) in right.items())


def _releases(sources: Sources, ran: Sequence[Run]) -> Iterator[Sequence[str]]:
    agree = {kernel: agreeing(sources, kernel) for kernel in ENTRY_POINTS}
    for each in releases():
        shipped = [pin.who for pin in pins() if pin.aiter in (each.name, each.commit)]
        is_read = each.name in sources.dates
        lacks = [kernel.removeprefix("aiter.") for kernel, names in agree.items() if is_read and each.name not in names]
        named = f"{each.name}, commit {each.commit[:8]}" if each.commit else each.name
        of_it = _ran(run for run in ran if run.release == each.name)
        yield named, sources.dates.get(each.name, ""), _READ[each.read], ", ".join(lacks), of_it, ", ".join(shipped)


def _kernels(sources: Sources, ran: Sequence[Run]) -> Iterator[Sequence[str]]:
    for kernel, entries in ENTRY_POINTS.items():
        names = dict.fromkeys(entry.function.name for entry in entries)
        of_it = _ran(run for run in ran if f"aiter.{run.kernel.split(' (')[0]}" == kernel)
        yield f"`{kernel}`", ", ".join(names), _spans(agreeing(sources, kernel), list(sources.dates)), of_it


def _places(sources: Sources) -> Iterator[Sequence[str]]:
    for function in functions():
        changes = [each for each in sources.declared if each.name == function.name]
        files = dict.fromkeys(each.file for each in changes)
        words = []
        for before, now in pairwise(changes):
            old, new = ([each.removesuffix("=") for each in side.parameters.split()] for side in (before, now))
            more = [f"+{each}" for each in new if each not in old] + [f"-{each}" for each in old if each not in new]
            words.append(f"{now.since}: {' '.join(more) or 'defaults or order'}")
        yield function.name, ", ".join(files), "; ".join(words) or "none"


def _faults() -> Iterator[Sequence[str]]:
    having: dict[Fault, dict[str, None]] = {}
    for row in ENTRIES:
        for fault in row.faults:
            having.setdefault(fault, {})[row.name] = None
    for fault, names in having.items():
        yield fault.what, ", ".join(names), fault.releases(), ", ".join(fault.archs)


def _notes() -> Iterator[Sequence[str]]:
    yield from ((each.name, each.about) for each in releases() if each.about)


def _pins(sources: Sources) -> Iterator[Sequence[str]]:
    known = {key: each for each in releases() for key in (each.name, each.commit) if key}
    for pin in pins():
        described = sources.commits.get(pin.aiter, "")
        named = pin.aiter if pin.aiter.startswith("v") else f"{pin.aiter[:8]}{described and f' ({described})'}"
        yield pin.who, named, _READ[known[pin.aiter].read] if pin.aiter in known else "nothing", pin.evidence


if __name__ == "__main__":
    PAGE.write_text(page())

"""The sources of AITER, release by release: a script writes what they say into sources.json:

    AITER_SOURCE=../aiter python -m rocm_lab.ledger.sources     # then: python -m rocm_lab.ledger.page

AITER_SOURCE names a clone of ROCm/aiter with its tags. No signature in the file is typed.
"""

import inspect
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocm_attn.machine.aiter_releases import releases
from rocm_attn.providers.aiter.library import ENTRY_POINTS, AiterFunction
from rocm_lab.ledger.checkout import FunctionNode, SourceTree, clone_named, git

PLACE = Path(__file__).parent / "sources.json"
PINS = Path(__file__).parent / "pins.json"


@dataclass(frozen=True, slots=True)
class Declared:
    """How a release declares a function.

    name:       of the function
    since:      the release
    file:       that defines it; empty if the release has no such function where it is called
    parameters: their names in order, with "=" after those that have a default
    """

    name: str
    since: str
    file: str
    parameters: str

    def function(self) -> Any:
        """A function with these parameters that does nothing; each default is None."""
        signature = [
            inspect.Parameter(
                each.removesuffix("="),
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if each.endswith("=") else inspect.Parameter.empty,
            )
            for each in self.parameters.split()
        ]

        def function() -> None: ...

        function.__name__ = self.name
        function.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        return function


@dataclass(frozen=True, slots=True)
class Sources:
    """The contents of sources.json.

    dates:       release -> day of its commit
    declared:    each function's declarations, one for each release that changed it
    commits:     pinned commit -> the last tag before it, and the commits since; empty if the clone lacks it
    """

    dates: Mapping[str, str]
    declared: tuple[Declared, ...]
    commits: Mapping[str, str]

    def at(self, name: str, release: str) -> Declared:
        """The declaration of a function in a release."""
        known = list(self.dates)
        changes = [each for each in self.declared if each.name == name]
        return [each for each in changes if known.index(each.since) <= known.index(release)][-1]


def functions() -> tuple[AiterFunction, ...]:
    """The functions of AITER that are called, in the order of the table."""
    return tuple(dict.fromkeys(entry.function for entries in ENTRY_POINTS.values() for entry in entries))


def declared(function: AiterFunction, name: str, tree: SourceTree) -> Declared:
    """How a release declares a function. name: of the release"""
    for place in function.places:
        if file := tree.file_of(place, function.name):
            return Declared(function.name, name, file, _parameters(tree.functions(file)[function.name]))
    return Declared(function.name, name, "", "")


def _parameters(node: FunctionNode) -> str:
    given = node.args
    others = [*given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    if others:
        raise ValueError(f"{node.name} takes more than plain parameters: {', '.join(each.arg for each in others)}")
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    required = len(names) - len(given.defaults)
    return " ".join(f"{name}=" if index >= required else name for index, name in enumerate(names))


def read(root: Path) -> Sources:
    """The sources of every release that was read. Raises CalledProcessError if the clone lacks one."""
    trees = {each.name: SourceTree(root, each.commit or each.name) for each in releases() if each.was_read}
    changes = []
    for function in functions():
        before = None
        for name, tree in trees.items():
            found = declared(function, name, tree)
            if before is None or (found.file, found.parameters) != (before.file, before.parameters):
                changes.append(found)
            before = found
    described = {pin.aiter: _described(root, pin.aiter) for pin in pins() if not pin.aiter.startswith("v")}
    dates = {name: tree.date for name, tree in trees.items()}
    return Sources(dates, tuple(changes), described)


def _described(root: Path, commit: str) -> str:
    """The last tag before a commit, and the commits since; empty if the clone lacks the commit."""
    try:
        return git(root, "describe", "--tags", "--match=v[0-9]*", "--long", commit).strip()
    except subprocess.CalledProcessError:
        return ""


@dataclass(frozen=True, slots=True)
class Pin:
    """Who ships which AITER.

    who:      an engine or an image, with its release or the day
    aiter:    a tag, or a commit's hash
    evidence: a thread, or a public file
    """

    who: str
    aiter: str
    evidence: str


def pins() -> tuple[Pin, ...]:
    """Who ships which AITER, oldest first; pins.json is written by hand."""
    return tuple(Pin(**each) for each in json.loads(PINS.read_text()))


def recorded() -> Sources:
    """The contents of sources.json."""
    facts = json.loads(PLACE.read_text())
    return Sources(
        facts["dates"],
        tuple(Declared(**each) for each in facts["declared"]),
        facts["commits"],
    )


def main() -> None:
    """Writes sources.json."""
    PLACE.write_text(json.dumps(asdict(read(clone_named())), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""An engine's interfaces that our plug-in uses, read from the engine's files: none of its code runs.

    python -m rocm_attn.integrations.interfaces record vllm FOLDER     # FOLDER has the package vllm, and its dist-info
    python -m rocm_attn.integrations.interfaces compare vllm FOLDER    # exit status 1 if something that we use changed

`record` writes those of the newest tested release to NAME_interfaces.json; tests hold that it is that one. An interface
is a dotted path from the engine's package: through modules and classes, and on through the types that fields,
parameters and results are annotated with, as `vllm.config.VllmConfig.model_config.dtype`. Our own source says which are
used: it imports a name or writes it as a dotted string, and then uses the members whose names it contains.

It does not see names that are put together, and attributes that a class makes when it is asked for them, as those of
SGLang's server arguments.
"""

import argparse
import ast
import json
import re
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from rocm_attn.integrations.engine_tree import Tree, described, is_field

_HERE = Path(__file__).parent
_DATA = "_interfaces.json"
# Steps through annotations, after those that lead to an imported name: VllmConfig, its field, and that field's field.
_LINKS = 3

# An interface's path -> engine_tree.described, or "base class" for a class that ours derive from.
Interfaces = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Uses:
    """The names that our source has of an engine.

    paths: dotted paths that it imports, or has as strings
    bases: those among them that our classes derive from
    names: of attributes that it reads or defines, of its methods, and parts of strings
    """

    paths: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def used(engine: str, folder: Path = _HERE) -> Uses:
    """Reads our plug-in of an engine. folder: has the plug-ins' folders."""
    uses = Uses()
    dotted = re.compile(rf"{engine}(\.\w+)+")
    for file in sorted((folder / engine).glob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                uses.paths.update(alias.name for alias in node.names if dotted.fullmatch(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module and dotted.fullmatch(node.module):
                imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if dotted.fullmatch(node.value):
                    uses.paths.add(node.value)
                elif re.fullmatch(r"[\w.]+", node.value):
                    uses.names.update(node.value.split("."))
            elif isinstance(node, ast.Attribute):
                uses.names.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                uses.names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                uses.names.update(each.target.id for each in node.body if is_field(each))  # type: ignore[attr-defined]
                assigned = (target for each in node.body if isinstance(each, ast.Assign) for target in each.targets)
                uses.names.update(target.id for target in assigned if isinstance(target, ast.Name))
        uses.paths.update(imported.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                uses.bases.update(imported[b.id] for b in named if isinstance(b, ast.Name) and b.id in imported)
    return uses


def record(uses: Uses, tree: Tree) -> Interfaces:
    """Returns the interfaces of a tested release that our source uses. A class that is used twice is there once."""
    written: Interfaces = {}
    seen: set[int] = set()
    waiting = deque((path, found, 0) for path in sorted(uses.paths) if (found := tree.find(path)))
    names = sorted(uses.names)
    while waiting:
        path, found, links = waiting.popleft()
        is_base = path in uses.bases
        if not isinstance(found.node, ast.arg):
            written[path] = ["base class"] if is_base else described(found.node)
        of_type = tree.type_of(found)
        followed = id((of_type or found).node)
        if followed in seen or links > _LINKS:
            continue
        if isinstance((of_type or found).node, ast.ClassDef):
            seen.add(followed)
        also = sorted(tree.abstract(found)) if is_base else ()
        for name, member in tree.members(found, dict.fromkeys([*names, *also])):
            if not name.startswith("__") or (name == "__init__" and is_base):
                waiting.append((f"{path}.{name}", member, links + (not isinstance(found.node, ast.Module))))
    return dict(sorted(written.items()))


def compare(recorded: Interfaces, tree: Tree) -> list[str]:
    """Returns what changed of the recorded interfaces, a sentence each. An addition that need not be used is none."""
    changes: dict[str, str] = {}
    for path, was in recorded.items():
        if any(path.startswith(f"{each}.") for each in changes):
            continue
        found = tree.find(path)
        if found is None:
            changes[path] = f"{path} is gone"
        elif was == ["base class"]:
            if not isinstance(found.node, ast.ClassDef):
                changes[path] = f"{path} is no longer a class"
                continue
            for new in sorted(tree.abstract(found)):
                if f"{path}.{new}" not in recorded:
                    changes[f"{path}.{new}"] = f"{path}.{new} is new, and every backend must define it"
        else:
            now, is_ours = described(found.node), recorded.get(path.rpartition(".")[0]) == ["base class"]
            if not _fits(was, now, is_ours):
                changes[path] = f"{path} {_difference(was, now)}"
    return list(changes.values())


@cache
def changes_of(engine: str, folder: Path) -> tuple[str, ...]:
    """Returns what the engine in a folder has changed since the newest release that was tested, a sentence each.

    Reading takes a second. Files that cannot be read are a change too, because their release is not known.
    """
    try:
        return tuple(compare(recorded(engine), Tree(folder)))
    except (OSError, SyntaxError, ValueError, RecursionError) as failure:
        return (f"its files in {folder} cannot be read ({type(failure).__name__}: {failure})",)


def data(engine: str) -> Path:
    """The file of an engine's recorded interfaces."""
    return _HERE / f"{engine}{_DATA}"


def written(version: str, interfaces: Interfaces) -> str:
    """Returns the text of a record: a line for each interface, so that a diff of two releases shows what changed."""
    lines = (f"  {json.dumps(path)}: {json.dumps(each)}" for path, each in interfaces.items())
    return f'{{\n "release": {json.dumps(version)},\n "interfaces": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def recorded(engine: str) -> Interfaces:
    """Returns the interfaces of the newest tested release of an engine."""
    interfaces: Interfaces = json.loads(data(engine).read_text())["interfaces"]
    return interfaces


def release(engine: str) -> str:
    """Returns the release whose interfaces are recorded."""
    version: str = json.loads(data(engine).read_text())["release"]
    return version


def _fits(was: list[str], now: list[str], is_ours: bool) -> bool:
    """True if an interface serves as before. is_ours: our class has it too, and the engine calls or reads that."""
    if is_ours or was == now:
        return was == now
    if {was[0], now[0]} <= {"value", "field", "property"}:  # all are read alike
        return not was[0] == now[0] == "field"
    # Calls are right without parameters that were added at the end and have a value.
    return now[: len(was)] == was and all("=" in each or each[0] == "*" for each in now[len(was) :])


def _difference(was: list[str], now: list[str]) -> str:
    """The clause that ends a sentence about an interface."""
    if was[0] != now[0] or was[0] == "field":
        kinds = (" of type ".join(each) if each[0] == "field" else each[0] for each in (was, now))
        return "was a {} and is a {}".format(*kinds)
    lost, got = ([each for each in one if each not in other] for one, other in ((was, now), (now, was)))
    clauses = [f"{verb} {', '.join(names)}" for verb, names in (("lost", lost), ("got", got)) if names]
    return " and ".join(clauses) or "takes its parameters in another order"


def main(arguments: list[str] | None = None) -> int:
    """Records or compares: see the module."""
    engines = sorted(file.name.removesuffix(_DATA) for file in _HERE.glob(f"*{_DATA}"))
    parser = argparse.ArgumentParser(prog="python -m rocm_attn.integrations.interfaces")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("engine", choices=engines)
    parser.add_argument("folder", type=Path, help="the folder that has the engine's package")
    given = parser.parse_args(arguments)
    engine, folder = given.engine, given.folder
    if not (folder / engine / "__init__.py").is_file():
        parser.error(f"{folder} has no package {engine}; name the folder that it lies in")
    if given.command == "compare":
        changes = compare(recorded(engine), Tree(folder))
        print("\n".join(changes) or f"nothing that rocm_attn uses has changed since {release(engine)}")
        return int(bool(changes))
    versions = [each.version for each in metadata.distributions(name=engine, path=[str(folder)])]
    if len(versions) != 1:
        parser.error(f"{folder} has {len(versions)} dist-info of {engine}; one is needed, which names the release")
    uses = used(engine)
    interfaces = record(uses, Tree(folder))
    if missing := sorted(uses.paths - {*interfaces}):
        parser.error(f"{engine} {versions[0]} does not have {', '.join(missing)}")
    data(engine).write_text(written(versions[0].partition("+")[0], interfaces))
    return 0


if __name__ == "__main__":
    sys.exit(main())

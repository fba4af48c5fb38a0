"""Kernels in which one masked load, store or atomic has lost its mask, found by reading their source."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from tests.amd.house.source_tree import ROOT

KERNELS = ROOT / "kernels"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one kernel file.

    path:    of the file, inside kernels/
    what:    how the call was changed
    line:    where the call starts
    call:    the original call, on one line
    source:  the file with the call changed
    """

    path: str
    what: str
    line: int
    call: str
    source: str

    @property
    def name(self) -> str:
        """For reports; stays the same while other lines of the file change."""
        return f"{self.path}: {self.what} {self.call}"


def mutants() -> list[Mutant]:
    """Every masked access without its mask, or without half of it; every masked load of V with NaN for masked lanes."""
    found: list[Mutant] = []
    for path in sorted(KERNELS.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        values = _loads_of_v(tree)
        for call in _masked_accesses(tree):
            kind = ast.unparse(call.func).removeprefix("tl.")
            edits = {f"{kind} without mask": _without_mask(call)}
            for half, rest in _halves_of_mask(call):
                edits[f"{kind} without {half} in the mask of"] = _with_mask(call, rest)
            if call in values:
                edits["masked lanes are NaN in"] = _with_nan(call)
            found += [
                Mutant(
                    path.relative_to(KERNELS).as_posix(),
                    what,
                    call.lineno,
                    ast.unparse(call),
                    _replaced(source, call, ast.unparse(edited)),
                )
                for what, edited in edits.items()
            ]
    return found


def _masked_accesses(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("tl.load", "tl.store", "tl.atomic_")):
            assert len(node.args) <= 2, f"line {node.lineno}: a mask is passed by name"
            if any(keyword.arg == "mask" for keyword in node.keywords):
                yield node


def _loads_of_v(tree: ast.Module) -> list[ast.expr]:
    """Returns the values assigned to a variable named v: the rows that attention weights are multiplied with."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["v"]
    ]


def _without_mask(call: ast.Call) -> ast.Call:
    """`other` goes too: it means nothing without a mask."""
    edited = copy.deepcopy(call)
    edited.keywords = [keyword for keyword in edited.keywords if keyword.arg not in ("mask", "other")]
    return edited


def _halves_of_mask(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Each side of a mask `a & b`, as text, with the other side."""
    (mask,) = (keyword.value for keyword in call.keywords if keyword.arg == "mask")
    if not isinstance(mask, ast.BinOp) or not isinstance(mask.op, ast.BitAnd):
        return []
    return [(ast.unparse(mask.left), mask.right), (ast.unparse(mask.right), mask.left)]


def _with_mask(call: ast.Call, mask: ast.expr) -> ast.Call:
    edited = copy.deepcopy(call)
    for keyword in edited.keywords:
        if keyword.arg == "mask":
            keyword.value = mask
    return edited


def _with_nan(call: ast.Call) -> ast.Call:
    edited = copy.deepcopy(call)
    for keyword in edited.keywords:
        if keyword.arg == "other":
            keyword.value = ast.parse("float('nan')", mode="eval").body
    return edited


def _replaced(source: str, call: ast.Call, text: str) -> str:
    """The source with another text in the call's place."""
    segment = ast.get_source_segment(source, call)
    assert segment is not None
    lines = source.splitlines(keepends=True)
    assert lines[call.lineno - 1].isascii(), "columns are counted in bytes"
    at = sum(map(len, lines[: call.lineno - 1])) + call.col_offset
    assert source[at : at + len(segment)] == segment
    return source[:at] + text + source[at + len(segment) :]

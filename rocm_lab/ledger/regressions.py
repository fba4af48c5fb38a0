"""Changes of AITER's Triton sources that made results wrong before, found by comparing each release with the last one.

There are two rules, each for a fault that was reported in vllm#46856:

precision  A product that was taken with a named input precision is taken without it: `tl.dot(q, k,
           input_precision="ieee")` became `tl.dot(q, k)`, which may round its operands.
rows       A function allocates its result longer than it returns it, `torch.full((n, aligned))[:, :length]`, and did
           not before: rows of the result are further apart than they are long, and callers that take the length for
           the stride read other rows.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rocm_lab.ledger.checkout import FunctionNode, SourceTree

TRITON = "aiter/ops/triton/"
_ALLOCATES = {"empty", "full", "zeros", "ones"}


@dataclass(frozen=True, slots=True)
class Regression:
    """A change that may make a result wrong.

    rule:     "precision" or "rows"
    since:    the first release with it
    until:    the first release after it without it; empty if the newest one has it
    file:     that has it in `since`
    function: of that file
    """

    rule: str
    since: str
    until: str
    file: str
    function: str


@dataclass(frozen=True, slots=True)
class _Facts:
    """The parts of a function that the rules compare.

    precise: its products with a named precision; cut: see the rule rows
    """

    file: str
    precise: int
    products: int
    cut: bool

    def lost_precision(self, before: _Facts) -> bool:
        return self.precise < before.precise and self.precise < self.products

    def was_cut(self, before: _Facts) -> bool:
        return self.cut and not before.cut


def regressions(trees: Mapping[str, SourceTree]) -> list[Regression]:
    """The regressions in functions of Triton's attention. trees: each release's name -> its sources, oldest first"""
    names, all_facts = list(trees), [_facts(tree) for tree in trees.values()]
    attention = _attention(list(trees.values())[-1])
    found = []
    for index in range(1, len(names)):
        for key, now in sorted(all_facts[index].items()):
            before = all_facts[index - 1].get(key)
            if before is None or key[0] not in attention:
                continue
            later = [facts.get(key) for facts in all_facts[index + 1 :]]
            if now.lost_precision(before):
                undone = [each is None or each.precise >= before.precise for each in later]
                found.append(_regression("precision", names, index, undone, now, key[1]))
            if now.was_cut(before):
                undone = [each is None or not each.cut for each in later]
                found.append(_regression("rows", names, index, undone, now, key[1]))
    return found


def _regression(
    rule: str, names: Sequence[str], index: int, undone: Sequence[bool], now: _Facts, function: str
) -> Regression:
    until = names[index + 1 + undone.index(True)] if True in undone else ""
    return Regression(rule, names[index], until, now.file, function)


def _attention(newest: SourceTree) -> set[str]:
    """Names of files in folders called attention. Files have moved between folders, and kept their names."""
    paths = [PurePosixPath(path) for path in newest.files if path.startswith(TRITON)]
    return {path.name for path in paths if "attention" in path.parent.parts and path.name != "__init__.py"}


def _facts(tree: SourceTree) -> dict[tuple[str, str], _Facts]:
    """(Name of the file, name of the function) -> its facts."""
    found: dict[tuple[str, str], _Facts] = {}
    for path in tree.files:
        if path.startswith(TRITON) and not path.endswith("__init__.py"):
            for name, node in tree.functions(path).items():
                found[PurePosixPath(path).name, name] = _facts_of(path, node)
    return found


def _facts_of(path: str, function: FunctionNode) -> _Facts:
    products = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == "tl.dot"]
    precise = [call for call in products if any(each.arg == "input_precision" for each in call.keywords)]
    cut = any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Call)
        and _name(node.value.func).removeprefix("torch.") in _ALLOCATES
        for node in ast.walk(function)
    )
    return _Facts(path, len(precise), len(products), cut)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""

"""Limits on the length of a function and the number of its parameters, so that a reader can remember it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.amd.house.source_tree import ROOT, Source, sources
from tests.amd.house.test_style import Function, is_jitted
from tests.amd.integrations.signatures import recorded

MAX_LINES = 60
MAX_PARAMETERS = 8


def functions(tree: ast.AST) -> list[Function]:
    """Returns every function of a file, methods and inner ones included."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def num_lines(node: Function) -> int:
    """Returns the number of lines from def to the last line, docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(node: Function) -> int:
    """Returns the number of parameters that a caller gives; *args and **kwargs count as one each."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named += [several for several in (node.args.vararg, node.args.kwarg) if several is not None]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def launched_kernels(tree: ast.Module) -> set[str]:
    """Returns names of the jitted functions that host code of the file names, and so launches.

    Their parameters cross from the host to the device, so they need as many as that takes.
    """
    jitted = {node.name for node in functions(tree) if is_jitted(node)}
    return {node.id for node in _host_nodes(tree) if isinstance(node, ast.Name) and node.id in jitted}


def _host_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, Function) and is_jitted(child)):
            yield child
            yield from _host_nodes(child)


def signatures_of_others(source: Source) -> set[str]:
    """Returns names of a file's functions whose parameters are FlashInfer's (tests/amd/integrations)."""
    if not source.module.startswith("rocm_attn.integrations.flashinfer."):
        return set()
    return {name.rpartition(".")[2] for name in recorded()}


def too_large(source: Source) -> list[str]:
    """Returns the functions of a file that are longer, or have more parameters, than allowed, with their lines."""
    exempt, found = launched_kernels(source.tree) | signatures_of_others(source), []
    for node in functions(source.tree):
        place = f"{source.path.relative_to(ROOT)}:{node.lineno} {node.name}"
        if num_lines(node) > MAX_LINES and not is_jitted(node):
            found.append(f"{place} has {num_lines(node)} lines; split it at {MAX_LINES}")
        if num_parameters(node) > MAX_PARAMETERS and node.name not in exempt:
            found.append(f"{place} has {num_parameters(node)} parameters; bundle them into {MAX_PARAMETERS} or fewer")
    return found


def test_functions_are_short_and_take_few_parameters() -> None:
    found = [one for source in sources() for one in too_large(source)]
    assert not found, "\n".join(found)


def test_sizes_are_counted_as_they_are_said() -> None:
    nine = ", ".join(f"p{number}: int" for number in range(9))
    text = f"""
@triton.jit
def _kernel({nine}): pass

@triton.jit
def _device_function({nine}): pass

def takes_many(self, {nine}) -> None: pass

def takes_eight(self, {nine.rpartition(",")[0]}) -> None: pass

def long() -> None:
{"    pass" + chr(10) * 60}    pass

def launches() -> None:
    launch(_kernel)
"""
    source = Source(ROOT / "made_up.py", "made_up", False, ast.parse(text))
    assert [found.split()[1] for found in too_large(source)] == ["_device_function", "takes_many", "long"]

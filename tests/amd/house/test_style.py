"""Properties of every file: docstrings, and annotations that Triton reads."""

import ast
import sys
from functools import cache
from pathlib import Path

from tests.amd.house.source_tree import ROOT, python_files, sources

IN_KERNELS = ("None", "tl.const", "tl.constexpr", "gl.constexpr")  # annotations that Triton reads
Function = ast.FunctionDef | ast.AsyncFunctionDef


# Decorators of functions that Triton compiles, whose arguments are no Python values.
JITTED = ("triton.", "gluon.", "constexpr_function")


@cache
def trees_with_jitted_functions() -> dict[Path, ast.Module]:
    """Returns the syntax of the files of the package, the tests and the laboratory that may have jitted functions."""
    folders = [ROOT / name for name in ("rocm_attn", "kernels", "hip_graphs", "rocm_serve", "rocm_lab", "tests")]
    texts = {path: path.read_text() for folder in folders if folder.exists() for path in python_files(folder)}
    return {
        path: ast.parse(text, str(path))
        for path, text in texts.items()
        if any(f"@{decorator}" in text for decorator in JITTED)
    }


def is_jitted(node: Function) -> bool:
    """True if Triton compiles the function."""
    return any(ast.unparse(decorator).startswith(JITTED) for decorator in node.decorator_list)


def test_every_public_function_and_class_says_what_it_is() -> None:
    for source in sources():
        assert source.is_package or ast.get_docstring(source.tree), f"{source.module} has no docstring"
        silent = [
            f"{node.name} (line {node.lineno})"
            for node in source.tree.body
            if isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
        assert not silent, f"{source.module}: no docstring on {silent}"


def refused_annotations(tree: ast.Module) -> list[str]:
    """Returns annotations in jitted functions that Triton would look up as names that a kernel uses, and refuse."""
    refused = []
    for function in ast.walk(tree):
        if not isinstance(function, Function) or not is_jitted(function):
            continue
        is_python = any(ast.unparse(decorator) == "constexpr_function" for decorator in function.decorator_list)
        for node in ast.walk(function):
            annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
            text = ast.unparse(annotation) if annotation else "None"
            if text == "Any" if is_python else text not in IN_KERNELS:
                refused.append(f"{function.name}: {text}")
    return refused


def test_annotations_in_jitted_functions_are_those_that_triton_reads() -> None:
    """Triton looks up every name in a kernel's text, annotations included, and takes no function that is not jitted.

    `Any` of Python 3.10 can be called, so functions of constants cannot name it either; they may name classes.
    """
    refused = {
        str(path.relative_to(ROOT)): found
        for path, tree in trees_with_jitted_functions().items()
        if (found := refused_annotations(tree))
    }
    assert refused == {}


def stale_names(tree: ast.Module) -> list[str]:
    """Returns the names in lists such as do_not_specialize=[...] of jitted functions that are not their parameters."""
    return [
        f"{node.name} (line {node.lineno}): {name.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, Function) and is_jitted(node)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if isinstance(keyword.value, ast.List)
        for name in keyword.value.elts
        if isinstance(name, ast.Constant) and name.value not in {each.arg for each in node.args.args}
    ]


def test_what_is_not_specialised_is_a_parameter() -> None:
    """Triton ignores a name that it does not know, and then compiles another variant while requests wait."""
    stale = "@triton.jit(do_not_specialize=['old', 'n'])\ndef kernel(n):\n    pass"
    assert stale_names(ast.parse(stale)) == ["kernel (line 2): 'old'"]
    assert len(trees_with_jitted_functions()) > 50
    for path, tree in trees_with_jitted_functions().items():
        assert not stale_names(tree), path


PUT_OFF = "from __future__ import annotations\n"  # a comment after it says why else it is there


def is_bound_later(tree: ast.Module) -> bool:
    """True if an annotation of a file names what is bound at its end or below it, or for checkers of types alone."""
    last_line = dict[str, int]()  # of the statement that binds a name
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            last_line[node.name] = node.end_lineno or 0
        elif isinstance(node, ast.Assign):
            last_line |= {ast.unparse(target): node.lineno for target in node.targets}
        elif isinstance(node, ast.If):  # TYPE_CHECKING
            imports = (each for each in node.body if isinstance(each, ast.Import | ast.ImportFrom))
            last_line |= {alias.asname or alias.name: sys.maxsize for each in imports for alias in each.names}
    annotations = (getattr(node, field, None) for node in ast.walk(tree) for field in ("annotation", "returns"))
    named = (name for annotation in annotations if annotation is not None for name in ast.walk(annotation))
    return any(isinstance(name, ast.Name) and last_line.get(name.id, 0) >= name.lineno for name in named)


def test_annotations_are_put_off_only_for_names_that_are_bound_later() -> None:
    folders = ("rocm_attn", "kernels", "hip_graphs", "rocm_serve", "rocm_lab", "tests")
    texts = {path: path.read_text() for name in folders for path in python_files(ROOT / name)}
    assert [path for path, text in texts.items() if PUT_OFF in text and not is_bound_later(ast.parse(text))] == []
    assert not is_bound_later(ast.parse("class A: ...\ndef f() -> A: ..."))
    assert is_bound_later(ast.parse("def f() -> A: ...\nclass A: ..."))

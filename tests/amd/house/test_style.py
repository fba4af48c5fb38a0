"""Properties of every file: a size, docstrings, types."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.amd.house.source_tree import ROOT, python_files, sources

IN_KERNELS = ("None", "tl.const", "tl.constexpr", "gl.constexpr")  # annotations that Triton reads
Function = ast.FunctionDef | ast.AsyncFunctionDef


def every_python_file() -> list[Path]:
    """Returns the files of the package, the tests and the laboratory."""
    folders = [ROOT / name for name in ("rocm_attn", "kernels", "hip_graphs", "rocm_serve", "rocm_lab", "tests")]
    return [path for folder in folders if folder.exists() for path in python_files(folder)]


def is_jitted(node: Function) -> bool:
    """True if Triton compiles the function, so that its arguments are no Python values."""
    return any(
        ast.unparse(decorator).startswith(("triton.", "gluon.", "constexpr_function"))
        for decorator in node.decorator_list
    )


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


def test_every_function_but_the_jitted_ones_is_typed() -> None:
    """mypy checks it too, except in kernels/, where it must ignore jitted bodies."""
    for source in sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, Function) or is_jitted(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [argument.arg for argument in arguments if not argument.annotation]
            assert set(untyped) <= {"self", "cls"}, f"{source.module}:{node.lineno} {node.name}: {untyped}"
            assert node.returns, f"{source.module}:{node.lineno} {node.name} has no return type"


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
        for path in every_python_file()
        if (found := refused_annotations(ast.parse(path.read_text(), str(path))))
    }
    assert refused == {}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("@triton.jit\ndef f(x: Any): pass", ["f: Any"]),
        ("@triton.jit\ndef f(x: int, *, N: tl.constexpr): pass", ["f: int"]),
        ("@gluon.jit(do_not_specialize=['x'])\ndef f(x, G: gl.constexpr) -> int: pass", ["f: int"]),
        ("@triton.jit\ndef f(x):\n    y: Any = x\n    N: tl.constexpr = 4", ["f: Any"]),
        ("@constexpr_function\ndef f(n: int) -> Any: pass", ["f: Any"]),
        ("@constexpr_function\ndef f(n: int) -> tl.dtype: pass", []),
        ("@triton.jit\ndef f(x: tl.const, N: tl.constexpr) -> None: pass\ndef g(x: Any) -> Any: pass", []),
    ],
)
def test_annotations_that_triton_does_not_read_are_found(text: str, refused: list[str]) -> None:
    assert refused_annotations(ast.parse(text)) == refused


def test_what_kernels_are_compiled_for_has_no_strings() -> None:
    """Triton 3.6 passes no tuple with a string to a function. Fields of such tuples are written in capitals."""
    for source in sources():
        strings = [
            f"{node.name}.{field.target.id}"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases)
            for field in node.body
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.target.id.isupper()
            and ast.unparse(field.annotation) == "str"
        ]
        assert not strings, f"{source.module}: {', '.join(strings)}: use a number"

"""The reference: a page for each group of stable names, with the whole text of their docstrings.

Docstrings are written to be read in an editor: sentences, and lines of `name: description`. Here the sentences become
paragraphs, and the lines a table.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache

from tests.amd.house import interface

_FIELD = re.compile(r"(\*{0,2}\w[\w., *\[\]-]{0,60}):\s+(\S.*)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def pages() -> dict[str, tuple[str, str]]:
    """Returns for each group its file's name, its title, and the text of its page."""
    return {
        re.sub(r"\W+", "_", heading.lower()).strip("_"): (heading, _page(heading, names))
        for heading, names in interface.groups().items()
    }


def _page(heading: str, names: dict[str, str]) -> str:
    parts = [
        f"# {heading}",
        "Made from the docstrings. [Stable names](../names.md) has all groups on one "
        "page; [stability](../stability.md) says what may be counted on.",
    ]
    for name, module in names.items():
        node = interface.definition(name, module)
        parts += [f"## {name}", f"`{module.partition('.')[0]}.{name}`, written in `{module}`"]
        parts += ["```text\n" + "\n".join(interface.described(node)) + "\n```"]
        if not isinstance(node, _Function | ast.ClassDef):
            parts.append(markdown(interface.summary(name, module)))
            continue
        parts.append(markdown(ast.get_docstring(node) or ""))
        if isinstance(node, ast.ClassDef):
            for method in _methods(node):
                parts += [f"### {name}.{method.name}", markdown(ast.get_docstring(method) or "")]
    return "\n\n".join(parts) + "\n"


def _methods(node: ast.ClassDef) -> Iterator[_Function]:
    """Yields public methods and properties that have a docstring."""
    for member in node.body:
        if isinstance(member, _Function) and not member.name.startswith("_") and ast.get_docstring(member):
            yield member


def markdown(docstring: str) -> str:
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring)) if part.strip())


def _paragraph(text: str) -> str:
    """Returns runs of sentences, and tables of lines like `name: text`. A text that is indented as a whole is code."""
    if all(line.startswith("    ") for line in text.splitlines()):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    parts: list[list[str]] = []
    tables: list[bool] = []
    for line in text.splitlines():
        field = _FIELD.fullmatch(line)
        starts_table = bool(field) and field is not None and _is_name(field[1])
        if starts_table or not tables or (tables[-1] and not line.startswith(" ")):
            if not parts or tables[-1] != starts_table or not starts_table:
                parts.append([])
                tables.append(starts_table)
            parts[-1].append(line)
        elif tables[-1]:
            parts[-1][-1] += " " + line.strip()
        else:
            parts[-1].append(line.strip())
    return "\n\n".join(
        _table(lines) if table else _escaped(" ".join(lines)) for lines, table in zip(parts, tables, strict=True)
    )


def _is_name(text: str) -> bool:
    """True if it names fields, and does not begin a sentence such as `Raises BadBatch:`."""
    return all(re.fullmatch(r"[\w.*\[\]-]+", word) for word in text.split(", "))


def _table(lines: list[str]) -> str:
    rows = ["| | |", "|---|---|"]
    for line in lines:
        field = _FIELD.fullmatch(line)
        assert field is not None
        rows.append(f"| `{field[1]}` | {_escaped(field[2])} |")
    return "\n".join(rows)


def _escaped(text: str) -> str:
    """Returns text in which Markdown treats only `code` specially."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick that nothing closes
        parts = [text.replace("`", "\\`")]
    return "`".join(
        part if index % 2 else re.sub(r"([\\*_<>|\[\]#])", r"\\\1", part) for index, part in enumerate(parts)
    )

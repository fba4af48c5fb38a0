"""The page of stable names: each name with everything that a caller may use, read from the sources.

python -m tests.amd.house.interface writes it.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from rocm_lab.page_parts import with_part
from tests.amd.house.source_tree import ROOT

PAGE = ROOT / "docs" / "names.md"
# The files of names, and the module of `ra` that each is: none at the top.
STUBS = {
    ROOT / "rocm_attn" / "__init__.pyi": "",
    **{path: path.stem for path in sorted((ROOT / "rocm_attn" / "stable").glob("[!_]*.py"))},
    ROOT / "rocm_attn" / "errors.py": "errors",
    ROOT / "rocm_serve" / "__init__.pyi": "",
}


def groups() -> dict[str, dict[str, str]]:
    """Returns the headings of the files of names; under each, the names as after `ra.`, and where they are defined."""
    found: dict[str, dict[str, str]] = {}
    for stub, tier in STUBS.items():
        if tier == "errors":
            top = {name for names in found.values() for name in names}
            errors = [node.name for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ClassDef)]
            found["Errors: `ra.errors`"] = {
                f"errors.{name}": "rocm_attn.errors" for name in errors if name[0] != "_" and name not in top
            }
            continue
        for line in stub.read_text().partition("# isort: off\n")[2].splitlines():
            if line.startswith("# "):
                heading = f"{line[2:]}: `ra.{tier}`" if tier else line[2:]
                found[heading] = {}
            elif line.startswith("from ") and not line.startswith(("from rocm_attn import", "from rocm_attn.stable ")):
                _, module, _, name, *_ = line.split()
                found[heading][f"{tier}.{name}" if tier else name] = module
    return {heading: names for heading, names in found.items() if names}


def page() -> str:
    """Returns the text of docs/names.md."""
    parts = []
    for heading, names in groups().items():
        parts.append(f"## {heading}\n\n| name | what it is |\n|---|---|\n")
        parts += [f"| `{name}` | {summary(name, module)} |\n" for name, module in names.items()]
        parts.append("\n```text\n")
        parts += [f"{line}\n" for name, module in names.items() for line in described(definition(name, module))]
        parts.append("```\n\n")
    return with_part(PAGE.read_text(), "names", "".join(parts).rstrip("\n") + "\n")


def definition(name: str, module: str) -> ast.stmt:
    """Returns the statement at the top of a module that gives a name its value."""
    name = name.rpartition(".")[2]
    for node in _syntax_tree(module).body:
        match node:
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                return node
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return node
    raise AssertionError(f"{module} has no {name} of its own; name the module that it is written in")


@cache
def _syntax_tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def summary(name: str, module: str) -> str:
    """Returns the first paragraph of a name's docstring, or of its class's if it is an instance; else its value."""
    node = definition(name, module)
    match node:
        case ast.Assign(value=ast.Call(func=ast.Name(id=its_class), args=[], keywords=[])):
            node = definition(its_class, module)
        case ast.AnnAssign(value=ast.Attribute(value=ast.Name(id=its_class))):  # a member of an enumeration
            node = definition(its_class, module)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.Call() as value):
            return f"the value `{ast.unparse(value)}`"
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    text = ast.get_docstring(node)
    assert text, f"{name} has no docstring"
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def described(node: ast.stmt) -> list[str]:
    """Returns a name's declaration: a function's parameters; a class's fields and public methods, in their order."""
    match node:
        case ast.FunctionDef():
            return [_called(node)]
        case ast.ClassDef():
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            head = f"class {node.name}({bases})" if bases else f"class {node.name}"
            return [head, *_members(node), *_attributes(node)]
    return [ast.unparse(node)]


def _members(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        match member:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                name == "__init__" or not name.startswith("_")
            ):
                decorators = [ast.unparse(each) for each in member.decorator_list]
                if {"property", "cached_property"} & {*decorators}:
                    assert member.returns is not None
                    yield f"    {name}: {ast.unparse(member.returns)}"
                else:
                    yield f"    {_called(member)}"
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                yield f"    {name}: {ast.unparse(member.annotation)}{_default(member.value)}"
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                yield f"    {ast.unparse(member)}"


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yields a line with the attributes that __init__ sets and the class's docstring describes, in its order."""
    declared = {ast.unparse(member.target) for member in node.body if isinstance(member, ast.AnnAssign)}
    makers = [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"]
    stored = {
        ast.unparse(each)
        for maker in makers
        for each in ast.walk(maker)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    described = re.findall(r"^(?:[a-z]\w*, )*[a-z]\w*(?=:)", ast.get_docstring(node) or "", re.MULTILINE)
    names = [name for line in described for name in line.split(", ")]
    if made := [name for name in names if f"self.{name}" in stored and name not in declared]:
        yield f"    attributes of an object: {', '.join(made)}"


def _default(value: ast.expr | None) -> str:
    """Returns a field's default, but not an option's help or a metric's initial value."""
    match value:
        case None:
            return ""
        case ast.Call(func=ast.Name(id="option" | "bounded"), args=[default, *_]):
            return f" = {ast.unparse(default)}"
        case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default_factory", value=factory)]):
            return (
                f" = {ast.unparse(factory.body)}" if isinstance(factory, ast.Lambda) else f" = {ast.unparse(factory)}()"
            )
        case ast.Call(func=ast.Name(id=maker)) if maker.startswith("_"):
            return ""
    return f" = {ast.unparse(value)}"


def _called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args)
    for own in ("self", "cls"):
        arguments = arguments.removeprefix(own).removeprefix(", ") if arguments.startswith(own) else arguments
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}({arguments}){returns}"


if __name__ == "__main__":
    PAGE.write_text(page())

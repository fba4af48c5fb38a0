"""An engine's files as definitions that are found by dotted paths: none of its code runs."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_BOUND = ("staticmethod", "classmethod")
_PROPERTY = {"property", "cached_property", "setter", "getter", "deleter"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign | ast.Assign | ast.arg


@dataclass(frozen=True, slots=True)
class Found:
    """A definition in an engine's files, and the module in whose names its annotations are written."""

    module: str
    node: Node


class Tree:
    """An engine's files. folder: the one that has its package."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Found | None] = {}
        # Kept as long as the tree: the syntax of an engine's files takes tens of MB.
        self._definitions, self._set_on_self, self._imports = cache(_definitions), cache(_set_on_self), cache(_imports)

    def find(self, path: str) -> Found | None:
        """Returns the definition at a path; None if there is none."""
        first, *others = path.split(".")
        found = self._module(first)
        for name in others:
            found = found and self.member(found, name)
        return found

    def member(self, found: Found, name: str) -> Found | None:
        """Returns the member of this name of a module, of a class, or of the type of a field, parameter or result."""
        node = found.node
        if isinstance(node, ast.Module):
            return self._module(f"{found.module}.{name}") or self._global(found, name)
        if isinstance(node, ast.ClassDef):
            own = self._definitions(node).get(name) or self._set_on_self(node).get(name)
            inherited = (self.member(base, name) for base in self._types(found.module, node.bases))
            return Found(found.module, own) if own else next(filter(None, inherited), None)
        if isinstance(node, Function):
            for each in _arguments(node):
                if each.arg == name:
                    return Found(found.module, each)
        of_type = self.type_of(found)
        return of_type and self.member(of_type, name)

    def members(self, found: Found, names: Iterable[str]) -> Iterator[tuple[str, Found]]:
        """Yields those of some members that a module defines itself, that a class has, or that a type has."""
        node = found.node
        if isinstance(node, Function):
            for each in _arguments(node):
                yield each.arg, Found(found.module, each)
        if isinstance(node, ast.Module):
            names = [name for name in names if name in self._definitions(node)]
        for name in names:
            if member := self.member(found, name):
                yield name, member

    def abstract(self, found: Found) -> set[str]:
        """The names of a class's abstract methods, without those that it defines itself."""
        assert isinstance(found.node, ast.ClassDef)
        own = self._definitions(found.node)
        names = {name for base in self._types(found.module, found.node.bases) for name in self.abstract(base)}
        return (names - {*own}) | {name for name, each in own.items() if "abstractmethod" in _decorators(each)}

    def _module(self, module: str) -> Found | None:
        if module not in self._modules:
            path = self._folder.joinpath(*module.split("."))
            files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
            file = next(filter(Path.is_file, files), None)
            node = ast.parse(file.read_text("utf-8")) if file else ast.parse("") if path.is_dir() else None
            self._modules[module] = Found(module, node) if node else None
        return self._modules[module]

    def _global(self, found: Found, name: str) -> Found | None:
        """Returns what a name means in a module, in whichever file it is defined."""
        assert isinstance(found.node, ast.Module)
        if own := self._definitions(found.node).get(name):
            return Found(found.module, own)
        source = self._imports(found.node).get(name)
        if source is None:
            return None
        level, module, original = source
        parts = found.module.split(".")
        if level:  # relative to the module's package, which a folder is itself
            level -= self._folder.joinpath(*parts).is_dir()
            module = ".".join([*parts[: len(parts) - level], *filter(None, [module])])
        path = f"{module}.{original}"
        return None if path == f"{found.module}.{name}" else self.find(path)

    def type_of(self, found: Found) -> Found | None:
        """Returns the engine's class that a field, a parameter or a result is annotated with."""
        node = found.node
        annotation = node.returns if isinstance(node, Function) else getattr(node, "annotation", None)
        return next(self._types(found.module, [annotation] if annotation else []), None)

    def _types(self, module: str, written: Iterable[ast.expr]) -> Iterator[Found]:
        """Yields the engine's classes that expressions name, in a module's names."""
        scope = self._module(module)
        assert scope is not None
        for expression in written:
            if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
                expression = ast.parse(expression.value, mode="eval").body
            for node in ast.walk(expression):
                if isinstance(node, ast.Name):
                    found = self._global(scope, node.id)
                    if found and isinstance(found.node, ast.ClassDef):
                        yield found


def described(node: Node) -> list[str]:
    """Returns what callers and overriding classes rely on.

    That is "module", "class", "value", "property", "field" and its annotation, or the kind of a function and its
    parameters: "name", "name=default", "*args", "*" before keyword-only ones, and "**named".
    """
    if isinstance(node, Function):
        decorators = _decorators(node)
        if not _PROPERTY.isdisjoint(decorators):
            return ["property"]
        return [next((name for name in _BOUND if name in decorators), "function"), *_parameters(node.args)]
    if isinstance(node, ast.AnnAssign):
        return ["field", ast.unparse(node.annotation)]
    return ["module" if isinstance(node, ast.Module) else "class" if isinstance(node, ast.ClassDef) else "value"]


def _parameters(of: ast.arguments) -> list[str]:
    plain = [*of.posonlyargs, *of.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(of.defaults)), *of.defaults]
    pairs = [*zip(plain, defaults, strict=True)]
    last = [*zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    texts = [[f"{a.arg}={ast.unparse(d)}" if d else a.arg for a, d in each] for each in (pairs, last)]
    star = [f"*{of.vararg.arg if of.vararg else ''}"] if of.vararg or last else []
    return [*texts[0], *star, *texts[1], *([f"**{of.kwarg.arg}"] if of.kwarg else [])]


def _arguments(node: Function) -> list[ast.arg]:
    of = node.args
    return [*of.posonlyargs, *of.args, *of.kwonlyargs]


def _decorators(node: Node) -> list[str]:
    return [ast.unparse(each).rpartition(".")[2] for each in getattr(node, "decorator_list", ())]


def is_field(node: ast.stmt) -> bool:
    """True for an annotated variable of a class or a module."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _blocks(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a body, and those within its conditions and attempts."""
    for name in ("body", "handlers", "orelse", "finalbody"):
        for each in getattr(node, name, ()):
            if isinstance(each, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                yield from _blocks(each)
            else:
                yield each


def _definitions(node: ast.Module | ast.ClassDef) -> dict[str, Node]:
    """The functions, classes and variables that a module or a class defines. The last definition of a name counts."""
    found: dict[str, Node] = {}
    for each in _blocks(node):
        if isinstance(each, (ast.ClassDef, Function)):
            found[each.name] = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, each)
    return found


def _set_on_self(node: ast.ClassDef) -> dict[str, Node]:
    """The attributes that a class's methods set."""
    found: dict[str, Node] = {}
    for each in ast.walk(node):
        if isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.setdefault(part.attr, each)
    return found


def _imports(node: ast.Module) -> dict[str, tuple[int, str, str]]:
    """The names that a module imports from others: the level of a relative import, the module, and the name there."""
    return {
        alias.asname or alias.name: (each.level, each.module or "", alias.name)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }

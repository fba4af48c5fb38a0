"""Arguments of function calls, as JSON: from JSON itself, from parameters that are texts, and from Python."""

import ast
import json
import keyword
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rocm_serve.server.finite_json import FINITE_JSON

# (name of a function, its arguments)
Made = list[tuple[str, str]]
_BLANKS = re.compile(r"[ \t\n\r]*")
# Templates that print a value with Jinja's own filter write it as Python does.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
# Texts in Python's notation, and its words where a parameter has such a name: from, in, class. The name gets an end.
# An escape outside of texts begins none: a search for the end of each of many such texts would take too long.
_TEXT = r"\\.|(\"{3}|'{3}|[\"'])(?:\\.|(?!\1)[^\\])*\1"
_WORDS = re.compile(rf"{_TEXT}|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)
_NO_WORD = "_of_rocm_attn"
# A reference may lead to another one, and to itself.
_MOST_REFERENCES = 8
_NO_PYTHON = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def from_object(text: str, hole: str, key: str) -> str | Made | None:
    """Returns what a hole of written_forms.py holds: for "json" its text, else calls; None if it is none of these.

    Arguments stay as they are written: Python would write other numbers.
    """
    try:
        if hole == "json":
            FINITE_JSON.decode(text)
            return text
        return [_call(each, key) for each in (_elements(text) if hole == "calls" else [text])]
    except (ValueError, RecursionError):
        return None


def from_parameters(parameters: Iterable[tuple[str, str, str]], schema: Mapping[str, Any]) -> str:
    """Returns an object of parameters: each with its key, its text, and "true" if it is a text, "false" if it is JSON.

    schema: of the object; it decides where the form does not tell a text from JSON
    """
    known = properties_of(schema)
    return _object({key: _value(text, kind, types_of(known.get(key), schema)) for key, text, kind in parameters})


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schemas of an object's members by their keys."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _object(members: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items()) + "}"


def _value(text: str, kind: str, types: set[object]) -> str:
    may_be_json = kind == "false" or (kind != "true" and types != {"string"})
    for written in _readings(text.strip(), types) if may_be_json else ():
        try:
            found = _TYPES.get(type(FINITE_JSON.decode(written)), "")
        except (ValueError, RecursionError):
            continue
        # Where a text is allowed too, only a value of another allowed type is no text.
        is_json = kind == "false" and (found == "string" or types != {"string"})
        if is_json or "string" not in types or found in types - {"string"}:
            return written
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str, types: set[object]) -> Iterator[str]:
    """Yields a value as JSON: as it is written, and as Python writes it. types: that it may have"""
    yield _CONSTANTS.get(text, text)
    if "boolean" in types and text.lower() in ("true", "false"):
        yield text.lower()
    if text.startswith(("[", "{")) and types & {"array", "object"}:
        with suppress(*_NO_PYTHON):
            yield _as_json(_parsed(text))


def types_of(schema: object, root: Mapping[str, Any]) -> set[object]:
    """Returns the types that a schema or each of its alternatives names at its top; none if one of them names none."""
    of_each = [_types_at_top(each) for each in alternatives_of(schema, root)]
    return set[object]().union(*of_each) if all(of_each) else set()


def alternatives_of(schema: object, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the schemas of which a value fits one: those of anyOf or oneOf, or else the schema itself.

    root: of the schema, in which references are followed
    """
    own = _referred(schema, root)
    found = own.get("anyOf", own.get("oneOf"))
    is_list = "type" not in own and isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    return [_referred(each, root) for each in found] if is_list and found else [own]


def _referred(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a schema refers to, as those of pydantic's enums and models do; else the schema."""
    for _ in range(_MOST_REFERENCES):
        own = schema if isinstance(schema, Mapping) else {}
        reference = own.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return own
        schema = root
        for name in reference.split("/")[1:]:
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return {}


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the only values that a schema allows; none if it names none."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else []


def _types_at_top(schema: Mapping[str, Any]) -> set[object]:
    named = schema.get("type")
    if isinstance(named, str | list):
        types: set[object] = {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
        return types | {"integer"} if "number" in types else types
    return {_TYPES.get(type(each)) for each in values_of(schema)}


def _call(text: str, key: str) -> tuple[str, str]:
    """Returns the name and the arguments of an object. Raises ValueError, RecursionError.

    Models take the key of other models. A member that may hold the arguments under a third key makes it no call.
    """
    members = _members(text)
    name, _ = members.get("name", (None, ""))
    none: tuple[object, str] = ("" if members.keys() <= {"name", "id", "type"} else 0, "")
    arguments, written = next((members[each] for each in (key, "arguments", "parameters") if each in members), none)
    if arguments is None or isinstance(arguments, str):
        written = _sendable(arguments or "{}")  # JSON within JSON, as clients get it; or nothing
        arguments = FINITE_JSON.decode(written)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("it is no call")
    return name, written


def _elements(text: str) -> list[str]:
    """Returns the text of each element of a JSON list. Raises ValueError, RecursionError."""
    FINITE_JSON.decode(text)
    elements, place = [], _after_blanks(text, 1)
    while text[place] != "]":
        _, end = FINITE_JSON.raw_decode(text, place)
        elements.append(text[place:end])
        place = _after_blanks(text, end)
        if text[place] == ",":
            place = _after_blanks(text, place + 1)
    return elements


def _members(text: str) -> dict[str, tuple[object, str]]:
    """Returns each value of a JSON object with its text. Raises ValueError, RecursionError."""
    if not isinstance(FINITE_JSON.decode(text), dict):  # the text is valid JSON from here on
        raise ValueError("it is no object")
    members: dict[str, tuple[object, str]] = {}
    place = _after_blanks(text, 1)
    while text[place] != "}":
        if text[place] == ",":
            place = _after_blanks(text, place + 1)
        key, place = FINITE_JSON.raw_decode(text, place)
        begin = _after_blanks(text, _after_blanks(text, place) + 1)
        value, end = FINITE_JSON.raw_decode(text, begin)
        members[key] = value, text[begin:end]
        place = _after_blanks(text, end)
    return members


def _after_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


def from_python(text: str) -> Made | None:
    """Returns the calls of a list in Python's notation, such as [f(a=1), g()]; None if it is no such list.

    They are read and never run: only literals are values.
    """
    try:
        words = _WORDS.sub(lambda found: found[0] + _NO_WORD if found[2] else found[0], text.strip())
        listed = _parsed(words)
        return [_python_call(each) for each in listed.elts] if isinstance(listed, ast.List) else None
    except _NO_PYTHON:
        return None


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's text, and for no log
        return ast.parse(text, mode="eval").body


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise ValueError("it is no call with keywords")
    if any(each.arg is None for each in node.keywords):
        raise ValueError("it unpacks a dict")
    return node.func.id, _object({str(each.arg).removesuffix(_NO_WORD): _as_json(each.value) for each in node.keywords})


def _as_json(node: ast.expr) -> str:
    value = ast.literal_eval(_JsonConstants().visit(node))
    return _sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _sendable(text: str) -> str:
    """Returns JSON in which half of a character is an escape."""
    return text.encode(errors="backslashreplace").decode()


class _JsonConstants(ast.NodeTransformer):
    """Makes Python's constants of true, false and null."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(json.loads(node.id)) if node.id in _CONSTANTS.values() else node

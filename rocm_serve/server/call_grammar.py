"""Grammars that hold an answer to a model's form of calls, and let its reasoning come first."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocm_attn.errors import BadRequest
from rocm_serve.server.call_arguments import alternatives_of, types_of, values_of
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.written_forms import MARK, CallForm, ReasoningForm, filled

Json = dict[str, Any]
# Returns the id of the token that is a mark; None if a tokenizer has none.
Mark = Callable[[str], int | None]


def calls_only(form: CallForm, tools: Sequence[Json], token_of: Mark, *, several: bool) -> Constraint:
    """Returns a constraint that allows only calls of these functions, at least one, with arguments that fit schemas.

    several: whether more than one call is allowed
    Raises BadRequest.
    """
    if "{python}" in form.call:
        raise BadRequest(f"calls of the form {form.names[0]} cannot be required; set tool_choice to auto")
    lark = _Lark(token_of)
    call = lark.rule(" | ".join(lark.rule(_call(form, tool["function"], lark)) for tool in tools))
    # A mark after which nothing can follow is a token that ends the text, and no part of it.
    opens, closes = lark.exact(form.opens[0]), "" if form.is_only else lark.exact(form.closes)
    if form.is_list:
        start = f"{opens} {call}" + (f' ("\\n"? {call})*' if several else "") + closes
    else:
        section = lark.rule(f"{opens} {call} {closes}")
        start = section + (f' ("\\n"? {section})*' if several and not form.is_only else "")
    return Constraint.grammar("\n".join([f"start: {start}", *lark.rules]))


def lead_of(form: ReasoningForm, token_of: Mark, *, is_inside: bool, is_text: bool) -> str:
    """Returns Constraint.lead for a model that reasons first.

    is_inside: whether the prompt ends inside of reasoning; otherwise the model may leave it out
    is_text:   whether a text follows, and not a call
    """
    lark = _Lark(token_of)
    thought = f"{lark.until(form.closes)} {lark.exact(form.resumes)} /\\s{{0,4}}/"
    lead = thought if is_inside else f"({lark.exact(form.opens)} {thought})?"
    return "\n".join([f"lead: {lead} {lark.exact(form.answers) if is_text else ''}", *lark.rules])


class _Lark:
    """Writes a grammar in llguidance's kind of Lark's notation."""

    def __init__(self, token_of: Mark) -> None:
        self._token_of, self.rules = token_of, list[str]()

    def rule(self, content: str, option: str = "") -> str:
        """Adds a rule, and returns its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{option}: {content}")
        return name

    def exact(self, text: str) -> str:
        """Returns a text. A mark that is one token is that token: no other tokens write it."""
        found = []
        for part in re.split(f"({MARK.pattern})", text):
            token = self._token_of(part)
            found.append(_quoted(part) if token is None else f"<[{token}]>")
        return f" {' '.join(filter(None, found))} "

    def until(self, mark: str) -> str:
        """Returns any text that ends with a mark, which is nowhere else in it."""
        token = self._token_of(mark)
        if token is None:
            return self.rule("/(?s:.*)/", f"[suffix={_quoted(mark)}]")
        return f"/(?s:.*)/ <[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _call(form: CallForm, function: Json, lark: _Lark) -> str:
    schema = {"type": "object", **function["parameters"]}
    if not schema.keys() - {"type", "properties"} and not schema.get("properties"):
        schema["additionalProperties"] = False  # a function without parameters

    def arguments(_: str = "") -> str:
        # Each schema is a separate grammar, because its references start at its own root.
        return f" {lark.rule(f'%json {json.dumps(schema)}')} "

    def call(key: str) -> str:
        return lark.exact(f'{{"name": "{function["name"]}", "{key}": ') + arguments() + lark.exact("}")

    def parameters(_: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise BadRequest(
                f"the constraint cannot be used: of the parameters of {function['name']}, properties must be an object "
                "and required a list"
            )
        rules = {
            key: lark.rule(_parameter(form, key, schema, described, lark)) for key, described in properties.items()
        }
        return " ".join(rule if key in required else f"{rule}?" for key, rule in rules.items())

    return filled(
        form.call,
        lark.exact,
        {
            "name": lambda _: lark.exact(function["name"]),
            "json": arguments,
            "maybe": lark.exact,
            "any": lambda word: word if word.startswith("/") else lark.exact(word),
            "call": call,
            "calls": lambda key: lark.exact("[") + call(key) + lark.exact("]"),
            "parameters": parameters,
        },
    )


def _parameter(form: CallForm, key: str, schema: Json, described: object, lark: _Lark) -> str:
    # A part of a schema keeps the definitions that it may refer to.
    named: Json = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    alone: Json = {**named, **(described if isinstance(described, Mapping) else {})}
    before, after = form.parameter.split("{value}")
    types = types_of(described, schema)
    # Where the form does not tell a text from JSON, from_parameters() does, and reads quotes as part of a text.
    is_text = "string" in types and (types == {"string"} or "{kind}" not in form.parameter)
    if is_text:
        texts = (_as_text({**named, **each}, after, lark) for each in alternatives_of(described, schema))
        value = f"({' | '.join(texts)})"
    else:
        value = lark.rule(f"%json {json.dumps(alone)}") + lark.exact(after)
    kind = "true" if is_text else "false"
    return filled(before, lark.exact, {"key": lambda _: lark.exact(key), "kind": lambda _: lark.exact(kind)}) + value


def _as_text(schema: Mapping[str, Any], after: str, lark: _Lark) -> str:
    """Returns a value whose texts stand without quotes, with what comes after it."""
    mark, values = after.split()[0], values_of(schema)
    if values:
        written = (each if isinstance(each, str) else json.dumps(each) for each in values)
        return "(" + " | ".join(map(lark.exact, written)) + ")" + lark.exact(after)
    if "string" in types_of(schema, schema):
        return lark.until(mark) + lark.exact(after.partition(mark)[2])
    return lark.rule(f"%json {json.dumps(schema)}") + lark.exact(after)

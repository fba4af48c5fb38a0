"""The forms in which models write function calls: finding a model's form, and a grammar that allows only calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rocm_attn.errors import BadModel, BadRequest
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.schema_ends import require_ends
from rocm_serve.text.tokenizer import CALL_MARKS

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is a JSON object with "name" and arguments, between two marks.

    opens, closes: before and after the object. Without `opens` an answer is calls from its first character on, or text
    arguments:     the key of the arguments
    takes_several: whether one answer may have several calls
    mark:          a mark that models sometimes put before the object, although their templates do not; "" for none
    """

    opens: str
    closes: str
    arguments: str
    takes_several: bool
    mark: str = ""

    def written(self, name: str, arguments: str) -> str:
        """Returns a call as the model writes it. arguments: as JSON"""
        return f'{self.opens}{{"name": "{name}", "{self.arguments}": {arguments}}}{self.closes}'


# The call that a template writes shows the model's form. The first form that fits is used.
FORMS = (
    # Hermes, Qwen 2.5, Qwen 3
    CallForm(f"{CALL_MARKS[0]}\n", f"\n{CALL_MARKS[1]}", "arguments", takes_several=True),
    CallForm("", "", "parameters", takes_several=False, mark="<|python_tag|>"),  # Llama 3.1 to 3.3
)

# A conversation that no client sends.
_NAME, _KEY = "f_of_rocm_attn", "x_of_rocm_attn"
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "?",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "?"}},
            "required": [_KEY],
        },
    },
}
_QUESTION: Json = {"role": "user", "content": "?"}
_CALL: Json = {"id": "call_000000000", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: "1"}}}


@lru_cache(maxsize=8)
def require_tools(template: ChatTemplate) -> None:
    """Raises BadRequest for a template that does not write tools into the prompt."""
    try:
        writes_them = _NAME in template.render([_QUESTION], [_TOOL])
    except (BadModel, BadRequest) as error:
        raise BadRequest(f"the model's chat template accepts no tools ({error}); leave them out") from error
    if not writes_them:
        raise BadRequest(
            "the model's chat template ignores tools; leave them out, or serve a model that was trained to call "
            "functions"
        )


@lru_cache(maxsize=8)
def form_of(template: ChatTemplate) -> CallForm:
    """Returns the form in which a model's template writes an earlier call. Raises BadRequest."""
    require_tools(template)
    try:
        text = template.render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], [_TOOL])
    except (BadModel, BadRequest) as error:
        raise BadRequest(
            f"the model's chat template cannot write a function call ({error}); leave tools out"
        ) from error
    for form in FORMS:
        parts = re.split(r"(\s+|[{}:])", form.written(_NAME, f'{{"{_KEY}": "1"}}'))
        pattern = "".join(r"\s*" if part.isspace() else re.escape(part) + r"\s*" for part in parts if part)
        if re.search(pattern, text):
            return form
    raise BadRequest(
        "the model's chat template writes calls in a format that this server does not read (it reads "
        '<tool_call>{"name": ..., "arguments": ...}</tool_call> and {"name": ..., "parameters": ...}); '
        "leave tools out, or set tool_choice to none"
    )


def calls_only(form: CallForm, tools: Sequence[Json], *, several: bool) -> Constraint:
    """Returns a constraint that allows only calls of these functions, at least one, with arguments that fit schemas.

    several: whether more than one call is allowed
    Raises BadRequest.
    """
    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = {"type": "object", **function["parameters"]}
        if not schema.keys() - {"type", "properties"} and not schema.get("properties"):
            schema["additionalProperties"] = False  # a function without parameters
        require_ends(schema)
        before, after = form.written(function["name"], "\0").split("\0")
        # Each schema is a separate grammar, because its references start at its own root.
        rules.append(f"call_{number}: {json.dumps(before)} arguments_{number} {json.dumps(after)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = ' ("\\n" call)*' if several and form.takes_several else ""
    return Constraint.grammar("\n".join([f"start: call{more}", f"call: {names}", *rules]))

"""Finding the forms in which a model writes calls and reasoning, by its chat template."""

import hashlib
import itertools
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rocm_attn.errors import BadModel, BadRequest
from rocm_serve.text.chat_template import CallArguments, ChatTemplate
from rocm_serve.text.written_forms import CALL_FORMS, MOST_SHORT, REASONING_FORMS, CallForm, ReasoningForm, filled

Json = dict[str, Any]

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
_CALL: Json = {"type": "function", "function": {"name": _NAME, "arguments": CallArguments({_KEY: "1"})}}
# Mistral's templates refuse ids of another length, and Kimi's write the id and not the name.
_CALL_IDS = ("000000000", f"functions.{_NAME}:0")
_NINE = re.compile("[a-zA-Z0-9]{9}")
_PARTS = re.compile(r"(\s+|[{}:\[\]])")


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
    texts, why = [], ""
    for call_id in _CALL_IDS:
        asked = {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": call_id}]}
        try:
            texts.append(template.render([_QUESTION, asked], [_TOOL]))
        except (BadModel, BadRequest) as error:
            why = str(error)
    if not texts:
        raise BadRequest(f"the model's chat template cannot write a function call ({why}); leave tools out")
    for form in CALL_FORMS:
        if any(re.search(_sample_of(form), text) for text in texts):
            return form
    raise BadRequest(
        "the model's chat template writes calls in a format that this server does not read; name a form with "
        "--tool-parser, leave tools out, or set tool_choice to none"
    )


def with_ids(messages: list[Json], form: CallForm) -> None:
    """Gives earlier calls, and the results that name them, ids that templates of a form take.

    The same conversation always gets the same ones, so that its beginning is found in the prefix cache.
    """
    ids: dict[str, str] = {}
    numbers = itertools.count()
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call["id"]
            nine = given if _NINE.fullmatch(given) else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
            name = call["function"]["name"]
            ids[given] = call["id"] = form.call_id.format(name=name, number=next(numbers), nine=nine)
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])


def reasoning_of(template: ChatTemplate) -> ReasoningForm | None:
    """Returns the form in which a model writes its reasoning, by its template; None if it writes none."""
    text = template.source + template.with_tools
    return next((form for form in REASONING_FORMS if all(each in text for each in form.shown)), None)


def _sample_of(form: CallForm) -> str:
    """Returns a regular expression of _CALL as models of this form write it."""

    def call(key: str) -> str:
        return _loose(f'{{"name": "{_NAME}", "{key}": {{"{_KEY}": "1"}}')  # an id may follow

    holes: dict[str, Callable[[str], str]] = {
        "name": lambda _: re.escape(_NAME),
        "json": lambda _: _loose(f'{{"{_KEY}": "1"}}'),
        "python": lambda _: rf"\[{_NAME}\({_KEY}=[\"']?1[\"']?\)\]",
        "maybe": _loose,
        "any": lambda _: f".{{0,{MOST_SHORT}}}?",
        "key": lambda _: re.escape(_KEY),
        "value": lambda _: "1",
        "kind": lambda _: "true",
        "call": call,
        "calls": lambda key: r"\[\s*" + call(key),
    }
    holes["parameters"] = lambda _: filled(form.parameter, _loose, holes)
    return f"(?:{'|'.join(map(_loose, form.opens))}){filled(form.call, _loose, holes)}"


def _loose(text: str) -> str:
    """Returns a regular expression of a text with any blanks between its parts."""
    return "".join(r"\s*" if part.isspace() else re.escape(part) + r"\s*" for part in _PARTS.split(text) if part)

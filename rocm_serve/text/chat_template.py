"""ChatTemplate: a model's format for writing a conversation as text."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocm_attn.errors import BadModel, BadRequest

# Variables of a template that no keyword may replace.
_VARIABLES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
# Variables that templates may join to texts or test, though there is nothing in them.
_UNSET: Mapping[str, Any] = {"tools": None, "documents": None, "bos_token": "", "eos_token": ""}
# The end of a message that the model continues. No model writes it, and a template that trims a text keeps it.
_GOES_ON = "<continue-of-rocm-attn>"


class CallArguments(dict[str, Any]):
    """Arguments of a call. A template may use them as an object, or join them to a text as DeepSeek's do, as JSON."""

    def __str__(self) -> str:
        return _as_json(self)

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __add__(self, after: str) -> str:
        return str(self) + after


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is written.

    keywords:       further variables of the template, such as enable_thinking
    begins_answer:  whether the text ends where an answer begins
    goes_on:        whether the text ends within the last message, which the model continues
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    begins_answer: bool = True
    goes_on: bool = False

    def __post_init__(self) -> None:
        reserved = sorted(_VARIABLES & self.keywords.keys())
        if reserved:
            raise BadRequest(f"chat_template_kwargs has {reserved[0]}, which the server sets; leave it out")


PLAIN = Rendering()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that came with a model; it runs in a sandbox.

    source:     the template's text
    tokens:     name of a special token that a template may write, such as "bos_token" -> its text
    with_tools: the text of the model's other template, for conversations with tools; "" if it has none
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    with_tools: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        rendering: Rendering = PLAIN,
    ) -> str:
        """Returns the conversation as text, up to where the model continues.

        messages: each with "role" ("system", "user", "assistant", "tool") and "content"; of an assistant, "tool_calls"
                  in the form of OpenAI's API, except "arguments", which are CallArguments
        tools:    functions that the model may call, in the form of OpenAI's API
        Raises BadRequest for messages that the template refuses, BadModel for a template that is damaged.
        """
        if rendering.goes_on:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _GOES_ON}]
        source = (tools and self.with_tools) or self.source
        in_parts = _roles_in_parts(source)
        try:
            text = (
                _environment()
                .from_string(source)
                .render(
                    messages=[_as_read(message, in_parts) for message in messages],
                    add_generation_prompt=rendering.begins_answer and not rendering.goes_on,
                    **{**_UNSET, **self.tokens, **rendering.keywords, "tools": list(tools) or None},
                )
            )
        except _Refused as error:
            raise BadRequest(f"the model's chat template refuses the messages: {error}") from error
        except _TooMuch as error:
            raise BadRequest(
                f"the model's chat template reads more than {MOST_READS} fields for these {len(messages)} messages; "
                "send fewer messages"
            ) from error
        except _TEMPLATE_ERRORS as error:
            what = str(error)[:_LONGEST_REASON] or type(error).__name__
            raise BadModel(f"the model's chat template fails ({what}); pass the prompt unchanged instead") from error
        if not rendering.goes_on:
            return text
        before, mark, _ = text.rpartition(_GOES_ON)
        if not mark:
            raise BadRequest("the model's chat template does not write the last message, so no answer can continue it")
        return before


def template_of(named: object, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Returns a model's template as its files name it; None if they name none.

    named:  one text, or templates by name, as Hugging Face has them: "default", and "tool_use" for tools
    tokens: of ChatTemplate
    """
    if isinstance(named, Sequence) and not isinstance(named, str):  # as tokenizer_config.json writes them
        entries = [each for each in named if isinstance(each, Mapping) and isinstance(each.get("name"), str)]
        named = {each["name"]: each.get("template") for each in entries}
    by_name = named if isinstance(named, Mapping) else {"default": named}
    source, with_tools = by_name.get("default"), by_name.get("tool_use")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, tokens, with_tools if isinstance(with_tools, str) else "")


_LONGEST_REASON = 300
# Fields and items that a template may read for a conversation, which takes two seconds of a core. A template that looks
# through all later messages for each one, as gpt-oss's does, reads as many for 2,000 messages; others 50 for a message.
MOST_READS = 2_000_000

# Errors that a template may raise: it is a program of the model's author.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _TooMuch(Exception):
    """Raised where a template has read MOST_READS fields."""


class _Refused(Exception):
    """Raised by raise_exception() inside a template."""


def _refuse(reason: object) -> NoReturn:
    raise _Refused(reason[:_LONGEST_REASON] if isinstance(reason, str) else "it gives no reason")


def _as_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter tojson of Hugging Face. Jinja's own escapes characters that HTML would misread, and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: Hugging Face's mark around the model's own text, for training."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parses the marked part, which is rendered unchanged."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox for one rendering. It bounds the work that a client's messages make for a model's template.

    It is no bound for a template that means to run on: loops that read no field are not counted.
    """

    num_read = 0

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._count()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._count()
        return super().getitem(obj, argument)

    def _count(self) -> None:
        self.num_read += 1
        if self.num_read > MOST_READS:
            raise _TooMuch


def _environment() -> _Sandbox:
    """An environment with everything that templates written for Hugging Face use."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


# Conversations that show how a template reads the texts of a role.
_TRIALS = {
    "user": ("user",),
    "assistant": ("user", "assistant", "user"),
    "system": ("system", "user"),
    "tool": ("user", "assistant", "tool"),
}


@lru_cache(maxsize=8)
def _roles_in_parts(source: str) -> frozenset[str]:
    """Returns the roles whose texts a template writes as lists of parts, and leaves out else: all in Llama Guard's.

    Templates of Gemma 3 in GGUF files read only a system message so.
    """

    def writes(said: Sequence[str], in_parts: frozenset[str]) -> bool:
        messages = [_as_read({"role": role, "content": _GOES_ON}, in_parts) for role in said]
        try:
            text = _environment().from_string(source).render(messages=messages, **_UNSET)
        except (_Refused, _TooMuch, *_TEMPLATE_ERRORS):
            return False
        return text.count(_GOES_ON) >= len(messages)

    found: frozenset[str] = frozenset()
    for role, said in _TRIALS.items():
        if not writes(said, found) and writes(said, found | {role}):
            found |= {role}
    return found


def _as_read(message: Mapping[str, Any], in_parts: frozenset[str]) -> Mapping[str, Any]:
    """Returns a message as a template reads it. in_parts: _roles_in_parts"""
    if message["role"] not in in_parts:
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}

"""Bodies that clients may send, in the form of OpenAI's API, with their bounds.

Unknown fields are ignored. Those that would change the text and are not served are refused (unserved.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from rocm_attn.machine.option_texts import option_texts
from rocm_serve.sampling.logprobs import MOST_LIKELIEST, NO_LOGPROBS
from rocm_serve.sampling.sampling_options import LARGEST_BIAS, Sampling
from rocm_serve.server.api_errors import ApiError, bad_request
from rocm_serve.server.guided import GuidedFields
from rocm_serve.server.template_fields import TemplateFields
from rocm_serve.server.tools import MOST_TOOLS, MadeCall, NamedTool, Tool, ToolPart

# Every list stops at its first wrong item. Otherwise a body of a million wrong items would have a million errors.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
# Bounds of each id would hold the event loop up four times as long as its type: ServedModel looks at the least one.
_PromptIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
_Stops = Annotated[list[str], Field(fail_fast=True, max_length=1024)]

# A conversation of more messages fits no model's context, and reading them would hold Python's lock.
MOST_MESSAGES = 10_000


def _refuse_many(items: Any, info: ValidationInfo) -> Any:
    # max_length alone would count items only after it has read as many.
    if isinstance(items, list) and len(items) > MOST_MESSAGES:
        raise bad_request(
            f"{info.field_name} has {len(items)} items and this server reads at most {MOST_MESSAGES}; leave some out, "
            "or join them",
            info.field_name or "",
        )
    return items


# Goes with a list of messages.
FEW_MESSAGES = BeforeValidator(_refuse_many)

# A shorter deadline passes before a request is read. A client that asks for one has made a mistake, such as of units.
LEAST_DEADLINE_SECONDS = 0.01
# The largest seed is the one of OpenAI's documentation, a signed integer of 64 bits.
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Positive = Annotated[int, Field(ge=1, lt=2**31)]
# Bounds keep priorities comparable: where they age, the worst one waits for the best ones for a bounded time.
MOST_PRIORITY = 1000
_SAMPLING = option_texts(Sampling)


def _bounds(name: str) -> Any:
    """Returns the bounds of a field of Sampling, for pydantic and the OpenAPI description."""
    _, text = _SAMPLING[name]
    return Field(ge=text.least, gt=text.above, le=text.most, allow_inf_nan=False)


class StreamOptions(ToolPart):
    """include_usage: whether a last chunk has the numbers of tokens."""

    include_usage: bool = False


class TextPart(ToolPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(ToolPart):
    """One message of a conversation.

    reasoning_content: that came before an assistant's content; the templates of some models write it
    reasoning:    the same, as vLLM names it
    name:         of who speaks, or of a tool; the templates of some models write it
    prefix, partial: names of DeepSeek and Mistral, and of Kimi, for continue_final_message
    tool_calls:   that an assistant has asked for
    tool_call_id: of the call whose result a tool's content is
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    prefix: bool | None = None
    partial: bool | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message may have tool_calls")
        if self.content is None and not self.tool_calls and (self.role != "assistant" or self.thought is None):
            raise ValueError("the message has no content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs a tool_call_id")
        return self

    @property
    def thought(self) -> str | None:
        """The reasoning, under either name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def as_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: they know only OpenAI's older name of the system role.

        Raises ApiError.
        """
        parts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content or ()
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in parts)}
        if self.thought is not None:  # gpt-oss's template has its own name for it
            message["reasoning_content"] = message["thinking"] = self.thought
        if self.name is not None:
            message["name"] = self.name
        if self.prefix or self.partial:
            message["prefix"] = True
        if self.tool_calls:
            message["tool_calls"] = [call.as_template for call in self.tool_calls]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES), FEW_MESSAGES]


class GenerationBody(GuidedFields):
    """The fields that both kinds of request have.

    Beyond OpenAI's fields: stop_token_ids, allowed_token_ids, ignore_eos, min_tokens, top_k, min_p, repetition_penalty,
    prompt_logprobs and priority, as in rocm_attn.Request and Sampling; include_stop_str_in_output, which is
    Request.include_stop; cache_salt, within the key's own; timeout, in seconds.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=1024)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, _bounds("top_p")] | None = None
    n: _Positive | None = None
    seed: _Seed | None = None
    stop: str | _Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, _bounds("min_p")] | None = None
    presence_penalty: Annotated[float, _bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _bounds("repetition_penalty")] | None = None
    logit_bias: dict[str, Any] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    timeout: Annotated[float, Field(ge=LEAST_DEADLINE_SECONDS, allow_inf_nan=False)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit biases. Raises ApiError. JSON keys are strings, and a million wrong ones get one error here."""
        biases = []
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 10) or type(bias) not in (int, float):
                raise _no_biases()
            try:
                biases.append((int(token), float(bias)))
            except OverflowError:  # JSON's integers have no bound
                raise _no_biases() from None
        return tuple(biases)

    @property
    def num_prompt_logprobs(self) -> int:
        """The value of Request.prompt_logprobs. Raises ApiError."""
        asked = NO_LOGPROBS if self.prompt_logprobs is None else self.prompt_logprobs
        most = max(asked, self.num_echoed_logprobs)
        if most != NO_LOGPROBS and self.stream:
            raise bad_request(
                "logprobs of a prompt are not sent in a stream; leave out prompt_logprobs, echo or logprobs, or set "
                "stream to false",
                "stream",
            )
        return most

    @property
    def num_echoed_logprobs(self) -> int:
        """See CompletionBody."""
        return NO_LOGPROBS

    @property
    def is_answered_by_echo(self) -> bool:
        """See CompletionBody."""
        return False

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: str | Texts | _PromptIds | Annotated[list[_PromptIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int:
        """The value of Request.logprobs."""
        return NO_LOGPROBS if self.logprobs is None else self.logprobs

    @property
    def num_echoed_logprobs(self) -> int:
        """Likeliest tokens that are reported for each token of an echoed prompt; NO_LOGPROBS: it has no logprobs."""
        return self.num_logprobs if self.echo else NO_LOGPROBS

    @property
    def is_answered_by_echo(self) -> bool:
        """True if the prompt alone is asked for. Raises ApiError if nothing is."""
        if self.max_tokens == 0 and not self.echo:
            raise bad_request(
                "max_tokens is 0 and echo is not set, so there would be no answer; set echo, or raise max_tokens",
                "max_tokens",
            )
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return [each for each in self.prompt if not isinstance(each, int)]


class ChatBody(GenerationBody, TemplateFields):
    """The body of /v1/chat/completions.

    max_tokens:          the older name of max_completion_tokens
    parallel_tool_calls: whether one answer may ask for several calls; it may by default
    """

    messages: Messages
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tools_as_template(self) -> list[dict[str, Any]]:
        """All tools, as chat templates expect them. Raises ApiError."""
        tools = [tool.as_template for tool in self.tools or ()]
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise bad_request("two of the tools have the same name; give each function its own", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise bad_request(
                f"tool_choice names the function {self.tool_choice.function.name}, which is not among the tools",
                "tool_choice",
            )
        if self.tool_choice == "required" and not tools:
            raise bad_request("tool_choice is required and there are no tools; give some", "tool_choice")
        return tools

    @property
    def may_call(self) -> bool:
        """True if the answer may have function calls. Raises ApiError."""
        may = bool(self.tools) and self.tool_choice != "none"
        if may and self.constraint is not None:
            raise bad_request(
                "tools are given together with a response_format, or another constraint, which excludes calls; leave "
                "one of them out, or set tool_choice to none",
                "response_format",
            )
        return may

    @property
    def must_call(self) -> list[dict[str, Any]]:
        """The functions of which one must be called, as chat templates expect them; empty if none must be."""
        tools = self.tools_as_template
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in tools if tool["function"]["name"] == self.tool_choice.function.name]
        return tools if self.tool_choice == "required" else []

    @property
    def num_logprobs(self) -> int:
        """The value of Request.logprobs. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs is set and logprobs is not; set logprobs to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else NO_LOGPROBS


# The answer to a wrong value of a field whose type has several forms. pydantic would report an error for each form.
SHAPES = {
    "prompt": "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "timeout": f"timeout must be a number of seconds, at least {LEAST_DEADLINE_SECONDS}",
    "stop": "stop must be a string or a list of strings",
    "messages": (
        "messages must be a list of at least one message, each with a role (system, developer, user, assistant or "
        "tool) and a content: a string or a list of parts of type text. An assistant's message may have "
        "reasoning_content instead, or tool_calls, each with id, type and function. A tool's message needs a "
        "tool_call_id"
    ),
    "input": (
        "input must be a text or a list of items: messages with a role (system, developer, user or assistant) and a "
        "text, calls of type function_call, results of type function_call_output, and items of type reasoning"
    ),
    "tools": (
        f"tools must be a list of at most {MOST_TOOLS} tools of type function, each with a function: a name of 1 "
        "to 64 letters, digits, _ and -, and optionally a description and parameters, which are a JSON schema; in "
        "/v1/responses these are fields of the tool itself"
    ),
    "tool_choice": (
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": ...}} with the name of '
        "one of the tools"
    ),
}


def _no_biases() -> ApiError:
    return bad_request(
        f"logit_bias must map token ids, as texts, to numbers from -{LARGEST_BIAS} to {LARGEST_BIAS}", "logit_bias"
    )

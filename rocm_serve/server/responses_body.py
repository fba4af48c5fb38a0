"""The body of /v1/responses, which becomes one of /v1/chat/completions: the two differ in form alone."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rocm_serve.server.api_errors import bad_request
from rocm_serve.server.schema import FEW_MESSAGES, MOST_MESSAGES, ChatBody
from rocm_serve.server.tools import MOST_TOOLS, Function, FunctionName, NamedFunction, ToolPart
from rocm_serve.server.unserved import OF_RESPONSES, refuse_unserved


class _Text(ToolPart):
    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str


_Texts = Annotated[list[_Text], Field(fail_fast=True)]


class MessageItem(ToolPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Texts


class CallItem(ToolPart):
    """A call that the model has asked for."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class ResultItem(ToolPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Texts


class ReasoningItem(ToolPart):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: _Texts | None = None


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunctionTool(NamedFunction):
    """A function that must be called."""

    type: Literal["function"]


class TextFormat(ToolPart):
    """The form of the answer's text. content: the schema of a json_schema"""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    content: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(ToolPart):
    """Options of the answer's text."""

    format: TextFormat = Field(default_factory=lambda: TextFormat(schema=None))


class ReasoningOptions(ToolPart):
    """effort: one of OpenAI's, for the chat templates that know it"""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesBody(BaseModel):
    """The body of /v1/responses. Fields that it does not name, such as top_k, are those of ChatBody."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=1024)]
    input: (
        str
        | Annotated[
            list[MessageItem | CallItem | ResultItem | ReasoningItem],
            Field(fail_fast=True, max_length=MOST_MESSAGES),
            FEW_MESSAGES,
        ]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    stream: bool | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """A null means the default, as in OpenAI's API."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def as_chat(self) -> ChatBody:
        """The same request for /v1/chat/completions. Raises ApiError, and ValidationError of pydantic."""
        extra = self.model_extra or {}
        refuse_unserved(extra, OF_RESPONSES)
        self._check_returned()
        form = self.text.format
        if form.type == "json_schema" and form.content is None:
            raise bad_request("text.format has no schema; give one, or another type", "text")
        if not self.input:
            raise bad_request("input is empty; give a text or at least one item", "input")
        fields: dict[str, Any] = {
            name: value for name, value in extra.items() if name not in OF_RESPONSES.keys() | _IGNORED
        }
        fields |= {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ],
            "tool_choice": self.tool_choice
            if isinstance(self.tool_choice, str)
            else {"type": "function", "function": {"name": self.tool_choice.name}},
        }
        if form.type != "text":
            schema = {} if form.content is None else {"json_schema": {"name": form.name, "schema": form.content}}
            fields["response_format"] = {"type": form.type, **schema}
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return ChatBody.model_validate(fields)

    def _check_returned(self) -> None:
        """Raises ApiError for fields that the answer returns, and that JSON cannot hold."""
        tools, text = [tool.model_dump() for tool in self.tools], self.text.model_dump()
        returned = {"instructions": self.instructions, "metadata": self.metadata, "text": text, "tools": tools}
        for name, value in returned.items():
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError) as error:  # Python's parser reads more than JSON is
                raise bad_request(
                    f"the answer cannot return {name} ({error}); give finite numbers and whole characters", name
                ) from error

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation. An answer's reasoning, text and calls are items here, and one message there."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        answer: dict[str, Any] | None = None  # the assistant's message that further items belong to
        for item in self.input:
            if isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _joined(item.content)})
                answer = None
            elif isinstance(item, ResultItem):
                output = _joined(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
                answer = None
            else:
                if answer is None or (isinstance(item, MessageItem) and answer["content"]):
                    answer = {"role": "assistant", "content": ""}
                    messages.append(answer)
                _add_to(answer, item)
        return messages


def _add_to(answer: dict[str, Any], item: MessageItem | CallItem | ResultItem | ReasoningItem) -> None:
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        answer["reasoning_content"] = answer.get("reasoning_content", "") + _joined(item.content or [])
    elif isinstance(item, MessageItem):
        answer["content"] = _joined(item.content)


def _joined(content: str | Sequence[_Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Fields that change no answer, and mean something else in a conversation.
_IGNORED = frozenset({"stream_options", "user", "service_tier"})

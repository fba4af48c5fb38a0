"""The OpenAPI description of answers, which are made without FastAPI's models."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def _object(**properties: Json) -> Json:
    """Returns the schema of an object that has all of these properties, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list_of(item: Json) -> Json:
    return {"type": "array", "items": item}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_CARD = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_CHOICE: Json = {
    "index": _COUNT,
    "finish_reason": {"enum": ["stop", "length", "tool_calls", "error", "abort"]},
    "logprobs": _or_null({"type": "object"}),
}
_FUNCTION = _object(name=_TEXT, arguments=_TEXT)
_CALLS = _list_of(_object(id=_TEXT, type={"const": "function"}, function=_FUNCTION))
_MESSAGE = _object(role={"const": "assistant"}, content=_or_null(_TEXT), refusal={"type": "null"})
_MESSAGE["properties"] |= {"tool_calls": _CALLS, "reasoning_content": _TEXT}  # if there are any


def _answer(kind: str, **of_choice: Json) -> Json:
    choices = _list_of(_object(**_CHOICE, **of_choice))
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices, usage=_USAGE)


_OUTPUT = {"type": "object", "properties": {"type": {"enum": ["message", "reasoning", "function_call"]}}}
_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=_TEXT,
    output=_list_of(_OUTPUT),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
)

_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT), request_id=_or_null(_TEXT))
)

# Path -> the schema of its JSON.
_ANSWERS: dict[str, Json] = {
    "/health": _object(status={"enum": ["ok", "failing"]}),
    "/health/truth": _object(
        verdict={"enum": ["right", "wrong", "not checked"]}, reason=_TEXT, age_seconds={"type": "number"}
    ),
    "/ready": _object(status={"enum": ["ready", "draining", "failing"]}),
    "/v1/models": _object(object={"const": "list"}, data=_list_of(_CARD)),
    "/v1/models/{name}": _CARD,
    "/v1/completions": _answer("text_completion", text=_TEXT),
    "/v1/chat/completions": _answer("chat.completion", message=_MESSAGE),
    "/tokenize": _object(
        count=_COUNT, max_model_len=_COUNT, tokens=_list_of(_COUNT), token_strs=_or_null(_list_of(_or_null(_TEXT)))
    ),
    "/detokenize": _object(prompt=_TEXT),
    "/tokenizer_info": _object(chat_template=_or_null(_TEXT), bos_token=_or_null(_TEXT), eos_token=_or_null(_TEXT)),
    "/ping": _object(),
    "/version": _object(version=_TEXT),
    "/load": _object(server_load=_COUNT),
    "/v1/responses": _RESPONSE,
}
# Each event of a stream. Those of /v1/responses have names.
_EVENT: Json = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
# The content that a path sends in addition to JSON, or in its place.
_TEXTS: dict[str, Json] = {
    "/metrics": {"text/plain": {"schema": _TEXT}},
    "/v1/completions": {"text/event-stream": {"schema": _EVENT}},
    "/v1/chat/completions": {"text/event-stream": {"schema": _EVENT}},
    "/v1/responses": {"text/event-stream": {"schema": _EVENT}},
}
# Paths whose JSON is the same with status 503, and the meaning of that.
_UNWELL = {
    "/health": "requests fail, or the truth probe has found a wrong output",
    "/health/truth": "the outputs are wrong",
    "/ready": "the server ends, or is not well",
}


def with_answers(description: Json) -> Json:
    """Adds the answers of every path to the description, in place. A wrong body is answered with 400, not 422."""
    error = {"description": "an error, in OpenAI's form", "content": {"application/json": {"schema": _ERROR}}}
    for path, operations in description["paths"].items():
        content: Json = {"application/json": {"schema": _ANSWERS[path]}} if path in _ANSWERS else {}
        content |= _TEXTS.get(path, {})
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["200"]["content"] = content
            operation["responses"]["default"] = error
            if path in _UNWELL:
                operation["responses"]["503"] = {"description": _UNWELL[path], "content": content}
    return description

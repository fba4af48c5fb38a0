"""The OpenAPI description of answers, which are made without FastAPI's models: OpenAI's types describe their JSON."""

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                **{name: {"anyOf": [_TEXT, {"type": "null"}]} for name in ("param", "code", "request_id")},
            },
        }
    },
    "required": ["error"],
}
_STREAMED = ("application/json", "text/event-stream")
# Path -> the types of its answers, if they are not JSON alone.
_TYPES = {
    "/metrics": ("text/plain",),
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/responses"), _STREAMED),
}


def with_answers(description: Json) -> Json:
    """Adds the answers of every path to the description, in place. A wrong body is answered with 400, not 422."""
    error = {"description": "an error, in OpenAI's form", "content": {"application/json": {"schema": _ERROR}}}
    for path, operations in description["paths"].items():
        content: Json = {kind: {"schema": {}} for kind in _TYPES.get(path, ("application/json",))}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["200"]["content"] = content
            operation["responses"]["default"] = error
            if path in ("/health", "/health/truth", "/ready"):  # unwell
                operation["responses"]["503"] = {"description": "the server should get no requests", "content": content}
    return description

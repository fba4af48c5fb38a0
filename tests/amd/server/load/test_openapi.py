"""Requests that schemathesis makes of the served OpenAPI description: none is answered with a server's error."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.amd.server.load.clients import MODEL
from tests.amd.server.load.served import Served, served

# The night makes more of them.
FEW, MANY = 6, 400


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model, "--max-new-tokens", "8", "--max-kv-len", "64") as server:
        yield server


def check_every_operation(server: Served, num_examples: int) -> Counter[tuple[str, int]]:
    """Sends num_examples requests of each operation; returns the number of answers per operation and status."""
    schema = schemathesis.openapi.from_dict(json.loads(server.get("/openapi.json")))
    schema.config.update(base_url=server.url)
    found = Counter[tuple[str, int]]()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        check_operation(result.ok(), num_examples, found)
    return found


def check_operation(operation: Any, num_examples: int, found: Counter[tuple[str, int]]) -> None:
    """Checks that the description has each answer; half of the bodies name the loaded model."""
    chooser = random.Random(0)

    @given(case=operation.as_strategy())
    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and chooser.random() < 0.5:
            case.body["model"] = MODEL
        response = case.call()
        if response.status_code == 504:  # a deadline that has passed, which the client itself has set
            assert "timeout" in case.body, response.text
            assert response.json()["error"]["code"] == "deadline_exceeded"
        else:
            assert response.status_code < 500, (case.body, response.text)
            case.validate_response(response, checks=CHECKS)
        check_by_openais_types(response)
        found[operation.label, response.status_code] += 1

    check()


def check_by_openais_types(response: Any) -> None:
    """OpenAI's own client reads an answer: whole ones, the chunks of streams, and errors."""
    kind = response.headers["content-type"][0].partition(";")[0]
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        if events[-1] == "[DONE]":
            events.pop()
        else:
            assert events[-1].startswith(('{"error"', '{"type":"response.completed"', '{"type":"response.incomplete"'))
        for event in map(json.loads, events):
            number_first_logprobs(event)
            if event.get("type", "").startswith("response."):
                RESPONSE_EVENT.validate_python(event)
                continue
            TYPES.get(event.get("object"), ErrorObject).model_validate(event.get("error", event), strict=True)
    elif kind == "application/json":
        content = response.json()
        number_first_logprobs(content)
        if response.status_code >= 400 and "error" in content:
            ErrorObject.model_validate(content["error"], strict=True)
        elif content.get("object") in TYPES:
            TYPES[content["object"]].model_validate(content, strict=True)


def number_first_logprobs(content: Any) -> None:
    """The first token of an echoed prompt has no logprob: OpenAI's API says null, for which its types have no place."""
    if content.get("object") == "text_completion":
        for logprobs in filter(None, (choice["logprobs"] for choice in content["choices"])):
            if logprobs["token_logprobs"][:1] == [None]:
                logprobs["token_logprobs"][0] = 0.0
                logprobs["top_logprobs"][:1] = [{}]


TYPES: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": Completion,
    "model": Model,
    "response": OpenAIResponse,
}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
def test_no_request_of_the_description_makes_the_server_fail(server: Served, num_examples: int) -> None:
    found = check_every_operation(server, num_examples)
    operations = {label for label, _ in found}
    assert {"POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /metrics"} <= operations
    for label in ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"):
        assert found[label, 400] > 0, found
        assert sum(count for (name, _), count in found.items() if name == label) >= num_examples / 2
    server.assert_served_all()

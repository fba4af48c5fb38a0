"""Constraints over HTTP as OpenAI, vLLM and SGLang name them: each holds the answer, and two of them are refused."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rocm_serve.engine import Engine
from tests.amd.runner.with_parameters import END, PROMPT
from tests.amd.server.raw import post, requested, send
from tests.amd.server.running import Running, letter_model, running
from tests.amd.server.test_requested import OPTIONS

SCHEMA = {"enum": ["no", "yes"]}
LARK = 'start: "a" b+\nb: "b"'


def format_of(schema: object) -> dict[str, Any]:
    """OpenAI's own field."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    loaded = letter_model()
    with running(Engine(loaded, OPTIONS), tokenizer=loaded.tokenizer, constraint_seconds=1) as served:
        yield served


def asked(server: Running, **fields: Any) -> Any:
    return post(server, requested(**{"prompt": list(PROMPT), "max_tokens": 40, "seed": 4, "temperature": 1, **fields}))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, '"(no|yes)"'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"(no|yes)"'),
        ({"structured_outputs": {"regex": "a{2}b{3}"}}, "aabbb"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"grammar": LARK}}, "ab+"),
        ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"),
        ({"guided_json": SCHEMA}, '"(no|yes)"'),
        ({"guided_regex": "a{2}b{3}"}, "aabbb"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": LARK}, "ab+"),
        ({"regex": "a{2}b{3}"}, "aabbb"),
        ({"json_schema": json.dumps(SCHEMA)}, '"(no|yes)"'),
        ({"regex": "a{2}", "response_format": {"type": "text"}, "guided_json": None}, "aa"),
        (format_of(SCHEMA), '"(no|yes)"'),
        ({"response_format": {"type": "json_object"}}, r"\s*\{.*"),
    ],
    ids=str,
)
def test_the_answer_matches_whatever_the_field_is_called(fields: dict[str, Any], pattern: str, server: Running) -> None:
    (choice,) = asked(server, **fields).json["choices"]
    assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "constrains its answer by guided_json and by guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex and by structured_outputs.ch",
        ),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "by regex and by response_format.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported here"),
        ({"structured_outputs": {}}, "structured_outputs has no constraint"),
        ({"structured_outputs": {"choice": []}}, "a choice needs at least one text"),
        ({"guided_regex": "("}, "the constraint cannot be used"),
        ({"guided_grammar": "begin: x"}, "the constraint cannot be used"),
        ({"guided_json": "{"}, "the JSON schema is not JSON"),
        ({"guided_regex": "x" * 70_000}, "the constraint has 70000 characters; at most 65536 are allowed"),
        ({"guided_choice": "one"}, "guided_choice"),
        (format_of({"$ref": "#"}), "the constraint cannot be used"),
        (format_of({"type": "object", "properties": {"a": {"type": "strin"}}}) | {"stream": True}, "the constraint"),
        ({"ebnf": "root ::= x"}, "not served: ebnf"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_constraint_that_cannot_be_followed_is_refused(fields: dict[str, Any], says: str, server: Running) -> None:
    reply = asked(server, **fields)
    assert reply.status == 400
    assert says in reply.error["message"]
    assert server.holds_nothing()


def test_a_constraint_that_the_requests_other_options_contradict_is_the_clients_fault(server: Running) -> None:
    for _ in range(6):  # as many as the server's own failures would need for /health to say so
        reply = asked(server, guided_regex="a+", allowed_token_ids=[END])
        assert reply.status == 400
        assert "no token is left that the request allows" in reply.error["message"]
    assert send(server, "GET", "/health").status == 200

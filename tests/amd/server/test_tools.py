"""Tool calls of a model: the answers that OpenAI's client gets, streamed or whole, in each form that models write."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

import rocm_serve.server.served_model as served_model
from rocm_serve.request import Request
from rocm_serve.text.constraint import Constraint
from tests.amd.server.raw import CHAT, Reply, post
from tests.amd.server.running import NAME, Running, running
from tests.amd.server.tool_models import CLOCK, WEATHER, WORDS, tokenizer, tool_engine

ASKED = [{"role": "user", "content": "How is it?"}]
CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "unit": "C"}}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"days": 2, "unit": "C"}}',
}


@contextmanager
def serving(template: str) -> Iterator[Running]:
    with running(tool_engine(template), tokenizer=tokenizer(template)) as served:
        yield served


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Running]]:
    with serving("hermes") as hermes, serving("llama") as llama:
        yield {"hermes": hermes, "llama": llama}


def forced(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The model says this text for any prompt."""

    def made(**fields: Any) -> Request:
        sampling = replace(fields["sampling"], logit_bias=tuple((word, 100.0) for word in WORDS))
        return Request(**{**fields, "constraint": Constraint.choice([text]), "sampling": sampling})

    monkeypatch.setattr(served_model, "Request", made)


def ask(server: Running, **fields: Any) -> list[Any]:
    """The choices of an answer; a stream of the same request comes to the same."""
    fields = {"model": NAME, "messages": ASKED, "tools": [WEATHER, CLOCK], "seed": 3, "max_tokens": 200, **fields}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**fields)
        chunks = client.chat.completions.create(stream=True, **fields)
        assert streamed(chunks, len(whole.choices)) == list(map(reported, whole.choices))
    return list(whole.choices)


def reported(choice: Any) -> Any:
    """All of a choice but for the ids of its calls."""
    said = choice.message
    calls = [[call.function.name, call.function.arguments] for call in said.tool_calls or ()]
    assert all(call.id.startswith("call_") and call.type == "function" for call in said.tool_calls or ())
    return [choice.index, choice.finish_reason, said.content or "", calls, thought_of(said)]


def thought_of(said: Any) -> str:
    """The reasoning of a message or of a delta, which OpenAI's types do not name."""
    return getattr(said, "reasoning_content", None) or ""


def streamed(chunks: Iterable[Any], num_choices: int) -> list[Any]:
    """Likewise, of the deltas of a stream, put together as OpenAI's documentation has it."""
    found: list[Any] = [[index, None, "", [], ""] for index in range(num_choices)]
    for chunk in chunks:
        for choice in chunk.choices:
            said = found[choice.index]
            said[1], said[2] = choice.finish_reason, said[2] + (choice.delta.content or "")
            said[4] += thought_of(choice.delta)
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert (call.id[:5], call.type, call.index) == ("call_", "function", len(said[3]))
                    said[3].append([call.function.name, ""])
                said[3][call.index][1] += call.function.arguments
    return found


def refused(server: Running, **fields: Any) -> Reply:
    reply = post(server, {"model": NAME, "messages": ASKED, "tools": [WEATHER], **fields}, CHAT)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.body
    return reply


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_call_that_the_model_writes_comes_as_a_call(
    form: str, servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, CALL[form])
    (choice,) = ask(servers[form])
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"days": 2, "unit": "C"})
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (plain,) = ask(servers[form], tool_choice="none")
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (CALL[form], None, "stop")


def test_what_is_no_call_of_a_function_that_there_is_stays_text(
    servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '<tool_call>{"name": "launch"}'
    forced(monkeypatch, text)
    (choice,) = ask(servers["hermes"])
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_no_function_is_called_but_the_one_that_must_be(
    servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thought is free text, in which a model may call another one."""
    forced(monkeypatch, CALL["hermes"])
    (choice,) = ask(servers["hermes"], tool_choice={"type": "function", "function": {"name": "get-time"}})
    assert (choice.message.content, choice.message.tool_calls) == (CALL["hermes"], None)


def test_words_and_several_calls_come_together(servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    second = '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
    forced(monkeypatch, f"I look. \n{CALL['hermes']}\n{second}\n")
    choices = ask(servers["hermes"], n=2)
    for choice in choices:
        assert choice.message.content == "I look."
        assert choice.finish_reason == "tool_calls"
        weather, time = choice.message.tool_calls
        assert json.loads(weather.function.arguments)["days"] == 2
        assert json.loads(time.function.arguments) == {}
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 4
    (choice,) = ask(servers["hermes"], parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")


@pytest.mark.parametrize(
    ("fields", "content", "reason"),
    [({"stop": "unit"}, '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "', "stop"),
     ({"max_tokens": 3}, '<tool_call>\n{"name": "get_weather', "length")],
)  # fmt: skip
def test_a_call_that_is_cut_stays_text(
    fields: dict[str, Any],
    content: str,
    reason: str,
    servers: dict[str, Running],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forced(monkeypatch, CALL["hermes"])
    (choice,) = ask(servers["hermes"], **fields)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (content, None, reason)


@pytest.mark.parametrize("form", [pytest.param("hermes", marks=pytest.mark.nightly), "llama"])
def test_a_function_that_must_be_called_is_called_as_its_schema_wants(form: str, servers: dict[str, Running]) -> None:
    """The model is of random weights: nothing but the constraint makes it call."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ask(servers[form], tool_choice=named, n=2, temperature=1.5):
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"days", "unit"}
        assert arguments["days"] in (1, 2, 3)
        assert arguments["unit"] in ("C", "F")
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (choice,) = ask(servers[form], tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["get-time"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools must be a list of at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters, digits, _ and -"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two of the tools have the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
         "tools", "parameters of the function a must be a JSON schema of type object"),
        ({"tool_choice": "perhaps"}, "tool_choice", "tool_choice must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "not among the tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "leave one of them out"),
        ({"messages": [*ASKED, {"role": "tool", "content": "rain"}]}, "messages", "needs a tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}]}]}, "messages", "must be"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[1]"}}]}]},
         "messages", "the arguments of the call of a in the messages must be a string"),
        *(({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": f'{{"x": {number}}}'}}]}]},
           "messages", "a JSON object with finite numbers") for number in ("1e400", "NaN")),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_about_tools_is_said(
    fields: dict[str, Any], param: str, says: str, servers: dict[str, Running]
) -> None:
    reply = refused(servers["hermes"], **fields)
    assert reply.error["param"] == param
    assert says in reply.error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "strin"}}},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_where_it_must_be_followed(
    schema: dict[str, Any], servers: dict[str, Running]
) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    says = refused(servers["hermes"], tools=[tool], tool_choice="required").error["message"]
    assert "the constraint cannot be used" in says or "the JSON schema" in says
    assert servers["hermes"].holds_nothing()

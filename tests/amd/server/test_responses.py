"""/v1/responses: OpenAI's client gets the same answer whole and in typed events, and the one of a conversation."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rocm_serve.request import Completion, FinishReason
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.call_reader import Part, Reader
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.server.replies import ChatReplies, PromptReport, Usage
from rocm_serve.server.response_replies import ResponseReplies
from rocm_serve.server.responses_body import ResponsesBody
from rocm_serve.server.unserved import OF_RESPONSES
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.noted import noted
from tests.amd.server.raw import Client, Reply, post
from tests.amd.server.running import NAME, Running, running
from tests.amd.server.test_tools import CALL, forced
from tests.amd.server.tool_models import TEMPLATES, tokenizer, tool_engine

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    "strict": True,
}
# A template that begins reasoning at the prompt's end, as DeepSeek-R1's does.
THINKING = TEMPLATES["hermes"] + "<think>\n{# </think> #}"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_engine("hermes"), tokenizer=tokenizer("hermes")) as served:
        yield served


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    words = tokenizer("hermes")
    ours = Tokenizer(words.backend, None, ChatTemplate(THINKING))
    with running(tool_engine("hermes"), tokenizer=ours) as served:
        yield served


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: Running, **fields: Any) -> Any:
    """The answer. The stream of the same request has its events in order, and ends with the same answer."""
    fields = {"model": NAME, "input": "How is it?", "max_output_tokens": 200, "store": False, **fields}
    with client(server) as ours:
        whole = ours.responses.create(**fields)
        events = list(ours.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert reported(events[-1].response) == reported(whole)
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    assert from_deltas(events) == reported(whole)[1]
    texts = [event for event in events if event.type.startswith("response.output_text.")]
    assert all(event.logprobs == [] for event in texts), "a list is required there"
    items = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert items == [each.to_dict() for each in events[-1].response.output]
    return whole


def reported(answer: Any) -> Any:
    """All of an answer but for its ids."""
    items = []
    for item in answer.output:
        if item.type == "function_call":
            assert (item.id[:3], item.call_id[:5]) == ("fc_", "call_")
            items.append(["function_call", item.name, item.arguments])
        else:
            items.append([item.type, "".join(part.text for part in item.content)])
    return answer.status, items


def from_deltas(events: list[Any]) -> list[Any]:
    """The items of a stream, put together of what its deltas bring."""
    items: list[Any] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            named = [event.item.name] if event.item.type == "function_call" else []
            items.append([event.item.type, *named, ""])
        elif event.type.endswith(".delta"):
            items[event.output_index][-1] += event.delta
    return items


def refused(server: Running, **fields: Any) -> Reply:
    reply = post(server, {"model": NAME, "input": "How?", **fields}, PATH)
    assert reply.status == 400, reply.body
    return reply


def test_a_text_comes_as_a_message(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, "All is well.")
    answer = ask(server)
    assert reported(answer) == ("completed", [["message", "All is well."]])
    assert answer.output_text == "All is well."
    assert (answer.store, answer.usage.input_tokens > 0, answer.usage.output_tokens > 0) == (False, True, True)


def test_a_call_comes_as_an_item_after_the_words_before_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, f"I look. \n{CALL['hermes']}")
    answer = ask(server, tools=[WEATHER])
    call = ["function_call", "get_weather", '{"days": 2, "unit": "C"}']
    assert reported(answer) == ("completed", [["message", "I look."], call])


def test_reasoning_comes_as_an_item_of_its_own(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, "Two and two.</think>\n\nFour.")
    answer = ask(thinker)
    assert reported(answer) == ("completed", [["reasoning", "Two and two."], ["message", "Four."]])
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Two and two.")


@pytest.mark.parametrize(
    ("before", "thought", "said"),
    [
        ("<think>\nOne", "and two.", "Four."),
        ("<think>\nOne.</think>", "", "and two.</think>\n\nFour."),
        ("The mark <think>", "and two.", "Four."),
        ("The mark <think> is", "", "and two.</think>\n\nFour."),
    ],
)
def test_an_answer_that_the_client_has_begun_goes_on_in_its_thought(
    before: str, thought: str, said: str, thinker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, "and two.</think>\n\nFour.")
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": before}]
    answer = ask(thinker, input=begun, extra_body={"continue_final_message": True})
    assert reported(answer)[1] == [*([["reasoning", thought]] if thought else []), ["message", said]]


def test_the_token_before_a_text_is_no_token_of_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer("hermes")
    ours = Tokenizer(words.backend, 9, ChatTemplate(THINKING))
    forced(monkeypatch, "Two and two.</think>\n\nFour.")
    with running(tool_engine("hermes"), tokenizer=ours) as served:
        answer = ask(served)
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Two and two.")


def test_an_answer_says_how_it_was_sampled(thinker: Running) -> None:
    with running(tool_engine("hermes"), tokenizer=tokenizer("hermes"), defaults=Sampling(0.6, 0.9)) as served:
        for said, expected in (({}, (0.6, 0.9)), ({"temperature": 0.5}, (0.5, 0.9)), ({"top_p": 1}, (0.6, 1))):
            answer = post(served, {"model": NAME, "input": "?", "max_output_tokens": 1, **said}, PATH).json
            assert (answer["temperature"], answer["top_p"]) == expected
    assert post(thinker, {"model": NAME, "input": "?", "max_output_tokens": 1}, PATH).json["temperature"] == 1


def test_a_stream_ends_once_and_its_connection_serves_the_next_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a stream has no [DONE]. Its end was sent twice, and the client took one for the beginning of an answer."""
    forced(monkeypatch, "All is well.")  # a drawn answer may end at once
    body = {"model": NAME, "input": "How is it?", "max_output_tokens": 2, "stream": True}
    with Client(server, body, PATH) as asking:
        asking.read_until(b'data: {"type":"response.incomplete"')
        asking.socket.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        assert asking.rest().startswith(b"\n\r\n0\r\n\r\nHTTP/1.1 200 OK")


def test_an_answer_that_is_cut_is_incomplete(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, "All is well.")
    answer = ask(server, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


def test_items_are_the_messages_of_a_conversation(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    written = noted(monkeypatch, Tokenizer, "conversation")
    forced(monkeypatch, "fine")
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "How?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"days": 2}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "developer", "content": "Be short."},
    ]
    ask(server, input=items, instructions="Be kind.", tools=[WEATHER])
    system, user, answer, first, second, last = written[0][1]
    assert (system["role"], system["content"]) == ("system", "Be kind.")
    assert (user["role"], user["content"]) == ("user", "How?")
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    assert [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]] == [
        ("c1", {"days": 2}),
        ("c2", {}),
    ]
    assert [(each["tool_call_id"], each["content"]) for each in (first, second)] == [("c1", "rain"), ("c2", "sun")]
    assert (last["role"], last["content"]) == ("system", "Be short.")


def test_a_schema_holds_the_text_and_reasoning_may_come_first(server: Running, thinker: Running) -> None:
    """The model is of random weights: nothing but the constraint makes it write JSON."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert json.loads(ask(server, text=text, extra_body={"seed": 3}).output_text)["a"] in (1, 2)
    answer = ask(thinker, text=text, max_output_tokens=20, extra_body={"seed": 3})
    assert [item.type for item in answer.output] == ["reasoning"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        *(({name: ["a", "value"]}, name, f"not served: {name}; ") for name in OF_RESPONSES),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools must be a list"),
        ({"tool_choice": {"type": "function", "name": "b"}, "tools": [WEATHER]}, "tool_choice", "not among the tools"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "a prompt is never cut"),
        ({"moderation": {"model": "any"}}, "moderation", "the server judges no texts"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "input must be a text or a list of items"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "must be"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "has no schema"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "the answer cannot return metadata ('utf-8' codec"),
        ({"metadata": {"a": 1}}, "metadata", "valid string"),
        ({"reasoning": {"effort": "most"}}, "reasoning", "'none', 'minimal', 'low'"),
        ({"tools": [{**WEATHER, "description": "\ud800"}]}, "tools", "the answer cannot return tools ('utf-8' codec"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"top_k": "many"}, "top_k", "valid integer"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_in_one_sentence(
    fields: dict[str, Any], param: str, says: str, server: Running
) -> None:
    reply = refused(server, **fields)
    assert reply.error["param"] == param
    assert says in reply.error["message"]


def test_a_value_that_changes_no_answer_is_taken(server: Running) -> None:
    for number in range(max(len(field.harmless) for field in OF_RESPONSES.values())):
        given = {name: field.harmless[number : number + 1] for name, field in OF_RESPONSES.items()}
        harmless = {name: value for name, values in given.items() for value in values}
        assert post(server, {"model": NAME, "input": "?", "max_output_tokens": 1, **harmless}, PATH).status == 200
    nulls = dict.fromkeys(ResponsesBody.model_fields.keys() - {"model", "input", "max_output_tokens"})
    assert post(server, {"model": NAME, "input": "?", "max_output_tokens": 1, **nulls}, PATH).status == 200


def test_fields_of_sampling_are_those_of_a_conversation(server: Running) -> None:
    fields = {"temperature": 1.5, "seed": 5, "top_k": 4, "model": NAME}
    chat = {**fields, "messages": [{"role": "user", "content": "?"}], "max_tokens": 12}
    expected = post(server, chat, "/v1/chat/completions").json["choices"][0]["message"]["content"]
    answer = post(server, {**fields, "input": "?", "max_output_tokens": 12}, PATH).json
    assert answer["output"][0]["content"][0]["text"] == expected


@pytest.mark.parametrize(("reason", "is_cut"), [("stop", False), ("length", True), ("abort", True)])
def test_the_reader_learns_whether_the_text_is_cut(reason: FinishReason, is_cut: bool) -> None:
    """A call without its last marks is one only where the model has ended it."""
    learnt = []

    class Ended(Reader):
        def finish(self, *, is_cut: bool = False) -> list[Part]:
            learnt.append(is_cut)
            return []

    done, usage = Completion((1,), (2,), "a", reason), Usage(1, 1, 0)
    ChatReplies(NAME, EmittedTokens(None), Ended, PromptReport()).whole([done], usage)
    asked = ResponsesBody.model_validate({"model": NAME, "input": "?"})
    ResponseReplies(NAME, asked, Sampling(), Ended, len).whole([done], usage)
    assert learnt == [is_cut] * 2

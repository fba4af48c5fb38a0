"""Fields that change how a conversation is written, and reasoning that comes apart from the text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rocm_serve.server.served_model as served_model
from rocm_attn.errors import BadSetting
from rocm_serve.cli.serve import _template
from rocm_serve.request import Request
from rocm_serve.server.options import ServerOptions
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.server.raw import CHAT, Reply, post
from tests.amd.server.running import NAME, Running, running
from tests.amd.server.test_tools import ASKED, CALL, forced, thought_of
from tests.amd.server.test_tools import ask as answered
from tests.amd.server.tool_models import TEMPLATES, WEATHER, tokenizer, tool_engine

# Begins reasoning unless it is told not to, as Qwen3's and DeepSeek-V3.1's templates do.
SOURCE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    '{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}assistant:"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)

MADE = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"days": 2}'}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    ours = Tokenizer(tokenizer("hermes").backend, None, ChatTemplate(SOURCE))
    with running(tool_engine("hermes"), tokenizer=ours, trust_request_chat_template=True) as served:
        yield served


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that are written."""
    written: list[str] = []
    conversation = Tokenizer.conversation

    def seen(own: Tokenizer, *given: Any) -> str:
        written.append(conversation(own, *given))
        return written[-1]

    monkeypatch.setattr(Tokenizer, "conversation", seen)
    return written


def ask(server: Running, **fields: Any) -> Reply:
    return post(server, {"model": NAME, "messages": ASKED, "max_tokens": 4, **fields}, CHAT)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "user:How is it?|assistant:<think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "assistant:<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "low"}, "|low assistant:<think>\n"),
        ({"reasoning_effort": "none"}, "|none assistant:<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "|none assistant:<think>\n"),
        ({"reasoning_effort": "none", "chat_template": "{{ messages[0].content }}{{ thinking }}"}, "How is it?False"),
        ({"reasoning_effort": "high", "chat_template": "{{ messages[0].content }}{{ thinking }}"}, "How is it?True"),
        ({"add_generation_prompt": False}, "user:How is it?|"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "It is "}], "continue_final_message": True,
          "add_generation_prompt": False}, "|assistant:It is "),
        *(({"messages": [*ASKED, {"role": "assistant", "content": "It is ", name: True}]}, "|assistant:It is ")
          for name in ("prefix", "partial")),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, *ASKED]},
         "|assistant:<think>Hm.</think>Yes.|user:How is it?|assistant:<think>\n"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, *ASKED]},
         "|assistant:<think>Hm.</think>Yes.|user:How is it?|assistant:<think>\n"),
        ({"messages": [*ASKED, {"role": "assistant", "content": None, "reasoning": "Hm."}, *ASKED]},
         "|assistant:<think>Hm.</think>|user:How is it?|assistant:<think>\n"),
        ({"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [MADE]},
                       {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"}]},
         'assistant:<tool_call>\n{"name": "get_weather", "arguments": {"days": 2}}\n</tool_call>|tool get_weather:rain|'
         "assistant:<think>\n"),
        *(({"messages": [*ASKED, {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", **arguments}}]}]},
           '"arguments": {}}\n</tool_call>|assistant:<think>\n') for arguments in ({"arguments": ""}, {})),
        ({"chat_template": "{{ messages[0].content }}{{ x }}", "chat_template_kwargs": {"x": "!"}}, "How is it?!"),
    ],
    ids=str,
)  # fmt: skip
def test_the_prompt_is_what_the_fields_say(
    fields: dict[str, Any], end: str, server: Running, prompts: list[str]
) -> None:
    assert ask(server, **fields).status == 200
    assert post(server, {"messages": ASKED, **fields}, "/tokenize").status == 200
    assert prompts[0] == prompts[1]
    assert prompts[0].endswith(end), prompts


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has messages, which the server sets"),
        ({"continue_final_message": True}, "continues a text of the assistant, which the last message is not"),
        ({"continue_final_message": True, "add_generation_prompt": True,
          "messages": [{"role": "assistant", "content": "a"}]}, "exclude each other"),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}],
          "chat_template": "nothing"}, "does not write the last message"),
        ({"chat_template": "{% for x in range(10**9) %}{% endfor %}"}, "the model's chat template fails"),
        ({"chat_template": "x" * 70_000}, "chat_template"),
        ({"include_reasoning": False}, "not served: include_reasoning"),
    ],
    ids=lambda each: str(each)[:70],
)  # fmt: skip
def test_what_no_template_can_follow_is_refused(fields: dict[str, Any], says: str, server: Running) -> None:
    reply = ask(server, **fields)
    assert reply.status == 400
    assert says in reply.error["message"]
    assert server.holds_nothing()


def test_a_request_brings_its_own_template_only_where_it_is_trusted() -> None:
    with running(tool_engine("hermes"), tokenizer=tokenizer("hermes")) as served:
        reply = ask(served, chat_template="{{ messages[0].content }}")
    assert (reply.status, reply.error["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in reply.error["message"]


def test_a_template_of_a_file_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(SOURCE)
    assert _template(ServerOptions(chat_template=file)) == SOURCE
    assert _template(ServerOptions()) is None
    for content, says in (
        ("{% if %}", "cannot be used .the model's chat template fails"),
        ("{{ raise_exception('no') }}", "no"),
        ('{"chat_template": "another file of the model"}', "it writes no message"),
    ):
        file.write_text(content)
        with pytest.raises(BadSetting, match=says):
            _template(ServerOptions(chat_template=file))
    with pytest.raises(BadSetting, match=r"missing.* cannot be used"):
        _template(ServerOptions(chat_template=tmp_path / "missing"))


def reasoned(server: Running, **fields: Any) -> tuple[str, str | None, int]:
    """Reasoning, text, and the number of calls."""
    (choice,) = answered(server, **{"tools": openai.omit, **fields})
    return thought_of(choice.message), choice.message.content, len(choice.message.tool_calls or ())


def test_reasoning_comes_apart_from_text_and_calls(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, f"Hm. It {{rains}}?\n</think>\n\nI look.\n{CALL['hermes']}")
    assert reasoned(server, tools=[WEATHER]) == ("Hm. It {rains}?", "I look.", 1)
    text = f"I look.\n{CALL['hermes']}"
    assert reasoned(server) == ("Hm. It {rains}?", text, 0)
    forced(monkeypatch, "I look.")
    without = {"chat_template_kwargs": {"enable_thinking": False}}
    assert reasoned(server, extra_body=without) == ("", "I look.", 0)


def test_a_form_that_is_named_is_used_and_none_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(tokenizer("other").backend, None, ChatTemplate(TEMPLATES["other"]))
    forced(monkeypatch, f"<think>Hm.</think>I look.{CALL['hermes']}")
    named: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(tool_engine("other"), tokenizer=words, **named) as served:
        assert reasoned(served, tools=[WEATHER]) == ("Hm.", "I look.", 1)
    none: dict[str, Any] = {"tool_parser": "none", "reasoning_parser": "none"}
    with running(tool_engine("hermes"), tokenizer=tokenizer("hermes"), **none) as served:
        assert reasoned(served)[:2] == ("", f"<think>Hm.</think>I look.{CALL['hermes']}")
        assert "this server reads no calls (--tool-parser none)" in ask(served, tools=[WEATHER]).error["message"]


def test_a_required_call_and_a_schema_let_the_model_reason_first(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints: list[Constraint] = []

    def seen(**fields: Any) -> Request:
        constraints.append(fields["constraint"])
        return Request(**fields)

    monkeypatch.setattr(served_model, "Request", seen)
    ask(server, tools=[WEATHER], tool_choice="required")
    ask(server, response_format={"type": "json_object"})
    ask(server, response_format={"type": "json_object"}, chat_template_kwargs={"enable_thinking": False})
    may_leave_it_out = [each.lead.startswith("lead: (") for each in constraints]
    assert may_leave_it_out == [False, False, True]
    assert all('[suffix="</think>"]' in each.lead for each in constraints)

"""Calls and reasoning in the form of each family of models are read, and the form is found by a template.

Whatever the pieces are in which a text comes, the same is found.
"""

import json
import re
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.errors import BadRequest, BadSetting
from rocm_serve.limits import RequestLimits
from rocm_serve.server.call_arguments import _WORDS
from rocm_serve.server.call_forms import form_of, reasoning_of, require_tools
from rocm_serve.server.call_reader import AnswerReader, Thought, ToolCall, _Brackets
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.schema import Message
from rocm_serve.server.served_model import ServedModel
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer
from rocm_serve.text.written_forms import CALL_FORMS, MARK, REASONING_FORMS, form_named
from tests.amd.noted import noted
from tests.amd.runner.small_tokenizers import of_bytes
from tests.amd.server.call_examples import EXAMPLES, FUNCTIONS, GLM, OSLO, QWEN_XML, Calls, Example
from tests.amd.server.tool_models import TEMPLATES

BY_NAME = {f"{place}-{example.calls_in}": example for place, example in enumerate(EXAMPLES)}


def found_in(example: Example, pieces: list[str]) -> tuple[str, str, Calls]:
    """Reasoning, text and calls."""
    reasoning = form_named(example.reasoning, REASONING_FORMS) if example.reasoning else None
    form = form_named(example.calls_in, CALL_FORMS)
    reader = AnswerReader(form, example.functions, reasoning, is_inside=example.is_inside)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert all(part.arguments.encode() for part in parts if isinstance(part, ToolCall)), "they can be sent"
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=5)
@given(cuts=st.lists(st.integers(0, 600), max_size=8))
def test_each_example_is_read_as_it_is_meant_however_it_comes(name: str, cuts: list[int]) -> None:
    example = BY_NAME[name]
    expected = example.thought, example.said, example.calls
    assert found_in(example, list(example.text)) == expected
    places = sorted({0, len(example.text), *(cut % (len(example.text) + 1) for cut in cuts)})
    pieces = [example.text[begin:end] for begin, end in pairwise(places)]
    assert found_in(example, pieces) == expected


@given(data=st.data())
def test_a_text_of_any_marks_is_read_alike_however_it_comes(data: st.DataObject) -> None:
    """Nothing is lost of a text without calls but the marks that are no text, and nothing raises."""
    form = data.draw(st.sampled_from(CALL_FORMS))
    reasoning = data.draw(st.sampled_from(REASONING_FORMS))
    words = [*MARK.findall(form.texts), *MARK.findall(reasoning.texts), *form.opens, reasoning.answers]
    words += ["get_weather", "f", "{", "}", "[", "]", '"', " ", "\n", "<", "name", "functions.", ":0", "(a=1)", "x"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    example = Example(form.names[0], text, [], reasoning=reasoning.names[0], is_inside=data.draw(st.booleans()))
    assert found_in(example, list(text)) == found_in(example, [text])


def test_every_row_has_an_example_and_every_name_one_row() -> None:
    shown = {id(form_named(example.calls_in, CALL_FORMS)) for example in EXAMPLES if example.calls}
    assert shown == set(map(id, CALL_FORMS))
    thought = {id(form_named(each.reasoning, REASONING_FORMS)) for each in EXAMPLES if each.thought}
    assert thought == set(map(id, REASONING_FORMS))
    for forms in (CALL_FORMS, REASONING_FORMS):
        names = [name for form in forms for name in form.names]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("half", ['<tool_call>{"a": ', "<tool_call>{ "])
def test_a_long_text_of_marks_is_read_once_and_not_once_a_mark(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that went back to each mark would look at each character a thousand times."""
    looked_at, end_in = 0, _Brackets.end_in

    def counted(brackets: _Brackets, text: str) -> int:
        nonlocal looked_at
        looked_at -= brackets.seen
        end = end_in(brackets, text)
        looked_at += brackets.seen
        return end

    monkeypatch.setattr(_Brackets, "end_in", counted)
    example = Example("hermes", half * 1000, [])
    assert found_in(example, [example.text]) == ("", example.text, [])
    assert 0 < looked_at <= len(example.text)


@pytest.mark.parametrize("quoted", [QWEN_XML, QWEN_XML.replace("get_weather", "NAME"), "</function>\n</tool_call>"])
def test_a_call_that_is_cut_where_its_text_quotes_one_is_none(quoted: str) -> None:
    """A model that has ended by itself has left out a mark, or has begun anew."""
    text = QWEN_XML.partition("Oslo")[0] + quoted
    for is_cut in (False, True):
        reader = AnswerReader(form_named("qwen3_coder", CALL_FORMS), FUNCTIONS)
        parts = [*reader.push(text), *reader.finish(is_cut=is_cut)]
        assert any(isinstance(part, ToolCall) for part in parts) != is_cut


@pytest.mark.parametrize(
    "half",
    [
        "<function=get_weather><parameter=city><function=f><parameter=a></parameter>",
        "<function=get_weather><parameter=city><function=NAME><parameter=a></parameter>",
        "<function=NAME><parameter=a></parameter>.",
        "<function=NAME><parameter=a>",
    ],
)
def test_calls_that_are_given_up_within_values_are_read_a_few_times_each(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = noted(monkeypatch, AnswerReader, "_search")
    text = "<function=get_weather><parameter=city>" + half * 300
    found_in(Example("qwen3_coder", text, []), [text])
    assert 300 < len(searches) < 300 * 30


def test_an_escape_outside_of_a_text_begins_none() -> None:
    """The end of each of many such texts would be looked for up to the end of all."""
    assert [found[0] for found in _WORDS.finditer(r"\'''x'")] == [r"\'", "''"]


def test_a_schema_of_many_keys_makes_no_long_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock would be held for seconds while it is compiled."""
    longest, compiled = 0, re.compile

    def measured(pattern: str) -> Any:
        nonlocal longest
        longest = max(longest, len(pattern))
        return compiled(pattern)

    monkeypatch.setattr("rocm_serve.server.call_reader.re.compile", measured)
    properties: dict[str, Any] = {key: {} for key in ("k" * 9000, *(f"k{number}" for number in range(9000)))}
    assert found_in(Example("glm45", GLM, [], functions={"get_weather": {"properties": properties}}), [GLM])[2] == OSLO
    assert 0 < longest < 2000


@pytest.mark.parametrize(
    "written",
    [
        '{"x": 12345678901234567890, "y": 0.12345678901234567890, "z": [1e308, -0.0, 1E+2]}',
        '{ "x":1 ,\n"y" : "\\u00e9 é" }',
        '{"x": ' + "9" * 4300 + "}",
        "{}",
    ],
)
def test_arguments_stay_as_they_are_written(written: str) -> None:
    """Numbers above all: Python would write other ones."""
    reader = AnswerReader(form_named("hermes", CALL_FORMS), {"7": {}})
    text = f'<tool_call>{{"id": 1.5 , "arguments":{written}\n,"name": "7" }}</tool_call>'
    (call,) = reader.push(text) + reader.finish()
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("7", written)


def test_marks_of_calls_end_no_thought_where_there_are_no_calls() -> None:
    reader = AnswerReader(None, {}, form_named("glm45", REASONING_FORMS))
    assert reader.push("<think>A <tool_call> it is.</think>Yes.") == [Thought("A <tool_call> it is."), "Yes."]


def test_one_call_is_read_where_several_are_not_wanted() -> None:
    call = '{"name": "f", "arguments": {}}'
    for name, text in (
        ("mistral_v3", f"[TOOL_CALLS] [{call}, {call}]"),
        ("hermes", f"<tool_call>{call}</tool_call>" * 2),
    ):
        reader = AnswerReader(form_named(name, CALL_FORMS), FUNCTIONS, several=False)
        (found,) = reader.push(text) + reader.finish()
        assert isinstance(found, ToolCall)


def test_text_is_reported_as_soon_as_it_can_be_no_call() -> None:
    reader = AnswerReader(form_named("hermes", CALL_FORMS), FUNCTIONS)
    assert reader.push("It is 3 < 4") == ["It is 3 < 4"]
    assert reader.push(" <tool") == []
    assert reader.push("box>") == [" <toolbox>"]
    bare = AnswerReader(form_named("llama3_json", CALL_FORMS), FUNCTIONS)
    assert [bare.push(piece) for piece in ("It", " {")] == [["It"], [" {"]]


# Templates write an earlier call as in these lines of the published ones.
CALL = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}" + CALL + "{% endfor %}"
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}PARAMETER{% endfor %}"
WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function={{ c.function.name }}>\n"
    + ARGUMENTS.replace("PARAMETER", "<parameter={{ k }}>\n{{ v }}\n</parameter>\n") + "</function>\n</tool_call>",
    "glm45": "<tool_call>{{ c.function.name }}\n"
    + ARGUMENTS.replace("PARAMETER", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n") + "</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
    + ARGUMENTS.replace("PARAMETER", '<parameter name="{{ k }}">{{ v }}</parameter>\n')
    + "</invoke>\n</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name"
    " + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + "
    "c.function.arguments + '<｜tool▁call▁end｜>' }}",
    "mistral": "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
    "mistral_v3": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]',
    "openai": "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>",
    "pythonic": "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]",
    "lfm2": "<|tool_call_start|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }}{% endfor %})]<|tool_call_end|>",
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_the_form_is_found_by_the_call_that_a_template_writes(name: str) -> None:
    assert form_of(ChatTemplate(TEMPLATE.replace("CALL", WRITTEN[name]))) is form_named(name, CALL_FORMS)


# The length of this server's own ids.
GIVEN = ("call_0123456789abcdef01234567", "123456789", "call_0123456789abcdef01234567")
HASHED = sha256(GIVEN[0].encode()).hexdigest()[:9]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("kimi_k2", ["functions.f:0", "functions.f:1", "functions.f:2"]),
        ("mistral", [HASHED, "123456789", HASHED]),
        ("deepseek_v3", list(GIVEN)),
    ],
)
def test_earlier_calls_have_ids_that_the_models_template_takes(name: str, ids: list[str]) -> None:
    """Templates of Mistral's models refuse this server's own ids, and Kimi's write the id in place of the name."""
    written = CALL.replace("CALL", WRITTEN[name]) + "{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}"
    tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    own = Tokenizer(of_bytes(), None, ChatTemplate(f"{tools}{{% for m in messages %}}{written}{{% endfor %}}"))
    model = ServedModel("m", own, RequestLimits(500, 500, 300, own), ServerOptions())
    said = []
    for call_id in GIVEN:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        asked = {"role": "assistant", "tool_calls": [call]}
        said += [asked, {"role": "tool", "tool_call_id": call_id, "content": "7"}]
    messages = model.messages([Message.model_validate(each) for each in said], own)
    assert [each["tool_calls"][0]["id"] for each in messages[::2]] == ids
    assert [each["tool_call_id"] for each in messages[1::2]] == ids
    text = own.conversation(messages)
    assert [place for each in ids if (place := text.find(f" {each}")) < 0] == []


def test_a_template_that_no_form_fits_or_that_ignores_tools_is_refused() -> None:
    assert form_of(ChatTemplate(TEMPLATES["hermes"])) is form_named("hermes", CALL_FORMS)
    assert form_of(ChatTemplate(TEMPLATES["llama"])) is form_named("llama3_json", CALL_FORMS)
    with pytest.raises(BadRequest, match="a format that this server does not read"):
        form_of(ChatTemplate(TEMPLATES["other"]))
    require_tools(ChatTemplate(TEMPLATES["other"]))
    described = (
        "{% for p in tools[0].function.parameters.properties.values() %}{{ p.type + p.description }}{% endfor %}"
    )
    require_tools(ChatTemplate(described + TEMPLATES["other"]))  # as Command R wants it
    for template, says in (
        (TEMPLATES["none"], "ignores tools"),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", r"accepts no tools \(.*no tools here"),
    ):
        with pytest.raises(BadRequest, match=says):
            require_tools(ChatTemplate(template))
    with pytest.raises(BadRequest, match=r"cannot write a function call \(.*no calls here"):
        form_of(ChatTemplate(TEMPLATE.replace("CALL", "{{ raise_exception('no calls here') }}")))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("{{ c.split('</think>') }}", "think"),
        ("</think> <|tool_calls_section_begin|>", "kimi_k2"),
        ("</think> <tool_call>\n<function={{ c.name }}>", "qwen3"),
        ("</think> <tool_call>{{ c.name }}<arg_key>", "glm45"),
        ("[THINK]{{ m.thinking }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss"),
    ],
)
def test_reasoning_is_found_by_the_marks_in_a_template(written: str, name: str) -> None:
    assert reasoning_of(ChatTemplate(written)) is form_named(name, REASONING_FORMS)


def test_a_model_whose_template_has_no_reasoning_writes_none() -> None:
    assert reasoning_of(ChatTemplate(TEMPLATE)) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_parser": "qwen3_code"}, r"tool_parser is 'qwen3_code', .*did you mean qwen3_coder"),
        ({"reasoning_parser": "deepseekr1"}, r"reasoning_parser is 'deepseekr1', .*did you mean deepseek_r1"),
        ({"tool_parser": "#"}, "choose auto, none, deepseek_v3"),
    ],
)
def test_a_form_that_there_is_not_is_refused_with_the_nearest(options: dict[str, str], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        ServerOptions(**options)  # type: ignore[arg-type]
    assert ServerOptions(tool_parser="none", reasoning_parser="qwen3").tool_parser == "none"

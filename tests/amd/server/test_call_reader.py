"""Calls are found in a text however it is cut into pieces, and all that is no call stays text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from rocm_attn.errors import BadRequest
from rocm_serve.server.call_forms import form_of, require_tools
from rocm_serve.server.call_reader import AnswerReader, ToolCall
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.written_forms import CALL_FORMS, form_named
from tests.amd.server.tool_models import TEMPLATES

HERMES, LLAMA = FORMS = [form_named(name, CALL_FORMS) for name in ("hermes", "llama3_json")]
FUNCTIONS: dict[str, dict[str, object]] = {"a": {}, "get-time": {}}
A = '<tool_call>\n{"name": "a", "arguments": {"x": [1, {}]}}\n</tool_call>'


def read(form: int, pieces: Iterable[str]) -> tuple[str, list[tuple[str, object]]]:
    """Text, and calls."""
    reader = AnswerReader(FORMS[form], FUNCTIONS)
    found = [each for piece in pieces for each in reader.push(piece)] + reader.finish()
    calls = [(each.name, json.loads(each.arguments)) for each in found if isinstance(each, ToolCall)]
    return "".join(each for each in found if isinstance(each, str)), calls


CALLED = ("a", {"x": [1, {}]})
CASES: tuple[tuple[int, str, str, list[tuple[str, object]]], ...] = (
    (0, A, "", [CALLED]),
    (0, f" \n{A}", "", [CALLED]),
    (0, f"so: {A}\n{A} end ", "so: end", [CALLED, CALLED]),
    (0, A.removesuffix("</tool_call>"), "", [CALLED]),
    (0, A + "</tool", "</tool", [CALLED]),
    (0, '<tool_call>{"arguments": {"t": "}</tool_call>\\"{"}, "name": "a"}</tool_call>', "",
     [("a", {"t": '}</tool_call>"{'})]),
    (0, '<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
    (0, '<tool_call>{"name": "a", "arguments": {"h": "\\ud800 é"}}', "", [("a", {"h": "\ud800 é"})]),
    *((0, text, text, []) for text in (
        "", " ", "plain < <tool <tool_cal text ", "<tool_call>", "<tool_call> ", "<tool_call>a</tool_call>",
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>', '<tool_call>{"name": "a", "arguments": [1]}',
        '<tool_call>{"name": "a", "arguments": NaN}', '<tool_call>{"name": "a", "arguments": {"x": NaN}}',
        "<tool_call>{", '<tool_call>{"name": "a", "arguments": {"x": -Infinity}}',
        '<tool_call>{"name": "a", "arguments": {"x": 1e999}}', '<tool_call>{"name": "a", "arguments": {"x": [-1e400]}}',
        f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 4301}}}}}',
        '<tool_call>{"name": ["a"]}</tool_call>', '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "a" "b"}</tool_call>',
    )),
    (0, f"<tool_call>no</tool_call>{A}", "<tool_call>no</tool_call>", [CALLED]),
    (1, '{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
    (1, '\n {"name": "a", "parameters": {"x": "{"}} \n', "", [("a", {"x": "{"})]),
    (1, ' <|python_tag|>{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
    (1, '<|python_tag|> \n{"name": "a", "parameters": {}} and', "and", [("a", {})]),
    (1, '{"name": "a", "parameters": {}} and a text', "and a text", [("a", {})]),
    *((1, text, text, []) for text in (
        "<|python_tag|>", "<|python_tag|> ", "<|python_tag|>print(1)", ' <|python_tag|> {"name": "b"}', "<|pyt",
        "", " ", "<|pot", '{"name": "b", "parameters": {}} ', 'say {"name": "a", "parameters": {}}',
        '{"name": "a", "para',
        " [1]", '{"x"} {"name": "a", "parameters": {}}',
    )),
)  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES, ids=str)
def test_calls_are_found_however_the_text_comes(
    form: int, text: str, said: str, calls: list[tuple[str, object]]
) -> None:
    expected = read(form, [text])
    assert (" ".join(expected[0].split()) if calls else expected[0], expected[1]) == (said, calls)
    chooser = random.Random(text)
    cuts = [sorted(chooser.sample(range(len(text) + 1), min(3, len(text)))) for _ in range(20)]
    for cut in [list(range(len(text))), *cuts]:
        pieces = [text[begin:end] for begin, end in zip([0, *cut], [*cut, len(text)], strict=True)]
        assert read(form, pieces) == expected, pieces


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
    reader = AnswerReader(HERMES, {"7": {}})
    text = f'<tool_call>{{"id": 1.5 , "arguments":{written}\n,"name": "7" }}</tool_call>'
    (call,) = reader.push(text) + reader.finish()
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("7", written)


def test_text_is_reported_as_soon_as_it_can_be_no_call() -> None:
    reader = AnswerReader(HERMES, FUNCTIONS)
    assert reader.push("It is 3 < 4") == ["It is 3 < 4"]
    assert reader.push(" <tool") == []
    assert reader.push("box>") == [" <toolbox>"]
    bare = AnswerReader(LLAMA, FUNCTIONS)
    assert [bare.push(piece) for piece in ("It", " {")] == [["It"], [" {"]]


def test_the_form_is_the_one_that_the_template_writes() -> None:
    assert form_of(ChatTemplate(TEMPLATES["hermes"])) == HERMES
    assert form_of(ChatTemplate(TEMPLATES["llama"])) == LLAMA
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

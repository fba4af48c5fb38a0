"""Calls and reasoning in the form of each family of models: examples as the models' publishers write them.

Whatever the pieces are in which a text comes, the same is found. The sources are those of the table's rows.
"""

import json
import re
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rocm_attn.errors import BadRequest, BadSetting
from rocm_serve.limits import RequestLimits
from rocm_serve.server.call_arguments import from_python
from rocm_serve.server.call_forms import form_of, reasoning_of, require_tools
from rocm_serve.server.call_grammar import calls_only, lead_of
from rocm_serve.server.call_reader import AnswerReader, Thought, ToolCall, _Brackets
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.schema import Message
from rocm_serve.server.served_model import ServedModel
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.constraint import Constraint, compiled_of, tokens_of
from rocm_serve.text.constraint_trial import TrialProcess, TrialTokens
from rocm_serve.text.tokenizer import Tokenizer
from rocm_serve.text.written_forms import CALL_FORMS, MARK, REASONING_FORMS, form_named
from tests.amd.runner.small_tokenizers import of_bytes
from tests.amd.server.tool_models import TEMPLATES

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["C", "F"]},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/Hour"}},
        "rain": {"type": ["boolean", "string"]},
    },
    "required": ["city"],
    "$defs": {"Hour": {"type": "integer"}, "Word": {"$ref": "#/$defs/Kept"}, "Kept": {"enum": ["7", "x"]}},
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "get-time": {"type": "object", "properties": {}}, "f": {}}
Calls = list[tuple[str, dict[str, Any]]]
OSLO: Calls = [("get_weather", {"city": "Oslo", "days": 3})]
BOTH: Calls = [*OSLO, ("get-time", {})]


@dataclass(frozen=True, slots=True)
class Example:
    """A text of a model, and what is in it. is_inside: whether the prompt ends inside of reasoning"""

    calls_in: str
    text: str
    calls: Calls
    said: str = ""
    thought: str = ""
    reasoning: str = ""
    is_inside: bool = False
    functions: dict[str, Any] = field(default_factory=lambda: FUNCTIONS)


QWEN_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get-time">\n</invoke>\n</minimax:tool_call>'
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get-time:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK_3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo", "days": 3}\n'
    "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get-time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
OSS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}'
OSS_THOUGHT = "<|channel|>analysis<|message|>They ask of Oslo.<|end|><|start|>assistant"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
F = '<tool_call>\n{"name": "f", "arguments": {"x": [1, {}]}}\n</tool_call>'
CALLED: Calls = [("f", {"x": [1, {}]})]
EXAMPLES = [
    Example("hermes", HERMES, OSLO),
    Example("hermes", f"{HERMES}\n{HERMES}", OSLO * 2),
    Example("hermes", f"<think>\nHm.\n</think>\n\nI look.\n{HERMES}", OSLO, "I look.", "Hm.", "qwen3"),
    Example("hermes", "Is it?\n</think>\n\nIt is <think> ing.", [], "It is <think> ing.", "Is it?", "deepseek_r1",
            True),
    Example("hermes", "<think>\nI see", [], "", "I see", "deepseek_r1", is_inside=True),
    Example("hermes", "<think>\n\n</think>\n\nYes.", [], "Yes.", "", "qwen3"),
    Example("hermes", "It writes <think> first </think>.", [], "It writes <think> first </think>.", "", "qwen3"),
    Example("qwen3_coder", QWEN_XML, OSLO),
    Example("qwen3_coder", f"Well.\n\n{QWEN_XML}\n{QWEN_XML}", OSLO * 2, "Well."),
    Example("qwen3_coder", "<tool_call>\n<function=get-time>\n</function>\n</tool_call>", BOTH[1:]),
    Example("qwen3_coder", "Well.\n" + QWEN_XML.removeprefix("<tool_call>\n"), OSLO, "Well."),
    Example("qwen3_coder", f"<think>\nA <tool_call> it is.\n{QWEN_XML}", OSLO, "", "A <tool_call> it is.", "qwen3"),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n3\nlines\n\n</parameter>\n<parameter=hours>\n[1, 2]\n"
        "</parameter>\n<parameter=rain>\nTRUE\n</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "3\nlines\n", "hours": [1, 2], "rain": True})],
    ),
    # A model may leave out the mark after a value, which ends where another parameter or the next call begins. Other
    # marks in it are text.
    *(
        Example(name, (text * 2).replace(closes, "", 1), OSLO * 2)
        for name, text, closes in (
            ("qwen3_coder", QWEN_XML, "</parameter>\n"), ("glm45", GLM, "</arg_value>"),
        )
    ),
    Example("qwen3_coder", (QWEN_XML * 2).replace("3\n</parameter>", "3", 1), OSLO * 2),
    Example("minimax_m2", MINIMAX.replace("Oslo</parameter>", "Oslo"), BOTH, functions={**FUNCTIONS}),
    Example("minimax_m2", MINIMAX.replace("3</parameter>", "3"), BOTH, functions={**FUNCTIONS}),
    Example("qwen3_coder", QWEN_XML.replace("Oslo", "</function>\n<parameter=x>"),
            [("get_weather", {"city": "</function>\n<parameter=x>", "days": 3})]),
    # And the mark after a call.
    *(
        Example(name, text.replace(closes, "", 1), calls, functions={**FUNCTIONS})
        for name, text, closes, calls in (
            ("qwen3_coder", QWEN_XML * 2, "</function>\n</tool_call>", OSLO * 2),
            ("glm45", f"{GLM}\n{GLM}", "</tool_call>", OSLO * 2), ("minimax_m2", MINIMAX, "</invoke>\n", BOTH),
            ("kimi_k2", KIMI, "<|tool_call_end|>", BOTH), ("deepseek_v31", DEEPSEEK_31, "<｜tool▁call▁end｜>", BOTH),
        )
    ),
    *(
        Example(name, text.replace(closes, ""), calls, functions={**FUNCTIONS})
        for name, text, closes, calls in (
            ("qwen3_coder", QWEN_XML, "</function>\n", OSLO),
            ("kimi_k2", KIMI, "<|tool_call_end|>", BOTH), ("deepseek_v31", DEEPSEEK_31, "<｜tool▁call▁end｜>", BOTH),
            ("minimax_m2", MINIMAX.replace('<invoke name="get-time">\n</invoke>\n', ""), "</invoke>\n", OSLO),
        )
    ),
    Example("glm45", GLM.replace("Oslo", "<arg_key>days</arg_key>"),
            [("get_weather", {"city": "<arg_key>days</arg_key>", "days": 3})]),
    # The text may end there too.
    Example("glm45", GLM.replace("3</arg_value>", "3"), OSLO, functions={**FUNCTIONS}),
    # A parameter that the call has already is text, unless the model has begun anew.
    *(
        Example(name, text.replace("Oslo", f"{mark} it is"), [("get_weather", {"city": f"{mark} it is", "days": 3})])
        for name, text, mark in (
            ("qwen3_coder", QWEN_XML, "<parameter=city>"), ("minimax_m2", MINIMAX, '<parameter name="city">'),
        )
        for text in [text.partition('<invoke name="get-time">')[0]]
    ),
    *(
        Example("qwen3_coder", f"{half} it is.\n{call}", calls, f"{half} it is.")
        for half in ("<tool_call>\n<function=get_weather><parameter=city>", "A <function=get_weather><parameter=city>")
        for call, calls in (
            (QWEN_XML, OSLO), ("<tool_call>\n<function=get-time>\n</function>\n</tool_call>", BOTH[1:]),
        )
    ),
    # A value may have a call or the end of one in it, if its own mark comes.
    *(
        Example(name, text.replace("Oslo", f"{quoted}."), [("get_weather", {"city": f"{quoted}.", "days": 3})])
        for name, text, quoted in (
            ("qwen3_coder", QWEN_XML, "<tool_call>\n<function=get-time>\n</function>\n</tool_call>"),
            ("qwen3_coder", QWEN_XML, "</function>\n</tool_call>"),
            ("minimax_m2", MINIMAX, '<invoke name="get-time">\n</invoke>\n</minimax:tool_call>'),
        )
        for text in [text.partition('<invoke name="get-time">')[0]]
    ),
    # Lists as Python writes them, where one is allowed; and a text that is none.
    *(
        Example("glm45", GLM.replace("days", "hours").replace(">3<", f">{written}<"),
                [("get_weather", {"city": "Oslo", "hours": hours})])
        for written, hours in (("['a', None, {'b': 1.5}]", ["a", None, {"b": 1.5}]), ("[a, b]", "[a, b]"))
    ),
    Example("glm45", GLM.replace("days", "a").replace(">3<", '>["Oslo", True]<'),
            [("get_weather", {"city": "Oslo", "a": ["Oslo", True]})],
            functions={"get_weather": {"properties": {"a": {"type": ["boolean", "array"]}}}}),
    # A model of a function may be named in definitions, or refer to itself.
    *(
        Example("glm45", GLM.replace("city", "a").replace("Oslo", "{'b': None}").replace("days", "b"),
                [("get_weather", {"a": a, "b": 3})],
                functions={"get_weather": {"properties": {"a": {"$ref": reference}}, "$defs": {
                    "A": {"type": "object"}, "B": {"$ref": "#/$defs/B"},
                }}})
        for reference, a in (
            ("#/$defs/A", {"b": None}), ("#/$defs/B", "{'b': None}"), ("#/$defs/C", "{'b': None}"),
            ("#/properties/a/title", "{'b': None}"), ("A", "{'b': None}"),
        )
    ),
    Example("glm45", GLM.replace("Oslo", "['a']"), [("get_weather", {"city": "['a']", "days": 3})]),
    # A text that looks like a number is one where the schema allows one.
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n" + "".join(f"<parameter={key}>\n3\n</parameter>\n" for key in "abcdef")
        + "</function>\n</tool_call>",
        [("f", {"a": "3", "b": "3", "c": 3, "d": "3", "e": 3, "f": 3})],
        functions={
            "f": {
                "properties": {
                    "a": {"type": "string"},
                    "b": {"enum": ["C", "3"]},
                    "c": {"type": ["number", "string"]},
                    "d": {"type": ["boolean", "string"]},
                    "e": {"enum": "no list"},
                }
            }
        },
    ),
    Example("qwen3_coder", QWEN_XML, OSLO, functions={"get_weather": {"properties": ["no object"]}}),
    Example("glm45", f"\n<think>Hm.</think>\nI look.\n{GLM}", OSLO, "I look.", "Hm.", "glm45"),
    Example("glm45", f"<think>Hm.\n{GLM}", OSLO, "", "Hm.", "glm45"),
    # A thought about calls goes on.
    Example("glm45", f"<think>A <tool_call> is.</think>I look.{GLM}", OSLO, "I look.", "A <tool_call> is.", "glm45"),
    *(
        Example("kimi_k2", f"{half}</think>I look.", [], "I look.", half, "kimi_k2", is_inside=True)
        for half in [KIMI.partition("Oslo")[0]]
    ),
    *(
        Example("glm45", f"{half}</think>I look.{GLM}", OSLO, "I look.", half, "glm45", is_inside=True)
        for half in [GLM.partition("Oslo")[0] + "is how."]
    ),
    Example("glm45", f"{GLM}<think>A <tool_call> is.</think>So.", OSLO, "So.", "A <tool_call> is.", "glm45"),
    Example("glm45", f"{GLM}\n<tool_call>get-time\n</tool_call>", BOTH),
    Example("glm47", GLM.replace("\n", "") + "<tool_call>get-time</tool_call>", BOTH, functions={**FUNCTIONS}),
    Example("minimax_m2", f"Hm.\n</think>\n\n{MINIMAX}", BOTH, "", "Hm.", "minimax_m2", is_inside=True),
    Example(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">["x", 1.50]</parameter>\n'
        '<parameter name="b">&lt;\nb</parameter>\n</invoke>\n</minimax:tool_call>',
        [("f", {"a": ["x", 1.5], "b": "&lt;\nb"})],
    ),
    Example("kimi_k2", KIMI, BOTH),
    Example("kimi_k2", KIMI.replace("functions.get_", " get_").replace("functions", "\nfunctions"), BOTH,
            functions={**FUNCTIONS}),
    Example("kimi_k2", f"<think>Hm. {KIMI}", BOTH, "", "Hm.", "kimi_k2"),
    Example("kimi_k2", f"<think>Hm.</think>I look.{KIMI}", BOTH, "I look.", "Hm.", "kimi_k2"),
    Example("deepseek_v3", DEEPSEEK_3, BOTH),
    Example("deepseek_v31", f"I look.{DEEPSEEK_31}", BOTH, "I look."),
    Example("deepseek_v32", f"Hm.</think>I look.\n\n{DSML}", BOTH, "I look.", "Hm.", "deepseek_v3", is_inside=True),
    Example("deepseek_v32", DSML.replace('string="false"', 'string="true"'),
            [("get_weather", {"city": "Oslo", "days": "3"}), ("get-time", {})]),
    # A text that the form calls JSON is a JSON text.
    *(
        Example("deepseek_v32", DSML.replace('"true">Oslo', f'"false">{written}'), BOTH, functions={**FUNCTIONS})
        for written in ('"Oslo"', "Oslo")
    ),
    Example("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]get-time[ARGS]{}', BOTH),
    Example("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo", "days": 3}', OSLO),
    # A call that is begun and given up is text, and takes nothing of the next one.
    *(
        Example(name, f"{half} is one.{call}", OSLO, f"{half} is one.", functions={**FUNCTIONS})
        for name, half, call in (
            ("mistral", "[TOOL_CALLS]f", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}'),
            ("glm45", "<tool_call>f<arg_key>", GLM),
            ("minimax_m2", '<invoke name="f"><parameter name="', MINIMAX.partition('<invoke name="get-time">')[0]),
            ("kimi_k2", "<|tool_call_begin|>functions.f:", KIMI.partition("<|tool_call_begin|>functions.get-time")[0]),
            ("openai", "to=functions.f", OSS),
        )
    ),
    Example("mistral", '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get-time[ARGS]{}', BOTH[1:], "I look.", "Hm.", "mistral"),
    Example(
        "mistral_v3",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}, "id": "a1b2c3d4e"}, '
        '{"name": "get-time", "arguments": {}}]',
        BOTH,
    ),
    Example("openai", OSS, OSLO),
    Example("openai", f"{OSS_THOUGHT}{OSS}<|call|>", OSLO, "", "They ask of Oslo.", "openai_gptoss"),
    Example(
        "openai",
        f'{OSS_THOUGHT} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Oslo", "days": 3}}',
        OSLO,
        "",
        "They ask of Oslo.",
        "gpt-oss",
    ),
    Example(
        "openai",
        f"{OSS_THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{OSS}",
        OSLO,
        "I look.",
        "They ask of Oslo.",
        "gpt-oss",
    ),
    *(
        Example("openai", f"{OSS_THOUGHT}<|channel|>final{of}<|message|>[7]", [], "[7]", "They ask of Oslo.", "gpt-oss")
        for of in (" <|constrain|>json", "<|constrain|>json", " json")
    ),
    Example("openai", f"{OSS_THOUGHT}<|channel|>final<|message|>Cold.<|return|>", [], "Cold.", "They ask of Oslo.",
            "gpt-oss"),
    Example("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}', OSLO),
    Example("llama3_json", '<|python_tag|>{"name": "get-time", "parameters": {}}', BOTH[1:]),
    Example("pythonic", "[get_weather(city='Oslo', days=3), f(a=[1, {'b': None}], c=-1.5, d=true)]",
            [*OSLO, ("f", {"a": [1, {"b": None}], "c": -1.5, "d": True})]),
    Example("pythonic", '[f(h="\\ud800 é")]', [("f", {"h": "\ud800 é"})]),
    Example("pythonic", r'[f(a="\d")]', [("f", {"a": r"\d"})]),  # no escape to Python, of which it warns
    Example("pythonic", """[f(from="in=1", class = 'is=', not_=[{'a': 'or=\\''}], in=-1)]""",
            [("f", {"from": "in=1", "class": "is=", "not_": [{"a": "or='"}], "in": -1})]),
    Example("pythonic", """[f(a='''an 'in = 1' is''', in=2)]""", [("f", {"a": "an 'in = 1' is", "in": 2})]),
    Example("lfm2", "I look.<|tool_call_start|>[get_weather(city='Oslo', days=3)]<|tool_call_end|>It rains.", OSLO,
            "I look.It rains."),
    Example("llama4_pythonic", '<|python_start|>[get_weather(city="Os]lo", days=3)]<|python_end|>',
            [("get_weather", {"city": "Os]lo", "days": 3})]),
    # The edges of a call as JSON.
    Example("hermes", f" \n{F}", CALLED),
    Example("hermes", f"so: {F}\n{F} end ", CALLED * 2, "so: end"),
    Example("hermes", F.removesuffix("</tool_call>"), CALLED),
    Example("hermes", F + "</tool", CALLED, "</tool"),
    Example("hermes", '<tool_call>{"arguments": {"t": "}</tool_call>\\"{"}, "name": "f"}</tool_call>',
            [("f", {"t": '}</tool_call>"{'})]),
    Example("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    # Models confuse the keys of arguments, as vLLM's and SGLang's readers know.
    Example("llama3_json", '{"name": "f", "arguments": {"x": [1, {}]}}', CALLED),
    Example("hermes", F.replace("arguments", "parameters"), CALLED),
    Example("hermes", '<tool_call>{"name": "f", "arguments": {"h": "\\ud800 é"}}', [("f", {"h": "\ud800 é"})]),
    # Some write nothing for no arguments, or JSON within JSON.
    *(Example("hermes", f'<tool_call>{{"name": "f", "arguments": {none}}}', [("f", {})]) for none in ('""', "null")),
    Example("hermes", r'<tool_call>{"name": "f", "arguments": "{\"h\": \"\ud800 é\"}"}', [("f", {"h": "\ud800 é"})]),
    Example("hermes", f"<tool_call>no</tool_call>{F}", CALLED, "<tool_call>no</tool_call>"),
    Example("llama3_json", '\n {"name": "f", "parameters": {"x": "{"}} \n', [("f", {"x": "{"})]),
    Example("llama3_json", '<|python_tag|> \n{"name": "f", "parameters": {}} and', [("f", {})], "and"),
    Example("llama3_json", '{"name": "f", "parameters": {}} and a text', [("f", {})], "and a text"),
    Example("llama3_json", '{"name": "f", "parameters": {}}; and {', [("f", {})], "and {"),
    Example("llama3_json", '{"name": "f", "parameters": {}}, and {', [("f", {})], ", and {"),
    Example("llama3_json", '{"name": "f", "parameters": {}}\n, and {', [("f", {})], ", and {"),
    Example("llama3_json", '{"name": "f", "parameters": {}}; {"x"}', [("f", {})], '{"x"}'),
    Example("llama3_json", '{"name": "f"}, {"name": "get-time"}; ', [("f", {}), *BOTH[1:]]),
    Example("llama3_json", '{"name": "f"}; {"name": "get-time"}\n{"name": "f"}', [("f", {}), *BOTH[1:], ("f", {})]),
    # No calls: all of it stays text.
    *(
        Example(name, text, [], text)
        for name, text in (
            *(("hermes", text) for text in (
                "", " ", "plain < <tool <tool_cal text ", "<tool_call>", "<tool_call> ", "<tool_call>a</tool_call>",
                '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
                '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": "[1]"}',
                '<tool_call>{"name": "f", "arguments": "Oslo"}',
                '<tool_call>{"name": "f", "arguments": NaN}', '<tool_call>{"name": "f", "arguments": {"x": NaN}}',
                "<tool_call>{", '<tool_call>{"name": "f", "arguments": {"x": -Infinity}}',
                '<tool_call>{"name": "f", "arguments": {"x": [-1e400]}}',
                f'<tool_call>{{"name": "f", "arguments": {{"x": {"9" * 4301}}}}}',
                '<tool_call>{"name": ["f"]}</tool_call>', '<tool_call>{"name": 7}</tool_call>',
                '<tool_call>{"name": "f" "b"}</tool_call>', '<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>',
            )),
            *(("llama3_json", text) for text in (
                "<|python_tag|>", "<|python_tag|> ", "<|python_tag|>print(1)", ' <|python_tag|> {"name": "b"}', "<|pyt",
                "", " ", "<|pot", '{"name": "b", "parameters": {}} ', 'say {"name": "f", "parameters": {}}',
                '{"name": "f", "para', " [1]", '{"x"} {"name": "f", "parameters": {}}',
            )),
            ("qwen3_coder", "<tool_call>\n<function=launch>\n</function>\n</tool_call>"),
            ("qwen3_coder", QWEN_XML.removesuffix("</function>\n</tool_call>")),
            ("qwen3_coder", "It writes <function=launch> <function=f> <function=f> and <function="),
            ("qwen3_coder", QWEN_XML.partition("Oslo")[0]),
            ("glm45", "<tool_call>get_weather is a name"),
            ("glm45", GLM.removesuffix("</tool_call>")),
            ("minimax_m2", "<minimax:tool_call>\n<invoke>"),
            ("kimi_k2", KIMI.replace('{"city"', '{"city')),
            ("deepseek_v3", DEEPSEEK_31),
            ("deepseek_v31", DEEPSEEK_3),
            ("mistral", "[TOOL_CALLS]get_weather" + "x" * 300 + "[ARGS]{}"),
            ("mistral", "[TOOL_CALLS]f" + " " * 300 + "[ARGS]{}"),
            ("mistral_v3", "[TOOL_CALLS] [7]"),
            ("openai", "It goes to=functions.launch"),
            ("pythonic", "[f(open('x'))]"),
            ("pythonic", "[f(a=open('x'))]"),
            ("pythonic", "[f(**{'a': 1})]"),
            ("pythonic", "[a.f(x=1)]"),
            ("pythonic", "[f(a=b'x')]"),
            ("pythonic", "[f(a=1e999)]"),
            ("pythonic", "[" * 400 + "]" * 400),
            ("pythonic", "[1] and [f()]"),
        )
    ),
]  # fmt: skip
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


def test_a_long_text_of_marks_is_read_once_and_not_once_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that went back to each mark would look at each character a thousand times."""
    looked_at, end_in = 0, _Brackets.end_in

    def counted(brackets: _Brackets, text: str) -> int:
        nonlocal looked_at
        looked_at += len(text) - brackets._seen
        return end_in(brackets, text)

    monkeypatch.setattr(_Brackets, "end_in", counted)
    example = Example("hermes", '<tool_call>{"a": ' * 1000, [])
    assert found_in(example, [example.text]) == ("", example.text, [])
    assert 0 < looked_at <= len(example.text)


def test_escapes_outside_of_texts_are_looked_at_once() -> None:
    began = process_time()
    assert from_python("[f(a=" + r"\'''x'" * 10000 + ")]") is None
    assert process_time() - began < 2


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


def letters(marks: tuple[str, ...] = (), *, special: bool = True) -> Tokenizer:
    """A token for each byte, and one for each of these marks and for the end."""
    backend = of_bytes()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer(backend, None, None)


def accepts(constraint: Constraint, text: str, tokenizer: Tokenizer, written_by: Tokenizer | None = None) -> bool:
    end, size = tokenizer.backend.token_to_id("<end>"), tokenizer.backend.get_vocab_size()
    assert end is not None
    matcher: Any = compiled_of(constraint, tokens_of(tokenizer.backend.to_str(), size, (end,)))
    tokens = (written_by or tokenizer).encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


# A tokenizer may have marks as tokens; files of Qwen say that those of calls and reasoning are not special.
MARKS = ("", "special", "plain")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}}
    for name in ("get_weather", "get-time")
]
REQUIRED = [
    each for each in EXAMPLES
    if each.calls in (OSLO, BOTH) and not each.said and not each.reasoning and "python" not in each.calls_in
    and "CALL_ID" not in each.text and "}, {" not in each.text and each.functions is FUNCTIONS
]  # fmt: skip


@pytest.mark.parametrize("as_tokens", MARKS)
@pytest.mark.parametrize("example", REQUIRED, ids=lambda each: each.calls_in)
def test_a_required_call_is_held_to_the_form_and_the_schema(example: Example, as_tokens: str) -> None:
    form = form_named(example.calls_in, CALL_FORMS)
    marks = tuple(dict.fromkeys(MARK.findall(form.texts))) if as_tokens else ()
    ours = letters(marks, special=as_tokens == "special")
    constraint = calls_only(form, TOOLS, ours.mark, several=True)
    text = example.text.removesuffix("<|call|>")
    assert accepts(constraint, text, ours)
    only_one = calls_only(form, TOOLS, ours.mark, several=False)
    assert accepts(only_one, text, ours) == (len(example.calls) == 1)
    assert not accepts(only_one, text + text, ours)
    assert accepts(constraint, f"{text}\n{text}", ours) == (not form.is_list and not form.is_only)
    assert not accepts(constraint, text.replace("3", '"x"'), ours)
    assert not accepts(constraint, f"Well. {text}", ours)
    assert not accepts(constraint, text.replace("get_weather", "launch"), ours)
    if as_tokens and MARK.search(text):  # letters that only look like a mark
        assert not accepts(constraint, text, ours, written_by=letters())


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("value", "described"),
    [
        ("Oslo", {"type": ["string", "null"]}),
        (None, {"type": ["string", "null"]}),
        ("a", {"enum": ["a", 1]}),
        (1, {"enum": ["a", 1]}),
        ("", {"enum": ["", "a"]}),
        ("1", {"type": "string", "enum": ["a", "1"]}),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (12, {"oneOf": [{"const": "a"}, {"type": "integer"}]}),
        ("7", {"$ref": "#/$defs/Word"}),
        ("7", {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Word"}]}),
        (7, {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/Hour"}]}),
        ([3], {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Hour"}}]}),
    ],
    ids=str,
)
def test_a_required_value_that_may_be_a_text_is_the_one_that_is_read(
    value: object, described: dict[str, Any], name: str
) -> None:
    form, schema = form_named(name, CALL_FORMS), {**WEATHER, "properties": {"a": described}, "required": ["a"]}
    written = value if isinstance(value, str) else json.dumps(value)
    parameter = form.parameter.replace("{key}", "a").replace("{value}", written)
    text = form.opens[0] + form.call.replace("{name}", "f").replace("{parameters}", parameter) + form.closes
    ours, tool = letters(), {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert accepts(calls_only(form, [tool], ours.mark, several=False), text, ours)
    reader = AnswerReader(form, {"f": schema})
    (call,) = [*reader.push(text), *reader.finish()]
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": value}


def test_calls_in_python_cannot_be_required() -> None:
    with pytest.raises(BadRequest, match="calls of the form pythonic cannot be required"):
        calls_only(form_named("pythonic", CALL_FORMS), TOOLS, letters().mark, several=True)


@pytest.mark.parametrize("form", ["qwen3_coder", "deepseek_v32"])
@pytest.mark.parametrize("wrong", [{"properties": ["a"]}, {"properties": {"a": {"type": "string"}}, "required": None}])
def test_parameters_that_are_no_schema_are_refused_where_a_call_is_required(wrong: dict[str, Any], form: str) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", **wrong}}}
    with pytest.raises(BadRequest, match="parameters of a, properties must be an object and required a list"):
        calls_only(form_named(form, CALL_FORMS), [tool], letters().mark, several=True)


@pytest.mark.parametrize("as_tokens", MARKS)
@pytest.mark.parametrize(
    "constraint",
    [Constraint.json_schema({"enum": ["ab"]}), Constraint.regex('"[a-z]+"'), Constraint.choice(['"ab"'])],
    ids=lambda each: each.kind,
)
def test_reasoning_comes_before_a_constrained_text(constraint: Constraint, as_tokens: str) -> None:
    ours = letters(("<think>", "</think>") if as_tokens else (), special=as_tokens == "special")
    form = form_named("think", REASONING_FORMS)
    inside, outside = (
        replace(constraint, lead=lead_of(form, ours.mark, is_inside=each, is_text=True)) for each in (True, False)
    )
    assert accepts(inside, 'Hm, {"a" < 3.\n</think>\n\n"ab"', ours)
    assert not accepts(inside, '"ab"', ours)
    assert accepts(outside, '<think>\nHm.</think>\n\n"ab"', ours)
    assert accepts(outside, '"ab"', ours)
    assert not accepts(outside, 'Hm.</think>\n\n"ab"', ours)
    assert not accepts(constraint, '<think>\nHm.</think>\n\n"ab"', ours)


def test_what_comes_before_a_constrained_text_is_tried_with_it() -> None:
    ours = letters()
    trial = TrialProcess(TrialTokens(ours.backend.to_str(), ours.backend.get_vocab_size()), 10)
    try:
        trial.check(Constraint.choice(["ab"]))
        with pytest.raises(BadRequest, match="the constraint cannot be used"):
            trial.check(replace(Constraint.choice(["ab"]), lead="lead: missing"))
    finally:
        trial.end()
        trial.close()


def test_gpt_oss_writes_a_constrained_text_in_its_last_channel() -> None:
    form = form_named("gpt-oss", REASONING_FORMS)
    ours = letters(("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    lead = lead_of(form, ours.mark, is_inside=False, is_text=True)
    constraint = replace(Constraint.choice(["ab"]), lead=lead)
    assert accepts(constraint, f"{OSS_THOUGHT}<|channel|>final<|message|>ab", ours)
    assert accepts(constraint, "<|channel|>final<|message|>ab", ours)
    assert not accepts(constraint, f"{OSS_THOUGHT}ab", ours)


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

"""Calls and reasoning in the form of each family of models: examples as the models' publishers write them.

The sources are those of the table's rows.
"""

from dataclasses import dataclass, field
from typing import Any

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
    # The end of a call alone is text too, and so are a value's own new lines where the form has none.
    Example("qwen3_coder", QWEN_XML.partition("\n<parameter=days>")[0].replace("Oslo", "<parameter=city> it is")
            + "\n</tool_call>", [("get_weather", {"city": "<parameter=city> it is"})]),
    Example("qwen3_coder", QWEN_XML.replace("Oslo", "</function> b"),
            [("get_weather", {"city": "</function> b", "days": 3})]),
    Example("minimax_m2", MINIMAX.replace("Oslo", "\nOslo\n"),
            [("get_weather", {"city": "\nOslo\n", "days": 3}), *BOTH[1:]]),
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
            ("qwen3_coder", QWEN_XML, "<tool_call>\n<function=get-time>\n</function>\n</tool_call>\n" * 2),
            ("qwen3_coder", QWEN_XML, "</function>\n</tool_call>"),
            ("minimax_m2", MINIMAX, '<invoke name="get-time">\n</invoke>\n</minimax:tool_call>'),
            ("qwen3_coder", QWEN_XML, f"{QWEN_XML} {QWEN_XML}"), ("minimax_m2", MINIMAX, MINIMAX), ("glm45", GLM, GLM),
            # Texts about calls have names that are no function's. Some name the marks alone.
            *(
                (name, text, said)
                for name, text in (("qwen3_coder", QWEN_XML), ("glm45", GLM), ("minimax_m2", MINIMAX))
                for call in [text.replace("get_weather", "NAME")]
                for said in (call, call.replace("city", "x").replace("days", "y"), call.partition("Oslo")[0])
            ),
        )
        for text in [text.partition('<invoke name="get-time">')[0]]
    ),
    # Its own mark is text too, where no call goes on after it.
    *(
        Example(name, text.replace("Oslo", f"a {closes} b"), [("get_weather", {"city": f"a {closes} b", "days": 3})])
        for name, text, closes in (
            ("qwen3_coder", QWEN_XML, "</parameter>"),
            ("glm45", GLM, "</arg_value>"),
            ("minimax_m2", MINIMAX.partition('<invoke name="get-time">')[0], "</parameter>"),
        )
    ),
    Example("glm45", GLM.replace("days", "hours").replace(">3<", '>["</arg_value>"]<'),
            [("get_weather", {"city": "Oslo", "hours": ["</arg_value>"]})]),
    *(
        Example("qwen3_coder", f"{half}.\n{call} A </parameter>.", BOTH[1:], f"{half}. A </parameter>.")
        for half in ["<function=get_weather><parameter=city>x</parameter> it is"]
        for call in ["<tool_call>\n<function=get-time>\n</function>\n</tool_call>"]
    ),
    *(
        Example("qwen3_coder", f"{half}\n{QWEN_XML}", OSLO, half)
        for half in [QWEN_XML.partition("\n<parameter=days>")[0] + " it </parameter>"]
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
        for half in (GLM.partition("Oslo")[0] + "is how.", "<tool_call>f<arg_key>a</arg_key><arg_value>is how.")
    ),
    # A thought that a call has ended may have its mark all the same, and a text as JSON may name it.
    Example("kimi_k2", f"<think>Hm. {KIMI}</think>I look.", BOTH, "I look.", "Hm.", "kimi_k2"),
    Example("kimi_k2", f"<think>Hm. {KIMI}</think>A </think> it is.", BOTH, "A </think> it is.", "Hm.", "kimi_k2"),
    Example("kimi_k2", f"<think>Hm. {KIMI}".replace("Oslo", "</think>"),
            [("get_weather", {"city": "</think>", "days": 3}), *BOTH[1:]], "", "Hm.", "kimi_k2"),
    Example("glm45", f"{GLM}<think>A <tool_call> is.</think>So.", OSLO, "So.", "A <tool_call> is.", "glm45"),
    Example("glm45", f"{GLM}\n<tool_call>get-time\n</tool_call>", BOTH),
    Example("glm47", GLM.replace("\n", "") + "<tool_call>get-time</tool_call>", BOTH, functions={**FUNCTIONS}),
    Example("minimax_m2", '<minimax:tool_call>\n<invoke name="f"></minimax:tool_call>', [("f", {})]),
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
            ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nIt", f"{QWEN_XML}\n"),
            ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", GLM),
            ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a", QWEN_XML),
            ("kimi_k2", "<|tool_call_begin|>functions.f:", KIMI.partition("<|tool_call_begin|>functions.get-time")[0]),
            ("openai", "to=functions.f", OSS),
            # Half an object is given up where another call begins, and not within a text.
            ("openai", OSS.partition('"Oslo"')[0], OSS),
            ("hermes", HERMES.partition('"Oslo"')[0], HERMES),
            ("mistral", "[TOOL_CALLS]f[ARGS]{", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}'),
            ("mistral_v3", '[TOOL_CALLS] [{"name": "f"',
             '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]'),
            ("lfm2", "<|tool_call_start|>[f(", "<|tool_call_start|>[get_weather(city='Oslo', days=3)]"),
            *(
                (name, text.partition('"Oslo"')[0], text.rpartition(begins)[0])
                for name, text, begins in (
                    ("kimi_k2", KIMI, "<|tool_call_begin|>"), ("deepseek_v3", DEEPSEEK_3, "\n<｜tool▁call▁begin｜>"),
                    ("deepseek_v31", DEEPSEEK_31, "<｜tool▁call▁begin｜>"),
                )
            ),
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
    Example(
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Cold.<|return|>",
        [],
        "I look.\nCold.",
        "",
        "gpt-oss",
    ),
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
                f"<tool_call>{{'name': 'f', 'arguments': {{'t': '{HERMES}'}}}}</tool_call>",
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
            *(
                ("qwen3_coder", QWEN_XML.replace("Oslo\n</parameter>", f"Oslo\n</parameter>{junk}"))
                for junk in (" it is", "\n</parameter>")
            ),
            # A value that quotes parameters with their marks does not end within them.
            *(
                (name, text.replace("Oslo", f"{quoted} is 3{closes} so"))
                for name, text, key, closes in (
                    ("qwen3_coder", QWEN_XML, "<parameter={}>", "</parameter>"),
                    ("glm45", GLM, "<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
                )
                for quoted in (key.format("days"), f"{key.format('x')}1{closes}{key.format('y')}")
            ),
            # Nor does it within the end of a call that it quotes from a parameter on.
            *(
                (name, text.replace("Oslo", f"{text.partition('get_weather')[2].replace('city', 'x')} it is"))
                for name, text in (("qwen3_coder", QWEN_XML), ("glm45", GLM))
            ),
            # A call in a value that is cut is none.
            *(
                (name, text.replace("Oslo", f"{text} it is").partition(" is")[0])
                for name, text in (("qwen3_coder", QWEN_XML), ("glm45", GLM))
            ),
            ("glm45", "<tool_call>get_weather is a name"),
            ("glm45", GLM.removesuffix("</tool_call>")),
            ("minimax_m2", "<minimax:tool_call>\n<invoke>"),
            ("minimax_m2", 'It writes <invoke name="f"></minimax:tool_call>'),
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

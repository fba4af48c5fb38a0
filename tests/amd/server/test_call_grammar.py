"""Required calls, and reasoning before constrained texts, are held to the forms of the models."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from rocm_attn.errors import BadRequest
from rocm_serve.server.call_grammar import calls_only, lead_of
from rocm_serve.server.call_reader import AnswerReader, ToolCall
from rocm_serve.text.constraint import Constraint, compiled_of, tokens_of
from rocm_serve.text.constraint_trial import TrialProcess, TrialTokens
from rocm_serve.text.tokenizer import Tokenizer
from rocm_serve.text.written_forms import CALL_FORMS, MARK, REASONING_FORMS, form_named
from tests.amd.runner.small_tokenizers import of_bytes
from tests.amd.server.call_examples import BOTH, EXAMPLES, FUNCTIONS, OSLO, OSS_THOUGHT, WEATHER, Example


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
        with pytest.raises(BadRequest, match="no text can begin with it"):
            trial.check(replace(Constraint.regex(r"[^\s\S]"), lead="lead: /a*b/"))
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

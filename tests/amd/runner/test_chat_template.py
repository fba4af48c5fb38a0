"""Chat templates, programs that come with a model: their intended uses work, and none runs or grows without limit."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocm_attn.errors import BadModel, BadRequest
from rocm_serve.text.bounded_jinja import BoundedEnvironment, OutOfWork
from rocm_serve.text.chat_template import ChatTemplate, template_of

ASKED = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
LONG = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that see nothing": (
        "{% set r = range(99999) %}{% for a in range(999) %}{% for b in r if false %}{% endfor %}{% endfor %}"
    ),
    "a long text in a loop": "{% for a in range(20000) %}" + "x" * 5000 + "{% endfor %}",
    "a constant that is printed over and over": "{% for a in range(20000) %}{{ 'x'|center(5000) }}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "sums of long ranges": "{% for a in range(99999) %}{% set b = range(99999)|sum %}{% endfor %}",
    "a map in a loop": "{% for a in range(99999) %}{% set b = range(99999)|map('abs')|first %}{% endfor %}",
    "calls of nothing": "{% for a in range(99999) %}" + "{% set b = 'a'.upper() %}" * 99 + "{% endfor %}",
}
LARGE = {
    "doubled by ~": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by +": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by a block": (
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}"
        "{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}{% endfor %}"
    ),
    "doubled by replace": (
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}"
    ),
    "doubled by the filter": (
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}"
    ),
    "doubled by join": (
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}"
    ),
    "doubled by slices": (
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x[:] ~ n.x[1:] %}{% endfor %}"
    ),
    "a list in itself, printed": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "a list in itself, as JSON": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}"
    ),
    "lists in themselves, compared": (
        "{% set n = namespace(x=[1], y=[1]) %}{% for a in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
        "{% endfor %}{% if n.x == n.y %}{% endif %}{% if n.x is eq n.y %}{% endif %}"
    ),
    "a namespace in itself": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n }}"
    ),
    "a refusal": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x|string|length }}"
    ),
    "times": "{{ 'a' * 1000000000 }}",
    "times, the other way": "{{ 1000000000 * 'a' }}",
    "a list times": "{{ [1] * 1000000000 }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "powers by products": (
        "{% set n = namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}"
    ),
    "a width": "{{ 'a'.ljust(1000000000) }}",
    "a width of zeros": "{{ '1'.zfill(1000000000) }}",
    "a centre": "{{ 'a'|center(1000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format's argument": "{{ '%*d' % (1000000000, 1) }}",
    "a format by name": "{{ '%(a)1000000000s'|format(a=1) }}",
    "str.format": "{{ '{:>1000000000}'.format(1) }}",
    "str.format's argument": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "a format of many fields": "{% set x = 'a' * 100000 %}{{ ('{0}' * 100000).format(x) }}",
    "a join": "{{ ('a' * 100000).join('b' * 100000) }}",
    "a join of a list": "{{ range(99999)|join('a' * 100000) }}",
    "an indent": "{{ ('a\\n' * 10000)|indent(100000) }}",
    "JSON with an indent": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "a batch": "{{ [1]|batch(1000000000, 'a')|list }}",
    "slices": "{{ [1]|slice(1000000000)|list }}",
    "digits": "{{ 1.5|round(1000000000, 'ceil') }}",
    "tabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "a translation": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "words": "{{ lipsum(n=1000000000) }}",
}
DEEP = {
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "deep brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "deep blocks": "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
}


@pytest.mark.fast(14)
@pytest.mark.parametrize("source", [*LONG.values(), *LARGE.values(), *DEEP.values()], ids=[*LONG, *LARGE, *DEEP])
def test_a_template_that_runs_or_grows_on_is_refused(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadModel, match=r"the model's chat template fails .*; pass the prompt unchanged instead") as bad:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert len(str(bad.value)) < 450
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def test_a_refusal_is_cut_short() -> None:
    with pytest.raises(BadRequest, match="refuses the messages: aaa") as refusal:
        ChatTemplate("{{ raise_exception('a' * 1000000) }}").render([])
    assert len(str(refusal.value)) < 400
    with pytest.raises(BadRequest, match="it gives no reason"):
        ChatTemplate("{{ raise_exception([1]) }}").render([])


def plainly(source: str, **names: Any) -> str:
    """Renders a template in Jinja's own sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(source).render(**names)


MESSAGES = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " What is 2 < 3? <think>\n"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTrue."},
    {"role": "user", "content": "é 東京 🎉 'quoted' \"twice\""},
]
USUAL = {
    "turns": "{% for m in messages %}<|{{ m.role }}|>{{ m['content']|trim }}{{ eos }}\n{% endfor %}<|assistant|>",
    "a system message": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set system, rest = '', messages %}{% endif %}[{{ system }}]"
        "{% for m in rest if m.role != 'system' and m.content %}{{ loop.index0 }}:{{ m.content }}{% endfor %}"
    ),
    "a namespace": (
        "{%- set ns = namespace(seen=false, last='') -%}{% for m in messages[::-1] %}"
        "{% if not ns.seen and m['role'] == 'user' %}{% set ns.seen = true %}{% set ns.last = m.content %}"
        "{% endif %}{% endfor %}{{ ns.last }}"
    ),
    "thoughts": (
        "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}"
        "{{ c.split('</think>')[-1].lstrip('\\n') ~ '|' + c.split('<think>')[1].strip() }}{% endif %}{% endfor %}"
    ),
    "macros": (
        "{% macro turn(role, text='-') %}<{{ role }}>{{ text }}{{ caller() if caller else '' }}</>{% endmacro %}"
        "{{ turn('a') }}{{ turn(role='b', text=eos) }}{% call turn('c') %}!{% endcall %}"
    ),
    "filters": (
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|tojson(indent=2) }}"
        "{{ messages|map(attribute='role')|unique|join(', ') }}{{ messages|length }}"
        "{{ x|default('none')|upper }}"
        "{{ (messages|last).content|replace('é', 'e')|title }}{{ messages[0].items()|list }}{{ messages[0]|dictsort }}"
        "{{ [3, 1, 2]|sort|reverse|join('-') }}{{ 'a b'|wordcount }}{{ '%s and %d'|format('x', 3) }}"
        "{{ 2.345|round(2) }}"
    ),
    "operators": (
        "{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 7 % 4 }}{{ '%05.1f|%-3s|' % (2.5, 'a') }}"
        "{{ 2 ** 10 }}{{ 7 // 2 }}{{ 'a' ~ 1 ~ none }}"
        "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 3 not in [1, 2] }}{{ messages is iterable }}{{ x is defined }}{{ not x }}"
    ),
    "formats": "{{ '{0:>5}|{a}|{0!r}'.format('x', a=2) }}{{ 'a,b'.split(',')|first }}{{ 'ab'.center(6, '-') }}",
    "breaks": (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    ),
    "an else": "{% for i in [] %}{% else %}none{% endfor %}{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }},{% endfor %}",
    "recursion": "{% for n in [[1, [2]], [3]] recursive %}{{ n if n is number else loop(n) }};{% endfor %}",
    "blocks": "{% block a %}x{{ eos }}{% endblock %}{{ self.a() }}{% filter upper %}y{{ eos }}{% endfilter %}",
    "loops' facts": (
        "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.cycle(1, 2) }}{{ loop.previtem is defined }}"
        "{% endfor %}"
    ),
    "whitespace": "  {% if true %}\n  a\n  {%- endif %}\n{{- 'b' -}}\n  {# c #}\n",
}


@pytest.mark.parametrize("source", USUAL.values(), ids=USUAL)
def test_what_templates_are_written_with_gives_what_jinja_gives(source: str) -> None:
    names = {"messages": MESSAGES, "eos": "</s>"}
    environment = BoundedEnvironment(
        100_000, trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    assert environment.from_string(source).render(**names) == plainly(source, **names)


def test_a_long_conversation_is_no_endless_work() -> None:
    messages = [{"role": "user", "content": f"{number} " + "word " * 400} for number in range(2000)]
    text = ChatTemplate(USUAL["turns"]).render(messages)
    assert text == plainly(USUAL["turns"], messages=messages, eos="")


def test_the_budget_counts_for_one_rendering() -> None:
    environment = BoundedEnvironment(5000)
    with pytest.raises(OutOfWork):
        environment.from_string("{% for i in range(100) %}{% endfor %}").render()
    template = ChatTemplate("{% for i in range(30000) %}{% endfor %}ok")
    assert [template.render([]) for _ in range(3)] == ["ok"] * 3


def test_json_is_written_as_hugging_face_writes_it() -> None:
    """Jinja's own filter sorts keys and escapes HTML characters, unlike the texts that models were trained on."""
    tools = [{"type": "function", "function": {"name": "f", "description": "<a> & 'é'"}}]
    template = ChatTemplate("{% for t in tools %}{{ t | tojson }}{{ t.function | tojson(indent=1) }}{% endfor %}")
    assert template.render([], tools) == json.dumps(tools[0], ensure_ascii=False) + json.dumps(
        tools[0]["function"], ensure_ascii=False, indent=1
    )
    assert ChatTemplate("{{ tools is none }}").render([]) == "True"


def test_a_conversation_with_tools_has_a_template_of_its_own_where_the_model_has_one() -> None:
    """The format is that of Hermes in tokenizer_config.json."""
    named: list[dict[str, object]] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ bos_token }} tools"},
        {"name": ["rag"], "template": "of no name"},
        {},
    ]
    template = template_of(named, "<s>", "")
    assert template is not None
    assert (template.render(ASKED), template.render(ASKED, [TOOL])) == ("plain", "<s> tools")
    alone = template_of("for all", "", "")
    assert alone is not None
    assert alone.render(ASKED, [TOOL]) == "for all"


@pytest.mark.parametrize("named", [None, 7, [], [{"name": "tool_use", "template": "x"}], {"default": 1}, ["default"]])
def test_a_model_without_a_template_for_all_has_none(named: object) -> None:
    assert template_of(named, "", "") is None


def test_what_is_marked_for_training_is_written_as_it_stands() -> None:
    """SmolLM3's template marks the model's own text, for Hugging Face's trainers."""
    source = (
        "{% for m in messages %}{% set n = 1 %}{% generation %}\n{% set n = 2 %}[{{ m.content }}]{{ n }}"
        "{% endgeneration %}{{ n }}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"role": "assistant", "content": "a"}] * 2) == "[a]21[a]21"


def test_the_length_of_a_conversation_is_known_without_writing_it_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise AssertionError("a conversation was written as JSON")

    # The template does three million steps of work for a text of many characters, more than it may for a short one.
    template = ChatTemplate("{% for a in range(60) %}{{ messages[0].content }}{% endfor %}")
    monkeypatch.setattr(json, "dumps", refuse)
    said = "w" * 200_000
    assert template.render([{"role": "user", "content": said}], [TOOL]) == said * 60
    parts = [{"role": "user", "content": [said[:100_000], {"text": said[:100_000]}]}]
    looping = ChatTemplate("{% for a in range(60) %}{{ messages[0].content[0] }}{% endfor %}")
    assert looping.render(parts) == said[:100_000] * 60

"""Chat templates, programs that come with a model: they write what Hugging Face's do, in a sandbox."""

import json

import pytest

from rocm_attn.errors import BadModel, BadRequest
from rocm_serve.server.schema import MOST_MESSAGES
from rocm_serve.text import chat_template
from rocm_serve.text.chat_template import ChatTemplate, Rendering, template_of

ASKED = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEEP = {
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "deep brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "deep blocks": "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_a_template_that_nests_without_end_is_refused(source: str) -> None:
    with pytest.raises(BadModel, match=r"the model's chat template fails .*; pass the prompt unchanged instead") as bad:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert len(str(bad.value)) < 450


# For each message it looks through all later ones, as gpt-oss's template does for calls.
LOOKING_ON = (
    "{% for m in messages %}{% set found = namespace(it=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role == 'assistant' %}{% set found.it = true %}{% endif %}{% endfor %}{{ m['content'] }}{% endfor %}"
)


def test_a_client_cannot_make_a_models_template_work_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ChatTemplate(LOOKING_ON).render(ASKED * 1000) == "?" * 1000  # half a million reads
    plain = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}")
    assert plain.render(ASKED * MOST_MESSAGES) == "user?" * MOST_MESSAGES
    monkeypatch.setattr(chat_template, "MOST_READS", 5000)
    assert ChatTemplate(LOOKING_ON).render(ASKED * 90) == "?" * 90
    with pytest.raises(BadRequest, match="reads more than 5000 fields for these 200 messages; send fewer messages"):
        ChatTemplate(LOOKING_ON).render(ASKED * 200)
    assert plain.render(ASKED * 1000) == "user?" * 1000, "the reads of one conversation count for it alone"


def test_a_refusal_is_cut_short() -> None:
    with pytest.raises(BadRequest, match="refuses the messages: aaa") as refusal:
        ChatTemplate("{{ raise_exception('a' * 1000000) }}").render([])
    assert len(str(refusal.value)) < 400
    with pytest.raises(BadRequest, match="it gives no reason"):
        ChatTemplate("{{ raise_exception([1]) }}").render([])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_reaches_nothing_of_python_and_changes_no_message(source: str) -> None:
    with pytest.raises(BadModel, match=r"unsafe|not safely callable"):
        ChatTemplate(source).render(ASKED)


def test_json_is_written_as_hugging_face_writes_it() -> None:
    """Jinja's own filter sorts keys and escapes HTML characters, unlike the texts that models were trained on."""
    tools = [{"type": "function", "function": {"name": "f", "description": "<a> & 'é'"}}]
    template = ChatTemplate("{% for t in tools %}{{ t | tojson }}{{ t.function | tojson(indent=1) }}{% endfor %}")
    assert template.render([], tools) == json.dumps(tools[0], ensure_ascii=False) + json.dumps(
        tools[0]["function"], ensure_ascii=False, indent=1
    )
    assert ChatTemplate("{{ tools is none and documents is none }}").render([]) == "True"


def test_a_conversation_with_tools_has_a_template_of_its_own_where_the_model_has_one() -> None:
    """The format is that of Hermes in tokenizer_config.json."""
    named: list[dict[str, object]] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ bos_token }} tools"},
        {"name": ["rag"], "template": "of no name"},
        {},
    ]
    template = template_of(named, {"bos_token": "<s>"})
    assert template is not None
    assert (template.render(ASKED), template.render(ASKED, [TOOL])) == ("plain", "<s> tools")
    alone = template_of("for all", {})
    assert alone is not None
    assert alone.render(ASKED, [TOOL]) == "for all"


@pytest.mark.parametrize("named", [None, 7, [], [{"name": "tool_use", "template": "x"}], {"default": 1}, ["default"]])
def test_a_model_without_a_template_for_all_has_none(named: object) -> None:
    assert template_of(named, {}) is None


def test_what_is_marked_for_training_is_written_as_it_stands() -> None:
    """SmolLM3's template marks the model's own text, for Hugging Face's trainers."""
    source = (
        "{% for m in messages %}{% set n = 1 %}{% generation %}\n{% set n = 2 %}[{{ m.content }}]{{ n }}"
        "{% endgeneration %}{{ n }}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"role": "assistant", "content": "a"}] * 2) == "[a]21[a]21"


def test_a_template_that_reads_parts_alone_gets_a_text_as_one() -> None:
    """Llama Guard 3 1B's template writes the parts of type text, and a plain text has none: the user's was left out."""
    parts = "{% for m in messages %}{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}"
    template = ChatTemplate(f"{parts}{{% endfor %}};{{% endfor %}}")
    assert template.render([*ASKED, *({"role": role, "content": "a"} for role in ("assistant", "tool"))]) == "?;a;a;"
    assert template.render(ASKED, rendering=Rendering(goes_on=True)) == "?"
    joins = ChatTemplate(f"{{{{ bos_token + 'a' }}}}{template.source}", {"bos_token": "<s>"})
    assert joins.render(ASKED) == "<s>a?;"
    both = f"{{% for m in messages %}}{{% if m.content is string %}}plain{{{{ m.content }}}}{{% else %}}{parts}"
    assert ChatTemplate(f"{both}{{% endfor %}}{{% endfor %}}{{% endif %}}{{% endfor %}}").render(ASKED) == "plain?"
    # That of Gemma 3 1B in GGUF files reads parts of the system message, and would fail.
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}{% endif %}{{ messages[-1].content"
    mixed = ChatTemplate(f"{first} if messages[-1].content is string else messages[-1].content[0].text }}}}")
    assert mixed.render([{"role": "system", "content": "a"}, *ASKED]) == "a?"
    # Only what a role's texts are read from is changed: a list would be written as Python shows it.
    answers = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}"
    said = [
        *ASKED,
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "system", "content": "b"},
    ]
    assert ChatTemplate(f"{answers}{{% endif %}};{{% endfor %}}").render(said) == "?;a;t;b;"

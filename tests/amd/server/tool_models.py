"""A small model whose tokens are characters and whose template writes calls of functions."""

from dataclasses import replace
from typing import Any

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.small_tokenizers import of_characters
from tests.amd.runner.tiny_model import CONFIG, tiny_model

CHARACTERS = [*map(chr, range(33, 127)), " ", "\n"]
END = len(CHARACTERS)
# Tokens of several characters, which models also have; this model says them if it is made to.
WORDS = {
    END + 1 + number: word
    for number, word in enumerate(
        (
            *("<tool_call>\n", "\n</tool_call>", '{"name": "', "get_weather", "get-time", '", "arguments": '),
            *('", "parameters": ', '{"days": 2, "unit": "C"}', "I look. \n"),
        )
    )
}

# Common part of the templates of models with tools: the tools before the words, the arguments as an object.
_TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
_HERMES = _TOOLS + (
    'as <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\n'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n{% endfor %}assistant: "
)
_LLAMA = _TOOLS + (
    "{% for m in messages %}{{ m.role }}: {% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}assistant: "
)
TEMPLATES = {
    "hermes": _HERMES,
    "llama": _LLAMA,
    "other": _HERMES.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[END]"),
    "none": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
}
OPTIONS = EngineOptions(provider="torch", page_size=16, max_batch_size=8, chunk=512, graphs=False, max_kv_len=512)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "$defs": {"Unit": {"enum": ["C", "F"]}},
            "type": "object",
            "properties": {"days": {"enum": [1, 2, 3]}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get-time"}}


def tokenizer(template: str) -> Tokenizer:
    """A token for each of CHARACTERS, and one that ends a text. template: a key of TEMPLATES"""
    backend = of_characters(CHARACTERS)
    backend.add_tokens(list(WORDS.values()))
    return Tokenizer(backend=backend, bos_token_id=None, chat_template=ChatTemplate(TEMPLATES[template]))


def tool_model(template: str) -> LoadedModel:
    base = replace(CONFIG, vocab_size=128, layers=CONFIG.layers[:1])
    return tiny_model(tokenizer=tokenizer(template), eos_token_ids=(END,), context_len=2048, base=base)


def tool_engine(template: str) -> Engine:
    return Engine(tool_model(template), OPTIONS)

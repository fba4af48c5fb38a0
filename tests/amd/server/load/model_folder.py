"""A small random Llama as files: what `rocm-attn serve --model` is given by the tests of load."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from rocm_serve.models.weights import expected_shapes
from tests.amd.runner.tiny_model import CONFIG, RandomTensors, word_tokenizer

CONTEXT = 512
# Names of functions and every message's words, one after the other; a conversation begins with w63.
_TEMPLATE = (
    "w63{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"
    "{% for message in messages %} {{ message['content'] }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
)


def write_model(folder: Path) -> Path:
    """config.json, safetensors, and a tokenizer whose words are w0 to w63; any other word is w0."""
    config = replace(CONFIG, context_len=CONTEXT)
    layer = config.attending[0]
    source = RandomTensors(config, seed=11)
    tensors = {name: source.read(name).to(torch.float32).contiguous() for name in expected_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    attention = layer.attention
    described = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_q_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = word_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return folder

"""Configs of published models, and small random models of transformers with the files that they are read from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_serve.models.loading import LoadedModel, load_model

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

# Published models' config.json, written down from memory of their repositories.
PUBLISHED = Path(__file__).parent / "published"


def published(name: str) -> dict[str, Any]:
    """The fields of a published model's config.json."""
    fields: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return fields


# Buffers that a file holds in addition to parameters.
LEARNED_BUFFERS = ("e_score_correction_bias", "layer_scalar")


def small_hf_config(family: str, **changes: Any) -> Any:
    """A transformers config. family: "Llama", "Qwen2", "Qwen3", "Mistral" ..."""
    return getattr(transformers, f"{family}ForCausalLM").config_class(**{**SMALL, **changes})


def small_hf_model(family: str, **changes: Any) -> Any:
    """A transformers model with random weights, large enough that every part of it shows in the logits."""
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(small_hf_config(family, **changes)).float().eval()
    model.set_attn_implementation("eager")  # sdpa, which some releases take for Gemma 2, leaves out its soft cap
    for module in model.modules():
        if hasattr(module, "limit"):  # gpt-oss's experts, where some releases have a 7 of their own
            module.limit = model.config.swiglu_limit
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(LEARNED_BUFFERS):
                buffer.uniform_(0.5, 1.5)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Writes config.json and safetensors."""
    model.save_pretrained(directory, **options)
    return directory


@contextmanager
def changed_tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model that was saved; its file then has them as they are left."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path)


def hf_logits(model: Any, token_ids: Tensor) -> Tensor:
    """Logits [tokens, vocab] at every position of one sequence."""
    with torch.no_grad():
        logits: Tensor = model(token_ids[None].long()).logits[0]
    return logits


def random_tokens(num_tokens: int, vocab_size: int = SMALL["vocab_size"]) -> Tensor:
    return torch.randint(0, vocab_size, (num_tokens,))


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype, device=torch.device("cpu"))


# Settings of rotary embeddings that stretch.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def write_gguf(
    model: Any,
    path: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Writes a GGUF file of a transformers model, in the layout of llama.cpp's converter.

    quantization: of matrices
    metadata:     keys in addition to the usual ones; None as a value drops the key
    tensors:      more tensors, by their GGUF name
    """
    config, kind = model.config, model.config.model_type.replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, kind)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, value in {**_metadata(config, kind), **(metadata or {})}.items():
        if value is not None:
            writer.add_key_value(key, value, _value_type(value))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert named is not None, f"{kind} has no {name}"
        _add_tensor(writer, named, tensor, quantization if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32)
    for name, tensor in (tensors or {}).items():
        _add_tensor(writer, name, tensor, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """q or k rows as llama.cpp stores them for llama models: rotary pairs are neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _metadata(config: Any, kind: str) -> dict[str, Any]:
    return {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["t", "1", *(f"t{token}" for token in range(1, config.vocab_size - 1))],
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    values = tensor.contiguous().float().numpy()
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _value_type(value: object) -> gguf.GGUFValueType:
    """The type that llama.cpp's converter writes: numbers have no sign, and 32 bits if they fit."""
    if type(value) is int:
        return gguf.GGUFValueType.UINT64 if value >= 2**32 else gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)

"""Models that vLLM alone loads here: a Llama with what drafts for it, and a DeepSeek with indexers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.amd.engines.models import VOCABULARY, write, write_random, written_once

# Of the small Llama and of its EAGLE head.
_LLAMA: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def vllm_model(name: str, cache: Path) -> Path:
    """The folder of one of the models below, written if it is not there yet."""
    return written_once(f"vllm_{name}", _MODELS[name], cache)


def write_llama(folder: Path) -> None:
    """A small Llama whose next token is likely one that belongs to its last, as its layers turn it.

    One KV head, so that two ranks share it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_LLAMA, num_hidden_layers=2, architectures=["LlamaForCausalLM"])
    write_random(folder, lambda: LlamaForCausalLM(config))
    weights = weights_of(folder)
    random = torch.Generator().manual_seed(2)
    embeddings = torch.randn(VOCABULARY, config.hidden_size, generator=random)
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"] = embeddings[torch.randperm(VOCABULARY, generator=random)].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_eagle(folder: Path) -> None:
    """An EAGLE head of the small Llama: the first layer of its own, over embeddings. Some of its drafts are right."""
    with tempfile.TemporaryDirectory() as target:
        write_llama(Path(target))
        weights = weights_of(Path(target))
    size = int(_LLAMA["hidden_size"])
    first = {name: each for name, each in weights.items() if name.startswith("model.layers.0.")}
    head = {name.removeprefix("model."): each for name, each in first.items() if "input_layernorm" not in name}
    head["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    write(folder, head, {**_LLAMA, **config})


def write_sparse(folder: Path) -> None:
    """A DeepSeek V3.2 of three dense layers, which attend to 24 tokens that their indexers choose."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    # With plain positions vLLM gives another text on a CPU; why is not known.
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    # Any: of two of them vLLM alone knows the names.
    make: Any = DeepseekV32Config
    config = make(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        mlp_layer_types=["dense"] * 3,
        rope_parameters=scaling,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["DeepseekV32ForCausalLM"],
        dtype="float32",
    )
    write_random(folder, lambda: DeepseekV32ForCausalLM(config))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors by name."""
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


_MODELS: Mapping[str, Callable[[Path], None]] = {
    "llama": write_llama,
    "eagle": write_eagle,
    "sparse": write_sparse,
}

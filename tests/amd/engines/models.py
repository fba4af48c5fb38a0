"""Models that engines load: folders with config.json, safetensors and a tokenizer, written once into a cache."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import NoScaling
from rocm_serve.models.loading import open_model

VOCABULARY = 1024
# Fields of the config of each small model with heads, and those that name its special tokens.
SMALL: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}
SPECIAL: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA: Mapping[str, Any] = {**SMALL, **SPECIAL, "head_dim": 32, "tie_word_embeddings": False}
_GEMMA3: Mapping[str, Any] = {
    **SMALL,
    "head_dim": 32,
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
}


def model(name: str, cache: Path) -> Path:
    return written_once(name, MODELS[name], cache)


def written_once(name: str, write: Callable[[Path], None], cache: Path) -> Path:
    folder = cache / "models" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            written = Path(part) / name
            written.mkdir()
            write(written)
            try:
                os.rename(written, folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    return folder


def write_smollm2(folder: Path) -> None:
    """Writes SmolLM2 135M from the GGUF file in its wheel, dequantised to float32 by the runner's own loader."""
    files = open_model("smollm2")
    config, layer, mlp = files.config, files.config.attending[0], files.config.layers[0].mlp
    assert isinstance(layer.rope.scaling, NoScaling)
    assert isinstance(mlp, DenseMlp)
    assert files.tokenizer is not None
    weights = {name: files.source.read(name).contiguous() for name in files.source.shapes()}
    write(
        folder,
        weights,
        {
            "architectures": [config.architecture],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": layer.attention.num_q_heads,
            "num_key_value_heads": layer.attention.num_kv_heads,
            "head_dim": layer.attention.head_dim,
            "max_position_embeddings": config.context_len,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": layer.rope.theta,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": config.tied_embeddings,
            "eos_token_id": config.eos_token_ids[0],
            "torch_dtype": "float32",
        },
    )
    files.tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_gemma3(folder: Path) -> None:
    """Writes a small Gemma 3 with random weights: two layers with a window of 24 keys for each layer without one."""
    write_random(folder, "Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA3, **SPECIAL)


def write_embedding_gemma(folder: Path) -> None:
    """Writes the small Gemma 3 as an EmbeddingGemma: tokens of layers with a window see 12 on each side, others all."""
    write_gemma3(folder)
    # Published files have the layers alone.
    write_weights(folder, {name.removeprefix("model."): each for name, each in weights_of(folder).items()})
    add_to_config(folder, {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True})


def write_llama4(folder: Path) -> None:
    """Writes a small Llama 4 with random weights: chunks of 24 keys in all layers but the fourth.

    SGLang rounds rows that it normalises to bfloat16 on a CPU, and compiles the temperature of long texts; both are
    left out. Only with images does SGLang reorder the elements that turn, as files of Llama 4 need it.
    """
    write_random(
        folder,
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        text_config={
            **SMALL,
            **SPECIAL,
            "intermediate_size_mlp": 256,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "attention_chunk_size": 24,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 100,
            "num_local_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
            "patch_size": 14,
        },
        boi_token_index=3,
        eoi_token_index=4,
        image_token_index=5,
        dtype="float32",
    )


def write_bert(folder: Path) -> None:
    write_random(
        folder,
        "BertConfig",
        "BertModel",
        made_with={"add_pooling_layer": False},
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        position_embedding_type="absolute",
        pad_token_id=0,
        dtype="float32",
    )


# A config's key: first and last token of the images of each prompt that is long enough (sglang_images.py). The first is
# longer than the windows.
IMAGE_PLACES = "image_places"


def write_gemma3_images(folder: Path) -> None:
    """Writes a small Gemma 3 that takes images, with random weights, and says where prompts have some."""
    write_random(
        folder,
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        **SPECIAL,
        text_config=_GEMMA3,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=3,
        eoi_token_index=4,
        dtype="float32",
    )
    # Published files have the same.
    weights = weights_of(folder).items()
    write_weights(folder, {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights})
    add_to_config(folder, {IMAGE_PLACES: [[2, 33], [35, 39]]})


def write_gemma3_draft(folder: Path) -> None:
    """Writes the small Gemma 3 with slightly different weights, so that some of its drafts agree with the original."""
    write_gemma3(folder)
    random = torch.Generator().manual_seed(1)
    weights = weights_of(folder).items()
    write_weights(
        folder, {name: each + 0.1 * each.std() * torch.randn(each.shape, generator=random) for name, each in weights}
    )


def write_llama(folder: Path) -> None:
    """Writes a small Llama whose next token depends on the last one more than on earlier ones."""
    write_random(folder, "LlamaConfig", "LlamaForCausalLM", deviations=(1.0, 0.05), **_LLAMA, num_hidden_layers=2)


def write_llama_head(folder: Path) -> None:
    """Writes an EAGLE head for the small Llama. Some of its drafts agree with the model.

    Its layer sees the embedding of a token, and a tenth of the model's hidden state of the previous token.
    """
    random = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> Tensor:
        return 0.05 * torch.randn(shape, generator=random)

    config = _small_llama(num_hidden_layers=1)
    hidden, kv, inner = config.hidden_size, config.num_key_value_heads * config.head_dim, config.intermediate_size
    weights = {
        "fc.weight": torch.cat((torch.eye(hidden), 0.1 * torch.eye(hidden)), 1),
        "fc.bias": torch.zeros(hidden),
        "layers.0.self_attn.q_proj.weight": rows(hidden, hidden),
        "layers.0.self_attn.k_proj.weight": rows(kv, hidden),
        "layers.0.self_attn.v_proj.weight": rows(kv, hidden),
        "layers.0.self_attn.o_proj.weight": rows(hidden, hidden),
        "layers.0.mlp.gate_proj.weight": rows(inner, hidden),
        "layers.0.mlp.up_proj.weight": rows(inner, hidden),
        "layers.0.mlp.down_proj.weight": rows(hidden, inner),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    write(folder, weights, {**config.to_dict(), "architectures": ["LlamaForCausalLMEagle"]})


def write_block_drafts(folder: Path) -> None:
    """Writes a model that drafts a block of tokens for the small Llama at once (DFlash), with random weights.

    Its layers see the hidden states between the Llama's layers, and tokens of a block see each other.
    """
    random = torch.Generator().manual_seed(2)

    def rows(*shape: int) -> Tensor:
        return 0.12 * torch.randn(shape, generator=random)

    config = _small_llama(num_hidden_layers=2).to_dict()
    hidden = config["hidden_size"]
    weights = {"fc.weight": rows(hidden, hidden)}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "norm")}
    for layer in range(2):
        weights |= block_layer(layer, rows, config)
    drafting = {"mask_token_id": 7, "target_layer_ids": [0], "block_size": 4, "num_target_layers": 2}
    fields = {**config, "architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    write(folder, weights, {**fields, "dflash_config": drafting})


def block_layer(layer: int, rows: Callable[..., Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a layer of DFlash's draft model. rows: of random numbers; config: fields of config.json"""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    found = {f"self_attn.{name}_proj.weight": rows(*shape) for name, shape in shapes.items()}
    found |= {f"self_attn.{name}_norm.weight": torch.ones(dim) for name in ("q", "k")}
    found |= {f"mlp.{name}_proj.weight": rows(inner, hidden) for name in ("gate", "up")}
    found |= {"mlp.down_proj.weight": rows(hidden, inner)}
    found |= {f"{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
    return {f"layers.{layer}.{name}": each for name, each in found.items()}


def _small_llama(num_hidden_layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_LLAMA, num_hidden_layers=num_hidden_layers, architectures=["LlamaForCausalLM"])


def write_qwen3_experts(folder: Path) -> None:
    """Writes a small Qwen 3 with experts in each of its three layers, two of four per token, and random weights."""
    write_random(
        folder,
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        **SMALL,
        **SPECIAL,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


# Shared by every small DeepSeek here: three dense layers.
SMALL_DEEPSEEK: Mapping[str, Any] = {
    **SMALL,
    **SPECIAL,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
}
# Latent rows of 64 and 16 elements, and positions that SGLang can rotate on a CPU.
LATENT_64: Mapping[str, Any] = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def write_small_deepseek(folder: Path, **own: Any) -> None:
    """Writes a DeepSeek V3 of three dense layers with random weights. own: fields of its config"""
    fields = {**SMALL_DEEPSEEK, "num_nextn_predict_layers": 0, **own}
    write_random(folder, "DeepseekV3Config", "DeepseekV3ForCausalLM", **fields)


def write_sparse_deepseek(folder: Path) -> None:
    """Writes a DeepSeek V3.2 of three layers, in which each token attends to 32 tokens chosen by an indexer."""
    write_small_sparse(folder, **LATENT_64, index_topk=32, index_n_heads=4, index_head_dim=128)
    # SGLang keeps these in bfloat16.
    weights = weights_of(folder).items()
    write_weights(folder, {name: each.bfloat16().float() if "weights_proj" in name else each for name, each in weights})


def write_small_sparse(folder: Path, **own: Any) -> None:
    """Writes a DeepSeek V3.2 of three dense layers with random weights. own: fields of its config"""
    fields = {**SMALL_DEEPSEEK, "mlp_layer_types": ["dense"] * 3, **own}
    write_random(folder, "DeepseekV32Config", "DeepseekV32ForCausalLM", **fields)


def write_random(
    folder: Path,
    config: str,
    model: str,
    *,
    deviations: tuple[float, float] = (0.03, 0.12),
    made_with: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> None:
    """Writes a model of transformers with random weights: by default its logits are far from even.

    config, model: names of classes; deviations: of embeddings and of other matrices; made_with: arguments of the model
    """
    import transformers

    made, (of_embeddings, of_others) = getattr(transformers, config)(architectures=[model], **fields), deviations
    torch.manual_seed(0)
    built = getattr(transformers, model)(made, **made_with).float()
    for name, parameter in built.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, of_embeddings if "embed_tokens" in name else of_others)
    built.save_pretrained(folder)


def write(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    write_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


def add_to_config(folder: Path, fields: Mapping[str, object]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}, indent=1))


MODELS: Mapping[str, Callable[[Path], None]] = {
    "smollm2": write_smollm2,
    "gemma3": write_gemma3,
    "gemma3_draft": write_gemma3_draft,
    "embedding_gemma": write_embedding_gemma,
    "llama4": write_llama4,
    "bert": write_bert,
    "gemma3_images": write_gemma3_images,
    "qwen3_experts": write_qwen3_experts,
    "eagle_target": write_llama,
    "eagle_head": write_llama_head,
    "block_drafts": write_block_drafts,
    "deepseek": partial(write_small_deepseek, **LATENT_64),
    # With latent rows of 576 elements: vLLM's CPU kernel supports no others.
    "deepseek_wide": partial(
        write_small_deepseek, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    "deepseek_sparse": write_sparse_deepseek,
}

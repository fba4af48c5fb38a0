"""Models that only vLLM loads here: a Llama with heads that draft for it, a DeepSeek with indexers, and hybrids."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.amd.engines.models import (
    LATENT_64,
    SMALL,
    SPECIAL,
    VOCABULARY,
    add_to_config,
    block_layer,
    weights_of,
    write,
    write_bert,
    write_embedding_gemma,
    write_gemma3,
    write_random,
    write_small_sparse,
    write_weights,
    written_once,
)
from tests.amd.engines.vllm_images import IMAGE_SPANS, KEEPS_WINDOWS

# Shared by the small Llama and its EAGLE head.
_LLAMA: Mapping[str, Any] = {
    **SMALL,
    **SPECIAL,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def vllm_model(name: str, cache: Path) -> Path:
    """Returns the folder of one of the models below, after writing it if necessary."""
    return written_once(f"vllm_{name}", _MODELS[name], cache)


def write_llama(folder: Path) -> None:
    """Writes a small Llama whose next token is most likely a fixed successor of its last one, which its layers modify.

    It has one KV head, so that two ranks share it.
    """
    write_random(folder, "LlamaConfig", "LlamaForCausalLM", **_LLAMA, num_hidden_layers=2)
    weights = weights_of(folder)
    random = torch.Generator().manual_seed(2)
    embeddings = torch.randn(VOCABULARY, int(_LLAMA["hidden_size"]), generator=random)
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"] = embeddings[torch.randperm(VOCABULARY, generator=random)].contiguous()
    write_weights(folder, weights)


def write_eagle(folder: Path) -> None:
    """Writes an EAGLE head of the small Llama: its own first layer over embeddings. Some of its drafts are right."""
    with tempfile.TemporaryDirectory() as target:
        write_llama(Path(target))
        weights = weights_of(Path(target))
    size = int(_LLAMA["hidden_size"])
    first = {name: each for name, each in weights.items() if name.startswith("model.layers.0.")}
    head = {name.removeprefix("model."): each for name, each in first.items() if "input_layernorm" not in name}
    head["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    write(folder, head, {**_LLAMA, **config})


def write_block_drafts(folder: Path) -> None:
    """Writes a head that drafts a block of tokens for the small Llama at once, like DFlash: they see each other.

    It reads the hidden states of both layers, and has the model's embeddings.
    """
    random = torch.Generator().manual_seed(3)
    size = int(_LLAMA["hidden_size"])

    def rows(*shape: int) -> torch.Tensor:
        return 0.12 * torch.randn(shape, generator=random)

    head = block_layer(0, rows, _LLAMA)
    head |= {"fc.weight": rows(size, 2 * size)}
    head |= {f"{name}.weight": torch.ones(size) for name in ("hidden_norm", "norm")}
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]},
    }
    write(folder, head, {**_LLAMA, **config})


def write_encoder(folder: Path) -> None:
    """Writes a small BERT, whose embedding of a prompt is that of its first token."""
    write_bert(folder)
    _write_words(folder)


def write_local_encoder(folder: Path) -> None:
    """Writes a small ModernBERT: two layers whose tokens see 12 on each side for each layer whose tokens see all."""
    write_random(
        folder,
        "ModernBertConfig",
        "ModernBertModel",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        local_attention=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        dtype="float32",
    )
    _write_words(folder)


def write_local_embeddings(folder: Path) -> None:
    """Writes the small EmbeddingGemma, and a tokenizer."""
    write_embedding_gemma(folder)
    _write_words(folder)


def write_speech(folder: Path) -> None:
    """Writes a small Whisper for two seconds of sound, which its encoder makes 100 rows of."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    write_random(
        folder,
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=128,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=100,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    features = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    WhisperProcessor(features, WhisperTokenizer(tokenizer_object=_words())).save_pretrained(folder)


def _write_words(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=_words()).save_pretrained(folder)


def _words() -> Any:
    """Returns a tokenizer with a word for each token, which vLLM loads before it takes prompts of another kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"<pad>": 0, "<|startoftranscript|>": 1, "<|endoftext|>": 2}
    words = {**special, **{f"w{token}": token for token in range(len(special), VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_chunks(folder: Path) -> None:
    """Writes a small Llama 4 without experts: three layers with chunks of 32 keys for each layer that sees all."""
    layers = ["chunked_attention"] * 3 + ["full_attention"]
    write_random(
        folder,
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        **{name: value for name, value in _LLAMA.items() if name != "pad_token_id"},
        intermediate_size_mlp=256,
        num_hidden_layers=8,
        num_local_experts=2,
        moe_layers=[],
        interleave_moe_layer_step=0,
        attention_chunk_size=32,
        layer_types=layers * 2,
        no_rope_layers=[1, 1, 1, 0] * 2,
        pad_token_id=0,
    )


def write_images(folder: Path, fields: Mapping[str, object]) -> None:
    """Writes the small Gemma 3 with images in each longer prompt. fields: of the config, which say where"""
    write_gemma3(folder)
    add_to_config(folder, fields)


def write_sparse(folder: Path, **latent: Any) -> None:
    """Writes a DeepSeek V3.2 of three dense layers, which attend to 24 tokens that their indexers choose."""
    own = {"num_nextn_predict_layers": 0, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}
    write_small_sparse(folder, **{**LATENT_64, **latent}, **own)


def write_delta_net(folder: Path) -> None:
    """Writes a small Qwen3-Next: three layers of gated delta nets and one of attention, twice.

    A state takes as many bytes as K and V of 542 tokens, so vLLM makes blocks of 544.
    """
    write_random(
        folder,
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        **_LLAMA,
        num_hidden_layers=8,
        linear_num_key_heads=1,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=2,
        num_experts_per_tok=2,  # a choice that rounding cannot change
    )


def write_repeating_delta_net(folder: Path) -> None:
    """Writes the same model with embeddings by which text mostly goes round in six tokens, so that drafts are right."""
    write_delta_net(folder)
    weights = weights_of(folder)
    for name in weights:
        if "o_proj" in name or "out_proj" in name or "down_proj" in name:
            weights[name] = weights[name] / 2
    embeddings = torch.randn(VOCABULARY, int(_LLAMA["hidden_size"]), generator=torch.Generator().manual_seed(2))
    before = [token - 1 if token % 6 else token + 5 for token in range(VOCABULARY // 6 * 6)]
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"] = embeddings.clone()
    weights["lm_head.weight"][: len(before)] = embeddings[before]
    write_weights(folder, weights)


def write_mamba(folder: Path) -> None:
    """Writes a small Granite 4: two layers of Mamba2 and one of attention, twice, with dense MLPs."""
    write_random(
        folder,
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **{name: value for name, value in _LLAMA.items() if name != "head_dim"},
        num_hidden_layers=6,
        layers_block_type=["mamba", "mamba", "attention"] * 2,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_chunk_size=16,
    )


def write_parallel_mamba(folder: Path) -> None:
    """Writes a small Falcon-H1: three layers with Mamba2 and attention next to each other, scaled by multipliers."""
    write_random(
        folder,
        "FalconH1Config",
        "FalconH1ForCausalLM",
        **_LLAMA,
        num_hidden_layers=3,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
        mamba_rms_norm=True,
        ssm_in_multiplier=0.5,
        ssm_multipliers=[0.7, 1.1, 0.9, 1.3, 0.8],
        attention_out_multiplier=0.6,
    )


_MODELS: Mapping[str, Callable[[Path], None]] = {
    "llama": write_llama,
    "eagle": write_eagle,
    "block_drafts": write_block_drafts,
    "encoder": write_encoder,
    "local_encoder": write_local_encoder,
    "local_embeddings": write_local_embeddings,
    "speech": write_speech,
    "chunks": write_chunks,
    "images": partial(write_images, fields={IMAGE_SPANS: [[5, 13], [20, 17]]}),
    # Longer than the windows, to which it keeps, as in Gemma 4.
    "wide_images": partial(write_images, fields={IMAGE_SPANS: [[5, 34]], KEEPS_WINDOWS: True}),
    "delta_net": write_delta_net,
    "delta_net_repeats": write_repeating_delta_net,
    "mamba": write_mamba,
    "parallel_mamba": write_parallel_mamba,
    "sparse": write_sparse,
    # Positions that are not scaled, as in GLM-5.
    "sparse_plain": partial(write_sparse, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
}

"""transformers' Llama on the same weights that the runner loaded: the independent implementation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rocm_attn.models.config import ModelConfig
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.rope import NoScaling
from rocm_serve.models.attention_weights import KVHeadWeights
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp_weights import DenseWeights
from rocm_serve.models.weights import LayerWeights


def hf_llama(loaded: LoadedModel) -> Any:
    """A LlamaForCausalLM that shares the weights' memory."""
    config, weights = loaded.config, loaded.weights
    assert config.architecture == "LlamaForCausalLM"
    assert {layer.rope.scaling for layer in config.attending} == {NoScaling()}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(_hf_config(config))
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    tensors["lm_head.weight"] = weights.head
    for layer, layer_weights in enumerate(weights.layers):
        tensors.update(
            (f"model.layers.{layer}.{name}", x)
            for name, x in _hf_tensors(config.attending[layer].attention, layer_weights).items()
        )
    model.load_state_dict(tensors, assign=True)
    # frequencies are not part of a state dict, so they are still without storage
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval().requires_grad_(False)


def _hf_config(config: ModelConfig) -> LlamaConfig:
    layer, (mlp_size,) = config.attending[0], config.layers[0].mlp.sizes
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=layer.attention.num_q_heads,
        num_key_value_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        max_position_embeddings=config.context_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": layer.rope.theta},
        tie_word_embeddings=config.tied_embeddings,
        eos_token_id=list(config.eos_token_ids),
    )


def _hf_tensors(heads: AttentionLayer, weights: LayerWeights) -> dict[str, Tensor]:
    sizes = [heads.num_q_heads * heads.head_dim, *[heads.num_kv_heads * heads.head_dim] * 2]
    (attention,), mlp = weights.mixers, weights.mlp
    assert isinstance(attention, KVHeadWeights)
    assert weights.attention_norm is not None
    assert weights.mlp_norm is not None
    assert isinstance(mlp, DenseWeights)
    q, k, v = torch.split(attention.qkv, sizes)
    gate, up = torch.chunk(mlp.gate_up, 2)
    return {
        "input_layernorm.weight": weights.attention_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": attention.out,
        "post_attention_layernorm.weight": weights.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": mlp.down,
    }


def greedy_steps(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], Tensor]:
    """Returns greedy decoding's pick at every position of a continuation, and the best logit's lead over the next.

    The model sees the continuation itself (teacher forcing), so by induction it is the result of greedy decoding if and
    only if the picks equal it. Returns the picks and float32 [len(continuation)] gaps.
    """
    best = logits_along(model, prompt, continuation).topk(2, -1)
    return best.indices[:, 0].tolist(), best.values[:, 0] - best.values[:, 1]


def logits_along(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> Tensor:
    """float32 [len(continuation), vocab]: the logits from which each token of the continuation would be picked."""
    token_ids = torch.tensor([[*prompt, *continuation[:-1]]])
    with torch.no_grad():
        logits: Tensor = model(token_ids, logits_to_keep=len(continuation)).logits[0].float()
    return logits

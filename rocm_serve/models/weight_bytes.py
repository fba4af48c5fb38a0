"""The size of a model's weights on one rank, from its config alone, before anything is downloaded."""

from __future__ import annotations

import math

import torch

from rocm_attn.models.config import ModelConfig
from rocm_attn.models.mlp_config import DenseAndExperts, ExpertMlp
from rocm_attn.models.shards import Shard
from rocm_serve.models.weights import expected_shapes

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def weight_bytes(config: ModelConfig, dtype: torch.dtype, num_ranks: int) -> int:
    """Bytes of one rank's weights in dtype. Routers and norms that are kept in float32 count in dtype: below 1 %.

    Raises BadModel for more tensors than any model has.
    """
    sizes = _sizes(config.on_one_of(num_ranks))
    rows = Shard(0, num_ranks).span(config.vocab_size).size * config.hidden_size
    if config.tied_embeddings:  # each rank holds all of it, padded so that its rows divide
        sizes[_EMBEDDING] = rows * num_ranks
    else:
        sizes[_HEAD] = rows
    return sum(sizes.values()) * dtype.itemsize


def elements_of_a_layer(config: ModelConfig) -> int:
    """Elements of the weights that a token is multiplied with in the mean layer. config: a rank's part"""
    idle = 0
    for layer in config.layers:
        mlp = layer.mlp.experts if isinstance(layer.mlp, DenseAndExperts) else layer.mlp
        if isinstance(mlp, ExpertMlp):
            num_idle = mlp.routing.num_experts - mlp.routing.num_chosen
            idle += num_idle * 3 * config.hidden_size * mlp.intermediate_size
    total = sum(size for name, size in _sizes(config).items() if name not in (_EMBEDDING, _HEAD))
    return (total - idle) // config.num_layers


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in expected_shapes(config).items()}

"""The weights of a model on one rank, counted from its config alone, before anything is downloaded."""

import math

import torch

from rocm_attn.capture.step_times import Matrices
from rocm_attn.models.config import ModelConfig
from rocm_attn.models.mlp_config import DenseAndExperts, ExpertMlp
from rocm_attn.models.shards import Shard
from rocm_serve.models.weights import expected_shapes

_TABLES = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")
_HEAD = "lm_head.weight"


def matrices_of(part: ModelConfig, dtype: torch.dtype, num_ranks: int) -> Matrices:
    """One rank's weights in dtype. Routers and norms that are kept in float32 count in dtype: below 1 %.

    part: the config of the rank's part
    Raises BadModel for more tensors than any model has.
    """
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(part).items()}
    rows = Shard(0, num_ranks).span(part.vocab_size).size * part.hidden_size
    if part.tied_embeddings:  # each rank holds all of it, padded so that its rows divide
        sizes[_TABLES[0]] = rows * (num_ranks - 1)
    sizes[_HEAD] = rows
    tables = sum(sizes.get(name, 0) for name in _TABLES)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    shared, size = sum(sizes.values()) - tables - experts, dtype.itemsize
    return Matrices(tables * size, shared * size, experts * size, _chosen(part), size)


def _chosen(config: ModelConfig) -> float:
    """The part of its experts that a token takes; 1 without experts."""
    mlps = (each.mlp.experts if isinstance(each.mlp, DenseAndExperts) else each.mlp for each in config.layers)
    routings = [mlp.routing for mlp in mlps if isinstance(mlp, ExpertMlp)]
    return routings[0].num_chosen / routings[0].num_experts if routings else 1.0

"""Models of random weights on a GPU, for benchmarks whose times do not depend on what a text says."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from rocm_attn.models.config import AttentionConfig, LayerConfig, ModelConfig
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import Rope
from rocm_attn.models.tensors import Shape
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import expected_shapes, load_weights
from rocm_serve.ranks import ONE_RANK, Ranks


def model_of(
    heads: tuple[int, int, int], hidden: int, inner: int, vocab: int, num_layers: int, context: int
) -> ModelConfig:
    """A Llama. heads: query heads, KV heads, head_dim"""
    num_q_heads, num_kv_heads, head_dim = heads
    attention = AttentionLayer(num_q_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    mixer = AttentionConfig(attention, Rope(theta=500000.0, head_dim=head_dim))
    layer = LayerConfig((mixer,), DenseMlp(inner, SwiGLU()))
    return ModelConfig(
        architecture="LlamaForCausalLM",
        layers=(layer,) * num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        context_len=context,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        eos_token_ids=(),
    )


LLAMA_8B = model_of((32, 8, 128), 4096, 14336, 128256, 32, 4096)


class RandomOnDevice:
    """A TensorSource whose tensors depend on their names, in values that bfloat16 represents."""

    name = "random tensors"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes, self._device = expected_shapes(config), device

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape, device=self._device)[where]
        random = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        # Products keep the size of their inputs, and the embedding has size one.
        size = 1.0 if "embed" in name else shape[-1] ** -0.5
        values = torch.randn(shape, generator=random, device=self._device, dtype=torch.float32)
        return (values * size).to(torch.bfloat16)[where]


def random_model(
    config: ModelConfig, source: type[RandomOnDevice] = RandomOnDevice, ranks: Ranks = ONE_RANK
) -> LoadedModel:
    """Returns the model on the current GPU, or a rank's part of it, in bfloat16, with a source's tensors."""
    device = torch.device("cuda")
    weights = load_weights(source(config, device), config, dtype=torch.bfloat16, device=device, shard=ranks.shard)
    return LoadedModel(config.on_one_of(ranks.shard.num_ranks), weights, None, ranks)

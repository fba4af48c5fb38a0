"""ModelConfig: everything about a model but its weights."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from rocm_attn.errors import BadModel
from rocm_attn.runner.gates import Gate
from rocm_attn.runner.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.runner.rope import Rope
from rocm_attn.runner.shards import Shard


class ExpertTensors(enum.Enum):
    """How a file keeps the matrices of a layer's experts."""

    EACH = "three matrices an expert, as of a dense MLP"
    STACKED = "all experts in one tensor, gate and up in turn, inputs before outputs"


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One gated MLP for every token."""

    intermediate_size: int
    gate: Gate
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Gated MLPs of which a router chooses some for every token.

    num_chosen:        experts of a token
    intermediate_size: of one expert
    has_bias:          of the router and of the experts
    normalised:        whether the shares of a token's chosen experts sum to 1; if not, those of all experts do
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    gate: Gate
    has_bias: bool
    normalised: bool
    tensors: ExpertTensors

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise BadModel(f"{self.num_chosen} experts a token of {self.num_experts} experts; it must be 1 to all")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    attention: AttentionLayer
    rope: Rope
    mlp: DenseMlp | ExpertMlp

    def on_one_of(self, num_ranks: int) -> LayerConfig:
        """The part of one tensor-parallel rank."""
        inner = Shard(0, num_ranks).span(self.mlp.intermediate_size).size
        mlp = replace(self.mlp, intermediate_size=inner)
        return replace(self, attention=self.attention.on_one_of(num_ranks), mlp=mlp)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMS norm, rotary embedding, grouped-query attention, gated MLPs.

    context_len:       tokens of a sequence's KV that the model was made for
    tied_embeddings:   whether the embedding is also the output matrix
    qkv_bias, out_bias: which projections add a bias
    qk_norm:           whether each head of q and k is RMS-normalised before it turns
    out_norms:         whether what attention and MLP give is RMS-normalised before it is added
    norm_offset:       added to the weights of every norm: 1 where a file holds what they differ from 1 by
    embedding_scale:   factor on the embeddings of tokens
    logits_soft_cap:   x -> cap * tanh(x / cap) on what comes out; 0: none
    eos_token_ids:     tokens that end a text
    """

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden_size: int
    vocab_size: int
    context_len: int
    rms_norm_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    out_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logits_soft_cap: float = 0.0

    def on_one_of(self, num_ranks: int) -> ModelConfig:
        """The part of one tensor-parallel rank: with its heads, and its elements of each MLP; all else is the whole's.

        Ranks' parts are all alike: what does not divide is filled up with zeros, see runner/shards.py.
        """
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers))

    def __post_init__(self) -> None:
        for layer in self.layers:
            if layer.attention.head_dim % 2:
                raise BadModel(f"head_dim {layer.attention.head_dim} is odd; rotary embedding turns pairs")
        for token in self.eos_token_ids:
            if token >= self.vocab_size:
                raise BadModel(f"end token {token} is not below the vocabulary's size {self.vocab_size}")

    @property
    def num_layers(self) -> int:
        """Layers, each with one attention."""
        return len(self.layers)

    @property
    def attention(self) -> AttentionGeometry:
        """The attention of every layer."""
        return AttentionGeometry.of([layer.attention for layer in self.layers])

"""ModelConfig: everything about a model but its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rocm_attn.errors import BadModel
from rocm_attn.runner.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.runner.mlp_config import Mlp
from rocm_attn.runner.rope import DivisorScaling, Rope


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """How a token's q, k and v come about where K and V have heads, and what becomes of the output.

    qkv_bias, out_bias: which projections add a bias
    qk_norm:            whether each head of q and k is RMS-normalised before it turns
    v_norm:             whether each head of v is, without weights
    v_is_k:             whether v is k as it was projected, so that there is no projection of its own
    indexer:            whether the layer has one, with norms of its own, which turns as the layer does
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    v_is_k: bool = False
    indexer: bool = False


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """How a token's q and its latent row come about (multi-head latent attention).

    q_rank:      elements of the row that q is made of; 0: q is made of the token itself
    nope_dim:    elements of a head's q that do not turn
    v_dim:       elements of a head's v
    interleaved: whether files keep elements that turn together side by side
    has_bias:    of the projections to rows of the rank, and of the output
    indexer:     whether the layer has one of its own, which turns as the layer does
    index_interleaved: as interleaved, of the indexer
    """

    q_rank: int
    nope_dim: int
    v_dim: int
    interleaved: bool
    has_bias: bool
    indexer: bool = False
    index_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    attention: AttentionLayer
    rope: Rope
    mlp: Mlp
    projections: HeadProjections | LatentProjections = HeadProjections()

    def on_one_of(self, num_ranks: int) -> LayerConfig:
        """The part of one tensor-parallel rank."""
        return replace(self, attention=self.attention.on_one_of(num_ranks), mlp=self.mlp.on_one_of(num_ranks))


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """What each layer gets of a token beside the residual (Gemma 4).

    dim:        elements for each layer; 0: nothing
    vocab_size: tokens that have such inputs
    """

    dim: int = 0
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors on rows.

    embedding: on the embeddings of tokens
    residual:  on what attention and MLP give, before it is added to the residual
    head:      on what the output matrix gets
    """

    embedding: float = 1.0
    residual: float = 1.0
    head: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMS norm, rotary embedding, attention over heads or latent rows, gated MLPs.

    context_len:       tokens of a sequence's KV that the model was made for
    tied_embeddings:   whether the embedding is also the output matrix
    out_norms:         whether what attention and MLP give is RMS-normalised before it is added
    norm_offset:       added to the weights of every norm: 1 where a file holds what they differ from 1 by
    own_inputs:        what each layer gets of a token beside the residual
    has_layer_factors: whether each layer's sum has a learned factor
    multipliers:       on embeddings, on what is added to the residual, on what the output matrix gets
    logits_soft_cap:   x -> cap * tanh(x / cap) on what comes out; 0: none
    eos_token_ids:     tokens that end a text
    num_extra_layers:  layers that a file may hold after these, for speculation; they are not read
    reads:             AttentionGeometry.reads; empty: every layer keeps K and V
    """

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden_size: int
    vocab_size: int
    context_len: int
    rms_norm_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    out_norms: bool = False
    norm_offset: float = 0.0
    multipliers: Multipliers = Multipliers()
    own_inputs: OwnInputs = OwnInputs()
    has_layer_factors: bool = False
    logits_soft_cap: float = 0.0
    num_extra_layers: int = 0
    reads: tuple[int, ...] = ()

    def on_one_of(self, num_ranks: int) -> ModelConfig:
        """The part of one tensor-parallel rank: with its heads, and its elements of each MLP; all else is the whole's.

        Ranks' parts are all alike: what does not divide is filled up with zeros, see runner/shards.py.
        """
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers))

    def __post_init__(self) -> None:
        for layer in self.layers:
            if layer.rope.head_dim % 2:
                raise BadModel(f"head_dim {layer.rope.head_dim} is odd; rotary embedding turns pairs")
            if isinstance(layer.rope.scaling, DivisorScaling):
                divisors, pairs = len(layer.rope.scaling.divisors), layer.rope.head_dim // 2
                if divisors != pairs:
                    raise BadModel(
                        f"{divisors} factors of the rotary embedding for {pairs} pairs of elements that turn; "
                        "each pair needs one"
                    )
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
        layers = tuple(layer.attention for layer in self.layers)
        return AttentionGeometry(layers, self.reads) if self.reads else AttentionGeometry.of(layers)

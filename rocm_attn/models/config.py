"""ModelConfig: everything about a model except its weights."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rocm_attn.errors import BadModel
from rocm_attn.models.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.models.mlp_config import Mlp
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.rope import DivisorScaling, Rope
from rocm_attn.problem import Indexer

# End of a tensor's name -> first row -> factor on the rows from there on, in order from row 0.
RowFactors = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """How a token's q, k and v are computed if K and V have heads, and how the output is projected.

    qkv_bias, out_bias: whether these projections add a bias
    qk_norm:            whether each head of q and k is RMS-normalised before it turns
    gate:               whether the output of each head is multiplied by the sigmoid of a gate; a file holds its rows
                        after those of the head's q
    v_norm:             whether each head of v is normalised, without weights
    v_is_k:             whether v is k as it was projected; v then has no projection of its own
    indexer:            whether the layer has an indexer with norms of its own, which turns as the layer does
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    gate: bool = False
    v_norm: bool = False
    v_is_k: bool = False
    indexer: bool = False


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """How a token's q and its latent row are computed (multi-head latent attention).

    q_rank:      elements of the row that q is made of; 0: q is made of the token itself
    nope_dim:    elements of a head's q that do not turn
    v_dim:       elements of a head's v
    interleaved: whether elements that turn together are adjacent in files
    has_bias:    whether the projections to rows of the rank, and of the output, add a bias
    indexer:     whether the layer has an indexer of its own, which turns as the layer does
    index_interleaved: like interleaved, for the indexer
    """

    q_rank: int
    nope_dim: int
    v_dim: int
    interleaved: bool
    has_bias: bool
    indexer: bool = False
    index_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The settings of a layer's attention."""

    attention: AttentionLayer
    rope: Rope
    projections: HeadProjections | LatentProjections = HeadProjections()

    def on_one_of(self, num_ranks: int) -> AttentionConfig:
        """The part of one tensor-parallel rank."""
        return replace(self, attention=self.attention.on_one_of(num_ranks))


class GatedNorm(enum.Enum):
    """Where the norm of a recurrent layer is, over the value heads of each key head."""

    AFTER_GATE = "on the product of output and gate"
    BEFORE_GATE = "on the output, which the gate multiplies then"
    NONE = "there is none"


@dataclass(frozen=True, slots=True)
class RecurrentProjections:
    """How a token's q, k and v are computed in a recurrent layer, and its output.

    in_bias, out_bias: whether the projections of the input and of the output add a bias
    convolved_bias:    whether the convolution adds one
    norm:              where the norm is, if files of this kind differ in that
    by_key_head:       whether a file holds the rows of q, k, v and the gate of a key head, then those of the next one
    """

    in_bias: bool = False
    convolved_bias: bool = False
    out_bias: bool = False
    norm: GatedNorm = GatedNorm.AFTER_GATE
    by_key_head: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The settings of a layer's recurrence, which keeps a state in place of K and V."""

    recurrent: RecurrentLayer
    projections: RecurrentProjections

    def on_one_of(self, num_ranks: int) -> RecurrentConfig:
        """The part of one tensor-parallel rank."""
        return replace(self, recurrent=self.recurrent.on_one_of(num_ranks))


MixerConfig = AttentionConfig | RecurrentConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings that can differ per layer. A layer adds its mixers' outputs to the residual, and then its MLP's.

    mixers: attention, a recurrence, or both on the same rows; none if the layer is an MLP alone
    """

    mixers: tuple[MixerConfig, ...]
    mlp: Mlp

    def on_one_of(self, num_ranks: int) -> LayerConfig:
        """The part of one tensor-parallel rank."""
        mixers = tuple(mixer.on_one_of(num_ranks) for mixer in self.mixers)
        return LayerConfig(mixers, self.mlp.on_one_of(num_ranks))


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """The inputs that each layer gets for a token in addition to the residual (Gemma 4).

    dim:        elements for each layer; 0: nothing
    vocab_size: tokens that have such inputs
    """

    dim: int = 0
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors on rows.

    embedding:        on the embeddings of tokens
    rounds_embedding: whether that factor is rounded to the model's dtype first (Gemma)
    residual:         on the output of attention and MLP, before it is added to the residual
    head:             on the input of the output matrix
    """

    embedding: float = 1.0
    rounds_embedding: bool = False
    residual: float = 1.0
    head: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMS norm, rotary embedding, attention over heads or latent rows, recurrent layers, MLPs.

    context_len:       KV tokens of a sequence that the model was made for
    tied_embeddings:   whether the embedding is also the output matrix
    out_norms:         whether the output of attention and MLP is RMS-normalised before it is added
    norm_offset:       added to the weights of every norm: 1 if a file holds their difference from 1
    own_inputs:        the inputs that each layer gets for a token in addition to the residual
    has_layer_factors: whether each layer's sum has a learned factor
    multipliers:       on embeddings, on terms of the residual, on the input of the output matrix
    logits_soft_cap:   x -> cap * tanh(x / cap) on the logits; 0: none
    eos_token_ids:     tokens that end a text
    num_extra_layers:  layers that a file may hold after these, for speculation; they are not read
    unread:            beginnings of names of other tensors for speculation that a file may hold
    reads:             AttentionGeometry.reads; empty: every layer with attention keeps K and V
    factors:           on rows of a file's matrices, which the weights that are read hold
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
    unread: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    factors: RowFactors = field(default_factory=dict)

    def on_one_of(self, num_ranks: int) -> ModelConfig:
        """The part of one tensor-parallel rank: its heads, and its elements of each MLP. Everything else is unchanged.

        The parts of all ranks are alike: sizes that do not divide are padded with zeros; see shards.py.
        """
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers))

    def __post_init__(self) -> None:
        for layer in self.attending:
            if layer.rope.head_dim % 2:
                raise BadModel(f"head_dim {layer.rope.head_dim} is odd; rotary embedding needs pairs")
            indexer = layer.attention.indexer
            if isinstance(indexer, Indexer) and indexer.head_dim < layer.rope.head_dim:
                raise BadModel(
                    f"index_head_dim is {indexer.head_dim}; it must hold the {layer.rope.head_dim} rotated elements"
                )
            if isinstance(layer.rope.scaling, DivisorScaling):
                divisors, pairs = len(layer.rope.scaling.divisors), layer.rope.head_dim // 2
                if divisors != pairs:
                    raise BadModel(
                        f"the rotary embedding has {divisors} factors for {pairs} rotated pairs; give one per pair"
                    )
        for token in self.eos_token_ids:
            if token >= self.vocab_size:
                raise BadModel(
                    f"end token {token} is not below the vocabulary's size {self.vocab_size}; correct eos_token_id in "
                    "the model's files"
                )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attending(self) -> tuple[AttentionConfig, ...]:
        """The attention of the layers that have one, in order."""
        return tuple(mixer for _, mixer in self._mixers if isinstance(mixer, AttentionConfig))

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the layers with attention among all layers."""
        return tuple(place for place, mixer in self._mixers if isinstance(mixer, AttentionConfig))

    @property
    def _mixers(self) -> tuple[tuple[int, MixerConfig], ...]:
        """Every layer's mixers, each with the layer's place."""
        return tuple((place, mixer) for place, layer in enumerate(self.layers) for mixer in layer.mixers)

    def keeps_kv(self, place: int) -> bool:
        """True if the layer at a place among all layers keeps K and V."""
        places = self.places
        return place in places and self.attention.keeps_kv(places.index(place))

    @property
    def attention(self) -> AttentionGeometry:
        """The attention of every layer that has one, and the recurrent layers."""
        layers = tuple(layer.attention for layer in self.attending)
        return AttentionGeometry(
            layers,
            self.reads or tuple(range(len(layers))),
            self.places,
            tuple((place, mixer.recurrent) for place, mixer in self._mixers if isinstance(mixer, RecurrentConfig)),
        )

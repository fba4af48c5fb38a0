"""A model's weights in the form that the forward pass uses, and how they are assembled from a file's tensors.

Files name and split the matrices in many ways. A TensorSource gives them Hugging Face's names and shapes. Here the
matrices that have the same input are joined, so that a layer makes four matrix products. A tensor-parallel rank reads
only its part: rows of matrices whose output it has a part of, columns of those whose input it has a part of, and rows
of the output matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import LatentProjections, LayerConfig, MixerConfig, ModelConfig, RecurrentConfig
from rocm_attn.models.mlp_config import ExpertMlp, ExpertTensors, Mlp, NoMlp
from rocm_attn.models.shards import WHOLE, Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader, TensorSource
from rocm_serve.models.attention_weights import (
    AttentionWeights,
    OfAttention,
    head_norms,
    head_shapes,
    latent_shapes,
    read_heads,
    read_latent,
)
from rocm_serve.models.kv_scales import KV_SCALES, kv_scale_values
from rocm_serve.models.mlp_weights import MlpWeights, mlp_shapes, read_mlp
from rocm_serve.models.recurrent_weights import RecurrentWeights, read_recurrent, recurrent_shapes

# Six times the tensors of 61 layers with 256 experts; their names alone take a hundred megabytes.
_MOST_TENSORS = 300_000


# The weights of attention, or of a recurrence in its place.
MixerWeights = AttentionWeights | RecurrentWeights


@dataclass(frozen=True, slots=True, eq=False)
class OwnInput:
    """Weights with which a layer uses its own input of a token.

    gate:     [per_layer_dim, hidden]
    out:      [hidden, per_layer_dim]
    out_norm: [hidden]
    """

    gate: Tensor
    out: Tensor
    out_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OwnInputWeights:
    """Weights that compute the layers' inputs in addition to the residual.

    embedding:  [vocab, layers * per_layer_dim]
    projection: [layers * per_layer_dim, hidden]
    norm:       [per_layer_dim]
    """

    embedding: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, or a rank's part of it. A weight that the model lacks is None.

    mixers: of attention, of a recurrence or of both, in the order of LayerConfig.mixers
    attention_norm, mlp_norm: [hidden]; on the input of the mixers and of the MLP; None if the layer lacks that part
    attention_out_norm, mlp_out_norm: [hidden]; on terms added to the residual
    factor: [1]; on the layer's sum
    kv_scale_values: scales of K and of V in E4M3FN, from the model's file
    """

    attention_norm: Tensor | None
    mixers: tuple[MixerWeights, ...]
    attention_out_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: MlpWeights | None
    mlp_out_norm: Tensor | None
    own_input: OwnInput | None
    factor: Tensor | None
    kv_scale_values: tuple[float, float] | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of a model on one device, or a rank's part, of one dtype except as load_weights() says.

    embedding: [vocab, hidden]; with a row of zeros for each element that pads the vocabulary, if it is the head too
    head:      [vocab, hidden]; a rank's rows of it; those of the embedding itself if the model ties them
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    own_inputs: OwnInputWeights | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices, and of the arithmetic."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of every weight."""
        return self.embedding.device

    @property
    def attending(self) -> tuple[AttentionWeights, ...]:
        """Those of the layers with attention, in order."""
        every = (mixer for layer in self.layers for mixer in layer.mixers)
        return tuple(mixer for mixer in every if isinstance(mixer, AttentionWeights))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; shared memory is counted once."""
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in _tensors(self)}
        return sum(storages.values())


def _tensors(weights: object) -> Iterator[Tensor]:
    """Every tensor in a dataclass, and in the dataclasses and tuples in it."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for each in weights:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(weights):
        for part in dataclasses.fields(weights):
            yield from _tensors(getattr(weights, part.name))


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Hugging Face's name -> shape of every tensor that the model needs. Raises BadModel for too many."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    own = config.own_inputs
    if own.dim:
        of_all_layers = config.num_layers * own.dim
        shapes["model.embed_tokens_per_layer.weight"] = (own.vocab_size, of_all_layers)
        shapes["model.per_layer_model_projection.weight"] = (of_all_layers, config.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (own.dim,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for number in range(config.num_layers):
        for name, shape in layer_shapes(config, number):
            shapes[f"model.layers.{number}.{name}"] = shape
            if len(shapes) > _MOST_TENSORS:
                raise BadModel(
                    f"the model's config asks for more than {_MOST_TENSORS} tensors; check its layers and experts"
                )
    return shapes


def layer_shapes(config: ModelConfig, number: int) -> Iterator[tuple[str, Shape]]:
    """Yields the name within a layer and the shape of every tensor of it."""
    layer, hidden = config.layers[number], config.hidden_size
    for mixer in layer.mixers:
        if isinstance(mixer, RecurrentConfig):
            yield from recurrent_shapes(mixer.recurrent, mixer.projections, hidden)
        elif isinstance(mixer.projections, LatentProjections):
            yield from latent_shapes(mixer.attention, mixer.projections, hidden)
        else:
            yield from head_shapes(mixer.attention, mixer.projections, hidden, keeps_kv=config.keeps_kv(number))
    for name in _norm_names(config, layer).values():
        yield f"{name}.weight", (hidden,)
    yield from mlp_shapes(layer.mlp, hidden)
    if config.own_inputs.dim:
        yield "per_layer_input_gate.weight", (config.own_inputs.dim, hidden)
        yield "per_layer_projection.weight", (hidden, config.own_inputs.dim)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if config.has_layer_factors:
        yield "layer_scalar", (1,)


def _norm_names(config: ModelConfig, layer: LayerConfig) -> dict[str, str]:
    """Field of LayerWeights -> name of the norm in files. With norms after attention, one name means another norm."""
    if not layer.mixers:
        return {"mlp_norm": "norm"}
    if isinstance(layer.mlp, NoMlp):
        return {"attention_norm": "norm"}
    names = {"attention_norm": "input_layernorm"}
    if not config.out_norms:
        return names | {"mlp_norm": "post_attention_layernorm"}
    return names | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


def load_weights(
    source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> ModelWeights:
    """Reads a rank's part of the weights of the model, one tensor at a time.

    config: of the whole model
    dtype:  of all weights except sinks, norms with an offset, and the decays and norms of recurrences, which are
            float32: 1 + w needs more digits than w
    shard:  the part; each rank holds the whole embedding
    Raises BadModel for a tensor that is missing, not expected, of another shape, or not finite.
    """
    config = _as_stored(source, config)
    _check_shapes(source, config)
    reader = TensorReader(source, expected_shapes(config), dtype, device)
    rows, vocab = shard.span(config.vocab_size), config.vocab_size
    held = ShardRange(0, vocab, rows.size * shard.num_ranks if config.tied_embeddings else vocab)
    # If it is the head too, it lies as matrices do: the head takes far longer than the look-ups.
    embedding = (reader.join if config.tied_embeddings else reader.table)(
        TensorPart("model.embed_tokens.weight", (held,))
    )
    return ModelWeights(
        embedding=embedding,
        layers=tuple(read_layer(reader, config, number, shard) for number in range(config.num_layers)),
        final_norm=_norm(reader, config, "model.norm"),
        head=torch.split(embedding, rows.size)[shard.rank]
        if config.tied_embeddings
        else reader.join(TensorPart("lm_head.weight", (rows,))),
        own_inputs=_own_inputs(reader) if config.own_inputs.dim else None,
    )


def _as_stored(source: TensorSource, config: ModelConfig) -> ModelConfig:
    """The config, with experts as the source holds them: Qwen3.5's files have one of two forms."""
    shapes = source.shapes()

    def of(number: int, mlp: Mlp) -> Mlp:
        is_joined = f"model.layers.{number}.mlp.experts.gate_up_proj" in shapes
        if is_joined and isinstance(mlp, ExpertMlp) and mlp.tensors is ExpertTensors.EACH:
            return replace(mlp, tensors=ExpertTensors.JOINED)
        return mlp

    of_layers = enumerate(config.layers)
    return replace(config, layers=tuple(replace(layer, mlp=of(number, layer.mlp)) for number, layer in of_layers))


def _check_shapes(source: TensorSource, config: ModelConfig) -> None:
    expected, found = expected_shapes(config), source.shapes()
    missing = [name for name in expected if name not in found]
    if missing:
        raise BadModel(f"{source.name} lacks {_some(missing)}; the file is incomplete or belongs to another model")
    unexpected = [name for name in found if name not in expected and not may_be_ignored(config, name)]
    if unexpected:
        raise BadModel(f"{source.name} has {_some(unexpected)}, which {config.architecture} does not use")
    for name, shape in expected.items():
        if found[name] != shape:
            raise BadModel(
                f"{source.name}: {name} has shape {list(found[name])}; the model's config asks for {list(shape)}"
            )


def may_be_ignored(config: ModelConfig, name: str) -> bool:
    """True for a tensor that files of such a model may have although the model does not use it."""
    # a tied head may be stored again, old files keep a table that follows from the config, and layers for speculation
    # may have names of their own
    layer = name.removeprefix("model.layers.").partition(".")[0]
    is_extra = layer.isdecimal() and len(layer) < 10 and 0 <= int(layer) - config.num_layers < config.num_extra_layers
    if layer.isdecimal() and len(layer) < 10 and int(layer) < config.num_layers:
        # layers that read K and V of another one may hold weights for K and V of their own
        part = name.removeprefix(f"model.layers.{layer}.self_attn.").partition(".")[0]
        attends = int(layer) in config.places
        if attends and part in ("k_proj", "v_proj", "k_norm", "v_norm") and not config.keeps_kv(int(layer)):
            return True
    is_extra |= name == "lm_head.weight" or name.startswith(config.unread)
    return is_extra or name.endswith((*KV_SCALES, "rotary_emb.inv_freq"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def read_layer(reader: TensorReader, config: ModelConfig, number: int, shard: Shard) -> LayerWeights:
    """Reads a rank's part of layer `number`. config: of the whole model; reader: has the shapes of layer_shapes()"""
    layer, prefix = config.layers[number], f"model.layers.{number}."
    norms = {field: _norm(reader, config, prefix + name) for field, name in _norm_names(config, layer).items()}
    return LayerWeights(
        attention_norm=norms.get("attention_norm"),
        mixers=tuple(_mixer(reader, config, number, mixer, shard) for mixer in layer.mixers),
        attention_out_norm=norms.get("attention_out_norm"),
        mlp_norm=norms.get("mlp_norm"),
        mlp=read_mlp(reader, layer.mlp, prefix, shard),
        mlp_out_norm=norms.get("mlp_out_norm"),
        own_input=_own_input(reader, prefix) if config.own_inputs.dim else None,
        factor=reader.join(TensorPart(f"{prefix}layer_scalar")) if config.has_layer_factors else None,
        kv_scale_values=kv_scale_values(reader.source, f"{prefix}self_attn."),
    )


def _own_input(reader: TensorReader, prefix: str) -> OwnInput:
    return OwnInput(
        gate=reader.join(TensorPart(f"{prefix}per_layer_input_gate.weight")),
        out=reader.join(TensorPart(f"{prefix}per_layer_projection.weight")),
        out_norm=reader.join(TensorPart(f"{prefix}post_per_layer_input_norm.weight")),
    )


def _own_inputs(reader: TensorReader) -> OwnInputWeights:
    return OwnInputWeights(
        embedding=reader.table(TensorPart("model.embed_tokens_per_layer.weight")),
        projection=reader.join(TensorPart("model.per_layer_model_projection.weight")),
        norm=reader.join(TensorPart("model.per_layer_projection_norm.weight")),
    )


def _mixer(reader: TensorReader, config: ModelConfig, number: int, mixer: MixerConfig, shard: Shard) -> MixerWeights:
    if isinstance(mixer, RecurrentConfig):
        return read_recurrent(reader, mixer.recurrent, mixer.projections, f"model.layers.{number}.", shard)
    prefix, projections, keeps_kv = f"model.layers.{number}.self_attn.", mixer.projections, config.keeps_kv(number)
    if isinstance(projections, LatentProjections):
        return read_latent(OfAttention(reader, prefix, shard), mixer.attention, projections)
    norms = {name: _norm(reader, config, prefix + name) for name in head_norms(projections, keeps_kv=keeps_kv)}
    return read_heads(OfAttention(reader, prefix, shard), mixer.attention, projections, norms, keeps_kv=keeps_kv)


def _norm(reader: TensorReader, config: ModelConfig, name: str) -> Tensor:
    if not config.norm_offset:
        return reader.join(TensorPart(f"{name}.weight"))
    return reader.in_float32(TensorPart(f"{name}.weight")) + config.norm_offset

"""A model's weights in the form that the forward pass uses, and how they are assembled from a file's tensors.

Files name and split the matrices in many ways. A TensorSource gives them Hugging Face's names and shapes. Here the
matrices that have the same input are joined, so that a layer makes four matrix products. A tensor-parallel rank reads
only its part: rows of matrices whose output it has a part of, columns of those whose input it has a part of, and rows
of the output matrix.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import LatentProjections, LayerConfig, MixerConfig, ModelConfig, RecurrentConfig
from rocm_attn.models.hf_config import UNQUANTISED
from rocm_attn.models.mlp_config import DenseMlp, ExpertMlp, ExpertTensors, Mlp, NoMlp
from rocm_attn.models.shards import WHOLE, Shard, ShardRange
from rocm_attn.models.tensors import Shape, ShapesOfReads, TensorPart, TensorReader, TensorSource
from rocm_serve.models.arithmetic import OwnInput
from rocm_serve.models.attention_weights import AttentionWeights, OfAttention, read_heads, read_latent
from rocm_serve.models.kv_scales import KV_SCALES, kv_scale_values
from rocm_serve.models.mlp_weights import MlpWeights, read_mlp
from rocm_serve.models.recurrent import RecurrentWeights, read_recurrent

# Six times the tensors of 61 layers with 256 experts; their names alone take a hundred megabytes.
_MOST_TENSORS = 300_000
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Ends of names in files of GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes and MXFP4. Not all say so in config.json.
_OF_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", "_blocks")
# Rows of a stored head that are compared at once.
_ROWS_AT_ONCE = 4096


# The weights of attention, or of a recurrence in its place.
MixerWeights = AttentionWeights | RecurrentWeights


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
    reader = ShapesOfReads(_MOST_TENSORS)
    _read_model(reader, config, WHOLE)
    return reader.shapes


def layer_shapes(config: ModelConfig, width: int) -> dict[str, Shape]:
    """Likewise, of the tensors of the first layer. width: see read_layer"""
    reader = ShapesOfReads(_MOST_TENSORS)
    read_layer(reader, config, 0, WHOLE, width)
    return reader.shapes


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
    Raises BadModel for a tensor that is missing, not expected, of another shape, or not finite, and for a tied head
    that is stored with other values than the embedding.
    """
    config = _as_stored(source, config)
    _check_shapes(source, config)
    if config.tied_embeddings and _HEAD in source.shapes():
        _check_head(source, dtype)
    return _read_model(TensorReader(source, dtype, device), config, shard)


def _read_model(reader: TensorReader, config: ModelConfig, shard: Shard) -> ModelWeights:
    vocab, hidden = config.vocab_size, config.hidden_size
    rows, shape = shard.span(vocab), (vocab, hidden)
    held = ShardRange(0, vocab, rows.size * shard.num_ranks if config.tied_embeddings else vocab)
    # If it is the head too, it lies as matrices do: the head takes far longer than the look-ups.
    embedding = (reader.join if config.tied_embeddings else reader.table)(TensorPart(_EMBEDDING, shape, (held,)))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(read_layer(reader, config, number, shard, hidden) for number in range(config.num_layers)),
        final_norm=_norm(reader, config, "model.norm", hidden),
        head=torch.split(embedding, rows.size)[shard.rank]
        if config.tied_embeddings
        else reader.join(TensorPart(_HEAD, shape, (rows,))),
        own_inputs=_own_inputs(reader, config) if config.own_inputs.dim else None,
    )


def _as_stored(source: TensorSource, config: ModelConfig) -> ModelConfig:
    """The config, with MLPs as the source holds them: files of Qwen3.5 and MiniMax-M3 have one of two forms."""
    shapes = source.shapes()

    def of(number: int, mlp: Mlp) -> Mlp:
        prefix = f"model.layers.{number}.mlp."
        if isinstance(mlp, DenseMlp):
            return replace(mlp, is_joined=f"{prefix}gate_up_proj.weight" in shapes)
        is_joined = f"{prefix}experts.gate_up_proj" in shapes
        if is_joined and isinstance(mlp, ExpertMlp) and mlp.tensors is ExpertTensors.EACH:
            return replace(mlp, tensors=ExpertTensors.JOINED)
        return mlp

    of_layers = enumerate(config.layers)
    return replace(config, layers=tuple(replace(layer, mlp=of(number, layer.mlp)) for number, layer in of_layers))


def _check_shapes(source: TensorSource, config: ModelConfig) -> None:
    expected, found = expected_shapes(config), source.shapes()
    if quantised := [name for name in found if name.endswith(_OF_QUANTISED)]:
        raise BadModel(f"{source.name} has {_some(quantised)}, which belong to quantised weights; {UNQUANTISED}")
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


def _check_head(source: TensorSource, dtype: torch.dtype) -> None:
    """Raises BadModel for a stored head that differs from the embedding as `dtype`; readers of such files differ."""
    shapes = source.shapes()
    (vocab, *_), is_same = shapes[_EMBEDDING], shapes[_HEAD] == shapes[_EMBEDDING]
    for first in range(0, vocab, _ROWS_AT_ONCE) if is_same else ():
        rows = slice(first, min(first + _ROWS_AT_ONCE, vocab))
        embedding, head = (source.read(name, rows).to(dtype) for name in (_EMBEDDING, _HEAD))
        is_same &= torch.equal(embedding, head)
    if not is_same:
        raise BadModel(
            f"{source.name}: {_HEAD} differs from {_EMBEDDING}, and the model's config says tie_word_embeddings; set "
            f"it to false if the model was trained with a head of its own, or remove {_HEAD}"
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
    is_extra |= name == _HEAD or name.startswith(config.unread)
    return is_extra or name.endswith((*KV_SCALES, "rotary_emb.inv_freq"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def read_layer(reader: TensorReader, config: ModelConfig, number: int, shard: Shard, width: int) -> LayerWeights:
    """Reads a rank's part of layer `number`.

    config: of the whole model
    width:  elements of the mixers' input for a token
    """
    layer, prefix, hidden = config.layers[number], f"model.layers.{number}.", config.hidden_size
    names = _norm_names(config, layer).items()
    norms = {field: _norm(reader, config, prefix + name, hidden) for field, name in names}
    scalar = TensorPart(f"{prefix}layer_scalar", (1,))
    return LayerWeights(
        attention_norm=norms.get("attention_norm"),
        mixers=tuple(_mixer(reader, config, number, mixer, shard, width) for mixer in layer.mixers),
        attention_out_norm=norms.get("attention_out_norm"),
        mlp_norm=norms.get("mlp_norm"),
        mlp=read_mlp(reader, layer.mlp, prefix, shard, hidden),
        mlp_out_norm=norms.get("mlp_out_norm"),
        own_input=_own_input(reader, config, prefix) if config.own_inputs.dim else None,
        factor=reader.join(scalar) if config.has_layer_factors else None,
        kv_scale_values=kv_scale_values(reader.source, f"{prefix}self_attn."),
    )


def _own_input(reader: TensorReader, config: ModelConfig, prefix: str) -> OwnInput:
    dim, hidden = config.own_inputs.dim, config.hidden_size
    return OwnInput(
        gate=reader.join(TensorPart(f"{prefix}per_layer_input_gate.weight", (dim, hidden))),
        out=reader.join(TensorPart(f"{prefix}per_layer_projection.weight", (hidden, dim))),
        out_norm=reader.join(TensorPart(f"{prefix}post_per_layer_input_norm.weight", (hidden,))),
    )


def _own_inputs(reader: TensorReader, config: ModelConfig) -> OwnInputWeights:
    own, of_all_layers = config.own_inputs, config.num_layers * config.own_inputs.dim
    embedding = TensorPart("model.embed_tokens_per_layer.weight", (own.vocab_size, of_all_layers))
    projection = TensorPart("model.per_layer_model_projection.weight", (of_all_layers, config.hidden_size))
    return OwnInputWeights(
        embedding=reader.table(embedding),
        projection=reader.join(projection),
        norm=reader.join(TensorPart("model.per_layer_projection_norm.weight", (own.dim,))),
    )


def _mixer(
    reader: TensorReader, config: ModelConfig, number: int, mixer: MixerConfig, shard: Shard, width: int
) -> MixerWeights:
    prefix, hidden = f"model.layers.{number}.", config.hidden_size
    if isinstance(mixer, RecurrentConfig):
        return read_recurrent(reader, mixer, prefix, shard, hidden)
    tensors = OfAttention(reader, f"{prefix}self_attn.", shard, hidden, width)
    if isinstance(mixer.projections, LatentProjections):
        return read_latent(tensors, mixer.attention, mixer.projections)

    def norm(name: str, dim: int) -> Tensor:
        return _norm(reader, config, tensors.prefix + name, dim)

    return read_heads(tensors, mixer.attention, mixer.projections, norm, keeps_kv=config.keeps_kv(number))


def _norm(reader: TensorReader, config: ModelConfig, name: str, dim: int) -> Tensor:
    weight = TensorPart(f"{name}.weight", (dim,))
    if not config.norm_offset:
        return reader.join(weight)
    return reader.computed(lambda read: read + config.norm_offset, reader.in_float32(weight))

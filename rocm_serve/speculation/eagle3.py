"""The EAGLE-3 head: one layer over the hidden states of three layers of the large model, concatenated and projected.

For token i, with hidden states a[i], b[i], c[i] (inputs of the large model's layers), and the token after it:

    f[i] = [a[i], b[i], c[i]] @ fc.T
    x = [norm(embedding[token[i + 1]]), norm(f[i])]     g = f[i] + attention(x)     f'[i + 1] = g + mlp(norm(g))

and norm(f') @ head.T are logits of token i + 2 over the head's own, smaller vocabulary: `d2t` is the difference between
a token's id in the large model and its id in the head. In a draft step, f' takes the place of f. Files are those of
SpecForge and SGLang (LlamaForCausalLMEagle3): a config.json, and one layer, called `midlayer` or `layers.0`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import HeadProjections, LayerConfig, ModelConfig
from rocm_attn.models.fields import Fields, read_json
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.hf_config import config_from_json
from rocm_attn.models.mlp_config import NoMlp
from rocm_attn.models.shards import WHOLE
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader, TensorSource
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.models.weights import ModelWeights, layer_shapes, read_layer
from rocm_serve.ranks import ONE_RANK
from rocm_serve.speculation.eagle_head import EagleHead, EagleWeights
from rocm_serve.speculation.head_files import FC, LAYER, HeadFiles, SeededHead, require_shapes

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NUM_ROWS = 3
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Tensors that say which tokens a head knows.
_OF_TOKENS = frozenset({"d2t", "t2d"})
# Fields of heads with other norms than those above. They are in eagle_config, or next to it.
_OTHER_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Weights(EagleWeights):
    """A head that was read.

    model:        its one layer, norm, output matrix and embedding, as a model; the last may be the large model's
    fc:           [hidden, 3 * the large model's hidden]
    layers:       three; one past the large model's last layer stands for that layer's output
    feature_norm: [hidden], on the features next to the embedding
    token_of:     int32 [draft vocabulary], the tokens that the head knows
    """

    feature_norm: Tensor
    token_of: Tensor

    def over(self, large: Model, runtime: AttentionRuntime, most_tokens: int) -> Eagle3Head:
        return Eagle3Head(self, large, runtime, most_tokens)


def is_eagle3(path: str) -> bool:
    """True if the head in a directory is one of EAGLE-3 by its config. Raises BadModel for an invalid config."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return False
    fields = Fields(read_json(config), str(config))
    named = fields.list("architectures") if fields.has("architectures") else []
    return fields.has("draft_vocab_size") or (bool(named) and named[0] in ARCHITECTURES)


def load_head3(path: str, large: LoadedModel) -> Eagle3Weights:
    """Reads a head directory with config.json and model.safetensors. Raises BadModel if it is of another model."""
    directory = Path(path)
    fields = Fields(read_json(directory / "config.json"), str(directory / "config.json"))
    config = _config(fields, large.config)
    files = HeadFiles(directory, {})
    num_known = fields.whole("draft_vocab_size", config.vocab_size)
    knows_all = "d2t" not in files.shapes()
    differences = torch.zeros(num_known, dtype=torch.int64) if knows_all else files.read_integers("d2t")
    return _weights(files, config, large, num_known, _layers(fields, large.config.num_layers), differences)


def seeded_head3(large: LoadedModel) -> Eagle3Weights:
    """A head of random weights, always the same ones, that knows every second token of the large model."""
    attention, mlps = large.config.attending[-1], [layer.mlp for layer in large.config.layers]
    large_layer = attention.attention
    # Plain heads, as files have: the large model's layer may keep latent rows, choose its keys, or have a window.
    plain = AttentionLayer(large_layer.num_q_heads, large_layer.num_kv_heads, large_layer.head_dim, large_layer.scale)
    attention = replace(attention, attention=plain, projections=HeadProjections())
    mlp = next(mlp for mlp in reversed(mlps) if not isinstance(mlp, NoMlp))
    config = replace(_alone(large.config), layers=(LayerConfig((attention,), mlp),))
    num_known = -(-config.vocab_size // 2)
    source = SeededHead(_shapes(config, large.config.hidden_size, num_known, own_embedding=False))
    differences = torch.arange(num_known)
    return _weights(source, config, large, num_known, default_layers(large.config.num_layers), differences)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs a head gets if it names none: near the beginning, in the middle, near the end."""
    return min(2, num_layers), num_layers // 2, max(0, num_layers - 3)


class Eagle3Head(EagleHead):
    """Like EagleHead, with norms, an output matrix and perhaps an embedding of its own."""

    def __init__(self, weights: Eagle3Weights, large: Model, runtime: AttentionRuntime, most_tokens: int) -> None:
        super().__init__(weights, large, runtime, most_tokens)
        self._weights, self._of_head = weights, weights.model.weights
        self._shares_embedding = self._of_head.embedding is large.weights.embedding

    def tokens(self, drafted: Tensor) -> Tensor:
        return self._weights.token_of[drafted.long()]

    def given(self, features: Tensor) -> Tensor:
        return self._arithmetic.linears.linear(features, self._fc)

    def next_features(self, step: Part, features: Tensor) -> Tensor:
        norm = self._arithmetic.norm
        if self._shares_embedding:
            embedded = self._large.embed(step.token_ids)
        else:
            embedded = F.embedding(step.token_ids, self._of_head.embedding)
        assert self._of_layer.attention_norm is not None, "a head's layer attends"
        both = norm(embedded, self._of_layer.attention_norm), norm(features, self._weights.feature_norm)
        return self.through_layer(step, torch.cat(both, 1), features)

    def logits(self, features: Tensor) -> Tensor:
        return self._arithmetic.linears.linear(
            self._arithmetic.norm(features, self._of_head.final_norm), self._of_head.head
        )


def _alone(config: ModelConfig) -> ModelConfig:
    """A plain decoder of the same sizes."""
    return ModelConfig(
        architecture=ARCHITECTURES[0],
        layers=config.layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        rms_norm_eps=config.rms_norm_eps,
        tied_embeddings=False,
        eos_token_ids=(),
    )


def _config(fields: Fields, large: ModelConfig) -> ModelConfig:
    """The config of a file, which describes its layer in the form of Llama's files."""
    if fields.whole("num_hidden_layers", 1) != 1:
        raise BadModel(f"{fields.source}: an EAGLE-3 head must have one layer")
    for place in (fields, fields.inner("eagle_config")):
        for name in _OTHER_NORMS:
            if place.flag(name, False):
                raise BadModel(
                    f"{place.source}: {name} is true; only heads where it is false are served: use one of those, or "
                    "speculative ngram"
                )
    config = config_from_json({**fields.values, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
    made_for = fields.whole("target_hidden_size", config.hidden_size), config.vocab_size
    if made_for != (large.hidden_size, large.vocab_size):
        raise BadModel(
            f"{fields.source}: the head is made for rows of {made_for[0]} and {made_for[1]} tokens, and the model "
            f"has rows of {large.hidden_size} and {large.vocab_size} tokens; use a head of this model"
        )
    return replace(_alone(config), context_len=max(config.context_len, large.context_len))


def _layers(fields: Fields, num_layers: int) -> tuple[int, int, int]:
    """The layers that take the rows as input. A file names the layers before them, whose outputs the rows are."""
    if fields.has(_LAYERS):
        raise BadModel(
            f"{fields.source} has {_LAYERS} next to eagle_config, where readers count in other ways; put it into "
            "eagle_config, as the layers whose outputs the head takes"
        )
    given = fields.inner("eagle_config")
    if not given.has(_LAYERS):
        return default_layers(num_layers)
    named = given.ids(_LAYERS)
    if len(named) != _NUM_ROWS or max(named) >= num_layers:
        raise BadModel(
            f"{fields.source}: {_LAYERS} is {list(named)}; it must be {_NUM_ROWS} of the model's {num_layers} layers"
        )
    first, second, third = (layer + 1 for layer in named)
    return first, second, third


def _shapes(config: ModelConfig, large_hidden: int, num_known: int, *, own_embedding: bool) -> dict[str, Shape]:
    """Name -> shape of every tensor of a head except d2t."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {FC: (hidden, _NUM_ROWS * large_hidden), "norm.weight": (hidden,)}
    shapes |= layer_shapes(config, 2 * hidden)
    shapes[f"{LAYER}hidden_norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (num_known, hidden)
    if own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    return shapes


def _weights(
    source: TensorSource,
    config: ModelConfig,
    large: LoadedModel,
    num_known: int,
    layers: tuple[int, int, int],
    differences: Tensor,
) -> Eagle3Weights:
    """differences: integer [num_known], token ids minus the head's numbers. Raises BadModel."""
    of_large, own_embedding = large.weights, "embed_tokens.weight" in source.shapes()
    if not own_embedding and config.hidden_size != large.config.hidden_size:
        raise BadModel(f"{source.name} has no embed_tokens.weight, and its rows are not as long as the model's")
    shapes = _shapes(config, large.config.hidden_size, num_known, own_embedding=own_embedding)
    require_shapes(source, shapes, "EAGLE-3", config, _OF_TOKENS)
    token_of = _tokens_known(differences, num_known, config.vocab_size, source.name)
    reader = TensorReader(source, of_large.dtype, of_large.device)

    def whole(name: str) -> Tensor:
        return reader.join(TensorPart(name, shapes[name]))

    weights = ModelWeights(
        embedding=whole("embed_tokens.weight") if own_embedding else of_large.embedding,
        layers=(read_layer(reader, config, 0, WHOLE, 2 * config.hidden_size),),
        final_norm=whole("norm.weight"),
        head=whole("lm_head.weight"),
    )
    return Eagle3Weights(
        LoadedModel(config, weights, None, ONE_RANK),
        whole(FC),
        layers,
        whole(f"{LAYER}hidden_norm.weight"),
        token_of.to(torch.int32).to(of_large.device),
    )


def _tokens_known(differences: Tensor, num_known: int, vocab_size: int, name: str) -> Tensor:
    """Eagle3Weights.token_of, as int64 on the host. Raises BadModel."""
    if differences.shape == (num_known,):
        token_of = torch.arange(num_known) + differences
        # If a token had two numbers, only one's probability would count when drafts are drawn.
        if bool(((token_of >= 0) & (token_of < vocab_size)).all()) and len(set(token_of.tolist())) == num_known:
            return token_of
    raise BadModel(f"{name}: d2t must map {num_known} tokens to as many of the model's {vocab_size}")

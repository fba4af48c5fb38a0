"""The head of EAGLE-1: a layer that continues from the rows that the large model hands over.

For token i, with feature f[i], which is the large model's input of its output matrix, and the token after it:

    x = [embedding[token[i + 1]], f[i]] @ fc.T        f'[i + 1] = x + attention(x), and that + mlp(norm(...))

and f' @ head.T are logits of token i + 2. Embedding and output matrix are the large model's. In a draft step f' takes
the place of f. K and V of the layer are the head's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import LayerConfig, ModelConfig, OwnInputs
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader, TensorSource
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic, Residual
from rocm_serve.models.attention import layer_attention
from rocm_serve.models.linears import linears_over
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp import add_mlp
from rocm_serve.models.model import Model
from rocm_serve.models.safetensors_file import SafetensorsFiles
from rocm_serve.models.weights import expected_shapes, load_weights
from rocm_serve.ranks import ONE_RANK
from rocm_serve.speculation.methods import SEEDED
from rocm_serve.speculation.seeded_head import FC, SeededHead


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """A head that was read.

    model: its one layer, as a model; the embedding and the output matrix are the large model's
    fc:    [hidden, 2 * hidden]: of an embedding and a feature
    """

    model: LoadedModel
    fc: Tensor


def load_head(path: str, large: LoadedModel) -> EagleWeights:
    """Reads the head in a directory with model.safetensors, under EAGLE-1's names, or makes a seeded random one.

    Raises BadModel for a head that is not made for this model.
    """
    layer, weights = _layer_like(large.config), large.weights
    # Its matrices will be the large model's: one row stands for them until they are put in.
    config = replace(
        large.config,
        layers=(layer,),
        reads=(),
        vocab_size=1,
        eos_token_ids=(),
        tied_embeddings=True,
        own_inputs=OwnInputs(),
        has_layer_factors=False,
        num_extra_layers=0,
    )
    shape = (config.hidden_size, 2 * config.hidden_size)
    source: TensorSource
    if path == SEEDED:
        source = SeededHead({**expected_shapes(config), FC: shape})
    else:
        source = _EagleFiles(Path(path), config, shape)
    if source.shapes()[FC] != shape:
        raise BadModel(
            f"{source.name}: {FC} has shape {list(source.shapes()[FC])}; a head of this model has {list(shape)}"
        )
    of_head = load_weights(_WithoutFc(source), config, dtype=weights.dtype, device=weights.device)
    reader = TensorReader(source, {FC: shape}, weights.dtype, weights.device)
    of_head = replace(of_head, embedding=weights.embedding, final_norm=weights.final_norm, head=weights.head)
    config = replace(config, vocab_size=large.config.vocab_size)
    return EagleWeights(LoadedModel(config, of_head, None, ONE_RANK), reader.join(TensorPart(FC)))


class EagleHead:
    """Like DraftingModel. large: the model that it drafts for; runtime: of the head's own layer

    features: [most_tokens, hidden]: input of taken_in(), one row for each token of its step; the caller writes them
    """

    def __init__(self, weights: EagleWeights, large: Model, runtime: AttentionRuntime, most_tokens: int) -> None:
        config, of_head = weights.model.config, weights.model.weights
        self._large, self._fc = large, weights.fc
        self._layer, self._weights = config.layers[0], of_head.layers[0]
        self._arithmetic = Arithmetic(
            linears_over(ONE_RANK, deterministic=runtime.deterministic),
            config.rms_norm_eps,
            config.multipliers.residual,
        )
        rope = self._layer.rope.turns(runtime.max_kv_len, of_head.device)
        self._attention = layer_attention(0, 0, self._layer, self._weights.attention, self._arithmetic, rope)
        with torch.inference_mode(False):
            self.features = torch.zeros(most_tokens, config.hidden_size, dtype=of_head.dtype, device=of_head.device)
        self.nothing_carried = self.features[:0]

    def taken_in(self, step: Part) -> tuple[Tensor, Tensor]:
        """Like DraftingModel.taken_in; the carried rows are the features of the next tokens."""
        features = self._next_features(step, self.features[: step.token_ids.shape[0]])
        last = features.index_select(0, step.last_token_of_seq)
        return self._large.logits_of_normed(last), last

    def drafted(self, step: Part, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Like DraftingModel.drafted."""
        features = self._next_features(step, carried)
        return self._large.logits_of_normed(features), features

    def tokens(self, drafted: Tensor) -> Tensor:
        """Like DraftingModel.tokens."""
        return drafted

    def _next_features(self, step: Part, features: Tensor) -> Tensor:
        """[T, hidden]"""
        arithmetic, of_attention = self._arithmetic, self._weights.attention
        hidden = F.linear(torch.cat((self._large.embed(step.token_ids), features), 1), self._fc)
        x = self._attention.attended(step.layers, hidden, {})  # the head's one layer has no norm before it
        out_norm = self._weights.attention_out_norm
        residual = Residual(arithmetic, hidden)
        residual.add(arithmetic.output(x, of_attention.out, of_attention.out_bias, out_norm))
        add_mlp(residual, self._layer.mlp, self._weights, arithmetic)
        return residual.rows


def _layer_like(config: ModelConfig) -> LayerConfig:
    """The last layer that attends to all keys, without a window, with K and V of its own."""
    for layer in reversed(config.layers):
        if isinstance(layer.attention.indexer, AllKeys) and not layer.attention.has_sinks:
            return replace(layer, attention=replace(layer.attention, window_left=UNLIMITED_WINDOW))
    raise BadModel(
        f"{config.architecture} has no layer that attends to all keys without sinks, which an EAGLE head needs; "
        "use speculative ngram or draft:MODEL"
    )


class _EagleFiles:
    """A TensorSource over a head's files: names begin with `layers.0`, and tensors of the large model are absent."""

    def __init__(self, directory: Path, config: ModelConfig, fc: Shape) -> None:
        if not directory.is_dir():
            raise BadModel(f"{directory} is not a directory; give an EAGLE head's directory with model.safetensors")
        self._files, self.name = SafetensorsFiles(directory), str(directory)
        expected = {**expected_shapes(config), FC: fc}
        found = {_ours(name): shape for name, shape in self._files.shapes().items()}
        self._lacking = {
            name: shape for name, shape in expected.items() if name not in found or name == "model.embed_tokens.weight"
        }
        refused = [name for name in self._lacking if name not in _OF_LARGE]
        if refused:
            raise BadModel(
                f"{directory} lacks {refused[0].removeprefix('model.')}; it is not an EAGLE-1 head of this model"
            )
        self._shapes = {**found, **self._lacking}

    def shapes(self) -> Mapping[str, Shape]:
        """Like TensorSource.shapes."""
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read."""
        if name in self._lacking:
            return torch.ones(self._lacking[name])[where]
        return self._files.read(name if name == FC else name.removeprefix("model."), *where)


# Tensors that a head may lack: those it shares with the large model, and a norm that no head has.
_OF_LARGE = frozenset({"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"})


def _ours(name: str) -> str:
    return name if name == FC else f"model.{name}"


class _WithoutFc:
    """A head's tensors except fc."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.name = source, source.name

    def shapes(self) -> Mapping[str, Shape]:
        """Like TensorSource.shapes."""
        return {name: shape for name, shape in self._source.shapes().items() if name != FC}

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read."""
        return self._source.read(name, *where)

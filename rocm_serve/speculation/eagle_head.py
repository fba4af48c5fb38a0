"""The EAGLE-1 head: one layer over the large model's last hidden state.

For token i, with feature f[i], the input of the large model's output matrix (LM head), and the token after it:

    x = [embedding[token[i + 1]], f[i]] @ fc.T        f'[i + 1] = x + attention(x), and that + mlp(norm(...))

and f' @ head.T are logits of token i + 2. Embedding and output matrix are the large model's. In a draft step f' takes
the place of f. K and V of the layer are the head's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import LayerConfig, ModelConfig, OwnInputs, RecurrentConfig
from rocm_attn.models.mlp_config import NoMlp
from rocm_attn.models.shards import WHOLE
from rocm_attn.models.tensors import TensorPart, TensorReader, TensorSource
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic, Residual
from rocm_serve.models.attention import layer_attention
from rocm_serve.models.layer_input import LayerInput
from rocm_serve.models.linears import linears_over
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp import add_mlp
from rocm_serve.models.model import Model
from rocm_serve.models.weights import layer_shapes, read_layer
from rocm_serve.ranks import ONE_RANK
from rocm_serve.speculation.draft_runners import DraftingModel
from rocm_serve.speculation.head_files import FC, LAYER, HeadFiles, SeededHead, require_shapes
from rocm_serve.speculation.methods import SEEDED

# Tensors of the large model, which a head's files may repeat.
_OF_LARGE = frozenset({"embed_tokens.weight", "norm.weight", "lm_head.weight"})


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """A head that was read.

    model:  its one layer, as a model; other weights may be the large model's
    fc:     [hidden, 2 * hidden]: of an embedding and a feature; of EAGLE-3, see eagle3.py
    layers: of the large model, whose inputs are handed over side by side; none: the input of the output matrix is
    """

    model: LoadedModel
    fc: Tensor
    layers: tuple[int, ...]

    def over(self, large: Model, runtime: AttentionRuntime, most_tokens: int) -> EagleHead:
        """The head; see EagleHead."""
        return EagleHead(self, large, runtime, most_tokens)


def load_head(path: str, large: LoadedModel) -> EagleWeights:
    """Reads the head in a directory with model.safetensors, under EAGLE-1's names, or makes a seeded random one.

    Raises BadModel for a head that is not made for this model.
    """
    config, weights = _config_like(large.config), large.weights
    shapes = layer_shapes(config, config.hidden_size)
    shapes[FC] = (config.hidden_size, 2 * config.hidden_size)
    norm = f"{LAYER}input_layernorm.weight"  # which the first layer of a head does not have
    source: TensorSource = SeededHead(shapes) if path == SEEDED else HeadFiles(Path(path), {norm: shapes[norm]})
    require_shapes(source, shapes, "EAGLE-1", config, _OF_LARGE)
    reader = TensorReader(source, weights.dtype, weights.device)
    layer = read_layer(reader, config, 0, WHOLE, config.hidden_size)
    model = LoadedModel(config, replace(weights, layers=(layer,), own_inputs=None), None, ONE_RANK)
    return EagleWeights(model, reader.join(TensorPart(FC, shapes[FC])), ())


class EagleHead(DraftingModel):
    """Like DraftingModel. large: the model that it drafts for; runtime: of the head's own layer

    features: [most_tokens, width]: input of taken_in(), one row for each token of its step; the caller writes them
    """

    def __init__(self, weights: EagleWeights, large: Model, runtime: AttentionRuntime, most_tokens: int) -> None:
        config, of_head = weights.model.config, weights.model.weights
        self._large, self._fc = large, weights.fc
        (self._layer,), (self._of_layer,) = config.layers, of_head.layers
        (attention,), (self._of_attention,) = config.attending, of_head.attending
        linears = linears_over(ONE_RANK, deterministic=runtime.deterministic)
        self._arithmetic = Arithmetic(linears, config.rms_norm_eps, config.multipliers.residual)
        rope = attention.rope.turns(runtime.max_kv_len, of_head.device)
        self._attention = layer_attention(0, 0, attention, self._of_attention, self._arithmetic, rope)
        width = large.config.hidden_size * max(1, len(weights.layers))
        with torch.inference_mode(False):
            self.features = torch.zeros(most_tokens, width, dtype=of_head.dtype, device=of_head.device)
        self.nothing_carried = torch.empty(0, config.hidden_size, dtype=of_head.dtype, device=of_head.device)

    def taken_in(self, step: Part) -> tuple[Tensor, Tensor]:
        """Like DraftingModel.taken_in; the carried rows are the features of the next tokens."""
        features = self.next_features(step, self.given(self.features[: step.token_ids.shape[0]]))
        last = features.index_select(0, step.last_token_of_seq)
        return self.logits(last), last

    def drafted(self, step: Part, carried: Tensor) -> tuple[Tensor, Tensor]:
        features = self.next_features(step, carried)
        return self.logits(features), features

    def given(self, features: Tensor) -> Tensor:
        """[T, hidden]: the rows handed over, as the layer takes them."""
        return features

    def next_features(self, step: Part, features: Tensor) -> Tensor:
        """[T, hidden]"""
        x = F.linear(torch.cat((self._large.embed(step.token_ids), features), 1), self._fc)
        return self.through_layer(step, x, x)  # the head's one layer has no norm before it

    def logits(self, features: Tensor) -> Tensor:
        """[T, tokens that the head knows]"""
        return self._large.logits_of_normed(features)

    def through_layer(self, step: Part, x: Tensor, residual: Tensor) -> Tensor:
        """[T, hidden]: the residual with attention over x, and with the MLP of that."""
        arithmetic, weights = self._arithmetic, self._of_layer
        x = self._attention.attended(step, LayerInput(arithmetic.linears, x), {})
        out, out_bias = self._of_attention.out, self._of_attention.out_bias
        sums = Residual(arithmetic, residual)
        sums.add(arithmetic.output(x, out, out_bias, weights.attention_out_norm))
        add_mlp(sums, self._layer.mlp, weights, arithmetic)
        return sums.rows


def _config_like(config: ModelConfig) -> ModelConfig:
    """A model of one layer like the large model's."""
    return replace(
        config,
        layers=(_layer_like(config),),
        reads=(),
        eos_token_ids=(),
        own_inputs=OwnInputs(),
        has_layer_factors=False,
        num_extra_layers=0,
        unread=(),
    )


def _layer_like(config: ModelConfig) -> LayerConfig:
    """The last layer that attends to all keys and has an MLP, without a window, with K and V of its own."""
    for layer in reversed(config.layers):
        for mixer in layer.mixers:
            if isinstance(mixer, RecurrentConfig) or isinstance(layer.mlp, NoMlp):
                continue
            if isinstance(mixer.attention.indexer, AllKeys) and not mixer.attention.has_sinks:
                attention = replace(mixer.attention, window_left=UNLIMITED_WINDOW)
                return LayerConfig((replace(mixer, attention=attention),), layer.mlp)
    raise BadModel(
        f"{config.architecture} has no layer with an MLP that attends to all keys without sinks, which an EAGLE head "
        "needs; use speculative ngram or draft:MODEL"
    )

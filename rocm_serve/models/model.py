"""Model: the forward pass of a decoder, in plain torch around an attention runtime.

It is an example for authors of other models: forward() gets a Part whose tensors have padded sizes, and passes the q, k
and v of every layer to the step's layers. It never reads a length and never waits for the device. The same code
therefore runs eagerly, is captured, and runs the halves of a split step. Tensor parallelism shows only where ranks sum,
in its linear layers, and where they gather. The sizes of a rank's part are in its config and weights.
"""

import math
from collections.abc import Sequence
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.config import MixerConfig, ModelConfig, RecurrentConfig
from rocm_attn.problem import Indexer
from rocm_attn.step.head_weights import HeadWeights, LayerHeadWeights
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic, Residual
from rocm_serve.models.attention import LayerAttention, layer_attention
from rocm_serve.models.attention_weights import KVHeadWeights
from rocm_serve.models.linears import Linears, linears_over
from rocm_serve.models.mlp import add_mlp
from rocm_serve.models.recurrent import AnyRecurrentMixer, recurrent_mixer
from rocm_serve.models.weights import MixerWeights, ModelWeights
from rocm_serve.ranks import ONE_RANK, Ranks


class Model:
    """A decoder.

    config:       of a tensor-parallel rank's part, if ranks share the model; the weights are that part too
    head_weights: the runtime's; they get the weights of heads that the model has
    max_kv_len:   the longest sequence that positions are prepared for
    ranks:        that share the model
    linears:      how linear layers are computed; None: all rows in one product
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        head_weights: LayerHeadWeights,
        *,
        max_kv_len: int,
        ranks: Ranks = ONE_RANK,
        linears: Linears | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self._ranks = ranks
        self._arithmetic = Arithmetic(
            linears if linears is not None else linears_over(ranks, deterministic=False),
            config.rms_norm_eps,
            config.multipliers.residual,
        )
        self._mixers = self._mixers_of(max_kv_len)
        dtype = weights.dtype
        self._cos_sin = {
            layer.rope: layer.rope.table(max_kv_len, dtype, weights.device)
            for layer in config.attending
            if isinstance(layer.attention.indexer, Indexer)
        }
        # rounded like the embeddings: Gemma was trained so
        self._own_input_scale = torch.tensor(config.own_inputs.dim**0.5, dtype=dtype).item()
        factor, rounds = config.multipliers.embedding, config.multipliers.rounds_embedding
        self._embedding_scale = torch.tensor(factor, dtype=dtype if rounds else torch.float64).item()
        for layer, of_attention in enumerate(weights.attending):
            if isinstance(of_attention, KVHeadWeights) and of_attention.sinks is not None:
                head_weights.set(layer, HeadWeights(sinks=of_attention.sinks))

    def _mixers_of(self, max_kv_len: int) -> list[list[LayerAttention | AnyRecurrentMixer]]:
        """The attention and the recurrences of every layer; each kind has numbers of its own."""
        config, weights, arithmetic = self.config, self.weights, self._arithmetic
        turns = {layer.rope: layer.rope.turns(max_kv_len, weights.device) for layer in config.attending}
        reads, recurrent = iter(enumerate(config.attention.reads)), count()

        def made(mixer: MixerConfig, of_mixer: MixerWeights) -> LayerAttention | AnyRecurrentMixer:
            if isinstance(mixer, RecurrentConfig):
                return recurrent_mixer(next(recurrent), mixer, of_mixer, arithmetic)
            return layer_attention(*next(reads), mixer, of_mixer, arithmetic, turns[mixer.rope])

        of_layers = zip(config.layers, weights.layers, strict=True)
        return [list(map(made, layer.mixers, of_layer.mixers)) for layer, of_layer in of_layers]

    def forward(self, step: Part) -> Tensor:
        """Logits [S, vocab] of each sequence's last new token, in the weights' dtype."""
        return self.logits(self.hidden(step).index_select(0, step.last_token_of_seq))

    def hidden(self, step: Part) -> Tensor:
        """[T, hidden]: the last layer's output for each new token."""
        return self.hidden_and_inputs(step, ())[0]

    def hidden_and_inputs(self, step: Part, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """hidden(), and the inputs of some layers for each new token, [T, hidden] each, in the order of `layers`.

        layers: one past the last layer stands for the last layer's output
        """
        arithmetic, embedded = self._arithmetic, self.embed(step.token_ids)
        residual = Residual(arithmetic, embedded)
        inputs: dict[int, Tensor] = {}
        own_inputs = self._own_inputs(step.token_ids, embedded)
        cos_sin = {rope: table.index_select(0, step.positions) for rope, table in self._cos_sin.items()}
        for number, mixers in enumerate(self._mixers):
            layer, weights = self.config.layers[number], self.weights.layers[number]
            if number in layers:
                inputs[number] = residual.rows
            if weights.attention_norm is not None:
                x = residual.normed(weights.attention_norm)
                for mixer in mixers:
                    out, of = mixer.attended(step, x, cos_sin), mixer.weights
                    residual.add(arithmetic.output(out, of.out, of.out_bias, weights.attention_out_norm))
            add_mlp(residual, layer.mlp, weights, arithmetic)
            if weights.own_input is not None and own_inputs is not None:
                rows = arithmetic.add_own_input(residual.rows, own_inputs[:, number], weights.own_input)
                residual = Residual(arithmetic, rows)
            if weights.factor is not None:
                residual = Residual(arithmetic, residual.rows * weights.factor)
        inputs[self.config.num_layers] = residual.rows
        return residual.rows, [inputs[number] for number in layers]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab]: logits of tokens whose last layer's output is hidden [n, hidden]."""
        return self.logits_of_normed(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """[n, hidden]: the input of the output matrix for the last layer's rows."""
        return self._arithmetic.norm(hidden, self.weights.final_norm)

    def logits_of_normed(self, last: Tensor) -> Tensor:
        """[n, vocab]: logits of rows returned by normed()."""
        factor, cap = self.config.multipliers.head, self.config.logits_soft_cap
        own = self._arithmetic.linears.linear(last if factor == 1.0 else last * factor, self.weights.head)
        if cap:
            own = (own / cap).tanh() * cap
        return self._ranks.gathered(own)[:, : self.config.vocab_size]  # all ranks pick from the same bits

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]: the input of the first layer. token_ids: integer [T]"""
        rows = F.embedding(token_ids, self.weights.embedding)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def _own_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """[T, layers, dim]: the inputs that each layer gets for a token in addition to the residual."""
        weights = self.weights.own_inputs
        if weights is None:
            return None
        shape = token_ids.shape[0], self.config.num_layers, self.config.own_inputs.dim
        rows = F.embedding(token_ids, weights.embedding).view(shape) * self._own_input_scale
        projected = self._arithmetic.linears.linear(embedded, weights.projection) * self.config.hidden_size**-0.5
        both = self._arithmetic.norm(projected.view(shape), weights.norm) + rows
        return both * math.sqrt(0.5)

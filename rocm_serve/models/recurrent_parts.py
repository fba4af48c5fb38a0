"""The parts that every kind of recurrent layer is made of: how a rank reads its weights, and how a step is run."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rocm_attn.models.config import RecurrentProjections
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.shards import HeadSpans, ShardRange
from rocm_attn.models.tensors import Shape
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic
from rocm_serve.models.layer_tensors import LayerTensors

Weights = TypeVar("Weights")


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentTensors(LayerTensors):
    """The tensors around a layer's recurrence that a rank holds. layer: of the whole model"""

    layer: RecurrentLayer
    projections: RecurrentProjections

    @property
    def heads(self) -> HeadSpans:
        """The rank's value heads (q) and their key heads."""
        return self.shard.heads(self.layer.num_value_heads, self.layer.num_key_heads)

    @property
    def num_values(self) -> int:
        """Elements of v for a token, on all ranks."""
        return self.layer.num_value_heads * self.layer.value_dim

    def decay_factor(self, whole: Shape, *cut: ShardRange) -> Tensor:
        """Minus the exponential of the tensor A_log."""
        return self.reader.computed(lambda log: -log.exp(), self.in_float32("A_log", whole, *cut))

    def output(self, name: str) -> Tensor:
        """The output's matrix, with columns of the rank's value heads."""
        return self.out(name, self.num_values, self.heads.q.of_elements(self.layer.value_dim))


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer(Generic[Weights]):
    """The recurrence of a layer, and what is around it.

    number: among the recurrent layers
    form:   of the rank's part
    """

    number: int
    form: RecurrentLayer
    projections: RecurrentProjections
    weights: Weights
    arithmetic: Arithmetic

    def convolved(
        self, step: Part, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [T, key_heads, key_dim], and v [T, value_heads, value_dim], after the convolution.

        inputs: [T, channels]; weight, bias: see StateCalls.convolve
        """
        form, out = self.form, torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        step.states.convolve(self.number, inputs, weight, bias, out)
        keys, num_tokens = form.num_key_heads * form.key_dim, inputs.shape[0]
        q, k, v = torch.split(out, [keys, keys, form.conv_channels - 2 * keys], 1)
        q, k = (side.view(num_tokens, form.num_key_heads, form.key_dim) for side in (q, k))
        return q, k, v.view(num_tokens, form.num_value_heads, form.value_dim)

    def recurred(self, step: Part, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The output of the recurrence, of the shape of v; see StateCalls.recur."""
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step.states.recur(self.number, q, k, v, decay, beta, out)
        return out

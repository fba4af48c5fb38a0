"""Recurrence: the geometry of a layer that keeps a state per request in place of K and V: delta nets, KDA, Mamba2.

Update has the formulas and their sources.
"""

from __future__ import annotations  # check_fields() reads types as texts

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rocm_attn.errors import BadProblem
from rocm_attn.kernels.states.arguments import RecurrenceRule, Update
from rocm_attn.machine.settings import check_fields, whole_number
from rocm_attn.problem import DTYPES, LARGEST_SCALE, SMALLEST_SCALE

# Kernels count the elements of a state, and of a convolution's inputs, in int32.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal depthwise convolution before the recurrence. Its last inputs are part of the state.

    channels: channels of the input and of the output; 0: the layer has no convolution
    width:    kernel size in tokens, the output's own token included
    silu:     whether x * sigmoid(x) follows

    Raises BadProblem.
    """

    channels: int = 0
    width: int = 4
    silu: bool = True

    def __post_init__(self) -> None:
        check_fields(self, BadProblem, " of a convolution")
        if self.channels < 0 or self.width < 2:
            raise BadProblem(
                f"a convolution of {self.channels} channels and width {self.width}; give 0 channels or more, and a "
                "width of at least 2"
            )
        if self.channels * self.width > _MOST_ELEMENTS:
            raise BadProblem(
                f"a convolution of {self.channels} channels and width {self.width} keeps {self.channels * self.width} "
                f"elements of a request; at most {_MOST_ELEMENTS} are served"
            )


NO_CONVOLUTION = Convolution()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The geometry of a recurrent layer, on this rank.

    num_heads:     heads of v and of the output, a multiple of num_k_heads
    num_k_heads:   heads of q and k
    k_dim, v_dim:  head dim of q and k, and of v and the output
    dtype:         dtype of q, k, v and the output, and of the convolution's input and output
    update:        how a token changes the state
    channel_decay: whether each element of k has its own decay (KDA); if not, each head has one
    scale:         factor on the output; 0: k_dim ** -0.5, as in delta nets. Mamba2 has 1
    state_dtype:   dtype of the state: float32 or bfloat16
    convolution:   the convolution before the recurrence
    normalises:    whether q and k are L2-normalised first: x / sqrt(sum(x * x) + 1e-6)

    Raises BadProblem.
    """

    num_heads: int
    num_k_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    update: Update = Update.DELTA
    channel_decay: bool = False
    scale: float = 0.0
    state_dtype: torch.dtype = torch.float32
    convolution: Convolution = NO_CONVOLUTION
    normalises: bool = False

    def __post_init__(self) -> None:
        check_fields(self, BadProblem, " of a recurrence")
        for name in ("num_heads", "num_k_heads", "k_dim", "v_dim"):
            whole_number(f"{name} of a recurrence", getattr(self, name), BadProblem, least=1)
        elements = self.num_heads * self.k_dim * self.v_dim
        if elements > _MOST_ELEMENTS:
            raise BadProblem(
                f"a state of {self.num_heads} heads, k_dim {self.k_dim} and v_dim {self.v_dim} has {elements} "
                f"elements; at most {_MOST_ELEMENTS} are served"
            )
        if self.num_heads % self.num_k_heads:
            raise BadProblem(
                f"{self.num_heads} heads over {self.num_k_heads} heads of k: the first must be a multiple of the second"
            )
        if self.dtype not in DTYPES:
            raise BadProblem(f"dtype {self.dtype!r} is not one of {', '.join(map(str, DTYPES))}")
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise BadProblem(f"state_dtype is {self.state_dtype}; it must be torch.float32 or torch.bfloat16")
        for name, kind in (("update", Update), ("convolution", Convolution)):
            if not isinstance(getattr(self, name), kind):
                raise BadProblem(f"{name} is {getattr(self, name)!r}; it must be a value of {kind.__name__}")
        if self.scale == 0:
            object.__setattr__(self, "scale", self.k_dim**-0.5)
        if not SMALLEST_SCALE <= self.scale <= LARGEST_SCALE:
            raise BadProblem(f"scale is {self.scale}; it must be a positive number from 2**-100 to 2**100")


def rule_of(layer: Recurrence) -> RecurrenceRule:
    """The recurrence as kernels take it."""
    return RecurrenceRule(layer.update is Update.DELTA, layer.scale, layer.normalises)


class TensorForm(NamedTuple):
    """The shape of a tensor for one token, or for one slot, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tensors_of(layer: Recurrence) -> dict[str, TensorForm]:
    """The tensors of RecurrentTokens, in order, by name."""
    keys = TensorForm((layer.num_k_heads, layer.k_dim), layer.dtype)
    values = TensorForm((layer.num_heads, layer.v_dim), layer.dtype)
    decay = (layer.num_heads, layer.k_dim) if layer.channel_decay else (layer.num_heads,)
    beta = TensorForm((layer.num_heads,), torch.float32)
    return {"q": keys, "k": keys, "v": values, "decay": TensorForm(decay, torch.float32), "beta": beta, "out": values}

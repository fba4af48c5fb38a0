"""Rotary position embedding: the frequencies of a model's variant, its tables, and the rotation.

Element j of a head's first half turns together with element j of its second half ("neox" order, as Hugging Face
stores q and k): the pair (x[j], x[j + head_dim / 2]) turns by position * inv_freq[j].
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.kernels.cache.row_work import RopeTable

# A position is an int32 on the device.
_LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NoScaling:
    """The frequencies of training, unchanged."""

    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        """inv_freq, float32 [head_dim / 2] over base theta, after scaling; every kind of scaling has this method."""
        return inv_freq


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float
    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency divided by its own number: LongRoPE, and Llama 3's scaling in GGUF files.

    divisors:         [head_dim / 2]
    attention_factor: on cos and sin
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        return inv_freq / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3: long wavelengths divided by `factor`, short ones kept, a ramp between.

    original_context_len: positions that the model was pretrained on
    low_freq_factor:      wavelengths above original_context_len / low_freq_factor are divided
    high_freq_factor:     wavelengths below original_context_len / high_freq_factor are kept
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int
    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        wavelen = 2 * math.pi / inv_freq
        kept = (self.original_context_len / wavelen - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return torch.lerp(inv_freq / self.factor, inv_freq, kept.clamp(0, 1))


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `share` of the pairs turn, at the frequencies they have if all turn; the others stand still (Gemma 4).

    factor: every frequency is divided by it
    """

    share: float
    factor: float = 1.0
    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        pairs = len(inv_freq)
        turns = torch.arange(pairs) < int(self.share * pairs)
        return torch.where(turns, inv_freq / self.factor, 0.0)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: divides the frequencies of slow pairs by `factor`, and keeps those of fast pairs.

    A slow pair turns less than beta_slow times over the original context, a fast one more than beta_fast times. Between
    them is a ramp over the pair's number.

    attention_factor: on cos and sin
    truncate:         whether the ends of the ramp are rounded outwards to whole pairs
    """

    factor: float
    original_context_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        pairs = len(inv_freq)
        first = self._pair_that_turns(self.beta_fast, theta, pairs)
        last = self._pair_that_turns(self.beta_slow, theta, pairs)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        if first == last:
            last += 0.001  # a step instead of a ramp, without dividing by zero
        divided = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        return torch.lerp(inv_freq, inv_freq / self.factor, divided)

    def _pair_that_turns(self, times: float, theta: float, pairs: int) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return pairs * math.log(self.original_context_len / (times * 2 * math.pi)) / math.log(theta)


Scaling = NoScaling | LinearScaling | ProportionalScaling | DivisorScaling | Llama3Scaling | YarnScaling


def yarn_attention_factor(factor: float) -> float:
    """YaRN's factor on cos and sin if the model has none."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary embedding.

    theta:    base of the frequencies
    head_dim: elements that turn: all of a q and k row, or the first or last ones; 0: none do
    """

    theta: float
    head_dim: int
    scaling: Scaling = NoScaling()

    def inv_freq(self) -> Tensor:
        """float32 [head_dim / 2]: radians per position of each pair."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return self.scaling.scaled(1.0 / self.theta**exponent, self.theta)

    def table(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[num_positions, 2, head_dim]: cosines, and sines whose first half is negated, as `rotate` takes them.

        Computed in float32, like in training, whatever dtype they are stored in.
        """
        angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * self.inv_freq()
        cos = angle.cos() * self.scaling.attention_factor
        sin = angle.sin() * self.scaling.attention_factor
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table.to(device=device, dtype=dtype)

    def turns(self, num_positions: int, device: torch.device) -> RopeTable | None:
        """The same table in float32, as a step's layers take it; None if no element turns."""
        if not self.head_dim:
            return None
        table = RopeTable.of_frequencies(self.inv_freq(), num_positions, factor=self.scaling.attention_factor)
        return RopeTable(table.cos_sin.to(device))


def stretched(context_len: int, ropes: Iterable[Rope]) -> int:
    """A model's context: that of its file, or a longer one that YaRN stretches it to. Raises BadModel.

    The makers of Qwen2.5 and Qwen3 say that a file needs YaRN's parameters, and no other change, for longer texts.
    """
    scalings = [rope.scaling for rope in ropes if isinstance(rope.scaling, YarnScaling)]
    longest = max([context_len, *(each.factor * each.original_context_len for each in scalings)])
    if longest > _LONGEST:
        raise BadModel(f"YaRN's factor makes the context {longest:.3g} tokens long; it must be at most {_LONGEST}")
    return int(longest)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x with every head turned to its token's position, or only the first elements of each if the table is shorter.

    x:       [tokens, heads, head_dim]
    cos_sin: [tokens, 2, up to head_dim], rows of Rope.table
    """
    size = cos_sin.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos_sin), x[..., size:]), -1)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos_sin[:, :1], swapped, cos_sin[:, 1:])

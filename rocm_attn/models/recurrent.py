"""Layers that keep a state of fixed size for each request in place of pages; rocm_attn names them and serves none."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch

from rocm_attn.models.shards import Shard


class Recurrence(enum.Enum):
    """The rule by which a layer folds a token into its state: one decay for a head, or one for each element of k."""

    GATED_DELTA = "gated delta rule"
    KIMI_DELTA = "Kimi delta attention"


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One recurrent layer of a model. Each value head has a float32 matrix [key_dim, value_dim] for each request.

    num_value_heads: a multiple of num_key_heads
    conv_width:      tokens that the convolution over q, k and v reads, its own included
    """

    rule: Recurrence
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        """Elements of q, k and v of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes for each request in a model of dtype: the matrices, and the last conv_width - 1 inputs."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return matrices + self.conv_channels * (self.conv_width - 1) * dtype.itemsize

    def on_one_of(self, num_ranks: int) -> RecurrentLayer:
        """The part of one tensor-parallel rank: value heads are cut like query heads, key heads like KV heads."""
        heads = Shard(0, num_ranks).heads(self.num_value_heads, self.num_key_heads)
        return replace(self, num_value_heads=heads.q.size, num_key_heads=heads.kv.size)

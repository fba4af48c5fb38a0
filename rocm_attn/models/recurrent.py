"""Layers that keep a state of fixed size for each request in place of pages, as a config.json describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rocm_attn.errors import Unsupported
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.models.shards import Shard
from rocm_attn.recurrence import Convolution, Recurrence


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of recurrent layer: how it folds tokens into its state. hf_recurrent.py has the kinds.

    name: in words
    update, channel_decay, scale, normalises: see Recurrence
    norms_groups: whether there is a norm over the value heads of each key head, which ranks cannot cut
    """

    name: str
    update: Update
    channel_decay: bool = False
    scale: float = 0.0
    normalises: bool = True
    norms_groups: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One recurrent layer of a model. Each value head has a float32 matrix [key_dim, value_dim] for each request.

    num_key_heads:   heads of q and k; groups in Mamba2, whose C, B and x are q, k and v
    num_value_heads: a multiple of num_key_heads
    conv_width:      tokens that the convolution over q, k and v reads, its own included
    """

    rule: Rule
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
        """Bytes of a state in a model of dtype: the matrices, and the last conv_width - 1 inputs."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return matrices + self.conv_channels * (self.conv_width - 1) * dtype.itemsize

    def recurrence(self, dtype: torch.dtype) -> Recurrence:
        """The layer as the attention runtime takes it. Raises BadProblem."""
        rule = self.rule
        return Recurrence(
            num_heads=self.num_value_heads,
            num_k_heads=self.num_key_heads,
            k_dim=self.key_dim,
            v_dim=self.value_dim,
            dtype=dtype,
            update=rule.update,
            channel_decay=rule.channel_decay,
            scale=rule.scale,
            convolution=Convolution(self.conv_channels, self.conv_width),
            normalises=rule.normalises,
        )

    def on_one_of(self, num_ranks: int) -> RecurrentLayer:
        """The part of one tensor-parallel rank: value heads are cut like query heads, key heads like KV heads.

        Raises Unsupported if a norm would be cut that is not one over all heads.
        """
        if self.rule.norms_groups and self.num_key_heads > 1 and self.num_key_heads % num_ranks:
            raise Unsupported(
                f"{self.rule.name}'s {self.num_key_heads} groups, each with a norm over its heads, are not divided "
                f"over {num_ranks} ranks; use a number of ranks that divides the groups",
                [],
            )
        heads = Shard(0, num_ranks).heads(self.num_value_heads, self.num_key_heads)
        return replace(self, num_value_heads=heads.q.size, num_key_heads=heads.kv.size)

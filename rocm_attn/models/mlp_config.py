"""The MLPs that layers have: dense, of experts, both, or none."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from rocm_attn.models.gates import Gate
from rocm_attn.models.routing import Routing
from rocm_attn.models.shards import Shard


class ExpertTensors(enum.Enum):
    """How a file holds the matrices of a layer's experts."""

    EACH = "matrices of each expert, as of a dense MLP"
    STACKED = "all experts in one tensor, gate and up in turn, inputs before outputs"
    JOINED = "all experts in one tensor, gate before up, outputs before inputs"


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One MLP for every token. is_joined: whether a file holds the matrices of gate and up as one"""

    intermediate_size: int
    gate: Gate
    has_bias: bool = False
    is_joined: bool = False

    def on_one_of(self, num_ranks: int) -> DenseMlp:
        """The part of one tensor-parallel rank; every MLP has this method."""
        return replace(self, intermediate_size=_part(self.intermediate_size, num_ranks))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements that ranks share out, per part; every MLP has this property."""
        return (self.intermediate_size,)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """MLPs of which a router chooses some for every token.

    intermediate_size: of one expert
    has_bias:          of the router and of the experts
    shared_size:       elements of a dense MLP that every token takes in addition, with the same gate; 0: there is none
    has_shared_share:  whether a token's share of that MLP is the sigmoid of a product (Qwen); otherwise it is 1
    latent_size:       elements of a token that experts take and give, a product of the token's; 0: those of the token
    """

    routing: Routing
    intermediate_size: int
    gate: Gate
    tensors: ExpertTensors
    has_bias: bool = False
    shared_size: int = 0
    has_shared_share: bool = False
    latent_size: int = 0

    @property
    def shared(self) -> DenseMlp:
        """The dense MLP next to the experts, if there is one. Qwen's files hold its matrices apart in any case."""
        is_joined = self.tensors is ExpertTensors.JOINED and not self.has_shared_share
        return DenseMlp(self.shared_size, self.gate, is_joined=is_joined)

    def on_one_of(self, num_ranks: int) -> ExpertMlp:
        shared_size = _part(self.shared_size, num_ranks) if self.shared_size else 0
        return replace(self, intermediate_size=_part(self.intermediate_size, num_ranks), shared_size=shared_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.intermediate_size, self.shared_size) if self.shared_size else (self.intermediate_size,)


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """A dense MLP and experts side by side, each with norms of its own around it (Gemma 4).

    The router's input is normalised without weights, and each expert has a factor on its shares.
    """

    dense: DenseMlp
    experts: ExpertMlp

    def on_one_of(self, num_ranks: int) -> DenseAndExperts:
        return DenseAndExperts(self.dense.on_one_of(num_ranks), self.experts.on_one_of(num_ranks))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.dense.sizes + self.experts.sizes


@dataclass(frozen=True, slots=True)
class NoMlp:
    """The place of an MLP in a layer that has none."""

    def on_one_of(self, num_ranks: int) -> NoMlp:
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()


Mlp = DenseMlp | ExpertMlp | DenseAndExperts | NoMlp


def _part(size: int, num_ranks: int) -> int:
    return Shard(0, num_ranks).span(size).size

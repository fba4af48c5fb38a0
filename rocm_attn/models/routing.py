"""Routing: the experts that a token takes, and its share of each."""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadModel


class ExpertScores(enum.Enum):
    """How a router's logits [tokens, experts] are turned into scores."""

    SOFTMAX = "a token's scores sum to 1"
    SIGMOID = "each by itself"


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen, and its shares of them.

    num_experts:       of a layer
    num_chosen:        per token
    normalised:        whether a token's shares sum to 1 before they are scaled
    scores:            of the logits
    num_groups:        equal groups of neighbouring experts
    num_groups_chosen: groups per token that its experts are chosen from
    best_of_group:     experts whose scores are summed to their group's score
    scale:             factor on every share
    has_correction:    whether each expert has a learned number that counts for the choice, and not for the share
    in_float32:        whether the router's own product is computed in float32
    """

    num_experts: int
    num_chosen: int
    normalised: bool
    scores: ExpertScores = ExpertScores.SOFTMAX
    num_groups: int = 1
    num_groups_chosen: int = 1
    best_of_group: int = 1
    scale: float = 1.0
    has_correction: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise BadModel(f"{self.num_chosen} of {self.num_experts} experts are chosen per token; it must be 1 to all")
        if self.num_experts % self.num_groups or not 1 <= self.num_groups_chosen <= self.num_groups:
            raise BadModel(
                f"{self.num_groups_chosen} of {self.num_groups} groups of {self.num_experts} experts are chosen; "
                "the groups must divide the experts, and 1 to all of them must be chosen"
            )
        of_group = self.num_experts // self.num_groups
        if self.best_of_group > of_group or self.num_chosen > self.num_groups_chosen * of_group:
            raise BadModel(
                f"{self.num_chosen} experts per token out of {self.num_groups_chosen} groups of {of_group}; the "
                f"groups must hold as many, and each group at least {self.best_of_group}"
            )

    def choose(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts of every token, and their shares.

        logits:     [tokens, experts], the router's
        correction: float32 [experts], if the model has one
        returns:    int64 [tokens, chosen] and float32 [tokens, chosen]
        """
        wide = logits.float()
        scores = wide.softmax(-1) if self.scores is ExpertScores.SOFTMAX else wide.sigmoid()
        rank = scores if correction is None else scores + correction
        if self.num_groups_chosen < self.num_groups:
            rank = rank.masked_fill(~self._is_in_chosen_group(rank), float("-inf"))
        expert = rank.topk(self.num_chosen, -1).indices
        share = scores.gather(-1, expert)
        if self.normalised:
            share = share / share.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return expert, share * self.scale if self.scale != 1.0 else share

    def _is_in_chosen_group(self, rank: Tensor) -> Tensor:
        """bool [tokens, experts]."""
        of_group = rank.view(len(rank), self.num_groups, self.num_experts // self.num_groups)
        group = of_group.topk(self.best_of_group, -1).values.sum(-1).topk(self.num_groups_chosen, -1).indices
        # by comparison: on a GPU a scatter sorts to be deterministic
        is_chosen = (group[..., None] == torch.arange(self.num_groups, device=rank.device)).any(-2)
        return is_chosen[..., None].expand_as(of_group).reshape(rank.shape)

"""DraftForward: the forward of draft steps, whose token ids and parents follow from the step and the branch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.step.step import Series
from rocm_lab.soak.model import PLACES, VOCABULARY, Model


def draft_id(step: int, branch: Any) -> Any:
    """The id that a branch of a draft step has."""
    return (step * 5 + branch * 3) % (VOCABULARY - 1) + 1


def draft_parent(step: int, branch: Any, branches: int) -> Any:
    """The branch of the draft step before that a branch of a draft step continues."""
    return (branch * 3 + step) % branches


@dataclass(frozen=True, slots=True)
class DraftForward:
    """Draft steps of a model on a device."""

    model: Model
    device: torch.device

    def rounds(self, parts: Series) -> Tensor:
        """A forward of rounds: branch b of draft step i has an id and a parent that follow from both."""
        rows = []
        for step, part in enumerate(parts):
            if step and part.branches > 1:
                part.set_parents(self.parents(part, step))
            rows.append(self.step(part, step))
        return torch.cat(rows, 1)

    def parents(self, part: Any, step: int) -> Tensor:
        """The branches that those of a draft step continue, int32 [T]."""
        branch = torch.arange(part.token_ids.shape[0], dtype=torch.int32, device=self.device) % part.branches
        parents: Tensor = draft_parent(step, branch, part.branches)
        return parents

    def step(self, part: Any, step: int, calls: Any = None) -> Tensor:
        """One draft step; float32 [S, what all layers gave, branch after branch]."""
        branches = part.branches
        branch = torch.arange(part.token_ids.shape[0], device=self.device) % branches
        entry = draft_id(step, branch) * PLACES + part.positions.remainder(PLACES)
        rows = []
        for number, layer in enumerate(self.model.layers):
            q, k, v = layer.of(entry.long())
            out, lse = layer.room(q)
            (part.layers if calls is None else calls).store_and_attend(number, q, k, v, out, lse)
            rows.append(out.float().reshape(-1, branches, out[0].numel()))
        return torch.cat(rows, 2).flatten(1)

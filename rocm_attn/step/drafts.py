"""RoundTree: the parents of a round's drafts, and with them the turn of each draft step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from rocm_attn.batch.drafts import AnyDrafts
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.machine.devices import on_device
from rocm_attn.step.memory import DeviceStep

# (branches, draft step, its memory): derives the mask of its drafts from the parents of all drafts so far.
PlaceMask = Callable[[int, int, DeviceStep], None]


class RoundTree:
    """The tree that a round of drafts grows, or one half of a split round.

    With one branch, drafts are a chain and need no parents.

    parents: int32 [S, branches * draft steps]: the number of each draft's parent, or NO_PARENT in the first draft step.
             A draft's number is draft step * branches + branch. A verify step takes its tree from it. Pads have parents
             too. Empty with one branch, and in steps that are no rounds
    """

    __slots__ = ("_branches", "_num_first", "_place_mask", "_steps", "_views", "num_set", "parents")

    def __init__(self, drafts: AnyDrafts, views: Sequence[DeviceStep], place_mask: PlaceMask) -> None:
        self.parents: Final = views[0].parents
        self._branches, self._steps = drafts.branches, drafts.steps
        self._views = tuple(views)
        self._place_mask = place_mask
        self._num_first = 1 if drafts.branches > 1 else drafts.steps
        self.begin()

    def begin(self) -> None:
        """The round is filled, and runs from its first draft step: once, or again to be captured."""
        self.num_set = self._num_first

    def require(self, step: int) -> None:
        """Raise WrongState for a draft step whose parents are not set."""
        if step >= self.num_set:
            raise WrongState(
                f"draft step {step} has no parents yet; call set_parents() or keep_branches() of its part before its "
                "layers"
            )

    def set_parents(self, step: int, parents: Tensor) -> None:
        """Part.set_parents of a draft step."""
        of_step = self._numbers_of(step)
        if parents.dtype != torch.int32 or parents.numel() != of_step.numel() or parents.device != of_step.device:
            raise BadTensor(
                f"parents are {parents.dtype} of shape {list(parents.shape)} on {parents.device}; a step of these "
                f"drafts takes torch.int32 {list(of_step.shape)} on {of_step.device}"
            )
        with on_device(of_step.device):
            if self._branches > 1:
                torch.add(parents.reshape(of_step.shape), (step - 1) * self._branches, out=of_step)
        self.keep_branches(step)

    def keep_branches(self, step: int) -> None:
        """Part.keep_branches of a draft step."""
        self._numbers_of(step)
        if self._branches > 1:
            self._place_mask(self._branches, step, self._views[step])
            self.num_set = step + 1

    def _numbers_of(self, step: int) -> Tensor:
        """int32 [S, branches], where the parents of a draft step lie. Raises WrongState."""
        if not 0 < step < self._steps or (self._branches > 1 and step != self.num_set):
            raise WrongState(
                f"parents of draft step {step} were given; a round of {self._steps} steps takes those of steps 1 to "
                f"{self._steps - 1}, in this order and once each"
            )
        if self._branches == 1:
            return self._views[step].tensors.row_of_seq[:, None]
        return self.parents[:, step * self._branches : (step + 1) * self._branches]

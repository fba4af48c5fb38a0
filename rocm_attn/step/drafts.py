"""DraftSteps: what the forward of a draft model gets to run a round of drafts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.machine.devices import on_device
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.step import Step

# (draft step, its memory): works out the mask of its drafts from the parents of all drafts so far.
PlaceMask = Callable[[int, DeviceStep], None]


class Turns:
    """Which draft steps of a round may run: those whose drafts have parents.

    num_set: steps that have, from the first one on
    """

    __slots__ = ("_num_first", "num_set")

    def __init__(self, drafts: Drafts) -> None:
        # Drafts of one branch have one parent each.
        self._num_first = 1 if drafts.branches > 1 else drafts.steps
        self.begin()

    def begin(self) -> None:
        """The round is staged."""
        self.num_set = self._num_first

    def require(self, step: int) -> None:
        """Raise WrongState for a step whose parents are not set."""
        if step >= self.num_set:
            raise WrongState(
                f"draft step {step} has no parents yet; call set_parents({step}, ...) or keep_branches({step}) before "
                "its layers"
            )


# (draft step, its memory, whose turn it is): its layer calls.
LayersOf = Callable[[int, DeviceStep, Turns], LayerCalls]


class DraftSteps:
    """A round of drafts, or one half of a split round: S draft steps, to be run one after the other.

    Every step has T = branches * S padded tokens, branch b of sequence s in place s * branches + b; Step.positions are
    the depths of the drafts after the sequence's prefix, and what each of them sees are the prefix, its ancestors and
    itself. The first step has the token_ids that the batch has brought. Those of the others are 0: the forward picks
    them between two steps, on the device.

    steps:    the draft steps; the layers of one can be called once its parents are set
    parents:  int32 [S, branches * len(steps)]: of each draft of the round, whose number is draft step * branches +
              branch, the number of its parent, or NO_PARENT in the first step. A verify step takes its tree from it.
              Pads have parents too. Empty with one branch
    branches: drafts of a sequence in each step
    num_seqs: real sequences, on the host; a forward that is captured must not use it
    plan:     how the round runs; a half's is that of the split round
    half:     which half it is: 0 or 1; 0 for a round that is not split
    """

    __slots__ = ("_children", "_place_mask", "_turns", "branches", "half", "num_seqs", "parents", "plan", "steps")

    def __init__(
        self,
        steps: Sequence[Step],
        children: Sequence[DeviceStep],
        turns: Turns,
        place_mask: PlaceMask,
        branches: int,
    ) -> None:
        first = steps[0]
        self.steps = tuple(steps)
        self.parents = children[0].parents
        self.branches = branches
        self.num_seqs, self.plan, self.half = first.num_seqs, first.plan, first.half
        self._children = tuple(children)
        self._turns = turns
        self._place_mask = place_mask

    @classmethod
    def of(
        cls,
        batch: StepBatch,
        children: Sequence[DeviceStep],
        plan: StepPlan,
        half: int,
        layers: LayersOf,
        place_mask: PlaceMask,
    ) -> DraftSteps:
        """The round of a batch, or of its part in a half, run by a plan in these views, one for each draft step."""
        drafts = plan.shape.drafts
        assert isinstance(drafts, Drafts)
        turns = Turns(drafts)
        steps = [
            Step.of(batch, child, plan, layers(number, child, turns), half) for number, child in enumerate(children)
        ]
        return cls(steps, children, turns, place_mask, drafts.branches)

    def begin(self) -> None:
        """The round is filled, and runs from its first step on: once, or again to be captured."""
        self._turns.begin()

    def set_parents(self, step: int, parents: Tensor) -> None:
        """Say whose children the drafts of a step are; before its layers are called, and step after step.

        step:    1 or later
        parents: int32 [T] or [S, branches], on the device: the branch of the step before that each draft goes on from.
                 Several may go on from one. A draft with another number than 0 .. branches - 1 is taken for one
                 without a parent, and a later step raises DeviceFault

        Raises WrongState for a step whose turn it is not, BadTensor.
        """
        of_step = self._numbers_of(step)
        if parents.dtype != torch.int32 or parents.numel() != of_step.numel() or parents.device != of_step.device:
            raise BadTensor(
                f"parents are {parents.dtype} of shape {list(parents.shape)} on {parents.device}; a step of these "
                f"drafts takes torch.int32 {list(of_step.shape)} on {of_step.device}"
            )
        with on_device(of_step.device):
            if self.branches > 1:
                torch.add(parents.reshape(of_step.shape), (step - 1) * self.branches, out=of_step)
        self.keep_branches(step)

    def keep_branches(self, step: int) -> None:
        """As set_parents, where each branch goes on from itself. Raises WrongState."""
        self._numbers_of(step)
        if self.branches > 1:
            self._place_mask(step, self._children[step])
            self._turns.num_set = step + 1

    def _numbers_of(self, step: int) -> Tensor:
        """int32 [S, branches], where the parents of a step stand. Raises WrongState."""
        if not 0 < step < len(self.steps) or (self.branches > 1 and step != self._turns.num_set):
            raise WrongState(
                f"parents of draft step {step} were given; a round of {len(self.steps)} steps takes those of steps 1 "
                f"to {len(self.steps) - 1}, in this order and once each"
            )
        if self.branches == 1:
            return self.steps[step].row_of_seq[:, None]
        return self.parents[:, step * self.branches : (step + 1) * self.branches]

    def is_for(self, batch: StepBatch, children: Sequence[DeviceStep], plan: StepPlan) -> bool:
        """Whether these are the steps of a batch of this size, run by this plan in these views."""
        return self.plan is plan and self._children[0] is children[0] and self.num_seqs == batch.num_seqs


@dataclass(frozen=True, slots=True)
class SplitDrafts:
    """A round of drafts that runs as two halves, which share nothing but the table and the pages.

    halves:           the drafts of the first sequences of the batch and of the others, as in SplitStep
    num_first:        int32 [], sequences of the first half, on the device: for forwards that are captured
    num_first_tokens: int32 [], its tokens in each draft step
    plan:             how the round runs
    """

    halves: tuple[DraftSteps, DraftSteps]
    num_first: Tensor
    num_first_tokens: Tensor
    plan: StepPlan

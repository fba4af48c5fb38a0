"""Step and Part: a step as its caller sees it. A Part is the input of one call of the model's forward.

A step has one part, or two if it runs in halves (two-batch overlap), or one for each draft step of a draft round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from rocm_attn.batch.drafts import AnyDrafts
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.machine.devices import on_device, require_tensor
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.state_layers import StateCalls

# (branches, draft step, its memory): derives the mask of its drafts from the parents of all drafts so far.
PlaceMask = Callable[[int, int, DeviceStep], None]


class RoundTree:
    """The tree of a draft round, or of one half of a split round. With one branch, drafts are a chain.

    parents: int32 [S, branches * draft steps]: the number of each draft's parent, or NO_PARENT in the first draft step.
             A draft's number is draft step * branches + branch. A verify step's TreeMask is built from it. Padding has
             parents too. Empty with one branch, and in steps that are not draft rounds
    """

    __slots__ = ("_branches", "_place_mask", "_steps", "_views", "num_set", "parents")

    def __init__(self, drafts: AnyDrafts, views: Sequence[DeviceStep], place_mask: PlaceMask) -> None:
        self.parents: Final = views[0].parents
        self._branches, self._steps = drafts.branches, drafts.steps
        self._views, self._place_mask = views, place_mask
        self.begin()

    def begin(self) -> None:
        """Starts the round, which is filled, from its first draft step: once, or again to be captured."""
        self.num_set = 1 if self._branches > 1 else self._steps

    def require(self, require_running: Callable[[], None], step: int) -> None:
        """Raises WrongState for a draft step that does not run, or whose parents are not set."""
        require_running()
        if step >= self.num_set:
            raise WrongState(
                f"draft step {step} has no parents yet; call set_parents() or keep_branches() of its part before its "
                "layers"
            )

    def set_parents(self, step: int, parents: Tensor) -> None:
        """See `Part.set_parents`; for a draft step."""
        of_step = self._numbers_of(step)
        require_tensor("parents", parents)
        if parents.dtype != torch.int32 or parents.numel() != of_step.numel() or parents.device != of_step.device:
            raise BadTensor(
                f"parents are {parents.dtype} of shape {list(parents.shape)} on {parents.device}; a step of these "
                f"drafts takes torch.int32 {list(of_step.shape)} on {of_step.device}"
            )
        if self._branches > 1:
            with on_device(of_step.device):
                torch.add(parents.reshape(of_step.shape), (step - 1) * self._branches, out=of_step)
        self.keep_branches(step)

    def keep_branches(self, step: int) -> None:
        """See `Part.keep_branches`; for a draft step."""
        self._numbers_of(step)
        if self._branches > 1:
            self._place_mask(self._branches, step, self._views[step])
            self.num_set = step + 1

    def _numbers_of(self, step: int) -> Tensor:
        """int32 [S, branches], the memory of a draft step's parents. Raises WrongState."""
        if not 0 < step < self._steps or (self._branches > 1 and step != self.num_set):
            raise WrongState(
                f"parents of draft step {step} were given; a round of {self._steps} steps takes those of steps 1 "
                f"to {self._steps - 1}, in this order and once each"
            )
        if self._branches == 1:
            return self._views[step].tensors.row_of_seq[:, None]
        return self.parents[:, step * self._branches : (step + 1) * self._branches]


@dataclass(frozen=True, slots=True)
class Part:
    """The input of a model's forward: a whole step, half of a split step, or one draft step of a draft round.

    Device tensors have padded sizes: S sequences and T tokens. A draft step has T = branches * S tokens; the token of
    branch b of sequence s has index s * branches + b.

    num_seqs, num_tokens: real counts, on the host; a captured forward must not use them. They are upper bounds if the
                          batch's lengths are
    token_ids:            int32 [T], padding 0. In draft steps after the first all are 0: the forward picks these tokens
                          itself, on the device, between two draft steps
    positions:            int32 [T], rope positions, padding 0: indices in the sequence's KV, or the positions of the
                          step's mask. In a draft step: prefix length + number of the draft step
    row_of_seq:           int32 [S], sequence -> row of the request table; padding 0, a row that belongs to no request
    kv_len:               int32 [S], KV length after the step, new tokens included
    q_indptr:             int32 [S + 1], sequence -> its first token (cu_seqlens_q); [S] is the end of the last sequence
    seq_of_token:         int32 [T], token -> sequence. Tokens from q_indptr[S] on belong to no sequence and have S - 1,
                          which may be a real one: safe as an index for reads, not for writes
    row_of_token:         int32 [T], token -> row; padding 0, so it is safe as an index for reads and writes
    last_token_of_seq:    int32 [S], the token whose hidden state gives the next-token logits; 0 if there is no new
                          token. In a decode step, a padded sequence has a padded token
    layers:               the layer calls (store, attend, ...) for these tokens, while the step runs
    states:               the same for recurrent layers
    plan:                 how the step runs; its shape is that of all parts together
    number:               the part's index in Step.parts
    tree:                 the parents of a draft round's tokens; empty in other steps
    """

    num_seqs: int
    num_tokens: int
    token_ids: Tensor
    positions: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    q_indptr: Tensor
    seq_of_token: Tensor
    row_of_token: Tensor
    last_token_of_seq: Tensor
    layers: LayerCalls
    states: StateCalls
    plan: StepPlan
    number: int
    tree: RoundTree

    @property
    def half(self) -> int:
        """The half that the part belongs to: 0 or 1; 0 in a step that is not split."""
        return self.number // self.plan.draft_steps

    @property
    def tokens(self) -> slice:
        """The part's slice of a tensor [padded tokens of both halves, ...]."""
        num_tokens = self.token_ids.shape[0]
        return slice(self.half * num_tokens, (self.half + 1) * num_tokens)

    @property
    def branches(self) -> int:
        """Draft tokens per sequence in each draft step; 0 if the step is no draft round."""
        return self.plan.shape.drafts.branches

    @property
    def parents(self) -> Tensor:
        """int32 [S, branches * draft steps], the parent of each draft of the round; see RoundTree."""
        return self.tree.parents

    def set_parents(self, parents: Tensor) -> None:
        """Sets the parent of each draft of this draft step: a branch of the one before. Call it before the layers.

        parents: int32 [T] or [S, branches], on the device: branch numbers from 0 to branches - 1. Several drafts may
                 have one parent. A draft with another number has no parent, and a later step raises DeviceFault

        Raises WrongState if it is another draft step's turn, BadTensor.
        """
        self.tree.set_parents(self.number % self.plan.shape.drafts.steps, parents)

    def keep_branches(self) -> None:
        """Calls set_parents() so that each branch continues itself. Raises WrongState."""
        self.tree.keep_branches(self.number % self.plan.shape.drafts.steps)


# The fields of a part that a step's tensors have by the same names.
VIEWS_OF_PART = [each.name for each in fields(Part) if each.type == "Tensor"]
# The parts that run one after the other: a whole step, a half of one, or the draft steps of a round.
Series = tuple[Part, ...]


@dataclass(slots=True, eq=False)
class Step:
    """A step that has begun. It is a context manager; leaving it ends the step, also after an exception.

        with runtime.step(batch) as step:
            for part in step.parts:
                forward(part)

    parts:            a whole step has 1, a split step 2, a draft round 1 per draft step; a split draft round has those
                      of its first half, then those of the second
    num_first:        int32 [], sequences in the first half, on the device, for captured forwards; all sequences if the
                      step is not split
    num_first_tokens: int32 [], tokens in the first half's first part
    plan:             how the step runs
    children:         the memory of each part
    fill:             computes the step's metadata on the device; captured with the step. Calling it twice is harmless.
                      Raises WrongState for a step that has ended
    end:              ends the step, so that the next one may begin; see AttentionRuntime.end_step
    """

    plan: StepPlan
    children: tuple[DeviceStep, ...]
    fill: Callable[[], None]
    end: Callable[[], None]
    # Makes the parts, of the children, when they are asked for: a step that a graph replays needs none.
    _make_parts: Callable[[tuple[DeviceStep, ...]], Series]
    _parts: Series = ()

    @property
    def parts(self) -> Series:
        if not self._parts:
            self._parts = self._make_parts(self.children)
        return self._parts

    @property
    def num_first(self) -> Tensor:
        return self.children[0].tensors.counts[0]

    @property
    def num_first_tokens(self) -> Tensor:
        return self.children[0].tensors.counts[1]

    @property
    def halves(self) -> tuple[Series, ...]:
        """The parts of each half, which share only the table and the pages; all parts if there is one half."""
        steps = self.plan.draft_steps
        return tuple(self.parts[first : first + steps] for first in range(0, len(self.parts), steps))

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

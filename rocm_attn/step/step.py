"""Step and SplitStep: what a model's forward gets to run a step with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import LayerCalls


@dataclass(frozen=True, slots=True)
class Step:
    """What a model's forward gets: a step, or one half of a split one.

    Device tensors have padded sizes, S sequences and T tokens.

    num_seqs, num_tokens: real ones, on the host; a forward that is captured must not use them. Upper bounds where the
                          batch's lengths are
    token_ids:            int32 [T], pads 0
    positions:            int32 [T], rope positions, pads 0; places in the KV, or what came with the step's mask
    row_of_seq:           int32 [S], sequence -> row of the request table; pads 0, which is no request's
    kv_len:               int32 [S], tokens after the step, new ones included
    q_indptr:             int32 [S + 1], sequence -> first token; the last one is where the last sequence's tokens end
    seq_of_token:         int32 [T], token -> sequence. Tokens at or past q_indptr[S] are of none and have S - 1, which
                          may be a real one: harmless to read by, and not to write by
    row_of_token:         int32 [T], token -> row; pads 0, so that it is harmless to read and to write by
    last_token_of_seq:    int32 [S], the token whose hidden state predicts the next one; 0 where there is no new token.
                          A pad of a decode step has a token, a padded one
    layers:               store and attend for the tokens above, while the step runs
    plan:                 how the step runs; a half's is that of the split step, whose shape has both
    half:                 which half it is: 0 or 1; 0 for a step that is not split
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
    plan: StepPlan
    half: int

    @property
    def tokens(self) -> slice:
        """Of tensors with a place for every padded token of both halves: the places of this one."""
        num_tokens = self.token_ids.shape[0]
        return slice(self.half * num_tokens, (self.half + 1) * num_tokens)

    @classmethod
    def of(cls, batch: StepBatch, views: DeviceStep, plan: StepPlan, layers: LayerCalls, half: int) -> Step:
        """The step of a batch, or of its part in a half, run by a plan in these views."""
        return cls(
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_fed,
            token_ids=views.tensors.token_ids,
            positions=views.tensors.positions,
            row_of_seq=views.tensors.row_of_seq,
            kv_len=views.tensors.kv_len,
            q_indptr=views.tensors.q_indptr,
            seq_of_token=views.tensors.seq_of_token,
            row_of_token=views.tensors.row_of_token,
            last_token_of_seq=views.tensors.last_token_of_seq,
            layers=layers,
            plan=plan,
            half=half,
        )

    def is_for(self, batch: StepBatch, views: DeviceStep, plan: StepPlan) -> bool:
        """Whether this is the step of a batch of these sizes, run by this plan in these views."""
        return (
            self.plan is plan
            and self.token_ids is views.spaces[0].token_ids
            and self.num_seqs == batch.num_seqs
            and self.num_tokens == batch.num_fed
        )


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step that runs as two halves, which share nothing but the table and the pages.

    halves:           the first sequences of the batch and the others; either may be empty, both have one padded shape
    num_first:        int32 [], sequences of the first half, on the device: for forwards that are captured
    num_first_tokens: int32 [], its tokens
    plan:             how the step runs
    """

    halves: tuple[Step, Step]
    num_first: Tensor
    num_first_tokens: Tensor
    plan: StepPlan

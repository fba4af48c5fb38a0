"""Overlapped steps: steps whose tokens the host has not read yet; the next step reads these tokens on the device."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.capture.split_forward import Forward
from rocm_attn.step.outputs import Outputs
from rocm_serve.appended import Appended, Picks
from rocm_serve.prompt_logprobs import NO_PROMPT_LOGPROBS, ComingPromptLogprobs, PromptPart
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation.speculation import StepPicks


# Not frozen: see ScheduledStep.
@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that was launched. Not to be changed.

    number:   the runtime's
    picks:    of each of step.picking
    started:  when scheduling it began, in seconds of time.perf_counter()
    launched: when its launches were made
    prompts:  logprobs of prompts that it takes in
    """

    step: ScheduledStep
    number: int
    picks: StepPicks
    started: float
    launched: float
    prompts: ComingPromptLogprobs = NO_PROMPT_LOGPROBS


class ReadStep(NamedTuple):
    """A step whose tokens its sequences have taken.

    picks:    of each of step.picking
    read_at:  when they were read, in seconds of time.perf_counter()
    logprobs: see StepPicks.logprobs
    prompts:  logprobs of prompts that it has taken in
    """

    pending: PendingStep
    picks: Picks
    appended: Appended
    read_at: float
    logprobs: Mapping[int, Many[TokenLogprobs]]
    prompts: Many[PromptPart]


def with_pending_tokens(forward: Forward[Outputs], picked: Tensor) -> Forward[Outputs]:
    """The forward with token ids in the place of the ids of scheduled_step.pending(): it looks them up on the device.

    It may run any number of times for a step, until the step's own tokens are picked.
    picked: int32 [most_seqs], place among the picks of the step before -> token id; a graph reads it in place
    """

    def looked_up(ids: Tensor) -> Tensor:
        place = ids.bitwise_not()  # -1 - id
        return torch.where(ids < 0, picked.index_select(0, place.clamp_(min=0)), ids)

    return lambda step: forward(replace(step, token_ids=looked_up(step.token_ids)))

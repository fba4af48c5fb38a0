"""PromptLogprobs: the logprobs of prompt tokens, computed in the prefill steps of these prompts.

A plain step computes logits only for each sequence's last token. A step with a prompt whose logprobs are requested runs
eagerly, and keeps the last layer's output for all of its tokens. Their logits are computed from it, a block of rows at
a time, so long prompts need no more memory for logits.
"""

from collections.abc import Sequence as Many
from collections.abc import Set
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.split_forward import Forward
from rocm_attn.machine.sending import coming, sent
from rocm_attn.providers.launches import StepOps
from rocm_attn.step.host_ring import Fence, NoFence
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.protocols import RunsSteps
from rocm_attn.step.step import Part
from rocm_serve.models.model import Model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Sequence
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation.last_rows import HandingOver, LastRows

# Most rows of logits at a time. Fewer if a step has fewer rows to pick from: that memory was measured.
_MOST_ROWS = 256

# Logits like those of a step, and the last layer's output for each of its tokens.
LogitsAndHidden = tuple[Tensor, PerToken]


class PromptRows(NamedTuple):
    """Tokens of a step whose logits give logprobs to the tokens after them in a prompt.

    row:   the first of them among the step's tokens
    first: the place in the prompt of the token after it
    num:   of these tokens, at least one
    """

    sequence: Sequence
    row: int
    first: int
    num: int

    @property
    def next_token_ids(self) -> Many[int]:
        """The tokens that get logprobs."""
        return self.sequence.request.prompt_token_ids[self.first : self.first + self.num]


class PromptPart(NamedTuple):
    """The logprobs of a prompt's tokens from the place `first` on. NaN where no token could be picked.

    words: int32 [tokens, 1 + 2 * number of likeliest ones]; see launch_likeliest
    """

    sequence: Sequence
    first: int
    words: Int32Array


class ComingPromptLogprobs:
    """The logprobs of a step's prompts, on their way to the host. found: int32 [tokens, words]; see launch_likeliest"""

    def __init__(self, rows: Many[PromptRows], found: Tensor, done: Fence) -> None:
        self._rows, self._found, self._done = rows, found, done

    def read(self) -> list[PromptPart]:
        """Waits for them."""
        if not self._rows:
            return []
        self._done.synchronize()
        found, parts, begin = self._found.numpy(), [], 0
        for each in self._rows:
            width = 1 + 2 * each.sequence.request.prompt_logprobs
            parts.append(PromptPart(each.sequence, each.first, found[begin : begin + each.num, :width]))
            begin += each.num
        return parts


NO_PROMPT_LOGPROBS = ComingPromptLogprobs((), torch.empty(0, 1, dtype=torch.int32), NoFence())


def with_hidden(model: Model | HandingOver, options: EngineOptions) -> Forward[LogitsAndHidden]:
    """The forward of a model whose steps also give the last layer's output of each of their tokens."""
    last_rows = LastRows(model, options.rows_of_each)

    def forward(step: Part) -> LogitsAndHidden:
        hidden = model.hidden(step)
        return last_rows.logits_of(step, hidden), PerToken(hidden)

    return forward


class PromptLogprobs:
    """Runs the steps that have prompts whose tokens get logprobs.

    model:     gives logits
    steps:     runs the forward of with_hidden(), without graphs
    most_rows: that a step picks from
    """

    def __init__(
        self, model: Model | HandingOver, steps: RunsSteps[LogitsAndHidden], ops: StepOps, vocab: int, most_rows: int
    ) -> None:
        self._model, self._steps, self._ops, self._vocab = model, steps, ops, vocab
        self._most_rows = min(_MOST_ROWS, most_rows)
        self._asking: set[int] = set()  # numbers of requests that may get logprobs in a later step

    def add(self, sequence: Sequence) -> None:
        """Notes a sequence that is submitted."""
        if sequence.request.prompt_logprobs != NO_LOGPROBS:
            self._asking.add(sequence.number)

    def rows(self, step: ScheduledStep, alive: Set[int]) -> list[PromptRows]:
        """The tokens of a step whose logits are needed. alive: numbers of all requests that have not ended"""
        if not self._asking:
            return []
        self._asking &= alive
        found = []
        batch = step.batch
        ends = np.cumsum(batch.q_len, dtype=np.int64).tolist()
        for sequence, end, kv_len, q_len in zip(
            step.sequences, ends, batch.kv_len.tolist(), batch.q_len.tolist(), strict=True
        ):
            num = min(kv_len, len(sequence.request.prompt_token_ids) - 1) - (kv_len - q_len)
            if num > 0 and sequence.number in self._asking:
                found.append(PromptRows(sequence, end - q_len, kv_len - q_len + 1, num))
        return found

    @torch.no_grad()
    def run(self, batch: StepBatch, rows: Many[PromptRows]) -> tuple[Tensor, ComingPromptLogprobs]:
        """Runs a step; returns its logits as any step does, and the logprobs. rows: of this step, at least one"""
        logits, hidden = self._steps.run(batch)
        device = logits.device
        places = sent(np.concatenate([np.arange(each.row, each.row + each.num) for each in rows]), device)
        tokens = sent(np.concatenate([np.array(each.next_token_ids, np.int32) for each in rows]), device)
        nums = np.repeat([each.sequence.request.prompt_logprobs for each in rows], [each.num for each in rows])
        words = 1 + 2 * min(int(nums.max()), self._vocab)
        found = torch.full((len(nums), words), torch.nan, device=device).view(torch.int32)
        for begin in range(0, len(nums), self._most_rows):
            block = slice(begin, begin + self._most_rows)
            each_row = self._model.logits(hidden.tensor.index_select(0, places[block]))
            parameters = np.stack((np.arange(len(each_row)), nums[block]), axis=1).astype(np.int32)
            self._ops.likeliest(each_row, sent(parameters, device), tokens[block], found[block])
        emitted = coming(found)
        done: Fence = torch.Event(device) if device.type != "cpu" else NoFence()
        done.record()
        return logits, ComingPromptLogprobs(rows, emitted, done)

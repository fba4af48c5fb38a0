"""Speculation: gets draft tokens before a step, and verifies them by the step's logits.

A step computes the logits after each draft token. From the sequence's last token on, a token is sampled as usual, with
the request's own random numbers. If it equals a draft, the logits after it are there already, and the next token is
sampled from them. So each token is the one that plain decoding would have sampled, whatever the drafts are: these
decide only how many tokens a step yields.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.graphs import Progress
from rocm_attn.errors import BadLogits
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.paging.index_spaces import RESERVED_ROW
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics
from rocm_serve.appended import Appended, Picks
from rocm_serve.recent_steps import NO_ROUND
from rocm_serve.request import Sequence, SequenceParameters
from rocm_serve.sampling.coming_masks import ComingMasks
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.sampling.parameter_picker import ParameterPicker, RowParameters, TokensWithLogprobs
from rocm_serve.sampling.sampling import Draw, PickedTokens
from rocm_serve.scheduled_step import NO_SEQUENCE, NONE_LEFT_OUT, ScheduledStep
from rocm_serve.speculation.drafts import LAST_TOKEN, NO_DRAFTS, DraftTree
from rocm_serve.speculation.drawn import AcceptedOnHost as AcceptedDrawn
from rocm_serve.speculation.drawn import NothingDrawn, Rejection

# The logprobs of steps in which no request asks for any.
NO_LOGPROBS_OF: Mapping[int, Many[TokenLogprobs]] = MappingProxyType({})
NOTHING_DRAWN = NothingDrawn()
# Scheduler.decoding
Decoding = Callable[[int], list[tuple[Sequence, int]]]


class Drafter:
    """Makes draft tokens. This one makes none: each step brings a sequence one token."""

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> Mapping[int, DraftTree]:
        """Drafts of some sequences, by their requests' numbers.

        decoding: sequences with the most drafts that each may have, at least 1; the next token of each is to be picked
        alive:    numbers of all requests that have not ended: state of others is to be dropped
        """
        return NO_SEQUENCE

    def follow(self, step: ScheduledStep, appended: Appended) -> None:
        """Notes that a step has run, and that its sequences have its tokens; the next one is not launched."""

    def capture_all(self, progress: Progress) -> None:
        """Makes the graphs of the drafter, if it has any. progress: see StepRunner.capture_all"""


class StepPicks(ABC):
    """The picks of a step's sequences, on their way to the host.

    speculative_step_number: its number among rounds that follow from each other; NO_ROUND: it is none of these
    left_out: places of sequences that nothing was picked for: their masks are not there
    """

    speculative_step_number = NO_ROUND
    left_out: Set[int] = NONE_LEFT_OUT

    @abstractmethod
    def read(self) -> Picks:
        """Waits for them. Returns those of each of step.picking."""

    @property
    def tokens(self) -> PickedTokens | None:
        """The tokens after all drafts of a step, if no request asks for more than the likeliest or a drawn one."""
        return None

    def logprobs(self) -> Mapping[int, Many[TokenLogprobs]]:
        """Place among step.picking -> logprobs of its tokens from read(), for requests that ask for them."""
        return NO_LOGPROBS_OF


class Speculation:
    """Drafts for the next step, and their verification.

    runtime:    of the model that verifies
    picker:     has room for 1 + num_drafts rows of each sequence of a step
    num_drafts: most drafts per sequence and step; 0: drafts() is not to be called
    metrics:    receive counts of drafts
    rejection:  accepts drawn drafts
    has_speculative_steps: whether steps in which all sequences have drafts may go on without the host (device_steps.py)
    """

    def __init__(
        self,
        drafter: Drafter,
        runtime: AttentionRuntime,
        picker: ParameterPicker,
        num_drafts: int,
        metrics: Metrics,
        rejection: Rejection | NothingDrawn = NOTHING_DRAWN,
        *,
        has_speculative_steps: bool = False,
    ) -> None:
        self.has_speculative_steps = has_speculative_steps
        self._drafter = drafter
        self._runtime = runtime
        self._picker = picker
        self._num_drafts = num_drafts
        self._metrics = metrics
        self._rejection = rejection

    def capture_all(self, progress: Progress) -> None:
        self._drafter.capture_all(progress)

    def drafts(self, decoding: Decoding, alive: Set[int]) -> Mapping[int, DraftTree]:
        """Drafts for the next step; the tokens of all steps were read.

        decoding: Scheduler.decoding
        alive:    see Drafter.draft
        """
        sequences = decoding(self._num_drafts)
        found = self._drafter.draft(sequences, alive)
        if self.has_speculative_steps and len(found) < len(sequences) <= 2 * len(found):
            # Steps in which all have drafts can go on without the host; drafts added for the others cost little.
            draft_tokens = {each.number: (each.token_ids[-1],) * most for each, most in sequences}
            found = {number: found.get(number, DraftTree.chain(ids)) for number, ids in draft_tokens.items()}
        return found

    def batch(self, step: ScheduledStep) -> StepBatch:
        """The batch of a step, with the mask of its trees if it has any."""
        if not step.has_trees:
            return step.batch
        return replace(step.batch, mask=TreeMask(torch.from_numpy(_parents(step)).to(self._runtime.device)))

    def pick(self, step: ScheduledStep, logits: Tensor, settle: Callable[[], None], masks: ComingMasks) -> StepPicks:
        """Picks the tokens of each of step.picking: the drafts that were right, in order, and one more.

        logits: [num_seqs, rows, vocab], of the last tokens of each sequence, or [num_seqs, vocab]; in a decode step
                rows is 1
        settle: reads the tokens of all steps before this one; called if a token depends on them on the host
        """
        num_rows, with_parameters = logits.shape[1] if logits.dim() == 3 else 1, _with_parameters(step, settle)
        left_out = masks.left_out(step.picking) if with_parameters else NONE_LEFT_OUT
        for seq in left_out:
            del with_parameters[seq]
        draws: dict[int, Draw] = {}
        parameters: dict[int, RowParameters] = {}
        for seq in step.with_parameters:
            sequence, drafts, of_sequence = step.sequences[seq], step.drafts.get(seq), with_parameters.get(seq)
            sampler, num_new = sequence.sampler, sequence.num_new
            depths = (0,) if drafts is None else (0, *drafts.depths())
            for row, depth in enumerate(depths, (seq + 1) * num_rows - len(depths)):
                if not sampler.is_greedy:
                    draws[row] = sampler.draw(num_new + depth)
                if of_sequence is not None:
                    parameters[row] = of_sequence.of(sequence, num_new + depth)
        rows = (logits if step.num_picks == logits.shape[0] else logits[: step.num_picks]).flatten(0, -2)
        picked = self._picker.pick(rows, draws, parameters) if parameters else self._picker.plain.pick(rows, draws)
        return _Verified(picked, step, num_rows, self._runtime, self._rejection.pick(step, logits), left_out)

    def follow(self, step: ScheduledStep, appended: Appended) -> None:
        """Counts a step's drafts and accepted ones, and passes the step to the drafter."""
        self._drafter.follow(step, appended)
        if not step.drafts:
            return
        # Nothing was verified of a sequence that has ended since the step was launched.
        num_taken = [len(appended.token_ids[seq]) for seq in step.drafts]
        verified = list(compress(step.drafts.values(), num_taken))
        metrics = self._metrics
        metrics.verifications += len(verified)
        metrics.drafts += sum([len(drafts.token_ids) for drafts in verified])
        metrics.accepted_drafts += sum(num_taken) - len(verified)


class _Verified(StepPicks):
    """A token after each draft, from which the accepted ones follow; without drafts, a token of each sequence.

    num_rows: of each sequence's last tokens
    runtime:  moves their K and V to the places of their tokens, if they lie in others
    drawn:    acceptance of drawn drafts
    left_out: see StepPicks
    """

    def __init__(
        self,
        picked: PickedTokens | TokensWithLogprobs,
        step: ScheduledStep,
        num_rows: int,
        runtime: AttentionRuntime,
        drawn: AcceptedDrawn | NothingDrawn,
        left_out: Set[int],
    ) -> None:
        self._drawn, self.left_out = drawn, left_out
        self._picked, self._step, self._num_rows, self._runtime = picked, step, num_rows, runtime
        self._found: list[int | BadLogits] = []
        self._paths: list[Many[int]] = []  # place among step.picking -> the drafts that were accepted

    @property
    def tokens(self) -> PickedTokens | None:
        return self._picked if isinstance(self._picked, PickedTokens) else None

    def read(self) -> Picks:
        """Like StepPicks.read, before the next step of these sequences."""
        step, num_rows = self._step, self._num_rows
        found = self._found = self._picked.read()
        if not step.drafts:
            last_rows = found if num_rows == 1 else found[num_rows - 1 :: num_rows]
            if set(map(type, last_rows)) == {int}:
                return Picks([[token] for token in cast(Many[int], last_rows)], {})
            return Picks.of(pick if isinstance(pick, BadLogits) else [pick] for pick in last_rows)
        drawn = self._drawn.read()
        picks: list[list[int] | BadLogits] = []
        moves: dict[int, Many[int]] = {}
        for seq in range(step.num_picks):
            drafts = step.drafts.get(seq, NO_DRAFTS)
            last = (seq + 1) * num_rows
            first = last - 1 - len(drafts.token_ids)
            if seq in drawn:
                tokens, path = _of_drawn(found[first], *drawn[seq])
            else:
                tokens, path = _found_right(found[first:last], drafts)
            picks.append(tokens)
            self._paths.append(path)
            if drafts.is_chain or path == list(range(len(path))):
                continue
            # A sequence that has ended since the step was launched, for example by its text, has given its row back.
            if step.sequences[seq].row == step.batch.rows[seq]:
                moves[seq] = path
        if moves:
            self._move(moves)
        return Picks.of(picks)

    def logprobs(self) -> Mapping[int, Many[TokenLogprobs]]:
        if isinstance(self._picked, PickedTokens):
            return NO_LOGPROBS_OF
        emitted, found = self._picked.logprobs(self._found), dict[int, Many[TokenLogprobs]]()
        for seq in self._step.with_parameters:
            first = (seq + 1) * self._num_rows - 1 - len(self._step.drafts.get(seq, NO_DRAFTS))
            if first in emitted:
                path = self._paths[seq] if self._paths else ()
                found[seq] = [emitted[first], *(emitted[first + 1 + draft] for draft in path)]
        return found

    def _move(self, paths: Mapping[int, Many[int]]) -> None:
        """Moves the accepted drafts of some sequences. paths: seq -> their drafts, in order"""
        batch, seqs = self._step.batch, list(paths)
        nodes = np.full((len(seqs), 1 + max(map(len, paths.values()))), -1, np.int32)
        for line, path in zip(nodes, paths.values(), strict=True):
            line[: 1 + len(path)] = (0, *(1 + draft for draft in path))
        counts = np.array([len(path) for path in paths.values()], np.int32)
        kv_len = batch.kv_len[seqs] - batch.q_len[seqs] + 1 + counts
        device = self._runtime.device
        num_accepted, path_of, length = (torch.from_numpy(values).to(device) for values in (counts, nodes, kv_len))
        accepted = Accepted.empty(*nodes.shape, device)._replace(num_accepted=num_accepted, path=path_of, kv_len=length)
        self._runtime.move_accepted(accepted, seqs)


def _with_parameters(step: ScheduledStep, settle: Callable[[], None]) -> dict[int, SequenceParameters]:
    """Place among step.picking -> the SequenceParameters of its sequence. settle: see Speculation.pick"""
    if not step.with_parameters:
        return {}
    with_parameters = {
        seq: parameters for seq in step.with_parameters if (parameters := step.sequences[seq].parameters) is not None
    }
    if with_parameters and any(parameters.needs_tokens for parameters in with_parameters.values()):
        settle()  # the step itself runs on the device meanwhile
        # A sequence that has ended with the step before takes nothing of this one.
        with_parameters = {
            seq: parameters for seq, parameters in with_parameters.items() if step.sequences[seq].row != RESERVED_ROW
        }
    return with_parameters


def _parents(step: ScheduledStep) -> Int32Array:
    """int32 [num_seqs, most]: new token of a sequence -> the one that it comes after, or NO_PARENT."""
    parents = np.tile(np.arange(NO_PARENT, step.batch.max_q_len - 1, dtype=np.int32), (step.batch.num_seqs, 1))
    for seq, drafts in step.drafts.items():
        known = int(step.batch.q_len[seq]) - len(drafts)
        parents[seq, known : known + len(drafts)] = np.array(drafts.parents, np.int32) + known
    return parents


def _of_drawn(first: int | BadLogits, tokens: list[int], path: list[int]) -> tuple[list[int] | BadLogits, Many[int]]:
    """Like _found_right, for drawn drafts. first: the plain pick of their first row"""
    if tokens[-1] >= 0 and not isinstance(first, BadLogits):
        return tokens, path
    if len(tokens) > 1:
        return tokens[:-1], path[:-1]
    return first if isinstance(first, BadLogits) else BadLogits("no token can be sampled: no probability is left"), []


def _found_right(rows: list[int | BadLogits], drafts: DraftTree) -> tuple[list[int] | BadLogits, Many[int]]:
    """The tokens from a sequence's last one on, and the drafts of all but the last of them.

    rows: the picks after the last token, and after each draft
    If no token can be picked after an accepted draft, the step ends before that draft: its sequence fails in the next.
    """
    tokens: list[int] = []
    path: list[int] = []
    if drafts.is_chain:
        drafted = drafts.token_ids
        num = len(drafted)
        if drafted != tuple(rows[:num]):  # no draft is BadLogits
            num = 0
            while drafted[num] == rows[num]:
                num += 1
        last = rows[num]
        if not isinstance(last, BadLogits):
            return cast(list[int], rows[: num + 1]), range(num)
        return (cast(list[int], rows[:num]), range(num - 1)) if num else (last, [])
    at: int | None = LAST_TOKEN
    while at is not None:
        pick = rows[1 + at]
        if isinstance(pick, BadLogits):
            return (tokens, path[:-1]) if tokens else (pick, [])
        tokens.append(pick)
        at = drafts.after(at, pick)
        if at is not None:
            path.append(at)
    return tokens, path

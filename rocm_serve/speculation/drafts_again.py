"""Repeats the drafts of a round: the launches of a series that are the same in each round, as one graph of five.

A draft model has two graphs for a round: one of the step that takes in new tokens, and one of all levels that it
drafts. Three small graphs, made once per step's rounds, stand around them. The first hands over the step's results and
makes the inputs of the first large graph. The second makes the inputs of the second large graph from the results of the
first. The third puts the drafts into the next round. All five are joined. Nothing is planned or published in between.
Inputs are published on the device, from slots that hold the host's reservations: a length beyond them is cut, like in
steps of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.capture.graphs import Graph, recorder_for
from rocm_attn.errors import GraphStale
from rocm_attn.hip_graphs.errors import StaleRecording
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.kernels.metadata.error_word import ERROR_WORD
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.slot_layout import ECHO, STEP, SlotParts, slot_header, slot_parts
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.devices import on_device
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import RanStep
from rocm_serve.sampling.sending import sent
from rocm_serve.speculation.device_trees import DraftTokens


class DeviceSlot:
    """A ring slot on the device, from which a step is published again and again.

    num_seqs: of the step
    q_len:    new tokens of each of its sequences
    """

    def __init__(self, runtime: AttentionRuntime, to: StepTensors, num_seqs: int, q_len: int) -> None:
        self._runtime, self._to, self._num_seqs, self._q_len = runtime, to, num_seqs, q_len
        self._parts: SlotParts = slot_parts(num_seqs, 0)
        with torch.inference_mode(False):
            self.words = torch.zeros(self._parts.stored.stop, dtype=torch.int32, device=runtime.device)

    def write(self, rows: Int32Array, most: Int32Array) -> None:
        """Writes the rows of a step, and the most tokens that each may have. int32 [num_seqs]"""
        words, parts, number = np.zeros(len(self.words), np.int32), self._parts, self._runtime.faults.step_number
        header = slot_header(self._num_seqs, self._num_seqs * self._q_len, number, False, number)
        words[: parts.rows.start] = np.frombuffer(header, np.int32)
        words[parts.rows], words[parts.kv_len], words[parts.q_len] = rows, most, self._q_len
        words[parts.first_writable] = self._runtime.table.checks.first_writable_of(rows)
        # The step's lengths are computed from the stored tokens, so there can be no gap.
        words[parts.stored] = most
        self.words.copy_(sent(words, self._runtime.device))

    def publish(self, before: StepTensors, stored: Tensor, token_ids: Tensor, faults: Tensor) -> None:
        """Makes the step's inputs. May be captured.

        before:    of the step before it
        stored:    int32 [num_seqs], tokens before its own
        token_ids: int32 [num_seqs * q_len]
        faults:    int32 [1], gets the error bits of the step before
        """
        words, parts, ops = self.words, self._parts, self._runtime.core.ops
        given = GivenInputs(
            stored, words[parts.q_len], token_ids, words[parts.first_writable], words[parts.stored], self._q_len
        )
        with on_device(self._runtime.device):
            ops.publish(words, before.counts, self._to)
            faults.bitwise_or_(words[ECHO : ECHO + 1])
            ops.device_inputs(words, given, self._to)


@dataclass(frozen=True, slots=True)
class Around:
    """The parts that the small graphs are made of, and the code between them. n sequences

    first:       the step that took in new tokens
    first_graph: its graph
    few:         new tokens of a sequence in it
    between:     copies its results to where the next graph reads them, and adds the stored tokens to `stored`; returns
                 the ids of the first drafts
    drafts:      inputs of the round's first draft step
    num_drafts:  tokens of that step, per sequence
    drafts_graph: the round's
    words:       int32 [n, levels, 3, K], of all levels, written by that graph
    most_tokens: the most that sequences may have in either of them
    tokens:      that a round stores after the sequence's own
    stored:      int32 [n], tokens that are stored
    faults:      int32 [1], error bits of steps that ran again
    are_there:   True if both graphs are those of the last round, and may run
    """

    first: RanStep
    first_graph: Graph[Any]
    few: int
    between: Callable[[], Tensor]
    drafts: StepTensors
    num_drafts: int
    drafts_graph: Graph[Any]
    words: Tensor
    most_tokens: int
    tokens: int
    stored: Tensor
    faults: Tensor
    are_there: Callable[[], bool]


class DraftsAgain:
    """The drafts of the rounds that follow from one step. The host has just made the first of them.

    around:    the parts that they are made of
    hand_over: makes the model read the rows that a round has left for it
    drafted:   of these rounds
    rows:      int32 [n], of the request table
    most:      int32 [n], tokens that these have room for

    Raises RecordingRefused, and DeviceFault of the steps before.
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        recorder: Recorder,
        around: Around,
        hand_over: Callable[[DraftTokens], None],
        drafted: DraftTokens,
    ) -> None:
        self._runtime, self._around, self.drafted = runtime, around, drafted
        num_seqs, of_first, faults = len(around.stored), around.first.inputs, around.faults
        self._seal_number = runtime.seals.number
        self._followed: RanStep | None = None
        first_slot = DeviceSlot(runtime, of_first, num_seqs, around.few)
        drafts_slot = DeviceSlot(runtime, around.drafts, num_seqs, around.num_drafts)
        self._slots = first_slot, drafts_slot

        def before() -> None:
            hand_over(drafted)
            first_slot.publish(around.drafts, around.stored, drafted.new_tokens(), faults)

        def between() -> None:
            drafts_slot.publish(of_first, around.stored, around.between(), faults)

        def after() -> None:
            drafted.put(around.words)

        # The recorded launches read no pages, so slots without sequences are enough.
        runtime.faults.report()
        changed = (around.stored, *drafted.changed())
        held = [tensor.clone() for tensor in changed]
        try:
            made = [recorder.record(fn)[0] for fn in (before, between, after)]
        finally:
            for tensor, value in zip(changed, held, strict=True):
                tensor.copy_(value)
            for to in (of_first, around.drafts):
                to.counts[ERROR_WORD] = 0
                to.counts[STEP] = runtime.faults.step_number
            faults.zero_()
        first, last = around.first_graph.recording, around.drafts_graph.recording
        self._whole = recorder_for(runtime.device).join([made[0], first, made[1], last, made[2]])

    def are_there(self) -> bool:
        """True if the graphs are those of the draft model's last steps."""
        return self._around.are_there()

    def is_next(self, drafted: DraftTokens) -> bool:
        """True if these are the drafts for a round's `drafted`, made after those that were made last."""
        if drafted is not self.drafted or self._seal_number != self._runtime.seals.number:
            return False
        return self._followed is not None and self._runtime.gate.may_go_again is self._followed and self.are_there()

    def fits(self, num_tokens: int) -> bool:
        """True if texts may have num_tokens tokens, including those that are taken in."""
        return num_tokens + self._around.tokens <= self._around.most_tokens

    def follow(self, rows: Int32Array, most: Int32Array) -> None:
        """Allows the next drafts of these rows after the host's steps have made the last ones.

        rows, most: int32 [n], of the request table, and tokens that these have room for
        """
        self.reserve(rows, most)
        self._followed = self._runtime.gate.resume(self._around.first)

    def reserve(self, rows: Int32Array, most: Int32Array) -> None:
        """Writes the room of the rows. Parameters: see follow()"""
        most = np.minimum(most, np.int32(self._around.most_tokens))
        first, drafts = self._slots
        first.write(rows, most)
        drafts.write(rows, most)

    def run(self) -> Tensor:
        """Makes the drafts of the next round if is_next(), and returns their words. Raises GraphStale."""
        try:
            self._runtime.gate.replay_again(self._whole.replay)
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale
        return self._around.words

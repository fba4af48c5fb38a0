"""Speculative decoding without the host in the loop: the device prepares each verify step from the one before it.

The host plans and publishes a step that verifies drafts of every sequence. If the same sequences continue, greedily,
with n-gram drafts from their own texts, the device can compute all inputs of the next step: it has the texts too, and
kernels/speculative/next_step.py writes the next inputs over the step's. So the host launches rounds, each a graph of
the step, the sampling and that kernel (device_launches.py), without the results of earlier rounds. It reads and
publishes these results while later rounds run.

A series of rounds ends when a request arrives, ends or is aborted, when pages run out, at a fault, or when the drafts
are no longer the right ones. Then the launched rounds are read, and the host plans the next step.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadLogits
from rocm_attn.kernels.speculative.arguments import SpeculativeStep
from rocm_attn.machine.sending import sent
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import RanStep
from rocm_attn.step.host_ring import Fence, NoFence
from rocm_attn.step.prepared import stream_of
from rocm_serve.appended import Picks
from rocm_serve.options import EngineOptions
from rocm_serve.recent_steps import NO_ROUND
from rocm_serve.sampling.sampling import PickedRows, PickedTokens, TokenPicker
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.scheduler import Scheduler
from rocm_serve.speculation.device_launches import (
    SpeculativeLaunches,
    SpeculativeMemory,
    StepResults,
    StepResultsOnHost,
    result_words,
)
from rocm_serve.speculation.methods import NGRAM
from rocm_serve.speculation.speculation import StepPicks
from rocm_serve.speculation.speculative_steps import SpeculativeSteps

# Pages are reserved for a whole series, if that many are free. Otherwise they are reserved for this number of tokens
# more of each sequence at a time.
_TOKENS_AHEAD = 256
# Rounds after which the host plans a step again: then faults of the steps before the series are reported, and prompts
# find pages that were filled in it.
_MOST_SPECULATIVE_STEPS = 64

# Rounds that are launched before the oldest is read: as many as the device runs in this time, within these bounds.
# Tokens wait about as long to be returned, and new requests to begin.
AHEAD_SECONDS = 0.001
FEWEST_AHEAD, MOST_AHEAD = 2, 6


class Pace:
    """Chooses how many rounds are launched before the oldest is read."""

    def __init__(self) -> None:
        self.num_ahead = FEWEST_AHEAD

    def note(self, seconds: float) -> None:
        """Notes that a round was read in that time."""
        wanted = int(AHEAD_SECONDS / seconds) if seconds > 0 else MOST_AHEAD
        self.num_ahead = min(max(wanted, FEWEST_AHEAD), MOST_AHEAD)


def speculative_bytes(options: EngineOptions, max_kv_len: int) -> int:
    """Device memory for the texts that drafts are looked up in."""
    if options.speculative != NGRAM or options.topk > 1:
        return 0
    rows = options.max_batch_size + 2  # with row 0, and the one of the truth probe
    return 4 * rows * (max_kv_len + 2 + options.draft_tokens)


# Report.speculative_steps of engines whose rounds the host does not plan.
FOLLOWING = "follow from each other on the device"


def why_no_speculative_steps(
    options: EngineOptions, *, num_ranks: int, looks_on: bool, has_states: bool = False
) -> str:
    """The reason why the host plans every round of an engine with draft tokens; empty: they may follow from each other.

    looks_on:   whether an observer needs single steps
    has_states: whether the model has recurrent layers
    """
    if options.speculative != NGRAM:
        return f"speculative is {options.speculative}, and only ngram drafts are looked up on the device"
    if options.topk > 1:
        return "topk is above 1, and the host looks up the trees of ngram drafts"
    if num_ranks > 1:
        return f"{num_ranks} ranks share the model, and plan each step together"
    if has_states:
        return "the model has recurrent layers, whose states the host follows from step to step"
    if looks_on:
        return "check_every, hang_after or flight_record is set, and needs each step on the host"
    return ""


def fewest(numbers: Int32Array) -> int:
    """The least of the numbers."""
    return int(np.minimum.reduce(numbers))


@dataclass(slots=True, eq=False)
class _Series:
    """Rounds that follow from one step.

    step:        the step
    batch:       as it was run
    num_changes: of the scheduler, when it was scheduled
    rows:        int32 [n] of the table
    kv_len:      int32 [n], of the oldest round that was not read
    limit:       int32 [n], upper bounds of kv_len
    room:        least number of tokens of any sequence from kv_len up to its limit
    ends_at:     int64 [n]; a sequence whose round reaches this length, its drafts included, may be at its end
    launches:    of its rounds after the step's graph
    on_host:     results of its rounds, by memory
    number:      the runtime's step number, of all of them
    first_fault: number of the first round that may have had one, among those that were read
    num_launched: rounds, the step included; at most _MOST_SPECULATIVE_STEPS and the step
    num_read:    likewise, of those that were read
    is_launched: False while a round is launched: it may raise
    cut:         places of sequences that go on by fewer tokens than the device took, and the round since which they do
    """

    step: ScheduledStep
    batch: StepBatch
    num_changes: int
    rows: Int32Array
    kv_len: Int32Array
    limit: Int32Array
    ends_at: npt.NDArray[np.int64]
    launches: SpeculativeLaunches
    on_host: Many[StepResultsOnHost]
    room: int
    number: int
    num_launched: int = 1
    num_read: int = 0
    is_launched: bool = False
    is_over: bool = False
    first_fault: int = NO_ROUND
    cut: dict[int, int] = field(default_factory=dict)

    @property
    def has_fault(self) -> bool:
        """True if a round that was read has reported a fault."""
        return self.first_fault < NO_ROUND

    @property
    def num_pending(self) -> int:
        """Number of rounds that were launched and not read."""
        return self.num_launched - self.num_read

    def note(self, appended: Int32Array, emitted: Int32Array) -> None:
        """Notes that the oldest round was read, which has brought these numbers of tokens. emitted: by it"""
        number, self.num_read = self.num_read, self.num_read + 1
        self.kv_len = self.kv_len + appended
        self.room = fewest(self.limit - self.kv_len)
        drafted = np.count_nonzero(emitted[:, 1])
        if emitted[:, 2].any():
            self.first_fault = min(self.first_fault, number)
        self.is_over |= self.has_fault or bool(self.cut) or 2 * drafted < len(emitted)


class SpeculativePicks(StepPicks):
    """The picks of a round's sequences, in the form of StepPicks. Rounds are read in the order of their launches.

    emitted, found: the memory of its results, which are there after done
    """

    def __init__(self, series: _Series, emitted: Int32Array, found: PickedRows, done: Fence) -> None:
        self._series, self.emitted, self.found, self.done = series, emitted, found, done
        self.speculative_step_number = series.num_launched - 1

    def read(self) -> Picks:
        self.done.synchronize()
        series, emitted = self._series, self.emitted
        picked, appended = PickedTokens(self.found, NoFence()).read(), emitted[:, 0]
        width = len(picked) // len(emitted)
        lines = [picked[seq * width : seq * width + num] for seq, num in enumerate(appended.tolist())]
        if not series.cut and set(map(type, picked)) == {int}:
            picks = Picks(cast(list[list[int]], lines), {})
        else:
            picks = Picks.of(self._right(seq, line) for seq, line in enumerate(lines))
        series.note(appended, emitted)
        return picks

    def _right(self, place: int, pick: list[int | BadLogits]) -> list[int] | BadLogits:
        """The picks of a sequence: if no token can be picked after an accepted draft, the tokens before it.

        Then the sequence fails in the next step that the host plans. The device's later tokens are not part of its
        text.
        """
        if self._series.cut.get(place, self.speculative_step_number) < self.speculative_step_number:
            return []
        tokens: list[int] = []
        for token in pick:
            if isinstance(token, BadLogits):
                self._series.cut[place] = self.speculative_step_number
                return tokens if tokens else token
            tokens.append(token)
        return tokens


class DeviceSpeculation(SpeculativeSteps):
    """Rounds on the device.

    picker:     of the engine's steps
    num_drafts: per sequence and round
    most_ahead: rounds that are launched and not read when the next one is
    """

    def __init__(
        self, runtime: AttentionRuntime, runner: StepRunner, picker: TokenPicker, num_drafts: int, most_ahead: int
    ) -> None:
        self._runtime, self._runner, self._picker = runtime, runner, picker
        self._width = 1 + num_drafts
        table, device = runtime.table, runtime.device
        num_rows, most_seqs = len(table.full.entries_host), len(picker.tokens) // self._width
        with torch.inference_mode(False):  # memory made in inference mode cannot be written outside of it
            most = table.max_kv_len + 1 + self._width
            self._texts = torch.zeros(num_rows, most, dtype=torch.int32, device=device)
            self._memory = [SpeculativeMemory(most_seqs, self._width, device) for _ in range(most_ahead + 2)]
            self._words = result_words(most_seqs, self._width, device)
            self._limit = torch.zeros(most_seqs, dtype=torch.int32, device=device)
        self._stream = stream_of(device)
        self._next = 0
        # row -> the number of the request whose text lies there, and the number of its tokens there
        self._on_device: dict[int, tuple[int, int]] = {}
        self._series: _Series | None = None
        # The step of the last series that has ended with a fault, and the first round that may have had it.
        self._reported_fault: tuple[int | None, int] = (-1, 0)

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        batch, last, width = step.batch, self._runtime.gate.last, self._width
        if last is None or last.batch.row_bytes != batch.row_bytes or not self._runner.may_run_again:
            return picks
        # The rest of a prompt may have as many tokens, of which none is a draft.
        if not batch.min_q_len == batch.max_q_len == width or len(step.drafts) < batch.num_seqs or step.is_of_a_suspect:
            return picks
        picked = picks.tokens
        if picked is None or step.with_parameters:
            return picks
        ends_at = np.array([each.most_tokens for each in step.sequences], np.int64) + (width - 1)
        limit = self._reserved(step, ends_at, batch.kv_len + np.int32(width), scheduler)
        if limit is None:
            return picks
        self._send_texts(step)
        self._limit[: batch.num_seqs].copy_(sent(limit, self._runtime.device))
        series = self._series = _Series(
            step,
            last.batch,
            scheduler.num_changes,
            batch.rows,
            batch.kv_len.copy(),
            limit,
            ends_at,
            self._launches_after(last),
            [StepResultsOnHost(memory, batch.num_seqs, width) for memory in self._memory],
            fewest(limit - batch.kv_len),
            self._runtime.faults.step_number,
        )
        series.launches.make_next()
        self._runtime.gate.move_on()
        found = self._emitted(series, picked.found)
        series.is_launched = True
        return found

    def goes_on(self, scheduler: Scheduler) -> bool:
        series = self._series
        if series is None or series.is_over or not series.is_launched or series.num_changes != scheduler.num_changes:
            return False
        if series.num_launched > _MOST_SPECULATIVE_STEPS or not self._runner.may_run_again:
            return False
        # The round after the one that is launched must fit too: its inputs are made at once.
        num_needed = self._width * (series.num_pending + 1)
        if num_needed > series.room:
            needed = series.kv_len + np.int32(num_needed)
            # Without room now, there may be room after more rounds are read: they bring fewer tokens than they could.
            limit = self._reserved(series.step, series.ends_at, needed, scheduler)
            if limit is None:
                return False
            series.limit, series.room = limit, fewest(limit - series.kv_len)
            self._limit[: len(limit)].copy_(sent(limit, self._runtime.device))
        return True

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        series = self._series
        assert series is not None
        series.is_launched = False
        logits = self._runner.run_again(series.batch)
        stay = logits is series.launches.logits or self._runner.graph_again is not None
        series.launches.pick(logits, stay=stay)
        series.launches.make_next()
        series.num_launched += 1
        found = self._emitted(series, series.on_host[self._next].found)
        series.is_launched = True
        return series.step, found

    def end(self) -> bool:
        series, self._series = self._series, None
        if series is None:
            return False
        if series.has_fault:
            self._reported_fault = series.number, series.first_fault
        living = [
            (each.row, each)
            for row, each in zip(series.rows.tolist(), series.step.sequences, strict=True)
            if each.row == row
        ]
        self._runtime.table.mark_stored([row for row, _ in living], [each.num_stored for _, each in living])
        for place, each in enumerate(series.step.sequences):
            if each.row == series.rows[place] and place not in series.cut:
                self._on_device[each.row] = each.number, len(each.token_ids)
        return series.has_fault

    def first_fault_of(self, step: int | None) -> int:
        series, reported_fault = self._series, self._reported_fault
        if series is not None and series.has_fault:
            reported_fault = series.number, series.first_fault
        return reported_fault[1] if step == reported_fault[0] else 0

    def _emitted(self, series: _Series, found: PickedRows) -> SpeculativePicks:
        """Copies the results of the last round to the host. found: where its picks lie there"""
        on_host, done = series.on_host[self._next], self._memory[self._next].done
        self._next = (self._next + 1) % len(self._memory)
        series.launches.tell(on_host)
        done.record()
        return SpeculativePicks(series, on_host.emitted, found, done)

    def _launches_after(self, last: RanStep) -> SpeculativeLaunches:
        """The launches after a step of the rounds that follow from it."""
        num_seqs, inputs = last.batch.num_seqs, last.inputs
        to = StepResults.of(self._words, num_seqs, self._width)
        given = SpeculativeStep(
            inputs.counts,
            inputs.row_of_seq,
            inputs.kv_len,
            inputs.token_ids,
            self._texts,
            self._limit[:num_seqs],
            to.emitted,
        )
        return SpeculativeLaunches(self._picker, self._runtime.core.ops.next_step, self._stream, given, to)

    def _reserved(
        self, step: ScheduledStep, ends_at: npt.NDArray[np.int64], needed: Int32Array, scheduler: Scheduler
    ) -> Int32Array | None:
        """The limits of sequences that need pages for `needed` tokens, with some to spare if there are pages.

        A limit is at most that of the step's plan and the table, and, apart from `needed`, the sequence's greatest
        length.
        None: there are no pages.
        """
        last, table = self._runtime.gate.last, self._runtime.table
        assert last is not None
        most = np.int32(min(last.plan.key.max_kv_len, table.max_kv_len))
        if (needed > most).any():
            return None
        # Including tokens that rounds may store which are launched before its end is known.
        beyond = self._width * (len(self._memory) + 1)
        most_of_each = np.minimum(np.maximum(needed, ends_at + beyond), most).astype(np.int32)
        whole = max(_TOKENS_AHEAD, _MOST_SPECULATIVE_STEPS * self._width)
        for ahead in dict.fromkeys((whole, _TOKENS_AHEAD, 0)):
            wanted: Int32Array = np.minimum(needed + np.int32(ahead), most_of_each)
            if scheduler.reserve_ahead(step.batch.rows, wanted):
                return wanted
        return None

    def _send_texts(self, step: ScheduledStep) -> None:
        """Sends the texts of a step's sequences to the device, as they were before it."""
        values, places = list[int](), list[npt.NDArray[np.int64]]()
        most = self._texts.shape[1]
        for sequence, kv_len in zip(step.sequences, step.batch.kv_len.tolist(), strict=True):
            known = kv_len - self._width + 1
            number, num = self._on_device.get(sequence.row, (-1, 0))
            first = num if number == sequence.number else 0
            if first < known:
                values += sequence.token_ids[first:known]
                places.append(np.arange(sequence.row * most + first, sequence.row * most + known))
            self._on_device[sequence.row] = sequence.number, known
        if values:
            device = self._runtime.device
            at, sent_ids = sent(np.concatenate(places), device), sent(np.array(values, np.int32), device)
            self._texts.view(-1).index_copy_(0, at, sent_ids)

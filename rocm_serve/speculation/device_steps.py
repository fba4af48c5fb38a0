"""Rounds of draft tokens that follow from each other on the device: the host launches them, and reads them later.

The host plans and publishes a step that verifies drafts of every sequence. While the same sequences go on, and their
own texts give the drafts, all inputs of the next round follow from the picks of this one: the texts lie on the device
too, and kernels/speculative/next_step.py writes the next inputs over the step's. So the host launches a graph of the
step, the picks and that kernel (device_launches.py), without the results of the rounds before. It reads and publishes
these while later rounds run.

The random number that draws a token belongs to its place in its request's text. Those numbers are on the device before
the rounds that may reach these places, so a seed draws the same text with rounds that host or device plan.

Drafts that branch are put into the order of a chain first, on the device (device_trees.py).

These events end a series: a request comes, ends or is aborted, pages run out, a fault, or drafts that are no longer
right. The launched rounds are then read, and the host plans the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.fit import DRIVER_BYTES
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadLogits
from rocm_attn.kernels.sampling.parameter_columns import NONE
from rocm_attn.kernels.speculative.arguments import SpeculativeStep
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import RanStep
from rocm_attn.step.host_ring import Fence, NoFence
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.prepared import stream_of
from rocm_serve.options import EngineOptions
from rocm_serve.ranks import Ranks
from rocm_serve.recent_steps import NO_ROUND
from rocm_serve.request import Sequence
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.sampling.parameter_picker import ParameterPicker, RowShape, ShapedRows
from rocm_serve.sampling.sampling import GREEDY, Draw, PickedRows, PickedTokens, terms_of
from rocm_serve.sampling.sending import sent
from rocm_serve.scheduler import ScheduledStep, Scheduler
from rocm_serve.speculation.device_launches import (
    SpeculativeLaunches,
    SpeculativeMemory,
    SpeculativeOps,
    StepResults,
    StepResultsOnHost,
    result_words,
)
from rocm_serve.speculation.draft_tokens import DraftTokenMaker
from rocm_serve.speculation.methods import NGRAM, OFF
from rocm_serve.speculation.reading import Ends, Together, are_picked, is_clean, put_together
from rocm_serve.speculation.sealed_cache import MOST_GRAPHS, SealedCache
from rocm_serve.speculation.speculation import NO_LOGPROBS_OF, Picks, StepPicks

# Pages are reserved for a whole series, if that many are free. Otherwise, or if random numbers are sent for as many
# tokens, they are reserved for this number of tokens more of each sequence at a time.
_TOKENS_AHEAD = 256
# Rounds after which the host plans a step again: then faults of the steps before the series are reported, and prompts
# find pages that were filled in it.
_MOST_SPECULATIVE_STEPS = 64


def speculative_bytes(options: EngineOptions, max_kv_len: int) -> int:
    """Device memory for the texts that drafts are looked up in, and the random numbers that draw tokens.

    It includes the driver's memory for the graphs of rounds.
    """
    if options.speculative == OFF or looks_up_trees(options):
        return 0
    graphs = MOST_GRAPHS * DRIVER_BYTES if options.graphs else 0
    rows = options.max_batch_size + 2  # with row 0, and the one of the truth probe
    return graphs + 2 * 4 * rows * (max_kv_len + 2 + options.draft_tokens)


def looks_up_trees(options: EngineOptions) -> bool:
    """True if an engine's drafts are trees looked up in texts."""
    return options.speculative == NGRAM and options.topk > 1


# Report.speculative_steps of engines whose rounds the host does not plan.
FOLLOWING = "follow from each other on the device"


def why_no_speculative_steps(options: EngineOptions, *, looks_on: bool) -> str:
    """The reason why the host plans every round of an engine with draft tokens; empty: they may follow from each other.

    looks_on: whether an observer needs single steps
    """
    if looks_up_trees(options):
        return "topk is above 1, and the host looks up the trees of ngram drafts"
    if options.sampled_drafts:
        return "sampled_drafts is set, and the host draws each round's random numbers"
    if looks_on:
        return "check_every, hang_after, profiler_ranges or flight_record is set, and needs each step on the host"
    return ""


def fewest(numbers: Int32Array) -> int:
    """The least of the numbers."""
    return int(np.minimum.reduce(numbers))


class _Progress(NamedTuple):
    """The part of a series that was read.

    kv_len:   int32 [n] of the oldest round that was not read
    num_read: rounds, from the step on
    """

    kv_len: Int32Array
    num_read: int


@dataclass(slots=True, eq=False)
class _Series:
    """Rounds that follow from one step.

    step:        the step
    batch:       as it was run
    num_changes: of the scheduler, when it was scheduled
    rows:        int32 [n] of the table
    progress:    the part that was read
    limit:       int32 [n], upper bounds of kv_len
    room:        least number of tokens of any sequence from progress.kv_len up to its limit
    ends:        of its sequences
    shaping:     rows that are shaped before they are picked from
    speculative_steps: the launches of its rounds after the step's graph
    number:      the runtime's step number, of all of them
    has_ranks:   see DeviceSpeculation. The device reports a fault only to one rank: then no rank reacts before they end
    first_fault: number of the first round that may have had one, among those that were read
    num_launched: rounds, the step included; at most _MOST_SPECULATIVE_STEPS and the step
    is_noted:    whether all that was launched will be read; False while a round is launched, which an interrupt may end
    cut:         places of sequences that go on by fewer tokens than the device took, and the round since which they do
    """

    step: ScheduledStep
    batch: StepBatch
    num_changes: int
    rows: Int32Array
    progress: _Progress
    limit: Int32Array
    limit_on_device: Tensor
    ends: Ends
    shaping: ShapedRows
    speculative_steps: SpeculativeLaunches
    room: int
    number: int
    has_ranks: bool
    num_launched: int = 1
    is_noted: bool = False
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
        return self.num_launched - self.progress.num_read

    def note(self, number: int, num_speculative_steps: int, kv_len: Int32Array, emitted: Int32Array) -> None:
        """Notes that rounds were read, after which the sequences have these lengths. A repeated call changes nothing.

        number: of the first one
        emitted:   by the last one
        """
        if number == self.progress.num_read:
            self.progress = _Progress(
                kv_len, number + num_speculative_steps
            )  # one statement: an interrupt leaves no half of it
        self.room = fewest(self.limit - self.progress.kv_len)
        # An interrupt may have left rounds that were read and not noted: then the lengths of sequences are not known.
        is_known = self.progress.num_read >= number + num_speculative_steps
        drafted = np.count_nonzero(emitted[:, 1])
        if emitted[:, 2].any():
            self.first_fault = min(self.first_fault, number)
        ends_now = self.has_fault and not self.has_ranks
        self.is_over |= not is_known or ends_now or bool(self.cut) or 2 * drafted < len(emitted)


class SpeculativePicks:
    """The picks of a round's sequences, in the form of StepPicks. Rounds are read in the order of their launches.

    on_host: the memory with its results
    found:   returns the result of each of its places, when it is done
    """

    def __init__(
        self, series: _Series, on_host: StepResultsOnHost, found: Callable[[], PickedRows], done: Fence
    ) -> None:
        self._series, self.emitted, self.done = series, on_host.emitted, done
        self._drafted, self._path, self._found = series.speculative_steps.drafted, on_host.path, found
        self.speculative_step_number = series.num_launched - 1

    @property
    def found(self) -> PickedRows:
        """Its results, in the order in which texts take them; when it is done."""
        return self._drafted.in_order(self._found(), self._path)

    def read(self) -> Picks:
        """Like StepPicks.read. It may be read again after an interrupt."""
        self.done.synchronize()
        series, emitted, found = self._series, self.emitted, self.found
        ids = found.token_ids
        appended, num_seqs = emitted[:, 0], len(emitted)
        lines = ids.reshape(num_seqs, -1).tolist()
        picks: Picks = [line[:num] for line, num in zip(lines, appended.tolist(), strict=True)]
        if series.cut or not are_picked(found):
            picked, width = PickedTokens(found, NoFence()).read(), len(ids) // num_seqs
            picks = [
                self._right(seq, picked[seq * width : seq * width + num]) for seq, num in enumerate(appended.tolist())
            ]
        series.note(self.speculative_step_number, 1, series.progress.kv_len + appended, emitted)
        return picks

    is_followed = True

    @property
    def tokens(self) -> None:
        """Like StepPicks.tokens. Rounds are followed by launch(), so there are none."""

    def logprobs(self) -> Mapping[int, Many[TokenLogprobs]]:
        """Like StepPicks.logprobs."""
        return NO_LOGPROBS_OF

    def _right(self, place: int, pick: Many[int | BadLogits]) -> Many[int] | BadLogits:
        """The picks of a sequence: if no token can be picked after an accepted draft, the tokens before it.

        Then the sequence fails in the next step that the host plans. The device's later tokens are not part of its
        text.
        """
        if self._series.cut.get(place, self.speculative_step_number) < self.speculative_step_number:
            return ()
        tokens: list[int] = []
        for token in pick:
            if isinstance(token, BadLogits):
                self._series.cut[place] = self.speculative_step_number
                return tokens if tokens else token
            tokens.append(token)
        return tokens


class DeviceSpeculation:
    """Rounds on the device.

    with_parameters:     the picker of the engine's steps
    draft_tokens:        makes the draft tokens
    num_drafts: per sequence and round
    most_ahead: rounds that are launched and not read when the next one is
    ranks:      that launch and read the same rounds. With several ranks, reading depends neither on the clock nor on
                faults. They find out together whether one had any when a series ends
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        runner: StepRunner,
        with_parameters: ParameterPicker,
        draft_tokens: DraftTokenMaker,
        num_drafts: int,
        most_ahead: int,
        *,
        ranks: Ranks,
    ) -> None:
        self._ranks, self._has_ranks = ranks, ranks.shard.num_ranks > 1
        self._runtime, self._runner, self._with_parameters, self._draft_tokens = (
            runtime,
            runner,
            with_parameters,
            draft_tokens,
        )
        self._picker = picker = with_parameters.plain
        self._width = 1 + num_drafts
        table, device = runtime.table, runtime.device
        num_rows, most_seqs = len(table.full.entries_host), len(picker.tokens) // self._width
        with torch.inference_mode(False):  # memory made in inference mode cannot be written outside of it
            most = table.max_kv_len + 1 + self._width
            self._texts = torch.zeros(num_rows, most, dtype=torch.int32, device=device)
            self._numbers = torch.zeros(num_rows, most, device=device)
            self._terms = torch.zeros(len(picker.tokens), 3, device=device)
            self._memory = [SpeculativeMemory(most_seqs, self._width, device) for _ in range(most_ahead + 2)]
            self._words = result_words(most_seqs, self._width, device)
            self._limit = torch.zeros(most_seqs, dtype=torch.int32, device=device)
        self._ops = SpeculativeOps(picker, runtime.core.ops.next_step, stream_of(device), recorder_for(device))
        self._unshaped = ShapedRows(with_parameters, {}, (), ())
        # By the step that holds their inputs, the number of sequences, and whether any draws: series come again.
        self._launches = SealedCache[tuple[int, int, bool], tuple[DeviceStep, SpeculativeLaunches]]()
        self._next = 0
        # row -> the number of the request whose text lies there, and the number of its tokens there
        self._on_device: dict[int, tuple[int, int]] = {}
        # likewise, and the place in the text before which the random numbers lie there
        self._drawn_by: dict[int, tuple[int, int]] = {}
        self._series: _Series | None = None
        # The step of the last series that has ended with a fault, and the first round that may have had it.
        self._reported_fault: tuple[int | None, int] = (-1, 0)

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """Like Rounds.begin."""
        batch, last, width = step.batch, self._runtime.gate.last, self._width
        # With branches the batch that has run has a mask that the scheduler's has not.
        if last is None or last.batch.row_bytes != batch.row_bytes or not self._runner.may_run_again:
            return picks
        if isinstance(last.batch.mask, TreeMask) is not self._draft_tokens.has_branches:
            return picks
        # The rest of a prompt may have as many tokens, of which none is a draft.
        if not batch.min_q_len == batch.max_q_len == width or len(step.drafts) < batch.num_seqs or step.is_of_a_suspect:
            return picks
        picked = picks.tokens
        if (
            picked is None
            or not all(_stays(each) for each in step.sequences)
            or not self._draft_tokens.begin(step.sequences)
        ):
            return picks
        ends = Ends(step.sequences, width)
        limit = self._reserved(step, ends, batch.kv_len + np.int32(width), scheduler)
        if limit is None:
            return picks
        self._send_texts(step)
        self._send_numbers(step, limit)
        on_device = self._limit[: batch.num_seqs]
        on_device.copy_(sent(limit, self._runtime.device))
        progress = _Progress(batch.kv_len.copy(), 0)
        speculative_steps = self._launches_of(step, last)
        speculative_steps.drafted.begin(last.batch)
        series = self._series = _Series(
            step,
            last.batch,
            scheduler.num_changes,
            batch.rows,
            progress,
            limit,
            on_device,
            ends,
            self._shaping(step),
            speculative_steps,
            fewest(limit - batch.kv_len),
            self._runtime.faults.step_number,
            self._has_ranks,
        )
        speculative_steps.make_next()
        self._runtime.gate.move_on()
        return self._emitted(series, lambda: picked.found)

    def goes_on(self, scheduler: Scheduler) -> bool:
        """Like Rounds.goes_on."""
        series = self._series
        if series is None or series.is_over or not series.is_noted or series.num_changes != scheduler.num_changes:
            return False
        last = self._runtime.gate.last
        if last is None or last.batch is not series.batch or not self._runner.may_run_again:
            return False
        # Each unread round has a memory of its own. Interrupts may have left more of them than the pace allows.
        if series.num_launched > _MOST_SPECULATIVE_STEPS or series.num_pending >= len(self._memory):
            return False
        # The round after the one that is launched must fit too: its inputs are made at once.
        num_needed = self._width * (series.num_pending + 1)
        if num_needed > series.room:
            needed = series.progress.kv_len + np.int32(num_needed)
            # Without room now, there may be room after more rounds are read: they bring fewer tokens than they could.
            limit = self._reserved(series.step, series.ends, needed, scheduler)
            if limit is None:
                return False
            self._send_numbers(series.step, limit)
            series.limit, series.room = limit, fewest(limit - series.progress.kv_len)
            series.limit_on_device.copy_(sent(limit, self._runtime.device))
        return True

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """Like Rounds.launch."""
        series = self._series
        assert series is not None
        series.is_noted = False
        speculative_steps, runner, shaping, on_host = (
            series.speculative_steps,
            self._runner,
            series.shaping,
            series.speculative_steps.on_host[self._next],
        )
        is_shaped = len(shaping.rows) > 0
        whole = None if is_shaped else speculative_steps.as_one(runner.graph_again)
        if whole is not None:
            runner.run_again(series.batch, whole)
            speculative_steps.drafted.before_accepting()  # the step and its acceptance are one recording
        else:
            logits = runner.run_again(series.batch)
            speculative_steps.pick(logits, runner.graph_again)
            if is_shaped:
                speculative_steps.pick_shaped(logits, shaping, on_host.shaped)
            speculative_steps.make_next()
        series.num_launched += 1
        picks = self._emitted(series, partial(on_host.found, shaping))
        if whole is None and not is_shaped:
            speculative_steps.join(runner.graph_again)
        return series.step, picks

    def read_together(self, pending: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """Like Rounds.read_together."""
        series = self._series
        if series is None or not pending or series.cut or series.num_changes != scheduler.num_changes:
            return None
        speculative_steps = [each for each in pending if isinstance(each, SpeculativePicks)]
        num = min(most, len(speculative_steps))
        speculative_steps[num - 1].done.synchronize()
        while not self._has_ranks and num < len(speculative_steps) and speculative_steps[num].done.query():
            num += 1
        each_found = ((each.emitted, each.found) for each in speculative_steps[:num])
        may_fault = self._has_ranks
        found = list(takewhile(lambda each: is_clean(*each, may_fault=may_fault), each_found))
        if not found:
            return None
        speculative_steps, appended = speculative_steps[: len(found)], [emitted[:, 0] for emitted, _ in found]
        flat, token_ids = put_together([ids.reshape(-1, self._width) for _, (ids, _) in found], appended)
        kv_len: Int32Array = series.progress.kv_len + sum(appended)
        if speculative_steps[0].speculative_step_number != series.progress.num_read or not series.ends.none_in(
            flat, kv_len
        ):
            return None
        first = (series.progress.kv_len - np.int32(self._width - 1)).tolist()
        return Together(
            speculative_steps[0].speculative_step_number,
            len(speculative_steps),
            first,
            token_ids,
            len(flat),
            kv_len,
            speculative_steps[-1].emitted,
        )

    def took(self, together: Together) -> None:
        """Like Rounds.took."""
        if self._series is not None:
            self._series.note(together.number, together.num_speculative_steps, together.kv_len, together.emitted)

    def noted(self) -> None:
        """Like Rounds.noted."""
        if self._series is not None:
            self._series.is_noted = True

    def end(self) -> bool:
        """Like Rounds.end."""
        series, self._series = self._series, None
        if series is None:
            return False
        series.first_fault = self._ranks.least(series.first_fault)
        if series.has_fault:
            self._reported_fault = series.number, series.first_fault
        living = [
            (each.row, each)
            for row, each in zip(series.rows.tolist(), series.step.sequences, strict=True)
            if each.row == row
        ]
        self._runtime.table.mark_stored([row for row, _ in living], [each.num_stored for _, each in living])
        rows, going_on = series.rows.tolist(), list[Sequence | None]()
        for place, each in enumerate(series.step.sequences):
            goes_on = each.row == rows[place] and place not in series.cut
            if goes_on:
                self._on_device[each.row] = each.number, len(each.token_ids)
            going_on.append(each if goes_on else None)
        self._draft_tokens.end(going_on, is_whole=series.is_noted and not series.has_fault)
        return series.has_fault

    def first_fault_of(self, step: int | None) -> int:
        """Like Rounds.first_fault_of."""
        series, reported_fault = self._series, self._reported_fault
        if series is not None and series.has_fault and not self._has_ranks:
            reported_fault = series.number, series.first_fault
        return reported_fault[1] if step == reported_fault[0] else 0

    def _emitted(self, series: _Series, found: Callable[[], PickedRows]) -> SpeculativePicks:
        """Copies the results of the last round to the host, and makes the drafts of the next one."""
        speculative_steps, done = series.speculative_steps, self._memory[self._next].done
        on_host = speculative_steps.on_host[self._next]
        self._next = (self._next + 1) % len(self._memory)
        speculative_steps.tell(on_host)
        done.record()
        if not self._draft_tokens.looks_up:
            series.is_over |= not self._draft_tokens.draft(
                speculative_steps.drafted, partial(_bounds, series, self._width)
            )
        return SpeculativePicks(series, on_host, found, done)

    def _launches_of(self, step: ScheduledStep, last: RanStep) -> SpeculativeLaunches:
        """The launches after a step of the rounds that follow from it."""
        batch, child, draws = last.batch, last.children[0], bool(step.with_parameters)
        if draws:
            self._send_terms(step)
        launches, key = self._launches.of(self._runtime.seals.number), (id(child), batch.num_seqs, draws)
        kept = launches.get(key)
        if kept is None:
            kept = self._launches.put(key, (child, self._new_launches(last, draws=draws)))
        return kept[1]

    def _new_launches(self, last: RanStep, *, draws: bool) -> SpeculativeLaunches:
        """New launches for _launches_of()."""
        num_seqs, inputs, width = last.batch.num_seqs, last.inputs, self._width
        to = StepResults.of(self._words, num_seqs, width)
        given = SpeculativeStep(
            inputs.counts,
            inputs.row_of_seq,
            inputs.kv_len,
            inputs.token_ids,
            self._texts,
            self._limit[:num_seqs],
            to.emitted,
            self._numbers,
            self._terms[: num_seqs * width],
            self._draft_tokens.appended[:num_seqs],
        )
        drafted = self._draft_tokens.of_step(last.children[0], given, self._picker.tokens, to.path)
        on_host = [StepResultsOnHost(memory, num_seqs, width) for memory in self._memory]
        return SpeculativeLaunches(
            self._ops, given, drafted, to, on_host, draws=draws, looks_up=self._draft_tokens.looks_up
        )

    def _shaping(self, step: ScheduledStep) -> ShapedRows:
        """The rows of a step whose sequences ask for more than draws, in each of its rounds."""
        shapes, draws = dict[int, RowShape](), list[Draw]()
        for seq in step.with_parameters:
            sequence = step.sequences[seq]
            shape = (
                sequence.parameters.of(sequence, sequence.num_new).shape if sequence.parameters is not None else None
            )
            if shape is not None:
                shapes |= dict.fromkeys(range(seq * self._width, (seq + 1) * self._width), shape)
                draws += [_draw_of(sequence)] * self._width
        return ShapedRows(self._with_parameters, shapes, [NONE] * len(shapes), draws) if shapes else self._unshaped

    def _reserved(self, step: ScheduledStep, ends: Ends, needed: Int32Array, scheduler: Scheduler) -> Int32Array | None:
        """The limits of sequences that need pages for `needed` tokens, with some to spare if there are pages.

        A limit is at most that of the step's plan and the table, and, apart from `needed`, the sequence's greatest
        length.
        None: there are no pages.
        """
        last, table = self._runtime.gate.last, self._runtime.table
        assert last is not None
        most_drafted = self._draft_tokens.most_tokens + self._width - 1
        most = np.int32(min(last.plan.key.max_kv_len, table.max_kv_len, most_drafted))
        if (needed > most).any():
            return None
        # Including tokens that rounds may store which are launched before its end is known.
        beyond = self._width * (len(self._memory) + 1)
        most_of_each = np.minimum(np.maximum(needed, ends.kv_len + beyond), most).astype(np.int32)
        whole = _TOKENS_AHEAD if step.with_parameters else max(_TOKENS_AHEAD, _MOST_SPECULATIVE_STEPS * self._width)
        for ahead in dict.fromkeys((whole, _TOKENS_AHEAD, 0)):
            wanted: Int32Array = np.minimum(needed + np.int32(ahead), most_of_each)
            if scheduler.reserve_ahead(step.batch.rows, wanted) and self._draft_tokens.reserve(
                wanted + np.int32(1 - self._width)
            ):
                return wanted
        return None

    def _send_texts(self, step: ScheduledStep) -> None:
        """Sends the texts of a step's sequences to the device, as they were before it."""
        values, places = list[int](), list[npt.NDArray[Any]]()
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
            self._put(self._texts, places, np.array(values, np.int32))

    def _send_numbers(self, step: ScheduledStep, limit: Int32Array) -> None:
        """Sends the random numbers of tokens to the device, for all places that rounds within these limits reach."""
        values, places, most = list[npt.NDArray[np.float32]](), list[npt.NDArray[Any]](), self._numbers.shape[1]
        drawn_by: dict[int, tuple[int, int]] = {}
        for seq in step.with_parameters:
            sequence = step.sequences[seq]
            number, num = self._drawn_by.get(sequence.row, (-1, 0))
            first = max(num if number == sequence.number else 0, len(sequence.token_ids))
            end = int(limit[seq]) + 1
            if first < end and not sequence.sampler.is_greedy:
                before = len(sequence.request.prompt_token_ids)
                values.append(sequence.sampler.uniforms(first - before, end - before))
                places.append(np.arange(sequence.row * most + first, sequence.row * most + end))
                drawn_by[sequence.row] = sequence.number, end
        if values:
            self._put(self._numbers, places, np.concatenate(values))
        self._drawn_by |= drawn_by  # after an interrupt they are sent again

    def _put(self, to: Tensor, places: list[npt.NDArray[Any]], values: npt.NDArray[Any]) -> None:
        device = self._runtime.device
        to.view(-1).index_copy_(0, sent(np.concatenate(places), device), sent(values, device))

    def _send_terms(self, step: ScheduledStep) -> None:
        """Sends the temperatures and top_p of a step's sequences to the device; each round has numbers of its own."""
        terms = terms_of([_draw_of(sequence) for sequence in step.sequences]).repeat(self._width, 0)
        self._terms[: len(terms)].copy_(sent(terms, self._runtime.device))


def _bounds(series: _Series, width: int) -> Int32Array:
    """Upper bounds of texts before the last round: of the unread rounds, one is not counted."""
    bounds: Int32Array = series.progress.kv_len + np.int32(width * (series.num_pending - 2) + 1)
    return bounds


def _stays(sequence: Sequence) -> bool:
    """True if the device can pick all later tokens of a sequence in the same way as those of this step."""
    return sequence.parameters is None or sequence.parameters.stays_from(sequence.num_new)


def _draw_of(sequence: Sequence) -> Draw:
    """How a sequence's tokens are drawn, without the random numbers."""
    sampler = sequence.sampler
    return GREEDY if sampler.is_greedy else Draw(sampler.sampling.temperature, sampler.sampling.top_p, 0.0)

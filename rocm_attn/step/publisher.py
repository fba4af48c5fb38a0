"""Publisher: sends a step's inputs from the host to the device, before the step's graph or launches run.

Order on the stream: page copies, block table updates, the step's inputs. A change stays pending until its launch was
enqueued. The error report of a step comes back in the host ring's slot of the next one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.inputs import HOST_INPUTS, ON_HOST, DeviceInputs
from rocm_attn.batch.mask import NO_MASK, StepMask, TokenSpans, TreeMask
from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, StepBatch, as_many
from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.error_word import ERROR_WORD
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.slot_layout import (
    COUNT_WORDS,
    ECHO,
    HEADER_WORDS,
    MOST_RUNS,
    NO_ECHO,
    SEQ_PARTS,
    STEP,
    TAKEN_BY_GRAPH,
    UNREAD,
    slot_parts,
    slot_writer,
)
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.paging.page_table import PageTable
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.state_pool import StatePool
from rocm_attn.providers.launches import StepOps
from rocm_attn.step.echo import EchoCheck, fault_of_counts
from rocm_attn.step.host_ring import Fence, HostRing, NoFence, wait_for
from rocm_attn.step.memory import DeviceStep


def launch_then_forget(launch: Callable[[], None], forget: Callable[[], None]) -> None:
    """Launches a change and then marks it as no longer pending; if the launch raises, the change stays pending."""
    launch()
    forget()


# (counts of the step that was published last, its number) -> its fault
OfLastStep = Callable[[Sequence[int], int], DeviceFault | None]

# Steps of a chain whose sequences are remembered: those that may be reported late, and two to spare.
_REMEMBERED_STEPS = 5
# Whole steps from the publication that asks for the result of a split step's second half to the one that has it.
_STEPS_TO_ANSWER = 3
# Words in a slot of whole steps in addition to those of its sequences: room for the ids of this many tokens. A step
# with more makes its slot longer. Graphs have the slots' addresses, so inputs are then published.
_ID_WORDS = 1 << 16
# Number of step sizes for which the views of ring slots are kept.
_MOST_PARTS = 256
# More runs than can have gone uncounted.
_UNCOUNTED_RUNS = 1 << 16
# Steps between two comparisons with the device's count.
STEPS_UNTIL_COMPARED = 64

# Faults of the device that were not reported yet. A fault is added before its trace on the device is cleared, and
# removed when it is raised: so neither lack of memory nor an interrupt in between loses one.
Found = list[DeviceFault]


class StepChain:
    """A sequence of steps. Each is published from a ring slot, where the device writes the report of the one before.

    counts: counts of the last published step
    number: its number
    rest:   inputs of a step without sequences; its counts replace those whose memory is freed
    recent: numbers and table rows of the last steps, oldest first; rows as bytes of int32
    """

    def __init__(self, ring: HostRing, check_echo: Callable[[memoryview], None], device: torch.device) -> None:
        self.ring, self.check_echo = ring, check_echo
        self.counts: Tensor | None = None
        self.number = 0
        self.rest = _no_sequences(device)
        self.recent: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED_STEPS)

    def _add(self, fault: DeviceFault, found: Found) -> None:
        """Adds a fault once, with its step's request rows. It is found again if clearing its trace was interrupted."""
        # Searched from the last one, because a number whose launch failed was used again.
        rows = next((rows for number, rows in reversed(self.recent) if number == fault.step), b"")
        fault.rows = tuple(np.frombuffer(rows, np.int32).tolist())
        if str(fault) not in map(str, found):
            found.append(fault)

    def look(self, words: memoryview, found: Found) -> None:
        """Finds the fault in a slot's error report (echo) if that is not 0, then clears it."""
        if words[ECHO]:
            try:
                self.check_echo(words)
            except DeviceFault as fault:
                self._add(fault, found)
            words[ECHO] = 0

    def settle(self, words: memoryview, counts: Tensor, number: int, *, by_graph: bool) -> bool:
        """Finds out, for a publication that an exception has interrupted, whether the kernel that reads its slot runs.

        Until then the host must not write to the slot, because that kernel writes the echo of the step before there.
        by_graph: True if that kernel is the head of the step's graph
        """
        self.ring.drain()
        if words[ECHO] & UNREAD:
            # It was never launched, so there is no echo.
            words[ECHO] = 0
            return False
        # If a graph has the counts of its step, it has run the step, and the next step reports the result.
        if not by_graph or int(counts[STEP]) != number:
            # Its step is not run, so it has no fault. A CPU's launch may have ended before everything was written.
            counts[STEP], counts[ERROR_WORD] = number, 0
        return True

    def find_all(self, found: Found, of_last_step: OfLastStep) -> None:
        """Finds the faults that the slots echo, and that of the step published last, which no later one echoes.

        The device has nothing left to do.
        """
        for words in self.ring.written():
            self.look(words, found)
        if self.counts is not None:
            fault = of_last_step(self.counts.tolist(), self.number)
            if fault is not None:
                self._add(fault, found)
                self.counts[STEP], self.counts[ERROR_WORD] = self.number, 0


# A publication whose launches have begun: its chain, the words of its ring slot, counts and number, and whether a graph
# takes it. If it ends early, it is not known whether the first launch was made.
_Launching = tuple[StepChain, memoryview, Tensor, int, bool]


@dataclass(frozen=True, slots=True)
class PublishingGuards:
    """The safeguards of publication.

    ring_wait:      waits for the fence after a ring slot's readers
    deliver:        launches a pending change of the table or of its pages
    new_echo_check: makes the function that checks the echo in a ring slot
    of_last_step:   finds the fault in the counts of a step that no later one echoes
    """

    ring_wait: Callable[[Fence], None] = wait_for
    deliver: Callable[[Callable[[], None], Callable[[], None]], None] = launch_then_forget
    new_echo_check: Callable[[], Callable[[memoryview], None]] = EchoCheck
    of_last_step: OfLastStep = fault_of_counts


class GraphRuns:
    """Counts, on host and device, the runs of graphs that read their inputs from the ring by themselves.

    A slot that a graph takes holds the number of runs before it (kernels/metadata/take_inputs.py). If the host may have
    miscounted, for instance after a launch that raised, both continue from a number that no recent run has had.

    A launch that the driver has lost raises nothing: each later step would take the inputs of the one before it, and no
    fault would be reported. So the host compares its count with the device's from time to time.

    on_device: int32 [1], which the kernel at the head of such a graph increments
    number:    its value when all launches are done, unless the count is lost
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self.number, self._is_known = 0, True
        pinned = device.type == "cuda"
        self._answer = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._answered: Fence = torch.Event(device) if pinned else NoFence()
        self._requested_at: int | None = None
        self._steps_left = STEPS_UNTIL_COMPARED

    def run(self, replay: Callable[[], object]) -> None:
        """Launches a graph that takes inputs."""
        is_known, self._is_known = self._is_known, False
        replay()
        # In one statement: an interrupt loses the count, like a launch that raises.
        self.number, self._is_known = (self.number + 1) & MOST_RUNS, is_known

    def lose_count(self) -> None:
        """Marks the count as unknown: runs may come, or have come, that are not counted."""
        self._is_known = False

    def next(self) -> int:
        """The number of runs before the next one, for a step whose slot is written now."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._compare()
        if not self._is_known:
            number = (self.number + _UNCOUNTED_RUNS) & MOST_RUNS
            self.on_device.fill_(number)
            self.number, self._is_known = number, True
        return self.number

    def _compare(self) -> None:
        """Compares with the device's count, and marks the count as lost if they differ. Nothing waits for the answer.

        The step whose graph was lost, or one after it, has then left a slot that no graph takes, which reports it.
        """
        if self._requested_at is None and self._is_known:
            self._answer.copy_(self.on_device, non_blocking=True)
            self._answered.record()
            self._requested_at = self.number
        if self._requested_at is not None and self._answered.query():
            if int(self._answer) != self._requested_at:
                self._is_known = False
            self._requested_at, self._steps_left = None, STEPS_UNTIL_COMPARED


class Publisher:
    """Writes a step's inputs to a ring slot, and launches the kernels that read it, unless the step's graph does so.

    found:        faults that were not reported yet
    holds_faults: True if a fault waits for the exchange between ranks, instead of being raised by the next step
    runs:         the runs of graphs that read their inputs by themselves
    launching:    the last publication, if it may not have reached the device: none of its launches has ended
    steps_to_answer: the whole steps that call hear_of_the_second_half() before their inputs are published
    """

    def __init__(
        self, ops: StepOps, table: RequestTable, pool: HybridKVPool, states: StatePool, guards: PublishingGuards
    ) -> None:
        self.device = pool.device
        self._ops, self._table, self._pool, self._states = ops, table, pool, states
        self._has_states = not table.states.is_empty
        self._deliver, self._of_last_step = guards.deliver, guards.of_last_step
        # One ring for each child, so that the host may be as many split steps ahead as others.
        words = slot_parts(table.max_num_seqs, _ID_WORDS).stored.stop, HEADER_WORDS
        self._lines = tuple(
            StepChain(
                HostRing(pool.device, wait=guards.ring_wait, words=words[half]), guards.new_echo_check(), pool.device
            )
            for half in range(HALVES)
        )
        self.runs = GraphRuns(pool.device)
        # A step takes up to two slots per space, for copies and for cells, and one for tags.
        self._updates = HostRing(pool.device, depth=2 * (2 * len(table.spaces) + 1), wait=guards.ring_wait)
        self._parts: dict[tuple[int, int, int], GivenInputs] = {}
        self.launching: _Launching | None = None
        self.found: Found = []
        self.holds_faults, self.step_number, self.steps_to_answer = False, 0, 0

    def apply_table_changes(self) -> None:
        """Brings the device's pages and table up to date with the host's."""
        for table in self._table.spaces:
            pending = table.pending
            if pending.copies:
                self._copy_pages(table)
            if pending.cells:
                self._update(table.pending_updates(), table.entries, pending.cells.clear)
        if self._has_states:
            states = self._table.states
            if states.changed:
                self._update(states.pending_updates(), self._states.tags, states.changed.clear)
            for copy in tuple(states.copies):  # each by itself: a later one may write to the source of an earlier one
                self._deliver(partial(self._states.copy, copy), partial(states.copies.remove, copy))

    def _update(self, updates: Int32Array, entries: Tensor, forget: Callable[[], None]) -> None:
        """Launches changes of entries of a table. updates: int32 [n, 3], each (row, column, entry)"""
        slot = self._updates.acquire(updates.size)
        slot.words[: updates.size] = updates.reshape(-1).data
        self._deliver(partial(self._ops.table_update, slot.tensor, entries, num_updates=len(updates)), forget)
        self._updates.release()

    def _copy_pages(self, table: PageTable) -> None:
        """Launches a space's pending copies. No target is a source, so a launch that failed halfway may run again."""
        copies = table.pending.copies
        slot = self._updates.acquire(2 * len(copies))
        slot.words[: 2 * len(copies)] = np.array([*copies, *copies.values()], np.int32).data
        try:
            # int64 on the device, because a copy that converts would convert on the host, and wait.
            ids = slot.tensor[: 2 * len(copies)].to(self._pool.device, non_blocking=True).to(torch.int64)
            target, source = ids[: len(copies)], ids[len(copies) :]
            copy_pages = self._pool.in_space(table.space).copy_pages
            self._deliver(partial(copy_pages, source, target), table.copies_made)
        finally:
            self._updates.release()

    def take_inputs(self, step: DeviceStep) -> None:
        """Launches the kernel that takes a whole step's inputs from its slot: the head of its graph, to be recorded."""
        self.runs.lose_count()  # the recorded launch may run before
        self._ops.take_inputs(self._lines[0].ring.slots, self.runs.on_device, step.tensors)

    def taken(self) -> None:
        """Notes that the graph was launched that takes the last publication, if a graph takes it."""
        if self.launching is not None:
            line, _, counts, number, _ = self.launching
            line.counts, line.number, self.step_number, self.launching = counts, number, number, None

    def publish(self, batch: StepBatch, step: DeviceStep, child: int, *, to_graph: bool = False) -> None:
        """Writes the inputs of one part of a step, padding included, to their fixed device addresses.

        batch: the sequences of this part (child); a step that is not split is its own child 0
        to_graph: True if a graph follows that reads them if nothing is launched here; call taken() after it
        Raises DeviceFault for an earlier step, unless faults are held.
        """
        if self.launching is not None:
            self._settle()
        is_plain, num_seqs, num_ids, num_fed = batch.is_plain, batch.num_seqs, len(batch.token_ids), batch.num_fed
        data = batch.data
        if not is_plain and isinstance(batch.drafts, Drafts):  # the device derives the other steps from the first
            q_len = as_many(num_seqs, batch.drafts.branches)
            data = b"".join(each.tobytes() for each in (batch.rows, batch.start + q_len, q_len, batch.token_ids))
        line = self._lines[child]
        ring = line.ring
        slot = ring.acquire(HEADER_WORDS + SEQ_PARTS * num_seqs + num_ids)
        words = slot.words
        if words[ECHO]:
            line.look(words, self.found)
            self.runs.lose_count()  # the lost launch may have been the run of a graph
        if self.found:
            self._report_at_once()
        before, counts = line.counts, step.spaces[0].counts
        # The memory of the previous step's counts must be a graph's too.
        takes = (
            to_graph
            and (is_plain or (batch.inputs is HOST_INPUTS and batch.mask is NO_MASK))
            and ring.is_fixed
            and (before is counts or (before is not None and before.data_ptr() == counts.data_ptr()))
        )
        number = (self.step_number + 1) & INT32_MAX
        runs = self.runs.next() if takes else 0
        slot_writer(len(data))(slot.raw, 0, num_seqs, num_fed, number, num_ids > 0, line.number, 0, 0, runs, data)
        if not is_plain and isinstance(batch.prefixes, SharedPrefixes):
            parts = slot_parts(num_seqs, num_ids)
            words[parts.prefix_len] = batch.prefixes.prefix_len.data
            words[parts.group_end] = batch.prefixes.group_end.data
        if takes:
            # In one statement, as below; the echo comes last, because the graph of another step may read the slot.
            words[ECHO], self.launching = TAKEN_BY_GRAPH, (line, words, counts, number, True)
            ring.release_to_graph()
            line.recent.append((number, batch.row_bytes))
            return
        if not is_plain and isinstance(batch.inputs, DeviceInputs):
            self._write_limits(batch, words)
        # In one statement, so an interrupt comes before all of it or after.
        words[ECHO], self.launching = NO_ECHO, (line, words, counts, number, False)
        try:
            self._ops.publish(slot.tensor, counts if before is None else before, step.spaces[0])
            if not is_plain:
                self._place_others(batch, slot.tensor, step, num_fed)
        finally:
            ring.release()
        line.recent.append((number, batch.row_bytes))
        line.counts, line.number, self.step_number, self.launching = counts, number, number, None
        if child:
            self.steps_to_answer = _STEPS_TO_ANSWER

    def _write_limits(self, batch: StepBatch, words: memoryview) -> None:
        """Writes the limits of lengths on the device; lengths of the host were checked against the table."""
        parts, on_host = slot_parts(batch.num_seqs, len(batch.token_ids)), batch.inputs.lengths_on_host
        n, rows, table = batch.num_seqs, batch.rows, self._table
        first_writable = as_many(n, 0) if on_host else table.checks.first_writable_of(rows)
        stored = as_many(n, INT32_MAX) if on_host else table.tokens.stored_len[rows]
        words[parts.first_writable], words[parts.stored] = first_writable.data, stored.data

    def _place_others(self, batch: StepBatch, slot: Tensor, step: DeviceStep, num_fed: int) -> None:
        """Launches the kernels that replace published inputs by those on the device, and place the mask.

        Published values stay if the caller gave no tensor.
        """
        inputs = batch.inputs
        if isinstance(inputs, DeviceInputs):
            in_slot = self._parts_in(slot, batch.num_seqs, len(batch.token_ids))
            has_kv_len = inputs.kv_len is not ON_HOST
            given = GivenInputs(
                inputs.kv_len if has_kv_len else in_slot.kv_len,
                in_slot.q_len if inputs.q_len is ON_HOST else inputs.q_len,
                in_slot.token_ids if inputs.token_ids is ON_HOST else inputs.token_ids,
                in_slot.first_writable,
                in_slot.stored,
                # Tokens of the published step that the caller's kv_len leaves out; of a round, its first step is
                # published.
                inputs.ahead - (batch.num_tokens - num_fed) // max(1, batch.num_seqs) if has_kv_len else 0,
            )
            self._ops.device_inputs(slot, given, step.spaces[0])
        if isinstance(batch.mask, StepMask):
            mask = batch.mask
            for tensors, window_left in step.windows:
                self._ops.place_mask(mask.bits, mask.positions, mask.keys_before, window_left, tensors)
        elif isinstance(batch.mask, TreeMask):
            for tensors, window_left in step.windows:
                self._ops.place_trees(batch.mask.parents, 0, 0, window_left, tensors)
        elif isinstance(batch.mask, TokenSpans):
            # Every layer's window follows from the places of tokens.
            self._ops.place_spans(batch.mask.placed, step.tensors)

    def disregard(self, num_children: int) -> None:
        """Ignores faults of the inputs that were published last, because their step is not run."""
        for line in self._lines[:num_children]:
            if line.counts is not None:
                line.counts[ERROR_WORD].zero_()

    def let_go(self) -> None:
        """Drops all references to the memory of steps, which is freed. Keeps the last step's counts, for its report."""
        if self.launching is not None:
            self._settle()
        for line in self._lines:
            if line.counts is not None and line.counts is not line.rest.counts:
                line.rest.counts.copy_(line.counts)
                line.counts = line.rest.counts

    def find_faults(self) -> None:
        """Finds all faults of steps that were not reported yet. The device has nothing left to do."""
        if self.launching is not None:
            self._settle()
        self.runs.lose_count()  # it costs nothing here, and the effect of a lost run ends here
        for line in self._lines:
            line.find_all(self.found, self._of_last_step)

    def report(self, faults: Sequence[DeviceFault]) -> None:
        """Raises one DeviceFault for these, which include all that were found, if there are any."""
        if faults:
            try:
                raise DeviceFault.of_all(faults)
            except DeviceFault:  # not an interrupt, which may come first
                self.found.clear()
                raise

    def _report_at_once(self) -> None:
        """Raises faults at once, unless other ranks run this step too: then they are raised between two steps."""
        if not self.holds_faults:
            self.report(self.found)

    def _settle(self) -> None:
        """Finishes a publication that an exception has interrupted."""
        assert self.launching is not None
        self.runs.lose_count()
        line, words, counts, number, by_graph = self.launching
        if line.settle(words, counts, number, by_graph=by_graph):
            line.counts, line.number, self.step_number, self.launching = counts, number, number, None
        else:
            self.launching = None

    def hear_of_the_second_half(self) -> None:
        """Gets the echo of a split step's second half when a whole step follows, so that no second half echoes it.

        A step without sequences does, and its echo is there when the ring slots of the first chain have gone round.
        Raises DeviceFault.
        """
        if self.launching is not None:
            self._settle()
        line = self._lines[1]
        if self.steps_to_answer == _STEPS_TO_ANSWER:
            slot = line.ring.acquire(HEADER_WORDS)
            words = slot.words
            line.look(words, self.found)
            self._report_at_once()
            slot_writer(0)(slot.raw, 0, 0, 0, self.step_number, 0, line.number, 0, 0, 0, b"")
            words[ECHO], self.launching = NO_ECHO, (line, words, line.rest.counts, self.step_number, False)
            try:
                self._ops.publish(slot.tensor, line.rest.counts if line.counts is None else line.counts, line.rest)
            finally:
                line.ring.release()
            line.counts, line.number, self.launching = line.rest.counts, self.step_number, None
        elif self.steps_to_answer == 1:
            for words in line.ring.written():
                line.look(words, self.found)
                self._report_at_once()
        self.steps_to_answer -= 1

    def _parts_in(self, slot: Tensor, num_seqs: int, num_ids: int) -> GivenInputs:
        """The parts of a slot that device_inputs() reads, cut once for each slot and size."""
        key = slot.data_ptr(), num_seqs, num_ids
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) == _MOST_PARTS:
                self._parts.clear()
            parts = slot_parts(num_seqs, num_ids)
            # These keep the slot's memory, so that no other slot gets its address.
            found = self._parts[key] = GivenInputs(
                slot[parts.kv_len],
                slot[parts.q_len],
                slot[parts.token_ids],
                slot[parts.first_writable],
                slot[parts.stored],
            )
        return found


def _no_sequences(device: torch.device) -> StepTensors:
    """The tensors of a step that has one padded sequence and one padded token."""
    zeros = partial(torch.zeros, dtype=torch.int32, device=device)
    inputs = {name: zeros(1) for name in ("row_of_seq", "kv_len", "q_len", "token_ids")}
    return StepTensors.of(zeros(0), counts=zeros(COUNT_WORDS), **inputs)

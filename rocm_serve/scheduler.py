"""Scheduler: continuous batching: chooses the sequences of the next step, and the tokens of each. Host values only.

Every step has all decoding sequences, with one token each, and fills up to `chunk` tokens with prefill (chunked
prefill), in order of priority and then of age. While sequences decode, prefill gets fewer tokens, so that the step is
short (StepBudget). The rest of the chunk goes to draft tokens of decoding sequences, which the step verifies. They are
stored after their sequence's last token; rejected ones are overwritten. Drafts take free pages, and never preempt.
Sequences that are held keep their places and pages, and get no token (sampling/coming_masks.py).

Admission: a sequence is admitted when there are pages for all of its tokens, and in the SWA space for its window and a
chunk. It starts with the pages that the prefix cache has for it, and allocates the others chunk by chunk. While other
sequences run, a long cached prefix is looked up over several steps, so that none of them is late. With recurrent
layers, a chunk ends where the prefix cache needs a state, and other prompts get the rest of the step.

Preemption: when pages run out, pages that only the prefix cache holds are evicted first. Then the last sequence in
order is preempted: it frees its pages and waits. It is recomputed later from its prompt and its generated tokens, so it
continues with the same token. A suspect, a sequence that may have caused a device fault, is recomputed too: alone, in
steps of its own, up to its next token, and without pages of the cache.

Priority: a waiting sequence with a better priority preempts running ones, if it can be admitted then. No sequence is
ever preempted for one that comes after it in order. So the first one always progresses, and all finish unless better
ones keep arriving. With priority_aging they finish even then: a sequence's level is its priority, plus one for every
priority_aging steps that were run before it arrived. Levels never change, so at some step, newcomers of any better
priority arrive at a level that is no better.

Overlap: a step may be scheduled while the one before it runs, when its tokens are known only on the device. A sequence
continues with such an unread token, unless this is its last one in any case. If the token turns out to end the
sequence, the sequence was in one step too many, and its tokens of that step are dropped. Decisions that need the tokens
are made after they are read: before a sequence is preempted, and before a suspect runs.
"""

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Set
from collections.abc import Sequence as Many
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array
from rocm_attn.capture.step_times import StepBudget
from rocm_attn.errors import NeverFits, OutOfPages
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.index_spaces import RESERVED_PAGE, RESERVED_ROW, Index, num_pages
from rocm_attn.paging.page_table import PageTable
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.step.metrics import Metrics
from rocm_serve.appended import Appended, Picks, appended_to
from rocm_serve.page_tier import NO_TIER, PageTier
from rocm_serve.prefix_cache import NONE_FOUND, Found, PrefixCache
from rocm_serve.request import ALL_READ, Sequence
from rocm_serve.scheduled_step import (
    NO_SEQUENCE,
    NONE_LEFT_OUT,
    Chosen,
    Lengths,
    PromptRoom,
    ScheduledStep,
    Verified,
    picking_first,
    step_of,
)
from rocm_serve.speculation.drafts import DraftTree

_by_urgency = attrgetter("urgency")

# A row that needs a page gets room for this number of tokens more if there are plenty of pages, and so do the other
# rows of its step: most steps then change nothing in the table.
_TOKENS_AHEAD = 64

# Keys of the prefix cache that a step computes for waiting sequences, and one more for each token of the step before:
# a fraction of a millisecond. Those of a long prompt take several.
_KEYS_OF_STEP = 256

# Each time that idle pages are given back, a space gives back one more per this number of its pages, up to a few
# hundred. Such calls are then rarer, and there is some room for the probe requests on which a fresh graph is checked. A
# page takes about a microsecond, for which every stream waits.
_PAGES_PER_SPARE_ONE, _MOST_SPARE = 64, 256


class _PendingTokens(Exception):
    """A decision depends on tokens that were not read yet."""


class Scheduler:
    """The sequences that wait and those that run.

    Its decisions depend only on the calls and their arguments: schedulers of several ranks that get the same calls
    decide the same.

    metrics:           receive counts of preemptions and of the use of the prefix cache
    budget:            tokens of a step; decodes always run, and a prompt gets at least one token per step
    max_kv_len:        tokens of a sequence's KV; one that is full picks its last token
    steps_until_known: FaultReports.steps_until_known
    priority_aging:    steps in which a sequence that waits gains one priority on new ones; 0: never
    tier:              of the prefix cache

    changes: of the sequences and of the cache; once some are halfway, nothing may be called any longer

    Raises NeverFits for a table that cannot hold even one such sequence.
    """

    def __init__(
        self,
        table: RequestTable,
        metrics: Metrics,
        budget: StepBudget,
        *,
        max_kv_len: int,
        steps_until_known: int,
        priority_aging: int = 0,
        tier: PageTier = NO_TIER,
    ) -> None:
        self._priority_aging, self._num_steps = priority_aging, 0
        self._metrics = metrics
        self._table = table
        self._cache = PrefixCache(table, steps_until_known, tier)
        self.changes = self._cache.changes
        self._budget, self._max_batch_size, self._chunk = budget, budget.max_batch_size, budget.chunk
        self._max_kv_len = max_kv_len
        # All three in the order of urgency.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._suspects: list[Sequence] = []
        self._stops = Counter[int]()  # token -> sequences that run and end with it
        self._has_ahead = False  # whether rows may hold pages that were taken ahead
        self._num_pending = 0  # steps that were launched and not finished
        self._num_keys = _KEYS_OF_STEP  # that may be computed until the next step is launched
        self.num_changes = 0  # how often a sequence was added or has given its row back
        for pages in table.spaces:
            needed = self._most_pages(max_kv_len, budget.chunk, pages)
            if needed > pages.num_usable_pages:
                raise NeverFits(
                    f"one sequence of {max_kv_len} tokens, in steps of up to {budget.chunk}, needs {needed} "
                    f"pages{pages.pages.of} and there are {pages.num_usable_pages}; raise {pages.pages.knob}, or "
                    "lower max_kv_len or chunk"
                )

    @property
    def has_work(self) -> bool:
        """True if any sequence runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that hold no row."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt fits max_kv_len and the pool."""
        request = sequence.request
        if self._priority_aging:
            sequence.level = request.priority + self._num_steps // self._priority_aging
        # the token that is picked last is never stored
        sequence.most_tokens = min(len(request.prompt_token_ids) + request.max_new_tokens, self._max_kv_len + 1)
        insort(self._waiting, sequence, key=_by_urgency)
        self.num_changes += 1

    def decoding(self, limit: int = INT32_MAX) -> list[tuple[Sequence, int]]:
        """The sequences that can use drafts in the next step, with the most drafts of each.

        More would go beyond the most tokens of the sequence. Empty if a suspect is served alone.
        limit: of drafts of a sequence
        """
        if self._suspects:
            return []
        found = []
        for each in self._running:
            num_read = len(each.token_ids)
            most = each.most_tokens - 1 - num_read
            is_next = num_read - each.num_stored == (each.pending_at == ALL_READ)
            if most > 0 and is_next and (each.parameters is None or each.parameters.takes_drafts):
                found.append((each, most if most < limit else limit))
        return found

    def next_step(self, drafts: Mapping[int, DraftTree] = NO_SEQUENCE) -> ScheduledStep | None:
        """The next step; None if it depends on tokens of a launched step, which is to be finished first.

        None also if there is no such step, and all sequences that run are held. There must be work. At most one step is
        not finished.
        drafts: for some sequences of decoding(), by their requests' numbers, no more than it allows. The step takes the
                first ones of each, as many as there is room for
        """
        assert self._num_pending <= 1
        try:
            return self._next_step(drafts)
        except _PendingTokens:
            return None

    def _next_step(self, drafts: Mapping[int, DraftTree]) -> ScheduledStep | None:
        """Does the work of next_step(). Raises _PendingTokens."""
        if self._suspects:
            self._require_all_read()
            suspect = self._suspects[0]
            self._admit_alone(suspect)
            return step_of(*self._continue([suspect], NO_SEQUENCE)[:3])
        self._give_back_ahead()
        self._admit_urgent()
        chosen, verified, lengths, room = self._continue(self._running, drafts)
        self._add_waiting(chosen, room)
        if not chosen.sequences:  # all that run have their last token
            self._require_all_read()
            if any(each.is_held for each in (*self._running, *self._waiting[:1])):
                return None
        assert chosen.sequences, "a running sequence always gets a token, and a lone waiting one is always admitted"
        if self._cache.has_states:
            chosen = picking_first(chosen)
            lengths = Lengths.of(chosen)
        elif len(chosen.new) > len(lengths.rows):
            lengths = Lengths.of(chosen)
        return step_of(chosen, verified, lengths)

    def launched(self, step: ScheduledStep, left_out: Set[int] = NONE_LEFT_OUT) -> None:
        """Notes that a step will run, so that next_step() can go on. All steps before it are finished.

        left_out: places among step.picking of sequences that get no token; a later step takes their last token again
        """
        assert self._num_pending == 0
        self._num_pending = 1
        self._num_steps += 1
        self._num_keys = _KEYS_OF_STEP + step.batch.num_tokens  # a long step leaves the host more time
        stored = step.batch.kv_len.tolist()
        for place, drafts in step.drafts.items():
            stored[place] -= len(drafts.token_ids)
        for place, (sequence, num_stored) in enumerate(zip(step.sequences, stored, strict=True)):
            if sequence.row != RESERVED_ROW:  # else it has ended since the step was scheduled
                sequence.num_stored, sequence.pending_at = num_stored, place
        for sequence in step.sequences[step.num_picks :]:
            sequence.pending_at = ALL_READ
        for sequence in (step.picking[place] for place in left_out):
            sequence.num_stored, sequence.pending_at = len(sequence.token_ids) - 1, ALL_READ
        self._cache.end_step()
        self._enter_pages(step)

    def launched_again(self, step: ScheduledStep) -> None:
        """Notes that the sequences of a step go on with a round that stores their known tokens. All before it is read.

        The round is launched now, or was launched earlier and the one before it is finished now.
        """
        self._num_pending = 1
        for place, sequence in enumerate(step.sequences):
            if sequence.row != RESERVED_ROW:
                sequence.num_stored, sequence.pending_at = len(sequence.token_ids), place

    def make_room(self, kv_len: int, q_len: int) -> bool:
        """Makes room for a row of kv_len tokens, in steps of up to q_len; returns whether there is room.

        The prefix cache alone gives pages back for it.
        """
        needed = [self._most_pages(kv_len, q_len, pages) + 1 for pages in self._table.spaces]
        for space, num in enumerate(needed):
            self._cache.make_room(space, num)
        self._count_cached_pages()
        return all(pages.num_free_pages >= num for pages, num in zip(self._table.spaces, needed, strict=True))

    def reserve_ahead(self, rows: Int32Array, kv_len: Int32Array) -> bool:
        """Makes room for kv_len tokens if there are pages and no sequence waits; returns whether there is room.

        The room is given back before a sequence gives way, or a new one is refused.
        rows, kv_len: int32 [n]; of sequences that run
        """
        table = self._table
        if table.is_reserved(rows, kv_len):
            return True
        held = num_pages(table.room(rows), table.page_size)
        needed = int((num_pages(kv_len, table.page_size) - held).clip(min=0).sum())
        if self._waiting or needed + len(rows) > table.fewest_free_pages:
            return False
        self._has_ahead = True
        table.reserve_all(rows, kv_len)
        return True

    def finish_step(self, step: ScheduledStep, picks: Picks) -> Appended:
        """Takes in the picks of each of step.picking: returns the tokens that each took, and why some end.

        picks: for each the accepted drafts, in order, and then one token more. The K and V of these drafts lie in the
               places of their tokens: those of a tree were moved there by the engine
        A token that ends a sequence is its last one, whatever comes after it. Ended sequences leave their pages. A
        sequence that has ended since the step was scheduled takes nothing.
        """
        may_stop = not self._stops.keys().isdisjoint(chain.from_iterable(picks.token_ids))
        appended = appended_to(step.picking, picks, may_stop=may_stop)
        self._num_pending = 0
        if step.drafts:
            self._enter_accepted(step, appended)
        if step.is_of_a_suspect:
            for sequence in step.picking:
                self._clear_of_suspicion(sequence)
        for place, reason in appended.reasons.items():
            if reason == "error":
                self._cache.forget_row(step.picking[place].cached_row)
            self._end(step.picking[place])
        self._count_cached_pages()
        return appended

    def suspect(self, sequence: Sequence) -> None:
        """Computes a sequence again, alone, from the known tokens. Its stored K and V are given up."""
        if not sequence.is_suspect:
            sequence.is_suspect = True
            insort(self._suspects, sequence, key=_by_urgency)
        if sequence.row != RESERVED_ROW:
            self._preempt(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Gives up a sequence that waits or runs; its pages may be found by others. One that has ended stays so."""
        self._clear_of_suspicion(sequence)
        if sequence.row != RESERVED_ROW:
            self._end(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._count_cached_pages()

    def fail(self, sequence: Sequence) -> None:
        """Gives up a sequence that waits or runs and has failed: others find none of its pages."""
        self._cache.forget_row(sequence.cached_row)
        self.drop(sequence)

    def forget_unknown_pages(self) -> None:
        """Forgets the pages stored since the last step that is known to be free of faults, because a step had one."""
        self._cache.forget_unknown()
        self._count_cached_pages()

    def forget_pages(self) -> None:
        """Forgets all cached pages: no later request finds one."""
        self._cache.clear()
        self._count_cached_pages()

    def all_is_right(self) -> None:
        """Notes that the device was waited for, so that no fault of a step is unreported."""
        self._cache.all_is_right()

    def _enter_pages(self, step: ScheduledStep) -> None:
        """Makes the pages available that a step completes, with known tokens of their sequences.

        This happens at once, before the next step's windows have moved on.
        """
        completed = step.batch.kv_len % self._table.page_size < step.batch.q_len
        # Rejected drafts may have completed some of these; num_stored does not count them.
        if completed.any():
            sequences = [step.sequences[seq] for seq in completed.nonzero()[0].tolist()]
            self._cache.enter(
                (each.cached_row, each.row, each.token_ids, each.num_stored)
                for each in sequences
                if each.row != RESERVED_ROW
            )

    def _enter_accepted(self, step: ScheduledStep, appended: Appended) -> None:
        """Likewise, after a step has verified drafts of these sequences."""
        page_size = self._table.page_size
        completed = [
            each
            for each, token_ids in zip(step.picking, appended.token_ids, strict=True)
            if each.row != RESERVED_ROW and each.num_stored % page_size < len(token_ids)
        ]
        if completed:
            self._table.mark_stored([each.row for each in completed], [each.num_stored for each in completed])
            self._cache.enter((each.cached_row, each.row, each.token_ids, each.num_stored) for each in completed)

    def _end(self, sequence: Sequence) -> None:
        """Stops running a sequence."""
        with self.changes:
            self.num_changes += 1
            self._cache.leave(sequence.cached_row)
            self._table.free(sequence.row)
            self._running.remove(sequence)
            self._stops -= Counter(sequence.stops)
            sequence.row, sequence.pending_at = RESERVED_ROW, ALL_READ

    def _clear_of_suspicion(self, sequence: Sequence) -> None:
        if sequence.is_suspect:
            self._suspects.remove(sequence)
            sequence.is_suspect = False

    def _continue(
        self, running: list[Sequence], drafts: Mapping[int, DraftTree]
    ) -> tuple[Chosen, Verified, Lengths, PromptRoom]:
        """The new tokens of some running sequences, with pages for them, and the room for more tokens in the step.

        If pages run out, drafts are left out, then room that was taken ahead or for rejected drafts is given back, and
        then the last sequence that is not a suspect gives up its pages. A lone sequence has the pools to itself.
        running: all that run, or one of them
        """
        while True:
            chosen, verified, room = self._assigned(running, drafts)
            lengths = rows, stored, new = Lengths.of(chosen)
            if self._cache.has_windows:
                self._evict(chosen.sequences, rows, stored)
            kv_len, page_size = stored + new, self._table.page_size
            if self._table.is_reserved(rows, kv_len):
                return chosen, verified, lengths, room
            # An upper bound: usually as many are free, and nothing has to be counted.
            if sum(chosen.new) // page_size + len(rows) > self._table.fewest_free_pages:
                self._make_room(int((num_pages(kv_len, page_size) - num_pages(stored, page_size)).sum()))
            try:
                self._reserve(rows, stored, kv_len)
            except OutOfPages:
                if drafts:
                    drafts = NO_SEQUENCE
                elif not self._give_back_room():
                    self._preempt(next(other for other in reversed(self._running) if not other.is_suspect))
            else:
                return chosen, verified, lengths, room

    def _reserve(self, rows: Int32Array, stored: Int32Array, kv_len: Int32Array) -> None:
        """Makes room for the tokens of a step, and for some after them if pages are plentiful and no sequence waits.

        Room taken ahead is given back before a sequence gives way, or a waiting one is refused.
        Raises OutOfPages if there is no room for the tokens of the step.
        """
        table, page_size = self._table, self._table.page_size
        if not (self._waiting or self._cache.has_windows):
            own = int((num_pages(kv_len, page_size) - num_pages(stored, page_size)).sum())
            if table.full.num_free_pages >= own + 2 * len(rows) * (_TOKENS_AHEAD // page_size + 1):
                self._has_ahead = True
                kv_len = np.minimum(kv_len + np.int32(_TOKENS_AHEAD), np.int32(table.max_kv_len))
        table.reserve_all(rows, kv_len)

    def _assigned(
        self, running: list[Sequence], drafts: Mapping[int, DraftTree]
    ) -> tuple[Chosen, Verified, PromptRoom]:
        """The new tokens of some running sequences, those that decode first, and the room for more."""
        sequences: list[Sequence] = []
        verified: dict[int, DraftTree] = {}
        prompts: list[Sequence] = []
        for sequence in running:
            if sequence.is_held and not sequence.is_suspect:  # a suspect runs alone, and nothing goes on before
                continue
            num_tokens = len(sequence.token_ids) + (sequence.pending_at != ALL_READ)
            if num_tokens - sequence.num_stored > 1:
                prompts.append(sequence)
            elif num_tokens < sequence.most_tokens:  # else it ends with its unread token, whatever that one is
                sequences.append(sequence)
        num_decoding = len(sequences)
        new = [1] * num_decoding
        room = PromptRoom.beside(num_decoding, len(prompts) + len(self._waiting), self._budget)
        for sequence in prompts:
            if room.is_open:
                sequences.append(sequence)
                new.append(self._take(sequence, room))
        if drafts and num_decoding < self._chunk:
            # Waiting sequences get their share: drafts only speed up sequences that go on without them.
            most = left = room.tokens // 2 if self._waiting else room.tokens
            for seq, sequence in enumerate(sequences[:num_decoding]):
                of_it = drafts.get(sequence.number)
                if of_it is not None and left > 0 and of_it.token_ids:
                    num = len(of_it.token_ids)
                    if num > left:
                        num, of_it = left, of_it.first(left)
                    new[seq], verified[seq] = 1 + num, of_it
                    left -= num
            room.tokens -= most - left
        return Chosen(sequences, new), verified, room

    def _add_waiting(self, chosen: Chosen, room: PromptRoom) -> None:
        """Admits waiting sequences while there are tokens and pages for them, and adds them to those of the step."""
        if not self._may_admit(room):
            return
        claimed = self._claimed(self._running)
        while self._may_admit(room):
            newcomer = self._waiting[0]
            if chosen.sequences and not self._can_find(newcomer):
                break
            found = self._cache.find(newcomer.cached_row, newcomer.token_ids)
            if not self._fits(newcomer, found, claimed):
                break
            self._admit(newcomer, found)
            q_len = self._take(newcomer, room)
            self._reserve_first(newcomer, q_len)
            claimed += self._claimed([newcomer])
            chosen.sequences.append(newcomer)
            chosen.new.append(q_len)

    def _can_find(self, newcomer: Sequence) -> bool:
        """False if the cached prefix of a waiting sequence is looked up further in the next step, so none is late."""
        row = newcomer.cached_row
        known = len(row.keys)
        can_find = self._cache.can_find(row, newcomer.token_ids, self._num_keys)
        self._num_keys -= len(row.keys) - known
        return can_find

    def _may_admit(self, room: PromptRoom) -> bool:
        has_place = room.is_open and len(self._running) < self._max_batch_size
        return bool(self._waiting) and has_place and self._may_begin(self._waiting[0])

    def _may_begin(self, newcomer: Sequence) -> bool:
        """False for a held sequence with recurrent layers, which cannot take a token again: its step would wait."""
        return not (newcomer.is_held and self._cache.has_states)

    def _give_back_room(self) -> bool:
        """Gives back pages that were taken ahead or hold nothing but rejected drafts; True if there were any."""
        given = self._has_ahead = False
        for sequence in self._running:
            kv_len = sequence.num_tokens
            num_needed = num_pages(kv_len, self._table.page_size)
            if self._table.num_held(sequence.row) > num_needed:
                self._table.truncate(sequence.row, kv_len)
                given = True
        return given

    def _evict(self, sequences: list[Sequence], rows: Int32Array, stored: Int32Array) -> None:
        """Gives back the pages that have left the windows of some rows, before others are taken."""
        self._table.evict(rows, stored)
        for sequence in sequences:
            if sequence.num_stored >= sequence.cached_row.moves_at:
                self._cache.move_windows(sequence.cached_row, sequence.num_stored)

    def _make_room(self, needed: int) -> None:
        """Frees pages until `needed` are free in every space, if the cache alone holds enough of them."""
        for space, pages in enumerate(self._table.spaces):
            if pages.num_free_pages < needed:
                spare = min(pages.num_usable_pages // _PAGES_PER_SPARE_ONE, _MOST_SPARE)
                self._cache.make_room(space, needed + spare)

    def _admit_urgent(self) -> None:
        """Admits waiting sequences with a better priority than running ones, which give way if that helps.

        It admits those that get tokens in the next step. Sequences after that step's others in order are admitted
        later.
        """
        while self._waiting and self._running:
            newcomer = self._waiting[0]
            if newcomer.level >= self._running[-1].level or not self._gets_tokens(newcomer):
                return
            if not self._may_begin(newcomer):
                return
            if not self._can_find(newcomer):
                return
            found = self._cache.find(newcomer.cached_row, newcomer.token_ids)
            if len(self._running) < self._max_batch_size and self._has_room(newcomer, found):
                self._admit(newcomer, found)
            elif self._fits_beside_better(newcomer):
                self._preempt(self._running[-1])
            else:
                return

    def _gets_tokens(self, newcomer: Sequence) -> bool:
        """True if the sequences before a new one leave it any of the next step's tokens."""
        num_decoding = sum(sequence.num_left == 1 for sequence in self._running)
        num_waiting = len(self._running) - num_decoding + len(self._waiting)
        room = PromptRoom.beside(num_decoding, num_waiting, self._budget)
        for sequence in self._running:
            if sequence.num_left > 1 and sequence.urgency < newcomer.urgency and room.is_open:
                self._take(sequence, room)
        return room.is_open

    def _take(self, sequence: Sequence, room: PromptRoom) -> int:
        """The tokens of a step that a running sequence gets for its prompt."""
        stored = sequence.num_stored
        return room.take(sequence.num_left, stored, self._cache.next_state(sequence.cached_row, stored))

    def _fits_beside_better(self, newcomer: Sequence) -> bool:
        """True if a sequence has room once all running ones with a worse priority have given way."""
        staying = [held for held in self._running if held.level <= newcomer.level]
        rows, claimed = np.array([held.row for held in staying], np.int32), self._claimed(staying)
        for space, pages in enumerate(self._table.spaces):
            needed = self._most_pages(len(newcomer.token_ids), self._chunk, pages)
            is_held = np.zeros(pages.pages.num_pages, np.bool_)
            is_held[pages.entries_host[rows]] = True
            if needed + claimed[space] + np.count_nonzero(is_held[RESERVED_PAGE + 1 :]) > pages.num_usable_pages:
                return False
        return True

    def _admit_alone(self, suspect: Sequence) -> None:
        """Admits a suspect, however many others have to wait for it."""
        if suspect.row != RESERVED_ROW:
            return
        self._give_back_room()
        while len(self._running) >= self._max_batch_size or not self._has_room(suspect, NONE_FOUND):
            self._preempt(self._running[-1])
        self._admit(suspect, NONE_FOUND)

    def _require_all_read(self) -> None:
        """Raises _PendingTokens while a step is not finished."""
        if self._num_pending:
            raise _PendingTokens

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence. Raises _PendingTokens: its unread tokens would be lost with its row."""
        self._require_all_read()
        with self.changes:
            self._end(sequence)
            sequence.num_stored = 0
            insort(self._waiting, sequence, key=_by_urgency)
        self._metrics.preemptions += 1

    def _give_back_ahead(self) -> None:
        """Gives back pages that were taken ahead, if the first waiting sequence lacks pages and not only a place.

        This comes before the step's own tokens get their room, which would be given back too.
        """
        if self._has_ahead and self._waiting and self._running:
            newcomer = self._waiting[0]
            has_place = len(self._running) < self._max_batch_size
            takes_place = newcomer.level < self._running[-1].level
            if not (has_place or takes_place):
                return
            claimed = self._claimed(self._running)
            if self._fits(newcomer, NONE_FOUND, claimed) or not self._can_find(newcomer):
                return
            if not self._fits(newcomer, self._cache.find(newcomer.cached_row, newcomer.token_ids), claimed):
                self._give_back_room()

    def _has_room(self, newcomer: Sequence, found: Found) -> bool:
        """True if there are pages for a sequence that begins with the found ones, next to those of running ones."""
        return self._fits(newcomer, found, self._claimed(self._running))

    def _fits(self, newcomer: Sequence, found: Found, claimed: NDArray[np.int64]) -> bool:
        """True if there are pages next to those that the running sequences have claimed of each space."""
        for space, pages in enumerate(self._table.spaces):
            needed = self._most_pages(len(newcomer.token_ids), self._chunk, pages)
            if pages.window_left == ALL_KEYS:
                needed -= self._cache.num_held(space, found)  # by other rows
            if needed + claimed[space] > pages.num_free_pages + self._cache.num_idle(space):
                return False
        return True

    def _claimed(self, sequences: Many[Sequence]) -> NDArray[np.int64]:
        """The pages of each space that running sequences have a claim on.

        A sequence claims pages for the rest of its prompt, and one more if it will need it. Without that page a new
        sequence would soon be preempted again.
        """
        rows = np.array([held.row for held in sequences], np.int32)
        end = num_pages(self._table.room(rows), self._table.page_size)
        # int64: a window may be as long as int32 allows, and a chunk is added to it.
        kv_len = np.array([held.num_tokens for held in sequences], np.int64)
        q_len = np.array([self._chunk if held.num_left > 1 else 1 for held in sequences], np.int64)
        most = np.array([held.most_tokens - 1 for held in sequences], np.int64)
        claimed = []
        for pages in self._table.spaces:
            num_held = pages.num_held(rows, end)
            prompt = self._most_pages(kv_len, q_len, pages)
            grows = self._most_pages(most, np.ones_like(q_len), pages) > np.maximum(prompt, num_held)
            claimed.append(np.maximum(prompt - num_held, 0).sum() + np.count_nonzero(grows))
        return np.array(claimed, np.int64)

    def _most_pages(self, kv_len: Index, q_len: Index, pages: PageTable) -> Index:
        """The most pages of a space that a sequence holds on its way to kv_len tokens, in steps of up to q_len."""
        return pages.pages.most_held(kv_len, q_len, self._table.page_size)

    def _admit(self, sequence: Sequence, found: Found) -> None:
        """Makes a waiting sequence run, which begins with the found pages and those of the tier after them."""
        row, page_size, is_new = sequence.cached_row, self._table.page_size, not sequence.times.first_step
        number = self._cache.admit(row, found)
        with self.changes:
            sequence.row, sequence.num_stored = number, len(found) * page_size
            sequence.times.begin(self._metrics.queue_seconds)
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_by_urgency)
            self._stops.update(sequence.stops)
        # It runs by now, so it is not lost if memory for the copies runs out.
        if not sequence.is_suspect and (num_in_tier := self._cache.num_in_tier(row, sequence.token_ids)):
            self._make_room(num_in_tier)
            self._table.reserve(sequence.row, (len(found) + num_in_tier) * page_size)
            sequence.num_stored += self._cache.restore(row, sequence.row, num_in_tier) * page_size
        if is_new:
            sequence.num_cached = sequence.num_stored
        if row.is_cached and not sequence.is_suspect:
            self._metrics.prefix_lookups += len(sequence.token_ids)
            self._metrics.prefix_hits += sequence.num_stored

    def _reserve_first(self, sequence: Sequence, q_len: int) -> None:
        """Takes pages for the next step of a sequence that was admitted. q_len: its tokens"""
        kv_len, page_size = min(len(sequence.token_ids), sequence.num_stored + q_len), self._table.page_size
        self._make_room(num_pages(kv_len, page_size) - sequence.num_stored // page_size)
        self._table.reserve(sequence.row, kv_len)

    def _count_cached_pages(self) -> None:
        self._metrics.cached_pages = self._cache.num_idle(0)

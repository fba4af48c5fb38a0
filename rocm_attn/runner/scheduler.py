"""Scheduler: which sequences run in the next step, with how many tokens. Host values only.

Every step holds all sequences that decode, one token each, and fills up to `chunk` tokens with prompts, oldest first.
A sequence is admitted when the pages for all of its tokens are free, and in the SWA space those for its window and a
chunk; it takes them chunk by chunk. When pages run out the youngest sequence gives its own back and waits. It is
computed again later from its prompt and the tokens it has generated, so it goes on with the token that it would have
had. So is a suspect one, which a fault of the device may be due to: alone, in steps of its own, up to its next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadLogits, NeverFits, OutOfPages
from rocm_attn.paging.index_spaces import RESERVED_ROW
from rocm_attn.paging.page_table import PageTable
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.runner.request import FinishReason, Sequence
from rocm_attn.step.metrics import Metrics


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """A step to be run; pages for its tokens are reserved.

    sequences: seq -> the sequence
    num_picks: how many pick a token after this step: all, or all but the last, whose prompt goes on in the next step
    """

    sequences: tuple[Sequence, ...]
    batch: StepBatch
    num_picks: int

    @property
    def picking(self) -> tuple[Sequence, ...]:
        """The sequences that pick a token."""
        return self.sequences[: self.num_picks]

    @property
    def is_of_a_suspect(self) -> bool:
        """Whether its one sequence is served alone, because a fault may be due to it."""
        return self.sequences[0].is_suspect


class Scheduler:
    """The sequences that wait and those that run.

    metrics:        in which preemptions are counted
    max_batch_size: sequences that run at a time
    chunk:          tokens of a step, at least 1; decodes always run, and a prompt gets at least one token a step
    max_kv_len:     tokens of a sequence's KV; one that is full picks its last token

    Raises CapacityExceeded for a table that cannot hold even one such sequence.
    """

    def __init__(
        self, table: RequestTable, metrics: Metrics, *, max_batch_size: int, chunk: int, max_kv_len: int
    ) -> None:
        self._metrics = metrics
        self._table = table
        self._max_batch_size = max_batch_size
        self._chunk = chunk
        self._max_kv_len = max_kv_len
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order of admission
        for pages in table.spaces:
            needed = self._most_pages(max_kv_len, chunk, pages)
            if needed > pages.num_usable_pages:
                raise NeverFits(
                    f"one sequence of {max_kv_len} tokens, in steps of up to {chunk}, needs {needed} pages"
                    f"{pages.pages.of} and there are {pages.num_usable_pages}; raise {pages.pages.knob}, or lower "
                    "max_kv_len or chunk"
                )

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt fits max_kv_len and the pool."""
        self._waiting.append(sequence)

    def next_step(self) -> ScheduledStep:
        """The next step. There must be work."""
        suspect = next((sequence for sequence in (*self._waiting, *self._running) if sequence.is_suspect), None)
        if suspect is not None:
            self._admit_alone(suspect)
            return _step_of(self._continue([suspect])[0])
        scheduled, budget = self._continue(self._running)
        while budget > 0 and self._can_admit():
            budget -= self._add_prompt(scheduled, self._admit(budget), budget)
        assert scheduled, "a running sequence always gets a token, and a lone waiting one is always admitted"
        return _step_of(scheduled)

    def finish_step(self, step: ScheduledStep, picks: Many[int | BadLogits]) -> list[FinishReason | None]:
        """Take in a token for each of step.picking: why that sequence ends, or None. Ended ones leave their pages."""
        for sequence, q_len in zip(step.sequences, step.batch.q_len.tolist(), strict=True):
            sequence.num_stored += q_len
        for sequence in step.picking:
            sequence.is_suspect = False
        return [self._take(sequence, pick) for sequence, pick in zip(step.picking, picks, strict=True)]

    def suspect(self, sequence: Sequence) -> None:
        """Compute a sequence again, alone, from the tokens that are known. What it has stored is given up."""
        sequence.is_suspect = True
        if sequence in self._running:
            self._preempt(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Give up a sequence that waits or runs; it leaves its pages."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._end(sequence)

    def _take(self, sequence: Sequence, token: int | BadLogits) -> FinishReason | None:
        if isinstance(token, BadLogits):
            self._end(sequence)
            return "error"
        sequence.token_ids.append(token)
        reason: FinishReason | None = None
        if token in sequence.stops:
            reason = "stop"
        elif len(sequence.new_token_ids) >= sequence.request.max_new_tokens or sequence.num_stored >= self._max_kv_len:
            reason = "length"
        if reason is not None:
            self._end(sequence)
        return reason

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._table.free(sequence.row)
        sequence.row = RESERVED_ROW

    def _continue(self, running: list[Sequence]) -> tuple[list[tuple[Sequence, int]], int]:
        """What some that run do next, with room for it, and how many more tokens the step takes.

        The youngest that is not a suspect gives up its pages. A lone sequence has the pools to itself.
        running: all that run, or one of them
        """
        while True:
            scheduled = [(sequence, 1) for sequence in running if sequence.num_left == 1]
            budget = max(self._chunk - len(scheduled), 1)
            for sequence in running:
                if sequence.num_left > 1 and budget > 0:
                    budget -= self._add_prompt(scheduled, sequence, budget)
            rows = np.array([sequence.row for sequence, _ in scheduled], np.int32)
            stored = np.array([sequence.num_stored for sequence, _ in scheduled], np.int32)
            new = np.array([q_len for _, q_len in scheduled], np.int32)
            self._table.evict(rows, stored)
            try:
                self._table.reserve_all(rows, stored + new)
            except OutOfPages:
                self._preempt(next(other for other in reversed(self._running) if not other.is_suspect))
            else:
                return scheduled, budget

    def _admit_alone(self, suspect: Sequence) -> None:
        """Let a suspect run, whatever others have to wait for it."""
        if suspect in self._running:
            return
        self._put_first(suspect)
        while not self._can_admit():
            self._preempt(self._running[-1])
            self._put_first(suspect)
        self._admit(self._chunk)

    def _put_first(self, sequence: Sequence) -> None:
        """Of those that wait."""
        self._waiting.remove(sequence)
        self._waiting.appendleft(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._table.free(sequence.row)
        sequence.row, sequence.num_stored = RESERVED_ROW, 0
        self._waiting.appendleft(sequence)
        self._metrics.preemptions += 1

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._max_batch_size:
            return False
        return all(self._has_room(pages) for pages in self._table.spaces)

    def _has_room(self, pages: PageTable) -> bool:
        """Whether the first that waits can be admitted, as far as one space is concerned."""
        needed = self._most_pages(len(self._waiting[0].token_ids), self._chunk, pages)
        claimed = sum(self._pages_to_come(held, pages) for held in self._running)
        return needed + claimed <= pages.num_free_pages

    def _pages_to_come(self, held: Sequence, pages: PageTable) -> int:
        """What a running sequence has a claim on: the rest of its prompt, and a page if it will want one.

        Without that page a newcomer would soon be preempted again.
        """
        num_held = self._table.num_held(held.row, pages.space)
        prompt = self._most_pages(len(held.token_ids), self._chunk if held.num_left > 1 else 1, pages)
        grows = self._most_pages(self._final_kv_len(held), 1, pages) > max(prompt, num_held)
        return max(0, prompt - num_held) + grows

    def _most_pages(self, kv_len: int, q_len: int, pages: PageTable) -> int:
        """The most pages of a space that a sequence holds on its way to kv_len tokens, in steps of up to q_len."""
        return pages.pages.most_held(kv_len, q_len, self._table.page_size)

    def _final_kv_len(self, sequence: Sequence) -> int:
        """Tokens in its KV at the very end: the last one it picks is never stored."""
        request = sequence.request
        return min(len(request.prompt_token_ids) + request.max_new_tokens - 1, self._max_kv_len)

    def _admit(self, budget: int) -> Sequence:
        sequence = self._waiting.popleft()
        sequence.row = self._table.admit()
        self._table.reserve(sequence.row, min(len(sequence.token_ids), budget))
        self._running.append(sequence)
        return sequence

    @staticmethod
    def _add_prompt(scheduled: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
        q_len = min(sequence.num_left, budget)
        scheduled.append((sequence, q_len))
        return q_len


def _step_of(scheduled: list[tuple[Sequence, int]]) -> ScheduledStep:
    token_ids: list[int] = []
    for sequence, q_len in scheduled:
        token_ids += sequence.token_ids[sequence.num_stored : sequence.num_stored + q_len]
    batch = StepBatch(
        rows=np.array([sequence.row for sequence, _ in scheduled], np.int32),
        kv_len=np.array([sequence.num_stored + q_len for sequence, q_len in scheduled], np.int32),
        q_len=np.array([q_len for _, q_len in scheduled], np.int32),
        token_ids=np.array(token_ids, np.int32),
    )
    # a prompt that is not through took all that was left of the chunk, so nothing comes after it
    last, last_q_len = scheduled[-1]
    num_picks = len(scheduled) - (last_q_len < last.num_left)
    return ScheduledStep(tuple(sequence for sequence, _ in scheduled), batch, num_picks)

"""The requests of a soak: the actions that are drawn for them, and their expected state.

All draws depend only on one random generator and on the numbers of free rows and pages. So a seed gives the same
actions on every device and with every provider; only the numbers of rows and pages may differ.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes, PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import Int32Array, StepBatch, draft_batch
from rocm_attn.errors import BadBatch, OutOfPages
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.request_table import RequestTable
from rocm_lab.soak.checker import SequenceTruth, chain
from rocm_lab.soak.rounds import drafts_after
from rocm_lab.soak.scenario import Action, Scenario


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that holds a row.

    token_ids:  known so far; a request that was preempted knows more than it has stored
    num_stored: tokens in its KV
    num_shared: tokens that other rows may share, or that may be kept. If it goes back before their end, it is
                truncated first
    reached:    the largest position at which a step's new tokens began; at most verify_len before it are taken back
    begun_over: kept tokens that it began over. None is taken back, because the window before them may not be kept
    limit:      tokens at which it ends
    after:      with recurrent layers: tokens after which it has a state, and may go on
    """

    row: int
    token_ids: list[int]
    num_stored: int
    num_shared: int
    limit: int
    reached: int = 0
    begun_over: int = 0
    after: frozenset[int] = frozenset()

    def can_take_back(self, most: int) -> int:
        """Returns how many tokens may be taken back, at most `most` of them from before the last step's tokens."""
        return self.num_stored - max(self.begun_over, self.reached - most)

    def take_back(self, taken: int) -> None:
        """Removes the last stored tokens, at least one, and all known ones after them. Their K and V stay in place."""
        self.num_stored -= taken
        del self.token_ids[self.num_stored :]


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Full pages that are kept without a row.

    ids:       page_no -> the id under which it is kept
    token_ids: of the tokens in the pages
    """

    ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's part in a step.

    parents: as in SequenceTruth
    kept:    the new tokens that are kept after the step, in order; the others are taken back
    """

    request: HeldRequest
    q_len: int
    parents: Int32Array
    kept: tuple[int, ...]

    @classmethod
    def of_chain(cls, request: HeldRequest, q_len: int) -> Turn:
        """Returns a turn whose new tokens follow each other and are kept."""
        return cls(request, q_len, chain(q_len), tuple(range(q_len)))

    @property
    def moves(self) -> bool:
        """True if a kept token must move to another place."""
        return self.kept != tuple(range(len(self.kept)))

    def truth(self) -> SequenceTruth:
        """Returns the tokens of the request after the step, before any are taken back."""
        token_ids = self.request.token_ids[: self.request.num_stored + self.q_len]
        return SequenceTruth(self.request.row, np.array(token_ids, np.int32), self.q_len, self.parents)

    def __str__(self) -> str:
        rejected = f"-{self.q_len - len(self.kept)}" if len(self.kept) < self.q_len else ""
        moved = f"({'>'.join(map(str, self.kept))})" if self.moves else ""
        return f"{self.request.row}:{self.request.num_stored}+{self.q_len}{rejected}{moved}"


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step to be run. Its pages are reserved.

    turns: in the order of the batch
    """

    action: Action
    batch: StepBatch
    pad_to: int | None
    turns: tuple[Turn, ...]

    def batch_on(self, device: torch.device) -> StepBatch:
        """Returns the batch, with the mask of its trees if it has any."""
        if self.action is not Action.TREE:
            return self.batch
        parents = np.full((len(self.turns), max(1, self.batch.max_q_len)), NO_PARENT, np.int32)
        for line, turn in zip(parents, self.turns, strict=True):
            line[: turn.q_len] = turn.parents
        return replace(self.batch, mask=TreeMask(torch.from_numpy(parents).to(device)))

    def moves_on(self, device: torch.device) -> tuple[Accepted, list[int]] | None:
        """Returns accepted paths whose tokens must move, with the places of their sequences; None if none must."""
        seqs = [seq for seq, turn in enumerate(self.turns) if turn.moves]
        moving = [self.turns[seq] for seq in seqs]
        if not moving:
            return None
        path = np.full((len(moving), max(len(turn.kept) for turn in moving)), -1, np.int32)
        for line, turn in zip(path, moving, strict=True):
            line[: len(turn.kept)] = turn.kept
        counts = np.array([len(turn.kept) for turn in moving], np.int32)
        stored = np.array([turn.request.num_stored for turn in moving], np.int32)
        count, kv_len, paths = (torch.from_numpy(values).to(device) for values in (counts - 1, stored + counts, path))
        room = Accepted.empty(*path.shape, device)
        return room._replace(num_accepted=count, kv_len=kv_len, path=paths), seqs

    def truths(self) -> tuple[SequenceTruth, ...]:
        """Returns the tokens of the sequences after the step."""
        return tuple(turn.truth() for turn in self.turns)


class World:
    """Requests that are admitted, grow, share, run out of pages and end.

    counts:  how often each action happened; an action that found nothing to act on is not counted
    history: the last actions, in words
    """

    def __init__(self, scenario: Scenario, table: RequestTable, seed: int) -> None:
        self.scenario = scenario
        self.requests: list[HeldRequest] = []
        self.kept: list[KeptTokens] = []
        self.counts: Counter[Action] = Counter()
        self.history: deque[str] = deque(maxlen=12)
        self._table = table
        # A step of as many new tokens keeps them all next to the state.
        self._kept_tokens = scenario.verify_len
        self._random = np.random.default_rng(seed)
        self._preempted: deque[list[int]] = deque(maxlen=scenario.max_num_rows)
        self._changes: Mapping[Action, Callable[[], None]] = {
            Action.ADMIT: self._admit,
            Action.RESUME: self._resume,
            Action.FORK: self._fork_family,
            Action.KEEP: self._keep,
            Action.BEGIN: self._begin_over,
            Action.DROP: self._drop_any,
            Action.RESERVE: self._reserve_any,
            Action.REJECT: self._reject,
            Action.ABORT: self._abort,
            Action.PREEMPT: self._preempt_any,
        }
        weights = np.array([scenario.weights.get(action, 0) for action in Action])
        self._chances = weights / weights.sum()

    def draw_step(self, bucket_sizes: tuple[int, ...]) -> DrawnStep:
        """Draws changes of requests until a step is drawn. bucket_sizes: the sizes that padding may be forced to"""
        actions = tuple(Action)
        while True:
            action = actions[self._random.choice(len(actions), p=self._chances)]
            change = self._changes.get(action)
            if change is None:
                return self._draw(action, bucket_sizes)
            change()

    def finish(self, step: DrawnStep) -> None:
        """Updates requests after the step was run: counts its kept tokens as stored, and frees complete requests."""
        for turn in step.turns:
            request = turn.request
            request.reached = max(request.reached, request.num_stored)
            if len(turn.kept) < turn.q_len:
                new = request.token_ids[request.num_stored :]
                request.token_ids[request.num_stored :] = [new[token] for token in turn.kept]
            begin, end = request.num_stored, request.num_stored + turn.q_len
            if turn.q_len:
                request.after = frozenset((begin, *(range(begin, end) if turn.q_len <= self._kept_tokens else ()), end))
            request.num_stored += len(turn.kept)
            if request.num_stored >= request.limit:
                self._free(request)

    def free_all(self) -> None:
        """Frees every request, and drops all kept pages."""
        while self.requests:
            self._free(self.requests[-1])
        while self.kept:
            self._drop(self.kept[-1])

    def held_pages(self, space: Space) -> set[int]:
        """Returns the pages of a space that requests hold, or that are kept; page 0 may be among them."""
        of_requests = (self._table.pages_of(request.row, space).tolist() for request in self.requests)
        return set().union(*of_requests, *(self._table.kept.pages(kept.ids, space).tolist() for kept in self.kept))

    def _draw(self, action: Action, bucket_sizes: tuple[int, ...]) -> DrawnStep:
        if action is Action.DRAFT:
            return self._draw_round(bucket_sizes)
        new = self._reserve(self._draw_sequences(action))
        prefixes: Prefixes = NO_PREFIXES
        if action is Action.SHARE:
            families = self._families(new)
            new = [member for family in families for member in family]
            prefixes = SharedPrefixes([self._group(family) for family in families])
        ids: list[int] = []
        for request, q_len in new:
            kv_len = request.num_stored + q_len
            request.token_ids += self._draw_ids(kv_len - len(request.token_ids))
            ids += request.token_ids[request.num_stored : kv_len]
        batch = StepBatch(
            np.array([request.row for request, _ in new], np.int32),
            np.array([request.num_stored + q_len for request, q_len in new], np.int32),
            np.array([q_len for _, q_len in new], np.int32),
            np.array(ids, np.int32),
            prefixes=prefixes,
        )
        pad_to = self._draw_padding(batch.num_seqs, bucket_sizes)
        turn = self._tree if action is Action.TREE else Turn.of_chain
        turns = tuple(turn(request, q_len) for request, q_len in new)
        self._happened(action, f"row:stored+new-rejected [{' '.join(map(str, turns))}], pad_to {pad_to}")
        return DrawnStep(action, batch, pad_to, turns)

    def _draw_round(self, bucket_sizes: tuple[int, ...]) -> DrawnStep:
        """Draws a round for some requests that have stored all known tokens, and have room for its drafts."""
        drafts = self.scenario.rounds[self._below(len(self.scenario.rounds))]
        wanted = self._draw_sequences(Action.DECODE)
        new = self._reserve(
            [
                (request, drafts.tokens)
                for request, _ in wanted
                if request.num_stored == len(request.token_ids)
                and request.num_stored + drafts.tokens <= self.scenario.max_kv_len
            ]
        )
        first: list[int] = []
        turns: list[Turn] = []
        for request, q_len in new:
            first += self._draw_ids(drafts.branches)
            ids, parents = drafts_after(first[-drafts.branches :], drafts, self.scenario.vocabulary)
            request.token_ids += ids
            turns.append(Turn(request, q_len, parents, ()))
        batch = draft_batch(
            np.array([request.row for request, _ in new], np.int32),
            np.array([request.num_stored for request, _ in new], np.int32),
            drafts,
            np.array(first, np.int32),
        )
        pad_to = self._draw_padding(batch.num_seqs, bucket_sizes)
        self._happened(Action.DRAFT, f"{drafts} row:stored+new-rejected [{' '.join(map(str, turns))}], pad_to {pad_to}")
        return DrawnStep(Action.DRAFT, batch, pad_to, tuple(turns))

    def _tree(self, request: HeldRequest, q_len: int) -> Turn:
        """Draws a tree. Most drafts follow the one before; the others have any parent. Those of a path are kept."""
        parents = chain(q_len)
        for token in range(1, q_len):
            if self._chance(0.5):
                parents[token] = self._between(NO_PARENT, token - 1)
        kept: list[int] = []
        after = [0] if q_len else []
        while after:
            kept.append(after[self._below(len(after))])
            after = np.flatnonzero(parents == kept[-1]).tolist() if self._chance(0.8) else []
        return Turn(request, q_len, parents, tuple(kept))

    def _draw_sequences(self, action: Action) -> list[tuple[HeldRequest, int]]:
        """Draws some requests in random order, each with a number of new tokens that it has room for."""
        if action is Action.EMPTY or not self.requests:
            return []
        num_requests = len(self.requests)
        most = min(num_requests, self.scenario.max_num_seqs)
        wanted = most if self._chance(0.5) else 1 + self._below(most)
        if action is Action.EXTEND:
            wanted = min(wanted, 3)
        chosen = [self.requests[i] for i in self._random.permutation(num_requests)[:wanted]]
        if action in (Action.DECODE, Action.SHARE):
            return [(request, 1) for request in chosen]
        if action is Action.IDLE:
            return [(request, 0) for request in chosen]
        if action is Action.VERIFY:
            return self._with_room(chosen, [self.scenario.verify_len] * wanted)
        if action is Action.TREE:
            return self._with_room(chosen, [self._between(0, self.scenario.tree_len) for _ in chosen])
        chunks = [self._between(*self.scenario.chunk_lens) for _ in chosen]
        if action is Action.MIXED:
            others = [min(1, self._below(4)) for _ in chosen[2:]]  # a quarter of them are idle
            chunks = chunks[: self._below(3)]
            chunks += others[: wanted - len(chunks)] + [1] * (wanted - len(chunks) - len(others))
        return self._with_room(chosen, chunks)

    def _families(self, new: list[tuple[HeldRequest, int]]) -> list[list[tuple[HeldRequest, int]]]:
        """Groups the sequences of a step by their first page, in the order in which these come."""
        families: dict[int, list[tuple[HeldRequest, int]]] = {}
        for request, q_len in new:
            families.setdefault(int(self._table.full.entries_host[request.row, 0]), []).append((request, q_len))
        return list(families.values())

    def _group(self, family: list[tuple[HeldRequest, int]]) -> PrefixGroup:
        """Returns a group of sequences that share all of their common whole pages, or some of these."""
        rows = [request.row for request, _ in family]
        most = min(request.num_stored for request, _ in family) // self.scenario.page_size
        entries = self._table.full.entries_host[rows, :most]
        common = int((entries == entries[0]).all(0).cumprod().sum())
        pages = common if self._chance(0.7) else self._below(common + 1)
        return PrefixGroup(len(family), pages * self.scenario.page_size)

    def _with_room(self, chosen: list[HeldRequest], q_lens: list[int]) -> list[tuple[HeldRequest, int]]:
        """Returns the requests with these numbers of new tokens, or with one token if there is no room for more."""
        return [
            (request, q_len if request.num_stored + q_len <= request.limit else 1)
            for request, q_len in zip(chosen, q_lens, strict=True)
        ]

    def _reserve(self, new: list[tuple[HeldRequest, int]]) -> list[tuple[HeldRequest, int]]:
        """Reserves pages for the step. Frees the youngest requests and the oldest kept pages until they suffice.

        Freed requests leave the step.
        """
        while True:
            rows = np.array([request.row for request, _ in new], np.int32)
            kv_lens = np.array([request.num_stored + q_len for request, q_len in new], np.int32)
            for request, _ in new:
                if request.num_stored < request.num_shared:
                    self._truncate(request)
            try:
                self._table.reserve_all(rows, kv_lens)
            except OutOfPages:
                if self.kept and (not self.requests or self._chance(0.3)):
                    self._drop(self.kept[0])
                    continue
                victim = self.requests[-1]
                self._preempt(victim)
                new = [(request, q_len) for request, q_len in new if request is not victim]
            else:
                return new

    def _draw_padding(self, num_seqs: int, bucket_sizes: tuple[int, ...]) -> int | None:
        if not self._chance(self.scenario.pad_chance):
            return None
        above = max(num_seqs, *bucket_sizes) + 1 + self._below(3)
        sizes = [size for size in bucket_sizes if size >= max(1, num_seqs)] + [above]
        return sizes[self._below(len(sizes))]

    def _admit(self) -> None:
        self._start(Action.ADMIT, self._draw_ids(self._between(1, 24)))

    def _resume(self) -> None:
        if self._preempted and self._table.num_free_rows:
            self._start(Action.RESUME, self._preempted.popleft())

    def _start(self, action: Action, token_ids: list[int]) -> None:
        if self._table.num_free_rows:
            request = HeldRequest(self._table.admit(), token_ids, 0, 0, self._between(4, self.scenario.max_kv_len))
            self.requests.append(request)
            self._happened(action, f"row {request.row}, {len(token_ids)} tokens")

    def _fork_family(self) -> None:
        """Forks one to three times, a request or its forks. Some of them reserve pages in between."""
        family = self._any_request()
        for _ in range(self._between(1, 3)):
            if family and self._table.num_free_rows:
                family += self._fork(family[self._below(len(family))])
                if self._chance(0.3):
                    self._reserve_ahead(family[self._below(len(family))])

    def _fork(self, parent: HeldRequest) -> list[HeldRequest]:
        """Forks a request. Returns the child; empty if the parent has the full length of a request."""
        shared = parent.num_stored if self._chance(0.5) else self._below(parent.num_stored + 1)
        if shared == self.scenario.max_kv_len or not self._goes_on(parent, shared):
            return []
        try:
            row = self._table.fork(parent.row, shared)
        except BadBatch:  # the window before the shared tokens is gone; a refusal must change nothing
            return []
        parent.num_shared = max(parent.num_shared, shared)
        limit = self._between(shared + 1, self.scenario.max_kv_len)
        # The child has the same kept part of its windows as its parent, and goes back no further.
        reached = max(shared, parent.reached)
        child = HeldRequest(
            row, parent.token_ids[:shared], shared, shared, limit, reached, min(shared, parent.begun_over)
        )
        child.after = frozenset([shared])
        self.requests.append(child)
        self._happened(Action.FORK, f"row {row} shares {shared} tokens of row {parent.row}")
        return [child]

    def _keep(self) -> None:
        """Keeps the first full pages of a request; in the SWA space those that are still in its window."""
        page_size = self.scenario.page_size
        for request, end in self._to_keep():
            has_swa = self._table.pages_of(request.row, Space.SWA)[:end] > 0
            first = int(np.argmax(has_swa)) if has_swa.any() else end
            ids = [
                *self._table.kept.keep(request.row, 0, first, [Space.FULL]).tolist(),
                *self._table.kept.keep(request.row, first, end).tolist(),
            ]
            if ids:
                self.kept.append(KeptTokens(ids, request.token_ids[: end * page_size]))
                request.num_shared = max(request.num_shared, end * page_size)
                self._happened(Action.KEEP, f"{end} pages of row {request.row}")

    def _to_keep(self) -> list[tuple[HeldRequest, int]]:
        """Returns a request and a number of its full pages, with recurrent layers one after which it has a state."""
        page_size = self.scenario.page_size
        if not self.scenario.recurrent:
            return [(request, self._below(request.num_stored // page_size + 1)) for request in self._any_request()]
        able = [
            (request, tokens // page_size)
            for request in self.requests
            for tokens in sorted(request.after)
            if 0 < tokens <= request.num_stored and tokens % page_size == 0
        ]
        return [able[self._below(len(able))]] if able else []

    def _begin_over(self) -> None:
        """Begins a request over the first kept pages of a request, or over other kept pages with the same tokens."""
        if not self.kept or not self._table.num_free_rows:
            return
        kept, page_size = self.kept[self._below(len(self.kept))], self.scenario.page_size
        end = self._between(1, len(kept.ids))
        if self.scenario.recurrent:
            ends = np.flatnonzero(self._table.kept.have_states(kept.ids))
            end = int(ends[self._below(len(ends))]) + 1 if len(ends) else end
        back = self._below(page_size) if self._chance(0.3) else 0
        kv_len = min(end * page_size - back, self.scenario.max_kv_len - 1)
        ids = [self._any_like(kept, page_no) for page_no in range(-(-kv_len // page_size))]
        try:
            row = self._table.kept.admit_over(ids, kv_len)
        except BadBatch:  # its window or its state is not kept; a refusal must change nothing
            return
        limit = self._between(kv_len + 1, self.scenario.max_kv_len)
        token_ids, after = kept.token_ids[:kv_len], frozenset([kv_len])
        self.requests.append(HeldRequest(row, token_ids, kv_len, kv_len, limit, kv_len, kv_len, after))
        self._happened(Action.BEGIN, f"row {row} over {kv_len} kept tokens")

    def _any_like(self, kept: KeptTokens, page_no: int) -> int:
        """Returns the id of a kept page, or of another one whose tokens are the same up to its end."""
        stop = (page_no + 1) * self.scenario.page_size
        like = [other for other in self.kept if other.token_ids[:stop] == kept.token_ids[:stop]]
        return like[self._below(len(like))].ids[page_no]

    def _drop_any(self) -> None:
        if not self.kept:
            return
        kept = self.kept[self._below(len(self.kept))]
        in_swa = [id_ for id_, page in zip(kept.ids, self._table.kept.pages(kept.ids, Space.SWA), strict=True) if page]
        if in_swa and self._chance(0.4):
            self._table.kept.drop(in_swa, [Space.SWA])
            self._happened(Action.DROP, f"{len(in_swa)} kept pages of the SWA space")
        else:
            self._drop(kept)

    def _drop(self, kept: KeptTokens) -> None:
        self._table.kept.drop(kept.ids)
        self.kept.remove(kept)
        self._happened(Action.DROP, f"{len(kept.ids)} kept pages")

    def _reserve_any(self) -> None:
        for request in self._any_request():
            self._reserve_ahead(request)

    def _reserve_ahead(self, request: HeldRequest) -> None:
        kv_len = min(request.num_stored + self._between(1, 2 * self.scenario.page_size), self.scenario.max_kv_len)
        # A refusal must change nothing.
        with suppress(OutOfPages):
            self._table.reserve(request.row, kv_len)
            self._happened(Action.RESERVE, f"{kv_len} tokens for row {request.row}")

    def _reject(self) -> None:
        most = self.scenario.verify_len
        able = [request for request in self.requests if self._to_take_back(request, most)]
        if able:
            request = able[self._below(len(able))]
            counts = self._to_take_back(request, most)
            taken = counts[self._below(len(counts))]
            request.take_back(taken)
            self._happened(Action.REJECT, f"{taken} tokens of row {request.row}")
            if self._chance(0.3):
                self._truncate(request)

    def _to_take_back(self, request: HeldRequest, most: int) -> list[int]:
        """Returns how many tokens may be taken back, up to `most`."""
        counts = range(1, min(most, request.can_take_back(most)) + 1)
        return [count for count in counts if self._goes_on(request, request.num_stored - count)]

    def _goes_on(self, request: HeldRequest, num_tokens: int) -> bool:
        """True if a step, or a fork, may go on after these tokens of a request."""
        return not self.scenario.recurrent or num_tokens == 0 or num_tokens in request.after

    def _truncate(self, request: HeldRequest) -> None:
        """Drops the pages after the stored tokens, and the shares of other rows in them."""
        self._table.truncate(request.row, request.num_stored)
        request.num_shared = min(request.num_shared, request.num_stored)

    def _abort(self) -> None:
        for request in self._any_request():
            self._free(request)
            self._happened(Action.ABORT, f"row {request.row}")

    def _preempt_any(self) -> None:
        for request in self._any_request():
            self._preempt(request)

    def _preempt(self, request: HeldRequest) -> None:
        self._preempted.append(request.token_ids)
        self._free(request)
        self._happened(Action.PREEMPT, f"row {request.row}")

    def _free(self, request: HeldRequest) -> None:
        self._table.free(request.row)
        self.requests.remove(request)

    def _happened(self, action: Action, what: str) -> None:
        self.counts[action] += 1
        self.history.append(f"{action.value} {what}")

    def _any_request(self) -> list[HeldRequest]:
        """Returns one request, or none if there is none."""
        return [self.requests[self._below(len(self.requests))]] if self.requests else []

    def _draw_ids(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(1, self.scenario.vocabulary, max(0, count)).tolist()
        return drawn

    def _below(self, end: int) -> int:
        return int(self._random.integers(end))

    def _between(self, low: int, high: int) -> int:
        """Returns a number from low to high, both included."""
        return int(self._random.integers(low, high + 1))

    def _chance(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

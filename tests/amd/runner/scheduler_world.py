"""The scheduler with a model that costs nothing: its KV is a dict of slots, its next token a hash of what it reads.

So a token that was stored in a wrong page, not stored at all, or stored twice changes all later tokens. So does a page
that came out of the prefix cache and holds other tokens, or those of another tenant. Recurrent states are the tokens
that are folded into them, in the slots that the table's copies and the steps of rows write.
"""

import random
import zlib
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch

from rocm_attn.capture.step_times import NEVER, StepBudget
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers, StateCopy
from rocm_attn.step.echo import STEPS_UNTIL_ECHO
from rocm_attn.step.metrics import Metrics
from rocm_serve import scheduler
from rocm_serve.appended import Picks
from rocm_serve.prefix_cache import CachedRow
from rocm_serve.request import FinishReason, Request, Sequence
from rocm_serve.sampling.sampling import Sampler
from rocm_serve.scheduled_step import ScheduledStep, pending
from rocm_serve.scheduler import Scheduler
from rocm_serve.speculation.drafts import LAST_TOKEN, DraftTree

VOCAB = 50


def next_token(token_ids: Many[int]) -> int:
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()) % VOCAB


def expected_tokens(request: Request, max_kv_len: int) -> tuple[list[int], FinishReason]:
    """Returns the tokens and finish reason that a request must get, computed by itself."""
    token_ids, new = list(request.prompt_token_ids), 0
    while True:
        token_ids.append(next_token(token_ids))
        new += 1
        if token_ids[-1] in request.stop_token_ids:
            return token_ids[-new:], "stop"
        if new == request.max_new_tokens or len(token_ids) > max_kv_len:
            return token_ids[-new:], "length"


Drafter = Callable[[Many[int], int], DraftTree | None]


def no_drafts(token_ids: Many[int], most: int) -> DraftTree | None:
    return None


def draft_tokens(seed: int, *, trees: bool = True) -> Drafter:
    """Random chains of drafts, and trees if these are allowed; about two of three drafts are right."""
    chooser = random.Random(seed)

    def draft(token_ids: Many[int], most: int) -> DraftTree | None:
        num = chooser.randint(0, min(most, 9))
        is_chain = not trees or chooser.random() < 0.5
        parents = tuple(draft - 1 if is_chain else chooser.randint(LAST_TOKEN, draft - 1) for draft in range(num))
        tokens: list[int] = []
        branches: list[list[int]] = []
        for parent in parents:
            before = branches[parent] if parent != LAST_TOKEN else []
            token = next_token([*token_ids, *before]) if chooser.random() < 0.7 else chooser.randrange(VOCAB)
            tokens.append(token)
            branches.append([*before, token])
        return DraftTree(tuple(tokens), parents) if num else None

    return draft


def right(num: int) -> Drafter:
    """`num` drafts, all of them right."""

    def draft(token_ids: Many[int], most: int) -> DraftTree | None:
        tokens = list(token_ids)
        for _ in range(min(num, most)):
            tokens.append(next_token(tokens))
        return DraftTree.chain(tuple(tokens[len(token_ids) :])) if len(tokens) > len(token_ids) else None

    return draft


def wrong(num: int) -> Drafter:
    """`num` drafts, of which the first one is wrong."""

    def draft(token_ids: Many[int], most: int) -> DraftTree | None:
        token = (next_token(token_ids) + 1) % VOCAB
        return DraftTree.chain((token,) * min(num, most)) if most else None

    return draft


def accepted(token_ids: list[int], drafts: DraftTree) -> list[int]:
    """The drafts that continue the tokens as next_token() does, in order."""
    path: list[int] = []
    while True:
        at, token = path[-1] if path else LAST_TOKEN, next_token([*token_ids, *(drafts.token_ids[i] for i in path)])
        after = [i for i, parent in enumerate(drafts.parents) if parent == at and drafts.token_ids[i] == token]
        if not after:
            return path
        path.append(after[0])


@dataclass(frozen=True)
class FoldedTokens:
    """A recurrent state. start: the first token of the step that wrote it; -1: it was copied

    tokens: those that are folded, and then those that are kept
    """

    tag: int
    start: int
    num_folded: int
    tokens: tuple[int, ...]

    def serves(self, tag: int, num_tokens: int) -> bool:
        """True if a step of a request may go on after these tokens."""
        return tag == self.tag and self.start < num_tokens and self.num_folded <= num_tokens <= len(self.tokens)


@dataclass
class World:
    """A scheduler, its table, and the pool as the fake model sees it.

    draft: the drafts of a sequence with these tokens, up to a limit; None if there are none
    ahead: true if a step is scheduled and run before the tokens of the one before it are read
    beside, doubles_after, read_tokens, sizes: see StepBudget
    keys:  of the prefix cache that a step computes, in addition to one for each token of the step before it
    """

    page_size: int
    num_pages: int
    max_batch_size: int
    chunk: int
    max_kv_len: int
    windows: tuple[SpacePages, ...] = ()
    draft: Drafter = no_drafts
    ahead: bool = False
    priority_aging: int = 0
    beside: int = NEVER
    doubles_after: int = NEVER
    read_tokens: int = 0
    sizes: tuple[int, ...] = ()
    keys: int = 256
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS
    states: dict[int, FoldedTokens] = field(default_factory=dict)  # slot -> what lies there
    pending: list[tuple[ScheduledStep, list[list[int]]]] = field(default_factory=list)
    slots: dict[tuple[Space, int], tuple[str, int]] = field(default_factory=dict)  # the salt, and the token
    sequences: dict[int, Sequence] = field(default_factory=dict)
    steps: list[ScheduledStep] = field(default_factory=list)
    results: dict[int, tuple[list[int], FinishReason]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = RequestTable(
            max_num_seqs=self.max_batch_size,
            max_kv_len=self.max_kv_len,
            num_pages=self.num_pages,
            page_size=self.page_size,
            device=torch.device("cpu"),
            windows=self.windows,
            recurrent=self.recurrent,
        )
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.table,
            self.metrics,
            StepBudget(
                self.max_batch_size,
                self.chunk,
                (min(self.chunk, self.beside),),
                self.doubles_after,
                self.read_tokens,
                sizes=self.sizes,
            ),
            max_kv_len=self.max_kv_len,
            steps_until_known=STEPS_UNTIL_ECHO,
            priority_aging=self.priority_aging,
        )

    def add(self, number: int, request: Request) -> None:
        stops = frozenset(request.stop_token_ids)
        row = CachedRow(request.cache_salt, is_cached=request.prefix_caching)
        sequence = Sequence(
            number, request, stops, Sampler(request.sampling), array("i", request.prompt_token_ids), row
        )
        self.sequences[number] = sequence
        self.scheduler.add(sequence)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._step()

    def _step(self) -> None:
        decoding = [] if self.pending else self.scheduler.decoding()
        drafted = {each.number: self.draft(each.token_ids, most) for each, most in decoding}
        given = {number: drafts for number, drafts in drafted.items() if drafts is not None}
        step = self.scheduler.next_step(given)
        if step is None:
            assert self.pending
            self.read()
            return
        self.table.checks.check(step.batch)
        self.steps.append(step)
        outputs = self._forward(step)
        whole = [sequence.num_stored + q >= sequence.num_tokens for sequence, q in self._q_len(step)]
        assert whole == [True] * step.num_picks + [False] * (len(whole) - step.num_picks)
        self.read()
        with patch.object(scheduler, "_KEYS_OF_STEP", self.keys):
            self.scheduler.launched(step)
        self.pending.append((step, outputs))
        if step.drafts or not self.ahead or not self.scheduler.has_work:
            self.read()

    def read(self) -> None:
        """Reads the tokens of the step that was run last, unless that was done."""
        while self.pending:
            step, outputs = self.pending.pop()
            taken = self.scheduler.finish_step(step, Picks(outputs[: step.num_picks], {}))
            for output, token_ids in zip(outputs, taken.token_ids, strict=False):
                assert list(token_ids) == output[: len(token_ids)]
            for place, reason in taken.reasons.items():
                sequence = step.picking[place]
                self.results[sequence.number] = list(sequence.new_token_ids), reason

    @staticmethod
    def _q_len(step: ScheduledStep) -> Iterator[tuple[Sequence, int]]:
        return zip(step.sequences, step.batch.q_len.tolist(), strict=True)

    def _forward(self, step: ScheduledStep) -> list[list[int]]:
        batch, outputs = step.batch, []
        new = iter(batch.token_ids.tolist())
        self.table.tokens.mark(batch.rows, batch.kv_len)  # as a step does: mark_stored() ends states
        self.table.states.note(batch)
        self._copy_states(self.table.states.copies)
        self.table.states.copies.clear()
        for seq, (sequence, q_len) in enumerate(self._q_len(step)):
            start = sequence.num_stored
            salt, kv_len = sequence.request.cache_salt, start + q_len
            assert kv_len == batch.kv_len[seq] <= self.max_kv_len
            stored = [(salt, self._known(next(new))) for _ in range(q_len)]
            drafts = step.drafts.get(seq)
            known = kv_len if drafts is None else kv_len - len(drafts)
            if self.recurrent.layers:
                self._fold(sequence, start, [token for _, token in stored])
            for table in self.table.spaces:
                slots = self._slots(sequence.row, table.space, kv_len)
                self.slots.update(zip(slots[start:], stored, strict=True))
                first = max(0, start - table.window_left)
                read = [self.slots[slot] for slot in slots[first:known]]
                assert {of for of, _ in read} == {salt}, "nothing of another tenant's is read"
                tokens = [token for _, token in read]
                was = [*sequence.token_ids, *(self._known(pending(at)) for at in [sequence.pending_at] if at >= 0)]
                assert tokens == was[first:known], "what is stored is not what it was"
                if table.space is Space.FULL:
                    path = accepted(tokens, drafts) if drafts is not None else []
                    right = [drafts.token_ids[draft] for draft in path] if drafts is not None else []
                    outputs.append([*right, next_token([*tokens, *right])])
                for place, draft in enumerate(path):  # an engine does so on the device
                    self.slots[slots[known + place]] = self.slots[slots[known + draft]]
        return outputs

    def _copy_states(self, copies: Many[StateCopy]) -> None:
        for copy in copies:
            source = copy.source
            found = [self.states.get(slot) for slot in range(source.slot, source.slot + source.num_slots)]
            serving = [each for each in found if each is not None and each.serves(source.tag, source.tokens)]
            self.states.pop(copy.target, None)
            if serving:
                newest = max(serving, key=lambda each: each.start)
                self.states[copy.target] = FoldedTokens(copy.tag, -1, newest.num_folded, newest.tokens[: source.tokens])

    def _fold(self, sequence: Sequence, start: int, new: list[int]) -> None:
        """Does a step's work on the state of a sequence, and checks that it is the one of its tokens."""
        tag, slots = int(self.table.states.tags[sequence.row]), (2 * sequence.row, 2 * sequence.row + 1)
        before: tuple[int, ...] = ()
        target = slots[0]
        if start:
            serving = [slot for slot in slots if slot in self.states and self.states[slot].serves(tag, start)]
            source = max(serving, key=lambda slot: self.states[slot].start)
            before, target = self.states[source].tokens[:start], slots[slots[0] == source]
            was = [*sequence.token_ids, *(self._known(pending(at)) for at in [sequence.pending_at] if at >= 0)]
            assert before == tuple(was[:start]), "the state holds other tokens than the sequence"
        else:
            self.states.pop(slots[1], None)
        num_folded = start if len(new) <= self.recurrent.kept else start + len(new)
        self.states[target] = FoldedTokens(tag, start, num_folded, (*before, *new))

    def _known(self, token: int) -> int:
        """Returns a token; a token of the previous step that was not read is given by its place there."""
        return token if token >= 0 else self.pending[0][1][-1 - token][-1]

    def _slots(self, row: int, space: Space, kv_len: int) -> list[tuple[Space, int]]:
        pages = self.table.pages_of(row, space).tolist()
        return [(space, pages[i // self.page_size] * self.page_size + i % self.page_size) for i in range(kv_len)]

    def abort(self, number: int) -> None:
        """Aborts a sequence that waits or runs."""
        self.scheduler.drop(self.sequences[number])
        self.results[number] = list(self.sequences[number].new_token_ids), "abort"

"""Makes the draft tokens of rounds: from each sequence's own text, or with a model, from values only the device knows.

A draft model continues from a round that was verified before the host has read the result. It takes in all tokens that
were picked along a chain, or along the longest path that a tree may have. The drafts after the last token that a
sequence took are overwritten by those of the next round. The row of that last token is selected on the device, by the
counts that kernels/speculative/next_step.py leaves there, and so are the lengths at which its steps begin. The host
publishes these steps by bounds, and reads the drafts when a series has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array
from rocm_attn.errors import DeviceFault, FitsLater
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.kernels.speculative.arguments import SpeculativeStep
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.memory import DeviceStep
from rocm_serve.request import Sequence
from rocm_serve.sampling.sending import sent
from rocm_serve.speculation.beams import BeamLevels
from rocm_serve.speculation.device_trees import Chains, DraftTokens, Trees
from rocm_serve.speculation.draft_runners import DraftRunners
from rocm_serve.speculation.drafts import NO_DRAFTS, NOT_DRAWN, DraftTree
from rocm_serve.speculation.drafts_again import Around, DraftsAgain
from rocm_serve.speculation.sealed_cache import SealedCache

# The bound of rounds whose drafts allow a text of any length.
NO_BOUND = INT32_MAX
# Rounds of a step whose drafts the host plans before it makes graphs of the repeated launches.
_PLANNED_FIRST = 1


class DraftsAhead:
    """Drafts that the device has made from the texts of sequences at the end of a series."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, DraftTree]] = {}  # number -> tokens that the sequence had, and its drafts

    def put(self, sequence: Sequence, drafts: DraftTree) -> None:
        """Keeps drafts until the next take()."""
        self._drafts[sequence.number] = len(sequence.token_ids), drafts

    def take(self, decoding: Many[tuple[Sequence, int]]) -> dict[int, DraftTree]:
        """The drafts of decoding sequences that have no more tokens now. decoding: see Drafter.draft"""
        drafts, self._drafts = self._drafts, {}
        found = {}
        for sequence, most in decoding:
            num_tokens, made = drafts.get(sequence.number, (-1, NO_DRAFTS))
            if num_tokens == len(sequence.token_ids):
                found[sequence.number] = made.first(min(most, len(made)))
        return found


class DraftTokenMaker(Protocol):
    """Makes the draft tokens of the rounds of a series, all on the device."""

    @property
    def looks_up(self) -> bool:
        """True if kernels/speculative/next_step.py makes the drafts, from the texts."""
        ...

    @property
    def has_branches(self) -> bool:
        """True if several drafts may come after one token."""
        ...

    @property
    def most_tokens(self) -> int:
        """The greatest length of a text."""
        ...

    @property
    def appended(self) -> Tensor:
        """int32 [most_seqs], on the device: receives how many tokens each sequence got in a round."""
        ...

    def of_step(self, step: DeviceStep, given: SpeculativeStep, picked: Tensor, path: Tensor) -> DraftTokens:
        """The drafts of rounds that repeat a step.

        step:   location of its inputs
        given:  inputs of one of the rounds
        picked: int32 [most_tokens], on the device: the pick after each of its tokens
        path:   int32 [n, W], receives the path of each tree that is accepted
        """
        ...

    def begin(self, sequences: Many[Sequence]) -> bool:
        """True if rounds of these sequences may begin. Their step is launched and has all their drafts."""
        ...

    def reserve(self, num_tokens: Int32Array) -> bool:
        """Makes room for drafts after texts of num_tokens tokens; True if there is room. int32 [n]"""
        ...

    def draft(self, drafted: DraftTokens, bounds: Callable[[], Int32Array]) -> bool:
        """Makes the drafts of the next round; False: there are none, and no round may follow.

        drafted: the drafts of the last round, whose accepted ones were found; receives the new ones
        bounds:  returns int32 [n], upper bounds of the lengths of texts before it
        """
        ...

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """Ends the series after all known tokens were read.

        sequences: place -> the sequence, None if it has ended, or goes on by fewer tokens than the device took
        is_whole:  whether all drafts were made from the current texts of the sequences
        """
        ...


class LookedUp:
    """Draft tokens that are looked up in the texts."""

    looks_up = True
    has_branches = False
    most_tokens = NO_BOUND

    def __init__(self, most_seqs: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.appended = torch.zeros(most_seqs, dtype=torch.int32, device=device)

    def of_step(self, step: DeviceStep, given: SpeculativeStep, picked: Tensor, path: Tensor) -> DraftTokens:
        """Like DraftTokenMaker.of_step."""
        return Chains(given, picked)

    def begin(self, sequences: Many[Sequence]) -> bool:
        """Like DraftTokenMaker.begin."""
        return True

    def reserve(self, num_tokens: Int32Array) -> bool:
        """Like DraftTokenMaker.reserve."""
        return True

    def draft(self, drafted: DraftTokens, bounds: Callable[[], Int32Array]) -> bool:
        """Like DraftTokenMaker.draft."""
        return True

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """Like DraftTokenMaker.end."""


class DraftPosition(NamedTuple):
    """A draft model's position in a text. row: its own; before: first tokens of the text that are not in the row"""

    row: int
    before: int


class Following(Protocol):
    """A drafter whose model may go on in rounds."""

    @property
    def runners(self) -> DraftRunners:
        """The runners of its model."""
        ...

    @property
    def table(self) -> RequestTable:
        """The table of its rows."""
        ...

    def place_of(self, sequence: Sequence) -> DraftPosition | None:
        """Its position in a text, if it has taken in all tokens that it can, else None."""
        ...

    def hand_over(self, drafted: DraftTokens) -> None:
        """Makes the model's next step read the rows that the last step left for its new tokens."""
        ...

    def went_on(self, sequence: Sequence, drafts: DraftTree) -> None:
        """Notes that the model has taken in all tokens of a text that it can, and drafted the next ones."""
        ...

    def leave(self, number: int) -> None:
        """Starts a request anew, because its row holds unknown tokens."""
        ...


class ModelDraftTokens:
    """Drafts of a model that continues where the last ones were verified.

    runtime:    of the model that verifies
    num_drafts: that are verified per sequence
    """

    looks_up = False

    def __init__(self, drafter: Following, runtime: AttentionRuntime, num_drafts: int) -> None:
        self._drafter, self._runners, self._table = drafter, drafter.runners, drafter.table
        self._runtime, self._num_drafts = runtime, num_drafts
        self._few = 1 + self._runners.num_levels
        self.has_branches = self._runners.num_branches > 1
        device = self._runners.device
        with torch.inference_mode(False):
            self._stored = torch.zeros_like(self._runners.appended)
        self._device = device
        self._numbers: list[int] = []
        self._rows = self._before = np.empty(0, np.int32)
        self._words: Tensor | None = None
        # DraftTokens -> the graphs that make its drafts without the host; and how often the host has planned those of
        # the last DraftTokens without graphs.
        self._drafts_again = SealedCache[DraftTokens, DraftsAgain]()
        self._num_planned = 0
        self._planned_for: DraftTokens | None = None
        # The graphs that make the drafts of this series, the tokens that rows have room for, and the most of any.
        self._again: DraftsAgain | None = None
        self._most, self._longest, self._is_reserved = np.empty(0, np.int32), 0, False

    @property
    def appended(self) -> Tensor:
        """Like DraftTokenMaker.appended."""
        return self._runners.appended

    @property
    def most_tokens(self) -> int:
        """Like DraftTokenMaker.most_tokens."""
        return self._table.max_kv_len - self._room

    @property
    def _room(self) -> int:
        """Most tokens that a round stores after a text."""
        return max(self._few, self._runners.room)

    def of_step(self, step: DeviceStep, given: SpeculativeStep, picked: Tensor, path: Tensor) -> DraftTokens:
        """Like DraftTokenMaker.of_step."""
        if not self.has_branches:
            return Chains(given, picked)
        return Trees(self._runtime, step, given, picked, path, few=self._few, recorder=self._runners.recorder)

    def begin(self, sequences: Many[Sequence]) -> bool:
        """Like DraftTokenMaker.begin."""
        places = [place for sequence in sequences if (place := self._drafter.place_of(sequence)) is not None]
        if len(places) < len(sequences):
            return False
        self._numbers = [sequence.number for sequence in sequences]
        self._rows = np.array([place.row for place in places], np.int32)
        self._before = np.array([place.before for place in places], np.int32)
        self._words = None
        stored = np.array([len(sequence.token_ids) for sequence in sequences], np.int32) - self._before
        self._stored[: len(stored)].copy_(sent(stored, self._device))
        return True

    def reserve(self, num_tokens: Int32Array) -> bool:
        """Like DraftTokenMaker.reserve."""
        most = num_tokens - self._before + np.int32(self._room)
        try:
            self._table.reserve_all(self._rows, most)
        except FitsLater:
            return False
        self._most, self._longest, self._is_reserved = most, int(np.maximum.reduce(most)), False
        return True

    def draft(self, drafted: DraftTokens, bounds: Callable[[], Int32Array]) -> bool:
        """Like DraftTokenMaker.draft. A fault of the draft model is no fault of a request: the model starts anew."""
        self._words = None
        try:
            if self._may_run_again(drafted, bounds):
                words = self._run_again()
            else:
                words = self._planned(drafted, bounds() - self._before)
        except DeviceFault:
            return False
        self._words = words
        return True

    def _may_run_again(self, drafted: DraftTokens, bounds: Callable[[], Int32Array]) -> bool:
        """True if graphs alone can make the drafts of a round."""
        again = self._again
        if again is None or not again.is_next(drafted):
            return False
        # If everything reserved fits, lengths need not be checked.
        few = self._few
        return again.fits(self._longest + few) or again.fits(int((bounds() - self._before).max()) + few)

    def _run_again(self) -> Tensor:
        """The words of drafts made by graphs."""
        again = self._again
        assert again is not None
        if not self._is_reserved:
            again.reserve(self._rows, self._most)
            self._is_reserved = True
        words = again.run()
        self._runners.ran_again()
        return words

    def _planned(self, drafted: DraftTokens, ends: Int32Array) -> Tensor:
        """The words of drafts made by the host's steps. Graphs alone may make the next ones. ends: see go_on()"""
        stored = self._stored[: len(self._rows)]
        self._drafter.hand_over(drafted)
        words = self._runners.go_on(self._rows, ends, self._few, drafted.new_tokens(), stored)
        drafted.put(words)
        self._again = self._again_of(drafted, stored)
        if self._again is not None:
            self._again.follow(self._rows, self._most)
            self._is_reserved = True
        return words

    def _again_of(self, drafted: DraftTokens, stored: Tensor) -> DraftsAgain | None:
        """The graphs that repeat the drafts the host has just planned; None: it plans the next ones too."""
        again = self._drafts_again.of(self._runners.runtime.seals.number).get(drafted)
        # Another plan, for longer texts, has other graphs.
        if again is not None and again.are_there():
            return again
        if self._planned_for is not drafted or again is not None:
            self._planned_for, self._num_planned = drafted, 0
        self._num_planned += 1
        if self._num_planned <= _PLANNED_FIRST or self._runners.recorder is None:
            return None
        around = self._runners.around(stored, self._few)
        made = self._made_of(around, drafted, self._runners.recorder) if around is not None else None
        return self._drafts_again.put(drafted, made) if made is not None else None

    def _made_of(self, around: Around, drafted: DraftTokens, recorder: Recorder) -> DraftsAgain | None:
        """The graphs of the launches that rounds repeat; None, now and later, if they are refused."""
        try:
            return DraftsAgain(self._runners.runtime, recorder, around, self._drafter.hand_over, drafted)
        except (RecordingRefused, StaleRecording, torch.OutOfMemoryError):
            self._runners.recorder = None
            return None

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """Like DraftTokenMaker.end."""
        words, self._words = self._words, None
        try:
            found = BeamLevels(words) if words is not None and is_whole and not self._had_fault() else None
        except DeviceFault:
            found = None
        for seq, (number, sequence) in enumerate(zip(self._numbers, sequences, strict=True)):
            if found is None or sequence is None:
                self._drafter.leave(number)
                continue
            row, stored = int(self._rows[seq]), len(sequence.token_ids) - int(self._before[seq])
            self._table.mark_stored([row], [stored])
            self._table.truncate(row, stored)
            self._drafter.went_on(sequence, found.drafts(seq, self._num_drafts, NOT_DRAWN))

    def _had_fault(self) -> bool:
        """True if a step that graphs ran again was cut. Clears the fault."""
        faults = self._runners.faults
        has_fault = bool(faults.any())
        if has_fault:
            faults.zero_()
        return has_fault

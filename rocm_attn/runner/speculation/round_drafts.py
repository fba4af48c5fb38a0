"""What guesses the tokens of rounds: each sequence's own text, or a model, from what the device alone knows.

A model that drafts goes on from a round that was verified without asking what it has brought. It takes in all tokens
that were picked along a chain, or along the longest path that a tree may have; the drafts after the last one that a
sequence took are stored over by the next round's. The row of that last one is chosen on the device, by the counts that
kernels/speculative/next_round.py leaves there, and so are the lengths that its steps begin at. The host publishes these
steps by bounds, and reads the drafts when a series has ended.
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
from rocm_attn.kernels.speculative.arguments import GuessedRound
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.sending import sent
from rocm_attn.runner.speculation.beams import Found
from rocm_attn.runner.speculation.draft_runners import DraftRunners
from rocm_attn.runner.speculation.drafts import NO_DRAFTS, NOT_DRAWN, Drafts
from rocm_attn.runner.speculation.drafts_again import Around, DraftsAgain
from rocm_attn.runner.speculation.kept import Kept
from rocm_attn.runner.speculation.round_trees import Chains, Guessed, Trees
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.memory import DeviceStep

# Of rounds whose guesses any length of a text allows.
NO_BOUND = INT32_MAX
# Rounds of a step whose drafts the host plans before graphs are made of what they repeat.
_PLANNED_FIRST = 1


class DraftsAhead:
    """Drafts that the device has made of what sequences had at the end of a series."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, Drafts]] = {}  # number -> tokens that the sequence had, and its drafts

    def put(self, sequence: Sequence, drafts: Drafts) -> None:
        """Keep them until the next take()."""
        self._drafts[sequence.number] = len(sequence.token_ids), drafts

    def take(self, decoding: Many[tuple[Sequence, int]]) -> dict[int, Drafts]:
        """Those of sequences that decode and have no more tokens now. decoding: as of Drafter.draft"""
        drafts, self._drafts = self._drafts, {}
        found = {}
        for sequence, most in decoding:
            num_tokens, made = drafts.get(sequence.number, (-1, NO_DRAFTS))
            if num_tokens == len(sequence.token_ids):
                found[sequence.number] = made.first(min(most, len(made)))
        return found


class Guesses(Protocol):
    """Guesses the tokens of the rounds of a series, all on the device."""

    @property
    def looks_up(self) -> bool:
        """Whether kernels/speculative/next_round.py makes the guesses, out of the texts."""
        ...

    @property
    def has_branches(self) -> bool:
        """Whether several guesses may come after one."""
        ...

    @property
    def most_tokens(self) -> int:
        """No text may be longer."""
        ...

    @property
    def taken(self) -> Tensor:
        """int32 [most_seqs], on the device: receives how many tokens each sequence got of a round."""
        ...

    def of_step(self, step: DeviceStep, given: GuessedRound, picked: Tensor, path: Tensor) -> Guessed:
        """Guesses of rounds that repeat a step.

        step:   where its inputs are
        given:  what one of the rounds is made of
        picked: int32 [most_tokens], on the device: what is picked after each of its tokens
        path:   int32 [n, W], receives the path of each tree that is accepted
        """
        ...

    def begin(self, sequences: Many[Sequence]) -> bool:
        """Whether rounds of these sequences may begin, whose step is launched and has all their guesses."""
        ...

    def reserve(self, num_tokens: Int32Array) -> bool:
        """Have room for guesses after texts of so many tokens; whether there is. int32 [n]"""
        ...

    def guess(self, guessed: Guessed, bounds: Callable[[], Int32Array]) -> bool:
        """Make the guesses of the next round; False: there are none, and no round may follow.

        guessed: those of the last round, of which was made what is accepted; receives them
        bounds:  gives int32 [n], that the texts were no longer than before it
        """
        ...

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """The series has ended, and all that is known is read.

        sequences: place -> the sequence, None where it has ended, or goes on by fewer tokens than the device took
        is_whole:  whether all guesses were made of what the sequences have now
        """
        ...


class LookedUp:
    """What a text says of its next tokens."""

    looks_up = True
    has_branches = False
    most_tokens = NO_BOUND

    def __init__(self, most_seqs: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.taken = torch.zeros(most_seqs, dtype=torch.int32, device=device)

    def of_step(self, step: DeviceStep, given: GuessedRound, picked: Tensor, path: Tensor) -> Guessed:
        """As Guesses.of_step."""
        return Chains(given, picked)

    def begin(self, sequences: Many[Sequence]) -> bool:
        """As Guesses.begin."""
        return True

    def reserve(self, num_tokens: Int32Array) -> bool:
        """As Guesses.reserve."""
        return True

    def guess(self, guessed: Guessed, bounds: Callable[[], Int32Array]) -> bool:
        """As Guesses.guess."""
        return True

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """As Guesses.end."""


class Place(NamedTuple):
    """Where a model that drafts stands in a text. row: its own; before: tokens of the text that it has none of"""

    row: int
    before: int


class Following(Protocol):
    """A drafter whose model may go on in rounds."""

    @property
    def runners(self) -> DraftRunners:
        """Of its model."""
        ...

    @property
    def table(self) -> RequestTable:
        """Its rows."""
        ...

    def place_of(self, sequence: Sequence) -> Place | None:
        """Where it stands, if it has taken in all of a text that it can, else None."""
        ...

    def hand_over(self, guessed: Guessed) -> None:
        """Have the model's next step read what the new tokens of the step that has run have left for them."""
        ...

    def went_on(self, sequence: Sequence, drafts: Drafts) -> None:
        """The model has taken in all of a text that it can, and drafted what comes next."""
        ...

    def leave(self, number: int) -> None:
        """Begin anew with a request, whose row holds what is not known."""
        ...


class ModelGuesses:
    """Drafts of a model that take up where the last ones were verified.

    runtime:    of the model that verifies
    num_drafts: that are verified of a sequence
    """

    looks_up = False

    def __init__(self, drafter: Following, runtime: AttentionRuntime, num_drafts: int) -> None:
        self._drafter, self._runners, self._table = drafter, drafter.runners, drafter.table
        self._runtime, self._num_drafts = runtime, num_drafts
        self._few = 1 + self._runners.num_levels
        self.has_branches = self._runners.num_branches > 1
        device = self._runners.device
        with torch.inference_mode(False):
            self._stored = torch.zeros_like(self._runners.taken)
        self._device = device
        self._numbers: list[int] = []
        self._rows = self._before = np.empty(0, np.int32)
        self._words: Tensor | None = None
        # Of guesses, what makes their drafts without the host; and how often it has planned those of the last without.
        self._drafts_again = Kept[Guessed, DraftsAgain]()
        self._num_planned = 0
        self._planned_for: Guessed | None = None
        # What makes the drafts of this series, and the tokens that rows have room for, the most of any.
        self._again: DraftsAgain | None = None
        self._most, self._longest, self._is_reserved = np.empty(0, np.int32), 0, False

    @property
    def taken(self) -> Tensor:
        """As Guesses.taken."""
        return self._runners.taken

    @property
    def most_tokens(self) -> int:
        """As Guesses.most_tokens."""
        return self._table.max_kv_len - self._room

    @property
    def _room(self) -> int:
        """Tokens that a round stores after a text, at most."""
        return max(self._few, self._runners.room)

    def of_step(self, step: DeviceStep, given: GuessedRound, picked: Tensor, path: Tensor) -> Guessed:
        """As Guesses.of_step."""
        if not self.has_branches:
            return Chains(given, picked)
        return Trees(self._runtime, step, given, picked, path, few=self._few, recorder=self._runners.recorder)

    def begin(self, sequences: Many[Sequence]) -> bool:
        """As Guesses.begin."""
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
        """As Guesses.reserve."""
        most = num_tokens - self._before + np.int32(self._room)
        try:
            self._table.reserve_all(self._rows, most)
        except FitsLater:
            return False
        self._most, self._longest, self._is_reserved = most, int(np.maximum.reduce(most)), False
        return True

    def guess(self, guessed: Guessed, bounds: Callable[[], Int32Array]) -> bool:
        """As Guesses.guess. A fault of what drafts is no fault of a request: it begins anew."""
        self._words = None
        try:
            if self._may_run_again(guessed, bounds):
                words = self._run_again()
            else:
                words = self._planned(guessed, bounds() - self._before)
        except DeviceFault:
            return False
        self._words = words
        return True

    def _may_run_again(self, guessed: Guessed, bounds: Callable[[], Int32Array]) -> bool:
        """Whether graphs alone make the drafts of a round."""
        again = self._again
        if again is None or not again.is_next(guessed):
            return False
        # Where all that is reserved fits, no length has to be looked at.
        few = self._few
        return again.fits(self._longest + few) or again.fits(int((bounds() - self._before).max()) + few)

    def _run_again(self) -> Tensor:
        """The words of guesses that graphs make."""
        again = self._again
        assert again is not None
        if not self._is_reserved:
            again.reserve(self._rows, self._most)
            self._is_reserved = True
        words = again.run()
        self._runners.ran_again()
        return words

    def _planned(self, guessed: Guessed, ends: Int32Array) -> Tensor:
        """The words of guesses that the host's steps make, after which graphs alone may. ends: as of go_on()"""
        stored = self._stored[: len(self._rows)]
        self._drafter.hand_over(guessed)
        words = self._runners.go_on(self._rows, ends, self._few, guessed.new_tokens(), stored)
        guessed.put(words)
        self._again = self._again_of(guessed, stored)
        if self._again is not None:
            self._again.follow(self._rows, self._most)
            self._is_reserved = True
        return words

    def _again_of(self, guessed: Guessed, stored: Tensor) -> DraftsAgain | None:
        """What makes drafts again that the host has just planned; None: it plans the next ones too."""
        again = self._drafts_again.of(self._runners.runtime.seals.number).get(guessed)
        # Another plan, of longer texts, has other graphs.
        if again is not None and again.are_there():
            return again
        if self._planned_for is not guessed or again is not None:
            self._planned_for, self._num_planned = guessed, 0
        self._num_planned += 1
        if self._num_planned <= _PLANNED_FIRST or self._runners.recorder is None:
            return None
        around = self._runners.around(stored, self._few)
        made = self._made_of(around, guessed, self._runners.recorder) if around is not None else None
        return self._drafts_again.put(guessed, made) if made is not None else None

    def _made_of(self, around: Around, guessed: Guessed, recorder: Recorder) -> DraftsAgain | None:
        """The graphs of what rounds repeat; None, now and later, where they are refused."""
        try:
            return DraftsAgain(self._runners.runtime, recorder, around, self._drafter.hand_over, guessed)
        except (RecordingRefused, StaleRecording, torch.OutOfMemoryError):
            self._runners.recorder = None
            return None

    def end(self, sequences: Many[Sequence | None], *, is_whole: bool) -> None:
        """As Guesses.end."""
        words, self._words = self._words, None
        try:
            found = Found(words) if words is not None and is_whole and not self._had_fault() else None
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
        """Whether a step that graphs ran again was cut."""
        faults = self._runners.faults
        has_fault = bool(faults.any())
        if has_fault:
            faults.zero_()
        return has_fault

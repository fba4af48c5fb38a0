"""ComingMasks: the masks of requests with constraints, which other threads compute while steps run.

A mask is computed as soon as the tokens before it are read. A sequence whose last mask was quick goes into the next
step at once, and its mask is there before the step's tokens are picked. If it is late, the step goes on without the
sequence: nothing is picked for it, and its last token is computed again in a later step. It is then held out of steps
until its mask is there, and so is a sequence whose last mask was slow. So a mask that takes long delays only its text.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

from rocm_attn.paging.index_spaces import RESERVED_ROW
from rocm_serve.request import ALL_READ, Sequence
from rocm_serve.text.matching import MOST_MASK_SECONDS, TextMatcher

# States of a mask, in the order in which the least of every rank's decides.
_LATE, _FAILED, _THERE = range(3)


class _Text(NamedTuple):
    sequence: Sequence
    matcher: TextMatcher


class ComingMasks:
    """The masks of an engine's requests with constraints.

    computed:      is notified of each mask
    least_of_each: see Ranks; ranks decide the same, and call all methods equally often
    may_leave_out: whether a step may go on without a sequence that was launched in it. Otherwise it is held until its
                   mask is there: a recurrent layer cannot take its last token again
    """

    def __init__(
        self, computed: threading.Condition, least_of_each: Callable[[list[int]], list[int]], *, may_leave_out: bool
    ) -> None:
        self._computed, self._least_of_each, self._may_leave_out = computed, least_of_each, may_leave_out
        self._texts: dict[int, _Text] = {}  # by number

    def add(self, sequence: Sequence, matcher: TextMatcher) -> None:
        """Takes in a request."""
        self._texts[sequence.number] = _Text(sequence, matcher)

    def drop(self, number: int) -> None:
        """Forgets a request, if it is one of these."""
        self._texts.pop(number, None)

    def ask(self) -> None:
        """Begins to compute masks after tokens that were read."""
        for sequence, matcher in self._texts.values():
            if sequence.row != RESERVED_ROW and sequence.pending_at == ALL_READ:  # else it has ended
                new = sequence.token_ids[len(sequence.request.prompt_token_ids) + matcher.num_asked :]
                if new:
                    matcher.ask(new)

    def hold(self) -> bool:
        """Decides which sequences are held out of the next step; returns whether any is."""
        if not self._texts:
            return False
        texts = tuple(self._texts.values())
        may_run = self._least_of_each([self._may_run(*text) for text in texts])
        for (sequence, _), may in zip(texts, may_run, strict=True):
            sequence.is_held = not may
        return 0 in may_run

    def _may_run(self, sequence: Sequence, matcher: TextMatcher) -> bool:
        if matcher.is_ready and sequence.pending_at == ALL_READ:
            return True
        return self._may_leave_out and matcher.is_quick and not matcher.was_late

    def left_out(self, picking: Many[Sequence]) -> set[int]:
        """Waits for the masks of a step; returns the places of sequences that it goes on without.

        picking: of the step; those that have ended are not considered
        """
        texts = {
            place: self._texts[sequence.number].matcher
            for place, sequence in enumerate(picking)
            if sequence.number in self._texts and sequence.row != RESERVED_ROW
        }
        if not texts:
            return set()
        most = MOST_MASK_SECONDS if self._may_leave_out else None
        with self._computed:
            self._computed.wait_for(lambda: all(text.is_ready for text in texts.values()), most)
        states = self._least_of_each([_state_of(text) for text in texts.values()])
        left_out = set()
        for (place, text), state in zip(texts.items(), states, strict=True):
            if state == _LATE:
                text.was_late = True
                left_out.add(place)
            elif state == _FAILED:
                text.why = text.why or "the constraint cannot be applied any further: another rank gave up"
        return left_out

    def wait(self) -> None:
        """Waits until a mask is there, but not for long: all sequences that run are held."""
        with self._computed:
            held = [matcher for sequence, matcher in self._texts.values() if sequence.is_held]
            self._computed.wait_for(lambda: any(each.is_ready for each in held), MOST_MASK_SECONDS)


def _state_of(matcher: TextMatcher) -> int:
    if not matcher.is_ready:
        return _LATE
    return _FAILED if matcher.why else _THERE

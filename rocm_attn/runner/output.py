"""Output: what a request has come to so far, as tokens, text and logprobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from rocm_attn.runner.events import NewTokens
from rocm_attn.runner.logprobs import TokenLogprobs
from rocm_attn.runner.request import AbortEvent, Completion, Event, FailureEvent, FinishReason, Sequence, TokenEvent
from rocm_attn.runner.stop_texts import StopTexts
from rocm_attn.runner.tokenizer import TextStream, Tokenizer

# Of tokens without text a step brings hundreds; these are put together without a call of Python for each.
_event: Callable[[tuple[int, int, str, None, None]], TokenEvent] = partial(tuple.__new__, TokenEvent)
_NO_TEXT, _NO_REASON, _NO_LOGPROBS = repeat(""), repeat(None), repeat(None)


@dataclass(slots=True, eq=False)
class Output:
    """What a request has come to so far. An interrupt leaves it as it was before a call, or as it is after it.

    tokenizer:  None: there is no text, and nothing that could end it
    num_tokens: of the sequence's new tokens, those that were told
    reason:     why it has ended; None: it goes on
    error:      why it has failed
    _is_whole:  whether _stream and _stops have seen the tokens that were told, and no others; an interrupt may leave
                more in them
    """

    sequence: Sequence
    tokenizer: Tokenizer | None
    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str = ""
    _is_whole: bool = False
    _stream: TextStream | None = field(init=False, default=None)
    _stops: StopTexts = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def take(
        self,
        token_ids: Many[int],
        reason: FinishReason | None,
        logprobs: Many[TokenLogprobs],
        events: list[Event | NewTokens],
    ) -> int:
        """Take in the tokens of a step, at least one, and add their events to a list; how many there are.

        The tokens after one that completes a text of Request.stop are dropped.
        reason:   why it ends with the last token; None: it goes on as far as its tokens say
        logprobs: of each of them, or none
        """
        end = len(events)
        if self.tokenizer is None and not logprobs:
            new = self._without_text(token_ids, reason)
            # One statement, as below.
            self.num_tokens, self.reason, events[end:] = self.num_tokens + len(new), reason, new
            return len(new)
        told, why = self._with_text(token_ids, reason, logprobs)
        num = self.num_tokens + len(told)
        text = self.text + "".join([event.text for event in told])
        if logprobs:
            self.logprobs[self.num_tokens :] = logprobs[: len(told)]
        # One statement: an interrupt comes before all of this or after it.
        self.num_tokens, self.text, self.reason, self._is_whole, events[end:] = num, text, why, True, told
        return len(told)

    def end_early(self, reason: FinishReason, error: str, events: list[Event | NewTokens]) -> None:
        """Have it end with the tokens that were told, and add the event of that to a list; once.

        error: why it has failed; empty where it was aborted
        """
        if self.reason is not None:
            return
        self._go_on()
        number, end = self.sequence.number, len(events)
        piece = self._rest(self.num_tokens)  # what was held back, of a character that will not be completed for one
        event = FailureEvent(number, piece, error) if error else AbortEvent(number, piece)
        # One statement, as in take().
        self.text, self.reason, self.error, events[end:] = self.text + piece, reason, error, [event]

    @property
    def seconds(self) -> float:
        """Since it was taken."""
        return time.perf_counter() - self.sequence.times.taken

    def completion(self) -> Completion:
        """What it has come to in the end."""
        assert self.reason is not None, "it has ended"
        new = self.sequence.new_token_ids[: self.num_tokens]
        prompt = self.sequence.request.prompt_token_ids
        return Completion(prompt, new, self.text, self.reason, self.error, tuple(self.logprobs))

    def _begin(self) -> None:
        """Have the stream and the stops of a text that begins."""
        request = self.sequence.request
        self._stream = self.tokenizer.stream() if self.tokenizer is not None else None
        self._stops = StopTexts(request.stop, request.include_stop)
        self._is_whole = True

    def _go_on(self) -> None:
        """Have the stream and the stops where the text is, whatever an interrupt has left in them."""
        if not self._is_whole:
            self._begin()
            for num, token in enumerate(self.sequence.new_token_ids[: self.num_tokens], 1):
                self._piece(token, None, num)
        self._is_whole = False

    def _with_text(
        self, token_ids: Many[int], reason: FinishReason | None, logprobs: Many[TokenLogprobs]
    ) -> tuple[list[TokenEvent], FinishReason | None]:
        """The events of tokens, and why the request ends, if it does. Nothing is told by it yet."""
        self._go_on()
        events: list[TokenEvent] = []
        why: FinishReason | None = None
        for place, token in enumerate(token_ids):
            why = reason if place == len(token_ids) - 1 else None
            piece = self._piece(token, why, self.num_tokens + place + 1)
            if self._stops.has_stopped:
                why = "stop"
            told = logprobs[place] if logprobs else None
            events.append(TokenEvent(self.sequence.number, token, piece, why, told))
            if why is not None:
                break
        return events, why

    def _without_text(self, token_ids: Many[int], reason: FinishReason | None) -> list[TokenEvent]:
        """The events of tokens that have no text, which could end it."""
        number = self.sequence.number
        if len(token_ids) == 1:  # of each plain step; what follows takes three times as long for it
            return [TokenEvent(number, token_ids[0], "", reason)]
        events = list(map(_event, zip(repeat(number), token_ids, _NO_TEXT, _NO_REASON, _NO_LOGPROBS, strict=False)))
        if reason is not None:
            events[-1] = TokenEvent(number, token_ids[-1], "", reason)
        return events

    def _piece(self, token: int, why: FinishReason | None, num: int) -> str:
        """The text that a token brings. why: the request ends with it; num: of the new tokens, with this one"""
        if self._stream is None:
            return ""
        # a stop token need not be a special one; it is never part of the text
        text = "" if why == "stop" else self._stream.push(token)
        piece = self._stops.push(text, counts=num > self.sequence.request.min_tokens)
        return piece + (self._rest(num) if why is not None else "")

    def _rest(self, num: int) -> str:
        """What neither the stream nor the stops have let go. num: as of _piece"""
        if self._stream is None:
            return ""
        counts = num > self.sequence.request.min_tokens
        return self._stops.push(self._stream.finish(), counts=counts) + self._stops.finish()

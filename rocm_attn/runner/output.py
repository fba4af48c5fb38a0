"""Output: what a request has come to so far, as tokens, text and logprobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from rocm_attn.runner.logprobs import TokenLogprobs
from rocm_attn.runner.request import Completion, FinishReason, Sequence, TokenEvent
from rocm_attn.runner.stop_texts import StopTexts
from rocm_attn.runner.tokenizer import TextStream, Tokenizer

# Of tokens without text a step brings hundreds; these are put together without a call of Python for each.
_event: Callable[[tuple[int, int, str, None, None]], TokenEvent] = partial(tuple.__new__, TokenEvent)
_NO_TEXT, _NO_REASON, _NO_LOGPROBS = repeat(""), repeat(None), repeat(None)


@dataclass(slots=True, eq=False)
class Output:
    """What a request has come to so far.

    stream: None without a tokenizer; then there is no text, and nothing that could end it
    """

    sequence: Sequence
    stream: TextStream | None
    stops: StopTexts
    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: Sequence, tokenizer: Tokenizer | None) -> Output:
        request = sequence.request
        stream = tokenizer.stream() if tokenizer is not None else None
        return cls(sequence, stream, StopTexts(request.stop, request.include_stop))

    def take(
        self, token_ids: Many[int], reason: FinishReason | None, logprobs: Many[TokenLogprobs]
    ) -> tuple[list[TokenEvent], FinishReason | None]:
        """Take in the tokens of a step, at least one; their events, and why the request ends, if it does.

        The tokens after one that completes a text of Request.stop are dropped.
        reason:   why it ends with the last token; None: it goes on as far as its tokens say
        logprobs: of each of them, or none
        """
        if self.stream is None and not logprobs:
            return self._without_text(token_ids, reason), reason
        events: list[TokenEvent] = []
        why: FinishReason | None = None
        for place, token in enumerate(token_ids):
            why = reason if place == len(token_ids) - 1 else None
            piece = self._piece(token, why)
            if self.stops.has_stopped:
                why = "stop"
            told = logprobs[place] if logprobs else None
            if told is not None:
                self.logprobs.append(told)
            events.append(TokenEvent(self.sequence.number, token, piece, why, told))
            if why is not None:
                break
        return events, why

    @property
    def seconds(self) -> float:
        """Since it was taken."""
        return time.perf_counter() - self.sequence.times.taken

    def last_text(self) -> str:
        """What was held back, of a character that will not be completed for one; it is part of the text now."""
        piece = self._rest()
        self.text += piece
        return piece

    def completion(self, reason: FinishReason, error: str = "") -> Completion:
        """What it has come to in the end."""
        new = self.sequence.new_token_ids[: self.num_tokens]
        request = self.sequence.request
        return Completion(request.prompt_token_ids, new, self.text, reason, error, tuple(self.logprobs))

    def _without_text(self, token_ids: Many[int], reason: FinishReason | None) -> list[TokenEvent]:
        """The events of tokens that have no text, which could end it."""
        self.num_tokens += len(token_ids)
        number = self.sequence.number
        if len(token_ids) == 1:  # of each plain step; what follows takes three times as long for it
            return [TokenEvent(number, token_ids[0], "", reason)]
        events = list(map(_event, zip(repeat(number), token_ids, _NO_TEXT, _NO_REASON, _NO_LOGPROBS, strict=False)))
        if reason is not None:
            events[-1] = TokenEvent(number, token_ids[-1], "", reason)
        return events

    def _piece(self, token: int, why: FinishReason | None) -> str:
        """The text that a token brings. why: the request ends with it"""
        self.num_tokens += 1
        if self.stream is None:
            return ""
        # a stop token need not be a special one; it is never part of the text
        text = "" if why == "stop" else self.stream.push(token)
        piece = self.stops.push(text, counts=self.num_tokens > self.sequence.request.min_tokens)
        piece += self._rest() if why is not None else ""
        self.text += piece
        return piece

    def _rest(self) -> str:
        """What neither the stream nor the stops have let go."""
        if self.stream is None:
            return ""
        counts = self.num_tokens > self.sequence.request.min_tokens
        return self.stops.push(self.stream.finish(), counts=counts) + self.stops.finish()
